"""The memory in which a frame waits until its trailer has been seen."""

from amaranth.hdl import Module, Mux, Signal, ValueLike
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.delay import delay
from hw.layouts import WORD_BYTES, bits_for, link_beat
from hw.primitives.memory import BlockMemory
from hw.primitives.queue import Queue


def chase(m: Module, moved: ValueLike, limit: Signal) -> tuple[Signal, Signal]:
    """A pointer that goes on with ``moved``, and, in a register, whether it is away from ``limit``.

    ``limit`` runs ahead of it. That it has gone on is seen a cycle late; that the pointer has, at once.
    """
    place, after = Signal.like(limit, name="place"), Signal.like(limit, name="after", init=1)
    free = Signal()
    m.d.sync += free.eq(Mux(moved, after != limit, place != limit))
    with m.If(moved):
        m.d.sync += [place.eq(after), after.eq(after + 1)]
    return place, free


class Ring(wiring.Component):
    """Hold the beats of frames; give those that were committed, a beat a cycle, and forget those that were dropped.

    A word is free again when its last beat, or the beat marked ``last``, has left the memory.

    Parameters
    ----------
    width
        Bytes of a beat.
    words
        Words of 16 bytes that it holds: a power of two.

    Members
    -------
    beat : In, :func:`hw.layouts.link_beat`; put : In, it is to be stored
    drop : In, the beats since the last commit are forgotten; not together with ``put``
    commit : In, they may leave; not within two cycles of ``put``, nor in the cycle before ``put`` or ``drop``
    count : In, words that they take, with ``commit``
    free : Out, words; freed : Out, high for a cycle with each word that leaves
    o : stream of :func:`hw.layouts.link_beat`
    """

    QUEUE_DEPTH = 16

    beat: data.View
    put: Signal
    drop: Signal
    commit: Signal
    count: Signal
    free: Signal
    freed: Signal
    o: stream.Interface

    def __init__(self, width: int, words: int) -> None:
        self.width, self.words = width, words
        beat = link_beat(width)
        super().__init__(
            {
                "beat": In(beat),
                "put": In(1),
                "drop": In(1),
                "commit": In(1),
                "count": In(bits_for(words + 1)),
                "free": Out(bits_for(words + 1)),
                "freed": Out(1),
                "o": Out(stream.Signature(beat)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        beats = WORD_BYTES // self.width
        beat = link_beat(self.width)
        m.submodules.memory = memory = BlockMemory(beat.size, self.words * beats)
        m.submodules.queue = queue = Queue(beat, self.QUEUE_DEPTH)
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        bits = len(memory.w_addr)
        # One bit more than an address, so that full differs from empty.
        written, committed = Signal(bits + 1), Signal(bits + 1)
        m.d.comb += [memory.w_addr.eq(written), memory.w_data.eq(self.beat), memory.w_en.eq(self.put)]
        with m.If(self.put):
            m.d.sync += written.eq(written + 1)
        with m.If(self.drop):
            m.d.sync += written.eq(committed)
        commit = Signal()
        m.d.sync += commit.eq(self.commit)
        with m.If(commit):
            m.d.sync += committed.eq(written)

        # Read ahead as far as the queue has places.
        read = Signal()
        place, some = chase(m, read, committed)
        places = Signal(range(queue.depth + 1), init=queue.depth)
        room = Signal()  # there will be a place, even if one is taken meanwhile
        popped = Signal()  # a cycle late, so that reading need not wait for the reader
        m.d.comb += [
            read.eq(some & room),
            memory.r_addr.eq(place),
            queue.i.payload.eq(memory.r_data),
            queue.i.valid.eq(delay(m, read, BlockMemory.LATENCY, control=True)),
        ]
        m.d.sync += [
            room.eq(places > 1),
            popped.eq(queue.o.valid & queue.o.ready),
            places.eq(places - read + popped),
        ]

        part = Signal(range(beats))
        whole = queue.i.p.last | (part == beats - 1)
        with m.If(queue.i.valid):
            m.d.sync += part.eq(Mux(whole, 0, part + 1))
        free = Signal.like(self.free, init=self.words)
        m.d.comb += self.free.eq(free)
        m.d.sync += [
            self.freed.eq(queue.i.valid & whole),
            # Not a cycle late: what is free is told beside which frame came last.
            free.eq(free + self.freed - Mux(self.commit, self.count, 0)),
        ]
        return m
