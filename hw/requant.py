"""Elements of ``h`` to int16 blocks."""

from functools import partial

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.delay import delay
from hw.formats import q6_k as fmt
from hw.formats.arithmetic import ACTIVATION_BITS, ACTIVATION_MAX, EXPONENT_BITS, EXPONENT_MIN
from hw.formats.params import Params
from hw.formats.sigmoid import SIGNIFICANT_BITS
from hw.layouts import LOAD_VALUES, SCALED, activation_word, bits_for, hidden_place
from hw.primitives.memory import BlockMemory
from hw.swiglu import swiglu_output

EXPONENT_STEP = SIGNIFICANT_BITS - ACTIVATION_BITS + 1
"""From the exponent of 18 significant bits to that of 15."""
LARGEST = ACTIVATION_MAX << EXPONENT_STEP
"""Above this magnitude, 15 bits take one exponent more."""
MOST_RIGHT = SIGNIFICANT_BITS + 1
"""Shifted so far, any magnitude rounds to zero."""


class Requant(wiring.Component):
    """Watch the elements of each 256-block go by, then read them back and round them to the block's exponent.

    The exponent is the smallest with which all magnitudes stay within 32767; rounding is half to even; a block of zeros
    has exponent -128. Golden: :func:`sim.golden.activations.quantize`. When the last token of a block's last row has
    come, every token that was seen gets its block, lowest first, an element a cycle in which ``r_ready`` is high. By
    the time the next block is complete that is long over: elements come eight cycles apart.

    Members
    -------
    i : In, :func:`hw.swiglu.swiglu_output`; i_valid : In, at most every sixth cycle
    rows : In, rows of the expert, a multiple of 256
    r_token, r_row : Out, element to read; r_valid : Out; r_ready : In, the memory takes the address
    r_data : In, the element, ``READ_LATENCY`` cycles later
    o : stream of :func:`hw.layouts.activation_word`, whose taker must be always ready
    done : Out, high for a cycle when the expert's last word is out
    """

    READ_LATENCY = BlockMemory.LATENCY + 1
    """The memory's, and a register before its address."""

    i: data.View
    i_valid: Signal
    rows: Signal
    r_token: Signal
    r_row: Signal
    r_valid: Signal
    r_ready: Signal
    r_data: data.View
    o: stream.Interface
    done: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        place = hidden_place(params)
        super().__init__(
            {
                "i": In(swiglu_output(params)),
                "i_valid": In(1),
                "rows": In(bits_for(params.max_expert_width + 1)),
                "r_token": Out(place["token"].shape),
                "r_row": Out(place["row"].shape),
                "r_valid": Out(1),
                "r_ready": In(1),
                "r_data": In(SCALED),
                "o": Out(stream.Signature(activation_word(params))),
                "done": Out(1),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params
        delayed = partial(delay, m)
        in_block = (fmt.BLOCK_WEIGHTS - 1).bit_length()
        # Everything is looked at a cycle late, so that a comparison comes before the addition that needs it.
        element_in = data.View(self.i.shape(), delayed(self.i.as_value(), 1))
        valid_in = delayed(self.i_valid, 1, control=True)
        above = delayed(self.i.h.magnitude > LARGEST, 1)
        place = element_in.place

        # The largest exponent of each token's block, for the block that comes and the one that is read back.
        peak_shape = signed(EXPONENT_BITS)
        m.submodules.peaks = peaks = memory.Memory(shape=peak_shape, depth=2 << len(place.token), init=[])
        so_far, write, peak_port = peaks.read_port(domain="comb"), peaks.write_port(), peaks.read_port(domain="comb")
        parity = Signal()
        seen = Signal(params.max_batch)

        own = Signal(signed(len(element_in.h.exponent) + 1), reset_less=True)
        before = Signal(peak_shape, reset_less=True)
        was_seen = Signal(reset_less=True)
        token = Signal.like(place.token, reset_less=True)
        zero = Signal(reset_less=True)
        valid_1 = delayed(valid_in, 1, control=True)
        bit = Signal(params.max_batch, reset_less=True)
        m.d.comb += so_far.addr.eq(Cat(place.token, parity))
        m.d.sync += [
            own.eq(element_in.h.exponent + EXPONENT_STEP + above),
            zero.eq(element_in.h.magnitude == 0),
            before.eq(so_far.data),
            was_seen.eq((seen >> place.token)[0]),
            token.eq(place.token),
            bit.eq(Const(1, 1) << place.token),
        ]
        clipped = Signal(peak_shape, reset_less=True)
        m.d.sync += clipped.eq(Mux(zero | (own < EXPONENT_MIN), EXPONENT_MIN, own))
        so_far_2 = Signal(peak_shape, reset_less=True)  # a token not seen has the least there is
        keep = Signal(reset_less=True)
        m.d.sync += [so_far_2.eq(Mux(was_seen, before, EXPONENT_MIN)), keep.eq((clipped - so_far_2)[-1])]
        larger = delayed(Mux(keep, delayed(so_far_2, 1), delayed(clipped, 1)), 1)
        m.d.comb += [
            write.addr.eq(Cat(delayed(token, 3), parity)),
            write.data.eq(larger),
            write.en.eq(delayed(valid_1, 3, control=True)),
        ]
        with m.If(valid_1):
            m.d.sync += seen.eq(seen | bit)

        # A block is complete; five cycles later all that it left behind is in its memories.
        row_end = place.end & place.row[:in_block].all()
        complete = delayed(valid_in & row_end, 5, control=True)
        block = delayed(place.row[in_block:], 5)
        last_row = Signal.like(place.row, reset_less=True)
        m.d.sync += last_row.eq(self.rows - 1)
        last_block = delayed(place.row == last_row, 5)
        reading = Signal()
        final = Signal()
        left = Signal(params.max_batch)
        base = Signal.like(block)
        row = Signal(in_block)
        at_last = Signal()  # it is the block's last
        peak = Signal(peak_shape, reset_less=True)
        number = Signal.like(place.token)
        with m.If(complete):
            m.d.sync += [left.eq(seen), seen.eq(0), parity.eq(~parity), base.eq(block), final.eq(last_block)]
        waiting = Signal()  # some are left, and this is the first of them; a cycle late, long before it is read
        m.d.sync += waiting.eq(left.any())
        for n in reversed(range(params.max_batch)):
            with m.If(left[n]):
                m.d.sync += number.eq(n)
        m.d.comb += [
            peak_port.addr.eq(Cat(self.r_token, ~parity)),
            self.r_row.eq(Cat(row, base)),
            self.r_valid.eq(reading),
        ]
        m.d.sync += peak.eq(peak_port.data)
        taken = Signal()
        token_end = Signal()
        m.d.comb += [taken.eq(reading & self.r_ready), token_end.eq(taken & at_last)]
        with m.If(taken):
            m.d.sync += [row.eq(row + 1), at_last.eq(row == fmt.BLOCK_WEIGHTS - 2)]
        with m.If(~reading & waiting):
            m.d.sync += [reading.eq(1), self.r_token.eq(number), left.eq(left & (left - 1))]
        with m.Elif(token_end):
            m.d.sync += reading.eq(0)

        # The memory; then, stages 1 and 2: how far right. Stages 3 to 5: there, with a guard bit below and whether
        # anything else was lost. Stage 6: round. Stage 7: sign.
        element = self.r_data
        distance = Signal(signed(len(element.exponent) + 1), reset_less=True)
        m.d.sync += distance.eq(delayed(peak, self.READ_LATENCY - 1) - element.exponent)
        right = Signal(range(MOST_RIGHT + 1), reset_less=True)
        m.d.sync += right.eq(Mux(distance > MOST_RIGHT, MOST_RIGHT, distance[: len(right)]))
        kept, lost = delayed(element.magnitude << 1, 2), Const(0, 1)
        for steps in ((16,), (8, 4), (2, 1)):
            for step in steps:
                chosen = right[step.bit_length() - 1]
                kept, lost = (
                    Mux(chosen, kept >> step, kept),
                    lost | (chosen & kept[:step].any()),
                )
            kept, lost, right = delayed(kept, 1), delayed(lost, 1), delayed(right, 1)
        rounded = Signal(ACTIVATION_BITS - 1, reset_less=True)
        m.d.sync += rounded.eq(kept[1:] + (kept[0] & (lost | kept[1])))
        negative = delayed(element.negative, 6)
        value = Signal(signed(ACTIVATION_BITS), reset_less=True)
        m.d.sync += value.eq(Mux(negative, -rounded, rounded))
        stages = self.READ_LATENCY + 7

        # Eight values a word.
        values = Signal(ACTIVATION_BITS * LOAD_VALUES, reset_less=True)
        valid = delayed(taken, stages, control=True)
        row_8 = delayed(row, stages)
        with m.If(valid):
            m.d.sync += values.eq(Cat(values[ACTIVATION_BITS:], value))
        low = (LOAD_VALUES - 1).bit_length()
        m.d.sync += self.o.valid.eq(valid & row_8[:low].all())
        m.d.comb += [
            self.o.p["values"].eq(values),
            self.o.p.exponent.eq(delayed(peak, stages)),
            self.o.p.word.eq(delayed(row_8[low:], 1)),
            self.o.p.column.eq(params.max_columns + delayed(base, stages + 1)),
            self.o.p.token.eq(delayed(self.r_token, stages + 1)),
            self.done.eq(delayed(token_end & ~waiting & final, stages + 1, control=True)),
        ]
        return m
