"""Tokens a second by board, link and batch, and what binds: the arithmetic of :mod:`host.seconds`, to try by hand.

The page's JavaScript evaluates the same equations; ``GRID`` scenarios go along with what :mod:`host.seconds` gives for
them, and the page compares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from host import seconds
from host.report.inputs import Inputs
from host.report.page import MARKS, Html, Section, details, esc, paragraph, table, tag
from host.routing import RoutingError, Unions
from host.seconds import BATCHES, HOMES, MODELS, MODES, Board, Counts, Home, Layer, Routing, SecondsError, Shape
from hw.formats.messages import HEADER_BYTES
from hw.formats.q6_k import BLOCK_BYTES, BLOCK_WEIGHTS, SUB_BLOCKS

TITLE = "Roofline"
QUESTION = "How many tokens a second would each board and link give, and what binds?"
MODEL = "granite-1b"
BOARD = "ulx3s_25f"
"""Shown first, if its clock is known."""
HOME_NAMES = ("uart", *HOMES)
NAMED = sorted(HOME_NAMES, key=lambda name: name not in ("uart", "gbe", "pcie-gen2x4"))
"""In the order in which the picture has room for their names."""
ROOM = 14
MAX_BATCH, MAX_EXPERTS, MAX_USED = 16, 256, 16
MEGABYTES = (0.1, 20_000.0)
MEGAHERTZ = (10, 400)
"""Of the sliders."""
RATES = (1e-5, 1e3)
"""Tokens a second that the picture shows."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 335, 56, 10, 22, 44
POINTS = 64
"""Bandwidths of a line."""
CLOCK_UNKNOWN = "unknown: the clock is unknown"
TIMES = "\N{MULTIPLICATION SIGN}"
PLANS: Mapping[str, tuple[str, str]] = {
    "bytes": ("bytes of a layer", "210 n U(B), as tape 210 n E"),
    "transfer": ("transfer", f"bytes / (bandwidth {TIMES} payload share)"),
    "cycles": ("cycles of a layer", f"n {TIMES} max(16 P(B), 210/W U(B)) + drained blocks, 210/W each + the rest"),
    "compute": ("multipliers", "cycles / clock"),
    "vectors": ("vectors", "bytes in and out / the link's bandwidth"),
    "trips": ("round trips", f"waits {TIMES} latency"),
    "seconds": ("a layer", "max(transfer, multipliers) + vectors + round trips"),
    "rate": ("tokens a second", f"B / (layers {TIMES} a layer)"),
}
"""The equation, step by step, as docs/seconds.md has it."""


@dataclass(frozen=True)
class Scenario:
    """What is asked; None: as the board, its link or the model has it."""

    board: str
    home: str
    model: str = MODEL
    mode: str = "selected"
    batch: int = 1
    bandwidth: float | None = None
    clock: float | None = None
    experts: int | None = None
    used: int | None = None


@dataclass(frozen=True)
class Answer:
    """What :mod:`host.seconds` says; ``rate`` None: unknown, but not above ``at_most``; ``fits``: into the memory."""

    layer: Layer
    rate: float | None
    at_most: float
    fits: bool
    own: bool


class World:
    """All that scenarios are made of: the routed boards, what was counted, and the models' unions."""

    def __init__(self, boards: Mapping[str, Board], counts: Counts, unions: Mapping[str, Unions | None]) -> None:
        self.boards, self.counts, self.unions = boards, counts, unions

    def parts(self, ask: Scenario) -> tuple[Routing, Board, Home, Home]:
        """Routing, board, home and link of a scenario."""
        shape, unions = MODELS[ask.model], self.unions[ask.model]
        if ask.experts is not None or ask.used is not None:
            shape = replace(shape, experts=ask.experts or shape.experts, used=ask.used or shape.used)
            if (shape.experts, shape.used) != (MODELS[ask.model].experts, MODELS[ask.model].used):
                unions = None
        board = self.boards[ask.board]
        if ask.clock is not None:
            board = replace(board, clock_hz=ask.clock, clock_provenance="assumed: as set here")
        home = board.home(ask.home)
        if ask.bandwidth is not None:
            home = replace(home, bandwidth=ask.bandwidth, provenance="assumed: as set here")
        return Routing(shape, unions), board, home, home if home.kind == "link" else board.home(board.own[0])

    def answer(self, ask: Scenario) -> Answer:
        """The scenario's layer and rate."""
        routing, board, home, link = self.parts(ask)
        one = seconds.layer(routing, board, home, link, self.counts, ask.batch, ask.mode, None)
        own = ask.home in board.own
        fits = not (own and home.kind == "memory" and 0 < board.memory_bytes < routing.shape.bank_bytes)
        known = one.seconds is not None and fits
        layers = routing.shape.layers
        return Answer(
            one,
            ask.batch / (layers * one.at_least) if known else None,
            ask.batch / (layers * one.at_least),
            fits,
            own,
        )


