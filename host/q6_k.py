"""Encode real numbers as GGML ``Q6_K``; the layout is in ``hw.formats.q6_k``, the decoder in ``sim.golden``.

A block holds three nested numbers per weight, ``d * scale * level``, and all three are rounded. So each is chosen by
what the decoder will make of it: levels are rounded against the scale as stored, scales against ``d`` as stored.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hw.formats.q6_k import (
    BLOCK_BYTES,
    BLOCK_WEIGHTS,
    D_BYTES,
    D_OFFSET,
    QH_BYTES,
    QH_OFFSET,
    QL_BYTES,
    QL_OFFSET,
    SCALE_BITS,
    SCALES_BYTES,
    SCALES_OFFSET,
    SUB_BLOCK_WEIGHTS,
    SUB_BLOCKS,
    WEIGHT_BIAS,
    WEIGHT_BITS,
)

Floats = NDArray[np.float64]

LEVEL_MIN, LEVEL_MAX = -WEIGHT_BIAS, 2**WEIGHT_BITS - 1 - WEIGHT_BIAS
SCALE_MIN, SCALE_MAX = -(2 ** (SCALE_BITS - 1)), 2 ** (SCALE_BITS - 1) - 1
D_MAX = float(np.finfo(np.float16).max)
D_MIN = float(np.finfo(np.float16).smallest_subnormal)

LARGEST = np.float64(D_MAX * SCALE_MIN * LEVEL_MIN)
"""Largest magnitude that a block can hold, 268304384; beyond it ``quantize`` refuses."""

CHUNK_BLOCKS = 1024
"""Blocks worked on at once: a float64 copy of them is 2 MiB and stays near the core."""

_PEAK_LEVELS = np.concatenate([sign * np.arange(24.0, 35.0, 0.25) for sign in (-1, 1)])
"""Levels tried for a sub-block's largest weight. Beyond the limits it is clipped to bring the others nearer; well
inside them the grid is wider than needed. Both signs, because the levels reach one further down than up."""

_PEAK_SCALES = np.concatenate([np.arange(SCALE_MIN, -96.0), np.arange(97.0, SCALE_MAX + 1.0)])
"""Integer scales tried for a block's largest sub-block scale; the smaller it is, the coarser are the others."""

_TRIED_IN_FULL = 3
"""Values of ``d`` whose error is computed weight by weight, out of all that ``_PEAK_SCALES`` gives."""

_REFINEMENTS = 3
"""Rounds of refitting ``d`` and scales; later ones change few blocks."""


def quantize(values: ArrayLike) -> NDArray[np.uint8]:
    """Encode ``values`` (..., n * 256) as Q6_K blocks (..., n * 210).

    Blocks are runs of 256 along the last axis. Within a block the squared error of the decoded values is searched for
    a minimum; the result is a good one, not proven the best. It depends on the values alone (no randomness, no state,
    each block by itself), and a block whose weights all round to zero is coded with ``d`` and scales of zero.

    Raises ``TypeError`` for values that are not real numbers, and ``ValueError`` for a last axis that is no positive
    multiple of 256 and for a value that is not finite or beyond ``LARGEST``; both name the first offender's index.
    """
    given = np.asarray(values)
    if given.dtype.kind not in "fiu":
        raise TypeError(f"values must be real numbers, not {given.dtype}")
    if given.ndim == 0 or given.shape[-1] == 0 or given.shape[-1] % BLOCK_WEIGHTS:
        raise ValueError(f"the last axis must be a positive multiple of {BLOCK_WEIGHTS}, the shape is {given.shape}")
    _refuse(given, ~np.isfinite(given), "is not finite")
    _refuse(given, (given > LARGEST) | (given < -LARGEST), f"is beyond {LARGEST:.0f}, the largest that Q6_K holds")

    blocks = given.reshape(-1, SUB_BLOCKS, SUB_BLOCK_WEIGHTS)
    out = np.empty((len(blocks), BLOCK_BYTES), np.uint8)
    for start in range(0, len(blocks), CHUNK_BLOCKS):
        part = slice(start, start + CHUNK_BLOCKS)
        out[part] = _pack(*_search(blocks[part].astype(np.float64)))
    return out.reshape(*given.shape[:-1], given.shape[-1] // BLOCK_WEIGHTS * BLOCK_BYTES)


def _refuse(values: NDArray, bad: NDArray[np.bool_], why: str) -> None:
    if bad.any():
        index = tuple(int(i) for i in np.unravel_index(np.argmax(bad), bad.shape))
        raise ValueError(f"values[{', '.join(map(str, index))}] = {values[index]} {why}")


def _levels(x: Floats, step: Floats) -> Floats:
    """Round ``x`` (..., 16) to levels of ``step`` (...); a step of zero gives level zero."""
    inverse = np.divide(1.0, step, out=np.zeros_like(step), where=step != 0)
    return np.clip(np.rint(x * inverse[..., None]), LEVEL_MIN, LEVEL_MAX)


def _errors(x: Floats, step: Floats) -> Floats:
    """Squared error of each sub-block (...) when ``x`` (..., 16) is rounded to levels of ``step`` (...)."""
    return np.square(x - step[..., None] * _levels(x, step)).sum(-1)


def _ideal_steps(x: Floats) -> tuple[Floats, Floats]:
    """Return each sub-block's best real step and the sum of its squared levels, which weighs an error of the step.

    For fixed levels ``l`` the best step is ``x.l / l.l`` and it removes ``(x.l)**2 / l.l`` of the squared sum.
    """
    peak = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)[..., 0]
    steps, weights, removed = np.zeros_like(peak), np.zeros_like(peak), np.zeros_like(peak)
    for level in _PEAK_LEVELS:
        levels = _levels(x, peak / level)
        along, square = (x * levels).sum(-1), np.square(levels).sum(-1)
        step = np.divide(along, square, out=np.zeros_like(along), where=square > 0)
        better = along * step > removed
        removed = np.where(better, along * step, removed)
        steps, weights = np.where(better, step, steps), np.where(better, square, weights)
    return steps, weights


