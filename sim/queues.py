"""``make hls4ml`` asks: how full do the engine's queues ever get, and would deeper ones save a cycle?

Every :class:`hw.primitives.queue.Queue` gets a monitor beside it (``sim/models/queue_mark.v``); nothing in it changes.
Layers of a real model then run with feeds that starve, stall and delay the engine, bit for bit, once with the queues as
they are and once with every queue at least twice as deep.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hw.formats.messages import Mode
from hw.formats.params import Params
from sim import shared_library
from sim.engine_sim import EngineSim, Feed
from sim.shared_library import Say

SHIM = Path(__file__).with_suffix(".cpp")
MONITOR = Path(__file__).parent / "models" / "queue_mark.v"
PREFIX = "engine."


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
            (Queue, "__init__", lambda self, shape, depth: init(self, shape, 2 * depth)),
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


def build(params: Params, *, deep: bool, say: Say = lambda text: None) -> Path:
    """The engine with monitors, as it is or with deeper queues."""

    def make():
        from hw.engine import Engine

        return Engine(params)

    key = ["queues", asdict(params), deep, Path(__file__).read_text()]
    defines = {"LINK_BYTES": params.link_bytes}
    with ExitStack() as stack:
        if deep:
            stack.enter_context(deeper())
        stack.enter_context(watched())
        return shared_library.build("engine", make, SHIM, key=key, defines=defines, extra=[MONITOR], say=say)


class Watched:
    """An engine with monitors, and what its queues held in all layers that ran on it."""

    def __init__(self, params: Params, *, deep: bool, say: Say = lambda text: None) -> None:
        self.path = build(params, deep=deep, say=say)
        self.engine = EngineSim(params, library=self.path)

    def close(self) -> list[Mark]:
        """Free the engine; its queues, in the order of their places."""
        library = ctypes.CDLL(str(self.path))
        library.queue_marks.restype = ctypes.c_char_p
        library.queue_marks()  # forget other engines
        self.engine.close()
        lines = library.queue_marks().decode().splitlines()
        return sorted((parse(line) for line in lines), key=lambda mark: mark.place)


def parse(line: str) -> Mark:
    """A monitor's line: its path, as Verilog writes it, and four numbers."""
    place, *numbers = line.rsplit(" ", 4)
    return Mark(place, *map(int, numbers))
