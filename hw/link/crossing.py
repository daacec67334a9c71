"""From the link's clock to the engine's and back: messages, and the reset that begins a connection."""

from amaranth.hdl import Cat, Module, Mux, ResetInserter, Signal
from amaranth.lib import memory, stream, wiring
from amaranth.lib.cdc import FFSynchronizer
from amaranth.lib.wiring import In, Out

from hw.layouts import link_beat

DEPTH = 16
"""Beats on their way in each direction; enough for a beat every cycle of the slower clock."""
QUIET = 8
"""Cycles for which both sides are in reset; more than a pointer takes from one to the other."""


class Passage(wiring.Component):
    """A queue whose ends have clocks of their own.

    As in ``amaranth.lib.fifo.AsyncFIFO``, each side tells the other by a pointer in Gray code how far it is. But that
    compares pointers in the cycle in which they move; here each side counts what the other's moves give it, in as many
    steps as that takes, so that neither waits for more than a register. What it has not counted yet is not used yet.

    Parameters
    ----------
    bits
        Of a payload.
    writer, reader
        Clock domains of ``i`` and ``o``. To begin again put both in reset, at the same time for some cycles.

    Members
    -------
    i, o : streams
    """

    i: stream.Interface
    o: stream.Interface

    def __init__(self, bits: int, *, writer: str, reader: str) -> None:
        self.bits, self.writer, self.reader = bits, writer, reader
        super().__init__({"i": In(stream.Signature(bits)), "o": Out(stream.Signature(bits))})

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.storage = storage = memory.Memory(shape=self.bits, depth=DEPTH, init=[])
        write, read = storage.write_port(domain=self.writer), storage.read_port(domain="comb")
        push, pop, room, there = Signal(), Signal(), Signal(), Signal()
        writer = _End(self.writer, push, DEPTH, "writer")
        reader = _End(self.reader, pop, 0, "reader")
        writer.build(m, reader)
        reader.build(m, writer)
        # What the counts do not know of yet: a move of this cycle, and one of the cycle before. A place is there even
        # if both were taken. A beat is, if it is not one of those that leave.
        several = writer.count[2:].any() | writer.count[:2].all()
        count, moved = reader.count, reader.moved
        two_left = count[2:].any() | count[:2].all() | (count[1] & ~moved)
        m.d[self.writer] += room.eq(several)
        m.d[self.reader] += there.eq(two_left | (Mux(moved, count[1], count[0]) & ~pop))
        m.d.comb += [
            push.eq(self.i.valid & room),
            pop.eq(self.o.ready & there),
            self.i.ready.eq(room),
            self.o.valid.eq(there),
            write.addr.eq(writer.place),
            write.data.eq(self.i.payload),
            write.en.eq(push),
            read.addr.eq(reader.place),
            self.o.payload.eq(read.data),
        ]
        return m


class _End:
    """One side of a :class:`Passage`: where it is, and how often it may still move."""

    BITS = DEPTH.bit_length()

    def __init__(self, domain: str, moves: Signal, count: int, name: str) -> None:
        self.domain, self.moves, self.name = domain, moves, name
        self.place = Signal(self.BITS - 1, name=f"{name}_place")
        self.gray = Signal(self.BITS, name=f"{name}_gray")
        self.moved = Signal(name=f"{name}_moved")  # in the cycle before
        self.count = Signal(self.BITS, init=count, name=f"{name}_count")  # without that move

    def build(self, m: Module, other: "_End") -> None:
        def signal(name: str, init: int = 0) -> Signal:
            return Signal(self.BITS, init=init, name=f"{self.name}_{name}")

        seen, now, before, gain = (signal(name) for name in ("seen", "now", "before", "gain"))
        gain_but_one = signal("gain_but_one", init=-1 & (1 << self.BITS) - 1)
        total = signal("total")  # moves so far
        binary = [seen[n:].xor() for n in range(self.BITS)]
        after = (total + 1)[: self.BITS]
        m.submodules[f"to_{self.name}"] = FFSynchronizer(other.gray, seen, o_domain=self.domain)
        with m.If(self.moves):
            m.d[self.domain] += [total.eq(after), self.gray.eq(after ^ (after >> 1))]
        m.d[self.domain] += [
            self.moved.eq(self.moves),
            now.eq(Cat(binary)),
            before.eq(now),
            gain.eq(now - before),
            gain_but_one.eq(now + ~before),
            self.count.eq(self.count + Mux(self.moved, gain_but_one, gain)),
        ]
        m.d.comb += self.place.eq(total)


