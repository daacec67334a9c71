"""Whatever is to be read is cut into bursts that together are it, and none of which crosses a boundary of 4 KiB."""

import pytest
from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.formats.messages import LENGTH_BITS
from hw.layouts import MEMORY_WORD_BITS, memory_read
from hw.link import axi4

from .prove import Opened, Refuted, assume, broken, claim, never_reset, prove, waiting_payload_holds

MEMORY_BITS = 20
PAGE_WORDS = 256


class BurstsProof(wiring.Component):
    """Read after read, any within the memory; a reference tells which word comes next and how many are left."""

    i: stream.Interface
    o: stream.Interface

    def __init__(self, source, burst_beats: int) -> None:
        self.source, self.burst_beats = source, burst_beats
        super().__init__(
            {
                "i": In(stream.Signature(memory_read(MEMORY_BITS))),
                "o": Out(stream.Signature(axi4.burst(MEMORY_BITS, burst_beats))),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        dut = self.source.Bursts(MEMORY_BITS, self.burst_beats)
        m.submodules.dut = opened = Opened(dut)
        wiring.connect(m, wiring.flipped(self.i), dut.i)
        wiring.connect(m, dut.o, wiring.flipped(self.o))
        never_reset(m)
        waiting_payload_holds(m, dut.o)
        first = self.i.p.address[MEMORY_WORD_BITS:]
        length = self.i.p.length[MEMORY_WORD_BITS:]
        end = 1 << (MEMORY_BITS - MEMORY_WORD_BITS)
        assume(m, ~self.i.valid | ((length != 0) & (first + length <= end)))

        word = Signal(MEMORY_BITS - MEMORY_WORD_BITS + 1)
        left = Signal(LENGTH_BITS - MEMORY_WORD_BITS)
        burst = dut.o.p
        beats = burst.more + 1
        with m.If(dut.i.valid & dut.i.ready):
            claim(m, left == 0)
            m.d.sync += [word.eq(first), left.eq(length)]
        with m.If(dut.o.valid):
            claim(
                m,
                burst.word == word,
                beats <= left,
                beats <= self.burst_beats,
                burst.last == (beats == left),
                burst.last | (((burst.word + beats) % self.burst_beats) == 0),
                burst.word % PAGE_WORDS + beats <= PAGE_WORDS,
            )
            with m.If(dut.o.ready):
                m.d.sync += [word.eq(word + beats), left.eq(left - beats)]

        # What induction needs to know of a state.
        fsm = opened.module._generated["fsm"]  # Amaranth has no public way to it; the release is pinned
        taking = fsm.state == fsm.encoding["TAKE"]
        measured = fsm.state == fsm.encoding["GIVE"]
        within = word % self.burst_beats
        room = self.burst_beats - within
        claim(m, (left == 0) == taking, word + left <= end, fsm.state < len(fsm.encoding))
        with m.If(~taking):
            claim(m, opened["word"] == word, opened["left"] == left)
        with m.If(measured):
            claim(m, beats == Mux(left < room, left, room), opened["last"] == (left <= room))
        return m


@pytest.mark.formal
@pytest.mark.parametrize("burst_beats", [2, 64, 256])
def test_bursts(burst_beats, tmp_path):
    prove(BurstsProof(axi4, burst_beats), tmp_path, depth=2)


BREAKS = [
    ("last.eq(left <= to_boundary + 1)", "last.eq(left <= to_boundary)"),
    ("Mux(left <= to_boundary, left - 1, to_boundary)", "Mux(left <= to_boundary, left, to_boundary)"),
    ("to_boundary.eq(~word[:within])", "to_boundary.eq(-1)"),
    ("word.eq(word + more + 1)", "word.eq(word + more)"),
    ("left.eq(left - more - 1)", "left.eq(left - more)"),
]


@pytest.mark.broken
@pytest.mark.parametrize(("old", "new"), BREAKS)
def test_the_proof_fails_on_broken_bursts(old, new, tmp_path):
    with pytest.raises(Refuted):
        prove(BurstsProof(broken(axi4, old, new), 64), tmp_path, depth=10)
