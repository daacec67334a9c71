"""``h = silu(g) * u * p`` on one multiplier."""

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, unsigned
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.delay import delay
from hw.formats import sigmoid as table
from hw.formats.params import Params
from hw.formats.sigmoid import PART_BITS, REST_BITS, SIGNIFICANT_BITS
from hw.layouts import ROUTER_WEIGHT, SCALED, hidden_place
from hw.normalise import ARGUMENT_BITS
from hw.primitives.memory import BlockRom
from hw.primitives.multiplier import Multiplier

STEPS = 7
SLOTS = 16

TOP = 1 << (SIGNIFICANT_BITS - 1)
EXPONENT = SCALED["exponent"].shape


def _normalised(value: int) -> int:
    """A magnitude without its highest bit, which is 1; in that place, whether it was shifted up once."""
    return value & (TOP - 1) if value >= TOP else (value << 1 & (TOP - 1)) | TOP


FACTORS = [*table.RECIPROCAL_SLOPE, *(magnitude for magnitude, _ in table.EXP_WHOLE)]
OTHERS = [*table.RECIPROCAL, *(_normalised(value) for value in table.EXP_PART)]
"""Tables side by side in two memories: what meets in a step lies in different ones."""
EXP_TABLES = 1 << PART_BITS
"""Where the tables of ``exp`` begin in both."""


def swiglu_input(params: Params) -> data.StructLayout:
    """One element: gate and up sums, the argument of ``exp``, the router's weight, and its place."""
    return data.StructLayout(
        {
            "g": SCALED,
            "argument": ARGUMENT_BITS,
            "u": SCALED,
            "p": ROUTER_WEIGHT,
            "place": hidden_place(params),
        }
    )


def swiglu_output(params: Params) -> data.StructLayout:
    """One element of ``h`` and its place."""
    return data.StructLayout({"h": SCALED, "place": hidden_place(params)})


