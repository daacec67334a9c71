"""From the link's clock to the engine's and back: messages, and the reset that begins a connection."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import fifo, stream, wiring
from amaranth.lib.cdc import FFSynchronizer
from amaranth.lib.wiring import In, Out

from hw.layouts import link_beat
from hw.primitives.queue import Queue

DEPTH = 16
"""Beats on their way in each direction; enough for a beat every cycle of the slower clock, whatever their ratio."""
QUIET = 4 * DEPTH
"""Cycles for which a side gives nothing and takes all that comes, so that nothing is left of what was on its way."""


class Crossing(wiring.Component):
    """Carry beats between the clock domains ``link`` and ``sync``; begin again when told to.

    The link is as fast as a bridge or a wire wants it, the engine as its multipliers allow. On ``begin`` the engine's
    side is held in reset until nothing of the connection before is left on either side; ``busy`` lasts until then.
    Pointers that a bad clock has spoilt are good again after that, too.

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
        super().__init__(
            {
                "i_link": In(beat),
                "o_link": Out(beat),
                "i": In(beat),
                "o": Out(beat),
                "begin": In(1),
                "busy": Out(1, init=1),  # pyright: ignore[reportCallIssue] - the stubs know no such parameter
                "reset": Out(1, init=1),  # pyright: ignore[reportCallIssue]
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        bits = 8 * self.width + 1
        m.submodules.down = down = fifo.AsyncFIFO(width=bits, depth=DEPTH, w_domain="link", r_domain="sync")
        m.submodules.up = up = fifo.AsyncFIFO(width=bits, depth=DEPTH, w_domain="sync", r_domain="link")
        # Two places on the engine's side, so that neither it nor the pointers wait for the other.
        m.submodules.arrived = arrived = Queue(link_beat(self.width), 2)
        m.submodules.leaving = leaving = Queue(link_beat(self.width), 2)

        asked = Signal(init=1)  # the engine's side is to be in reset
        quiet = Signal()  # it has been for long enough
        answered = Signal()
        m.submodules.ask = FFSynchronizer(asked, self.reset, init=1)
        m.submodules.answer = FFSynchronizer(quiet, answered, o_domain="link")
        count = Signal(range(QUIET))
        m.d.sync += [
            quiet.eq(self.reset & (count == QUIET - 1)),
            count.eq(Mux(self.reset, Mux(count == QUIET - 1, count, count + 1), 0)),
        ]
        count_link = Signal(range(QUIET))
        with m.If(self.begin):
            m.d.link += [asked.eq(1), self.busy.eq(1), count_link.eq(0)]
        with m.Elif(asked & answered):
            m.d.link += count_link.eq(count_link + 1)
            with m.If(count_link == QUIET - 1):
                m.d.link += [asked.eq(0), count_link.eq(0)]
        with m.Elif(~asked & ~answered):
            m.d.link += self.busy.eq(0)

        m.d.comb += [
            down.w_data.eq(self.i_link.payload),
            down.w_en.eq(self.i_link.valid & ~self.busy),
            self.i_link.ready.eq(down.w_rdy & ~self.busy),
            self.o_link.payload.eq(up.r_data),
            self.o_link.valid.eq(up.r_rdy & ~self.busy),
            up.r_en.eq(Mux(self.busy, asked, self.o_link.ready)),  # what comes after the reset waits
            arrived.i.payload.eq(down.r_data),
            arrived.i.valid.eq(down.r_rdy),
            down.r_en.eq(arrived.i.ready),
            self.o.payload.eq(arrived.o.payload),
            self.o.valid.eq(arrived.o.valid & ~self.reset),
            arrived.o.ready.eq(self.o.ready | self.reset),
            leaving.i.payload.eq(self.i.payload),
            leaving.i.valid.eq(self.i.valid & ~self.reset),
            self.i.ready.eq(leaving.i.ready),
            up.w_data.eq(leaving.o.payload),
            up.w_en.eq(leaving.o.valid),
            leaving.o.ready.eq(up.w_rdy),
        ]
        return m
