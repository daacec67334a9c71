"""A mixture-of-experts layer: which bytes it needs, and what it gives."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hw.formats.arithmetic import ERROR_OVERFLOW
from hw.formats.messages import Layer, Mode

from .activations import Activations, quantize
from .matmul import INT64_MAX, INT64_MIN, matmul
from .swiglu import swiglu


class Route(NamedTuple):
    """A token's wish for an expert; ``weight`` is unsigned Q1.16."""

    token: int
    expert: int
    weight: int


def requests(layer: Layer, routes: list[Route]) -> list[tuple[int, int]]:
    """The (offset, length) of every matrix that passes: up, gate and down of each expert, experts ascending.

    In selected mode an expert passes if a token wants it, in tape mode always.
    """
    wanted = {route.expert for route in routes}
    size = layer.matrix_bytes
    return [
        (offset + expert * size, size)
        for expert in range(layer.experts)
        if layer.mode == Mode.TAPE or expert in wanted
        for offset in layer.offsets
    ]


def run(
    layer: Layer,
    read: Callable[[int, int], NDArray[np.uint8]],
    x: Activations,
    routes: list[Route],
) -> tuple[NDArray[np.int64], int]:
    """``y[token] = sum over its experts of down(silu(gate(x)) * up(x) * weight)`` in Q24.40, and the error bits.

    ``read(offset, length)`` gives bytes of the model file; ``x`` holds ``(batch, width / 256, 256)`` mantissas. Each
    addition of an expert's rows is exact, then clamped to int64, which is an error, as any void sum on the way is: the
    result is void then. ``(batch, width)`` int64.
    """
    y = np.zeros((x.mantissas.shape[0], layer.width), np.int64)
    errors = 0
    for expert in sorted({route.expert for route in routes}):
        matrices = [read(offset + expert * layer.matrix_bytes, layer.matrix_bytes) for offset in layer.offsets]
        errors |= add_expert(y, layer, matrices, x, [route for route in routes if route.expert == expert])
    return y, errors


def add_expert(
    y: NDArray[np.int64], layer: Layer, matrices: Sequence[NDArray[np.uint8]], x: Activations, routes: list[Route]
) -> int:
    """Add to ``y`` what one expert gives the tokens that want it, which are in ``routes``; the error bits.

    ``matrices`` are its up, gate and down matrix as they lie in the model file.
    """
    here = sorted(routes)
    tokens = [route.token for route in here]
    shapes = [(layer.expert_width, layer.width)] * 2 + [(layer.width, layer.expert_width)]
    up, gate, down = (
        matrix.reshape(rows, columns // 256, 210) for matrix, (rows, columns) in zip(matrices, shapes, strict=True)
    )
    mine = Activations(x.mantissas[tokens], x.exponents[tokens])
    u, g = matmul(up, mine), matmul(gate, mine)
    p = np.array([[route.weight] for route in here])
    out = matmul(down, quantize(swiglu(g.values, u.values, p)))
    errors = 0
    for sums in (u, g, out):
        errors |= int(np.bitwise_or.reduce(sums.errors, axis=None))
    before = y[tokens]
    after = before + out.values  # wraps where it leaves int64
    left = ((before ^ after) & (out.values ^ after)) < 0
    y[tokens] = np.where(left, np.where(before < 0, INT64_MIN, INT64_MAX), after)
    return errors | (ERROR_OVERFLOW if left.any() else 0)
