"""``h = silu(g) * u * p`` in integers: the steps are the definition, the real function is the test.

Numbers are (magnitude of at most 18 bits, exponent of two) with a sign beside them; every product is rounded to 18
significant bits. Each ``h`` is within 2**-13 of its real value, relative; ``tests/sim/test_swiglu.py`` derives and
checks it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hw.formats.arithmetic import FRACTION_BITS
from hw.formats.messages import WEIGHT_FRACTION_BITS
from hw.formats.sigmoid import (
    EXP_PART,
    EXP_WHOLE,
    ONE,
    PART_BITS,
    RECIPROCAL,
    RECIPROCAL_SLOPE,
    REST_BITS,
    SIGNIFICANT_BITS,
    WHOLE_BITS,
)

Ints = NDArray[np.int64]


class Scaled(NamedTuple):
    """Magnitudes ``magnitude * 2**exponent``; a magnitude is 0 or has its highest of 18 bits set."""

    magnitude: Ints
    exponent: Ints


def _round_to_18_bits(magnitude: Ints, exponent: ArrayLike) -> Scaled:
    """Round half up to 18 significant bits; exact for shorter magnitudes, which are shifted up."""
    # The bit length is exact from float64's exponent below 2**53; above it, from the upper half.
    high = magnitude >> 32
    length = np.where(high > 0, np.frexp(high.astype(np.float64))[1] + 32, np.frexp(magnitude.astype(np.float64))[1])
    shift = length.astype(np.int64) - SIGNIFICANT_BITS
    down = np.maximum(shift, 0)
    rounded = (magnitude >> down) + np.where(down > 0, magnitude >> np.maximum(down - 1, 0) & 1, 0)
    rounded = rounded << np.maximum(-shift, 0)
    carry = rounded == ONE  # rounding up reached the next power of two
    shift = np.where(magnitude == 0, 0, shift + carry)
    return Scaled(np.where(carry, ONE >> 1, rounded), np.asarray(exponent, np.int64) + shift)


def _multiply(a: Scaled, b: Scaled) -> Scaled:
    return _round_to_18_bits(a.magnitude * b.magnitude, a.exponent + b.exponent)


def exponential(z: Ints) -> Scaled:
    """``exp(-z)`` of ``z`` in units of 2**-16, below 64: a product of two table entries and ``1 - rest``; below 1."""
    fraction = PART_BITS + REST_BITS
    whole, part, rest = z >> fraction, z >> REST_BITS & (1 << PART_BITS) - 1, z & (1 << REST_BITS) - 1
    exp_whole = np.array(EXP_WHOLE, np.int64)
    t = _multiply(
        Scaled(exp_whole[whole, 0], exp_whole[whole, 1]),
        _round_to_18_bits(np.array(EXP_PART, np.int64)[part], -SIGNIFICANT_BITS),
    )
    one_minus_rest = (1 << fraction) - (rest - (1 << (REST_BITS - 1)))
    return _multiply(t, _round_to_18_bits(one_minus_rest, -fraction))


def logistic(g: Ints) -> Scaled:
    """``1 / (1 + exp(-g))`` of ``g`` in Q24.40.

    With ``z = |g|`` rounded to 2**-16 and clipped below 64 and ``t = exp(-z)``: ``1 / (1 + t)`` comes from a line; for
    negative ``g`` it is multiplied by ``t``.
    """
    magnitude = _magnitude(g)
    fraction = PART_BITS + REST_BITS
    cut = FRACTION_BITS - fraction
    z = np.minimum((magnitude >> cut) + (magnitude >> (cut - 1) & 1), (1 << (WHOLE_BITS + fraction)) - 1)
    t = exponential(z)

    # t in units of 2**-18, below 1 for every z; what is cut off is below the unit of the line's result.
    fixed = t.magnitude >> np.minimum(-SIGNIFICANT_BITS - t.exponent, 62)
    low_bits = SIGNIFICANT_BITS - PART_BITS
    interval, offset = fixed >> low_bits, (fixed & (1 << low_bits) - 1) - (1 << (low_bits - 1))
    line = np.array(RECIPROCAL, np.int64)[interval] - (
        np.array(RECIPROCAL_SLOPE, np.int64)[interval] * offset >> SIGNIFICANT_BITS
    )
    reciprocal = _round_to_18_bits(line, -SIGNIFICANT_BITS)
    both = _multiply(reciprocal, t)
    return Scaled(*(np.where(g < 0, a, b) for a, b in zip(both, reciprocal, strict=True)))


def swiglu(g: ArrayLike, u: ArrayLike, p: ArrayLike) -> NDArray[np.float64]:
    """``silu(g) * u * p``, the exact value of the integer result.

    ``g`` and ``u`` are row sums in Q24.40, ``p`` router weights in unsigned Q1.16; they broadcast. The result has 18
    significant bits, so float64 holds it; :func:`sim.golden.activations.quantize` makes the down matrix's input of it.

    Raises ValueError for a weight outside 0..65536.
    """
    g, u, p = np.broadcast_arrays(*(np.asarray(value, np.int64) for value in (g, u, p)))
    if ((p < 0) | (p > 1 << WEIGHT_FRACTION_BITS)).any():
        raise ValueError(f"router weights must be in 0..{1 << WEIGHT_FRACTION_BITS} (unsigned Q1.16)")
    silu = _multiply(_round_to_18_bits(_magnitude(g), -FRACTION_BITS), logistic(g))
    h = _multiply(silu, _round_to_18_bits(_magnitude(u), -FRACTION_BITS))
    h = _multiply(h, _round_to_18_bits(p, -WEIGHT_FRACTION_BITS))
    return np.ldexp(np.where((g < 0) != (u < 0), -h.magnitude, h.magnitude).astype(np.float64), h.exponent)


def quantize_weight(p: ArrayLike) -> Ints:
    """Router weights, real numbers in 0..1, to unsigned Q1.16, rounded half to even."""
    real = np.asarray(p, np.float64)
    if not ((real >= 0) & (real <= 1)).all():
        raise ValueError("router weights must be in 0..1")
    return np.rint(real * (1 << WEIGHT_FRACTION_BITS)).astype(np.int64)


def _magnitude(value: Ints) -> Ints:
    # -2**63, which only an overflowed and therefore void sum holds, would have no magnitude in int64.
    return np.abs(np.maximum(value, -(2**63) + 1))
