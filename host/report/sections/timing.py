"""Cycles and seconds by batch, what storage gives here, and what reading and asking ahead earn."""

from __future__ import annotations

from typing import Any

from host.report import plots
from host.report.inputs import InputError, Inputs
from host.report.page import Html, Section, details, esc, figure, paragraph, table, tag, term
from host.routing import GRANITE
from host.seconds import MODELS, SecondsError, calculate

GRANITE_1B = MODELS["granite-1b"]
KINDS = {
    "ceiling": "bare reads",
    "feed": "the feed, no thread",
    "feed_ahead": "the feed, reading ahead",
    "framing": "and framing",
    "framing_ahead": "framing, reading ahead",
}
TAKERS = {"idle": "a taker that does nothing else", "framing": "one that makes frames of the bytes"}


def section(inputs: Inputs) -> Section:
    missing: list[str] = []
    data: dict[str, list[dict[str, Any]]] = {}
    parts, said = [], []
    for part in (_cycles, _boards, _host, _storage, _ahead, _sweep):
        try:
            html, tables, sentence = part(inputs)
        except (InputError, SecondsError) as error:
            missing.append(str(error))
            continue
        parts.append(html)
        data |= tables
        said += [sentence] if sentence else []
    return Section(
        "timing",
        "Timing",
        "What does a layer take, by batch and schedule, and do read-ahead and double buffers earn their keep?",
        " ".join(said),
        "".join(parts),
        data,
        missing,
    )


Part = tuple[Html, dict[str, list[dict[str, Any]]], str]


def _cycles(inputs: Inputs) -> Part:
    """Cycles of a layer, counted."""
    counted, token = inputs.need("layer_cycles"), inputs.need("token")
    rows = counted["rows"]
    size = counted["expert_blocks"]
    tape = next(row for row in rows if row["mode"] == "tape")
    same = next(
        row for row in rows if (row["mode"], row["tokens"], row["lanes"]) == ("selected", tape["tokens"], tape["lanes"])
    )
    drained = (tape["cycles"] - same["cycles"]) / (tape["blocks"] - same["blocks"])

    def draw(fig: Any, narrow: bool) -> None:
        axes = fig.subplots()
        for colour, lanes in zip(plots.SERIES, sorted({row["lanes"] for row in rows}), strict=False):
            mine = [row for row in rows if row["lanes"] == lanes and row["mode"] == "selected"]
            x = [row["tokens"] for row in mine]
            name = f"selected, {lanes} lane{'s' if lanes > 1 else ''}"
            plots.line(axes, x, [row["cycles"] / row["tokens"] / 1e3 for row in mine], "counted", name, color=colour)
        axes.plot(
            [tape["tokens"]],
            [tape["cycles"] / tape["tokens"] / 1e3],
            "v",
            color=plots.C,
            markersize=8,
            label=f"tape, {tape['lanes']} lane (counted)",
        )
        plots.powers(axes, sorted({row["tokens"] for row in rows}), "batch, tokens")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("thousand cycles a layer and token")
        axes.grid(axis="y")
        axes.legend()

    html = Html(
        "<h3>Cycles of one layer</h3>"
        + paragraph(
            f"A layer of {GRANITE_1B.name}'s shapes in the simulated engine, fed as fast as it takes, everything "
            "included. ",
            tag(counted["provenance"]["cycles"]),
            " With one ",
            term("lane"),
            ", every token takes its own pass over a block, so company saves bytes but no cycles; "
            "with four, tokens share a pass.",
        )
        + plots.picture(
            "cycles",
            "Cycles of one layer, a token, by batch and token lanes",
            "; ".join(
                f"{row['lanes']} lanes, {row['tokens']} tokens, {row['mode']}: {row['cycles']:,} cycles for "
                f"{row['experts']} experts"
                for row in rows
            ),
            draw,
            height=(3.2, 3.2),
        )
        + table(
            "One layer (cycles and blocks counted; experts and passes derived from the routes)",
            [
                "lanes",
                "batch",
                "mode",
                "experts fetched",
                "passes",
                "blocks moved",
                "cycles",
                "cycles a block and pass",
            ],
            [
                [
                    row["lanes"],
                    row["tokens"],
                    row["mode"],
                    row["experts"],
                    row["passes"],
                    f"{row['blocks']:,}",
                    f"{row['cycles']:,}",
                    f"{row['cycles'] / (row['passes'] * size):.3f}" if row["mode"] == "selected" else "",
                ]
                for row in rows
            ],
            words=3,
        )
        + paragraph(
            f"A whole token, {token['layers']} layers, {token['bytes_requested']:,} B: ",
            figure(f"{token['cycles']:,} cycles", token["provenance"]["cycles"]),
            ", at ",
            figure(f"{token['clock_hz'] / 1e6:.1f} MHz", token["provenance"]["clock_hz"]),
            " ",
            figure(f"{token['seconds'] * 1e3:.0f} ms", token["provenance"]["seconds"]),
            ", if the link keeps up. A drained block of the tape takes ",
            figure(f"{drained:.2f} cycles", "derived: (tape - selected) / drained blocks, both counted"),
            ".",
        )
    )
    each = token["cycles_per_block"]
    sentence = f"A selected block takes {each:.2f} cycles over a whole token and a drained one {drained:.2f}."
    return html, {"cycles": rows}, sentence


