"""What happens in each cycle: the engine's streams, drawn from a simulation trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from host.report.inputs import Inputs
from host.report.page import Html, Section, details, esc, figure, paragraph, table, tag

STAGES = {
    "fetch": ("fetch", "16 bytes of the file arrive"),
    "align": ("align", "a 16-byte word of a wanted block goes into the decoder's buffer"),
    "drain": ("drain", "a 16-byte word of an unwanted block is dropped"),
    "mac": ("decode, MAC", "16 weights are decoded and multiplied"),
    "sum": ("block sum", "a block's exact sum leaves the adder tree"),
    "row": ("row", "a finished row leaves the accumulator"),
}
"""Rows of the picture: name, and what a transfer is. ``drain`` is ``align``'s stream where no token wants the block."""
STATES = {".": "idle", "w": "waits", "x": "moves"}
UPSTREAM = ("fetch", "decode", "mac")
TITLE = "Inside the pipeline"
QUESTION = "What does every part of the hardware do in each cycle?"
WIDTH, LEFT, ROW, GAP = 860, 112, 24, 8
CELL, SHOWN, TALL = 22, 16, 42
"""Of the close-up: a cycle's width, how many are seen at once, a row's height."""

CLOSE_UP = (
    f"<figcaption>{SHOWN} of these cycles. A number inside counts a block's transfers, the one above is the block's in "
    "its matrix; hatched: something waits there and is not taken.</figcaption>"
)
TIMES = "\N{MULTIPLICATION SIGN}"

Cell = tuple[str, int | None, int | None, int | None]
"""A stage in a cycle: its state, the block that moves or waits, which transfer of it this is, and of how many."""


def section(inputs: Inputs) -> Section:
    found = inputs.get("pipeline")
    if found.problem:
        return Section("pipeline", TITLE, QUESTION, "There is no trace to draw.", "", missing=[found.problem])
    report = found.data
    cells = stages(report["window"])
    counted, upstream = report["figures"], report["upstream"]
    selected, drained = counted["cycles_per_selected_block"], counted["cycles_per_drained_block"]
    theirs = sum(upstream[step] for step in UPSTREAM), upstream["fetch"] + upstream["decode"]
    answer = (
        f"All parts work at the same time, each on another block: a wanted block takes {selected:.2f} cycles, an "
        f"unwanted one {drained:.2f}. A model that takes one step after another needs {theirs[0]} and {theirs[1]}."
    )
    problem = stale(report)
    return Section(
        id="pipeline",
        title=TITLE,
        question=QUESTION,
        answer=answer,
        body=_body(report, cells, f"{found.date}, {found.commit}"),
        data=_data(report, cells),
        missing=[f"{found.path}: {problem}; `{found.command}` renews it"] if problem else [],
    )


def stale(report: Mapping[str, Any]) -> str | None:
    """Why the trace is not of the hardware as it is now."""
    from hw.formats.params import Params
    from sim.trace import design_id

    now = design_id(Params(**report["params"]))
    if report["design_id"] == now:
        return None
    return f"traced in another state of the hardware (design {report['design_id']}, these sources have {now})"


def stages(window: Mapping[str, Any]) -> dict[str, list[Cell]]:
    """By row of the picture, what it does in each cycle; ``ValueError`` where spans and states disagree."""
    blocks, cycles = window["blocks"], window["cycles"]
    rows: dict[str, list[Cell]] = {name: [("idle", None, None, None)] * cycles for name in STAGES}
    for point in window["points"]:
        states = point["states"]
        if len(states) != cycles:
            raise ValueError(f"{point['name']}: {len(states)} states for {cycles} cycles")
        at = 0
        for span in point["spans"]:
            name = "drain" if point["name"] == "align" and not blocks[span["block"]]["wanted"] else point["name"]
            part = span["before"]
            for cycle in range(at, span["to"] + 1):
                if states[cycle] == "x":
                    part += 1
                    rows[name][cycle] = ("moves", span["block"], part, span["of"])
                elif states[cycle] == "w":
                    rows[name][cycle] = ("waits", span["block"], part + 1, span["of"])
            if part != span["before"] + span["moves"]:
                raise ValueError(f"{point['name']}: block {span['block']} has {part} transfers in the states")
            at = span["to"] + 1
        if "x" in states[at:]:
            raise ValueError(f"{point['name']}: transfers after its last block")
    return rows


def label(block: Mapping[str, Any]) -> str:
    """A block in words."""
    return f"expert {block['expert']}, {block['kind']}, block {block['block']}"


