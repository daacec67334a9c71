"""``make pipeline``: what every stage of the engine does, cycle by cycle, taken from its streams in simulation.

``python -m sim.trace [--record]`` runs layer 0 of the tiny model in the Verilated engine: selected, with nothing
wanted, and as tape. Each stream of ``POINTS`` has a monitor beside it (``sim/models/trace_point.v``); nothing else
changes. Of the tape run it keeps a window in which a wanted expert ends and an unwanted one begins. Every block that is
drawn is found by counting transfers, and the counts must equal the engine's own counters. Exit status 1 if a bit
differs.
"""

import argparse
import ctypes
import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from host.model_file import ModelFile, ModelFileError
from hw.formats.messages import Counter, Mode
from hw.formats.params import Params
from hw.formats.q6_k import BLOCK_BYTES, SUB_BLOCKS
from sim import record, shared_library
from sim.engine_sim import EngineSim, LayerRun, differences
from sim.golden import activations
from sim.run import ROOT, params_for, say
from sim.shared_library import Say
from sim.workload import engine_layer, engine_routes, reader, route, token_vectors

MODEL = ROOT / "models" / "tiny-moe-q6k.gguf"
TEXT = b"m"
"""The batch: one token for each byte."""
SHIM = Path(__file__).with_suffix(".cpp")
MONITOR = Path(__file__).parent / "models" / "trace_point.v"
WORD_BYTES = 16
WORDS = BLOCK_BYTES // WORD_BYTES
"""16-byte words of a block; its scale travels beside the last."""
SELECTED_BLOCKS, DRAINED_BLOCKS = 8, 16
"""In the window: wanted blocks that the multipliers take, then unwanted blocks that pass."""
IDLE, WAITS, MOVES = ".", "w", "x"
"""A stream in a cycle: nothing there; something there that is not taken; a transfer."""
KINDS = ("up", "gate", "down")
"""As ``hw.layouts.Kind``, which needs Amaranth."""

UPSTREAM = {
    "fetch": 14,
    "decode": 32,
    "mac": 16,
    "provenance": "reported: simulated by sw-ml-study/emufpga's behavioural model: 16 bytes a cycle fetched, 8 decode "
    "lanes, 16 MAC lanes, no step beside another",
}
"""Cycles that each step of a block takes there; an unwanted block is fetched and decoded."""


class TraceError(RuntimeError):
    """What the streams show is not what the engine counts, or a stream is not there; the text says which."""


@dataclass(frozen=True)
class Point:
    """A stream that is watched.

    Attributes
    ----------
    name
        Of the stage.
    module, component, port
        Where the stream is: components and their ports, as hw/ describes them.
    """

    name: str
    module: str
    component: str
    port: str

    @property
    def place(self) -> str:
        return f"{self.component}.{self.port}"


POINTS = (
    Point("fetch", "hw.matrix_engine", "MatrixEngine", "i"),
    Point("align", "hw.decode", "Decode", "i"),
    Point("mac", "hw.mac", "Mac", "i"),
    Point("sum", "hw.mac", "Mac", "o"),
    Point("row", "hw.accumulate", "Accumulate", "o"),
    Point("command", "hw.decode", "Decode", "i_matrix"),
)
"""All that this file knows of the hardware's inside. ``command`` is not drawn: it says what the bytes belong to."""
DRAWN = tuple(point.name for point in POINTS[:-1])
COMMAND = len(POINTS) - 1


class Matrix(NamedTuple):
    """A matrix as it was announced to the decoder."""

    rows: int
    columns: int
    kind: int
    wanted: bool

    @property
    def blocks(self) -> int:
        return self.rows * self.columns


class Block(NamedTuple):
    """A block of the stream: of which expert and matrix, its number there, and whether a token wants it."""

    expert: int
    kind: str
    block: int
    wanted: bool


@dataclass(frozen=True)
class Trace:
    """What the streams did in a layer.

    Attributes
    ----------
    states
        By point: each cycle's ``valid + 2 * ready``.
    matrices
        In the order of the stream.
    blocks
        All of them, likewise.
    owners
        By point drawn: of each transfer, the index of its block.
    """

    states: dict[str, NDArray[np.uint8]]
    matrices: list[Matrix]
    blocks: list[Block]
    owners: dict[str, NDArray[np.int64]]

    def moves(self, name: str) -> NDArray[np.int64]:
        """The cycles of a point's transfers."""
        return np.flatnonzero(self.states[name] == 3)


