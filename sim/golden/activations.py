"""Token vectors to int16 block floating point."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hw.formats.arithmetic import ACTIVATION_MAX, EXPONENT_MAX, EXPONENT_MIN
from hw.formats.q6_k import BLOCK_WEIGHTS


class Activations(NamedTuple):
    """Quantised token vectors: element ``i`` of block ``c`` is ``mantissas[..., c, i] * 2**exponents[..., c]``.

    Attributes
    ----------
    mantissas
        ``(..., columns, 256)`` int16.
    exponents
        ``(..., columns)`` int8.
    """

    mantissas: NDArray[np.int16]
    exponents: NDArray[np.int8]


def quantize(x: ArrayLike) -> Activations:
    """Quantise vectors ``(..., columns * 256)`` block by block.

    ``exponent`` is the smallest in -128..127 with ``max|x| * 2**-exponent <= 32767``; ``mantissa`` is
    ``x * 2**-exponent`` rounded half to even. A block of zeros gets mantissas 0 and exponent -128.

    Raises ValueError where an element is not finite, too large for exponent 127, or the length is not a multiple
    of 256.
    """
    real = np.asarray(x, np.float64)
    if real.ndim == 0 or real.shape[-1] == 0 or real.shape[-1] % BLOCK_WEIGHTS:
        raise ValueError(f"a vector's length must be a positive multiple of {BLOCK_WEIGHTS}, not shape {real.shape}")
    if not np.isfinite(real).all():
        raise ValueError(f"element {tuple(np.argwhere(~np.isfinite(real))[0].tolist())} is not finite")
    blocks = real.reshape(*real.shape[:-1], -1, BLOCK_WEIGHTS)
    peak = np.abs(blocks).max(axis=-1)
    # frexp: peak = fraction * 2**power with fraction in [0.5, 1), so 2**(power - 15) almost always fits; a peak
    # between 32767 and 32768 units of it needs one more.
    exponent = np.frexp(peak)[1].astype(np.int64) - 15
    exponent += np.ldexp(peak, -exponent) > ACTIVATION_MAX
    exponent = np.where(peak == 0, EXPONENT_MIN, np.maximum(exponent, EXPONENT_MIN))
    if exponent.max() > EXPONENT_MAX:
        raise ValueError(f"magnitude {peak.max():g} needs an exponent above {EXPONENT_MAX}")
    mantissas = np.rint(np.ldexp(blocks, -exponent[..., None]))
    return Activations(mantissas.astype(np.int16), exponent.astype(np.int8))


def dequantize(x: Activations) -> NDArray[np.float64]:
    """Real vectors ``(..., columns * 256)``; exact."""
    real = np.ldexp(x.mantissas.astype(np.float64), x.exponents[..., None].astype(np.int64))
    return real.reshape(*real.shape[:-2], -1)
