"""The aligner accounts for every byte, has a place for every word, and its words hold while they wait."""

from itertools import pairwise

import pytest
from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw import align
from hw.layouts import WIDE_BEAT, WORD

from .prove import (
    Opened,
    Refuted,
    assume,
    broken,
    claim,
    credit_queue_is_sound,
    never_reset,
    prove,
    waiting_payload_holds,
)

BLOCK_BYTES, WORD_BYTES, WORDS = 210, 16, 13


class AlignProof(wiring.Component):
    """Bytes taken = bytes of whole blocks + words of this block + bytes kept, in every cycle of a run."""

    i: stream.Interface
    o: stream.Interface

    def __init__(self, source, link_bytes: int) -> None:
        self.source, self.link_bytes = source, link_bytes
        super().__init__({"i": In(stream.Signature(WIDE_BEAT)), "o": Out(stream.Signature(WORD))})

    def elaborate(self, platform) -> Module:
        m = Module()
        dut = self.source.Align(self.link_bytes)
        m.submodules.dut = opened = Opened(dut)
        wiring.connect(m, wiring.flipped(self.i), dut.i)
        wiring.connect(m, dut.o, wiring.flipped(self.o))
        never_reset(m)
        queue = opened.module.submodules.leaving
        held = credit_queue_is_sound(m, queue, opened.open("leaving"))
        waiting_payload_holds(m, dut.o)
        fill, offset, index, block_end = (opened[name] for name in ("fill", "offset", "index", "block_end"))

        taken = opened["taken"]  # a beat, in the cycle before
        beat = data.View(WIDE_BEAT, opened["beat"])
        beats = Signal(16)  # of this run; counts and equations are all modulo 2**16
        blocks = Signal(16)
        kept = Mux(fill, 0, WORD_BYTES - 2 * offset)
        with m.If(taken):
            m.d.sync += [beats.eq(beats + 1), blocks.eq(blocks + block_end)]
            with m.If(beat.last):
                m.d.sync += [beats.eq(0), blocks.eq(0)]
        claim(
            m,
            (WORD_BYTES * beats - BLOCK_BYTES * blocks - WORD_BYTES * index - kept)[:16] == 0,
            index < WORDS,
            ~fill | (index == 0),
            block_end == (~fill & (index == WORDS - 1)),
        )

        # A run is in order if its final beat ends a block and what follows in that beat is less than one link beat.
        assume(m, beat.missing < WORD_BYTES // self.link_bytes)
        real_bytes = WORD_BYTES * (beats + 1) - self.link_bytes * beat.missing
        padding = Signal(16)
        m.d.comb += padding.eq(real_bytes - BLOCK_BYTES * (blocks + block_end))
        in_order = block_end & (padding < self.link_bytes)
        # A word comes out of the pipeline for each beat that gives one, and is marked if the run is not in order.
        came = [Signal(name=f"came_{n}") for n in range(4)]
        wrong = [Signal(name=f"wrong_{n}") for n in range(4)]
        m.d.comb += [came[0].eq(taken & (~fill | beat.last)), wrong[0].eq(beat.last & ~in_order)]
        for line in (came, wrong):
            m.d.sync += [later.eq(sooner) for sooner, later in pairwise(line)]
        claim(m, queue.i.valid == came[3], ~came[3] | (queue.i.p.error == wrong[3]))
        # There is always a place for it: those that are free, and those of words on their way.
        places, gave = opened["places"], opened["gave"]
        claim(
            m,
            gave == came[1],
            places == queue.depth - held - came[2] - came[3] - queue.left,
            places >= gave + taken + opened["step"],
            ~queue.i.valid | (held < queue.depth),
        )
        return m


@pytest.mark.formal
@pytest.mark.parametrize("link_bytes", [1, 4, 8, 16])
def test_align(link_bytes, tmp_path):
    prove(AlignProof(align, link_bytes), tmp_path, depth=5)


BREAKS = [
    ("fill.eq(offset == OFFSETS - 1)", "fill.eq(0)"),
    ("offset.eq(offset + 1)", "offset.eq(offset)"),
    ("step.eq(places >= 4)", "step.eq(places >= 3)"),
    ("places.eq(places - gave + leaving.left)", "places.eq(places - gave + 1)"),
    ("block_end & (padding // self.link_bytes == beat.missing)", "block_end"),
]


@pytest.mark.broken
@pytest.mark.parametrize(("old", "new"), BREAKS)
def test_the_proof_fails_on_a_broken_aligner(old, new, tmp_path):
    with pytest.raises((Refuted, RuntimeError)):
        prove(AlignProof(broken(align, old, new), 4), tmp_path, depth=5)
