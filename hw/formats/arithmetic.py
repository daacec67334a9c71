"""The arithmetic contract's widths and limits; what they mean is defined by ``sim.golden``."""

ACTIVATION_BITS = 16
ACTIVATION_MAX = 32767
"""Largest magnitude of a quantised activation; -32768 is never produced."""

EXPONENT_BITS = 8
EXPONENT_MIN, EXPONENT_MAX = -128, 127
"""Range of a block's activation exponent. A block of zeros carries ``EXPONENT_MIN``."""

PRODUCT_BITS = 14
"""``weight * scale``: at most 32 * 128 = 2**12 in magnitude, reached with a positive sign."""

BLOCK_SUM_BITS = 36
"""256 terms of at most 2**12 * 2**15: -2**35 is reached (only with an activation of -32768), +2**35 is not."""

MANTISSA_BITS = 12
D_EXPONENT_MIN, D_EXPONENT_MAX = -24, 5
"""A finite IEEE half is ``m * 2**k`` with ``|m| <= 2047`` and ``k`` in this range."""

ACCUMULATOR_BITS = 64
FRACTION_BITS = 40
"""Accumulators are Q24.40: the real value is ``accumulator * 2**-40``."""

ERROR_OVERFLOW = 1
"""Bit of a sum's ``error`` field: an addition left the accumulator's range and was clamped."""
ERROR_SCALE = 2
"""Bit of a sum's ``error`` field: a block's ``d`` was NaN or infinite and counted as zero."""