class Crossing(wiring.Component):
    """Carry beats between the clock domains ``link`` and ``sync``; begin again when told to.

    The link is as fast as a bridge or a wire wants it, the engine as its multipliers allow. On ``begin`` both sides are
    put in reset, the engine's first, so that nothing of the connection before is left on either; ``busy`` lasts until
    then.

    Parameters
    ----------
    width
        Bytes a beat.

    Members
    -------
    i_link, o_link : streams of :func:`hw.layouts.link_beat`, in ``link``: to the engine and from it
    o, i : the same in ``sync``
    begin : In, in ``link``; what is taken at ``i_link`` or given at ``o_link`` in a cycle of it is of before
    busy : Out, in ``link``, from the cycle after ``begin``: nothing is taken or given
    reset : Out, in ``sync``: nothing is given at ``o``, and what is given at ``i`` is dropped
    """

    i_link: stream.Interface
    o_link: stream.Interface
    i: stream.Interface
    o: stream.Interface
    begin: Signal
    busy: Signal
    reset: Signal

    def __init__(self, width: int) -> None:
        self.width = width
        beat = stream.Signature(link_beat(width))
        at_first = {"init": 1}  # the stubs know no such parameter
        super().__init__(
            {
                "i_link": In(beat),
                "o_link": Out(beat),
                "i": In(beat),
                "o": Out(beat),
                "begin": In(1),
                "busy": Out(1, **at_first),
                "reset": Out(1, **at_first),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        bits = link_beat(self.width).size
        down, up = Passage(bits, writer="link", reader="sync"), Passage(bits, writer="sync", reader="link")

        asked = Signal(init=1)  # the engine's side is to be in reset
        quiet = Signal()  # it has been for some time
        answered = Signal()
        m.submodules.ask = FFSynchronizer(asked, self.reset, init=1)
        m.submodules.answer = FFSynchronizer(quiet, answered, o_domain="link")
        count, count_link = Signal(range(QUIET)), Signal(range(QUIET))
        with m.If(~self.reset):
            m.d.sync += [count.eq(0), quiet.eq(0)]
        with m.Elif(count == QUIET - 1):
            m.d.sync += quiet.eq(1)
        with m.Else():
            m.d.sync += count.eq(count + 1)
        with m.If(self.begin):
            m.d.link += [asked.eq(1), self.busy.eq(1), count_link.eq(0)]
        with m.Elif(asked & answered):
            m.d.link += count_link.eq(count_link + 1)
            with m.If(count_link == QUIET - 1):
                m.d.link += [asked.eq(0), count_link.eq(0)]
        with m.Elif(~asked & ~answered):
            m.d.link += self.busy.eq(0)

        # The link's ends of the passages are reset only when the engine is: it must not see their pointers jump.
        resets = {"sync": self.reset, "link": asked & answered}
        m.submodules.down, m.submodules.up = ResetInserter(resets)(down), ResetInserter(resets)(up)
        m.d.comb += [
            down.i.payload.eq(self.i_link.payload),
            down.i.valid.eq(self.i_link.valid & ~self.busy),
            self.i_link.ready.eq(down.i.ready & ~self.busy),
            self.o.payload.eq(down.o.payload),
            self.o.valid.eq(down.o.valid & ~self.reset),
            down.o.ready.eq(self.o.ready),
            up.i.payload.eq(self.i.payload),
            up.i.valid.eq(self.i.valid),
            self.i.ready.eq(up.i.ready),
            self.o_link.payload.eq(up.o.payload),
            self.o_link.valid.eq(up.o.valid & ~self.busy),
            up.o.ready.eq(self.o_link.ready & ~self.busy),
        ]
        return m
