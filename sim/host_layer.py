"""``make host-layer``: what a Granite-size layer takes in software on this host, by batch, all experts and the union.

``python -m sim.host_layer [--record]`` reads a layer's experts from a file of Granite 3.1 1B-A400M's shapes (random
weights) as the driver does, decodes those that a token wants and multiplies in float64 with NumPy, one thread. *All*
reads every expert and decodes the wanted ones, as a tape; *union* reads only those. All kinds take turns in each run.
It is the control that needs no hardware, not a fast program: llama.cpp's is in ``make agents``.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from host.model_file import ModelFile, ModelFileError, MoeLayer
from host.storage import StorageError, Store
from hw.formats.q6_k import BLOCK_BYTES
from sim import record
from sim.golden import q6_k
from sim.run import say
from sim.whole_token import synthetic_file
from sim.workload import Routes, route, silu, token_vectors

TEXT = b"emufpga!"
"""The largest batch, as in ``make layer-cycles``."""
BATCHES = (1, 2, 4, 8)
SCHEDULES = ("all", "union")
RUNS = 7

Floats = NDArray[np.float64]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.host_layer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help="of every kind (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write sim/results/host_layer.json")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        figures = measure(str(synthetic_file("granite-1b", 1)), BATCHES, args.runs)
    except (ModelFileError, OSError, StorageError, ValueError) as error:
        print(f"make host-layer: error: {error}", file=sys.stderr)
        return 1
    print(f"\n{'schedule':<9}{'batch':>6}{'experts':>9}  {'tokens/s, one layer':<28}CPU ms a layer")
    for row in figures["rows"]:
        speed, cpu = row["layer_tokens_per_second"], row["cpu_seconds"]
        print(
            f"{row['schedule']:<9}{row['batch']:>6}{row['experts_read']:>9}  "
            f"{speed['median']:>7.2f} ({speed['min']:.2f}-{speed['max']:.2f})".ljust(54)
            + f"{cpu['median'] * 1e3:>8.0f} ({cpu['min'] * 1e3:.0f}-{cpu['max'] * 1e3:.0f})"
        )
    written = record.write("host_layer", "make host-layer RECORD=1", figures, record=args.record)
    print(f"\nwritten to {written}")
    return 0


def measure(path: str, batches: tuple[int, ...], runs: int, clock: Callable[[], float] = time.perf_counter) -> Any:
    """Seconds of a layer, wall and CPU, for every batch and schedule; medians of ``runs``."""
    kinds = [(schedule, batch) for batch in batches for schedule in SCHEDULES]
    wall: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    cpu: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    with ModelFile.open(path) as model, Store(path, ahead=False) as store:
        layer = model.layers[0]
        x = token_vectors(model, layer, TEXT[: max(batches)])
        routes = route(model, layer, x)
        for turn in range(runs + 1):  # the first warms the page cache and does not count
            for kind in kinds if turn % 2 else reversed(kinds):
                schedule, batch = kind
                begin, used = clock(), time.process_time()
                run_layer(layer, store, x[:batch], Routes(routes.experts[:batch], routes.weights[:batch]), schedule)
                if turn:
                    wall[kind].append(clock() - begin)
                    cpu[kind].append(time.process_time() - used)
            say(f"run {turn} of {runs}")
        wanted = {batch: len(np.unique(routes.experts[:batch])) for batch in batches}
        sizes = {"experts": layer.experts, "expert_bytes": layer.expert_bytes}
    load = os.getloadavg()[0]
    return {
        "file": os.path.basename(path),
        **sizes,
        "runs": runs,
        "cpus": os.cpu_count(),
        "load": load,
        "rows": [
            {
                "schedule": schedule,
                "batch": batch,
                "experts_read": layer.experts if schedule == "all" else wanted[batch],
                "experts_decoded": wanted[batch],
                "seconds": spread(wall[schedule, batch]),
                "cpu_seconds": spread(cpu[schedule, batch]),
                "layer_tokens_per_second": spread([batch / each for each in wall[schedule, batch]]),
            }
            for schedule, batch in kinds
        ],
        "provenance": {
            "seconds": "measured: this host, NumPy float64, one thread, file in the page cache; median of n runs",
            "cpu_seconds": "measured: CPU time of the process, which other programs do not stretch",
            "experts_decoded": "derived from the routes: experts that a token wants",
            "load": "measured: programs that wanted this host's cores, this one included, at the end",
        },
    }


def spread(values: list[float]) -> dict[str, Any]:
    """Median, least and most of n values."""
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def run_layer(layer: MoeLayer, store: Store, x: Floats, routes: Routes, schedule: str) -> Floats:
    """The layer's output: every token's experts by their weights; reads all experts or the union, in order."""
    y = np.zeros_like(x)
    for expert in range(layer.experts):
        tokens, ranks = np.nonzero(routes.experts == expert)
        if not len(tokens) and schedule == "union":
            continue
        pieces = []
        for tensor in (layer.gate, layer.up, layer.down):
            piece = tensor.slice(expert)
            held = store.read(piece.offset, piece.length)
            if len(tokens):
                pieces.append(decode(held, tensor.rows))
            del held  # its buffer is used again
        if len(tokens):
            gate, up, down = pieces
            hidden = silu(x[tokens] @ gate.T) * (x[tokens] @ up.T)
            y[tokens] += routes.weights[tokens, ranks][:, None] * (hidden @ down.T)
    return y


def decode(held: memoryview | NDArray[np.uint8], rows: int) -> Floats:
    """A matrix of Q6_K blocks as float64, ``rows`` × columns."""
    return q6_k.dequantize(np.frombuffer(held, np.uint8).reshape(-1, BLOCK_BYTES)).reshape(rows, -1)


if __name__ == "__main__":
    sys.exit(main())
