"""Q6_K blocks to integers and to real values, from the layout in :mod:`hw.formats.q6_k`."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hw.formats import q6_k as fmt


class Blocks(NamedTuple):
    """Decoded blocks; every array shares the leading shape of the bytes.

    Attributes
    ----------
    weights
        ``(..., 256)`` int8: ``q - 32``, in -32..31.
    scales
        ``(..., 16)`` int8, one for every 16 weights.
    d
        ``(...,)`` float16, the block scale as stored, NaN and infinity included.
    """

    weights: NDArray[np.int8]
    scales: NDArray[np.int8]
    d: NDArray[np.float16]


def decode(blocks: NDArray[np.uint8]) -> Blocks:
    """Split raw blocks ``(..., 210)`` uint8 into weights, scales and ``d``.

    Raises ValueError for another type or last dimension.
    """
    if blocks.dtype != np.uint8 or blocks.shape[-1:] != (fmt.BLOCK_BYTES,):
        raise ValueError(f"blocks must be uint8 (..., {fmt.BLOCK_BYTES}), not {blocks.dtype} {blocks.shape}")
    lead = blocks.shape[:-1]
    low = blocks[..., fmt.QL_OFFSET : fmt.QL_OFFSET + fmt.QL_BYTES].reshape(*lead, 2, 64)
    high = blocks[..., fmt.QH_OFFSET : fmt.QH_OFFSET + fmt.QH_BYTES].reshape(*lead, 2, 32)
    q = np.empty((*lead, 2, 4, 32), np.int8)
    for group in range(4):
        nibble = low[..., 32 * (group % 2) : 32 * (group % 2) + 32] >> (4 * (group // 2)) & 15
        q[..., group, :] = nibble | (high >> (2 * group) & 3) << 4
    scales = blocks[..., fmt.SCALES_OFFSET : fmt.SCALES_OFFSET + fmt.SCALES_BYTES].view(np.int8)
    d = np.ascontiguousarray(blocks[..., fmt.D_OFFSET :]).view("<f2")[..., 0]
    return Blocks(q.reshape(*lead, fmt.BLOCK_WEIGHTS) - np.int8(fmt.WEIGHT_BIAS), scales, d)


def dequantize(blocks: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Real values ``(..., 256)`` of raw blocks ``(..., 210)``; exact, since each fits 25 significant bits."""
    weights, scales, d = decode(blocks)
    lead = weights.shape[:-1]
    scaled = weights.reshape(*lead, fmt.SUB_BLOCKS, -1) * scales.astype(np.float64)[..., None]
    return (scaled * d.astype(np.float64)[..., None, None]).reshape(*lead, fmt.BLOCK_WEIGHTS)


def split_d(d: NDArray[np.float16]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """``d`` as ``mantissa * 2**exponent``: (mantissa, exponent, finite).

    IEEE 754 binary16: a biased exponent of 0 is subnormal, 31 is NaN or infinity. A value that is not finite gives
    mantissa 0.
    """
    bits = np.asarray(d, np.float16).view(np.uint16).astype(np.int64)
    biased, fraction = bits >> 10 & 31, bits & 1023
    magnitude = np.where(biased == 0, fraction, fraction + 1024)
    finite = biased != 31
    mantissa = np.where(finite, np.where(bits >> 15, -magnitude, magnitude), 0)
    return mantissa, np.where(finite, np.maximum(biased, 1) - 25, 0), finite
