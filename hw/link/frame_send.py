"""Frames to the link: cut messages up, keep them until they are acknowledged, send them again if they are not."""

from amaranth.hdl import Cat, Const, Module, Mux, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.delay import delay
from hw.formats.frames import MAGIC, Type
from hw.layouts import WORD_BYTES, link_beat
from hw.primitives.memory import BlockMemory
from hw.primitives.queue import Queue

from .crc32 import NEUTRAL, Crc32
from .frame_store import FrameStore
from .header import check_cycles, check_sizes


class FrameSend(wiring.Component):
    """Send messages as ``MESSAGE`` frames, and between them what the receiving side has to tell.

    A frame is sent when all of it is there, at most eight before the oldest of them is acknowledged. They are sent
    again from the oldest on when the peer asks for that, or when ``resend_cycles`` pass in which none is acknowledged
    and none sent. An acknowledgement of what was never sent is ignored.

    Between frames ``SYNC`` comes first, then ``STATUS``, then an ``ACK`` if a frame was lost or if no ``MESSAGE`` is
    there that tells the same. ``sync`` makes all messages be forgotten, what is taken at ``i`` in that cycle too; a
    frame whose payload is being sent is completed, with a CRC that does not fit. Nothing is sent before the first.

    A beat is sent every cycle; a frame with payload costs ``overhead`` cycles beside its beats.

    Parameters
    ----------
    width
        Bytes of a beat: 1, 4, 8 or 16.
    frame_words
        Most payload of a frame, in words of 16 bytes.
    buffer_words
        Words that wait for their acknowledgement: a power of two, at least ``frame_words``.
    resend_cycles
        See above.

    Members
    -------
    i : stream of :func:`hw.layouts.link_beat`: messages, each of whole words
    o : stream of :func:`hw.layouts.link_beat`: frames, the final beat of each marked ``last``
    sync, nonce, wanted, credit, tell, nak, poll, acked, peer_ack, resend, damaged, refused, garbage : In
        See :class:`hw.link.frame_receive.FrameReceive`.
    resent : Out, frames sent again since ``sync``
    """

    QUEUE_DEPTH = 16

    i: stream.Interface
    o: stream.Interface
    sync: Signal
    nonce: Signal
    wanted: Signal
    credit: Signal
    tell: Signal
    nak: Signal
    poll: Signal
    acked: Signal
    peer_ack: Signal
    resend: Signal
    damaged: Signal
    refused: Signal
    garbage: Signal
    resent: Signal

    def __init__(self, width: int, *, frame_words: int, buffer_words: int, resend_cycles: int) -> None:
        check_sizes(width, frame_words, buffer_words)
        check_cycles("resend_cycles", resend_cycles)
        self.width, self.frame_words, self.buffer_words = width, frame_words, buffer_words
        self.resend_cycles = resend_cycles
        self.overhead = 11 + WORD_BYTES // width
        super().__init__(
            {
                "i": In(stream.Signature(link_beat(width))),
                "o": Out(stream.Signature(link_beat(width))),
                "sync": In(1),
                "nonce": In(16),
                "wanted": In(16),
                "credit": In(16),
                "tell": In(1),
                "nak": In(1),
                "poll": In(1),
                "acked": In(1),
                "peer_ack": In(16),
                "resend": In(1),
                "damaged": In(32),
                "refused": In(32),
                "garbage": In(32),
                "resent": Out(32),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        beats = WORD_BYTES // self.width
        bits = 8 * self.width
        store = FrameStore(self.width, frame_words=self.frame_words, buffer_words=self.buffer_words)
        m.submodules.store = ResetInserter(self.sync)(store)
        wiring.connect(m, wiring.flipped(self.i), store.i)
        m.submodules.crc = crc = Crc32(self.width)
        m.submodules.queue = queue = Queue(link_beat(self.width), self.QUEUE_DEPTH)
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        m.d.comb += [store.acked.eq(self.acked), store.peer_ack.eq(self.peer_ack)]

        # What is to be told.
        started = Signal()
        sync_due, status_due, nak_due, tell_due = Signal(), Signal(), Signal(), Signal()
        nonce = Signal(16)
        again_due = Signal()

        # The word at work: four bytes, then a header's first twelve. It turns by a beat to show its beats one after
        # another; a whole turn leaves it as it was.
        first = Signal(32)
        fields = Signal(WORD_BYTES * 8 - len(first))
        word = Cat(first, fields)
        # What the state says, in registers: the word is shown to the CRC, it is sent, or beats of the payload are.
        checking, sending_header, sending_payload, sending_trailer = Signal(), Signal(), Signal(), Signal()
        composing = Signal()

        def go(state: str) -> None:
            m.next = state
            m.d.sync += [
                composing.eq(state == "HEADER"),
                crc.start.eq(state in ("HEADER", "CHECKED")),
                checking.eq(state == "CHECK"),
                sending_header.eq(state == "SEND HEADER"),
                sending_payload.eq(state == "SEND PAYLOAD"),
                sending_trailer.eq(state == "SEND TRAILER"),
            ]

        turn = Signal()
        sealing = Signal()  # the CRC becomes its first four bytes
        flip = Signal()  # a wrong one
        m.d.sync += sealing.eq(0)
        with m.If(sealing):
            m.d.sync += first.eq(crc.crc ^ flip)
        with m.If(turn):
            m.d.sync += word.eq(Cat(word[bits:], word[:bits]))
        kind = Signal(Type)
        status = Signal(WORD_BYTES * 8, reset_less=True)
        # No struct: in Verilog, Yosys gives a part that is constant beside parts that are not a block that never runs.
        last, nak, sequence, words = (Signal(bits, reset_less=True) for bits in (1, 1, 16, 16))
        flags = Cat(last, nak, Const(0, 6))
        header = Cat(Const(MAGIC, 16), kind | Const(0, 8), flags, sequence, self.wanted, words, self.credit)

        with m.If(composing):
            m.d.sync += [first.eq(NEUTRAL), fields.eq(header)]

        # Beats on their way to the queue.
        putting = Signal()  # a place in the queue is taken
        places = Signal(range(queue.depth + 1), init=queue.depth)
        popped = Signal()  # a cycle late, so that nothing here waits for the link
        place = Signal()  # there will be one, even if one is taken meanwhile
        m.d.sync += [
            place.eq(places > 1),
            popped.eq(queue.o.valid & queue.o.ready),
            places.eq(places - putting + popped),
        ]
        reading = Signal()
        read = delay(m, reading, BlockMemory.LATENCY, control=True)
        beat = Signal(bits, reset_less=True)
        beat_last, to_crc, to_queue = Signal(), Signal(), Signal()
        put, put_last = Signal(), Signal()
        count = Signal(range(beats))  # whole words pass, so it is 0 between them
        count_last = Signal()
        bare = Signal()
        from_memory = Signal()  # the payload; if not, it is the status
        status_beat = delay(m, status.word_select(count, bits), BlockMemory.LATENCY)
        with m.If(read):
            m.d.sync += beat.eq(Mux(from_memory, store.r_data, status_beat))
        with m.Elif(sending_header):
            m.d.sync += beat.eq(Cat(word, word)[len(first) :])
        with m.Else():
            m.d.sync += beat.eq(word)
        m.d.sync += [to_crc.eq(checking | read), to_queue.eq(put | read), beat_last.eq(put_last)]
        m.d.comb += [
            put.eq(place & (sending_header | sending_trailer)),
            put_last.eq(count_last & (sending_trailer | bare)),
            reading.eq(place & sending_payload),
            turn.eq(checking | put),
            putting.eq(put | reading),
            crc.data.eq(beat),
            crc.valid.eq(to_crc),
            queue.i.p.data.eq(beat),
            queue.i.p.last.eq(beat_last),
            queue.i.valid.eq(to_queue),
            count_last.eq(count == beats - 1),
        ]

        with m.If(turn | reading):
            m.d.sync += count.eq(count + 1)

        left = Signal(range(self.frame_words + 1))  # words of the payload
        last_left = Signal()
        read_at = Signal.like(store.at)
        spoiled = Signal()
        back_for = Signal(range(store.SETTLE))  # cycles
        m.d.comb += store.r_addr.eq(Cat(count, read_at))

        quiet = Signal(range(self.resend_cycles + 1), reset_less=True)
        expired = Signal()
        disturb, disturbed = Signal(), Signal()  # the time begins anew
        choosing = Signal()
        m.d.sync += disturbed.eq(disturb | self.sync | store.let_go)
        with m.If(disturbed):
            m.d.sync += [quiet.eq(0), expired.eq(0)]
        with m.Elif(choosing & ~expired):
            m.d.sync += [quiet.eq(quiet + 1), expired.eq(quiet == self.resend_cycles - 1)]

        with m.FSM():
            with m.State("CHOOSE"):
                m.d.comb += [choosing.eq(1), disturb.eq(~store.waiting)]
                with m.If(self.sync | ~started | store.busy):
                    pass
                with m.Elif(sync_due):
                    m.d.sync += kind.eq(Type.SYNC)
                    go("GATHER")
                with m.Elif(status_due):
                    m.d.sync += kind.eq(Type.STATUS)
                    go("GATHER")
                with m.Elif(again_due | expired):
                    m.d.comb += disturb.eq(1)
                    m.d.sync += again_due.eq(0)
                    go("GO BACK")
                with m.Elif(nak_due | (tell_due & ~store.ready)):
                    m.d.sync += kind.eq(Type.ACK)
                    go("GATHER")
                with m.Elif(store.ready):
                    m.d.sync += kind.eq(Type.MESSAGE)
                    go("GATHER")
            with m.State("GO BACK"):
                m.d.comb += store.back.eq(1)
                go("GOING BACK")
            with m.State("GOING BACK"):
                m.d.sync += back_for.eq(back_for + 1)
                with m.If(back_for == store.SETTLE - 1):
                    m.d.sync += back_for.eq(0)
                    go("CHOOSE")
            with m.State("GATHER"):
                m.d.sync += [spoiled.eq(0), left.eq(1), bare.eq(0), from_memory.eq(0)]
                m.d.sync += [read_at.eq(store.at), last.eq(0), nak.eq(0), sequence.eq(0), words.eq(0)]
                with m.Switch(kind):
                    with m.Case(Type.SYNC):
                        m.d.sync += [sequence.eq(nonce), sync_due.eq(0), bare.eq(1)]
                    with m.Case(Type.STATUS):
                        m.d.sync += [words.eq(1), status_due.eq(0)]
                        m.d.sync += status.eq(Cat(self.damaged, self.refused, self.garbage, self.resent))
                    with m.Case(Type.ACK):
                        m.d.sync += [nak.eq(nak_due), nak_due.eq(0), bare.eq(1)]
                    with m.Case(Type.MESSAGE):
                        m.d.comb += [store.take.eq(1), disturb.eq(1)]
                        m.d.sync += [
                            sequence.eq(store.number),
                            words.eq(store.words),
                            last.eq(store.last),
                            left.eq(store.words),
                            from_memory.eq(1),
                            self.resent.eq(self.resent + store.again),
                        ]
                go("HEADER")
            with m.State("HEADER"):
                m.d.sync += tell_due.eq(0)
                go("CHECK")
            with m.State("CHECK"):
                with m.If(count_last):
                    go("LAST OF CHECK")
            with m.State("LAST OF CHECK"):
                go("SUM")
            with m.State("SUM"):
                m.d.sync += [sealing.eq(1), flip.eq(0)]
                go("CHECKED")
            with m.State("CHECKED"):
                go("SEND HEADER")
            with m.State("SEND HEADER"):
                m.d.sync += last_left.eq(left == 1)
                with m.If(place & count_last):
                    go("SEND PAYLOAD")
                    with m.If(bare):
                        go("CHOOSE")
            with m.State("SEND PAYLOAD"):
                with m.If(place & count_last):
                    m.d.sync += [left.eq(left - 1), last_left.eq(left == 2), read_at.eq(read_at + 1)]
                    with m.If(last_left):
                        go("PAYLOAD IN MEMORY")
            with m.State("PAYLOAD IN MEMORY"):
                go("LAST IN MEMORY")
            with m.State("LAST IN MEMORY"):
                go("LAST OF PAYLOAD")
            with m.State("LAST OF PAYLOAD"):
                go("SUM OF PAYLOAD")
            with m.State("SUM OF PAYLOAD"):
                m.d.sync += [sealing.eq(1), flip.eq(spoiled)]
                go("SEAL")
            with m.State("SEAL"):
                go("SEND TRAILER")
            with m.State("SEND TRAILER"):
                with m.If(place & count_last):
                    go("CHOOSE")

        with m.If(self.poll):
            m.d.sync += status_due.eq(1)
        with m.If(self.tell):
            m.d.sync += tell_due.eq(1)
        with m.If(self.nak):
            m.d.sync += nak_due.eq(1)
        with m.If(self.resend):
            m.d.sync += again_due.eq(1)
        with m.If(self.sync):
            m.d.sync += [due.eq(0) for due in (status_due, nak_due, tell_due, again_due)]
            m.d.sync += self.resent.eq(0)
            m.d.sync += [started.eq(1), sync_due.eq(1), nonce.eq(self.nonce), spoiled.eq(1)]
        return m