def section(inputs: Inputs) -> Section:
    world, missing = read(inputs)
    if world is None or not world.boards:
        return Section("roofline", TITLE, QUESTION, "Nothing can be calculated.", "", missing=missing)
    first = start(world)
    rows = list(table_rows(world))
    return Section(
        id="roofline",
        title=TITLE,
        question=QUESTION,
        answer=answer(world, first),
        body=_body(world, first),
        data={"granite": rows},
        missing=missing,
    )


def read(inputs: Inputs) -> tuple[World | None, list[str]]:
    """What there is, and what is absent or broken; None where nothing can be calculated without it."""
    missing, boards = [], {}
    for found in inputs.boards():
        if found.problem:
            missing.append(found.problem)
            continue
        try:
            board = seconds._board(inputs.root / found.path)
            boards[board.name] = board
        except SecondsError as error:
            missing.append(str(error))
    if not boards:
        missing.append("boards/results/: no result of a board; `make boards` writes them")
    unions: dict[str, Unions | None] = {}
    for name in MODELS:
        try:
            unions[name] = seconds._unions(name)
        except (OSError, ValueError, KeyError, TypeError, RoutingError) as error:
            unions[name] = None
            missing.append(f"{name}: its measured unions cannot be read ({error}); the formula takes their place")
    try:
        return World(boards, Counts.read(), unions), missing
    except SecondsError as error:
        return None, [*missing, str(error)]


def start(world: World) -> Scenario:
    """What the page shows first: a board whose clock is known, with its own link."""
    known = [name for name, board in world.boards.items() if board.clock_hz]
    name = BOARD if BOARD in known else (known or list(world.boards))[0]
    return Scenario(name, world.boards[name].own[0])


def answer(world: World, first: Scenario) -> str:
    """The section's answer, from the rows."""
    routed = [name for name, board in world.boards.items() if board.clock_hz]
    shape = MODELS[MODEL].name
    parts = []
    if routed:
        rows = _rows(world, routed)
        best, found = max(rows, key=lambda row: (row[1].at_most, row[0].board == first.board))
        binds = _listed(sorted({str(found.layer.binds) for _, found in rows}))
        ahead = [(ask, world.answer(ask)) for name in HOME_NAMES for ask in [replace(first, home=name)]]
        fast, faster = max(ahead, key=lambda row: row[1].at_most)
        parts.append(
            f"{shape} gets at most {rate_text(found.at_most)} tokens/s from the boards whose clock is routed, over the "
            f"links that they have ({best.board}, {best.home}, batch {best.batch}; {binds} binds); over {fast.home}, "
            f"{fast.board} would give {rate_text(faster.at_most)} at batch 1."
        )
    unrouted = [name for name in world.boards if name not in routed]
    if unrouted:
        best, found = max(_rows(world, unrouted), key=lambda row: row[1].at_most)
        parts.append(
            f"Boards whose clock nobody knows yet stay below {rate_text(found.at_most)} tokens/s ({best.board}, "
            f"{best.home}, batch {best.batch})."
        )
    return " ".join(parts)


def _rows(world: World, names: Sequence[str]) -> list[tuple[Scenario, Answer]]:
    """The batches of these boards over their own links, where the experts fit."""
    asked = [
        Scenario(name, home, batch=batch) for name in names for home in world.boards[name].own for batch in BATCHES
    ]
    return [(ask, found) for ask in asked if (found := world.answer(ask)).fits]


def _the(binds: str | None) -> str:
    return "an unknown part" if binds is None else f"the {binds}"


