"""``make replay``: real routes through the engine; how many experts a batch of a given size makes it fetch.

``python -m sim.replay ROUTES.csv [--layer N] [--record]`` reads decode routes of a real model (``route_trace v1``: a
row for every token, layer and expert, as the public project Helldez/BigMoeOnEdge writes them), forms batches of
consecutive tokens of one layer and runs each through the Verilated engine: the model's experts and routes, but small
random matrices, since how many experts pass does not depend on their size. The unions come out of the engine's own
counters and are compared with the trace's.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from host import routing
from hw.formats.messages import Counter, Layer
from hw.formats.params import Params
from sim import record
from sim.engine_sim import EngineSim, differences
from sim.golden import activations
from sim.golden.layer import Route
from sim.run import say
from sim.workload import random_blocks

BATCHES = (1, 2, 4, 8, 16, 32)
WIDTH = 256


@dataclass(frozen=True)
class Trace:
    """Routes of one layer: for each token in order, its (expert, weight) pairs."""

    model: str
    experts: int
    layer: int
    tokens: list[list[tuple[int, float]]]


def read_trace(path: Path, layer: int) -> Trace:
    """One layer of a ``route_trace v1`` file; ValueError naming the file if it is something else."""
    trace = routing.read(path)
    tokens: dict[tuple[int, bool, int], list[tuple[int, float]]] = {}
    for row in trace.rows:
        if row.layer == layer:
            tokens.setdefault((row.turn, row.decoded, row.step), []).append((row.expert, row.weight))
    if not tokens:
        raise ValueError(f"{path}: no routes of layer {layer}")
    return Trace(trace.model, trace.experts, layer, list(tokens.values()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.replay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("routes", type=Path, metavar="ROUTES.csv")
    parser.add_argument("--layer", type=int, default=0, metavar="N")
    parser.add_argument("--record", action="store_true", help="write sim/results/unions.json")
    args = parser.parse_args(argv)
    try:
        figures = replay(read_trace(args.routes, args.layer), BATCHES)
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        print(f"make replay: error: {error}", file=sys.stderr)
        return 1
    figures["source"] = f"{args.routes.name} of Helldez/BigMoeOnEdge (Apache-2.0), commit 2d4f2b11db12"
    print(f"\n{figures['model']}, layer {args.layer}, {figures['experts']} experts\n")
    print("batch  union (engine)  union (trace)  independent   fetches saved by sharing")
    for row in figures["rows"]:
        print(
            f"{row['batch']:>5}{row['union_engine']:>16}{row['union_trace']:>15}{row['union_independent']:>13.1f}"
            f"{row['saved']:>14.1%}"
        )
    written = record.write("unions", f"make replay ROUTES={args.routes.name}", figures, record=args.record)
    print(f"\nwritten to {written}")
    return 0 if figures["equal"] else 1


def replay(trace: Trace, batches: tuple[int, ...]) -> dict[str, Any]:
    """Run the trace's first tokens in batches of every size; the engine's unions beside the trace's."""
    rng = np.random.default_rng(0)
    params = Params(max_batch=32, max_width=WIDTH, max_expert_width=WIDTH, max_experts=trace.experts)
    layer = Layer(WIDTH, WIDTH, trace.experts, (0, 0, 0))
    size = layer.matrix_bytes
    layer = replace(layer, offsets=(0, trace.experts * size, 2 * trace.experts * size))
    blob = random_blocks(rng, 3 * trace.experts * size // 210, d=3e-5).reshape(-1)

    def read(offset: int, length: int):
        return blob[offset:][:length]

    rows = []
    equal = True
    with EngineSim(params, say=say) as engine:
        for batch in batches:
            if batch > len(trace.tokens):
                raise ValueError(f"the trace has {len(trace.tokens)} tokens, too few for a batch of {batch}")
            chosen = trace.tokens[:batch]
            x = activations.quantize(rng.standard_t(2.5, (batch, WIDTH)))
            routes = [
                Route(token, expert, min(round(weight * 65536), 65536))
                for token, pairs in enumerate(chosen)
                for expert, weight in pairs
            ]
            run = engine.run_layer(layer, x, routes, read)
            union = len({expert for pairs in chosen for expert, _ in pairs})
            counted = run.counters[Counter.REQUESTED_BYTES] // (3 * size)
            equal = equal and union == counted and differences(run, layer, read, x, routes) == 0
            used = len(chosen[0])
            say(f"batch {batch}: {counted} experts fetched for {len(routes)} routes")
            rows.append(
                {
                    "batch": batch,
                    "union_engine": counted,
                    "union_trace": union,
                    "union_independent": trace.experts * (1 - (1 - used / trace.experts) ** batch),
                    "saved": 1 - counted / len(routes),
                }
            )
    return {
        "model": trace.model,
        "experts": trace.experts,
        "layer": trace.layer,
        "equal": equal,
        "rows": rows,
        "provenance": {
            "union_engine": "counted by the Verilated engine: bytes requested / bytes of an expert",
            "union_trace": "derived from the trace: different experts among the batch's routes",
            "union_independent": "derived: E (1 - (1 - k / E)^B), uniform and independent",
            "saved": "derived: 1 - union_engine / routes",
        },
    }


if __name__ == "__main__":
    sys.exit(main())
