"""``make sweep``: what a slow link and a late store cost, and what asking ahead saves.

``python -m sim.sweep [--record]`` runs four experts of a Granite-size layer for one token, for every feed rate, latency
and number of requests that may be unanswered, and writes a table (``sim/results/sweep.json``) and a plot
(``docs/feed.png``). The engine keeps two blocks; whatever is asked for ahead lies in the store's or the host's memory.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from host.model_file import ModelFile, ModelFileError
from hw.formats.messages import Counter
from hw.formats.q6_k import BLOCK_BYTES
from sim import record
from sim.engine_sim import EngineSim, Feed
from sim.golden import activations
from sim.golden import layer as golden
from sim.run import ROOT, params_for, say
from sim.whole_token import TOKEN, synthetic_file
from sim.workload import engine_layer, engine_routes, reader, route, token_vectors

RATES = (1, 2, 4, 8, 16)
LATENCIES = (0, 1_000, 10_000, 100_000)
OUTSTANDING = (1, 2, 4)
EXPERTS = 4


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.sweep", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write sim/results/sweep.json and docs/feed.png")
    args = parser.parse_args(argv)
    try:
        figures = sweep(synthetic_file("granite-1b", 1))
    except (ModelFileError, OSError, RuntimeError, ValueError) as error:
        print(f"make sweep: error: {error}", file=sys.stderr)
        return 1
    print(table(figures))
    written = record.write("sweep", "make sweep RECORD=1", figures, record=args.record)
    picture = (ROOT / "docs" if args.record else written.parent) / "feed.png"
    plot(figures, picture)
    print(f"\nwritten to {written} and {picture}")
    return 0 if figures["bit_exact"] else 1


def sweep(path: Path) -> dict[str, Any]:
    """Cycles a block of every combination."""
    rows = []
    right = True
    with ModelFile.open(path) as model:
        layer = model.layers[0]
        x = token_vectors(model, layer, TOKEN)
        routes = engine_routes(route(model, layer, x))[:EXPERTS]
        quantized = activations.quantize(x)
        read = reader(model)
        y, _ = golden.run(engine_layer(model, layer), read, quantized, routes)
        blocks = len(routes) * layer.expert_bytes // BLOCK_BYTES
        with EngineSim(params_for(model), say=say) as engine:
            for rate in RATES:
                for latency in LATENCIES:
                    for outstanding in OUTSTANDING:
                        engine.feed(Feed(latency=latency, rate=rate))
                        shape = engine_layer(model, layer, outstanding=outstanding)
                        run = engine.run_layer(shape, quantized, routes, read)
                        right = right and bool((run.y == y).all())
                        counters = {counter.name.lower(): run.counters[counter] for counter in Counter}
                        row = {"rate": rate, "latency": latency, "outstanding": outstanding, "cycles": run.cycles}
                        rows.append({**row, "cycles_per_block": run.cycles / blocks, **counters})
                say(f"{rate} bytes a cycle: done")
    return {
        "bit_exact": right,
        "experts": EXPERTS,
        "blocks": blocks,
        "rows": rows,
        "provenance": "counted: Verilated engine, W=16, TOKENS=1, Granite 3.1 1B-A400M's shapes, random weights",
    }


def table(figures: dict[str, Any]) -> str:
    """Cycles a block, by rate and latency down, requests across; and where the cycles went with two requests."""
    head = "  ".join(f"{n} out" for n in OUTSTANDING)
    lines = [f"{'B/cycle':>8}{'latency':>9}   {head:<24}gain of 2   active  starved  back-pr.  overhead  (2 out)"]
    for rate in RATES:
        for latency in LATENCIES:
            rows = [r for r in figures["rows"] if (r["rate"], r["latency"]) == (rate, latency)]
            cycles = [row["cycles_per_block"] for row in rows]
            two = rows[1]
            shares = [two[name] / sum(two[state] for state in STATES) for name in STATES]
            lines.append(
                f"{rate:>8}{latency:>9,}   "
                + "".join(f"{value:>7.2f}" for value in cycles)
                + f"{cycles[0] / cycles[1] - 1:>12.1%}   "
                + "".join(f"{share:>9.1%}" for share in shares)
            )
    return "\n".join(lines)


STATES = ("active", "starved", "back_pressured", "overhead")


def plot(figures: dict[str, Any], path: Path) -> None:
    """Cycles a block against latency, one panel a feed rate, one line a number of requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(RATES), figsize=(13, 3.6), sharey=True, layout="constrained")
    for rate, panel in zip(RATES, panels, strict=True):
        for outstanding, style in zip(OUTSTANDING, ("o-", "s--", "^:"), strict=True):
            rows = [r for r in figures["rows"] if (r["rate"], r["outstanding"]) == (rate, outstanding)]
            label = f"{outstanding} request{'s' if outstanding > 1 else ''} out"
            panel.plot(np.arange(len(rows)), [row["cycles_per_block"] for row in rows], style, label=label)
        bound = max(16, BLOCK_BYTES / rate)
        panel.axhline(bound, color="grey", linewidth=0.8)
        panel.text(0, bound * 0.9, f"bound {bound:.0f}", color="grey", fontsize=8, va="top")
        panel.set_xticks(np.arange(len(LATENCIES)), [f"{latency:,}" for latency in LATENCIES], fontsize=8)
        panel.set_title(f"{rate} B a cycle", fontsize=10)
        panel.set_yscale("log")
        panel.set_yticks([16, 32, 64, 128, 256], ["16", "32", "64", "128", "256"])
        panel.set_ylim(12, 300)
        panel.minorticks_off()
        panel.set_xlabel("latency, cycles")
    panels[0].set_ylabel("cycles a block (counted)")
    panels[-1].legend(fontsize=8, loc="upper left")
    figure.suptitle("What a slow link and a late store cost: four Granite-size experts, one token", fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
