"""The engine's side of the link: bytes in and frames out on one side, messages on the other."""

from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.layouts import link_beat
from hw.primitives.restart import add_parts

from .frame_receive import FrameReceive
from .frame_send import FrameSend


class Link(wiring.Component):
    """:class:`FrameReceive` and :class:`FrameSend`, which has to tell what that hears.

    Parameters
    ----------
    width, frame_words, buffer_words, idle_cycles
        See :class:`FrameReceive`.
    send_frame_words, send_buffer_words, resend_cycles
        See :class:`FrameSend`.

    Members
    -------
    i : stream of bytes from the link, ``width`` a beat; o : stream of :func:`hw.layouts.link_beat`: frames to the link
    o_message, i_message : streams of :func:`hw.layouts.link_beat`: messages from the host, and to it
    reset : Out, high for a cycle when a connection starts. All that came at ``o_message`` before, also part of a
        message, and all that is taken at ``i_message`` up to and in this cycle belongs to the one before.
    restart : In, starts all over, with no connection
    """

    i: stream.Interface
    o: stream.Interface
    o_message: stream.Interface
    i_message: stream.Interface
    reset: Signal
    restart: Signal

    def __init__(
        self,
        width: int,
        *,
        frame_words: int,
        buffer_words: int,
        idle_cycles: int,
        send_frame_words: int,
        send_buffer_words: int,
        resend_cycles: int,
    ) -> None:
        self.receive = FrameReceive(width, frame_words=frame_words, buffer_words=buffer_words, idle_cycles=idle_cycles)
        self.send = FrameSend(
            width, frame_words=send_frame_words, buffer_words=send_buffer_words, resend_cycles=resend_cycles
        )
        self.width = width
        beat = stream.Signature(link_beat(width))
        super().__init__(
            {
                "i": In(stream.Signature(data.ArrayLayout(8, width))),
                "o": Out(beat),
                "o_message": Out(beat),
                "i_message": In(beat),
                "reset": Out(1),
                "restart": In(1),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        receive, send = self.receive, self.send
        add_parts(m, {"receive": receive, "send": send}, self.restart)
        wiring.connect(m, wiring.flipped(self.i), receive.i)
        wiring.connect(m, receive.o, wiring.flipped(self.o_message))
        wiring.connect(m, wiring.flipped(self.i_message), send.i)
        wiring.connect(m, send.o, wiring.flipped(self.o))
        m.d.comb += self.reset.eq(receive.sync)
        said = ("sync", "nonce", "wanted", "credit", "tell", "nak", "poll", "acked", "peer_ack", "resend")
        for name in (*said, "damaged", "refused", "garbage"):
            m.d.comb += getattr(send, name).eq(getattr(receive, name))
        return m
