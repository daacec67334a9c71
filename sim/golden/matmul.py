"""A matrix of Q6_K rows times token vectors, exact to the last bit of Q24.40."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hw.formats import q6_k as fmt
from hw.formats.arithmetic import ERROR_OVERFLOW, ERROR_SCALE, FRACTION_BITS

from .activations import Activations
from .q6_k import decode, split_d

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class Sums(NamedTuple):
    """Row sums of every token.

    Attributes
    ----------
    values
        ``(tokens, rows)`` int64 in Q24.40.
    errors
        ``(tokens, rows)`` uint8: ``ERROR_OVERFLOW | ERROR_SCALE`` bits. A value with an error bit is void.
    """

    values: NDArray[np.int64]
    errors: NDArray[np.uint8]

    def real(self) -> NDArray[np.float64]:
        """``values * 2**-40``; raises ArithmeticError if any sum carries an error."""
        if self.errors.any():
            token, row = np.argwhere(self.errors)[0]
            raise ArithmeticError(f"token {token}, row {row}: sum is void, error bits {self.errors[token, row]}")
        return np.ldexp(self.values.astype(np.float64), -FRACTION_BITS)


def block_sums(blocks: NDArray[np.uint8], mantissas: NDArray[np.int16]) -> NDArray[np.int64]:
    """``S = sum_j scale[j] * sum_i weight[i] * activation[i]`` of every block and token.

    ``blocks`` is ``(rows, columns, 210)``, ``mantissas`` ``(tokens, columns, 256)``; the result ``(tokens, rows,
    columns)``. Exact although computed in float64: every partial sum is an integer of at most 2**35.
    """
    weights, scales, _ = decode(blocks)
    product = weights.astype(np.float64).reshape(*weights.shape[:-1], fmt.SUB_BLOCKS, -1)
    product = (product * scales[..., None]).reshape(weights.shape)
    sums = product.transpose(1, 0, 2) @ mantissas.astype(np.float64).transpose(1, 2, 0)  # (columns, rows, tokens)
    return sums.astype(np.int64).transpose(2, 1, 0)


def contribution(block_sum: int, mantissa: int, exponent: int) -> int:
    """``floor(S * m * 2**exponent + 1/2)``, in Python's unlimited integers; the definition, one value at a time."""
    product = block_sum * mantissa
    if exponent >= 0:
        return product << exponent
    return ((product << 1) + (1 << -exponent)) >> (1 - exponent)


def matmul(blocks: NDArray[np.uint8], x: Activations) -> Sums:
    """Multiply ``(rows, columns, 210)`` raw blocks by ``(tokens, columns, 256)`` activations.

    Each block adds ``floor(S * m * 2**(k + e + 40) + 1/2)`` to its row, in the order of columns; an addition that
    leaves int64 is clamped to it and sets ``ERROR_OVERFLOW``. A ``d`` that is not finite counts as zero and sets
    ``ERROR_SCALE``.
    """
    mantissa, k, finite = split_d(decode(blocks).d)
    sums = block_sums(blocks, x.mantissas)
    product = sums * mantissa  # below 2**46
    shift = k + x.exponents.astype(np.int64)[:, None, :] + FRACTION_BITS
    right = np.clip(-shift, 1, 62)  # 2**46 shifted by 48 or more rounds to 0 in any case
    left = np.clip(shift, 0, 62)
    shifted = np.where(shift < 0, (product + (1 << (right - 1))) >> right, product << left)
    values = shifted.sum(axis=-1)
    errors = np.zeros(values.shape, np.uint8)
    # Rows whose terms could leave int64 are done again, one exact addition at a time.
    magnitude = np.abs(product.astype(np.float64)) * np.exp2(np.clip(shift, -1000, 1000).astype(np.float64))
    for token, row in np.argwhere(magnitude.sum(axis=-1) >= 2.0**62):
        total = 0
        for column in range(blocks.shape[1]):
            term = contribution(
                int(sums[token, row, column]), int(mantissa[row, column]), int(shift[token, row, column])
            )
            if not INT64_MIN <= total + term <= INT64_MAX:
                errors[token, row] |= ERROR_OVERFLOW
            total = min(max(total + term, INT64_MIN), INT64_MAX)
        values[token, row] = total
    errors |= np.where(finite.all(axis=-1), 0, ERROR_SCALE).astype(np.uint8)
    return Sums(values, errors)