class Swiglu(wiring.Component):
    """Elements of ``g``, ``u`` and ``p`` to ``h``; golden, step by step: :func:`sim.golden.swiglu.swiglu`.

    Sixteen elements go round in a ring of sixteen stages with one multiplier and one rounding unit. A round is a step:

    ==== ========================================= ==================================
    step product                                   result
    ==== ========================================= ==================================
    0    ``EXP_WHOLE * EXP_PART``
    1    ``* (1 - rest)``                          ``t = exp(-|g|)``
    2    ``RECIPROCAL_SLOPE * |offset|``           ``1 / (1 + t)``, by a line
    3    ``* t`` if ``g`` is negative, else ``1``  ``logistic(g)``
    4    ``* |g|``
    5    ``* |u|``
    6    ``* p``                                   ``|h|``
    ==== ========================================= ==================================

    In an eighth round the result leaves. So an element takes ``LATENCY`` cycles once it has found a free place, and one
    can enter every eight cycles. Elements leave in the order in which they came, as far apart as they came.

    Members
    -------
    i : stream of :func:`swiglu_input`
    o : Out, :func:`swiglu_output`
    o_valid : Out, high for a cycle with each element
    """

    LATENCY = SLOTS * STEPS + 2

    i: stream.Interface
    o: data.View
    o_valid: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        super().__init__(
            {
                "i": In(stream.Signature(swiglu_input(params))),
                "o": Out(swiglu_output(params)),
                "o_valid": Out(1),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.elements = elements = memory.Memory(shape=swiglu_input(self.params), depth=SLOTS, init=[])
        kept_shape = data.StructLayout({"magnitude": SIGNIFICANT_BITS, "exponent": EXPONENT})
        m.submodules.kept = kept = memory.Memory(shape=kept_shape, depth=SLOTS, init=[])
        m.submodules.factors = factors = BlockRom(FACTORS)
        m.submodules.others = others = BlockRom(OTHERS)
        m.submodules.multiplier = multiplier = Multiplier(unsigned(SIGNIFICANT_BITS), unsigned(SIGNIFICANT_BITS))
        element_read, element_write = elements.read_port(domain="comb"), elements.write_port()
        kept_read, kept_write = kept.read_port(domain="comb"), kept.write_port()

        # Stage 0: the slot's turn. What a stage works on, n cycles later, belongs to slot - n.
        slot = Signal(range(SLOTS))
        m.d.sync += slot.eq(slot + 1)
        busy = Signal()
        step = Signal(range(STEPS + 1))
        magnitude = Signal(SIGNIFICANT_BITS, reset_less=True)  # the result of the step before
        exponent = Signal(EXPONENT, reset_less=True)
        m.d.comb += [element_read.addr.eq(slot), kept_read.addr.eq(slot)]
        element = Signal(swiglu_input(self.params), reset_less=True)
        t = Signal(kept_shape, reset_less=True)
        m.d.sync += [
            element.eq(element_read.data),
            t.eq(kept_read.data),
            self.o_valid.eq(busy & (step == STEPS)),
        ]

        # Stage 1: the second factor of most steps; and t in units of 2**-18, which gives the table's place in step 2.
        magnitude_1, exponent_1, step_1 = delay(m, magnitude, 1), delay(m, exponent, 1), delay(m, step, 1)
        m.d.comb += [
            self.o.h.magnitude.eq(magnitude_1),
            self.o.h.exponent.eq(exponent_1),
            self.o.h.negative.eq(element.g.negative ^ element.u.negative),
            self.o.place.eq(element.place),
        ]
        rest, part, whole = (
            element.argument[:REST_BITS],
            element.argument[REST_BITS:][:PART_BITS],
            element.argument[REST_BITS + PART_BITS :],
        )
        unit = PART_BITS + REST_BITS
        minus_rest = Signal(unit + 1)  # 1 - rest, in units of 2**-16
        m.d.comb += minus_rest.eq((1 << unit) + (1 << (REST_BITS - 1)) - rest)
        choices = {  # step: magnitude and exponent of the second factor; that of step 1 joins them a cycle later
            3: (Mux(element.g.negative, t.magnitude, TOP), Mux(element.g.negative, t.exponent, 1 - SIGNIFICANT_BITS)),
            4: (element.g.magnitude, element.g.exponent),
            5: (element.u.magnitude, element.u.exponent),
            6: (element.p.magnitude, element.p.exponent),
        }
        chosen = Signal(SIGNIFICANT_BITS, reset_less=True)
        chosen_exponent = Signal(EXPONENT, reset_less=True)
        with m.Switch(step_1):
            for number, (value, power) in choices.items():
                with m.Case(number):
                    m.d.sync += [chosen.eq(value), chosen_exponent.eq(power)]
        second = Signal(SIGNIFICANT_BITS, reset_less=True)
        second_exponent = Signal(EXPONENT, reset_less=True)
        minus_rest_2 = delay(m, minus_rest, 1)
        exactly_one = minus_rest_2[unit]
        with m.If(delay(m, step_1 == 1, 1)):
            m.d.sync += [
                second.eq(Mux(exactly_one, minus_rest_2 << 1, minus_rest_2 << 2)),
                second_exponent.eq(Mux(exactly_one, -unit - 1, -unit - 2)),
            ]
        with m.Else():
            m.d.sync += [second.eq(chosen), second_exponent.eq(chosen_exponent)]
        too_small = Signal(EXPONENT, reset_less=True)
        m.d.sync += too_small.eq(-SIGNIFICANT_BITS - exponent)
        right = Signal(5, reset_less=True)
        m.d.sync += right.eq(Mux(too_small[5:].any(), 31, too_small))

        # Stages 2 and 3: t shifted. Stage 4: the tables' place.
        shifted = Signal(SIGNIFICANT_BITS, reset_less=True)
        fixed = Signal(SIGNIFICANT_BITS, reset_less=True)  # t is below 1, as the golden model's test shows
        m.d.sync += [
            shifted.eq(delay(m, magnitude_1, 1) >> (right & 0b11000)),
            fixed.eq(shifted >> delay(m, right[:3], 1)),
        ]
        low_bits = SIGNIFICANT_BITS - PART_BITS
        first_step = delay(m, step_1 == 0, 3)
        place = Signal(PART_BITS + 1, reset_less=True)
        place_other = Signal(PART_BITS + 1, reset_less=True)
        low = Signal(low_bits, reset_less=True)
        m.d.sync += [
            place.eq(Mux(first_step, EXP_TABLES | delay(m, whole, 3), fixed[low_bits:])),
            place_other.eq(Mux(first_step, EXP_TABLES | delay(m, part, 3), fixed[low_bits:])),
            low.eq(fixed[:low_bits]),
        ]
        m.d.comb += [factors.addr.eq(place), others.addr.eq(place_other)]

        # Stage 5 and 6: the tables' words come at 7, with all that goes with them.
        # The exponent of the product of both tables' words, without and with the other's carry; looked up in two steps.
        powers = [power for _, power in table.EXP_WHOLE]
        whole_low, whole_high = delay(m, whole[:4], 3), delay(m, whole[4:], 4)
        whole_exponents = []
        for less in (SIGNIFICANT_BITS, SIGNIFICANT_BITS + 1):
            parts = [[Const(power - less, EXPONENT) for power in powers[n : n + 16]] for n in range(0, len(powers), 16)]
            looked_up = [delay(m, Array(part)[whole_low], 1) for part in parts]
            whole_exponents.append(delay(m, Array(looked_up)[whole_high], 2))
        up = low[-1]  # the offset from the interval's middle is low - 512: positive or zero
        distance = delay(m, Mux(up, low[:-1], (1 << (low_bits - 1)) - low[:-1]), 2)
        below = delay(m, ~up, 2)
        step_7 = delay(m, step_1, 6)
        line_step_7 = step_7 == 2
        other = others.data
        without_carry, with_carry = whole_exponents
        a = Signal(SIGNIFICANT_BITS, reset_less=True)
        b = Signal(SIGNIFICANT_BITS, reset_less=True)
        power = Signal(EXPONENT, reset_less=True)
        second_7 = delay(m, second, 4)
        sum_7 = Signal(EXPONENT, reset_less=True)
        m.d.sync += sum_7.eq(delay(m, exponent_1, 5) + delay(m, second_exponent, 3))
        m.d.sync += [
            a.eq(Mux((step_7 == 0) | line_step_7, factors.data, delay(m, magnitude_1, 6))),
            b.eq(Mux(step_7 == 0, TOP | other[:-1], Mux(line_step_7, distance, second_7))),
            power.eq(Mux(step_7 == 0, Mux(other[-1], with_carry, without_carry), sum_7)),
        ]
        m.d.comb += [multiplier.a.eq(a), multiplier.b.eq(b)]

        # Stages 8 to 10: the product, at 11. The line of step 2: down by slope * distance above the middle, up below.
        passed = delay(m, multiplier.p, 1)
        fall = passed[SIGNIFICANT_BITS:]
        fall_cut = delay(m, multiplier.p[:SIGNIFICANT_BITS].any(), 1)
        base, below_12, line_step_12 = delay(m, other, 5), delay(m, below, 5), delay(m, line_step_7, 5)
        line = Signal(SIGNIFICANT_BITS + 1, reset_less=True)
        m.d.sync += line.eq(Mux(below_12, base + fall + fall_cut, base - fall))
        line_step_13, power_13 = delay(m, line_step_12, 1), delay(m, power, 5)

        # Stage 13: the highest bit to the top. It is one of the three highest, as both factors had theirs on top.
        # The product's is put there a stage earlier, while the line is made.
        top = Signal(SIGNIFICANT_BITS + 1, reset_less=True)
        power_14 = Signal(EXPONENT, reset_less=True)
        places = SIGNIFICANT_BITS

        def normal(bits):  # and what that adds to the exponent
            return (
                Mux(bits[-1], bits[places - 1 :], Mux(bits[-2], bits[places - 2 :], bits[places - 3 :]))[: len(top)],
                Mux(bits[-1], places, Mux(bits[-2], places - 1, places - 2)),
            )

        product_top, more = (delay(m, value, 1) for value in normal(passed))
        line_top, line_more = normal(Cat(Const(0, places - 1), line))
        m.d.sync += [
            top.eq(Mux(line_step_13, line_top, product_top)),
            power_14.eq(Mux(line_step_13, line_more + (1 - 2 * places), power_13 + more)),
        ]
        # Stage 14: round half up. Stage 15: where that made a 19th bit, one step up; and back to the beginning.
        rounded = Signal(SIGNIFICANT_BITS + 1, reset_less=True)
        carry = rounded[-1]
        m.d.sync += [
            rounded.eq(top[1:] + top[0]),
            magnitude.eq(rounded[:SIGNIFICANT_BITS] | (carry << (SIGNIFICANT_BITS - 1))),
            exponent.eq(delay(m, power_14, 1) + carry),
        ]
        # A slot whose element has left takes another; t, the result of step 1, is kept.
        busy_15, step_15 = delay(m, busy & (step != STEPS), 15, control=True), delay(m, step, 15)
        m.d.comb += [
            self.i.ready.eq(~busy_15),
            element_write.addr.eq(slot + 1),
            element_write.data.eq(self.i.payload),
            element_write.en.eq(self.i.valid & self.i.ready),
            kept_write.addr.eq(slot),
            kept_write.data.magnitude.eq(magnitude),
            kept_write.data.exponent.eq(exponent),
            kept_write.en.eq(step == 2),
        ]
        m.d.sync += [
            busy.eq(busy_15 | self.i.valid),
            step.eq(Mux(busy_15, step_15 + 1, 0)),
        ]
        return m
