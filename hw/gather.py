"""Link beats of 1, 4, 8 or 16 bytes to 16-byte words."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.formats.params import LINK_BYTES
from hw.layouts import WIDE_BEAT, WORD_BYTES, link_beat


class Gather(wiring.Component):
    """Collect ``16 / link_bytes`` beats into one word, first byte lowest.

    The beat marked ``last`` completes its word early: the bytes that lack are zero and ``missing`` counts the absent
    beats. Takes a beat every cycle; ``latency`` cycles from a word's final beat to the word (0 for 16-byte beats,
    which pass straight through).

    Parameters
    ----------
    link_bytes
        Bytes of a beat.
    apart
        No beat is taken while a word waits, so that ``i.ready`` need not wait for ``o.ready``: a cycle more a word.

    Members
    -------
    i : stream of :func:`hw.layouts.link_beat`
    o : stream of ``WIDE_BEAT``
    """

    i: stream.Interface
    o: stream.Interface

    def __init__(self, link_bytes: int, *, apart: bool = False) -> None:
        if link_bytes not in LINK_BYTES:
            raise ValueError(f"link_bytes must be one of {LINK_BYTES}, not {link_bytes!r}")
        self.link_bytes, self.apart = link_bytes, apart
        self.latency = 0 if link_bytes == WORD_BYTES and not apart else 1
        super().__init__(
            {
                "i": In(stream.Signature(link_beat(link_bytes))),
                "o": Out(stream.Signature(WIDE_BEAT)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        beats = WORD_BYTES // self.link_bytes
        if self.latency == 0:
            m.d.comb += [
                self.o.p.data.eq(self.i.p.data),
                self.o.p.last.eq(self.i.p.last),
                self.o.valid.eq(self.i.valid),
                self.i.ready.eq(self.o.ready),
            ]
            return m

        count = Signal(range(beats))
        place = Signal(beats, init=1)  # the same, one bit for each beat
        done = Signal()
        m.d.comb += [
            done.eq(self.i.p.last | (count == beats - 1)),
            self.i.ready.eq(~self.o.valid if self.apart else self.o.ready | ~self.o.valid),
        ]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        taken = self.i.ready & self.i.valid
        with m.If(taken):
            m.d.sync += [
                self.o.valid.eq(done),
                count.eq(Mux(done, 0, count + 1)),
                place.eq(Mux(done, 1, place << 1)),
            ]
        # With no word waiting, what is written for a beat that does not come is written again for the one that does.
        with m.If(self.i.ready if self.apart else taken):
            m.d.sync += [self.o.p.last.eq(self.i.p.last), self.o.p.missing.eq(beats - 1 - count)]
            for beat in range(beats):
                part = slice(beat * self.link_bytes * 8, (beat + 1) * self.link_bytes * 8)
                target = self.o.p.data.as_value()[part]
                with m.If(place[beat]):
                    m.d.sync += target.eq(self.i.p.data)
                with m.Elif(place[0]):
                    m.d.sync += target.eq(0)
        return m
