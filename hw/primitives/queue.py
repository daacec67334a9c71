"""A first-in first-out queue that knows its payload's shape."""

from amaranth.hdl import Module, Shape
from amaranth.lib import fifo, stream, wiring
from amaranth.lib.wiring import In, Out


class Queue(wiring.Component):
    """Hold up to ``depth`` payloads; built on ``amaranth.lib.fifo.SyncFIFO`` (LUT memory up to 64 deep).

    A payload written in one cycle is readable in the next (``LATENCY``); one payload a cycle.

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
        m.submodules.fifo = inner = fifo.SyncFIFO(width=Shape.cast(self.shape).width, depth=self.depth)
        m.d.comb += [
            inner.w_data.eq(self.i.payload),
            inner.w_en.eq(self.i.valid),
            self.i.ready.eq(inner.w_rdy),
            self.o.payload.eq(inner.r_data),
            self.o.valid.eq(inner.r_rdy),
            inner.r_en.eq(self.o.ready),
            self.level.eq(inner.level),
        ]
        return m
