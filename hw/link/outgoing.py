"""The engine's requests as messages among its others."""

from amaranth.hdl import Cat, Const, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.formats.messages import HEADER_BYTES, Message
from hw.layouts import REQUEST, link_beat


class Outgoing(wiring.Component):
    """Pass messages on, and between two of them a ``FETCH`` for each request that waits.

    A beat is taken when the one before has left, so at most every other cycle, and leaves in the cycle after; a
    ``FETCH`` costs a cycle beside its beats.

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
        inside = Signal()  # a message has begun and not ended
        request = self.i_request.p
        free = Signal(init=1)  # ``o`` is; kept beside ``o.valid``, for it moves many
        m.d.comb += [
            self.i_request.ready.eq((left == 0) & ~inside),
            self.i.ready.eq(free & (left == 0) & (inside | ~self.i_request.valid)),
        ]
        with m.If(self.o.ready):
            m.d.sync += [self.o.valid.eq(0), free.eq(1)]
        with m.If(left != 0):
            with m.If(free):
                m.d.sync += [
                    self.o.p.data.eq(fetch[:bits]),
                    self.o.p.last.eq(left == 1),
                    self.o.valid.eq(1),
                    free.eq(0),
                    fetch.eq(fetch >> bits),
                    left.eq(left - 1),
                ]
        with m.Else():
            with m.If(free):
                m.d.sync += self.o.payload.eq(self.i.payload)
                with m.If(self.i.valid & self.i.ready):
                    m.d.sync += [self.o.valid.eq(1), free.eq(0)]
            with m.If(self.i_request.valid & ~inside):
                m.d.sync += [fetch.eq(Cat(Const(Message.FETCH, 16), request.offset, request.length)), left.eq(beats)]
            with m.If(self.i.valid & self.i.ready):
                m.d.sync += inside.eq(~self.i.p.last)
        return m
