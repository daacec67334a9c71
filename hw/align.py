"""16-byte beats, blocks at any byte, to 16-byte words that start where a block starts."""

from amaranth.hdl import Array, Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.formats import q6_k as fmt
from hw.formats.params import LINK_BYTES
from hw.layouts import BLOCK_WORDS, WIDE_BEAT, WORD, WORD_BYTES

TAIL = fmt.BLOCK_BYTES % WORD_BYTES
OFFSETS = WORD_BYTES // TAIL


class Align(wiring.Component):
    """Cut a run of whole 210-byte blocks into 13 words each; the last word of a block carries ``d`` beside it.

    210 = 13 * 16 + 2, so each block starts two bytes later within a beat than the block before. A word is cut from the
    beat that arrives and the one before it; every beat gives one word, but for the first of a run and one in every
    eight blocks (105 beats), which only fill the window. Eight blocks thus take 105 cycles, 13.125 each.

    A run starts with the first byte of a beat. Where its ``last`` beat does not end, up to less than one link beat of
    padding, at the end of a block, the final word is marked ``error``.

    Parameters
    ----------
    link_bytes
        Bytes of a beat on the link; only the check of a run's length needs it.

    Members
    -------
    i : stream of ``WIDE_BEAT``
    o : stream of ``WORD``
    """

    LATENCY = 2
    """Cycles from a beat that gives a word to that word."""
    BEATS_PER_8_BLOCKS = 8 * fmt.BLOCK_BYTES // WORD_BYTES

    i: stream.Interface
    o: stream.Interface

    def __init__(self, link_bytes: int = WORD_BYTES) -> None:
        if link_bytes not in LINK_BYTES:
            raise ValueError(f"link_bytes must be one of {LINK_BYTES}, not {link_bytes!r}")
        self.link_bytes = link_bytes
        super().__init__({"i": In(stream.Signature(WIDE_BEAT)), "o": Out(stream.Signature(WORD))})

    def elaborate(self, platform) -> Module:
        m = Module()
        beat = self.i.p
        step = Signal()  # low only while a finished word waits
        m.d.comb += [step.eq(self.o.ready | ~self.o.valid), self.i.ready.eq(step)]

        # Where the next word starts within the beat before: offset * TAIL bytes.
        fill = Signal(init=1)  # there is no beat before, or nothing is left of it
        offset = Signal(range(OFFSETS))
        index = Signal(range(BLOCK_WORDS))
        before = Signal(8 * WORD_BYTES, reset_less=True)

        block_end = Signal()
        run_ok = Signal()
        padding = Signal(range(WORD_BYTES))  # bytes of the beat that lie behind the block's end
        m.d.comb += [
            block_end.eq(~fill & (index == BLOCK_WORDS - 1)),
            padding.eq(WORD_BYTES - TAIL - TAIL * offset),
            run_ok.eq(block_end & (padding // self.link_bytes == beat.missing)),
        ]
        with m.If(self.i.valid & step):
            m.d.sync += before.eq(beat.data)
            with m.If(fill):
                m.d.sync += [fill.eq(0), offset.eq(0)]
            with m.Elif(block_end):
                m.d.sync += [index.eq(0), offset.eq(offset + 1), fill.eq(offset == OFFSETS - 1)]
            with m.Else():
                m.d.sync += index.eq(index + 1)
            with m.If(beat.last):
                m.d.sync += [fill.eq(1), index.eq(0)]

        # The 8-to-1 choice of bytes in two stages, so that neither is deep.
        half = Signal.like(offset[:-1])
        s1 = Signal(WORD)
        s1_valid = Signal()
        s1_window = Signal(8 * (WORD_BYTES + TAIL * OFFSETS // 2), reset_less=True)
        window = Cat(before, beat.data.as_value())
        with m.If(step):
            m.d.sync += [
                # A run that ends before its first word still tells its error.
                s1_valid.eq(self.i.valid & (~fill | beat.last)),
                s1_window.eq(Mux(offset[-1], window[4 * WORD_BYTES :], window)),
                half.eq(offset[:-1]),
                s1.index.eq(index),
                s1.last.eq(beat.last),
                s1.error.eq(beat.last & ~run_ok),
                self.o.valid.eq(s1_valid),
                Cat(self.o.p.data, self.o.p.d).eq(
                    Array(s1_window[8 * TAIL * shift :][: 8 * (WORD_BYTES + TAIL)] for shift in range(OFFSETS // 2))[
                        half
                    ]
                ),
                self.o.p.index.eq(s1.index),
                self.o.p.last.eq(s1.last),
                self.o.p.error.eq(s1.error),
            ]
        return m
