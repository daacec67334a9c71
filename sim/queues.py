"""How full the engine's queues ever get, and whether deeper ones would save a cycle: FIFO sizing by simulation.

Every :class:`hw.primitives.queue.Queue` gets a monitor beside it (``sim/models/queue_mark.v``); nothing in it changes.
Layers of a real model then run with feeds that starve, stall and delay the engine, bit for bit, once with the queues as
they are and once with every queue at least twice as deep. ``make hls4ml`` runs this and records it.
"""

import ctypes
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from host.model_file import ModelFile
from hw.formats.messages import Counter, Mode
from hw.formats.params import Params
from hw.formats.q6_k import BLOCK_BYTES
from sim import shared_library
from sim.engine_sim import EngineSim, Feed, differences
from sim.golden import activations
from sim.shared_library import Say
from sim.workload import engine_layer, engine_routes, reader, route, token_vectors

SHIM = Path(__file__).with_suffix(".cpp")
MONITOR = Path(__file__).parent / "models" / "queue_mark.v"
PREFIX, SUFFIX = "TOP.engine.", ".mark"
DEEPEST = 64
"""Of :class:`hw.primitives.queue.Queue`."""

ALWAYS = Feed()
FEEDS = {
    "always ready": ALWAYS,
    "weights every other cycle": Feed(p_in=0.5),
    "outputs and requests seldom taken": Feed(p_out=0.05),
    "answers 2,000 cycles late": Feed(latency=2_000),
    "all of these": Feed(latency=500, p_in=0.7, p_out=0.1),
}
"""By name: how bytes reach the engine and leave it."""
OUTSTANDING = {"always ready": 2, "answers 2,000 cycles late": 8, "all of these": 8}
"""Requests that may be unanswered; 2 where nothing is said."""

COUNTED = {
    "announced": Counter.MATRICES_HELD,
    "matrices.mac.tags": Counter.BLOCKS_HELD,
    "matrices.accumulate.rows": Counter.ROWS_HELD,
}
"""Queues whose marks the engine itself counts."""


@dataclass(frozen=True)
class Mark:
    """What one queue held.

    Attributes
    ----------
    place
        Its path in the engine, as ``matrices.mac.tags``.
    depth
        Payloads that it can hold.
    most
        The most that it ever held: the high-water mark.
    full, refused
        Cycles in which it was full, and in which a payload waited in front of it.
    """

    place: str
    depth: int
    most: int
    full: int
    refused: int


@contextmanager
def deeper() -> Iterator[None]:
    """Every queue at least twice as deep, and the credits of those who count places themselves."""
    from hw import accumulate, hidden, matrix_engine
    from hw.mac import Mac
    from hw.primitives.queue import Queue

    init, rows_waiting = Queue.__init__, accumulate.rows_waiting
    with ExitStack() as stack:
        for target, name, value in (
            (Queue, "__init__", lambda self, shape, depth: init(self, shape, min(DEEPEST, 2 * depth))),
            (Mac, "BLOCKS", 2 * Mac.BLOCKS),
            (hidden, "GATES", 2 * hidden.GATES),
            (accumulate, "rows_waiting", lambda params: 2 * rows_waiting(params)),
            (matrix_engine, "rows_waiting", lambda params: 2 * rows_waiting(params)),
        ):
            stack.enter_context(patch.object(target, name, value))
        yield


@contextmanager
def watched() -> Iterator[None]:
    """Every queue elaborated meanwhile gets its monitor."""
    from amaranth.hdl import ClockSignal, Instance, ResetSignal

    from hw.primitives.queue import Queue

    elaborate = Queue.elaborate

    def with_mark(self: Queue, platform):
        m = elaborate(self, platform)
        m.submodules.mark = Instance(
            "queue_mark",
            ("a", "keep", 1),
            ("p", "DEPTH", self.depth),
            ("i", "clk", ClockSignal()),
            ("i", "rst", ResetSignal()),
            ("i", "i_valid", self.i.valid),
            ("i", "i_ready", self.i.ready),
            ("i", "o_valid", self.o.valid),
            ("i", "o_ready", self.o.ready),
        )
        return m

    with patch.object(Queue, "elaborate", with_mark):
        yield