def _listed(words: Sequence[str]) -> str:
    return " or ".join(f"the {word}" for word in words)


def rate_text(rate: float | None) -> str:
    """Three digits, as the page's JavaScript writes them."""
    if rate is None:
        return "unknown"
    rounded = float(f"{rate:.2e}")
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(rounded)))}f}"


def table_rows(world: World) -> Iterator[dict[str, Any]]:
    """Every board, home, batch and mode for Granite, for readers to take along."""
    for name, board in world.boards.items():
        for home_name in HOME_NAMES:
            for mode in MODES:
                for batch in BATCHES:
                    found = world.answer(ask := Scenario(name, home_name, mode=mode, batch=batch))
                    routing, _, home, _ = world.parts(ask)
                    yield {
                        "board": name,
                        "home": home_name,
                        "board_has_it": found.own,
                        "mode": mode,
                        "batch": batch,
                        "tokens_per_second": found.rate,
                        "tokens_per_second_at_most": found.at_most,
                        "binds": found.layer.binds if found.rate is not None else None,
                        "fits": found.fits,
                        "experts_a_layer": found.layer.union,
                        "bytes_a_layer": found.layer.bytes,
                        "cycles_a_layer": found.layer.cycles,
                        "clock_hz": board.clock_hz,
                        "bandwidth": home.bandwidth,
                        "clock_provenance": clock_source(board, routing.shape).split(", capped at")[0],
                        "bandwidth_provenance": home.provenance,
                        "experts_provenance": routing.provenance(min(batch, board.max_batch)),
                        "provenance": "derived: batch / (layers x seconds of a layer), docs/seconds.md",
                    }


def clock_source(board: Board, shape: Shape) -> str:
    """Of the clock; a build that cannot hold the model only lends its own."""
    if board.clock_hz is None or board.takes(shape):
        return board.clock_provenance
    return f"assumed: as of a build that is too small for this model; that was {board.clock_provenance}"


def grid(world: World) -> list[dict[str, Any]]:
    """Scenarios from all corners of the controls, with what :mod:`host.seconds` gives."""
    names = list(world.boards)
    found = []
    turn = 0
    for model in MODELS:
        for mode in MODES:
            for home in HOME_NAMES:
                for batch in (1, 2, 3, 5, 8, 11, 16):
                    turn += 1
                    ask = Scenario(names[turn % len(names)], home, model, mode, batch)
                    if turn % 3 == 1:
                        ask = replace(ask, bandwidth=(0.3e6, 37e6, 512e6, 8_000e6)[turn % 4])
                    if turn % 5 == 1:
                        ask = replace(ask, clock=(25e6, 133e6, 400e6)[turn % 3])
                    if turn % 7 == 1:
                        ask = replace(ask, experts=(16, 60, 256)[turn % 3])
                    if turn % 11 == 1:
                        ask = replace(ask, used=(1, 4, 13)[turn % 3])
                    if (ask.used or MODELS[model].used) > (ask.experts or MODELS[model].experts):
                        continue
                    one = world.answer(ask)
                    found.append(
                        {
                            **{key: value for key, value in vars(ask).items() if value is not None},
                            "at_least": one.layer.at_least,
                            "bytes": one.layer.bytes,
                            "cycles": one.layer.cycles,
                            "compute": one.layer.compute,
                            "rate": one.rate,
                            "binds": one.layer.binds if one.rate is not None else None,
                        }
                    )
    return found


