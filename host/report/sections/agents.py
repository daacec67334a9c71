"""Many requests at a time, by where the experts are: tasks an hour, waiting times, memory, bytes."""

from __future__ import annotations

import json
from typing import Any

from host.report import plots
from host.report.inputs import InputError, Inputs
from host.report.page import Html, Section, details, esc, paragraph, table, tag, term

AXES = {"wall": "this machine's clock (measured)", "modelled": "the board's clock (derived)"}
CLOCKS = {"wall": "here, measured", "modelled": "board's, derived"}
METRICS: dict[str, tuple[str, float, str]] = {
    "tasks_per_hour": ("right tasks/hour", 1, ""),
    "tokens_per_second": ("tokens/s", 1, ""),
    "ttft": ("time to first token, ms", 1e3, "least is best"),
    "latency_p50": ("half of all answers within, ms", 1e3, "least is best"),
    "latency_p95": ("95 % of all answers within, ms", 1e3, "least is best"),
    "peak_ram": ("peak RAM, MB", 1e-6, "least is best"),
    "peak_vram": ("peak VRAM, MB", 1e-6, ""),
    "expert_bytes": ("expert bytes asked for, MB", 1e-6, ""),
    "link_bytes": ("bytes over the link, MB", 1e-6, ""),
    "storage_bytes": ("bytes read, MB", 1e-6, ""),
    "useful_share": ("share of bytes that a token wanted, %", 100, ""),
    "watts": ("watts", 1, ""),
    "tasks_per_kwh": ("right tasks/kWh", 1, ""),
}
"""By key of a row: what it is called, and what its figures are multiplied by."""
WORKLOADS = {"suite": "the 45 tasks, tiny model", "shape": "one layer of Granite's shapes, random weights"}
FIRST = {"suite": "tasks_per_hour", "shape": "tokens_per_second"}


def section(inputs: Inputs) -> Section:
    question = "With one to eight requests at a time: how many right answers an hour, how long a wait, how much memory?"
    try:
        workloads = inputs.need("agents")["workloads"]
    except InputError as error:
        return Section(
            "agents",
            "Agents",
            question,
            "Not recorded: nothing can be said about many requests at a time.",
            "",
            {},
            [str(error)],
        )
    body = [
        paragraph(
            "Every placement answers the same requests, each run in a process of its own, three runs. ",
            term("resident", "Resident"),
            " and llama.cpp ran on this machine and are on its clock; ",
            term("tape"),
            ", ",
            term("selected"),
            " and cache need a board, and are on a modelled one. ",
            Html("<b>The two clocks are never divided by one another.</b> "),
            tag(f"derived: {next(iter(workloads.values()))['provenance']['modelled'].removeprefix('derived: ')}"),
        )
    ]
    data: dict[str, list[dict[str, Any]]] = {}
    for name, report in workloads.items():
        data[name] = [_flat(row, report) for row in report["rows"]]
        body.append(_workload(name, report))
    missing = [f"agents.json: no workload {name!r}" for name in WORKLOADS if name not in workloads]
    return Section("agents", "Agents", question, _answer(workloads), "".join(body), data, missing)


