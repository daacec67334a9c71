"""``make sim-token``: one token through every layer of a Granite-size model, in hardware, bit for bit.

``python -m sim.whole_token [--model FILE.gguf] [--record]`` chains the layers: each layer's output, as the engine gives
it, is added to the hidden state, which is normalised and routed for the next. Attention is left out, so the text means
nothing; the bytes and cycles are those of a token. Without ``--model``, a file of Granite 3.1 1B-A400M's shapes with
seeded random weights is made in ``build/``. Exit status 1 if a bit differs.
"""

import argparse
import hashlib
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from host.model_file import ModelFile, ModelFileError
from hw.formats.arithmetic import FRACTION_BITS
from hw.formats.messages import Counter
from hw.formats.q6_k import BLOCK_BYTES
from models import synthetic
from sim import record
from sim.engine_sim import EngineSim, differences
from sim.golden import activations
from sim.run import ROOT, clock, params_for, say
from sim.workload import embeddings, engine_layer, engine_routes, normalise, reader, route

SEED = 1
TOKEN = b"m"
"""Its embedding is where the chain starts."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.whole_token", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, metavar="FILE.gguf")
    parser.add_argument("--board", default="ulx3s_25f", help="whose routed clock turns cycles into seconds")
    parser.add_argument("--record", action="store_true", help="write sim/results/token.json")
    args = parser.parse_args(argv)
    try:
        path = args.model or synthetic_file("granite-1b")
        figures = run(path, board=args.board)
    except (ModelFileError, synthetic.OutputError, OSError, RuntimeError, ValueError) as error:
        print(f"make sim-token: error: {error}", file=sys.stderr)
        return 1
    verdict = "yes" if figures["bit_exact"] else "NO"
    hz, seconds = figures["clock_hz"], figures["seconds"]
    time_text = "clock unknown"
    if seconds is not None:
        rate = figures["bytes_requested"] / seconds / 1e6
        time_text = f"{seconds * 1e3:.1f} ms at {hz / 1e6:.1f} MHz (derived), if {rate:,.0f} MB/s arrive"
    print(
        f"\n{figures['layers']} layers, {figures['outputs']:,} outputs bit-exact: {verdict}\n"
        f"{figures['bytes_requested']:,} bytes requested and moved (counted), {figures['blocks']:,} blocks\n"
        f"{figures['cycles']:,} cycles (counted), {figures['cycles_per_block']:.3f} a block, all included\n"
        f"{time_text}"
    )
    written = record.write("token", "make sim-token RECORD=1", figures, record=args.record)
    print(f"\nwritten to {written}")
    return 0 if figures["bit_exact"] else 1


def synthetic_file(shape: str, layers: int | None = None) -> Path:
    """A file of a public model's shapes in ``build/``, made if it is not there."""
    count = synthetic.SHAPES[shape].layers if layers is None else layers
    path = ROOT / "build" / f"{shape}-{count}.gguf"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        say(f"making {path}, random weights")
        synthetic.write(path, synthetic.SHAPES[shape], count, seed=SEED)
    return path


def run(path: Path, *, board: str) -> dict[str, Any]:
    """The chain's figures."""
    with ModelFile.open(path) as model:
        params = params_for(model)
        read = reader(model)
        digest = hashlib.sha256()
        hidden = embeddings(model, TOKEN)
        cycles = requested = moved = blocks = outputs = wrong = 0
        hardware = reference = 0.0
        with EngineSim(params, say=say) as engine:
            for layer in model.layers:
                x = normalise(model, layer, hidden)
                quantized = activations.quantize(x)
                routes = engine_routes(route(model, layer, x))
                shape = engine_layer(model, layer)
                start = time.monotonic()
                result = engine.run_layer(shape, quantized, routes, read)
                hardware += time.monotonic() - start
                start = time.monotonic()
                wrong += differences(result, shape, read, quantized, routes)
                reference += time.monotonic() - start
                outputs += result.y.size
                cycles += result.cycles
                requested += result.counters[Counter.REQUESTED_BYTES]
                moved += result.counters[Counter.MOVED_BYTES]
                blocks += result.counters[Counter.USEFUL_BYTES] // BLOCK_BYTES
                digest.update(result.y.astype("<i8").tobytes())
                hidden = hidden + np.ldexp(result.y.astype(np.float64), -FRACTION_BITS)
                say(f"layer {layer.index}: {result.cycles:,} cycles, {'equal' if not wrong else 'WRONG'}")
        count = len(model.layers)
    routed = clock(board, params)
    return {
        "model": path.name,
        "bit_exact": wrong == 0 and moved == requested,
        "layers": count,
        "outputs": outputs,
        "outputs_sha256": digest.hexdigest(),
        "bytes_requested": requested,
        "blocks": blocks,
        "cycles": cycles,
        "cycles_per_block": cycles / blocks,
        "clock_hz": routed["hz"],
        "seconds": None if routed["hz"] is None else cycles / routed["hz"],
        "host_seconds": {"simulation": round(hardware, 1), "golden": round(reference, 1)},
        "params": asdict(params),
        "provenance": {
            "bit_exact": "measured: every output of every layer compared with the NumPy golden model",
            "cycles": "counted: Verilated engine, always-ready feed; vectors, routes and outputs included",
            "bytes_requested": "counted by the engine; equal to the bytes moved",
            "clock_hz": routed["provenance"],
            "seconds": "derived: cycles / clock_hz",
            "weights": "synthetic: random Q6_K blocks in Granite 3.1 1B-A400M's shapes, seed 1",
            "host_seconds": "measured once, this computer",
        },
    }


if __name__ == "__main__":
    sys.exit(main())
