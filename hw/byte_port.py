"""The engine behind two 8-bit parallel ports that any microcontroller can drive."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, enum, wiring
from amaranth.lib.cdc import FFSynchronizer
from amaranth.lib.wiring import In, Out

from hw.engine import Engine
from hw.formats.params import Params
from hw.layouts import REQUEST
from hw.primitives.queue import Queue

SYNCHRONISER_STAGES = 3
"""Two would do against metastability; the third may lie by the state machine, far from the pin."""

REQUEST_BYTES = REQUEST.size // 8


class Channel(enum.Enum, shape=2):
    """What a byte from the engine belongs to."""

    MESSAGE = 0
    MESSAGE_LAST = 1
    """The final byte of a message."""
    REQUEST = 2
    """One of a request's ten: offset, then length, little-endian."""


class BytePort(wiring.Component):
    """Drive :class:`hw.engine.Engine` with bytes in a four-phase handshake, without timing constraints.

    A byte crosses in four steps: the sender sets data and then ``strobe``; the receiver answers ``ack``; the sender
    takes ``strobe`` back; the receiver takes ``ack`` back. The sender holds its data still while ``strobe`` is high,
    so only ``strobe`` and ``ack`` pass synchronisers; either side may be as slow as it likes.

    A message to the engine needs no padding: the byte sent with ``i_last`` ends it. Messages from the engine are
    multiples of ``link_bytes`` long. A host that leaves these waiting will in the end find its own bytes waiting too,
    so it must offer and take in the same loop.

    Parameters
    ----------
    params
        See :class:`hw.formats.params.Params`.

    Members
    -------
    i_data, i_last, i_strobe : In; i_ack : Out
        Bytes to the engine; ``i_last`` is held like the data.
    o_data, o_channel, o_strobe : Out; o_ack : In
        Bytes from the engine; ``o_channel`` is held like the data.
    """

    i_data: Signal
    i_last: Signal
    i_strobe: Signal
    i_ack: Signal
    o_data: Signal
    o_channel: Signal
    o_strobe: Signal
    o_ack: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        super().__init__(
            {
                "i_data": In(8),
                "i_last": In(1),
                "i_strobe": In(1),
                "i_ack": Out(1),
                "o_data": Out(8),
                "o_channel": Out(Channel),
                "o_strobe": Out(1),
                "o_ack": In(1),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.engine = engine = Engine(self.params)
        self._receive(m, engine)
        self._send(m, engine)
        return m

    def _receive(self, m: Module, engine: Engine) -> None:
        link_bytes = self.params.link_bytes
        buffer = Signal(data.ArrayLayout(8, link_bytes), reset_less=True)
        place = Signal(link_bytes, init=1)  # of the next byte; one bit set
        byte = Signal(8, reset_less=True)
        last = Signal(reset_less=True)
        strobe = Signal()
        m.submodules.i_strobe_sync = FFSynchronizer(self.i_strobe, strobe, stages=SYNCHRONISER_STAGES)

        # Between port and engine, so that the engine's answer need not reach the port's state within a cycle.
        m.submodules.beats = beats = Queue(engine.i.p.shape(), 2)
        wiring.connect(m, beats.o, engine.i)
        m.d.comb += [beats.i.p.data.eq(buffer), beats.i.p.last.eq(last)]

        with m.FSM():
            with m.State("WAIT"):
                m.d.sync += [byte.eq(self.i_data), last.eq(self.i_last)]
                with m.If(strobe):
                    m.next = "STORE"
            with m.State("STORE"):
                for index in range(link_bytes):
                    with m.If(place[index]):
                        m.d.sync += buffer[index].eq(byte)
                m.d.sync += place.eq(place << 1)
                m.next = "ACKNOWLEDGE"
                with m.If(last | place[-1]):
                    m.d.sync += place.eq(1)
                    m.next = "HAND OVER"
            with m.State("HAND OVER"):
                m.d.comb += beats.i.valid.eq(1)
                with m.If(beats.i.ready):
                    m.next = "ACKNOWLEDGE"
            with m.State("ACKNOWLEDGE"):
                m.d.sync += self.i_ack.eq(strobe)
                with m.If(~strobe):
                    m.next = "WAIT"

    def _send(self, m: Module, engine: Engine) -> None:
        size = max(REQUEST_BYTES, self.params.link_bytes)
        left = Signal(8 * size, reset_less=True)
        count = Signal(range(size))
        request = Signal()
        last = Signal()
        ack = Signal()
        m.submodules.o_ack_sync = FFSynchronizer(self.o_ack, ack, stages=SYNCHRONISER_STAGES)
        taking = Signal(init=1)  # the state "TAKE", as a register
        m.d.comb += [
            self.o_data.eq(left[:8]),
            self.o_channel.eq(Mux(request, Channel.REQUEST, Cat(last & (count == 0), 0))),
            engine.o_request.ready.eq(taking),
            engine.o.ready.eq(taking & ~engine.o_request.valid),
        ]
        with m.FSM():
            with m.State("TAKE"):
                with m.If(engine.o_request.valid):
                    m.d.sync += [left.eq(engine.o_request.payload), count.eq(REQUEST_BYTES - 1)]
                with m.Else():
                    m.d.sync += [left.eq(engine.o.p.data), count.eq(self.params.link_bytes - 1)]
                m.d.sync += [request.eq(engine.o_request.valid), last.eq(engine.o.p.last)]
                with m.If(engine.o_request.valid | engine.o.valid):
                    m.d.sync += taking.eq(0)
                    m.next = "OFFER"
            with m.State("OFFER"):  # one cycle later than the data, which thereby lies still when strobe rises
                m.d.sync += self.o_strobe.eq(1)
                with m.If(ack):
                    m.d.sync += self.o_strobe.eq(0)
                    m.next = "RELEASE"
            with m.State("RELEASE"):
                with m.If(~ack):
                    m.d.sync += [left.eq(left >> 8), count.eq(count - 1)]
                    m.next = "OFFER"
                    with m.If(count == 0):
                        m.d.sync += taking.eq(1)
                        m.next = "TAKE"
