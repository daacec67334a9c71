"""Frames from the link: find them, check them, put their messages together."""

from amaranth.hdl import Cat, Module, Mux, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.delay import delay
from hw.formats.frames import MAGIC, Type
from hw.layouts import WORD_BYTES, link_beat

from .crc32 import CRC_BYTES, RESIDUE, Crc32
from .header import HEADER, check_cycles, check_sizes
from .ring import Ring


class FrameReceive(wiring.Component):
    """Take the next wanted ``MESSAGE`` frame, if it is intact and there is room for it; drop all else.

    Outside a frame the last 16 bytes that came are looked at, beat by beat: where they are no header, the oldest beat
    is garbage. Within a frame a beat is taken every cycle; a frame with payload costs ``overhead`` cycles beside its
    beats. ``SYNC`` empties everything, so that the next beat at ``o`` is the new connection's first.

    Parameters
    ----------
    width
        Bytes of a beat: 1, 4, 8 or 16.
    frame_words
        Most payload of a frame, in words of 16 bytes.
    buffer_words
        Words that wait for the reader: a power of two, at least ``frame_words``; with two frames' worth one may
        arrive while another leaves.
    idle_cycles
        A frame whose next beat does not come for so many cycles is dropped.

    Members
    -------
    i : stream of bytes, ``width`` a beat
    o : stream of :func:`hw.layouts.link_beat`: messages; beats that are all padding are left out
    sync : Out, high for a cycle when a connection starts; nonce : Out, its number, with ``sync``
    wanted : Out, number of the ``MESSAGE`` wanted next; credit : Out, free words
    tell : Out, high for a cycle when the peer should learn of these
    nak : Out, high for a cycle when it should send again from ``wanted`` on
    poll : Out, high for a cycle when it wants ``STATUS``
    acked : Out, high for a cycle with each header of ``MESSAGE`` or ``ACK``; peer_ack : Out, what it acknowledges
    resend : Out, high for a cycle when the peer asks for all that it did not acknowledge
    damaged, refused, garbage : Out, see :class:`hw.formats.frames.Status`
    """

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

    def __init__(self, width: int, *, frame_words: int, buffer_words: int, idle_cycles: int) -> None:
        check_sizes(width, frame_words, buffer_words)
        check_cycles("idle_cycles", idle_cycles)
        self.width, self.frame_words, self.buffer_words = width, frame_words, buffer_words
        self.idle_cycles = idle_cycles
        self.overhead = 10 + WORD_BYTES // width
        super().__init__(
            {
                "i": In(stream.Signature(data.ArrayLayout(8, width))),
                "o": Out(stream.Signature(link_beat(width))),
                "sync": Out(1),
                "nonce": Out(16),
                "wanted": Out(16),
                "credit": Out(16),
                "tell": Out(1),
                "nak": Out(1),
                "poll": Out(1),
                "acked": Out(1),
                "peer_ack": Out(16),
                "resend": Out(1),
                "damaged": Out(32),
                "refused": Out(32),
                "garbage": Out(32),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        beats = WORD_BYTES // self.width
        bits = 8 * self.width
        ring = Ring(self.width, self.buffer_words)
        m.submodules.ring = ResetInserter(self.sync)(ring)
        wiring.connect(m, ring.o, wiring.flipped(self.o))
        m.submodules.crc = crc = Crc32(self.width)

        # While a frame is sought the window is what came last, within one it is the frame's header. It turns by a beat
        # to show its beats one after another; a whole turn leaves it as it was.
        window = Signal(HEADER)
        raw = window.as_value()
        turn = Signal()
        # What the state says of beats, in registers: any may begin a header, it is one of the payload or the trailer.
        hunting = Signal(init=1)
        in_payload = Signal()
        in_trailer = Signal()
        checking = Signal()  # the window is a header that is being checked
        with m.If(turn | (hunting & self.i.valid)):
            m.d.sync += raw.eq(Cat(raw[bits:], Mux(hunting, self.i.payload, raw[:bits])))
        m.d.comb += [
            self.i.ready.eq(hunting | in_payload | in_trailer),
            self.nonce.eq(window.sequence),
            self.peer_ack.eq(window.ack),
        ]

        def go(state: str) -> None:
            m.next = state
            m.d.sync += [
                hunting.eq(state == "HUNT"),
                in_payload.eq(state == "PAYLOAD"),
                in_trailer.eq(state == "TRAILER"),
                checking.eq(state == "CHECK"),
            ]

        # The current beat is one of the payload, of the trailer, or of a header that is being checked.
        current = Signal(bits, reset_less=True)
        checked = Signal()
        payload_next = Signal()
        payload = Signal()
        trailer_next = Signal()
        trailer = Signal()
        compared = Signal()
        m.d.sync += [
            current.eq(Mux(checking, raw[:bits], self.i.payload)),
            checked.eq(checking),
            payload.eq(payload_next),
            trailer.eq(trailer_next),
            compared.eq(trailer),
        ]
        m.d.comb += [
            payload_next.eq(in_payload & self.i.valid),
            trailer_next.eq(in_trailer & self.i.valid),
            turn.eq(checking | trailer),
            crc.data.eq(current),
            crc.valid.eq(checked | payload),
        ]

        # A trailer is the payload's CRC and the header's beginning. The CRC, which takes longer, is compared a
        # cycle later.
        intact = Signal()
        place = Signal(range(beats))  # in the trailer
        with m.If(trailer):
            m.d.sync += place.eq(place + 1)
        crc_part = min(self.width, CRC_BYTES)  # bytes of it in a beat
        in_crc = place < CRC_BYTES // crc_part
        same = Signal(self.width)
        for n in range(self.width):
            due = raw.word_select((n - CRC_BYTES) % WORD_BYTES, 8)
            m.d.sync += same[n].eq((current.word_select(n, 8) == due) | (in_crc if n < CRC_BYTES else 0))
        of_crc = Signal(8 * crc_part)
        place_before = Signal.like(place)
        crc_compared = Signal()
        crc_same = Signal(init=1)
        m.d.sync += [
            of_crc.eq(current),
            place_before.eq(place),
            crc_compared.eq(trailer & in_crc),
            crc_same.eq((of_crc == crc.crc.word_select(place_before[:2], 8 * crc_part)) | ~crc_compared),
        ]
        with m.If((compared & ~same.all()) | ~crc_same):
            m.d.sync += intact.eq(0)

        # What the window says as a header, a cycle late.
        is_message = Signal()
        is_ack = Signal()
        is_sync = Signal()
        acceptable = Signal()
        is_header = Signal()
        is_wanted = Signal()
        is_ahead = Signal()
        room = Signal()
        known_bare = (window.type == Type.ACK) | (window.type == Type.SYNC) | (window.type == Type.STATUS)
        words_fit = (window.words != 0) & (window.words <= self.frame_words)
        difference = (window.sequence - self.wanted)[:16]
        m.d.sync += [
            is_message.eq(window.type == Type.MESSAGE),
            is_ack.eq(window.type == Type.ACK),
            is_sync.eq(window.type == Type.SYNC),
            acceptable.eq(
                Mux(window.type == Type.MESSAGE, words_fit, known_bare & (window.words == 0))
                & (window.last | (window.missing == 0))
            ),
            is_header.eq(acceptable & (crc.crc == RESIDUE)),
            is_wanted.eq(window.sequence == self.wanted),
            is_ahead.eq(~difference[15]),  # or wanted
            room.eq(window.words <= ring.free),
        ]
        # What it is, two cycles late.
        nothing_found = Signal()
        sync_found = Signal()
        message_found = Signal()
        told_found = Signal()
        m.d.sync += [
            nothing_found.eq(~is_header),
            sync_found.eq(is_header & is_sync),
            message_found.eq(is_header & is_message),
            told_found.eq(is_header & (is_message | is_ack)),
        ]

        # Words freed since the peer last heard of it. It must hear before it could be short of room for a frame.
        enough = max(1, min(self.frame_words // 2, self.buffer_words - self.frame_words))
        grown = Signal(range(enough + 1))
        grown_enough = Signal()
        m.d.comb += [grown_enough.eq(ring.freed & (grown == enough - 1)), self.credit.eq(ring.free)]
        with m.If(ring.freed):
            m.d.sync += grown.eq(Mux(grown_enough, 0, grown + 1))

        filled = Signal(range(beats))  # beats in the window
        one_more = Signal(init=beats == 1)  # fills it
        part = Signal(range(beats))
        last_part = ((~window.missing)[self.width.bit_length() - 1 :])[: len(part)]  # that is not all padding
        at_end = Signal(init=beats == 1)  # it is at that one
        advance = Signal()
        words_left = Signal(range(self.frame_words + 1))
        last_word = Signal()
        whole = Signal(init=beats == 1)  # it is at the word's last
        store = Signal()
        ahead = Signal()
        stored_all = Signal()  # only padding is left of the payload
        stored = Signal()
        ends = Signal()
        told = Signal()  # of the gap before the wanted frame
        idle = Signal(range(self.idle_cycles + 1))
        late = Signal()
        m.d.comb += [
            advance.eq(checking | payload_next | trailer_next),
            ring.beat.eq(Cat(current, ends)),
            ring.put.eq(stored),
            ring.count.eq(window.words),
        ]
        final = last_word & at_end
        m.d.sync += [
            stored.eq(payload_next & store & ~stored_all),
            ends.eq(window.last & final),
            late.eq(idle == self.idle_cycles - 2),
            idle.eq(idle + 1),
            self.tell.eq(grown_enough),
        ]
        m.d.sync += [pulse.eq(0) for pulse in (self.sync, self.nak, self.poll, self.acked, self.resend)]
        with m.If(self.i.valid):
            m.d.sync += idle.eq(0)

        def begin_word() -> None:
            m.d.sync += [part.eq(0), whole.eq(beats == 1), at_end.eq(last_part == 0)]

        def garbage_found() -> None:
            m.d.comb += was_garbage.eq(1)
            m.d.sync += [filled.eq(beats - 1), one_more.eq(1)]
            go("HUNT")

        # Counted a cycle later.
        was_garbage, was_damaged, was_refused = Signal(), Signal(), Signal()
        for counter, event in (
            (self.garbage, was_garbage),
            (self.damaged, was_damaged),
            (self.refused, was_refused),
        ):
            with m.If(delay(m, event, 1, control=True)):
                m.d.sync += counter.eq(counter + 1)
        with m.If(advance):
            m.d.sync += [
                part.eq(part + 1),
                whole.eq((part == beats - 2) | (beats == 1)),
                at_end.eq((part + 1)[: len(part)] == last_part),
            ]
        with m.FSM():
            with m.State("HUNT"):
                with m.If(self.i.valid):
                    m.d.sync += [filled.eq(filled + 1), one_more.eq((filled == beats - 2) | (beats == 1))]
                    with m.If(one_more):
                        go("LOOK")
            with m.State("LOOK"):
                m.d.comb += crc.start.eq(1)
                begin_word()
                go("CHECK")
                with m.If(window.magic != MAGIC):
                    garbage_found()
            with m.State("CHECK"):
                with m.If(whole):
                    go("LAST OF CHECK")
            with m.State("LAST OF CHECK"):
                go("SUM")
            with m.State("SUM"):
                go("COMPARE")
            with m.State("COMPARE"):
                go("WEIGH")
            with m.State("WEIGH"):
                go("JUDGE")
            with m.State("JUDGE"):
                m.d.comb += [crc.start.eq(1), ring.drop.eq(1)]
                m.d.sync += [
                    filled.eq(0),
                    one_more.eq(beats == 1),
                    place.eq(0),
                    words_left.eq(window.words),
                    last_word.eq(window.words == 1),
                    idle.eq(0),
                    late.eq(0),
                    intact.eq(1),
                    stored_all.eq(0),
                    store.eq(is_wanted & room),
                    ahead.eq(is_ahead & ~is_wanted),
                    self.sync.eq(sync_found),
                    self.acked.eq(told_found),
                    self.resend.eq(told_found & window.nak),
                    self.poll.eq(told_found & window.poll),
                ]
                begin_word()
                go("HUNT")
                with m.If(message_found):
                    go("PAYLOAD")
                with m.If(nothing_found):
                    garbage_found()
            with m.State("PAYLOAD"):
                with m.If(self.i.valid):
                    with m.If(final):
                        m.d.sync += stored_all.eq(1)
                    with m.If(whole):
                        m.d.sync += [words_left.eq(words_left - 1), last_word.eq(words_left == 2)]
                        with m.If(last_word):
                            go("TRAILER")
                with m.Elif(late):
                    m.d.sync += intact.eq(0)
                    go("END")
            with m.State("TRAILER"):
                with m.If(self.i.valid):
                    with m.If(whole):
                        go("LAST OF TRAILER")
                with m.Elif(late):
                    m.d.sync += intact.eq(0)
                    go("END")
            with m.State("LAST OF TRAILER"):
                go("COMPARE TRAILER")
            with m.State("COMPARE TRAILER"):
                go("VERIFY")
            with m.State("VERIFY"):
                go("END")
            with m.State("END"):
                go("HUNT")
                with m.If(~intact):
                    m.d.comb += was_damaged.eq(1)
                with m.Elif(~store):
                    m.d.comb += was_refused.eq(1)
                with m.If(store & intact):
                    m.d.comb += ring.commit.eq(1)
                    m.d.sync += [self.wanted.eq(self.wanted + 1), self.tell.eq(1), told.eq(0)]
                with m.Elif(store | (ahead & ~told)):
                    m.d.sync += [self.nak.eq(1), told.eq(1)]
                with m.Elif(~ahead):
                    m.d.sync += self.tell.eq(1)

        with m.If(self.sync):
            m.d.sync += [register.eq(0) for register in (self.wanted, self.tell, told, grown)]
            m.d.sync += [counter.eq(0) for counter in (self.damaged, self.refused, self.garbage)]
        return m