def _boards(inputs: Inputs) -> Part:
    """Seconds of a layer by batch: tape and union, on boards with a routed clock."""
    inputs.boards()  # these two are what host.seconds reads beside the cycles
    inputs.get("link")
    rows = []
    for mode in ("tape", "selected"):
        report = calculate(mode=mode)
        extra = calculate(mode=mode, home_names=["pcie-gen2x4"], board_names=_routed(report))
        for row in [*report["rows"], *extra["rows"]]:
            if row["seconds"]["value"] is not None:
                rows.append(
                    {
                        "board": row["board"],
                        "home": row["home"],
                        "board_has_it": row["board_has_it"],
                        "mode": mode,
                        "batch": row["batch"]["value"],
                        "experts": row["experts"]["value"],
                        "seconds_a_layer": row["seconds"]["value"],
                        "tokens_per_second": row["tokens_per_second"]["value"],
                        "binds": row["binds"],
                        "clock": row["clock"]["provenance"],
                    }
                )
    keys = list(dict.fromkeys((row["board"], row["home"], row["mode"]) for row in rows))
    batches = sorted({row["batch"] for row in rows})

    def cells(key: tuple[str, str, str]) -> list[str]:
        mine = {row["batch"]: row for row in rows if (row["board"], row["home"], row["mode"]) == key}
        return [_seconds(mine[batch]["seconds_a_layer"]) if batch in mine else "" for batch in batches]

    has = {(row["board"], row["home"]): row["board_has_it"] for row in rows}
    html = Html(
        "<h3>Seconds of one layer, by batch</h3>"
        + paragraph(
            f"{GRANITE_1B.name}, every board with a routed clock, over its own link and, marked *, over PCIe that it "
            "does not have. ",
            tag("derived: max(transfer, compute) + vectors + round trips (docs/seconds.md)"),
        )
        + table(
            "Seconds a layer (derived)",
            ["board", "link", "schedule", *(f"B={batch}" for batch in batches)],
            [[key[0], key[1] + ("" if has[key[:2]] else " *"), key[2], *cells(key)] for key in keys],
            words=3,
        )
    )
    return html, {"boards": rows}, ""