def _half(d: Floats) -> Floats:
    """Round to the nearest half that is neither zero nor infinite, keeping the sign."""
    return np.copysign(np.clip(np.abs(d), D_MIN, D_MAX), d).astype(np.float16).astype(np.float64)


def _scales(steps: Floats, d: Floats) -> Floats:
    return np.clip(np.rint(steps / d[..., None]), SCALE_MIN, SCALE_MAX)


def _search(x: Floats) -> tuple[Floats, Floats, Floats]:
    """Return ``d`` (blocks), scales (blocks, 16) and levels (blocks, 16, 16) for ``x`` (blocks, 16, 16)."""
    # Half of the smallest magnitude that can be coded, or less, rounds to zero; this also keeps squares from underflow.
    x = np.where(np.abs(x) > D_MIN / 2, x, 0.0)
    steps, weights = _ideal_steps(x)
    peak = np.take_along_axis(steps, np.abs(steps).argmax(-1, keepdims=True), -1)[..., 0]

    candidates = _half(peak[None, :] / _PEAK_SCALES[:, None])
    estimates = np.stack([(weights * np.square(steps - d[:, None] * _scales(steps, d))).sum(-1) for d in candidates])
    best = candidates[np.argsort(estimates, axis=0, kind="stable")[:_TRIED_IN_FULL], np.arange(len(x))]

    d, scales, error = np.zeros(len(x)), np.zeros_like(steps), np.square(x).sum((-2, -1))
    for trial in best:
        trial_scales = _nearby_scales(x, trial, _scales(steps, trial))
        d, scales, error = _keep_better(x, (d, scales, error), (trial, trial_scales))
    for _ in range(_REFINEMENTS):
        grid = scales[..., None] * _levels(x, d[:, None] * scales)
        along, square = (grid * x).sum((-2, -1)), np.square(grid).sum((-2, -1))
        refit = _half(np.divide(along, square, out=d.copy(), where=square > 0))
        d, scales, error = _keep_better(x, (d, scales, error), (refit, _nearby_scales(x, refit, scales)))

    levels = _levels(x, d[:, None] * scales)
    zero = np.all(levels == 0, axis=(-2, -1))
    return np.where(zero, 0.0, d), np.where(zero[:, None], 0.0, scales), levels


def _nearby_scales(x: Floats, d: Floats, scales: Floats) -> Floats:
    """Move each scale by one or not at all, whichever gives the smallest error with ``d`` as it is."""
    tried = np.clip(scales[..., None] + np.array([0.0, -1.0, 1.0]), SCALE_MIN, SCALE_MAX)
    errors = np.stack([_errors(x, d[:, None] * tried[..., i]) for i in range(tried.shape[-1])], axis=-1)
    return np.take_along_axis(tried, errors.argmin(-1, keepdims=True), -1)[..., 0]


def _keep_better(
    x: Floats, held: tuple[Floats, Floats, Floats], trial: tuple[Floats, Floats]
) -> tuple[Floats, Floats, Floats]:
    """Return (d, scales, error) per block: the trial's where its error is smaller, else those held."""
    error = _errors(x, trial[0][:, None] * trial[1]).sum(-1)
    better = error < held[2]
    return (
        np.where(better, trial[0], held[0]),
        np.where(better[:, None], trial[1], held[1]),
        np.where(better, error, held[2]),
    )


def _pack(d: Floats, scales: Floats, levels: Floats) -> NDArray[np.uint8]:
    """Lay blocks out in bytes (blocks, 210)."""
    # Axes: block, half, run of 32 weights, weight in the run. Runs 0 and 1 take the low nibbles of `ql`, 2 and 3 the
    # high ones; run r takes the bits 2r, 2r+1 of `qh`.
    q = (levels + WEIGHT_BIAS).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = q & 15, q >> 4
    top = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    out = np.empty((len(d), BLOCK_BYTES), np.uint8)
    out[:, QL_OFFSET : QL_OFFSET + QL_BYTES] = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, QL_BYTES)
    out[:, QH_OFFSET : QH_OFFSET + QH_BYTES] = top.reshape(-1, QH_BYTES)
    out[:, SCALES_OFFSET : SCALES_OFFSET + SCALES_BYTES] = scales.astype(np.int8).view(np.uint8)
    out[:, D_OFFSET : D_OFFSET + D_BYTES] = d.astype("<f2")[:, None].view(np.uint8)
    return out
