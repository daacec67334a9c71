"""Elements of the vectors between an expert's matrices for tests: integers and floats to struct payloads and back."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hw.formats.arithmetic import FRACTION_BITS
from hw.formats.params import Params
from hw.formats.sigmoid import SIGNIFICANT_BITS
from sim.golden import activations, swiglu


def scaled(values: Sequence[int]) -> list[dict]:
    """Q24.40 values as ``SCALED``."""
    signed = np.array(values, np.int64)
    magnitude, exponent = swiglu._round_to_18_bits(swiglu._magnitude(signed), -FRACTION_BITS)
    return _structs(magnitude, exponent, negative=signed < 0)


def scaled_float(values: NDArray[np.float64]) -> list[dict]:
    """Floats of at most 18 significant bits as ``SCALED``."""
    fraction, power = np.frexp(np.abs(values))
    magnitude = np.ldexp(fraction, SIGNIFICANT_BITS)
    assert (magnitude == np.rint(magnitude)).all()
    return _structs(magnitude.astype(np.int64), power.astype(np.int64) - SIGNIFICANT_BITS, negative=values < 0)


def router_weights(p: Sequence[int]) -> list[dict]:
    """Weights in Q1.16 as ``ROUTER_WEIGHT``."""
    return _structs(*swiglu._round_to_18_bits(np.array(p, np.int64), -swiglu.WEIGHT_FRACTION_BITS))


def real(value) -> float:
    """The exact value of a ``SCALED`` that came out."""
    return float(np.ldexp(-value.magnitude if value.negative else value.magnitude, value.exponent))


def hidden_words(params: Params, tokens: Sequence[int], h: NDArray[np.float64]) -> list[tuple]:
    """The words that blocks of ``h`` (tokens, rows) become, as :func:`as_tuple`, in their order."""
    x = activations.quantize(h)
    return [
        (
            tuple(x.mantissas[n, column, 8 * word :][:8].tolist()),
            int(x.exponents[n, column]),
            word,
            params.max_columns + column,
            token,
        )
        for column in range(x.exponents.shape[1])
        for n, token in enumerate(tokens)
        for word in range(32)
    ]


def as_tuple(word) -> tuple:
    """Values, exponent, word, column and token of an ``activation_word``."""
    return tuple(word["values"]), word.exponent, word.word, word.column, word.token


def _structs(magnitude, exponent, **fields) -> list[dict]:
    columns = {"magnitude": magnitude, "exponent": exponent} | fields
    return [dict(zip(columns, map(int, row), strict=True)) for row in zip(*columns.values(), strict=True)]