def facts(world: World, first: Scenario) -> dict[str, Any]:
    """All that the page's JavaScript calculates with."""

    def home(each: Home) -> dict[str, Any]:
        return {
            "kind": each.kind,
            "bandwidth": each.bandwidth,
            "provenance": each.provenance,
            "share": each.share,
            "latency": each.latency,
            "latency_provenance": each.latency_provenance,
        }

    return {
        "first": {key: value for key, value in vars(first).items() if value is not None},
        "models": {
            name: {
                "name": shape.name,
                "layers": shape.layers,
                "experts": shape.experts,
                "used": shape.used,
                "width": shape.width,
                "expert_width": shape.expert_width,
                "unions": unions and {str(batch): mean for batch, mean in unions.means.items()},
                "unions_provenance": unions and unions.provenance,
            }
            for name, shape in MODELS.items()
            for unions in (world.unions[name],)
        },
        "boards": {
            name: {
                "clock": board.clock_hz,
                "clock_provenance": board.clock_provenance.split(", capped at")[0],
                "lanes": board.lanes,
                "max_batch": board.max_batch,
                "link_bytes": board.link_bytes,
                "limits": board.limits,
                "memory_bytes": board.memory_bytes,
                "own": board.own,
                "uart": home(board.home("uart")),
            }
            for name, board in world.boards.items()
        },
        "homes": {name: home(each) for name, each in HOMES.items()},
        "shares": dict(world.counts.shares),
        "rest": world.counts.rest,
        "numbers": {
            "block_bytes": BLOCK_BYTES,
            "block_weights": BLOCK_WEIGHTS,
            "sub_blocks": SUB_BLOCKS,
            "header_bytes": HEADER_BYTES,
            "granite_width": MODELS["granite-1b"].width,
            "granite_used": MODELS["granite-1b"].used,
        },
        "batches": BATCHES,
        "limits": {"batch": MAX_BATCH, "experts": MAX_EXPERTS, "used": MAX_USED, "mbs": MEGABYTES, "mhz": MEGAHERTZ},
        "picture": {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}
        | {"rates": RATES, "points": POINTS, "named": NAMED, "room": ROOM},
        "marks": {word: sign for word, (sign, _) in MARKS.items()},
        "grid": grid(world),
    }


def _body(world: World, first: Scenario) -> str:
    told = json.dumps(facts(world, first), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return "".join(
        (
            paragraph(
                "Nothing here is measured: every rate is bytes / bandwidth, cycles / clock and waits, from counted "
                "cycles, routed clocks and published bandwidths. ",
                tag("derived: docs/seconds.md has the equations"),
                " Attention, router and storage are taken to keep up; with them, real runs are slower.",
            ),
            picture(world, first),
            controls(world, first),
            equation(world, first),
            tables(world),
            f'<script type="application/json" id="roofline-facts">{told}</script>',
        )
    )


def place(megabytes: float, rate: float) -> tuple[float, float]:
    """Where a bandwidth and a rate are in the picture."""
    low, high = (math.log10(each) for each in MEGABYTES)
    x = LEFT + (math.log10(megabytes) - low) / (high - low) * (WIDTH - LEFT - RIGHT)
    bottom, top = (math.log10(each) for each in RATES)
    inside = min(max(math.log10(rate), bottom), top)
    return x, TOP + (top - inside) / (top - bottom) * (HEIGHT - TOP - BOTTOM)


def line(world: World, ask: Scenario) -> str:
    """The path of a scenario's rate by bandwidth: at most, where the clock is unknown."""
    low, high = (math.log10(each) for each in MEGABYTES)
    points = []
    for number in range(POINTS):
        megabytes = 10 ** (low + (high - low) * number / (POINTS - 1))
        x, y = place(megabytes, world.answer(replace(ask, bandwidth=megabytes * 1e6)).at_most)
        points.append(f"{x:.1f} {y:.1f}")
    return "M" + "L".join(points)


def picture(world: World, first: Scenario) -> Html:
    """Rate by bandwidth for batches 1 and 16 and the one chosen, with the links that there are."""
    parts = []
    for power in range(-5, 4):
        _, y = place(1, 10.0**power)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        text = f"{10**power:,}" if power >= 0 else f"{10.0**power:.{-power}f}"
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 5}" y="{y + 3.5:.1f}">{text}</text>')
    for power in range(-1, 5):
        x, _ = place(10.0**power, 1)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}">{10.0**power:,g}</text>'
        )
    parts.append('<text class="tick" x="0" y="10">tokens/s</text>')
    parts.append(
        f'<text class="tick" text-anchor="end" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}">bandwidth of the link or memory, '
        "MB/s</text>"
    )
    found = world.answer(first)
    _, _, home, _ = world.parts(first)
    megabytes = home.bandwidth / 1e6
    x, y = place(megabytes, found.at_most)
    parts += [
        f'<path class="other" id="roofline-line-1" d="{line(world, replace(first, batch=1))}"/>',
        f'<path class="other" id="roofline-line-16" d="{line(world, replace(first, batch=16))}"/>',
        f'<path class="chosen" id="roofline-line" d="{line(world, first)}"/>',
        f'<g id="roofline-homes">{"".join(_homes(world, first))}</g>',
        '<g id="roofline-labels"></g>',
        f'<circle id="roofline-dot" cx="{x:.1f}" cy="{y:.1f}" r="6.5"/>',
    ]
    text = (
        f"{first.board}, {MODELS[first.model].name}, {first.mode}: tokens a second rise with the bandwidth and level "
        f"off where the multipliers bind. With {first.home} and batch {first.batch}: {rate_text(found.at_most)} tokens "
        f"a second, bound by {_the(found.layer.binds)}."
    )
    return Html(
        f'<figure class="roof"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="roofline-t roofline-d">'
        f'<title id="roofline-t">Tokens a second by bandwidth</title>'
        f'<desc id="roofline-d">{esc(text)}</desc>{"".join(parts)}</svg>'
        "<figcaption>Thick: the batch chosen; thin: batches 1 and 16. Rings: links and memories that there are, each "
        "with its own framing and waits; the filled one is chosen. "
        f"{tag('derived: see the equation')}</figcaption></figure>"
    )


