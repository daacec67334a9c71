"""A frame is taken if and only if it is the wanted one, intact, and there was room; it is stored as it came."""

import operator
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
from amaranth.hdl import Array, Cat, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In

from hw.formats.frames import MAGIC, Type
from hw.link import frame_receive
from hw.link.crc32 import RESIDUE
from hw.link.header import HEADER
from hw.link.ring import Ring

from .prove import Opened, Refuted, assume, broken, claim, never_reset, prove

WIDTH = 16
FRAME_WORDS = 2
BUFFER_WORDS = 4
BEAT_BITS = 8 * WIDTH


def folded(beat: Value) -> Value:
    return reduce(operator.xor, (beat[32 * n :][:32] for n in range(BEAT_BITS // 32)))


class Sum(Elaboratable):
    """In place of ``Crc32``, with its ports and its timing: a sum that solvers see through."""

    def __init__(self) -> None:
        self.start = Signal()
        self.data = Signal(BEAT_BITS)
        self.valid = Signal()
        self.crc = Signal(32)
        self.share = Signal(32)
        self.came = Signal()

    def elaborate(self, platform) -> Module:
        m = Module()
        m.d.sync += [self.share.eq(folded(self.data)), self.came.eq(self.valid)]
        with m.If(self.came):
            m.d.sync += self.crc.eq(self.crc ^ self.share)
        with m.If(self.start):
            m.d.sync += [self.crc.eq(0), self.came.eq(0)]
        return m

    def all_that_came(self) -> Value:
        """What the sum will be when all is added."""
        return self.crc ^ Mux(self.came, self.share, 0) ^ Mux(self.valid, folded(self.data), 0)


class AnyRing(Ring):
    """In place of ``Ring``: how much is free is up to the proof."""

    def elaborate(self, platform) -> Module:
        return Module()


class FrameReceiveProof(wiring.Component):
    """Any beats at any time; the last four tell what the receiver must do.

    Parameters
    ----------
    refute
        For broken copies: words of room at the start. Beats come without a pause then, and what only induction needs is
        left out.
    """

    i: stream.Interface
    freed: Signal

    def __init__(self, source: Any, *, refute: int = 0) -> None:
        self.source, self.refute = source, refute
        beat = data.ArrayLayout(8, WIDTH)
        super().__init__({"i": In(stream.Signature(beat)), "freed": In(1)})

    def elaborate(self, platform) -> Module:
        m = Module()
        crc, ring = Sum(), AnyRing(WIDTH, BUFFER_WORDS)
        self.source.Crc32 = lambda width: crc
        self.source.Ring = lambda width, words: ring
        dut = self.source.FrameReceive(WIDTH, frame_words=FRAME_WORDS, buffer_words=BUFFER_WORDS, idle_cycles=16)
        m.submodules.dut = opened = Opened(dut)
        wiring.connect(m, wiring.flipped(self.i), dut.i)
        never_reset(m)
        fsm = opened.module._generated["fsm"]  # Amaranth has no public way to it; the release is pinned

        def state(*names: str) -> Value:
            return sum((fsm.state == fsm.encoding[name] for name in names), start=Mux(0, 0, 0)) != 0

        # The ring's room. A frame's words leave it some time after they came.
        free = Signal(range(BUFFER_WORDS + 1), init=self.refute or BUFFER_WORDS)
        assume(m, ~self.freed | (free < BUFFER_WORDS))
        m.d.comb += [ring.free.eq(free), ring.freed.eq(self.freed)]
        m.d.sync += free.eq(free - Mux(ring.commit, ring.count, 0) + self.freed)
        with m.If(dut.sync):
            m.d.sync += free.eq(BUFFER_WORDS)
        claim(m, free <= BUFFER_WORDS, dut.credit == free)

        # The last beats that came, the newest first, and what was stored since the last drop.
        came = [Signal(BEAT_BITS, name=f"came_{n}") for n in range(FRAME_WORDS + 2)]
        with m.If(dut.i.valid & dut.i.ready):
            m.d.sync += [came[0].eq(dut.i.payload), *(new.eq(old) for old, new in pairwise(came))]
        kept = [Signal(BEAT_BITS + 1, name=f"kept_{n}") for n in range(FRAME_WORDS)]
        count = Signal(range(FRAME_WORDS + 2))
        with m.If(ring.put):
            m.d.sync += [Array(kept)[count].eq(ring.beat), count.eq(count + 1)]
            claim(m, count < FRAME_WORDS)
        with m.If(ring.drop):
            m.d.sync += count.eq(0)
            claim(m, ~ring.put)

        def is_header(beat: Value) -> Value:
            header = data.View(HEADER, beat)
            message = (header.words != 0) & (header.words <= FRAME_WORDS)
            bare = reduce(operator.or_, (header.type == kind for kind in (Type.ACK, Type.SYNC, Type.STATUS)))
            return (
                (header.magic == MAGIC)
                & (folded(beat) == RESIDUE)
                & Mux(header.type == Type.MESSAGE, message, bare & (header.words == 0))
                & (header.last | (header.missing == 0))
            )

        def header_at(place: Value) -> data.View:
            return data.View(HEADER, Array(came)[place])

        # What is to be shown. At the end of a frame that came whole its parts are where they must be.
        window = data.View(HEADER, opened["window"])
        words = window.words
        whole = Signal()  # the frame came whole
        m.d.sync += whole.eq(state("VERIFY"))
        header = header_at((words + 1)[:2])
        trailer = came[0]
        payload_sum = Mux(words == 1, folded(came[1]), folded(came[1]) ^ folded(came[2]))
        intact = (trailer[:32] == payload_sum) & (trailer[32:] == header.as_value()[:96])
        wanted_before = Signal(16)
        committed = Signal()
        synced = Signal()
        m.d.sync += [wanted_before.eq(dut.wanted), committed.eq(ring.commit), synced.eq(dut.sync)]
        claim(m, dut.wanted == Mux(synced, 0, (wanted_before + committed)[:16]))
        room_then = Signal()  # when the header was seen
        with m.If(state("WEIGH")):
            m.d.sync += room_then.eq(header_at(Mux(0, 0, 0)).words <= free)
        with m.If(state("END")):
            claim(
                m,
                ring.commit == (whole & intact & room_then & (header.sequence == dut.wanted)),
                ~ring.commit | is_header(header.as_value()),
                ~ring.commit | ((header.type == Type.MESSAGE) & (header.words == words) & (ring.count == words)),
                ~ring.commit | ((words <= free) & (count == words)),
            )
            for n in range(FRAME_WORDS):
                with m.If(ring.commit & (words > n)):
                    claim(m, kept[n] == Cat(Array(came)[(words - n)[:2]], header.last & (words == n + 1)))
        with m.Else():
            claim(m, ~ring.commit)
        for pulse, kinds in ((dut.sync, (Type.SYNC,)), (dut.acked, (Type.ACK, Type.MESSAGE))):
            with m.If(pulse):
                seen = data.View(HEADER, came[0])
                claim(m, is_header(came[0]), reduce(operator.or_, (seen.type == kind for kind in kinds)))
        claim(m, ~dut.sync | (dut.nonce == data.View(HEADER, came[0]).sequence))
        claim(m, ~dut.acked | (dut.peer_ack == data.View(HEADER, came[0]).ack))
        claim(m, ~dut.resend | dut.acked, ~dut.poll | dut.acked)
        if self.refute:
            assume(m, dut.i.valid, ~self.freed)
            return m

        # What induction needs to know of a state.
        raw = window.as_value()
        seen = Signal(range(FRAME_WORDS + 1))  # words of payload that came
        m.d.comb += seen.eq(words - opened["words_left"])
        judging = ("LOOK", "CHECK", "LAST OF CHECK", "SUM", "COMPARE", "WEIGH", "JUDGE")
        body = ("PAYLOAD", "TRAILER", "LAST OF TRAILER", "COMPARE TRAILER", "VERIFY")
        message = is_header(raw) & (window.type == Type.MESSAGE)
        none_stored = ~opened["payload"] & ~opened["stored"]
        claim(m, opened["hunting"] == state("HUNT"), opened["checking"] == state("CHECK"))
        claim(m, opened["in_payload"] == state("PAYLOAD"), opened["in_trailer"] == state("TRAILER"))
        claim(m, *(opened[name] for name in ("one_more", "whole", "at_end")))  # a beat is a word
        claim(m, opened["checked"] == state("LAST OF CHECK"), opened["trailer"] == state("LAST OF TRAILER"))
        claim(m, opened["compared"] == state("COMPARE TRAILER"))
        claim(m, opened["crc_compared"] == opened["compared"], opened["crc_same"] | state("VERIFY"))
        claim(m, ~opened["stored"] | opened["payload"], ~opened["payload"] | state("PAYLOAD", "TRAILER"))
        claim(m, count <= FRAME_WORDS)
        with m.If(state(*judging)):
            claim(m, raw == came[0])
        with m.If(state(*judging[1:])):
            claim(m, window.magic == MAGIC)
        with m.If(state("CHECK", "LAST OF CHECK")):
            claim(m, crc.crc == 0, ~crc.came)
        with m.If(state("LAST OF CHECK")):
            claim(m, opened["current"] == raw)
        with m.If(state("SUM")):
            claim(m, crc.came, crc.crc == 0, crc.share == folded(raw))
        with m.If(state("COMPARE", "WEIGH", "JUDGE")):
            claim(m, ~crc.came, crc.crc == folded(raw))
        with m.If(state("COMPARE")):
            claim(m, (opened["acceptable"] & (folded(raw) == RESIDUE)) == is_header(raw))
        with m.If(state("WEIGH")):
            claim(m, opened["is_header"] == is_header(raw))
        with m.If(state("JUDGE")):
            told = (window.type == Type.MESSAGE) | (window.type == Type.ACK)
            claim(
                m,
                opened["nothing_found"] == ~is_header(raw),
                opened["sync_found"] == (is_header(raw) & (window.type == Type.SYNC)),
                opened["message_found"] == message,
                opened["told_found"] == (is_header(raw) & told),
                opened["room"] == room_then,
            )
            claim(m, opened["is_wanted"] == (window.sequence == dut.wanted))
            claim(m, ~room_then | (words <= free))
        with m.If(state("COMPARE", "WEIGH", "JUDGE")):
            for name in ("message", "ack", "sync"):
                claim(m, opened[f"is_{name}"] == (window.type == Type[name.upper()]))
        with m.If(state(*body)):
            claim(
                m,
                message,
                opened["intact"] | state("VERIFY"),
                ~room_then | (words <= free),
                opened["store"] == (room_then & (window.sequence == dut.wanted)),
            )
            with m.If(opened["store"]):
                claim(m, count + opened["stored"] == seen)
        with m.If(state("PAYLOAD", "TRAILER")):
            claim(
                m,
                raw == Array(came)[seen],
                opened["words_left"] <= words,
                crc.all_that_came()
                == Mux(seen == 0, 0, Mux(seen == 1, folded(came[0]), folded(came[0]) ^ folded(came[1]))),
            )
            claim(m, ~opened["payload"] | ((seen != 0) & (opened["current"] == came[0])))
            claim(
                m,
                opened["last_word"] == (opened["words_left"] == 1),
                opened["stored"] == (opened["payload"] & opened["store"]),
            )
            claim(m, ~opened["stored"] | (opened["ends"] == (window.last & (seen == words))))
            for n in range(FRAME_WORDS):
                with m.If(opened["store"] & (count > n)):
                    claim(m, kept[n] == Cat(Array(came)[(seen - 1 - n)[:2]], window.last & (words == n + 1)))
        with m.If(state("PAYLOAD")):
            claim(m, opened["words_left"] != 0, ~opened["stored_all"])
        with m.If(state("TRAILER")):
            claim(m, opened["words_left"] == 0)
        with m.If(state("LAST OF TRAILER", "COMPARE TRAILER", "VERIFY") | (state("END") & whole)):
            claim(m, raw == header.as_value(), message, none_stored, opened["words_left"] == 0)
            claim(
                m,
                crc.all_that_came() == payload_sum,
                ~crc.valid,
                opened["store"] == (room_then & (window.sequence == dut.wanted)),
                ~room_then | (words <= free),
            )
            for n in range(FRAME_WORDS):
                with m.If(opened["store"] & (words > n)):
                    claim(
                        m, count == words, kept[n] == Cat(Array(came)[(words - n)[:2]], window.last & (words == n + 1))
                    )
        with m.If(state("LAST OF TRAILER")):
            claim(m, opened["current"] == trailer)
        with m.If(state("COMPARE TRAILER", "VERIFY")):
            claim(m, ~crc.came)
        with m.If(state("COMPARE TRAILER")):
            claim(m, opened["of_crc"] == trailer[:32], opened["same"].all() == (trailer[32:] == raw[:96]))
        with m.If(state("VERIFY")):
            claim(
                m, opened["crc_same"] == (trailer[:32] == payload_sum), opened["intact"] == (trailer[32:] == raw[:96])
            )
        with m.If(state("END")):
            claim(m, opened["intact"] == (whole & intact), ~opened["payload"], ~opened["stored"])
        return m


def copy(old: str = "class FrameReceive(", new: str = "class FrameReceive(") -> Any:
    return broken(frame_receive, old, new)


@pytest.mark.formal
def test_frame_receive(tmp_path):
    prove(FrameReceiveProof(copy()), tmp_path, depth=2)


BREAKS = [
    ("acceptable & (crc.crc == RESIDUE)", "acceptable", 2),
    ("(window.words <= self.frame_words)", "(window.words <= self.frame_words + 1)", 2),
    ("window.last | (window.missing == 0)", "1", 2),
    ("is_wanted & room", "is_wanted", 1),
    ("is_wanted & room", "room", 1),
    ("(compared & ~same.all())", "0", 1),
    ("| ~crc_compared", "| 1", 1),
    ("ends.eq(window.last & final)", "ends.eq(window.last)", 2),
    ("last_word.eq(window.words == 1)", "last_word.eq(1)", 2),
    ("is_header & (is_message | is_ack)", "is_header", 2),
]
"""What is replaced by what, and the words of room that it takes to see it."""


@pytest.mark.broken
@pytest.mark.parametrize(("old", "new", "room"), BREAKS)
def test_the_proof_fails_on_a_broken_receiver(old, new, room, tmp_path):
    with pytest.raises(Refuted):
        prove(FrameReceiveProof(copy(old, new), refute=room), tmp_path, depth=18)
