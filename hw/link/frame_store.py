"""Where messages, cut into frames, wait to be sent and to be acknowledged."""

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.layouts import WORD_BYTES, bits_for, link_beat
from hw.primitives.memory import BlockMemory

from .ring import chase

WINDOW = 8
"""Frames that may be there at a time; a power of two."""


class FrameStore(wiring.Component):
    """Cut messages into frames of at most ``frame_words``; number and keep them until they are acknowledged.

    Frames leave in order. An acknowledgement lets all frames before ``peer_ack`` go, unless it names one
    that was never taken: then it is ignored.

    Parameters
    ----------
    width
        Bytes of a beat.
    frame_words
        Most words of 16 bytes of a frame.
    buffer_words
        Words kept: a power of two, at least ``frame_words``.

    Members
    -------
    i : stream of :func:`hw.layouts.link_beat`: messages, each of whole words
    ready : Out, there is a frame to take; number, words, last, at : Out, its number, its words, whether it ends its
        message, and the word at which it begins; again : Out, it was taken before
    take : In, it is taken; back : In, all that are not acknowledged are to be taken again; neither while ``busy`` has
        been high for a cycle. What they change is seen within ``SETTLE`` cycles.
    waiting : Out, frames that were taken are not acknowledged
    acked, peer_ack : In; busy : Out, an acknowledgement is at work; let_go : Out, high for a cycle for each frame
    r_addr : In, a beat; r_data : Out, ``BlockMemory.LATENCY`` cycles later
    """

    i: stream.Interface
    SETTLE = 3

    ready: Signal
    number: Signal
    words: Signal
    last: Signal
    at: Signal
    again: Signal
    take: Signal
    back: Signal
    waiting: Signal
    acked: Signal
    peer_ack: Signal
    busy: Signal
    let_go: Signal
    r_addr: Signal
    r_data: Signal

    def __init__(self, width: int, *, frame_words: int, buffer_words: int) -> None:
        self.width, self.frame_words, self.buffer_words = width, frame_words, buffer_words
        self.beats = WORD_BYTES // width
        super().__init__(
            {
                "i": In(stream.Signature(link_beat(width))),
                "ready": Out(1),
                "number": Out(16),
                "words": Out(bits_for(frame_words + 1)),
                "last": Out(1),
                "at": Out(bits_for(buffer_words)),
                "again": Out(1),
                "take": In(1),
                "back": In(1),
                "waiting": Out(1),
                "acked": In(1),
                "peer_ack": In(16),
                "busy": Out(1),
                "let_go": Out(1),
                "r_addr": In(bits_for(buffer_words * self.beats)),
                "r_data": Out(8 * width),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        beats = self.beats
        m.submodules.ring = ring = BlockMemory(8 * self.width, self.buffer_words * beats)
        shape = data.StructLayout({"words": len(self.words), "last": 1})
        m.submodules.frames = frames = memory.Memory(shape=shape, depth=WINDOW, init=[])
        m.d.comb += [ring.r_addr.eq(self.r_addr), self.r_data.eq(ring.r_data)]

        # By number: oldest <= upcoming <= fresh <= made. The oldest is the first that is not acknowledged, the upcoming
        # one is taken next, the fresh one was never taken, the one that would be made next is not complete. Of two of
        # them, which are not far apart, the low bits tell the difference.
        near = bits_for(2 * WINDOW)
        oldest = Signal(16)
        upcoming = Signal(16)
        fresh = Signal(near)
        made = Signal(near)
        # Where they begin, in words. One bit more than an address, so that full differs from empty.
        oldest_at, upcoming_at, limit = (
            Signal(len(self.at) + 1, name=name) for name in ("oldest_at", "upcoming_at", "limit")
        )

        # Messages go to memory as they come.
        taken, word_taken, frame_made = Signal(), Signal(), Signal()
        part = Signal(range(beats))
        last_part = Signal(init=beats == 1)
        words = Signal(range(self.frame_words))
        last_word = Signal(init=self.frame_words == 1)
        full = Signal()  # as many frames as there may be; for two cycles after each, too, before that is known
        word_at, room = chase(m, word_taken, limit)
        write = frames.write_port()
        m.d.comb += [
            limit.eq(oldest_at ^ self.buffer_words),
            self.i.ready.eq(room & ~full),
            taken.eq(self.i.valid & self.i.ready),
            word_taken.eq(taken & last_part),
            frame_made.eq(word_taken & (self.i.p.last | last_word)),
            write.addr.eq(made),
        ]
        m.d.sync += [
            full.eq(((made ^ oldest[:near]) == WINDOW) | frame_made | write.en),
            write.data.words.eq(words + 1),
            write.data.last.eq(self.i.p.last),
            write.en.eq(frame_made),
            ring.w_addr.eq(Cat(part, word_at[: len(self.at)])),
            ring.w_data.eq(self.i.p.data),
            ring.w_en.eq(taken),
        ]
        with m.If(taken):
            m.d.sync += [part.eq(part + 1), last_part.eq((part == beats - 2) | (beats == 1))]
        with m.If(word_taken):
            m.d.sync += [words.eq(words + 1), last_word.eq(words == self.frame_words - 2)]
        with m.If(write.en):  # no word is taken in this cycle
            m.d.sync += [words.eq(0), last_word.eq(self.frame_words == 1), made.eq(made + 1)]

        # Frames are taken, perhaps again.
        upcoming_frame = frames.read_port(domain="comb")
        m.d.comb += [
            upcoming_frame.addr.eq(upcoming),
            self.number.eq(upcoming),
            self.at.eq(upcoming_at),
        ]
        m.d.sync += [
            self.ready.eq(upcoming[:near] != made),
            self.again.eq(upcoming[:near] != fresh),
            self.waiting.eq(oldest[:near] != fresh),
            self.words.eq(upcoming_frame.data.words),
            self.last.eq(upcoming_frame.data.last),
        ]
        take, back = Signal(), Signal()
        m.d.sync += [take.eq(self.take), back.eq(self.back)]
        with m.If(take):
            m.d.sync += [upcoming.eq(upcoming + 1), upcoming_at.eq(upcoming_at + self.words)]
            with m.If(~self.again):
                m.d.sync += fresh.eq(fresh + 1)
        with m.If(back):
            m.d.sync += [upcoming.eq(oldest), upcoming_at.eq(oldest_at)]

        # Acknowledgements. Upcoming frames may be among those that they let go.
        oldest_frame = frames.read_port(domain="comb")
        m.d.comb += oldest_frame.addr.eq(oldest)
        heard = Signal(16)
        due = Signal()
        distance = Signal(16)
        span = Signal(near)
        oldest_words = Signal.like(self.words)
        m.d.sync += oldest_words.eq(oldest_frame.data.words)
        next_at = (oldest_at + oldest_words)[: len(oldest_at)]
        with m.FSM() as fsm:
            with m.State("WAIT"):
                with m.If(due):
                    m.d.sync += [due.eq(0), distance.eq(heard - oldest), span.eq(fresh - oldest)]
                    m.next = "CHECK"
            with m.State("CHECK"):
                m.next = "WAIT"
                with m.If((distance != 0) & (distance <= span)):
                    m.next = "LET GO"
            with m.State("LET GO"):
                m.d.comb += self.let_go.eq(1)
                m.d.sync += [distance.eq(distance - 1), oldest.eq(oldest + 1), oldest_at.eq(next_at)]
                with m.If(upcoming[:near] == oldest[:near]):
                    m.d.sync += [upcoming.eq(upcoming + 1), upcoming_at.eq(next_at)]
                m.next = "NEXT"
                with m.If(distance == 1):
                    m.next = "WAIT"
            with m.State("NEXT"):
                m.next = "LET GO"
        working, settling = Signal(), Signal()
        m.d.comb += [working.eq(due | ~fsm.ongoing("WAIT")), self.busy.eq(working | settling)]
        m.d.sync += settling.eq(working)
        with m.If(self.acked):
            m.d.sync += [heard.eq(self.peer_ack), due.eq(1)]
        return m
