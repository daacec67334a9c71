"""What ``emufpga bench agents --record`` leaves: sim/results/agents.json, docs/agents.md's tables, docs/agents.png.

``python -m host.agents_docs`` writes tables and picture again from the JSON. Every number between the markers of
docs/agents.md comes from there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from host.bench_agents import AgentsError, show
from host.routing import ROOT
from sim import record as results

RESULTS = ROOT / "sim" / "results" / "agents.json"
DOCS = ROOT / "docs" / "agents.md"
PICTURE = ROOT / "docs" / "agents.png"
MB = 1e-6
NOT_YET = "Not recorded yet: `make agents RECORD=1` does."
Report = Mapping[str, Any]


def record(report: dict[str, Any]) -> Path:
    """Put a report beside the other workload's into agents.json, and both into docs/; the JSON's path."""
    workloads = load()
    workloads["suite" if report["suite"] else "shape"] = report
    path = results.write("agents", "make agents RECORD=1", {"workloads": workloads}, record=True)
    write()
    return path


def write() -> None:
    """docs/agents.md and its picture from agents.json."""
    workloads = load()
    DOCS.write_text(replaced(DOCS.read_text(encoding="utf-8"), workloads), encoding="utf-8")
    if workloads:
        plot(workloads, PICTURE)


def load() -> dict[str, Any]:
    """The recorded workloads, by name; none where none was recorded."""
    try:
        return json.loads(RESULTS.read_text())["workloads"]
    except FileNotFoundError:
        return {}


def replaced(text: str, workloads: Mapping[str, Report]) -> str:
    """``text`` with every part between its markers made anew; ``ValueError`` where it has not one pair of each."""
    parts = {
        f"agents.{name}": "\n".join(make(workloads)) if needs in workloads else NOT_YET
        for name, (needs, make) in PARTS.items()
    }
    return results.filled(text, "docs/agents.md", parts)


def suite(workloads: Mapping[str, Report]) -> Iterator[str]:
    """The tasks: both clocks."""
    yield from both_clocks(workloads["suite"])


def shape(workloads: Mapping[str, Report]) -> Iterator[str]:
    """A public model's shapes: the same two tables, and what the whole model would take."""
    report = workloads["shape"]
    yield from both_clocks(report)
    if report["derived"]:
        yield ""
        yield from derived_table(report)


def both_clocks(report: Report) -> Iterator[str]:
    yield from conditions(report)
    yield ""
    yield from wall_table(report)
    yield ""
    yield from modelled_table(report)


def conditions(report: Report) -> Iterator[str]:
    size = f"{report['file_bytes']:,} B, sha256 `{report['file_sha256'][:12]}`"
    what = (
        f"{report['tasks']} tasks, answers of at most {report['max_tokens']} tokens"
        if report["suite"]
        else f"{report['tasks']} requests of {report['prompt_tokens']} + {report['max_tokens']} tokens, no score"
    )
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    yield f"{report['model']}, {_layers(report)}, {size}; {what}."
    yield f"{report['cpu']}, {report['threads']} thread, load {show(report['load'], '.1f')} (measured); {packages}."


def wall_table(report: Report) -> Iterator[str]:
    yield f"Measured on this machine's clock, median (min-max) of {report['runs']} runs:"
    yield ""
    rows = [row for row in report["rows"] if row["axis"] == "wall"]
    yield from _table(
        "placement, n, right, right tasks/h, tokens/s, a CPU s, TTFT ms, p50 ms, p95 ms, peak RAM MB, VRAM MB, W, "
        "tasks/kWh",
        (
            (
                *(row["placement"], row["n"], _score(row, report)),
                *(show(row["tasks_per_hour"], ",.0f"), show(row["tokens_per_second"], ",.0f")),
                show(row["tokens_per_cpu_second"], ",.0f"),
                *(show(row[name], ",.1f", scale=1000) for name in ("ttft", "latency_p50", "latency_p95")),
                *(show(row[name], ",.0f", scale=MB) for name in ("peak_ram", "peak_vram")),
                *(show(row["watts"], ".1f"), show(row["tasks_per_kwh"], ",.0f")),
            )
            for row in rows
        ),
    )