def build(params: Params, *, deep: bool, optimise: str = "-O1", say: Say = lambda text: None) -> Path:
    """The engine with monitors, as it is or with deeper queues; ``optimise`` goes to the C++ compiler."""

    def make():
        from hw.engine import Engine

        return Engine(params)

    changes = [inspect.getsource(change) for change in (deeper, watched)]
    key = ["queues", asdict(params), deep, changes, (SHIM.parent / "engine_sim.cpp").read_text()]
    defines = {"LINK_BYTES": params.link_bytes}
    with ExitStack() as stack:
        if deep:
            stack.enter_context(deeper())
        stack.enter_context(watched())
        return shared_library.build(
            "engine", make, SHIM, key=key, defines=defines, extra=[MONITOR], optimise=optimise, say=say
        )


def parse(line: str) -> Mark:
    """A monitor's line: its path, as Verilog writes it, and four numbers."""
    place, *numbers = line.rsplit(" ", 4)
    # Amaranth numbers a queue whose name a signal beside it has: rows$235.
    path = ".".join(part.split("$")[0] for part in place.removeprefix(PREFIX).removesuffix(SUFFIX).split("."))
    return Mark(path, *map(int, numbers))


def run(
    path: Path,
    params: Params,
    text: bytes,
    *,
    deep: bool,
    feeds: Mapping[str, Feed] = FEEDS,
    optimise: str = "-O1",
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Layers of the model file in ``path``, a token for each byte of ``text``, with each feed, selected and as tape.

    Returns the cycles of each run, whether all equal golden, the marks over all of them, and the same of three queues
    as the engine's own counters have it.
    """
    library_path = build(params, deep=deep, optimise=optimise, say=say)
    library = ctypes.CDLL(str(library_path))
    library.queue_marks.restype = ctypes.c_char_p
    runs, right, counted = [], True, dict.fromkeys(COUNTED, 0)
    with ModelFile.open(path) as model, EngineSim(params, library=library_path) as engine:
        layer, read = model.layers[0], reader(model)
        x = token_vectors(model, layer, text)
        quantized, routes = activations.quantize(x), engine_routes(route(model, layer, x))
        for name, feed in feeds.items():
            engine.feed(feed)
            for mode in Mode:
                shape = engine_layer(model, layer, mode, outstanding=OUTSTANDING.get(name, 2))
                result = engine.run_layer(shape, quantized, routes, read)
                right = right and differences(result, shape, read, quantized, routes) == 0
                counted = {place: max(most, result.counters[COUNTED[place]]) for place, most in counted.items()}
                blocks = result.counters[Counter.USEFUL_BYTES] // BLOCK_BYTES
                runs.append({"feed": name, "mode": mode.name.lower(), "cycles": result.cycles, "blocks": blocks})
        library.queue_marks()  # forget what others told
    lines = library.queue_marks().decode().splitlines()
    marks = sorted((parse(line) for line in lines), key=lambda mark: mark.place)
    return {"bit_exact": right, "runs": runs, "marks": [asdict(mark) for mark in marks], "counted": counted}


def compare(
    path: Path,
    params: Params,
    text: bytes,
    *,
    feeds: Mapping[str, Feed] = FEEDS,
    optimise: str = "-O1",
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """:func:`run` with the queues as they are and with deeper ones, in one record."""
    chosen, deep = (
        run(path, params, text, deep=deep, feeds=feeds, optimise=optimise, say=say) for deep in (False, True)
    )
    return {
        "params": asdict(params),
        "tokens": len(text),
        "bit_exact": chosen["bit_exact"] and deep["bit_exact"],
        "marks": [
            {**mark, "deeper": other["depth"], "deeper_most": other["most"]}
            for mark, other in zip(chosen["marks"], deep["marks"], strict=True)
        ],
        "runs": [
            {**run_, "cycles_deeper": other["cycles"]} for run_, other in zip(chosen["runs"], deep["runs"], strict=True)
        ],
        "counted": chosen["counted"],
        "provenance": "counted: Verilated engine, layer 0 of the model, every feed, selected and tape",
    }
