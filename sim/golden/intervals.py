"""The widths that the arithmetic needs, from the ranges of its formats alone, by interval arithmetic.

Nothing here is a width of the hardware: :data:`STEPS` says what each step of a block can produce, and
``tests/sim/test_intervals.py`` compares that with the constants in :mod:`hw.formats.arithmetic`, with the registers in
the gateware, and with a worst case that reaches the bound.
"""

from dataclasses import dataclass
from itertools import product

from hw.formats.arithmetic import (
    ACTIVATION_BITS,
    D_EXPONENT_MAX,
    D_EXPONENT_MIN,
    EXPONENT_MAX,
    EXPONENT_MIN,
    FRACTION_BITS,
)
from hw.formats.q6_k import SCALE_BITS, SUB_BLOCK_WEIGHTS, SUB_BLOCKS, WEIGHT_BIAS


@dataclass(frozen=True)
class Interval:
    """All integers from ``low`` to ``high``."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"an interval's low must not be above its high: {self.low} > {self.high}")

    def __add__(self, other: "Interval") -> "Interval":
        return Interval(self.low + other.low, self.high + other.high)

    def __mul__(self, other: "Interval") -> "Interval":
        ends = [a * b for a, b in product((self.low, self.high), (other.low, other.high))]
        return Interval(min(ends), max(ends))

    def times(self, terms: int) -> "Interval":
        """The sum of ``terms`` independent values."""
        return Interval(self.low * terms, self.high * terms)

    def shifted(self, places: "Interval") -> "Interval":
        """Multiplied by two to the power of any of ``places``, none of them negative."""
        return self * Interval(1 << places.low, 1 << places.high)

    @property
    def bits(self) -> int:
        """Of the shortest signed number that holds it."""
        return max((value if value >= 0 else ~value).bit_length() for value in (self.low, self.high)) + 1


def signed(bits: int) -> Interval:
    """What so many bits hold."""
    return Interval(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


WEIGHT = Interval(-WEIGHT_BIAS, WEIGHT_BIAS - 1)
"""``q - 32`` of six bits."""
SCALE = signed(SCALE_BITS)
ACTIVATION = signed(ACTIVATION_BITS)
"""As the link may bring it: golden's own never hold -32768."""
MANTISSA = Interval(-2047, 2047)
"""A finite IEEE half is ``m * 2**k``: ten bits of fraction and the hidden one."""
D_EXPONENT = Interval(D_EXPONENT_MIN, D_EXPONENT_MAX)
EXPONENT = Interval(EXPONENT_MIN, EXPONENT_MAX)

PRODUCT = WEIGHT * SCALE
TERM = PRODUCT * ACTIVATION
SUB_BLOCK_SUM = TERM.times(SUB_BLOCK_WEIGHTS)
BLOCK_SUM = SUB_BLOCK_SUM.times(SUB_BLOCKS)
SHIFT = D_EXPONENT + EXPONENT + Interval(FRACTION_BITS, FRACTION_BITS)
FACTOR = MANTISSA.shifted(Interval(0, 3))
"""The two low bits of the shift go into the factor."""
SCALED_SUM = BLOCK_SUM * FACTOR
CONTRIBUTION = (BLOCK_SUM * MANTISSA).shifted(Interval(0, SHIFT.high))
"""In units of 2**-40, were nothing clamped: no accumulator holds that, hence the clamp and its error bit."""

STEPS: dict[str, Interval] = {
    "weight": WEIGHT,
    "scale": SCALE,
    "weight x scale": PRODUCT,
    "activation": ACTIVATION,
    "x activation": TERM,
    "sum of 16": SUB_BLOCK_SUM,
    "block sum, 256": BLOCK_SUM,
    "mantissa of d": MANTISSA,
    "mantissa x 2^0..3": FACTOR,
    "block sum x that": SCALED_SUM,
    "shift k + e + 40": SHIFT,
    "contribution, unclamped": CONTRIBUTION,
}
"""Every step of :func:`sim.golden.matmul.matmul` and what it can produce."""