def _routed(report: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["board"] for row in report["rows"] if row["clock"]["value"] is not None))


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def _storage(inputs: Inputs) -> Part:
    """Speeds of this host's storage, and the time of a layer's experts from them."""
    storage = inputs.need("storage")
    speeds = [
        {
            "mode": mode["mode"],
            "what": what,
            **{key: mode["speeds"][what][key] for key in ("median", "min", "max", "n")},
        }
        for mode in storage["modes"]
        for what in KINDS
    ]
    times = []
    for mode in storage["modes"]:
        feed = mode["speeds"]["framing_ahead"]
        for batch in (1, 2, 4, 6):
            for schedule, experts in (("all experts", GRANITE_1B.experts), ("union", GRANITE.means[batch])):
                size = experts * GRANITE_1B.expert_bytes / 1e9
                times.append(
                    {
                        "mode": mode["mode"],
                        "batch": batch,
                        "schedule": schedule,
                        "seconds": size / feed["median"],
                        "seconds_min": size / feed["max"],
                        "seconds_max": size / feed["min"],
                        "n": feed["n"],
                    }
                )
    html = Html(
        "<h3>What storage gives, on one host</h3>"
        + paragraph(
            f"{storage['cpus']} cores, {storage['filesystem']['type']}, {storage['kernel'].split('-')[0]}, load "
            f"{storage['load']:.1f}; slices of {storage['slice_bytes'][0]:,} B in the engine's order. ",
            tag(f"measured: {storage['unit']}; median (min-max) of n runs"),
            f" {storage['notes'][0]}.",
        )
        + table(
            "GB/s, median (min–max), n runs (measured)",
            ["", *(mode["mode"] for mode in storage["modes"])],
            [
                [
                    name,
                    *(
                        f"{mode['speeds'][what]['median']:.2f} "
                        f"({mode['speeds'][what]['min']:.2f}–{mode['speeds'][what]['max']:.2f}), "
                        f"{mode['speeds'][what]['n']}"
                        for mode in storage["modes"]
                    ),
                ]
                for what, name in KINDS.items()
            ],
        )
        + details(
            "What that makes of a layer, by batch: all experts and the union",
            paragraph(
                f"Bytes of a layer of {GRANITE_1B.name} over the speed of framing with read-ahead; unions as "
                "reported for it. ",
                tag("derived: bytes / measured speed; the range is that of the speed"),
            )
            + table(
                "Milliseconds a layer, median (min–max), n as above",
                ["storage", "batch", "all experts", "union", "union over all"],
                [
                    [
                        mode["mode"],
                        str(batch),
                        *(_range(_row(times, mode["mode"], batch, each)) for each in ("all experts", "union")),
                        f"{GRANITE.means[batch] / GRANITE_1B.experts:.0%}",
                    ]
                    for mode in storage["modes"]
                    for batch in (1, 2, 4, 6)
                ],
                words=2,
            ),
        )
    )
    return html, {"storage": speeds, "storage_by_batch": times}, ""


def _row(rows: list[dict[str, Any]], mode: str, batch: int, schedule: str) -> dict[str, Any]:
    return next(row for row in rows if (row["mode"], row["batch"], row["schedule"]) == (mode, batch, schedule))


def _range(row: dict[str, Any]) -> str:
    return f"{row['seconds'] * 1e3:.1f} ({row['seconds_min'] * 1e3:.1f}–{row['seconds_max'] * 1e3:.1f})"


def _ahead(inputs: Inputs) -> Part:
    """The double buffer of the host: does its thread pay?"""
    storage, upstream = inputs.need("storage"), inputs.upstream()["double_buffering"]
    rows = [
        {
            "mode": mode["mode"],
            "taker": taker,
            **{key: mode["gain_of_reading_ahead"][taker][key] for key in ("median", "min", "max", "n")},
        }
        for taker in TAKERS
        for mode in storage["modes"]
    ]

    def draw(fig: Any, narrow: bool) -> None:
        axes = fig.subplots()
        place = 0.0
        ticks, names = [], []
        for colour, taker in zip((plots.B, plots.A), TAKERS, strict=True):
            for row in (each for each in rows if each["taker"] == taker):
                axes.plot([100 * row["min"], 100 * row["max"]], [place, place], color=colour, linewidth=2)
                axes.plot([100 * row["median"]], [place], "o", color=colour, markersize=7)
                ticks.append(place)
                names.append(f"{row['mode']}, {'idle taker' if taker == 'idle' else 'making frames'}")
                place += 1
        for each in upstream["rows"]:
            gains = [100 * gain for gain in each["gains"]]
            axes.plot(gains, [place] * len(gains), "^", color=plots.SOFT, fillstyle="none", markersize=7)
            ticks.append(place)
            names.append(f"{each['storage']} (reported)")
            place += 1
        axes.axvline(0, color=plots.INK, linewidth=1)
        axes.set_yticks(ticks, names)
        axes.invert_yaxis()
        axes.set_xlabel(
            "% gained, min–max (measured)"
            if narrow
            else "% more bytes a second with a thread that reads ahead: median and min–max (measured)"
        )
        axes.grid(axis="x")

    gains = [row for row in rows if row["taker"] == "framing"]
    wins = [row["mode"] for row in gains if row["min"] > 0]
    loses = [row["mode"] for row in rows if row["taker"] == "idle" and row["median"] < 0]
    best = max(gains, key=lambda row: row["median"])
    sentence = (
        f"Reading ahead is worth its thread when the taker works: {best['median']:+.0%} ({best['min']:+.0%} to "
        f"{best['max']:+.0%}) "
        f"for {best['mode']} reads; its whole range is above zero for {len(wins)} of {len(gains)} kinds of read, and "
        "it costs in "
        f"{len(loses)} of {len(gains)} where the taker is idle."
    )
    html = Html(
        "<h3>Does the host's double buffer earn its thread?</h3>"
        + plots.picture(
            "ahead",
            "Gain of reading ahead, by kind of read and taker; triangles: what sw-ml-study/emufpga reports",
            "; ".join(
                f"{row['mode']}, {TAKERS[row['taker']]}: {row['median']:+.1%} ({row['min']:+.1%} to "
                f"{row['max']:+.1%}), n={row['n']}"
                for row in rows
            ),
            draw,
            height=(3.2, 3.6),
        )
        + table(
            "Gain of reading ahead, median (min–max), n runs (measured)",
            ["read", *TAKERS.values()],
            [
                [
                    mode["mode"],
                    *(
                        f"{row['median']:+.1%} ({row['min']:+.1%} to {row['max']:+.1%}), {row['n']}"
                        for taker in TAKERS
                        for row in rows
                        if (row["taker"], row["mode"]) == (taker, mode["mode"])
                    ),
                ]
                for mode in storage["modes"]
            ],
        )
    )
    return html, {"reading_ahead": rows}, sentence


