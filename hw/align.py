"""16-byte beats, blocks at any byte, to 16-byte words that start where a block starts."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.delay import delay
from hw.formats import q6_k as fmt
from hw.formats.params import LINK_BYTES
from hw.layouts import BLOCK_WORDS, WIDE_BEAT, WORD, WORD_BYTES
from hw.primitives.queue import CreditQueue

TAIL = fmt.BLOCK_BYTES % WORD_BYTES
OFFSETS = WORD_BYTES // TAIL
LEAVING = 16
"""Words on their way out: enough that none lacks until more follow when the decoder, having paused, goes on."""


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

    LATENCY = 6
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
        # A beat is taken only with a place in this queue for its word, counted three cycles late; so none waits.
        m.submodules.leaving = leaving = CreditQueue(WORD, LEAVING)
        wiring.connect(m, wiring.flipped(self.o), leaving.o)
        places = Signal(range(LEAVING + 1), init=LEAVING)
        step = Signal()
        taken = Signal()
        beat = Signal(WIDE_BEAT, reset_less=True)
        m.d.comb += self.i.ready.eq(step)
        m.d.sync += [taken.eq(self.i.valid & step), beat.eq(self.i.p)]

        # Where the next word starts within the beat before: offset * TAIL bytes.
        fill = Signal(init=1)  # there is no beat before, or nothing is left of it
        offset = Signal(range(OFFSETS))
        index = Signal(range(BLOCK_WORDS))
        block_end = Signal()  # the next word is its block's last; never while there is none to come
        before = Signal(8 * WORD_BYTES, reset_less=True)

        run_ok = Signal()
        padding = Signal(range(WORD_BYTES))  # bytes of the beat that lie behind the block's end
        m.d.comb += [
            padding.eq(WORD_BYTES - TAIL - TAIL * offset),
            run_ok.eq(block_end & (padding // self.link_bytes == beat.missing)),
        ]
        with m.If(taken):
            m.d.sync += before.eq(beat.data)
            with m.If(fill):
                m.d.sync += [fill.eq(0), offset.eq(0)]
            with m.Elif(block_end):
                m.d.sync += [index.eq(0), block_end.eq(0), offset.eq(offset + 1), fill.eq(offset == OFFSETS - 1)]
            with m.Else():
                m.d.sync += [index.eq(index + 1), block_end.eq(index == BLOCK_WORDS - 2)]
            with m.If(beat.last):
                m.d.sync += [fill.eq(1), index.eq(0), block_end.eq(0)]

        # The 8-to-1 choice of bytes in three stages, so that none is deep.
        gives, gave = Signal(), Signal()
        # A run that ends before its first word still tells its error.
        m.d.comb += gives.eq(taken & (~fill | beat.last))
        m.d.sync += [
            step.eq(places >= 4),
            gave.eq(gives),
            places.eq(places - gave + leaving.left),
        ]
        window = Cat(before, beat.data.as_value())
        for halves in reversed(range(len(offset))):
            shift = TAIL << halves
            size = 8 * (WORD_BYTES + shift)
            chosen = Signal(size, name=f"window_{halves}", reset_less=True)
            m.d.sync += chosen.eq(Mux(delay(m, offset, len(offset) - 1 - halves)[halves], window[8 * shift :], window))
            window = chosen
        late = len(offset)
        m.d.comb += [
            leaving.i.valid.eq(delay(m, gives, late, control=True)),
            Cat(leaving.i.p.data, leaving.i.p.d).eq(window),
            leaving.i.p.index.eq(delay(m, index, late)),
            leaving.i.p.last.eq(delay(m, beat.last, late)),
            leaving.i.p.error.eq(delay(m, beat.last & ~run_ok, late)),
        ]
        return m
