"""Row sums to 18 significant bits."""

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hw.delay import delay
from hw.formats.arithmetic import ACCUMULATOR_BITS, FRACTION_BITS
from hw.formats.sigmoid import PART_BITS, REST_BITS, SIGNIFICANT_BITS, WHOLE_BITS
from hw.layouts import SCALED

ARGUMENT_BITS = WHOLE_BITS + PART_BITS + REST_BITS
"""Of the exponential function's argument, in units of 2**-16."""


class Normalise(wiring.Component):
    """A Q24.40 value to magnitude, exponent and sign, rounded half up; and its magnitude as an argument of ``exp``.

    A value a cycle, ``LATENCY`` cycles. The argument is the magnitude rounded to 2**-16 and clipped below 64. Golden:
    ``_round_to_18_bits`` and ``logistic`` in :mod:`sim.golden.swiglu`.

    Members
    -------
    value : In, signed Q24.40
    scaled : Out, ``SCALED``
    argument : Out
    """

    LATENCY = 12

    value: Signal
    scaled: data.View
    argument: Signal

    def __init__(self) -> None:
        super().__init__(
            {
                "value": In(signed(ACCUMULATOR_BITS)),
                "scaled": Out(SCALED),
                "argument": Out(ARGUMENT_BITS),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        half = ACCUMULATOR_BITS // 2
        value = delay(m, self.value, 1)
        negative = value[-1]

        # Stages 2 and 3: the magnitude, negated as "invert and add one" in two halves.
        low = Signal(half + 1, reset_less=True)
        high = Signal(half, reset_less=True)
        magnitude = Signal(ACCUMULATOR_BITS, reset_less=True)
        m.d.sync += [
            low.eq((value[:half] ^ negative.replicate(half)) + negative),
            high.eq(value[half:] ^ negative.replicate(half)),
            magnitude.eq(low[:half] | ((high + low[half])[:half] << half)),
        ]

        # Stages 4 to 10: left by 32, 16 .. 1 where that many bits on top are zero; only what can still matter is kept.
        # Whether 32 are takes a stage of its own.
        rest = delay(m, magnitude, 1)
        shift = None
        for step in (32, 16, 8, 4, 2, 1):
            zero = delay(m, magnitude[-step:] == 0, 1) if step == 32 else rest[-step:] == 0
            keep = SIGNIFICANT_BITS + 1 + step - 1
            shifted = Signal(keep, name=f"left_{step}", reset_less=True)
            m.d.sync += shifted.eq(Mux(zero, rest << step, rest)[len(rest) - keep :])
            count = Signal(range(2 * 32), name=f"count_{step}", reset_less=True)
            m.d.sync += count.eq((0 if shift is None else shift) | Mux(zero, step, 0))
            rest, shift = shifted, count

        # Stage 11: round. Stage 12: where that made a 19th bit, one step up.
        rounded = Signal(SIGNIFICANT_BITS + 1, reset_less=True)
        exponent = Signal(SCALED["exponent"].shape, reset_less=True)
        carry = rounded[-1]
        assert shift is not None
        m.d.sync += [
            rounded.eq(rest[1:] + rest[0]),
            exponent.eq(ACCUMULATOR_BITS - SIGNIFICANT_BITS - FRACTION_BITS - shift),
            self.scaled.magnitude.eq(rounded[:SIGNIFICANT_BITS] | (carry << (SIGNIFICANT_BITS - 1))),
            self.scaled.exponent.eq(exponent + carry),
            self.scaled.negative.eq(delay(m, negative, self.LATENCY - 2)),
        ]

        cut = FRACTION_BITS - PART_BITS - REST_BITS
        argument = Signal(ARGUMENT_BITS + 1, reset_less=True)
        beyond = Signal(reset_less=True)
        m.d.sync += [
            argument.eq(magnitude[cut:][:ARGUMENT_BITS] + magnitude[cut - 1]),
            beyond.eq(magnitude[cut + ARGUMENT_BITS :].any()),
        ]
        clipped = argument[:-1] | (beyond | argument[-1]).replicate(ARGUMENT_BITS)
        m.d.comb += self.argument.eq(delay(m, clipped, self.LATENCY - 4))
        return m