def _answer(workloads: dict[str, Any]) -> str:
    if "suite" not in workloads:
        return "The 45 tasks were not recorded."
    suite = workloads["suite"]
    rows = suite["rows"]
    n, first = suite["slots"][-1], suite["slots"][0]
    right = [row["right"]["value"] for row in rows]
    wall = max(
        (row for row in rows if row["axis"] == "wall" and row["n"] == n), key=lambda row: row["tasks_per_hour"]["value"]
    )
    own = next((row for row in rows if row["placement"] == "selected" and row["n"] == n and row["board_has_it"]), None)
    other = [
        row for row in rows if row["placement"] == "selected" and row["n"] == n and not row.get("board_has_it", True)
    ]
    text = (
        f"All {suite['tasks']} answers are right in every placement"
        if min(right) == suite["tasks"]
        else f"Right answers: {min(right):g} to {max(right):g} of {suite['tasks']}, by placement"
    )
    fast = wall["tasks_per_hour"]["value"]
    text += f"; weights in RAM are fast: {wall['placement']}, {n} at a time, {fast:,.0f} tasks an hour. "
    if own:
        text += f"Over the board's own {own['home']} the model gives {own['tasks_per_hour']['value']:,.0f}"
        if other:
            best = max(other, key=lambda row: row["tasks_per_hour"]["value"])
            text += f", over {best['home']}, which it does not have, {best['tasks_per_hour']['value']:,.0f}"
        alone = next(
            row for row in rows if (row["placement"], row["n"], row["home"]) == ("selected", first, own["home"])
        )
        gain = own["tasks_per_hour"]["value"] / alone["tasks_per_hour"]["value"]
        text += f"; {n} at a time bring {gain:.2f} times one at a time there."
    return text


