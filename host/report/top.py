"""The first screen: what it is, does it work, when it wins, when it loses; every figure from the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from host.report.inputs import InputError, Inputs
from host.report.page import Html, Section, esc, figure, tag
from host.report.sections import capacity, scorecard
from host.seconds import MODELS, SecondsError, calculate

GRANITE = MODELS["granite-1b"]


def first_screen(inputs: Inputs, sections: Sequence[Section]) -> str:
    """Four cards; a point whose input is missing says so."""
    titles = {section.id: section.title for section in sections}
    made = []
    for name, title, points, links in CARDS:
        items = "".join(f"<li>{_point(point, inputs)}</li>" for point in points)
        more = " · ".join(f'<a href="#{link}">{esc(titles[link])}</a>' for link in links if link in titles)
        made.append(f'<div class="card {name}"><h2>{title}</h2><span class="more">{more}</span><ul>{items}</ul></div>')
    return (
        "<h1>Mixture-of-experts models that do not fit your GPU, through an FPGA</h1>"
        f'<div class="card is"><h2>What it is</h2><p>{_point(_what, inputs)}</p></div>'
        f'<div class="cards">{"".join(made)}</div>'
    )


def _point(point: Callable[[Inputs], Html], inputs: Inputs) -> Html:
    try:
        return point(inputs)
    except (InputError, SecondsError, KeyError, TypeError, StopIteration, ValueError) as error:
        return Html(f"{esc(error)} {tag('unknown')}")


def _what(inputs: Inputs) -> Html:
    size = capacity.sizes("granite-1b", inputs.upstream()["granite_file_bytes"]["value"])
    used, share = GRANITE.used / GRANITE.experts, size["expert_share"]
    counted = "counted: bytes of expert tensors / bytes of the published file"
    return Html(
        f"Most of such a model is experts, {figure(f'{share:.0%}', counted)} of {GRANITE.name}, and a token uses few "
        "of them: "
        f"{figure(f'{used:.0%}', 'derived: experts a token / experts')}. emufpga leaves them on cheap storage and "
        "streams the ones "
        "that are needed, as the model file has them, through FPGA hardware that decodes and multiplies on the way. "
        "Attention "
        "and KV cache stay on a small GPU."
    )


def _clock(inputs: Inputs) -> Html:
    boards = [each.data for each in inputs.boards() if each.data]
    known = [board for board in boards if board["clock_hz"]]
    best = max(known, key=lambda board: board["clock_hz"], default=None)
    if best is None:
        return Html(f"No board has a routed clock yet {tag('unknown')}.")
    clock = best["clock_hz"] / 1e6
    return Html(
        f"Placed and routed with open tools for {len(known)} of {len(boards)} board builds, the fastest at "
        f"{figure(f'{clock:.0f} MHz', best['clock_provenance'])}."
    )


def _simulated(inputs: Inputs) -> Html:
    token, suite = inputs.need("token"), inputs.need("suite")
    same = token["bit_exact"] and suite["same_logit_bits"]
    right, tasks = min(row["right"] for row in suite["rows"].values()), suite["tasks"]
    return Html(
        f"<b>{'Yes, in simulation' if same else 'No'}</b>: {token['outputs']:,} outputs of {token['layers']} "
        "Granite-size layers "
        f"{'equal' if same else 'differ from'} the golden model bit for bit; "
        f"{figure(f'{right}/{tasks}', suite['provenance']['right'])} tasks right."
    )


def _score(inputs: Inputs) -> Html:
    found = scorecard.results(inputs)
    words = ", ".join(f"{sum(result.verdict == word for result in found)} {word}" for word in scorecard.SIGNS)
    return Html(f"{len(found)} claims: {esc(words)}.")


def _not_yet(inputs: Inputs) -> Html:
    found = {result.claim.id: result for result in scorecard.results(inputs)}
    words = {"board": "on a board", "gpu": "beside a GPU", "power": "with a power meter"}
    names = [name for name in words if found[name].verdict == scorecard.UNKNOWN]
    if not names:
        return Html("It has run on a board, beside a GPU.")
    *some, last = (words[name] for name in names)
    text = f"{', '.join(some)} or {last}" if some else last
    return Html(f"<b>Not yet run</b> {text} {tag('unknown')}.")


def _fits(inputs: Inputs) -> Html:
    size = capacity.sizes("qwen3-30b")
    context = 32_768
    floor = capacity.floors(size, context)
    resident, serial = floor["resident"] / 1e9, floor["serial"] / 1e9
    return Html(
        f"<b>Weights do not fit.</b> {esc(size['name'])} with {context:,} tokens of context: "
        f"{figure(f'{resident:.0f} GB', capacity.PROVENANCE['floor'])} resident, "
        f"{figure(f'{serial:.1f} GB', capacity.PROVENANCE['floor'])} without experts."
    )


def _company(inputs: Inputs) -> Html:
    trace = next(each for each in inputs.need("routing")["traces"] if each["model"].startswith("Qwen3"))
    row = max((each for each in trace["rows"] if each["batch"] <= 8), key=lambda each: each["batch"])
    saved = 1 - row["mean"] / (row["batch"] * trace["experts_used"])
    said = "derived: 1 - union / (batch x k), union " + inputs.need("routing")["provenance"]
    return Html(
        f"<b>Tokens in company share.</b> {row['batch']} tokens of one text fetch "
        f"{figure(f'{saved:.0%} less', said)} each."
    )


def _memory(inputs: Inputs) -> Html:
    rows = inputs.need("capacity")["rows"]
    ours, theirs = rows["selected"]["memory"]["peak"], rows["llama.cpp, read"]["memory"]["peak"]
    return Html(
        "A Granite-size run peaked at "
        f"{figure(f'{ours / 1e6:,.0f} MB', inputs.need('capacity')['provenance']['memory'])}, "
        f"llama.cpp's at {theirs / 1e6:,.0f} MB."
    )


def _link(inputs: Inputs) -> Html:
    rows = [row for row in calculate(batches=(1,))["rows"] if row["tokens_per_second"]["value"]]
    slow = max(rows, key=lambda row: row["tokens_per_second"]["value"])
    value = slow["tokens_per_second"]
    seconds = 1 / value["value"]
    return Html(
        f"<b>Slow links.</b> {esc(GRANITE.name)} over the {esc(slow['home'].upper())} of {esc(slow['board'])}: "
        f"{figure(f'{seconds:,.0f} s', value['provenance'])} a token."
    )


def _resident(inputs: Inputs) -> Html:
    suite = inputs.need("agents")["workloads"]["suite"]
    n = suite["slots"][-1]
    wall = max(
        (row for row in suite["rows"] if row["axis"] == "wall" and row["n"] == n),
        key=lambda row: row["tokens_per_second"]["value"],
    )
    board = max(
        (row for row in suite["rows"] if row["placement"] == "selected" and row["n"] == n),
        key=lambda row: row["tokens_per_second"]["value"],
    )
    fast, slow = wall["tokens_per_second"], board["tokens_per_second"]
    here, there = fast["value"], slow["value"]
    return Html(
        f"<b>Weights that fit.</b> The tiny model, {n} at a time: {esc(wall['placement'])} in RAM "
        f"{figure(f'{here:,.0f} tokens/s', fast['provenance'])}, the best link modelled for {esc(board['board'])} "
        f"{figure(f'{there:,.0f}', slow['provenance'])}."
    )


def _wall(inputs: Inputs) -> Html:
    size = capacity.sizes("granite-1b", inputs.upstream()["granite_file_bytes"]["value"])
    wall = -(-size["file"] // size["kv_token"])
    return Html(
        "<b>Long contexts of small models.</b> Past "
        f"{figure(f'{wall:,} tokens', 'derived: bytes of the file / KV a token')} "
        "Granite's KV cache outweighs its file."
    )


CARDS = (
    ("works", "Does it work?", (_simulated, _clock, _score, _not_yet), ("scorecard", "accuracy")),
    ("wins", "When it wins", (_fits, _company, _memory), ("capacity", "bytes_by_batch")),
    ("loses", "When it loses", (_link, _resident, _wall), ("roofline", "agents")),
)
"""Each card: its class, title, points, and the sections that say more."""
