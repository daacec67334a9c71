"""Tables for the logistic function ``1 / (1 + exp(-x))`` in 18-bit integers; how they are used is in
``sim.golden.swiglu``.

``exp(-z)`` is ``EXP_WHOLE[z's whole part] * EXP_PART[next 8 bits] * (1 - what remains)``, and ``1 / (1 + t)`` is a
straight line in each of 256 intervals of ``t``. Entries belong to the middle of their interval, which makes the error
of cutting a series after its second term four times smaller.
"""

from decimal import Decimal, getcontext

SIGNIFICANT_BITS = 18
"""Bits of a magnitude everywhere in this calculation: one multiplier's port."""
ONE = 1 << SIGNIFICANT_BITS

WHOLE_BITS = 6
"""Arguments reach 64: the logistic function of -64 is 2**-92."""
PART_BITS = 8
REST_BITS = 8

getcontext().prec = 40  # entries are rounded correctly, so the same on every machine


def _exp_whole(z: int) -> tuple[int, int]:
    """``exp(-z)`` as (magnitude with its highest of 18 bits set, exponent of two)."""
    value, exponent = Decimal(-z).exp(), -SIGNIFICANT_BITS
    while value < Decimal(1) / 2:
        value, exponent = value * 2, exponent - 1
    if value == 1:
        value, exponent = value / 2, exponent + 1
    return round(value * ONE), exponent


EXP_WHOLE = tuple(_exp_whole(z) for z in range(1 << WHOLE_BITS))
"""``exp(-z)``, exact to half a unit of 18 bits: (magnitude, exponent), value ``magnitude * 2**exponent``."""

EXP_PART = tuple(
    round((-(Decimal(part) + Decimal("0.5")) / (1 << PART_BITS)).exp() * ONE) for part in range(1 << PART_BITS)
)
"""``exp(-(part + 1/2) / 256)`` in units of 2**-18."""

RECIPROCAL = tuple(
    round(ONE / (1 + (Decimal(part) + Decimal("0.5")) / (1 << PART_BITS))) for part in range(1 << PART_BITS)
)
"""``1 / (1 + t)`` in the middle of each interval of ``t``, in units of 2**-18."""

RECIPROCAL_SLOPE = tuple(
    round(ONE / (1 + (Decimal(part) + Decimal("0.5")) / (1 << PART_BITS)) ** 2) for part in range(1 << PART_BITS)
)
"""How fast ``1 / (1 + t)`` falls there, in units of 2**-18."""
