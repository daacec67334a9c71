"""GGML ``Q6_K``: 256 weights in 210 bytes.

Layout, from ggml's ``block_q6_K``: ``ql[128]`` (low 4 bits), ``qh[64]`` (high 2 bits), ``scales[16]`` (int8, one for
every 16 weights), ``d`` (IEEE half, little-endian). Weight ``i`` has the value ``d * scales[i // 16] * (q[i] - 32)``.

In half ``h`` of the block (128 weights each) and for ``l`` in 0..31, with ``L = ql[64h:]`` and ``H = qh[32h:]``::

    q[128h + l]      = (L[l]    & 15) | (H[l]      & 3) << 4
    q[128h + l + 32] = (L[l+32] & 15) | (H[l] >> 2 & 3) << 4
    q[128h + l + 64] = (L[l]    >> 4) | (H[l] >> 4 & 3) << 4
    q[128h + l + 96] = (L[l+32] >> 4) | (H[l] >> 6    ) << 4

So one *sub-block* (16 weights with one scale) lies in one 16-byte word of ``ql`` and one of ``qh``; the hardware reads
one sub-block a cycle because of this.
"""

BLOCK_WEIGHTS = 256
SUB_BLOCK_WEIGHTS = 16
SUB_BLOCKS = BLOCK_WEIGHTS // SUB_BLOCK_WEIGHTS

QL_OFFSET, QL_BYTES = 0, 128
QH_OFFSET, QH_BYTES = 128, 64
SCALES_OFFSET, SCALES_BYTES = 192, 16
D_OFFSET, D_BYTES = 208, 2
BLOCK_BYTES = 210

WEIGHT_BIAS = 32
"""Subtracted from the stored 0..63, so a weight is in -32..31."""
WEIGHT_BITS = 6
SCALE_BITS = 8