def _homes(world: World, first: Scenario) -> Iterator[str]:
    """A ring for each link and memory, and the names for which there is room; the chosen one's first."""
    taken: dict[str, list[float]] = {"link": [], "memory": []}  # links are named above their rings, memories below
    for name in sorted(NAMED, key=lambda name: name != first.home):
        ask = replace(first, home=name)
        _, _, home, _ = world.parts(ask)
        x, y = place(home.bandwidth / 1e6, world.answer(ask).at_most)
        yield f'<circle class="home" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{name}</title></circle>'
        if all(abs(x - other) >= ROOM for other in taken[home.kind]):
            taken[home.kind].append(x)
            turn, down = (-38, -8) if home.kind == "link" else (38, 12)
            where = f"translate({x + 2:.1f} {y + down:.1f}) rotate({turn})"
            yield f'<text class="tick name" transform="{where}">{esc(name)}</text>'


def controls(world: World, first: Scenario) -> str:
    """What JavaScript needs to ask; without it there is nothing to choose."""
    board = world.boards[first.board]
    shape = MODELS[first.model]

    def choice(name: str, label: str, options: Mapping[str, str], chosen: str) -> str:
        inside = "".join(
            f'<option value="{esc(value)}"{" selected" if value == chosen else ""}>{esc(text)}</option>'
            for value, text in options.items()
        )
        return f'<label>{label}<select id="roofline-{name}">{inside}</select></label>'

    def slide(name: str, label: str, low: int, high: int, value: float) -> str:
        return (
            f'<label>{label} <output id="roofline-{name}-out" for="roofline-{name}"></output> '
            f'<span id="roofline-{name}-tag"></span><input type="range" id="roofline-{name}" min="{low}" max="{high}" '
            f'step="1" value="{value:g}"></label>'
        )

    return (
        '<div class="controls scripted-only" role="group" aria-label="Scenario">'
        + choice("model", "Model", {name: each.name for name, each in MODELS.items()}, first.model)
        + choice("board", "Board", {name: name for name in world.boards}, first.board)
        + choice("home", "Experts come over", {name: name for name in HOME_NAMES}, first.home)
        + choice("mode", "Experts that pass", {"selected": "the selected ones", "tape": "all (tape)"}, first.mode)
        + slide("mbs", "Bandwidth", 0, 1000, 500)
        + slide("mhz", "Clock", *MEGAHERTZ, (board.clock_hz or 100e6) / 1e6)
        + slide("batch", "Batch", 1, MAX_BATCH, first.batch)
        + slide("experts", "Experts a layer", 1, MAX_EXPERTS, shape.experts)
        + slide("used", "Experts a token (top-k)", 1, MAX_USED, shape.used)
        + '<div class="keys"><button type="button" id="roofline-reset">As the board and model are</button> '
        '<a id="roofline-link" href="#roofline">Link to this scenario</a></div>'
        '<p id="roofline-check" class="small"></p></div>'
        '<p id="roofline-said" class="verdictline scripted-only" aria-live="polite"></p>'
    )