def _sweep(inputs: Inputs) -> Part:
    """The double buffer of the engine: asking for two matrices at a time."""
    sweep = inputs.need("sweep")
    rows = sweep["rows"]
    rates = sorted({row["rate"] for row in rows})
    latencies = sorted({row["latency"] for row in rows})

    def cycles(rate: int, latency: int, out: int) -> float:
        return next(
            row["cycles_per_block"]
            for row in rows
            if (row["rate"], row["latency"], row["outstanding"]) == (rate, latency, out)
        )

    def draw(fig: Any, narrow: bool) -> None:
        axes = fig.subplots()
        for colour, rate in zip(plots.SERIES, rates, strict=False):
            gains = [100 * (cycles(rate, latency, 1) / cycles(rate, latency, 2) - 1) for latency in latencies]
            axes.plot(range(len(latencies)), gains, "s-", color=colour, label=f"{rate} B a cycle")
        axes.set_xticks(range(len(latencies)), [f"{latency:,}" for latency in latencies])
        axes.set_xlabel("cycles until an answer begins")
        axes.set_ylabel("% faster with two requests out")
        axes.grid(axis="y")
        axes.legend(title="link (counted)", title_fontsize=8)

    best = max((cycles(r, la, 1) / cycles(r, la, 2) - 1, r, la) for r in rates for la in latencies)
    still = cycles(rates[0], latencies[0], 1) / cycles(rates[0], latencies[0], 2) - 1
    html = Html(
        "<h3>Does the engine's asking ahead?</h3>"
        + paragraph(
            f"Four experts of {GRANITE_1B.name}'s shapes, one token; with two requests unanswered the next matrix is "
            "on its way while "
            "one is used. ",
            tag(sweep["provenance"]),
            f" Most: {best[0]:.0%}, at {best[1]} B a cycle and {best[2]:,} cycles of latency. Without latency: "
            f"{still:.1%}.",
        )
        + plots.picture(
            "asking",
            "Gain of two outstanding requests over one, by latency and rate of the link",
            "; ".join(
                f"{rate} B a cycle: "
                + ", ".join(f"{cycles(rate, la, 1) / cycles(rate, la, 2) - 1:.1%} at {la:,}" for la in latencies)
                for rate in rates
            ),
            draw,
            height=(3.0, 3.0),
        )
        + details(
            "Cycles a block, all combinations",
            table(
                "Cycles a block (counted)",
                ["B a cycle", "latency", "1 out", "2 out", "4 out", "gain of 2"],
                [
                    [
                        str(rate),
                        f"{la:,}",
                        *(f"{cycles(rate, la, out):.2f}" for out in (1, 2, 4)),
                        f"{cycles(rate, la, 1) / cycles(rate, la, 2) - 1:.1%}",
                    ]
                    for rate in rates
                    for la in latencies
                ],
            ),
        )
    )
    return html, {"asking_ahead": rows}, ""