def modelled_table(report: Report) -> Iterator[str]:
    rows = [row for row in report["rows"] if row["axis"] == "modelled"]
    cycles = " and ".join(sorted({row["cycles"] for row in rows}))
    yield (
        f"Modelled, {report['board']} at {report['clock']['value'] / 1e6:.1f} MHz, device `{report['device']}`, "
        f"cycles {cycles}; median (min-max) of {report['runs']} runs:"
    )
    yield ""
    yield from _table(
        "placement, home, n, right, right tasks/h, tokens/s, TTFT s, p50 s, p95 s, of it host s, union, "
        "experts asked for MB, useful, link MB, read MB, peak RAM MB",
        (
            (
                row["placement"],
                f"{row['home']}{'' if row['board_has_it'] else ' *'}",
                *(row["n"], _score(row, report)),
                *(show(row["tasks_per_hour"], ",.0f"), show(row["tokens_per_second"], ",.3g")),
                *(show(row[name], ".3g", short=True) for name in ("ttft", "latency_p50", "latency_p95")),
                f"{show(row['host_seconds'], '.3g')} of {show(row['seconds'], '.3g', short=True)}",
                *(show(row["union"], ".2f"), show(row["expert_bytes"], ",.1f", scale=MB)),
                *(show(row["useful_share"], ".1%"), show(row["link_bytes"], ",.1f", scale=MB, short=True)),
                show(row["storage_bytes"], ",.1f", scale=MB, short=True),
                show(row["peak_ram"], ",.0f", scale=MB, short=True),
            )
            for row in rows
        ),
    )
    if any(not row["board_has_it"] for row in rows):
        yield ""
        yield "\\* the board has no such link: what if it had. Behind `/`: the storage's rate."


def derived_table(report: Report) -> Iterator[str]:
    """The whole model by formula."""
    yield f"Derived for all layers of {report['derived'][0]['model']} (`emufpga seconds`), no request run:"
    yield ""
    yield from _table(
        "mode, home, batch, experts a layer, tokens/s, binds",
        (
            (
                row["mode"],
                row["home"],
                row["batch"],
                f"{row['experts']:.2f}",
                f"{row['tokens_per_second']:.3g}",
                row["binds"],
            )
            for row in report["derived"]
        ),
    )
    yield ""
    yield "Experts: " + "; ".join(dict.fromkeys(row["experts_provenance"] for row in report["derived"])) + "."


def routing(workloads: Mapping[str, Report]) -> Iterator[str]:
    """Unions of independent requests, reuse, and the load of the experts."""
    for report in (workloads["suite"],):  # random weights have random routers
        found = statistics(report)
        same = "the same in all runs" if found["same_in_all_runs"] else "of the first run"
        tokens = f"{found['tokens']['prefill']} + {found['tokens']['decode']} tokens"
        yield f"{report['model']}, {found['experts_used']} of {found['experts']} experts a token, {tokens},"
        yield f"`{found['placement']}`, n={found['n']}, {same}:"
        yield ""
        yield from _table(
            "requests, groups x layers, mean union, min-max, if independent, by layer",
            (
                (
                    row["batch"],
                    row["all"]["n"],
                    *(_number(row["all"]["mean"]), _range(row["all"]), f"{row['independent']:.2f}"),
                    " ".join(_number(each["mean"]) for each in row["by_layer"]),
                )
                for row in found["unions"]
            ),
        )
        reuse = found["reuse"]
        yield ""
        yield "Share of a token's experts that its request's token before chose too: " + ", ".join(
            f"{_percent(reuse[phase]['share'])} ({name}, n={reuse[phase]['tokens']} tokens; by layer "
            f"{' '.join(map(_percent, reuse[phase]['by_layer']))})"
            for phase, name in (("prefill", "prompts"), ("decode", "answers"))
        )
        yield f"(uniform and independent: {found['experts_used'] / found['experts']:.1%}, derived)."
        shares = [[count / sum(counts) for count in counts] for counts in found["counts"]]
        yield "Load of the experts by layer, least and most: " + ", ".join(
            f"{min(each):.1%}-{max(each):.1%}" for each in shares
        )
        yield f"(even: {1 / found['experts']:.1%})."
        yield ""


def statistics(report: Report) -> Report:
    """The routing of the selected placement (or the first that there is) with the most slots."""
    order = sorted(report["routing"], key=lambda each: (each["placement"] != "selected", -each["n"]))
    return order[0]