def design_id(params: Params) -> str:
    """Eight digits that tell one engine from another: of the hardware's sources and its parameters."""
    digest = hashlib.sha256(json.dumps(asdict(params)).encode())
    for source in sorted((ROOT / "hw").rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:8]


@contextmanager
def watched(points: Sequence[Point] = POINTS) -> Iterator[None]:
    """Every component of ``points`` elaborated meanwhile gets its monitors; TraceError where there is no such port."""
    by_component: dict[tuple[str, str], list[int]] = {}
    for number, point in enumerate(points):
        by_component.setdefault((point.module, point.component), []).append(number)
    with ExitStack() as stack:
        for (module, name), numbers in by_component.items():
            try:
                component = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as error:
                raise TraceError(f"sim/trace.py watches {module}.{name}, which is not there: mend POINTS") from error
            elaborate = _with_monitors(component.elaborate, {number: points[number] for number in numbers})
            stack.enter_context(patch.object(component, "elaborate", elaborate))
        yield


def _with_monitors(elaborate, points: dict[int, Point]):
    from amaranth.hdl import Cat, ClockSignal, Const, Instance

    def elaborate_watched(self, platform):
        m = elaborate(self, platform)
        for number, point in points.items():
            try:
                stream = getattr(self, point.port)
                value = Const(0, 32)
                if number == COMMAND:
                    command = stream.p
                    fields = (command.rows, command.columns, command.kind.as_value(), command.mask.any())
                    value = Cat(f | Const(0, size) for f, size in zip(fields, COMMAND_BITS, strict=True))
                valid, ready = stream.valid, stream.ready
            except AttributeError as error:
                raise TraceError(f"sim/trace.py watches {point.place}: {error}: mend POINTS") from error
            m.submodules[f"trace_point{number}"] = Instance(
                "trace_point",
                ("a", "keep", 1),
                ("p", "POINT", number),
                ("i", "clk", ClockSignal()),
                ("i", "valid", valid),
                ("i", "ready", ready),
                ("i", "value", value),
            )
        return m

    return elaborate_watched


COMMAND_BITS = (16, 13, 2, 1)
"""Of a monitor's value: rows, columns, kind, wanted."""


def build(params: Params, *, say: Say = lambda text: None) -> Path:
    """The engine with monitors as a library."""

    def make():
        from hw.engine import Engine

        return Engine(params)

    changes = [inspect.getsource(change) for change in (watched, _with_monitors)]
    points = [[*asdict(point).values()] for point in POINTS]
    key = ["trace", asdict(params), changes, COMMAND_BITS, points, (SHIM.parent / "engine_sim.cpp").read_text()]
    defines = {"LINK_BYTES": params.link_bytes}
    with watched():
        return shared_library.build(
            "engine", make, SHIM, key=key, defines=defines, extra=[MONITOR], optimise="-O1", say=say
        )