def _host(inputs: Inputs) -> Part:
    """A layer in software on this host, by batch; what the other project reports of its host beside it."""
    report, upstream = inputs.need("host_layer"), inputs.upstream()["host_tokens_per_second"]
    rows = report["rows"]
    names = {"all": "all experts read", "union": "the union read"}

    def draw(fig: Any, narrow: bool) -> None:
        axes = fig.subplots()
        for shift, colour, (schedule, name) in zip((0.97, 1.03), (plots.B, plots.A), names.items(), strict=True):
            mine = [row for row in rows if row["schedule"] == schedule]
            values = [row["cpu_seconds"] for row in mine]
            axes.errorbar(
                [row["batch"] * shift for row in mine],
                [1e3 * each["median"] / row["batch"] for row, each in zip(mine, values, strict=True)],
                yerr=[
                    [
                        1e3 * abs(each["median"] - each[end]) / row["batch"]
                        for row, each in zip(mine, values, strict=True)
                    ]
                    for end in ("min", "max")
                ],
                color=colour,
                marker="o",
                capsize=3,
                label=f"{name} (measured)",
            )
        plots.powers(axes, sorted({row["batch"] for row in rows}), "batch, tokens")
        axes.set_ylabel("CPU ms a layer and token")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        axes.legend()

    def cell(each: dict[str, Any], form: str, scale: float = 1) -> str:
        return f"{each['median'] * scale:{form}} ({each['min'] * scale:{form}}–{each['max'] * scale:{form}})"

    html = Html(
        "<h3>The same layer in software, on one host</h3>"
        + paragraph(
            f"The control that needs no hardware: read, decode, multiply, in NumPy and one thread, {report['cpus']} "
            f"cores, load {report['load']:.1f} at the end. Decoding is most of it, and only wanted experts are "
            "decoded, so in the page cache it hardly matters how many are read. ",
            tag(report["provenance"]["seconds"]),
        )
        + plots.picture(
            "host-layer",
            "CPU time of one Granite-size layer in software, a token, by batch: median and min–max",
            "; ".join(
                f"{names[row['schedule']]}, batch {row['batch']}: {cell(row['cpu_seconds'], '.0f', 1e3)} ms"
                for row in rows
            ),
            draw,
            height=(3.0, 3.0),
        )
        + table(
            f"One layer, median (min–max) of {report['runs']} runs (measured)",
            ["schedule", "batch", "experts read", "ms a layer", "CPU ms a layer", "tokens/s, this layer alone"],
            [
                [
                    names[row["schedule"]],
                    row["batch"],
                    row["experts_read"],
                    cell(row["seconds"], ".0f", 1e3),
                    cell(row["cpu_seconds"], ".0f", 1e3),
                    cell(row["layer_tokens_per_second"], ".1f"),
                ]
                for row in rows
            ],
        )
        + details(
            "What sw-ml-study/emufpga reports of its host",
            paragraph(
                "Experts of a block in scalar Rust on another machine, so no ratio is taken. ",
                tag(upstream["provenance"]),
            )
            + table(
                "Tokens/s, median (min–max) of 7 runs (reported)",
                ["schedule", "batch", "tokens/s"],
                [
                    [esc(row["schedule"]), str(row["batch"]), f"{row['median']} ({row['min']}–{row['max']})"]
                    for row in upstream["rows"]
                ],
                words=2,
            ),
        )
    )
    flat = [
        {
            "schedule": row["schedule"],
            "batch": row["batch"],
            "experts_read": row["experts_read"],
            **{
                f"{key}{'' if part == 'median' else '_' + part}": row[key][part]
                for key in ("seconds", "cpu_seconds", "layer_tokens_per_second")
                for part in ("median", "min", "max")
            },
            "n": row["seconds"]["n"],
        }
        for row in rows
    ]
    return html, {"host": flat, "reported_host": upstream["rows"]}, ""
