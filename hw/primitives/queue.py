"""A first-in first-out queue that knows its payload's shape."""

from functools import reduce
from operator import or_

from amaranth.hdl import Module, Mux, Shape, Signal, unsigned
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out


class Queue(wiring.Component):
    """Hold up to ``depth`` payloads, in LUT memory.

    A payload written in one cycle is readable in the next (``LATENCY``); one payload a cycle. The number held is kept
    one-hot, so that ``i.ready``, ``o.valid`` and their update are shallow; ``amaranth.lib.fifo.SyncFIFO`` compares a
    binary level for each.

    Parameters
    ----------
    shape
        Shape of the payload.
    depth
        2..64 entries.

    Members
    -------
    i, o : streams
    level : Out, entries held
    """

    LATENCY = 1
    i: stream.Interface
    o: stream.Interface
    level: Signal

    def __init__(self, shape, depth: int) -> None:
        if not 2 <= depth <= 64:
            raise ValueError(f"depth must be in 2..64, not {depth!r}")
        self.shape, self.depth = shape, depth
        super().__init__(
            {
                "i": In(stream.Signature(shape)),
                "o": Out(stream.Signature(shape)),
                "level": Out(range(depth + 1)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.storage = storage = memory.Memory(
            shape=unsigned(Shape.cast(self.shape).width), depth=self.depth, init=[]
        )
        write, read = storage.write_port(), storage.read_port(domain="comb")
        held = Signal(self.depth + 1, init=1)  # bit n: n payloads
        push = Signal()
        pop = Signal()
        m.d.comb += [
            self.i.ready.eq(~held[self.depth]),
            self.o.valid.eq(~held[0]),
            push.eq(self.i.valid & self.i.ready),
            pop.eq(self.o.valid & self.o.ready),
            write.data.eq(self.i.payload),
            write.en.eq(push),
            self.o.payload.eq(read.data),
        ]
        for moved, address in ((push, write.addr), (pop, read.addr)):
            place = Signal(range(self.depth))
            m.d.comb += address.eq(place)
            with m.If(moved):
                m.d.sync += place.eq(Mux(place == self.depth - 1, 0, place + 1))
        with m.If(push != pop):
            m.d.sync += held.eq(Mux(push, held << 1, held >> 1))
        m.d.comb += self.level.eq(reduce(or_, (Mux(bit, count, 0) for count, bit in enumerate(held))))
        return m
