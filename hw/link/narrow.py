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
        last = Signal()
        left = Signal(range(self.link_bytes + 1))
        m.d.comb += [
            self.i.ready.eq(left == 0),
            self.o.valid.eq(left != 0),
            self.o.p.data.eq(bytes_[:8]),
            self.o.p.last.eq(last & (left == 1)),
        ]
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [bytes_.eq(self.i.p.data), last.eq(self.i.p.last), left.eq(self.link_bytes)]
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += [bytes_.eq(bytes_ >> 8), left.eq(left - 1)]
        return m
