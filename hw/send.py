"""Messages to the host."""

from amaranth.hdl import Cat, Const, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.combine import Combine
from hw.formats.arithmetic import ACCUMULATOR_BITS
from hw.formats.messages import VERSION, Counter, Message
from hw.formats.params import Params
from hw.layouts import WORD_BYTES, bits_for, link_beat
from hw.primitives.queue import Queue

VALUES = WORD_BYTES * 8 // ACCUMULATOR_BITS
"""Outputs and counters in a word."""


class Send(wiring.Component):
    """Say ``HELLO`` once, a fatal error once; after a layer its outputs or its error, and ``DONE``; counters if asked.

    Members
    -------
    o : stream of :func:`hw.layouts.link_beat`
    fatal : In, error bits; not zero: there will be no result
    layer_done : In, high until ``done``; layer_error : In, error bits of its sums
    done : Out, high for a cycle
    batch, width : In, how many outputs
    y_token, y_row : Out; y : In, ``Combine.LATENCY`` cycles later
    read_counters : In, high for a cycle
    counter : Out; value : In, the counter, a cycle later
    """

    o: stream.Interface
    fatal: Signal
    layer_done: Signal
    layer_error: Signal
    done: Signal
    batch: Signal
    width: Signal
    y_token: Signal
    y_row: Signal
    y: Signal
    read_counters: Signal
    counter: Signal
    value: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        super().__init__(
            {
                "o": Out(stream.Signature(link_beat(params.link_bytes))),
                "fatal": In(8),
                "layer_done": In(1),
                "layer_error": In(8),
                "done": Out(1),
                "batch": In(bits_for(params.max_batch + 1)),
                "width": In(bits_for(params.max_width + 1)),
                "y_token": Out(bits_for(params.max_batch)),
                "y_row": Out(bits_for(params.max_width)),
                "y": In(ACCUMULATOR_BITS),
                "read_counters": In(1),
                "counter": Out(range(len(Counter))),
                "value": In(ACCUMULATOR_BITS),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params

        # A word waits here while it leaves, a beat at a time.
        beats = WORD_BYTES // params.link_bytes
        word = Signal(8 * WORD_BYTES)
        word_last = Signal()
        left = Signal(range(beats + 1))
        free = Signal()
        m.d.comb += [
            free.eq((left == 0) | ((left == 1) & self.o.ready)),
            self.o.valid.eq(left != 0),
            self.o.p.data.eq(word[: 8 * params.link_bytes]),
            self.o.p.last.eq(word_last & (left == 1)),
        ]
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += [left.eq(left - 1), word.eq(word >> 8 * params.link_bytes)]

        def put(value, last) -> None:
            """Hand a word over; only where ``free`` is high."""
            m.d.sync += [word.eq(value), word_last.eq(last), left.eq(beats)]

        def header(kind: Message, *fields) -> Cat:
            return Cat(Const(kind, 8), *fields)

        # The outputs are read ahead, as many as there are places for.
        m.submodules.values = values = Queue(ACCUMULATOR_BITS, 8)
        reading = Signal()
        row = Signal.like(self.y_row)
        last_row = Signal()
        places = Signal(range(values.depth + 1), init=values.depth)
        read = Signal()
        m.d.comb += [
            read.eq(reading & (places != 0)),
            self.y_row.eq(row),
            values.i.payload.eq(self.y),
        ]
        arrived = read
        for stage in range(Combine.LATENCY):
            following = Signal(name=f"read_{stage}")
            m.d.sync += following.eq(arrived)
            arrived = following
        popped = values.o.valid & values.o.ready
        before_last = Signal.like(row)
        m.d.comb += values.i.valid.eq(arrived)
        m.d.sync += [places.eq(places - read + popped), before_last.eq(self.width - 2)]
        with m.If(read):
            m.d.sync += [row.eq(row + 1), last_row.eq(row == before_last)]
            with m.If(last_row):
                m.d.sync += [reading.eq(0), row.eq(0), last_row.eq(0)]

        greeted = Signal()
        told = Signal()
        counters_wanted = Signal()
        low = Signal(ACCUMULATOR_BITS)
        words_left = Signal(range(max(params.max_width, len(Counter)) // VALUES + 1))
        final = Signal()
        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += self.y_token.eq(0)
                with m.If(free):
                    with m.If(~greeted):
                        said = (VERSION, params.link_bytes, params.tokens, params.max_batch)
                        blocks = (params.max_columns, params.max_hidden_columns)
                        numbers = [Const(number, 8) for number in (*said, *blocks)]
                        put(header(Message.HELLO, *numbers, Const(params.max_experts, 16)), 1)
                        m.d.sync += greeted.eq(1)
                    with m.Elif((self.fatal != 0) & ~told):
                        put(header(Message.ERROR, self.fatal), 1)
                        m.d.sync += told.eq(1)
                    with m.Elif(self.layer_done & (self.layer_error != 0)):
                        put(header(Message.ERROR, self.layer_error), 1)
                        m.next = "DONE"
                    with m.Elif(self.layer_done):
                        m.next = "OUTPUT"
                    with m.Elif(counters_wanted):
                        put(header(Message.COUNTERS, Const(len(Counter), 8)), 0)
                        m.d.sync += [counters_wanted.eq(0), self.counter.eq(0), words_left.eq(len(Counter) // VALUES)]
                        m.next = "COUNTER LOW"
            with m.State("OUTPUT"):
                with m.If(free):
                    put(header(Message.OUTPUT, self.y_token | Const(0, 8), self.width), 0)
                    m.d.sync += [reading.eq(1), words_left.eq(self.width >> (VALUES.bit_length() - 1))]
                    m.next = "LOW"
            with m.State("LOW"):
                m.d.comb += values.o.ready.eq(1)
                with m.If(values.o.valid):
                    m.d.sync += [low.eq(values.o.payload), final.eq(words_left == 1)]
                    m.next = "HIGH"
            with m.State("HIGH"):
                m.d.comb += values.o.ready.eq(free)
                with m.If(values.o.valid & free):
                    put(Cat(low, values.o.payload), final)
                    m.d.sync += words_left.eq(words_left - 1)
                    m.next = "LOW"
                    with m.If(final):
                        m.d.sync += self.y_token.eq(self.y_token + 1)
                        m.next = "OUTPUT"
                        with m.If(self.y_token + 1 == self.batch):
                            m.next = "DONE"
            with m.State("DONE"):
                with m.If(free):
                    put(header(Message.DONE), 1)
                    m.d.comb += self.done.eq(1)
                    m.next = "IDLE"
            with m.State("COUNTER LOW"):
                m.d.sync += self.counter.eq(self.counter + 1)
                m.next = "COUNTER WAIT"
            with m.State("COUNTER WAIT"):  # the value of the counter named before is here
                m.d.sync += [low.eq(self.value), final.eq(words_left == 1)]
                m.next = "COUNTER HIGH"
            with m.State("COUNTER HIGH"):
                with m.If(free):
                    put(Cat(low, self.value), final)
                    m.d.sync += [self.counter.eq(self.counter + 1), words_left.eq(words_left - 1)]
                    m.next = "COUNTER LOW"
                    with m.If(final):
                        m.next = "IDLE"
        with m.If(self.read_counters):
            m.d.sync += counters_wanted.eq(1)
        return m


class Cut(wiring.Component):
    """Pass beats on; when what sends them is reset, end the message that it was in with a beat marked ``last``.

    A beat that waits at ``o`` goes through a reset unharmed. ``LATENCY`` is a cycle.

    Members
    -------
    i, o : streams of :func:`hw.layouts.link_beat`
    cut : In, the sender is being reset
    """

    LATENCY = 1

    i: stream.Interface
    o: stream.Interface
    cut: Signal

    def __init__(self, link_bytes: int) -> None:
        beat = link_beat(link_bytes)
        super().__init__({"i": In(stream.Signature(beat)), "o": Out(stream.Signature(beat)), "cut": In(1)})

    def elaborate(self, platform) -> Module:
        m = Module()
        inside = Signal()  # a message has begun and not ended
        cutting = Signal()
        free = Signal()
        m.d.comb += [
            free.eq(self.o.ready | ~self.o.valid),
            self.i.ready.eq(free & ~cutting & ~self.cut),
        ]
        with m.If(self.cut):
            m.d.sync += cutting.eq(inside)
        with m.If(free):
            m.d.sync += [
                self.o.valid.eq((self.i.valid & self.i.ready) | (cutting & ~self.cut)),
                self.o.p.data.eq(self.i.p.data),
                self.o.p.last.eq(self.i.p.last | cutting),
            ]
            with m.If(cutting & ~self.cut):
                m.d.sync += [cutting.eq(0), inside.eq(0)]
            with m.Elif(self.i.valid & self.i.ready):
                m.d.sync += inside.eq(~self.i.p.last)
        return m
