"""First-in first-out queues that know their payload's shape."""

from functools import reduce
from operator import or_

from amaranth.hdl import Module, Mux, Shape, Signal, Value, unsigned
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
        m.submodules.storage = storage = _storage(self.shape, self.depth)
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
        _places(m, self.depth, (push, write.addr), (pop, read.addr))
        with m.If(push != pop):
            m.d.sync += held.eq(Mux(push, held << 1, held >> 1))
        m.d.comb += self.level.eq(_level(held))
        return m


class CreditQueue(wiring.Component):
    """Hold up to ``depth`` payloads, in LUT memory, for a writer that counts the places and never writes without one.

    Moves are counted a cycle late, so that what leaves has to be known to three registers only, near or far.
    ``LATENCY`` cycles; one payload a cycle.

    Parameters
    ----------
    shape
        Shape of the payload.
    depth
        2..64 entries.

    Members
    -------
    i : stream, always ready
    o : stream
    left : Out, high in the cycle after a payload has left
    level : Out, entries held, a cycle late
    """

    LATENCY = 2
    i: stream.Interface
    o: stream.Interface
    left: Signal
    level: Signal

    def __init__(self, shape, depth: int) -> None:
        if not 2 <= depth <= 64:
            raise ValueError(f"depth must be in 2..64, not {depth!r}")
        self.shape, self.depth = shape, depth
        super().__init__(
            {
                "i": In(stream.Signature(shape, always_ready=True)),
                "o": Out(stream.Signature(shape)),
                "left": Out(1),
                "level": Out(range(depth + 1)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.storage = storage = _storage(self.shape, self.depth)
        write, read = storage.write_port(), storage.read_port(domain="comb")
        came = Signal()  # in the cycle before
        there = Signal()
        pop = Signal()
        held = Signal(self.depth + 1, init=1)  # bit n: n payloads, a cycle late
        changed = came != self.left
        only_one = Mux(changed, Mux(came, held[0], held[2]), held[1])
        none = ~came & Mux(self.left, held[1], held[0])
        m.d.comb += [
            self.o.valid.eq(there),
            pop.eq(self.o.valid & self.o.ready),
            write.data.eq(self.i.payload),
            write.en.eq(self.i.valid),
            self.o.payload.eq(read.data),
        ]
        m.d.sync += [
            came.eq(self.i.valid),
            self.left.eq(pop),
            there.eq(~(none | (only_one & pop))),
        ]
        with m.If(changed):
            m.d.sync += held.eq(Mux(came, held << 1, held >> 1))
        m.d.comb += self.level.eq(_level(held))
        _places(m, self.depth, (self.i.valid, write.addr), (pop, read.addr))
        return m


class Place(wiring.Component):
    """Hold one payload, between ends that are far from one another: neither waits for more than a register.

    ``LATENCY`` cycle; a payload every other cycle.

    Parameters
    ----------
    shape
        Shape of the payload.

    Members
    -------
    i, o : streams
    """

    LATENCY = 1
    i: stream.Interface
    o: stream.Interface

    def __init__(self, shape) -> None:
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform) -> Module:
        m = Module()
        # The same twice, so that the many bits of a payload and whoever takes it have a register each.
        vacant = Signal(init=1)
        filled = Mux(vacant, self.i.valid, ~self.o.ready)
        m.d.comb += self.i.ready.eq(vacant)
        m.d.sync += [self.o.valid.eq(filled), vacant.eq(~filled)]
        with m.If(vacant):
            m.d.sync += self.o.payload.eq(self.i.payload)
        return m


def _storage(shape, depth: int) -> memory.Memory:
    return memory.Memory(shape=unsigned(Shape.cast(shape).width), depth=depth, init=[])


def _level(held: Signal):
    """The number of the bit that is set."""
    return reduce(or_, (Mux(bit, count, 0) for count, bit in enumerate(held)))


def _places(m: Module, depth: int, *moves: tuple[Value, Signal]) -> None:
    """Addresses that go on, round and round, with each move."""
    for moved, address in moves:
        place = Signal(range(depth))
        m.d.comb += address.eq(place)
        with m.If(moved):
            m.d.sync += place.eq(Mux(place == depth - 1, 0, place + 1))
