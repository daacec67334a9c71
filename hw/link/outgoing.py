"""The engine's requests as messages among its others."""

from amaranth.hdl import Cat, Const, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.formats.messages import HEADER_BYTES, Message
from hw.layouts import REQUEST, link_beat


class Outgoing(wiring.Component):
    """Pass messages on, and between two of them a ``FETCH`` for each request that waits.

    A beat of a message passes through in the cycle in which it comes; a ``FETCH`` costs a cycle beside its beats.

    Members
    -------
    i, o : streams of :func:`hw.layouts.link_beat`
    i_request : stream of ``REQUEST``
    """

    i: stream.Interface
    i_request: stream.Interface
    o: stream.Interface

    def __init__(self, link_bytes: int) -> None:
        self.link_bytes = link_bytes
        beat = link_beat(link_bytes)
        super().__init__(
            {
                "i": In(stream.Signature(beat)),
                "i_request": In(stream.Signature(REQUEST)),
                "o": Out(stream.Signature(beat)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        bits = 8 * self.link_bytes
        beats = HEADER_BYTES // self.link_bytes
        fetch = Signal(8 * HEADER_BYTES, reset_less=True)
        left = Signal(range(beats + 1))
        inside = Signal()  # a message has begun and not ended, or its first beat has been offered
        request = self.i_request.p
        with m.If(left != 0):
            m.d.comb += [self.o.p.data.eq(fetch[:bits]), self.o.p.last.eq(left == 1), self.o.valid.eq(1)]
            with m.If(self.o.ready):
                m.d.sync += [left.eq(left - 1), fetch.eq(fetch >> bits)]
        with m.Elif(~inside & self.i_request.valid):
            m.d.comb += self.i_request.ready.eq(1)
            m.d.sync += [fetch.eq(Cat(Const(Message.FETCH, 16), request.offset, request.length)), left.eq(beats)]
        with m.Else():
            m.d.comb += [
                self.o.payload.eq(self.i.payload),
                self.o.valid.eq(self.i.valid),
                self.i.ready.eq(self.o.ready),
            ]
            with m.If(self.i.valid):
                m.d.sync += inside.eq(~(self.i.p.last & self.o.ready))
        return m