def steps(world: World, ask: Scenario) -> dict[str, tuple[float | None, str]]:
    """Value and unit of each step of the equation."""
    found = world.answer(ask)
    one = found.layer
    return {
        "bytes": (one.bytes, "B"),
        "transfer": (one.transfer, "s"),
        "cycles": (one.cycles, "cycles"),
        "compute": (one.compute, "s"),
        "vectors": (one.vectors, "s"),
        "trips": (one.trips, "s"),
        "seconds": (one.seconds, "s"),
        "rate": (found.rate, "tokens/s"),
    }


def equation(world: World, first: Scenario) -> str:
    """The equation, evaluated."""
    lines = []
    for name, (value, unit) in steps(world, first).items():
        label, formula = PLANS[name]
        text = "unknown" if value is None else f"{short(value)} {unit}"
        data = "" if value is None else f' data-value="{value!r}"'
        lines.append(
            f'<tr><th scope="row">{label}</th><td>{esc(formula)}</td><td class="with" id="roofline-with-{name}"></td>'
            f'<td class="n" id="roofline-{name}-value"{data}>{esc(text)}</td></tr>'
        )
    _, board, home, _ = world.parts(first)
    scenario = (
        f"{first.board}, {first.home}, {MODELS[first.model].name}, {first.mode}, batch {first.batch}; "
        f"{home.bandwidth / 1e6:g} MB/s, clock "
        + ("unknown" if not board.clock_hz else f"{board.clock_hz / 1e6:.1f} MHz")
    )
    return (
        '<div class="scroll" role="region" tabindex="0" aria-label="The equation"><table class="equation">'
        f'<caption id="roofline-scenario">{esc(scenario)}</caption><thead><tr><th scope="col">step</th>'
        '<th scope="col">equation</th><th scope="col">with</th><th scope="col" class="n">gives</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
        '<p class="small">n blocks an expert, U(B) experts that the batch wants, P(B) passes of an expert for a group '
        "of token lanes, E experts, W bytes a cycle; the rest as docs/seconds.md has it. A batch beyond what the board "
        "holds takes several runs, which add up.</p>"
    )


def short(value: float) -> str:
    """Four digits."""
    if value == 0:
        return "0"
    if abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.3e}"


def tables(world: World) -> str:
    """Every board with its own links, then with those that it has not."""
    own, others = [], []
    for name, board in world.boards.items():
        for home in HOME_NAMES:
            row = [f"{name}, {home}"]
            for batch in BATCHES:
                row.append(_cell(world, Scenario(name, home, batch=batch)))
            clock = "unknown" if not board.clock_hz else f"{board.clock_hz / 1e6:.1f}"
            row.append(Html(f"{clock} {tag(clock_source(board, MODELS[MODEL]).split(', capped at')[0])}"))
            (own if home in board.own else others).append(row)
    head = ("board, link", *(f"batch {batch}" for batch in BATCHES), "clock, MHz")
    shape = MODELS[MODEL]
    caption = f"Tokens a second and what binds: {shape.name}, selected experts, each board with its own links"
    return (
        f'<h3>Every board and link</h3><div class="roof-table">{table(caption, head, own)}'
        + details(
            "What if a board had another link or memory",
            table(f"Tokens a second and what would bind: {shape.name}, selected experts", head, others),
        )
        + f'</div><p class="small">Every rate is {tag("derived: batch / (layers x seconds of a layer)")}. “&lt;”: the '
        "clock is unknown, and the transfer alone allows no more. The tables follow the model and the mode chosen "
        "above.</p>"
    )


def _cell(world: World, ask: Scenario) -> Html:
    found = world.answer(ask)
    if not found.fits:
        text, binds = "does not fit", ""
    elif found.rate is None:
        text, binds = f"< {rate_text(found.at_most)}", "clock unknown"
    else:
        text, binds = rate_text(found.rate), str(found.layer.binds)
    return Html(
        f'<span class="rate" data-board="{ask.board}" data-home="{ask.home}" data-batch="{ask.batch}">{esc(text)}'
        f"<small>{binds}</small></span>"
    )
