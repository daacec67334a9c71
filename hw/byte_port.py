"""The engine behind two 8-bit parallel ports that any microcontroller can drive."""

from amaranth.hdl import Module, Signal
from amaranth.lib import data, enum, wiring
from amaranth.lib.cdc import FFSynchronizer
from amaranth.lib.wiring import In, Out

from hw.formats.params import Params
from hw.layouts import activation_word, matrix_command, row_sum
from hw.matrix_engine import MatrixEngine
from hw.primitives.queue import Queue

SYNCHRONISER_STAGES = 3
"""Two would do against metastability; the third may lie by the state machine, far from the pin."""


def struct_bytes(layout: data.StructLayout) -> int:
    """Bytes that carry one payload of ``layout``, lowest bits first, the last byte filled up with zeros."""
    return -(-layout.size // 8)


class Channel(enum.Enum, shape=2):
    """What a byte belongs to."""

    ACTIVATION = 0
    """Part of a :func:`hw.layouts.activation_word`."""
    MATRIX = 1
    """Part of a :func:`hw.layouts.matrix_command`."""
    WEIGHTS = 2
    WEIGHTS_LAST = 3
    """The final byte of a matrix."""


class BytePort(wiring.Component):
    """Drive :class:`hw.matrix_engine.MatrixEngine` with bytes in a four-phase handshake, without timing constraints.

    A byte crosses in four steps: the sender sets data and then ``strobe``; the receiver answers ``ack``; the sender
    takes ``strobe`` back; the receiver takes ``ack`` back. The sender holds its data still while ``strobe`` is high,
    so only ``strobe`` and ``ack`` pass synchronisers; either side may be as slow as it likes.

    Structs travel as little-endian bytes, all bytes of one before any of another. A run of weights needs no padding:
    the byte sent on ``WEIGHTS_LAST`` ends it. Sums come out as :func:`hw.layouts.row_sum`; a host that leaves them
    waiting will in the end find its weights waiting too, so it must offer and take in the same loop.

    Parameters
    ----------
    params
        See :class:`hw.formats.params.Params`.

    Members
    -------
    i_data, i_channel, i_strobe : In; i_ack : Out
        Bytes to the engine; the channel is held like the data.
    o_data, o_strobe : Out; o_ack : In
        Sums from the engine.
    error : Out, see :class:`hw.decode.Decode`
    """

    i_data: Signal
    i_channel: Signal
    i_strobe: Signal
    i_ack: Signal
    o_data: Signal
    o_strobe: Signal
    o_ack: Signal
    error: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        super().__init__(
            {
                "i_data": In(8),
                "i_channel": In(Channel),
                "i_strobe": In(1),
                "i_ack": Out(1),
                "o_data": Out(8),
                "o_strobe": Out(1),
                "o_ack": In(1),
                "error": Out(2),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.engine = engine = MatrixEngine(self.params)
        m.d.comb += self.error.eq(engine.error)
        self._receive(m, engine)
        self._send(m, engine)
        return m

    def _receive(self, m: Module, engine: MatrixEngine) -> None:
        sizes = {
            Channel.ACTIVATION: struct_bytes(activation_word(self.params)),
            Channel.MATRIX: struct_bytes(matrix_command(self.params)),
            Channel.WEIGHTS: self.params.link_bytes,
            Channel.WEIGHTS_LAST: 1,  # wherever in its beat it lies
        }
        buffer = Signal(data.ArrayLayout(8, max(sizes.values())), reset_less=True)
        place = Signal(len(buffer), init=1)  # of the next byte; one bit set
        byte = Signal(8, reset_less=True)
        channel = Signal(Channel, reset_less=True)
        strobe = Signal()
        m.submodules.i_strobe_sync = FFSynchronizer(self.i_strobe, strobe, stages=SYNCHRONISER_STAGES)

        # Between port and engine, so that the engine's answer need not reach the port's state within a cycle.
        m.submodules.weights = weights = Queue(engine.i.p.shape(), 2)
        wiring.connect(m, weights.o, engine.i)

        # The stream that each channel feeds; a beat of weights ends early on its own channel.
        streams = {
            Channel.ACTIVATION: engine.i_x,
            Channel.MATRIX: engine.i_matrix,
            Channel.WEIGHTS: weights.i,
            Channel.WEIGHTS_LAST: weights.i,
        }
        bits = buffer.as_value()
        m.d.comb += [
            engine.i_x.p.eq(bits[: engine.i_x.p.shape().size]),
            engine.i_matrix.p.eq(bits[: engine.i_matrix.p.shape().size]),
            weights.i.p.data.eq(bits[: 8 * self.params.link_bytes]),
            weights.i.p.last.eq(channel == Channel.WEIGHTS_LAST),
        ]

        with m.FSM():
            with m.State("WAIT"):
                m.d.sync += [byte.eq(self.i_data), channel.eq(self.i_channel)]
                with m.If(strobe):
                    m.next = "STORE"
            with m.State("STORE"):
                for index in range(len(buffer)):
                    with m.If(place[index]):
                        m.d.sync += buffer[index].eq(byte)
                m.d.sync += place.eq(place << 1)
                m.next = "ACKNOWLEDGE"
                with m.Switch(channel):
                    for case, port in streams.items():
                        with m.Case(case):
                            with m.If(place[sizes[case] - 1 :].any()):
                                m.d.sync += port.valid.eq(1)
                                m.next = "HAND OVER"
            with m.State("HAND OVER"):
                m.d.sync += place.eq(1)
                for port in (engine.i_x, engine.i_matrix, weights.i):
                    with m.If(port.valid & port.ready):
                        m.d.sync += port.valid.eq(0)
                        m.next = "ACKNOWLEDGE"
            with m.State("ACKNOWLEDGE"):
                m.d.sync += self.i_ack.eq(strobe)
                with m.If(~strobe):
                    m.next = "WAIT"

    def _send(self, m: Module, engine: MatrixEngine) -> None:
        size = struct_bytes(row_sum(self.params))
        left = Signal(data.ArrayLayout(8, size), reset_less=True)
        count = Signal(range(size))
        ack = Signal()
        m.submodules.o_ack_sync = FFSynchronizer(self.o_ack, ack, stages=SYNCHRONISER_STAGES)
        taking = Signal(init=1)  # the state "TAKE", as a register
        m.d.comb += [self.o_data.eq(left[0]), engine.o.ready.eq(taking)]
        with m.FSM():
            with m.State("TAKE"):
                m.d.sync += [left.eq(engine.o.payload), count.eq(size - 1)]
                with m.If(engine.o.valid):
                    m.d.sync += taking.eq(0)
                    m.next = "OFFER"
            with m.State("OFFER"):  # one cycle later than the data, which thereby lies still when strobe rises
                m.d.sync += self.o_strobe.eq(1)
                with m.If(ack):
                    m.d.sync += self.o_strobe.eq(0)
                    m.next = "RELEASE"
            with m.State("RELEASE"):
                with m.If(~ack):
                    m.d.sync += [left.eq(left.as_value() >> 8), count.eq(count - 1)]
                    with m.If(count == 0):
                        m.d.sync += taking.eq(1)
                        m.next = "TAKE"
                    with m.Else():
                        m.next = "OFFER"