def _flat(row: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {
        "placement": row["placement"],
        "home": row["home"],
        "board_has_it": row.get("board_has_it"),
        "clock": row["axis"],
        "n": row["n"],
        "right": row["right"]["value"],
        "of": report["tasks"],
        "runs": report["runs"],
    }
    for key in METRICS:
        for part in ("value", "min", "max"):
            flat[key if part == "value" else f"{key}_{part}"] = row[key][part]
        flat[f"{key}_provenance"] = row[key]["provenance"]
    return flat


def _workload(name: str, report: dict[str, Any]) -> Html:
    title = WORKLOADS.get(name, name)
    metric = FIRST.get(name, "tokens_per_second")
    label = METRICS[metric][0]
    load = report["load"]
    return Html(
        f"<h3>{esc(title[0].upper() + title[1:])}</h3>"
        + paragraph(
            f"{report['model']}; {report['tasks']} requests, {report['runs']} runs; {report['cpu']}, "
            f"{report['threads']} thread, load {load['value']:.1f} ({load['min']:.1f}–{load['max']:.1f})",
            ": the machine was busy with other work. " if load["value"] > 1 else ". ",
            f"Board {report['board']} at {report['clock']['value'] / 1e6:.1f} MHz ",
            tag(report["clock"]["provenance"]),
            ".",
        )
        + plots.picture(
            f"agents-{name}",
            f"{label[0].upper() + label[1:]} by requests at a time, first on this machine's clock, then on the board's",
            _describe(report, metric),
            lambda fig, narrow: _draw(fig, narrow, report, metric),
            height=(3.9, 7.4),
        )
        + _chooser(name, report, metric)
        + details("Every figure, with its spread", _everything(report))
    )


def _series(report: dict[str, Any]) -> list[tuple[str, str, str | None]]:
    return list(dict.fromkeys((row["axis"], row["placement"], row["home"]) for row in report["rows"]))


def _named(report: dict[str, Any], axis: str, placement: str, home: str | None) -> str:
    row = next(row for row in report["rows"] if (row["axis"], row["placement"], row["home"]) == (axis, placement, home))
    return placement if home is None else f"{placement}, {home}{'' if row['board_has_it'] else ' *'}"


def _describe(report: dict[str, Any], metric: str) -> str:
    parts = []
    for key in _series(report):
        mine = [row for row in report["rows"] if (row["axis"], row["placement"], row["home"]) == key]
        parts.append(
            f"{_named(report, *key)}: "
            + ", ".join(
                f"{row[metric]['value']:,.3g} at {row['n']}" for row in mine if row[metric]["value"] is not None
            )
        )
    return f"{METRICS[metric][0]}. " + "; ".join(parts) + ". An asterisk: the board does not have that link."


def _draw(fig: Any, narrow: bool, report: dict[str, Any], metric: str) -> None:
    axes = plots.panels(fig, 2, narrow)
    placements = list(dict.fromkeys(row["placement"] for row in report["rows"]))
    homes = list(dict.fromkeys(row["home"] for row in report["rows"] if row["home"]))
    for panel, (axis, title) in zip(axes, AXES.items(), strict=True):
        for key in (each for each in _series(report) if each[0] == axis):
            mine = [row for row in report["rows"] if (row["axis"], row["placement"], row["home"]) == key]
            values = [row[metric] for row in mine]
            number = [
                each for each in placements if (each in ("tape", "selected", "cache")) == (axis == "modelled")
            ].index(key[1])
            panel.errorbar(
                [row["n"] for row in mine],
                [each["value"] for each in values],
                yerr=[
                    [each["value"] - each["min"] for each in values],
                    [each["max"] - each["value"] for each in values],
                ],
                label=_named(report, *key),
                color=plots.SERIES[number % len(plots.SERIES)],
                marker="os^vD"[number % 5],
                linestyle="-" if key[2] is None else ("-", "--", ":")[homes.index(key[2]) % 3],
                capsize=2,
                markersize=4.5,
                linewidth=1.5,
            )
        plots.powers(panel, report["slots"], "requests at a time")
        panel.set_yscale("log")
        panel.minorticks_off()
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        panel.set_title(title)
        panel.grid(axis="y")
        panel.legend(fontsize=6.8, loc="center left" if axis == "modelled" else "best", ncols=1)
    axes[0].set_ylabel(METRICS[metric][0])


def _chooser(name: str, report: dict[str, Any], metric: str) -> Html:
    """One figure of all placements by n; agents.js puts another in its place."""
    options = "".join(
        f'<option value="{key}"{" selected" if key == metric else ""}>{esc(label)}</option>'
        for key, (label, _, _) in METRICS.items()
    )
    scales = json.dumps({key: scale for key, (_, scale, _) in METRICS.items()})
    rows = []
    for key in _series(report):
        mine = {row["n"]: row for row in report["rows"] if (row["axis"], row["placement"], row["home"]) == key}
        rows.append(
            [
                _named(report, *key),
                CLOCKS[key[0]],
                *(_cell(mine[n][metric], METRICS[metric][1]) for n in report["slots"]),
            ]
        )
    return Html(
        f"<div class='agents' data-workload='{esc(name)}' data-scales='{esc(scales)}'>"
        f"<div class='controls' hidden><div><label for='agents-{esc(name)}-metric'>Show</label>"
        f"<select id='agents-{esc(name)}-metric'>{options}</select></div></div>"
        + table(
            "Median of the runs; * the board has no such link",
            ["placement", "clock", *(f"{n} at a time" for n in report["slots"])],
            rows,
            words=2,
        )
        + "</div>"
    )


def _cell(figure: dict[str, Any], scale: float) -> str:
    return "unknown" if figure["value"] is None else number(figure["value"] * scale)


def number(value: float) -> str:
    """Three digits that count, as page.js writes them."""
    if value == 0:
        return "0"
    from math import floor, log10

    places = 2 - floor(log10(abs(value)))
    rounded = round(value, places)
    return f"{rounded:,.0f}" if places <= 0 else f"{rounded:,.{places}f}".rstrip("0").rstrip(".")


def _everything(report: dict[str, Any]) -> Html:
    def shown(row: dict[str, Any], key: str) -> str:
        each, scale = row[key], METRICS[key][1]
        if each["value"] is None:
            return "unknown"
        value = number(each["value"] * scale)
        return (
            value
            if each["min"] == each["max"]
            else f"{value} ({number(each['min'] * scale)}–{number(each['max'] * scale)})"
        )

    return table(
        f"Median (min–max) of {report['runs']} runs",
        ["placement", "link", "n", "right", *(label for label, _, _ in METRICS.values())],
        [
            [
                row["placement"],
                "–" if row["home"] is None else row["home"] + ("" if row["board_has_it"] else " *"),
                row["n"],
                "unknown" if row["right"]["value"] is None else f"{row['right']['value']:g}/{report['tasks']}",
                *(shown(row, key) for key in METRICS),
            ]
            for row in report["rows"]
        ],
        words=2,
    )
