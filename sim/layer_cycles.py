"""``make layer-cycles``: cycles of one Granite-size layer by batch and token lanes, counted, bit for bit.

``python -m sim.layer_cycles [--record]`` runs a layer of Granite 3.1 1B-A400M's shapes (random weights) for batches of
1 to 8 tokens with 1 and 4 token lanes, in selected mode and once as tape, and counts all cycles from the first byte of
the configuration to the last of the outputs. ``emufpga seconds`` takes what a layer costs beside its blocks from them.
"""

import argparse
import sys
from dataclasses import replace
from typing import Any

from host.model_file import ModelFile, ModelFileError
from hw.formats.messages import Counter, Mode
from hw.formats.q6_k import BLOCK_BYTES
from sim import record
from sim.engine_sim import EngineSim, differences
from sim.golden import activations
from sim.run import params_for, say
from sim.whole_token import synthetic_file
from sim.workload import engine_layer, engine_routes, reader, route, token_vectors

TEXT = b"emufpga!"
"""The largest batch: one token for each byte, no two alike."""
RUNS = [(1, 1, Mode.SELECTED), (1, 2, Mode.SELECTED), (1, 4, Mode.SELECTED), (1, 8, Mode.SELECTED), (1, 1, Mode.TAPE)]
RUNS += [(4, 1, Mode.SELECTED), (4, 4, Mode.SELECTED), (4, 8, Mode.SELECTED)]
"""Token lanes, tokens, mode."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.layer_cycles", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write sim/results/layer_cycles.json")
    args = parser.parse_args(argv)
    try:
        figures = count()
    except (ModelFileError, OSError, RuntimeError, ValueError) as error:
        print(f"make layer-cycles: error: {error}", file=sys.stderr)
        return 1
    print("\nlanes  tokens  mode      experts  passes     blocks      cycles  cycles a block and pass")
    for row in figures["rows"]:
        each = row["cycles"] / (row["passes"] * figures["expert_blocks"])
        print(
            f"{row['lanes']:>5}{row['tokens']:>8}  {row['mode']:<8}{row['experts']:>9}{row['passes']:>8}"
            f"{row['blocks']:>11,}{row['cycles']:>12,}{each:>12.3f}"
        )
    written = record.write("layer_cycles", "make layer-cycles RECORD=1", figures, record=args.record)
    print(f"\nwritten to {written}")
    return 0 if figures["bit_exact"] else 1


def count() -> dict[str, Any]:
    """Cycles of every run; ``passes`` are the pairs of a wanted expert and a group of lanes with a token of it."""
    rows = []
    right = True
    with ModelFile.open(synthetic_file("granite-1b", 1)) as model:
        layer = model.layers[0]
        x = token_vectors(model, layer, TEXT)
        read = reader(model)
        for lanes in sorted({lanes for lanes, _, _ in RUNS}):
            with EngineSim(replace(params_for(model), tokens=lanes), say=say) as engine:
                for tokens, mode in [(tokens, mode) for other, tokens, mode in RUNS if other == lanes]:
                    routes = engine_routes(route(model, layer, x[:tokens]))
                    quantized = activations.quantize(x[:tokens])
                    shape = engine_layer(model, layer, mode)
                    run = engine.run_layer(shape, quantized, routes, read)
                    right = right and differences(run, shape, read, quantized, routes) == 0
                    row = {
                        "lanes": lanes,
                        "tokens": tokens,
                        "mode": mode.name.lower(),
                        "experts": len({expert for _, expert, _ in routes}),
                        "passes": len({(expert, token // lanes) for token, expert, _ in routes}),
                        "blocks": run.counters[Counter.MOVED_BYTES] // BLOCK_BYTES,
                        "cycles": run.cycles,
                    }
                    rows.append(row)
                    say(f"{lanes} lanes, {tokens} tokens, {row['mode']}: {run.cycles:,} cycles")
        blocks = layer.expert_bytes // BLOCK_BYTES
        sizes = {"width": model.width, "expert_width": model.expert_width, "layer_experts": layer.experts}
    return {
        "bit_exact": right,
        **sizes,
        "expert_blocks": blocks,
        "rows": rows,
        "provenance": {
            "cycles": "counted: Verilated engine, 16 bytes a cycle, always-ready feed; vectors and outputs included",
            "blocks": "counted by the engine: bytes moved / 210",
            "experts": "derived from the routes: experts that a token wants",
            "passes": "derived from the routes: pairs of an expert and a group of lanes with a token that wants it",
        },
    }


if __name__ == "__main__":
    sys.exit(main())
