"""Messages to the host."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.combine import Combine
from hw.delay import delay
from hw.formats.arithmetic import ACCUMULATOR_BITS
from hw.formats.messages import VERSION, Counter, Message
from hw.formats.params import Params
from hw.layouts import WORD_BYTES, bits_for, link_beat
from hw.primitives.queue import CreditQueue

VALUES = WORD_BYTES * 8 // ACCUMULATOR_BITS
"""Outputs and counters in a word."""


class Send(wiring.Component):
    """Say ``HELLO`` once, a fatal error once; after a layer its outputs or its error, and ``DONE``; counters if asked.

    Parameters
    ----------
    params
        See :class:`hw.formats.params.Params`.
    design_id
        For ``HELLO``: 32 bits.

    Members
    -------
    o : stream of :func:`hw.layouts.link_beat`
    fatal : In, error bits; halted : In, there are some: there will be no result
    layer_done : In, high until ``done``; layer_error : In, error bits of its sums, from the cycle before that on
    done : Out, high for a cycle
    batch, width : In, how many outputs
    y_token, y_row : Out; y : In, ``Combine.LATENCY`` cycles later
    read_counters : In, high for a cycle
    counter : Out; value : In, the counter, ``Counters.LATENCY`` cycles later
    """

    o: stream.Interface
    fatal: Signal
    halted: Signal
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

    def __init__(self, params: Params, design_id: int = 0) -> None:
        self.params, self.design_id = params, design_id
        super().__init__(
            {
                "o": Out(stream.Signature(link_beat(params.link_bytes))),
                "fatal": In(8),
                "halted": In(1),
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

        # A word waits here while it leaves, a beat at a time. It is always made of the same two halves.
        beats = WORD_BYTES // params.link_bytes
        low, high = Signal(ACCUMULATOR_BITS, reset_less=True), Signal(ACCUMULATOR_BITS, reset_less=True)
        head = Signal(8 * WORD_BYTES, reset_less=True)  # or a header; most of it is constant
        beginning = Signal()
        final = Signal()  # the word ends its message
        word = Signal(8 * WORD_BYTES, reset_less=True)
        word_last = Signal()
        left = Signal(range(beats + 1))
        free = Signal()
        put = Signal()
        m.d.comb += [
            free.eq(left == 0),  # a cycle late, so that nothing here waits for the link; words take three to make
            self.o.valid.eq(left != 0),
            self.o.p.data.eq(word[: 8 * params.link_bytes]),
            self.o.p.last.eq(word_last & (left == 1)),
        ]
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += left.eq(left - 1)
            if beats > 1:
                m.d.sync += word.eq(word >> 8 * params.link_bytes)
        with m.If(free):
            m.d.sync += [word.eq(Mux(beginning, head, Cat(low, high))), word_last.eq(final)]
            with m.If(put):
                m.d.sync += left.eq(beats)

        # The outputs are read ahead, as many as there are places for.
        m.submodules.values = values = CreditQueue(ACCUMULATOR_BITS, 8)
        reading = Signal()
        row = Signal.like(self.y_row)
        last_row = Signal()
        places = Signal(range(values.depth + 1), init=values.depth)
        room = Signal()  # there will be a place, even if one is taken meanwhile
        read = Signal()
        m.d.comb += [
            read.eq(reading & room),
            self.y_row.eq(row),
            values.i.payload.eq(self.y),
            values.i.valid.eq(delay(m, read, Combine.LATENCY, control=True)),
        ]
        before_last = Signal.like(row)
        m.d.sync += [
            places.eq(places - read + values.left),
            room.eq(places > 1),
            before_last.eq(delay(m, self.width, 1) - 2),
        ]
        with m.If(read):
            m.d.sync += [row.eq(row + 1), last_row.eq(row == before_last)]
            with m.If(last_row):
                m.d.sync += [reading.eq(0), row.eq(0), last_row.eq(0)]

        kinds = (Message.HELLO, Message.ERROR, Message.OUTPUT, Message.DONE, Message.COUNTERS)
        kind = Signal(range(len(kinds)))
        greeted = Signal()
        told = Signal()
        layer_failed = Signal()
        m.d.sync += layer_failed.eq(self.layer_error != 0)
        failed = Signal()  # the layer's error has been sent instead of its outputs
        counters_wanted = Signal()
        last_token = Signal()
        words_left = Signal(range(max(params.max_width, len(Counter)) // VALUES + 1))
        fields = {
            Message.HELLO: [
                *(Const(n, 8) for n in (VERSION, params.link_bytes, params.tokens, params.max_batch)),
                *(Const(n, 8) for n in (params.max_columns, params.max_hidden_columns)),
                *(Const(n, 16) for n in (params.max_experts, params.frame_bytes // WORD_BYTES)),
                Const(params.memory_bits, 8),
                Const(self.design_id, 32),
            ],
            Message.ERROR: [Mux(failed, self.layer_error, self.fatal)],
            Message.OUTPUT: [self.y_token | Const(0, 8), self.width],
            Message.DONE: [],
            Message.COUNTERS: [Const(len(Counter), 8)],
        }
        # What there is to say, a cycle late, and what of it comes first, two: none of it changes between there and the
        # choice.
        greet, tell_error, tell_layer, tell_counters, asked = (
            Signal(name=name) for name in ("greet", "tell_error", "tell_layer", "tell_counters", "asked")
        )
        first = Signal.like(kind)
        first_fails, first_counts = Signal(), Signal()
        of_layer = Mux(layer_failed, kinds.index(Message.ERROR), kinds.index(Message.OUTPUT))
        m.d.sync += [
            greet.eq(~greeted),
            tell_error.eq(self.halted & ~told),
            tell_layer.eq(self.layer_done & ~told),
            tell_counters.eq(counters_wanted),
            asked.eq(greet | tell_error | tell_layer | tell_counters),
            first_fails.eq(~greet & ~tell_error & tell_layer & layer_failed),
            first_counts.eq(~greet & ~tell_error & ~tell_layer & tell_counters),
            last_token.eq(self.y_token + 1 == self.batch),
            self.done.eq(0),
        ]
        with m.If(greet):
            m.d.sync += first.eq(kinds.index(Message.HELLO))
        with m.Elif(tell_error):
            m.d.sync += first.eq(kinds.index(Message.ERROR))
        with m.Elif(tell_layer):
            m.d.sync += first.eq(of_layer)
        with m.Else():
            m.d.sync += first.eq(kinds.index(Message.COUNTERS))
        with m.Switch(kind):  # which is there a cycle before its header is wanted
            for message, values_of in fields.items():
                with m.Case(kinds.index(message)):
                    m.d.sync += head.eq(Cat(Const(message, 8), *values_of))
        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [self.y_token.eq(0), failed.eq(0)]
                with m.If(asked):
                    m.next = "WEIGH"
            with m.State("WEIGH"):
                m.next = "CHOOSE"
            with m.State("CHOOSE"):
                m.d.sync += [kind.eq(first), failed.eq(first_fails), greeted.eq(1)]
                with m.If(first_counts):
                    m.d.sync += [counters_wanted.eq(0), self.counter.eq(0)]
                m.next = "IDLE"
                with m.If(asked):
                    m.next = "HEADER"
            with m.State("HEADER"):
                m.d.sync += beginning.eq(1)
                m.d.sync += final.eq((kind != kinds.index(Message.OUTPUT)) & (kind != kinds.index(Message.COUNTERS)))
                m.next = "PUT HEADER"
            with m.State("PUT HEADER"):
                m.d.comb += put.eq(1)
                with m.If(free):
                    m.d.sync += beginning.eq(0)
                    m.next = "IDLE"
                    with m.Switch(kind):
                        with m.Case(kinds.index(Message.ERROR)):
                            with m.If(failed):
                                m.d.sync += kind.eq(kinds.index(Message.DONE))
                                m.next = "HEADER"
                            with m.Else():
                                m.d.sync += told.eq(1)
                        with m.Case(kinds.index(Message.OUTPUT)):
                            m.d.sync += [reading.eq(1), words_left.eq(self.width >> (VALUES.bit_length() - 1))]
                            m.next = "LOW"
                        with m.Case(kinds.index(Message.DONE)):
                            m.d.sync += self.done.eq(1)
                            m.next = "SAID"
                        with m.Case(kinds.index(Message.COUNTERS)):
                            m.d.sync += words_left.eq(len(Counter) // VALUES)
                            m.next = "COUNTER NAME"
            with m.State("SAID"):  # the layer is over before anybody looks for the next
                m.next = "IDLE"
            with m.State("LOW"):
                m.d.comb += values.o.ready.eq(1)
                m.d.sync += low.eq(values.o.payload)
                with m.If(values.o.valid):
                    m.next = "HIGH"
            with m.State("HIGH"):
                m.d.comb += values.o.ready.eq(1)
                m.d.sync += [high.eq(values.o.payload), final.eq(words_left == 1)]
                with m.If(values.o.valid):
                    m.next = "PUT"
            with m.State("PUT"):
                m.d.comb += put.eq(1)
                with m.If(free):
                    m.d.sync += words_left.eq(words_left - 1)
                    m.next = "LOW"
                    with m.If(final):
                        m.next = "TOKEN"
            with m.State("TOKEN"):
                m.d.sync += self.y_token.eq(self.y_token + 1)
                with m.If(last_token):
                    m.d.sync += kind.eq(kinds.index(Message.DONE))
                m.next = "HEADER"
            with m.State("COUNTER NAME"):
                m.d.sync += self.counter.eq(self.counter + 1)
                m.next = "COUNTER WAIT"
            with m.State("COUNTER WAIT"):
                m.next = "COUNTER WAIT MORE"
            with m.State("COUNTER WAIT MORE"):
                m.next = "COUNTER LOW"
            with m.State("COUNTER LOW"):  # the value of the counter named first is here, the next comes a cycle later
                m.d.sync += [low.eq(self.value), final.eq(words_left == 1)]
                m.next = "COUNTER HIGH"
            with m.State("COUNTER HIGH"):
                m.d.sync += high.eq(self.value)
                m.next = "PUT COUNTERS"
            with m.State("PUT COUNTERS"):
                m.d.comb += put.eq(1)
                with m.If(free):
                    m.d.sync += [self.counter.eq(self.counter + 1), words_left.eq(words_left - 1)]
                    m.next = "COUNTER NAME"
                    with m.If(final):
                        m.next = "IDLE"
        with m.If(self.read_counters):
            m.d.sync += counters_wanted.eq(1)
        return m


class Cut(wiring.Component):
    """Pass beats on; when what sends them is reset, end the message that it was in with a beat marked ``last``.

    A beat that waits at ``o`` goes through a reset unharmed. A beat is taken when the one before has left, so at most
    every other cycle. ``LATENCY`` is a cycle.

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
        m.d.comb += self.i.ready.eq(~self.o.valid & ~cutting & ~self.cut)
        with m.If(self.cut):
            m.d.sync += cutting.eq(inside)
        with m.If(self.o.valid):
            m.d.sync += self.o.valid.eq(~self.o.ready)
        with m.Else():
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