class Tracer:
    """The library's records of every cycle since they were last forgotten."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name, result in (
            ("trace_cycles", ctypes.c_size_t),
            ("trace_states", ctypes.POINTER(ctypes.c_uint8)),
            ("trace_transfers", ctypes.c_size_t),
            ("trace_values", ctypes.POINTER(ctypes.c_uint32)),
        ):
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, [ctypes.c_int]

    def forget(self) -> None:
        """Begin anew."""
        self._library.trace_clear()

    def states(self) -> dict[str, NDArray[np.uint8]]:
        """By point: ``valid + 2 * ready`` of each cycle; TraceError for a point that no engine had."""
        found = {}
        for number, point in enumerate(POINTS):
            count = self._library.trace_cycles(number)
            found[point.name] = np.array(self._library.trace_states(number)[:count], np.uint8)
        lengths = {name: len(states) for name, states in found.items()}
        if not all(lengths.values()) or len(set(lengths.values())) != 1:
            raise TraceError(f"the monitors saw different cycles, {lengths}: a stream of POINTS is not there once")
        return found

    def matrices(self) -> list[Matrix]:
        """As they were announced."""
        count = self._library.trace_transfers(COMMAND)
        found = []
        for value in self._library.trace_values(COMMAND)[:count]:
            fields = []
            for size in COMMAND_BITS:
                fields.append(value & ((1 << size) - 1))
                value >>= size
            rows, columns, kind, wanted = fields
            found.append(Matrix(rows, columns, kind, bool(wanted)))
        return found


def attribute(
    states: dict[str, NDArray[np.uint8]], matrices: Sequence[Matrix], experts: Sequence[int], link_bytes: int
) -> Trace:
    """Which block each transfer belongs to; ``experts`` are those whose matrices pass, in order.

    TraceError where a point has more or fewer transfers than its blocks need.
    """
    if len(matrices) != len(KINDS) * len(experts):
        raise TraceError(f"{len(matrices)} matrices were announced for {len(experts)} experts")
    blocks: list[Block] = []
    owners: dict[str, list[NDArray[np.int64]]] = {name: [] for name in DRAWN}
    for number, matrix in enumerate(matrices):
        first = len(blocks)
        expert, kind = experts[number // len(KINDS)], KINDS[matrix.kind]
        blocks += [Block(expert, kind, block, matrix.wanted) for block in range(matrix.blocks)]
        each = first + np.arange(matrix.blocks)
        beats = -(-matrix.blocks * BLOCK_BYTES // link_bytes)
        owners["fetch"].append(first + np.arange(beats) * link_bytes // BLOCK_BYTES)  # where a beat's first byte lies
        owners["align"].append(np.repeat(each, WORDS))
        if matrix.wanted:
            owners["mac"].append(np.repeat(each, SUB_BLOCKS))
            owners["sum"].append(each)
            owners["row"].append(each[matrix.columns - 1 :: matrix.columns])
    joined = {name: np.concatenate(parts) if parts else np.zeros(0, np.int64) for name, parts in owners.items()}
    trace = Trace(states, list(matrices), blocks, joined)
    for name, owner in joined.items():
        if len(trace.moves(name)) != len(owner):
            raise TraceError(f"{name}: {len(trace.moves(name)):,} transfers, not the {len(owner):,} of its blocks")
    return trace


def check(trace: Trace, counters: dict[Counter, int], link_bytes: int) -> None:
    """TraceError unless the streams show what the engine counted."""
    wanted = sum(block.wanted for block in trace.blocks)
    shown = {
        Counter.ACTIVE: len(trace.moves("mac")),
        Counter.BACK_PRESSURED: int(np.count_nonzero(trace.states["mac"] == 1)),
        Counter.MOVED_BYTES: link_bytes * len(trace.moves("fetch")),
        Counter.USEFUL_BYTES: BLOCK_BYTES * wanted,
        Counter.DRAINED_BYTES: BLOCK_BYTES * (len(trace.blocks) - wanted),
    }
    wrong = [
        f"{counter.name}: {value:,} seen, {counters[counter]:,} counted"
        for counter, value in shown.items()
        if value != counters[counter]
    ]
    if wrong:
        raise TraceError("the streams do not show what the engine counts: " + "; ".join(wrong))


def window(trace: Trace) -> dict[str, Any]:
    """The cycles around the first place where an unwanted expert follows a wanted one.

    It begins when the multipliers take the first of the last ``SELECTED_BLOCKS`` wanted blocks, and ends when the last
    word of the first ``DRAINED_BLOCKS`` unwanted ones has passed.
    """
    pairs = zip(trace.blocks, trace.blocks[1:], strict=False)
    edge = next((n for n, (one, other) in enumerate(pairs, 1) if one.wanted and not other.wanted), None)
    if edge is None or edge < SELECTED_BLOCKS:
        raise TraceError("no unwanted expert follows a wanted one: trace a tape run")
    wanted, last = edge - SELECTED_BLOCKS, edge + DRAINED_BLOCKS - 1
    mac, align = trace.owners["mac"], trace.owners["align"]
    first = int(trace.moves("mac")[np.searchsorted(mac, wanted)])
    end = int(trace.moves("align")[np.searchsorted(align, last, side="right") - 1]) + 1
    shown: dict[int, int] = {}
    points = []
    for name in DRAWN:
        spans = []
        moves = trace.moves(name)
        for block in np.unique(trace.owners[name][(moves >= first) & (moves < end)]).tolist():
            cycles = moves[trace.owners[name] == block]
            here = cycles[(cycles >= first) & (cycles < end)] - first
            number = shown.setdefault(block, len(shown))
            span = {"block": number, "from": int(here[0]), "to": int(here[-1]), "moves": len(here)}
            spans.append(span | {"before": int(np.count_nonzero(cycles < first)), "of": len(cycles)})
        text = "".join((IDLE, WAITS, IDLE, MOVES)[state] for state in trace.states[name][first:end].tolist())
        point = next(point for point in POINTS if point.name == name)
        points.append({"name": name, "watches": point.place, "states": text, "spans": spans})
    # Renumber in the order of the stream.
    order = {number: place for place, (_, number) in enumerate(sorted(shown.items()))}
    for point in points:
        for span in point["spans"]:
            span["block"] = order[span["block"]]
    return {
        "first_cycle": first,
        "cycles": end - first,
        "edge": {"wanted": SELECTED_BLOCKS, "unwanted": DRAINED_BLOCKS},
        "blocks": [trace.blocks[block]._asdict() for block in sorted(shown)],
        "points": points,
    }


def pipeline(path: Path, *, say: Say = lambda text: None) -> dict[str, Any]:
    """The figures and the window of ``sim/results/pipeline.json``."""
    with ModelFile.open(path) as model:
        params = replace(params_for(model), tokens=1)
        layer, read = model.layers[0], reader(model)
        library = build(params, say=say)
        tracer = Tracer(library)
        x = token_vectors(model, layer, TEXT)
        quantized, wanted = activations.quantize(x), engine_routes(route(model, layer, x))
        right, runs, traces = True, {}, {}
        for name, mode, routes in (
            ("selected", Mode.SELECTED, wanted),
            ("drained", Mode.TAPE, []),
            ("tape", Mode.TAPE, wanted),
        ):
            tracer.forget()
            with EngineSim(params, library=library) as engine:
                shape = engine_layer(model, layer, mode)
                run = engine.run_layer(shape, quantized, routes, read)
            right = right and differences(run, shape, read, quantized, routes) == 0
            passing = range(layer.experts) if mode == Mode.TAPE else sorted({each.expert for each in routes})
            trace = attribute(tracer.states(), tracer.matrices(), list(passing), params.link_bytes)
            check(trace, run.counters, params.link_bytes)
            say(f"{name}: {run.cycles:,} cycles, {len(trace.blocks):,} blocks, as the engine counts")
            runs[name], traces[name] = run, trace
        experts = sorted({each.expert for each in wanted})
    return {
        "model": path.name,
        "layer": layer.index,
        "tokens": len(TEXT),
        "experts": experts,
        "bit_exact": right,
        "design_id": design_id(params),
        "params": asdict(params),
        "block_bytes": BLOCK_BYTES,
        "figures": figures(runs),
        "window": window(traces["tape"]),
        "upstream": UPSTREAM,
        "provenance": {
            "figures": "counted: the engine's own counters, Verilated, 16 bytes a cycle, always-ready feed; cycles in "
            "which a matrix was under way, over its blocks",
            "window": "counted: valid and ready of the streams named, every cycle, in the Verilated engine; equal to "
            "its counters over each whole run",
        },
    }


def figures(runs: dict[str, LayerRun]) -> dict[str, Any]:
    """Cycles a block, as :mod:`sim.run` takes them."""
    selected, drained = runs["selected"].counters, runs["drained"].counters
    wanted, unwanted = selected[Counter.USEFUL_BYTES] // BLOCK_BYTES, drained[Counter.DRAINED_BYTES] // BLOCK_BYTES
    under_way = sum(selected[counter] for counter in (Counter.ACTIVE, Counter.BACK_PRESSURED, Counter.STARVED))
    return {
        "cycles_per_selected_block": under_way / wanted,
        "selected_blocks": wanted,
        "cycles_per_drained_block": (drained[Counter.STARVED] + drained[Counter.DRAINING]) / unwanted,
        "drained_blocks": unwanted,
        "counters": {
            name: {counter.name.lower(): value for counter, value in run.counters.items()} for name, run in runs.items()
        },
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.trace", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, metavar="FILE.gguf")
    parser.add_argument("--record", action="store_true", help="write sim/results/pipeline.json")
    args = parser.parse_args(argv)
    try:
        report = pipeline(args.model, say=say)
    except (ModelFileError, OSError, RuntimeError, ValueError) as error:
        print(f"make pipeline: error: {error}", file=sys.stderr)
        return 1
    counted, shown = report["figures"], report["window"]
    print(f"\n{'':8}{'':14}{shown['cycles']} cycles from cycle {shown['first_cycle']:,} on: x moves, w waits, . idle")
    for point in shown["points"]:
        moved = point["states"].count(MOVES)
        print(f"{point['name']:<8}{point['watches']:<16}{moved:>4} moves  {point['states'][:160]}")
    print(
        f"\ncycles a selected block {counted['cycles_per_selected_block']:.3f} over {counted['selected_blocks']:,} "
        f"(counted)\ncycles a drained block {counted['cycles_per_drained_block']:.3f} over "
        f"{counted['drained_blocks']:,} (counted)\nbit-exact: {'yes' if report['bit_exact'] else 'NO'}"
    )
    written = record.write("pipeline", "make pipeline RECORD=1", report, record=args.record)
    print(f"\nwritten to {written}")
    return 0 if report["bit_exact"] else 1


if __name__ == "__main__":
    sys.exit(main())
