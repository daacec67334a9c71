"""Raw Q6_K blocks and activations for tests, corners first."""

import numpy as np
from numpy.typing import NDArray

from sim.golden import activations


def block(weight: int, scale: int, d: float | int) -> NDArray[np.uint8]:
    """A block with 256 equal weights (-32..31), 16 equal scales and ``d`` (a float, or the bits of a half)."""
    q = weight + 32
    half = np.float16(d).view(np.uint16) if isinstance(d, float) else np.uint16(d)
    low, high = q & 15, q >> 4
    data = [low | low << 4] * 128 + [high * 0b01010101] * 64 + [scale & 0xFF] * 16 + [int(half) & 0xFF, int(half) >> 8]
    return np.array(data, np.uint8)


def heavy_tailed(rng: np.random.Generator, *shape: int) -> NDArray[np.float64]:
    """Student's t with 2.5 degrees of freedom: a few values far above the rest, as in real hidden states."""
    return rng.standard_t(2.5, shape)


def load_words(x: activations.Activations) -> list[dict]:
    """The load stream's payloads for token vectors ``(tokens, columns, 256)``."""
    return [
        {
            "values": x.mantissas[token, column, 8 * word :][:8].tolist(),
            "exponent": int(x.exponents[token, column]),
            "word": word,
            "column": column,
            "token": token,
        }
        for token in range(x.mantissas.shape[0])
        for column in range(x.mantissas.shape[1])
        for word in range(32)
    ]
