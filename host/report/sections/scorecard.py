"""The claims: what makes each a success, a failure or mixed, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from host.report.inputs import InputError, Inputs
from host.report.page import Html, Section, command, esc, paragraph, tag
from host.report.sections import capacity
from host.report.sections.bytes_by_batch import sources
from host.routing import independent
from host.seconds import SecondsError, calculate

SUCCESS, MIXED, FAILURE, UNKNOWN = "success", "mixed", "failure", "unknown"
SIGNS = {SUCCESS: "✓", MIXED: "◐", FAILURE: "✗", UNKNOWN: "?"}


@dataclass(frozen=True)
class Claim:
    """A claim and its rules; ``check`` gives the verdict, the figure in words and where that is from."""

    id: str
    claim: str
    success: str
    failure: str
    command: str
    check: Callable[[Inputs], tuple[str, str, str]]
    """Between success and failure: mixed."""
    before: bool = False
    """The rule was written down before the first run that it judges."""


@dataclass(frozen=True)
class Result:
    claim: Claim
    verdict: str
    figure: str
    provenance: str


def _three(value: float, *, good: Callable[[float], bool], bad: Callable[[float], bool]) -> str:
    return SUCCESS if good(value) else FAILURE if bad(value) else MIXED


def _share(right: Sequence[bool]) -> str:
    """All, none or some."""
    return UNKNOWN if not right else SUCCESS if all(right) else MIXED if any(right) else FAILURE


def _bits(inputs: Inputs) -> tuple[str, str, str]:
    token, suite = inputs.need("token"), inputs.need("suite")
    right = [token["bit_exact"], suite["same_logit_bits"]]
    text = f"{token['outputs']:,} outputs of {token['layers']} layers equal: {_yes(right[0])}; "
    text += f"logits of {suite['tokens_generated']} tokens: {_yes(right[1])}"
    return SUCCESS if all(right) else FAILURE, text, "measured: every output compared"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _selected_cycles(inputs: Inputs) -> tuple[str, str, str]:
    token, other = inputs.need("token"), inputs.upstream()["block_cycles"]["selected"]
    value = token["cycles_per_block"]
    return (
        _three(value, good=lambda each: each <= 16.25, bad=lambda each: each >= other),
        f"{value:.2f} cycles; sw-ml-study/emufpga's model {other}",
        token["provenance"]["cycles"],
    )


def _drained_cycles(inputs: Inputs) -> tuple[str, str, str]:
    rows, other = inputs.need("layer_cycles")["rows"], inputs.upstream()["block_cycles"]["drained"]
    tape = next(row for row in rows if row["mode"] == "tape")
    same = next(
        row for row in rows if (row["mode"], row["lanes"], row["tokens"]) == ("selected", tape["lanes"], tape["tokens"])
    )
    value = (tape["cycles"] - same["cycles"]) / (tape["blocks"] - same["blocks"])
    verdict = _three(value, good=lambda each: each <= 14, bad=lambda each: each >= other)
    return (
        verdict,
        f"{value:.2f} cycles; sw-ml-study/emufpga's model {other}",
        "derived: (tape - selected) / drained blocks, counted",
    )


def _faults(inputs: Inputs) -> tuple[str, str, str]:
    total = inputs.need("faults")["total"]
    bad = total["wrong"] + total["hung"] + total["crashed"] + total["unseen"]
    text = f"{total['faults']:,} faults: {total['wrong']} wrong, {total['hung']} hung, {total['unseen']} unseen; "
    text += f"{total['repaired']:,} repaired"
    return SUCCESS if bad == 0 else FAILURE if total["wrong"] else MIXED, text, "counted: one fault at a time"


def _netlist(inputs: Inputs) -> tuple[str, str, str]:
    netlist = inputs.need("netlist")
    differ = sum(layer["outputs_that_differ"] for layer in netlist["layers"])
    outputs = sum(layer["outputs"] for layer in netlist["layers"])
    return (
        SUCCESS if netlist["equal"] else FAILURE,
        f"{differ} of {outputs:,} outputs differ",
        netlist["provenance"]["outputs_that_differ"],
    )


def _memory(inputs: Inputs) -> tuple[str, str, str]:
    rows = inputs.need("capacity")["rows"]
    ours, theirs = rows["selected"]["memory"]["peak"], rows["llama.cpp, read"]["memory"]["peak"]
    saved = {
        name: rows[f"resident{name}"]["memory"]["peak"] - rows[f"selected{name}"]["memory"]["peak"]
        for name in ("", ", bfloat16")
    }
    verdict = (
        SUCCESS if min(saved.values()) >= 700e6 and ours < theirs else FAILURE if min(saved.values()) <= 0 else MIXED
    )
    text = f"{ours / 1e6:,.0f} MB; resident {saved[''] / 1e6:,.0f} MB more, llama.cpp {theirs / 1e6:,.0f} MB"
    return verdict, text, "measured: peak of a process, once a row"


def _capacity(inputs: Inputs) -> tuple[str, str, str]:
    size = capacity.sizes("qwen3-30b")
    contexts = {gb: capacity.longest(size, gb * 10**9, "serial") for gb in capacity.MEMORIES_GB}
    resident = capacity.longest(size, 16 * 10**9, "resident")
    verdict = SUCCESS if contexts[8] >= 8192 and resident < 0 else FAILURE if contexts[16] < 8192 else MIXED
    return (
        verdict,
        f"serial: {contexts[8]:,} tokens in 8 GB; resident in 16 GB: {capacity._context(resident)}",
        "derived: floors, activations aside",
    )


def _ahead(inputs: Inputs) -> tuple[str, str, str]:
    gains = {mode["mode"]: mode["gain_of_reading_ahead"]["framing"] for mode in inputs.need("storage")["modes"]}
    verdict = (
        SUCCESS
        if all(gain["min"] > 0 for gain in gains.values())
        else FAILURE
        if all(gain["median"] <= 0 for gain in gains.values())
        else MIXED
    )
    return (
        verdict,
        "; ".join(
            f"{name} {gain['median']:+.0%} ({gain['min']:+.0%} to {gain['max']:+.0%})" for name, gain in gains.items()
        ),
        "measured: median (min-max)",
    )


def _feed(inputs: Inputs) -> tuple[str, str, str]:
    storage = inputs.need("storage")
    shares = {mode["mode"]: mode["share_of_ceiling"]["feed"]["median"] for mode in storage["modes"]}
    verdict = _share([share >= storage["goal"] for share in shares.values()])
    return verdict, "; ".join(f"{name} {share:.0%}" for name, share in shares.items()), "measured: medians"


def _sharing(inputs: Inputs) -> tuple[str, str, str]:
    found, missing = sources(inputs)
    if missing:
        raise InputError(missing[0])
    ratios = {
        source.name: union.mean / independent(source.experts, source.used, 8)
        for source in found
        for union in source.unions
        if union.batch == 8
    }
    return (
        _share([ratio < 1 for ratio in ratios.values()]),
        "; ".join(f"{name} {ratio:.0%}" for name, ratio in ratios.items()),
        "derived: counted union / formula, batch 8",
    )


def _accuracy(inputs: Inputs) -> tuple[str, str, str]:
    ratios = [row["q8_k"] / row["int16_blocks"] for row in inputs.need("accuracy")["errors"].values()]
    verdict = _three(min(ratios), good=lambda each: each >= 10, bad=lambda each: each < 1)
    return verdict, f"{min(ratios):.0f} to {max(ratios):.0f} times less", "measured: against float64"


def _hls4ml(inputs: Inputs) -> tuple[str, str, str]:
    errors = inputs.need("hls4ml")["errors"]
    golden = {row["size"]: row["relative_rms_error"] for row in errors["golden"]}
    ratios = [
        row["relative_rms_error"] / golden[row["size"]]
        for row in errors["rows"]
        if row["relative_rms_error"] is not None
    ]
    return (
        _share([ratio > 1 for ratio in ratios]),
        f"{min(ratios):,.0f} to {max(ratios):,.0f} times less",
        "measured: against float64",
    )


def _answers(inputs: Inputs) -> tuple[str, str, str]:
    suite = inputs.need("agents")["workloads"]["suite"]
    right = [row["right"]["value"] for row in suite["rows"]]
    text = f"{min(right):g} to {max(right):g} of {suite['tasks']}, {len(right)} rows"
    return (
        SUCCESS if min(right) == suite["tasks"] else MIXED if min(right) >= 0.9 * suite["tasks"] else FAILURE,
        text,
        "measured: exact answers",
    )


def _company(inputs: Inputs) -> tuple[str, str, str]:
    suite = inputs.need("agents")["workloads"]["suite"]
    first, last = suite["slots"][0], suite["slots"][-1]
    rows = {
        (row["home"], row["n"]): row["tasks_per_hour"]["value"]
        for row in suite["rows"]
        if row["placement"] == "selected"
    }
    gains = {home: rows[home, last] / rows[home, first] for home, n in rows if n == first}
    verdict = _three(min(gains.values()), good=lambda each: each >= 1.2, bad=lambda each: each < 1)
    return (
        verdict,
        "; ".join(f"{home} {gain:.2f} times" for home, gain in gains.items()),
        "derived: modelled clock, within one row",
    )


def _cache(inputs: Inputs) -> tuple[str, str, str]:
    suite = inputs.need("agents")["workloads"]["suite"]
    n = suite["slots"][-1]
    rows = {
        (row["placement"], row["home"]): row["tasks_per_hour"]["value"]
        for row in suite["rows"]
        if row["n"] == n and row["home"]
    }
    gains = {home: rows["cache", home] / rows["selected", home] for placement, home in rows if placement == "cache"}
    verdict = _three(max(gains.values()), good=lambda each: min(gains.values()) > 1.02, bad=lambda each: each <= 1.02)
    return (
        verdict,
        "; ".join(f"{home} {gain:.2f} times" for home, gain in gains.items()),
        f"derived: modelled clock, {n} at a time",
    )


def _speed(own: bool) -> Callable[[Inputs], tuple[str, str, str]]:
    def check(inputs: Inputs) -> tuple[str, str, str]:
        report = calculate(batches=(1,), home_names=None if own else ["all"])
        known = [row for row in report["rows"] if row["tokens_per_second"]["value"] is not None]
        unknown = sorted({row["board"] for row in report["rows"] if row["clock"]["value"] is None})
        if not known:
            return UNKNOWN, "no board has a routed clock", "unknown"
        best = max(known, key=lambda row: row["tokens_per_second"]["value"])
        value = best["tokens_per_second"]["value"]
        text = f"{value:.3g} tokens/s: {best['board']}, {best['home']}"
        text += "" if best["board_has_it"] else ", which it does not have"
        if unknown:
            text += f"; clock unknown: {', '.join(unknown)}"
        return (
            _three(value, good=lambda each: each >= 5, bad=lambda each: each < 1),
            text,
            best["tokens_per_second"]["provenance"],
        )

    return check


def _clocks(inputs: Inputs) -> tuple[str, str, str]:
    boards = [each.data for each in inputs.boards() if each.data]
    known = [board for board in boards if board["clock_hz"]]
    fast = [board for board in known if board["clock_hz"] >= 100e6]
    text = f"{len(fast)} of {len(boards)} results at 100 MHz or more; {len(boards) - len(known)} clocks unknown"
    return _share([board in fast for board in boards]), text, "routed: worst of each board's seeds"


def _board(inputs: Inputs) -> tuple[str, str, str]:
    return UNKNOWN, "no board has run it", "unknown"


def _gpu(inputs: Inputs) -> tuple[str, str, str]:
    values = [
        row["peak_vram"]["value"] for report in inputs.need("agents")["workloads"].values() for row in report["rows"]
    ]
    known = [value for value in values if value is not None]
    if not known:
        return UNKNOWN, "no row was measured beside a GPU", "unknown"
    return SUCCESS, f"{len(known)} rows measured", "measured: torch.cuda.max_memory_allocated"


def _power(inputs: Inputs) -> tuple[str, str, str]:
    rows = [row for report in inputs.need("agents")["workloads"].values() for row in report["rows"]]
    known = [row for row in rows if row["watts"]["value"] is not None]
    if not known:
        return UNKNOWN, "no meter could be read, and no board has run", "unknown"
    return MIXED, f"{len(known)} of {len(rows)} rows measured", "measured: RAPL or NVML"


CLAIMS = (
    Claim(
        "bits",
        "The hardware computes what the golden model says, bit for bit, in any schedule and company",
        "every output and logit equal",
        "one differs",
        "make sim-token; make suite",
        _bits,
        before=True,
    ),
    Claim(
        "netlist",
        "What synthesis makes of it computes the same",
        "no output differs",
        "one does",
        "make netlist",
        _netlist,
        before=True,
    ),
    Claim(
        "faults",
        "A damaged link or storage never gives a wrong number, and nothing hangs",
        "none wrong, hung, crashed or unseen",
        "one wrong",
        "make faults",
        _faults,
        before=True,
    ),
    Claim(
        "selected",
        "A selected block takes 16 cycles and hardly more over a whole token",
        "≤ 16.25 cycles",
        "no better than the other model",
        "make sim-token",
        _selected_cycles,
        before=True,
    ),
    Claim(
        "drained",
        "A block that nobody wants passes faster than a selected one",
        "≤ 14 cycles",
        "no better than the other model",
        "make layer-cycles",
        _drained_cycles,
        before=True,
    ),
    Claim(
        "answers",
        "A whole model answers as it does elsewhere",
        "all tasks right in every placement",
        "less than 90 % right in one",
        "make agents",
        _answers,
    ),
    Claim(
        "accuracy",
        "Its arithmetic is closer to exact than llama.cpp's 8-bit activations",
        "10 times or more, every distribution",
        "worse in one",
        "make accuracy",
        _accuracy,
    ),
    Claim(
        "hls4ml",
        "And than hls4ml's types, whatever their bits",
        "every row worse than ours",
        "none worse",
        "make hls4ml",
        _hls4ml,
    ),
    Claim(
        "memory",
        "It takes less memory than keeping experts resident, in PyTorch and in llama.cpp",
        "≥ 700 MB less than resident, and less than llama.cpp",
        "no less than resident",
        "make capacity",
        _memory,
        before=True,
    ),
    Claim(
        "capacity",
        "A model that does not fit 16 GB runs in 8 GB",
        "≥ 8,192 tokens of context in 8 GB",
        "not even in 16 GB",
        "emufpga ledger FILE.gguf",
        _capacity,
    ),
    Claim(
        "sharing",
        "Tokens in company share experts, more than chance",
        "union below the formula, every source",
        "in none",
        "make replay; make suite",
        _sharing,
    ),
    Claim(
        "company",
        "Eight requests at a time get more done than one",
        "≥ 1.2 times on every link",
        "less on one",
        "make agents",
        _company,
    ),
    Claim("cache", "A cache of experts in RAM pays", "more than 2 % on every link", "on none", "make agents", _cache),
    Claim(
        "ahead",
        "Reading ahead earns its thread",
        "whole range above zero, every kind of read",
        "no median above zero",
        "emufpga bench storage",
        _ahead,
    ),
    Claim(
        "feed",
        "The feed reaches 90 % of what storage gives",
        "every kind of read",
        "none",
        "emufpga bench storage",
        _feed,
        before=True,
    ),
    Claim("clocks", "Every described board reaches 100 MHz", "all results", "none", "make boards; make synth", _clocks),
    Claim(
        "speed",
        "Granite answers at reading speed on a board's own link, batch 1",
        "≥ 5 tokens/s",
        "below 1",
        "emufpga seconds",
        _speed(True),
    ),
    Claim(
        "what-if",
        "It would on a link or memory that a routed board could be given",
        "≥ 5 tokens/s",
        "below 1",
        "emufpga seconds --home all",
        _speed(False),
    ),
    Claim(
        "board", "A board has run it", "outputs equal on silicon", "they differ", "emufpga selftest --device", _board
    ),
    Claim(
        "gpu",
        "It was measured beside a small GPU",
        "VRAM and speed measured",
        "does not run",
        "emufpga bench agents --torch-device cuda",
        _gpu,
    ),
    Claim(
        "power",
        "It needs fewer joules a task than resident",
        "measured, and less",
        "measured, and more",
        "emufpga bench agents --watts W",
        _power,
    ),
)


def results(inputs: Inputs) -> list[Result]:
    """Every claim."""
    return [judge(claim, inputs) for claim in CLAIMS]


def judge(claim: Claim, inputs: Inputs) -> Result:
    """One claim; unknown where its input is absent or broken."""
    try:
        return Result(claim, *claim.check(inputs))
    except (InputError, SecondsError) as error:
        return Result(claim, UNKNOWN, str(error), "unknown")


def section(inputs: Inputs) -> Section:
    found = results(inputs)
    count = {verdict: sum(result.verdict == verdict for result in found) for verdict in SIGNS}
    rows: list[dict[str, Any]] = [
        {
            "claim": result.claim.claim,
            "verdict": result.verdict,
            "figure": result.figure,
            "provenance": result.provenance,
            "success": result.claim.success,
            "failure": result.claim.failure,
            "rule_before": result.claim.before,
            "command": result.claim.command,
        }
        for result in found
    ]
    body = Html(
        paragraph(
            "The rule of each claim is in the source beside the code that checks it; what is neither success nor "
            "failure is mixed. "
            "A claim whose input is missing is unknown, whatever it was before. Each says whether its rule was written "
            "down before the first run that it judges, or with this page, when figures were known.",
        )
        + Html(f'<ol class="claims">{"".join(map(_shown, found))}</ol>')
    )
    return Section(
        "scorecard",
        "Scorecard",
        "Which claims hold, which do not, and which does nobody know?",
        f"Of {len(found)} claims {count[SUCCESS]} hold, {count[MIXED]} are mixed, {count[FAILURE]} fail and "
        f"{count[UNKNOWN]} are unknown.",
        body,
        {"claims": rows},
    )


def _shown(result: Result) -> str:
    claim = result.claim
    rule = (
        "written before the first run that it judges"
        if claim.before
        else "written with this page, when figures were known"
    )
    return (
        f'<li id="claim-{claim.id}">{verdict(result.verdict)}<div><p class="claim">{esc(claim.claim)}</p>'
        f"<p>{esc(result.figure)} {tag(result.provenance)}</p><details><summary>Rule and command</summary><dl>"
        f"<dt>success</dt><dd>{esc(claim.success)}</dd><dt>failure</dt><dd>{esc(claim.failure)}</dd><dt>mixed</dt><dd>neither</dd>"
        f"<dt>rule</dt><dd>{rule}</dd><dt>get it again</dt><dd>{command(claim.command)}</dd></dl></details></div></li>"
    )


def verdict(word: str) -> Html:
    """A verdict, by sign and word."""
    return Html(f'<span class="verdict {word}"><span aria-hidden="true">{SIGNS[word]}</span> {word}</span>')
