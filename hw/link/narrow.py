"""Wide beats to bytes."""

from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.layouts import link_beat


class Narrow(wiring.Component):
    """Hand out a beat byte by byte, the lowest first; the opposite of :class:`hw.gather.Gather`.

    A byte every cycle but one a beat.

    Members
    -------
    i : stream of :func:`hw.layouts.link_beat`; o : such a stream of single bytes
    """

    i: stream.Interface
    o: stream.Interface

    def __init__(self, link_bytes: int) -> None:
        self.link_bytes = link_bytes
        super().__init__({"i": In(stream.Signature(link_beat(link_bytes))), "o": Out(stream.Signature(link_beat(1)))})

    def elaborate(self, platform) -> Module:
        m = Module()
        bytes_ = Signal(8 * self.link_bytes, reset_less=True)
        last = Signal(reset_less=True)
        busy = Signal()
        left = Signal(range(self.link_bytes), reset_less=True)  # bytes after the present one
        final = Signal(reset_less=True)  # none is
        m.d.comb += [
            self.i.ready.eq(~busy),
            self.o.valid.eq(busy),
            self.o.p.data.eq(bytes_[:8]),
            self.o.p.last.eq(last & final),
        ]
        with m.If(~busy):
            m.d.sync += [
                busy.eq(self.i.valid),
                bytes_.eq(self.i.p.data),
                last.eq(self.i.p.last),
                left.eq(self.link_bytes - 1),
                final.eq(self.link_bytes == 1),
            ]
        with m.Elif(self.o.ready):
            m.d.sync += [busy.eq(~final), bytes_.eq(bytes_ >> 8), left.eq(left - 1), final.eq(left == 1)]
        return m