def verdict(workloads: Mapping[str, Report]) -> Iterator[str]:
    """When it wins, when it loses: each sentence from rows of one table, no clock mixed with the other."""
    report = workloads["suite"]
    homes = list(dict.fromkeys(row["home"] for row in report["rows"] if row["home"]))
    first, last = report["slots"][0], report["slots"][-1]

    def rate(placement: str, n: int, home: str | None = None) -> float | None:
        found = [row for row in report["rows"] if (row["placement"], row["n"], row["home"]) == (placement, n, home)]
        return found[0]["tokens_per_second"]["value"] if found else None

    for row in report["rows"]:
        if (row["axis"], row["n"]) == ("wall", last):
            speed, cpu = row["tokens_per_second"]["value"], row["tokens_per_cpu_second"]["value"]
            yield (
                f"- **{row['placement']}**, weights in RAM, n={last}: {speed:,.0f} tokens/s on this machine's clock, "
                f"{cpu:,.0f} a CPU second (measured)."
            )
    for home in homes:
        one, many = rate("selected", first, home), rate("selected", last, home)
        if not one or not many:
            continue
        tape, cached = rate("tape", last, home), rate("cache", last, home)
        yield (
            f"- **selected, {home}**, n={last}: {many:,.3g} tokens/s on the board's clock (modelled), "
            f"{many / one:.2f} x n={first}"
            + (f"; {many / tape:.2f} x tape" if tape else "")
            + (f"; with the cache {cached / many:.2f} x that" if cached else "")
            + "."
        )
    for workload in workloads.values():
        n = workload["slots"][-1]
        rams = {
            row["placement"]: f"{row['placement']} {row['peak_ram']['value'] * MB:,.0f} MB"
            for row in workload["rows"]
            if row["n"] == n and row["peak_ram"]["value"]
        }
        if rams:
            yield f"- **Peak RAM**, {workload['model']}, {_layers(workload)}: {', '.join(rams.values())} (measured)."


def picture(workloads: Mapping[str, Report]) -> Iterator[str]:
    """The plot."""
    what = "tokens a second by requests at a time: left measured on this machine's clock, right modelled on the board's"
    yield f"![{what}]({PICTURE.name})"


PARTS: dict[str, tuple[str, Callable[[Mapping[str, Report]], Iterator[str]]]] = {
    "verdict": ("suite", verdict),
    "picture": ("suite", picture),
    "suite": ("suite", suite),
    "shape": ("shape", shape),
    "routing": ("suite", routing),
}
"""By the name in the markers: the workload that it needs, and what makes it."""


def plot(workloads: Mapping[str, Report], path: Path) -> None:
    """Tokens/s by requests at a time: a row a workload, a panel a clock."""
    try:
        import matplotlib
    except ImportError as error:
        raise AgentsError("the picture needs matplotlib: pip install 'emufpga[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = {"wall": "this machine's clock (measured)", "modelled": "the board's clock (modelled)"}
    figure, panels = pyplot.subplots(
        len(workloads), 2, figsize=(11, 4.2 * len(workloads)), layout="constrained", squeeze=False
    )
    for report, line in zip(workloads.values(), panels, strict=True):
        for (axis, title), panel in zip(axes.items(), line, strict=True):
            rows = [row for row in report["rows"] if row["axis"] == axis]
            series = list(dict.fromkeys((row["placement"], row["home"]) for row in rows))
            homes = list(dict.fromkeys(home for _, home in series))
            for number, (placement, home) in enumerate(series):
                mine = [row for row in rows if (row["placement"], row["home"]) == (placement, home)]
                values = [row["tokens_per_second"] for row in mine]
                below = [each["value"] - each["min"] for each in values]
                above = [each["max"] - each["value"] for each in values]
                panel.errorbar(
                    [row["n"] for row in mine],
                    [each["value"] for each in values],
                    yerr=[below, above],
                    label=placement if home is None else f"{placement}, {home}",
                    linestyle=("-", "--", ":")[homes.index(home) % 3],
                    marker=MARKS.get(placement, "o"),
                    color=f"C{list(MARKS).index(placement)}" if placement in MARKS else f"C{number}",
                    capsize=2,
                    markersize=5,
                )
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(report["slots"], [str(n) for n in report["slots"]])
            panel.minorticks_off()
            panel.set_xlabel("requests at a time")
            panel.set_ylabel("tokens/s")
            panel.set_title(f"{report['model']}: {title}", fontsize=9)
            panel.legend(fontsize=7)
            panel.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


MARKS = {"resident": "o", "llama.cpp": "s", "llama.cpp-read": "D", "tape": "v", "selected": "^", "cache": "P"}


def _table(head: str, rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    names = head.split(", ")
    yield f"| {' | '.join(names)} |"
    yield f"| {' | '.join(['---'] * len(names))} |"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def _score(row: Report, report: Report) -> str:
    right = row["right"]
    return "unknown" if right["value"] is None else f"{show(right, 'g')}/{report['tasks']}"


def _layers(report: Report) -> str:
    count = report["shape"]["layers"]
    return f"{count} layer{'s' * (count > 1)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _range(spread: Report) -> str:
    return "-" if spread["min"] is None else f"{spread['min']}-{spread['max']}"


def main() -> int:
    try:
        write()
    except (AgentsError, OSError, ValueError) as error:
        print(f"host.agents_docs: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
