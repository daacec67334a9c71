"""From the link's clock to the engine's and back: messages, and the reset that begins a connection."""

from amaranth.hdl import Module, ResetInserter, Signal
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

    As ``amaranth.lib.fifo.AsyncFIFO``, it tells full and empty by pointers in Gray code, which the other side sees two
    of its cycles late. Here they are compared before they are needed, with the present pointer and with the next, so
    that neither end waits for more than a register.

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
        bits = DEPTH.bit_length()  # one more than of an address, so that full differs from empty
        half_round = 3 << (bits - 2)  # what that adds, in Gray code

        def pointer(name: str, domain: str, moves: Signal) -> tuple[Signal, Signal, Signal]:
            """A place, its Gray code, and the next one's."""
            place, gray = Signal(bits, name=name), Signal(bits, name=f"{name}_gray")
            gray_next = Signal(bits, init=1, name=f"{name}_gray_next")
            after_next = (place + 2)[:bits]
            with m.If(moves):
                m.d[domain] += [place.eq(place + 1), gray.eq(gray_next), gray_next.eq(after_next ^ (after_next >> 1))]
            return place, gray, gray_next

        push, pop = Signal(), Signal()
        full, empty = Signal(), Signal(init=1)
        written, written_gray, written_next = pointer("written", self.writer, push)
        taken, taken_gray, taken_next = pointer("taken", self.reader, pop)
        taken_seen, written_seen = Signal(bits), Signal(bits)
        m.submodules.to_writer = FFSynchronizer(taken_gray, taken_seen, o_domain=self.writer)
        m.submodules.to_reader = FFSynchronizer(written_gray, written_seen, o_domain=self.reader)
        with m.If(push):
            m.d[self.writer] += full.eq(written_next ^ half_round == taken_seen)
        with m.Else():
            m.d[self.writer] += full.eq(written_gray ^ half_round == taken_seen)
        with m.If(pop):
            m.d[self.reader] += empty.eq(taken_next == written_seen)
        with m.Else():
            m.d[self.reader] += empty.eq(taken_gray == written_seen)
        m.d.comb += [
            push.eq(self.i.valid & ~full),
            pop.eq(self.o.ready & ~empty),
            self.i.ready.eq(~full),
            self.o.valid.eq(~empty),
            write.addr.eq(written),
            write.data.eq(self.i.payload),
            write.en.eq(push),
            read.addr.eq(taken),
            self.o.payload.eq(read.data),
        ]
        return m


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
