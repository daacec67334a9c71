"""``make link-rate``: what the link costs, counted in RTL, and what the driver costs the simulation.

``python -m sim.link_rate [--record]`` lets a layer's experts pass in tape mode with no token wanting any, so that the
engine takes bytes as fast as the link brings them, over AXI-Stream (Granite's shapes, frames of 64 KiB) and over a UART
(one small expert, frames of 4 KiB). Then it runs a Granite layer of one token through the driver, and the same cycles
with the same bytes in a bare loop, several times in turn.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from host.device import Device, LayerResult
from host.model_file import ModelFile
from host.storage import Store
from hw.formats.messages import Counter, Layer, Mode
from hw.formats.params import Params
from hw.link import uart
from sim import record
from sim.device_sim import SimTransport
from sim.golden import activations
from sim.golden import layer as golden
from sim.run import say
from sim.whole_token import synthetic_file
from sim.workload import engine_layer, engine_routes, reader, route, token_vectors

BIT_CLOCKS = 4
RUNS = 5
TEXT = b"m"
SMALL = {"max_width": 256, "max_expert_width": 256, "max_experts": 4}
GRANITE = {"max_width": 1024, "max_expert_width": 512, "max_experts": 32, "frame_bytes": 65536}


class Recorder(SimTransport):
    """Remembers what was written at which cycle."""

    def __init__(self, params: Params, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.written: list[tuple[int, bytes]] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append((self.cycle, bytes(data)))
        super().write(data)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.link_rate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write sim/results/link.json")
    args = parser.parse_args(argv)
    path = synthetic_file("granite-1b", 1)
    figures = {
        "axis": efficiency(path, Params(**GRANITE), None),
        "uart": efficiency(path, Params(**SMALL), BIT_CLOCKS),
        "driver": driver(path, Params(**GRANITE)),
        "provenance": {
            "payload_share": "counted: bytes of WEIGHTS payloads / bytes that the link could carry from the routes to "
            "the last output, every expert drained so that the engine never waits",
            "beside_over_weights": "counted: (all bytes written to the link - bytes of weights) / bytes of weights",
            "framing_over_weights": "counted: the same, less what a layer without weights writes",
            "driver_over_bare": "measured: cycles a second through the driver / those of a loop that only clocks the "
            "same model with the same bytes at the same cycles, in turn; median (min, max)",
        },
    }
    row = figures["driver"]
    median, low, high = row["driver_over_bare"]
    print(
        f"driver: {row['cycles']:,} cycles, {row['cycles_per_second']:,.0f} a second (measured), {median:.1%} of a "
        f"bare loop's ({low:.1%} to {high:.1%}, n = {row['n']}); outputs equal golden's: "
        f"{'yes' if row['bit_exact'] else 'NO'}"
    )
    print(f"\nwritten to {record.write('link', 'make link-rate RECORD=1', figures, record=args.record)}")
    return 0 if row["bit_exact"] else 1


def efficiency(path: Path, params: Params, bit_clocks: int | None) -> dict[str, Any]:
    """How full a link is while everything drains."""
    say(f"tape, nothing wanted, over {'AXI-Stream' if bit_clocks is None else 'a UART'}")
    transport = SimTransport(params, bit_clocks=bit_clocks, say=say)
    with ModelFile.open(path) as model, Device(transport) as device, Store(path) as store:
        moe = model.layers[0]
        layer = engine_layer(model, moe, Mode.TAPE)
        if bit_clocks is not None:  # a small expert in the same bytes; a whole layer would take an hour
            layer = Layer(params.max_width, params.max_expert_width, 1, layer.offsets, Mode.TAPE)
        x = activations.quantize([[0.0] * layer.width])
        result = device.run_layer(layer, x, [], store, deadline=1e6)
        without = device.run_layer(replace(layer, mode=Mode.SELECTED), x, [], store)  # the same but for the weights
    cycles, moved = result.counters[Counter.CYCLES], result.counters[Counter.MOVED_BYTES]
    slots = cycles * params.link_bytes if bit_clocks is None else cycles / (uart.BITS * bit_clocks)
    ledger = result.ledger
    beside = ledger.link_written - ledger.answered
    figures = {
        "weights_bytes": ledger.answered,
        "frame_bytes": params.frame_bytes,
        "cycles": cycles,
        "payload_share": moved / slots,
        "framing_over_weights": (beside - without.ledger.link_written) / ledger.answered,
        "beside_over_weights": beside / ledger.answered,
        "resent": ledger.link_resent,
    }
    say(
        f"weights fill {figures['payload_share']:.2%} of the link's byte slots (counted); their framing adds "
        f"{figures['framing_over_weights']:.3%} to their bytes, with all else of the layer "
        f"{figures['beside_over_weights']:.3%} (counted)"
    )
    return figures


def driver(path: Path, params: Params) -> dict[str, Any]:
    """A Granite layer through the driver, and the same cycles without it."""
    ratios, rates = [], []
    exact = True
    cycles = 0
    with ModelFile.open(path) as model:
        moe = model.layers[0]
        x = token_vectors(model, moe, TEXT)
        routes = engine_routes(route(model, moe, x))
        layer, quantized = engine_layer(model, moe), activations.quantize(x)
        sums, _ = golden.run(layer, reader(model), quantized, routes)
        for run in range(RUNS):
            transport = Recorder(params, say=say)
            with Device(transport) as device, Store(path) as store:
                begin, start = time.monotonic(), transport.cycle
                result: LayerResult = device.run_layer(layer, quantized, routes, store)
                through = time.monotonic() - begin
                end = transport.cycle
                exact = exact and bool((result.sums == sums).all())
                written = transport.written
            cycles = end - start
            with SimTransport(params) as bare:
                alone = replay(bare, written, start, end)
            ratios.append(alone / through)
            rates.append(cycles / through)
            say(f"run {run + 1} of {RUNS}: {through:.2f} s through the driver, {alone:.2f} s in a bare loop")
    return {
        "bit_exact": exact,
        "cycles": cycles,
        "cycles_per_second": statistics.median(rates),
        "driver_over_bare": [statistics.median(ratios), min(ratios), max(ratios)],
        "n": RUNS,
    }


def replay(transport: SimTransport, written: list[tuple[int, bytes]], start: int, end: int) -> float:
    """Seconds that the cycles from ``start`` to ``end`` take where nothing but the clock runs."""
    begin = time.monotonic()
    for cycle, data in written:
        if transport.cycle < start <= cycle:
            transport.spin(start - transport.cycle)
            begin = time.monotonic()
        transport.spin(cycle - transport.cycle)
        transport.write(data)
    transport.spin(end - transport.cycle)
    return time.monotonic() - begin


if __name__ == "__main__":
    sys.exit(main())