def _data(report: Mapping[str, Any], cells: Mapping[str, list[Cell]]) -> dict[str, list[dict[str, Any]]]:
    window = report["window"]
    cycles = []
    for cycle in range(window["cycles"]):
        row: dict[str, Any] = {"cycle": cycle}
        for name, column in cells.items():
            state, block, part, of = column[cycle]
            row |= {name: state, f"{name}_block": block, f"{name}_part": part, f"{name}_of": of}
        cycles.append(row)
    blocks = [{"number": number, **block} for number, block in enumerate(window["blocks"])]
    return {"cycles": cycles, "blocks": blocks, "figures": _figures(report)}


def _figures(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    counted, upstream = report["figures"], report["upstream"]
    source, theirs = report["provenance"]["figures"], upstream["provenance"]
    whole = sum(upstream[step] for step in UPSTREAM)
    return [
        {
            "figure": "cycles a wanted block",
            "engine": counted["cycles_per_selected_block"],
            "engine_blocks": counted["selected_blocks"],
            "upstream": whole,
            "engine_provenance": source,
            "upstream_provenance": theirs,
        },
        {
            "figure": "cycles an unwanted block",
            "engine": counted["cycles_per_drained_block"],
            "engine_blocks": counted["drained_blocks"],
            "upstream": upstream["fetch"] + upstream["decode"],
            "engine_provenance": source,
            "upstream_provenance": theirs,
        },
    ]


def _body(report: Mapping[str, Any], cells: Mapping[str, list[Cell]], when: str) -> str:
    window, upstream = report["window"], report["upstream"]
    edge = window["edge"]
    counted = tag(report["provenance"]["window"])
    said = paragraph(
        f"{window['cycles']} cycles of layer {report['layer']} of {report['model']} as tape, one token: the last "
        f"{edge['wanted']} blocks of an expert that the token wants, then the first {edge['unwanted']} of one that it "
        "does not. Each mark is a transfer that the Verilated hardware made in that cycle; shades tell one block from "
        "the next. ",
        counted,
        f" {when}.",
    )
    theirs = finished(window, cells, upstream)
    below = (
        f"All {window['cycles']} cycles. Below, on the same scale, upstream's model, one step after another: it "
        f"finishes {theirs[True]} wanted and {theirs[False]} unwanted blocks in the time in which this engine "
        f"multiplies {edge['wanted']} and drops {edge['unwanted']}. "
    )
    start = max(0, _turn(cells) - SHOWN // 2)
    return "".join(
        (
            said,
            '<figure class="pipe"><div class="scroll" role="region" tabindex="0" aria-label="All cycles">',
            overview(window, cells, upstream),
            "</div><figcaption>",
            below,
            tag(upstream["provenance"]),
            "</figcaption></figure>",
            _player(window, start),
            '<div class="beside"><figure class="pipe close">',
            close_up(window, cells, start),
            CLOSE_UP,
            '</figure><p id="pipeline-now" class="now" aria-live="polite"></p></div>',
            _table(report),
            _costs(report),
            _how(report),
        )
    )


def _turn(cells: Mapping[str, list[Cell]]) -> int:
    """The cycle in which the first unwanted word is dropped."""
    return next((n for n, cell in enumerate(cells["drain"]) if cell[0] == "moves"), 0)


def runs(column: list[Cell]) -> Iterator[tuple[str, int, int, int]]:
    """State, block, first cycle and the one after the last, of neighbours that agree; nothing where idle."""
    begin = 0
    for cycle in range(1, len(column) + 1):
        if cycle == len(column) or column[cycle][:2] != column[begin][:2]:
            state, block = column[begin][:2]
            if block is not None:
                yield state, block, begin, cycle
            begin = cycle


def overview(window: Mapping[str, Any], cells: Mapping[str, list[Cell]], upstream: Mapping[str, Any]) -> Html:
    """All cycles, and upstream's in the same time."""
    cycles = window["cycles"]
    scale = (WIDTH - LEFT - 6) / cycles
    height = len(STAGES) * (ROW + GAP)
    parts = []
    for line, (name, (title, _)) in enumerate(STAGES.items()):
        y = line * (ROW + GAP) + 4
        parts.append(f'<text class="label" x="0" y="{y + 16}">{esc(title)}</text>')
        parts.append(f'<path class="base" d="M{LEFT} {y + ROW}H{WIDTH - 6}"/>')
        for state, block, begin, end in runs(cells[name]):
            x, wide = LEFT + begin * scale, (end - begin) * scale
            if state == "moves":
                parts.append(
                    f'<rect class="{name} s{block % 2}" x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{ROW}"/>'
                )
            else:
                parts.append(f'<rect class="waits" x="{x:.2f}" y="{y + ROW - 5}" width="{wide:.2f}" height="5"/>')
    for cycle in range(0, cycles, 50):
        x = LEFT + cycle * scale
        parts.append(f'<path class="base" d="M{x:.1f} {height}v5"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height + 18}">{cycle}{" cycles" if not cycle else ""}</text>')
    y = height + 34
    parts.append(f'<text class="label" x="0" y="{y + 16}">upstream</text>')
    parts.append(f'<path class="base" d="M{LEFT} {y + ROW}H{WIDTH - 6}"/>')
    for step, _, begin, end in their_steps(window, cells, upstream):
        x, wide = LEFT + begin * scale, (min(end, cycles) - begin) * scale
        kind = {"decode": "align", "mac": "mac"}.get(step, "fetch")
        parts.append(f'<rect class="{kind} s0" x="{x:.2f}" y="{y}" width="{wide - 0.8:.2f}" height="{ROW}"/>')
        if wide > 26:
            parts.append(f'<text class="in" x="{x + 3:.1f}" y="{y + 16}">{step}</text>')
    edge, theirs = window["edge"], finished(window, cells, upstream)
    parts.append(f'<rect id="pipeline-cursor" class="cursor" x="{LEFT}" y="0" width="2" height="{height}" hidden=""/>')
    description = (
        f"Timeline of {cycles} cycles. Fetch brings bytes nearly all the time; the multipliers take "
        f"{edge['wanted']} wanted blocks without a gap, then {edge['unwanted']} unwanted ones are drained. In the same "
        f"time upstream's model finishes {theirs[True]} wanted and {theirs[False]} unwanted blocks."
    )
    return Html(
        f'<svg viewBox="0 0 {WIDTH} {y + ROW + 6}" data-left="{LEFT}" data-scale="{scale:.6f}" id="pipeline-all" '
        f'role="img" aria-labelledby="pipeline-all-t pipeline-all-d"><title id="pipeline-all-t">What each part of the '
        f'engine does, cycle by cycle</title><desc id="pipeline-all-d">{esc(description)}</desc>{"".join(parts)}</svg>'
    )


def their_steps(
    window: Mapping[str, Any], cells: Mapping[str, list[Cell]], upstream: Mapping[str, Any]
) -> Iterator[tuple[str, bool, int, int]]:
    """Upstream's steps, one after another: wanted blocks until this engine drains, then unwanted ones."""
    cycle, turn = 0, _turn(cells)
    while cycle < window["cycles"]:
        wanted = cycle < turn
        for step in UPSTREAM[: 3 if wanted else 2]:
            if cycle < window["cycles"]:
                yield step, wanted, cycle, cycle + upstream[step]
            cycle += upstream[step]


def finished(
    window: Mapping[str, Any], cells: Mapping[str, list[Cell]], upstream: Mapping[str, Any]
) -> dict[bool, int]:
    """Wanted and unwanted blocks that upstream's model is done with at the window's end."""
    done = {True: 0, False: 0}
    for step, wanted, _, end in their_steps(window, cells, upstream):
        done[wanted] += step == ("mac" if wanted else "decode") and end <= window["cycles"]
    return done


def close_up(window: Mapping[str, Any], cells: Mapping[str, list[Cell]], start: int) -> Html:
    """``SHOWN`` cycles from ``start`` on; all are drawn, and JavaScript moves what is seen."""
    left, cycles = 92, window["cycles"]
    width, height = left + SHOWN * CELL, len(STAGES) * TALL + 20
    labels, parts = [], []
    for line, (name, (title, _)) in enumerate(STAGES.items()):
        y = line * TALL + 4
        labels.append(f'<text class="label" x="0" y="{y + 27}">{esc(title)}</text>')
        parts.append(f'<path class="base" d="M0 {y + 36}H{cycles * CELL}"/>')
        for state, block, begin, end in runs(cells[name]):
            x, wide = begin * CELL, (end - begin) * CELL
            if state == "waits":
                parts.append(
                    f'<rect class="hatch" x="{x + 1}" y="{y + 14}" width="{wide - 2}" height="22"'
                    ' fill="url(#pipeline-hatch)"/>'
                )
                continue
            parts.append(
                f'<rect class="{name} s{block % 2}" x="{x + 1}" y="{y + 14}" width="{wide - 2}" height="22" rx="3"/>'
            )
            for cycle in range(begin, end):
                part = cells[name][cycle][2]
                parts.append(f'<text class="in n" x="{cycle * CELL + CELL / 2:g}" y="{y + 29}">{part}</text>')
        seen: set[int] = set()
        for state, block, begin, _ in runs(cells[name]):
            if state == "moves" and block not in seen:
                seen.add(block)
                what = window["blocks"][block]
                parts.append(f'<text class="tick b" x="{begin * CELL + 2}" y="{y + 11}">{what["block"]}</text>')
    y = len(STAGES) * TALL
    parts += [
        f'<text class="tick c" x="{cycle * CELL + CELL / 2:g}" y="{y + 15}">{cycle}</text>'
        for cycle in range(0, cycles, 4)
    ]
    seen_cycles = f"cycles {start} to {start + SHOWN - 1}"
    return Html(
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="pipeline-close-t" id="pipeline-close">'
        f'<title id="pipeline-close-t">Close-up of {seen_cycles}, each stage with its block and transfer</title>'
        '<defs><pattern id="pipeline-hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path class="line" d="M0 0V5"/></pattern></defs>'
        f'<svg id="pipeline-seen" x="{left}" y="0" width="{SHOWN * CELL}" height="{height}" data-cell="{CELL}" '
        f'data-shown="{SHOWN}" viewBox="{start * CELL} 0 {SHOWN * CELL} {height}">'
        f'<rect id="pipeline-here" class="here" x="{(start + SHOWN // 2) * CELL}" y="0" width="{CELL}" '
        f'height="{height}"/>{"".join(parts)}</svg>{"".join(labels)}</svg>'
    )


def _player(window: Mapping[str, Any], start: int) -> str:
    last = window["cycles"] - 1
    at = start + SHOWN // 2
    buttons = (
        ("first", "First cycle", "|◀"),
        ("back", "One cycle back", "◀"),
        ("play", "Play", "▶ Play"),
        ("on", "One cycle on", "▶"),
        ("edge", "To the first unwanted word", "To the edge"),
    )
    made = "".join(
        f'<button type="button" id="pipeline-{name}" aria-label="{title}" title="{title}">{text}</button>'
        for name, title, text in buttons
    )
    return (
        f'<div class="player scripted-only" role="group" aria-label="Cycle by cycle"><div class="keys">{made}</div>'
        f'<label class="slide">Cycle <output id="pipeline-cycle" for="pipeline-at">{at}</output> of {last}'
        f'<input type="range" id="pipeline-at" min="0" max="{last}" value="{at}" data-edge="{at}"></label>'
        '<label>Cycles a second <select id="pipeline-speed"><option>2</option><option selected>8</option>'
        "<option>30</option></select></label></div>"
    )


def _table(report: Mapping[str, Any]) -> str:
    rows = []
    for each in _figures(report):
        ratio = each["upstream"] / each["engine"]
        rows.append(
            (
                each["figure"],
                figure(f"{each['engine']:.3f}", each["engine_provenance"]),
                figure(f"{each['upstream']}", each["upstream_provenance"]),
                figure(f"{ratio:.1f} {TIMES}", "derived: upstream's cycles / this engine's"),
            )
        )
    return table("Cycles a block, over whole runs", ("", "this engine", "upstream's model", "fewer"), rows)


def _costs(report: Mapping[str, Any]) -> str:
    """What the picture does not flatter."""
    runs_counted = report["figures"]["counters"]
    tape, selected = runs_counted["tape"], runs_counted["selected"]
    share = {name: run["active"] / run["cycles"] for name, run in (("tape", tape), ("selected", selected))}
    source = "derived: cycles in which the multipliers took weights / all cycles, both counted"
    return paragraph(
        "What it costs: over the whole tape run the multipliers work ",
        figure(f"{share['tape']:.0%}", source),
        " of the cycles, since unwanted blocks pass at the speed of the bus; fetching the wanted experts only, ",
        figure(f"{share['selected']:.0%}", source),
        ". Both with 16 bytes in every cycle, which hardly any cheap link brings: on a slower one the picture has the "
        "same parts and longer gaps, and ",
        Html('<a href="#roofline">the link decides</a>.'),
    )


def _how(report: Mapping[str, Any]) -> str:
    watched = {point["name"]: point["watches"] for point in report["window"]["points"]}
    watched["drain"] = watched["align"]
    rows = [
        (title, what, Html(f"<code>{esc(watched[name])}</code>"), _moves(report, name))
        for name, (title, what) in STAGES.items()
    ]
    parts = table(
        "Every row is the handshake of one stream", ("row", "a transfer", "stream", "transfers seen"), rows, words=3
    )
    text = paragraph(
        "Monitors beside these streams note valid and ready in each cycle; the hardware is not changed. Over each "
        "whole run the transfers seen equal the engine's own counters, else nothing is written: ",
        Html("<code>make pipeline</code>"),
        f". Design {report['design_id']}, {report['params']['tokens']} token lane; outputs equal to the golden "
        f"model's: {'yes' if report['bit_exact'] else 'NO'}.",
    )
    return details("How it was taken", parts + text)


def _moves(report: Mapping[str, Any], name: str) -> int:
    blocks = report["window"]["blocks"]
    point = next(each for each in report["window"]["points"] if each["name"] == ("align" if name == "drain" else name))
    spans = point["spans"]
    if name in ("align", "drain"):
        spans = [span for span in spans if blocks[span["block"]]["wanted"] == (name == "align")]
    return sum(span["moves"] for span in spans)
