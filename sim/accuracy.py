"""How far the arithmetic is from float64: a table for token vectors with ever heavier tails.

``python -m sim.accuracy [--record]`` multiplies a 1024 x 512 Q6_K matrix by vectors drawn from several distributions,
once with the golden model's int16 blocks and once with llama.cpp's ``Q8_K`` activations, and prints both errors
relative to the float64 product of the same dequantised weights. Writes ``build/sim/accuracy.json``, or
``sim/results/accuracy.json``.
"""

import argparse

import numpy as np
from numpy.typing import NDArray

from hw.formats.q6_k import BLOCK_WEIGHTS
from sim import record
from sim.golden import activations, q6_k
from sim.golden.matmul import matmul
from sim.workload import random_blocks

WIDTH, ROWS, VECTORS, SEEDS = 1024, 512, 8, 20
DISTRIBUTIONS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "Laplace": lambda rng, shape: rng.laplace(size=shape),
    "Student t, 4 degrees": lambda rng, shape: rng.standard_t(4, shape),
    "Student t, 3 degrees": lambda rng, shape: rng.standard_t(3, shape),
    "Student t, 2.5 degrees": lambda rng, shape: rng.standard_t(2.5, shape),
    "Student t, 2 degrees": lambda rng, shape: rng.standard_t(2, shape),
}


def q8_k(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Vectors as llama.cpp's ``Q8_K`` holds them: per 256, ``d = -m / 127`` with ``m`` the element of largest
    magnitude, and ``round(x / d)`` in -127..127."""
    blocks = x.reshape(*x.shape[:-1], -1, 256)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
    d = np.where(peak == 0, 1, -peak / 127)
    return (np.clip(np.rint(blocks / d), -127, 127) * d).reshape(x.shape)


def relative_rms(got: NDArray[np.float64], want: NDArray[np.float64]) -> float:
    """Root mean square of the error over that of the wanted values, all of them together."""
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def errors(distribution: str) -> tuple[float, float]:
    """Mean over ``SEEDS`` matrices of the relative RMS error: (int16 blocks, Q8_K)."""
    ours, theirs = [], []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        blocks = random_blocks(rng, ROWS, WIDTH // BLOCK_WEIGHTS)
        weights = q6_k.dequantize(blocks).reshape(ROWS, WIDTH)
        x = DISTRIBUTIONS[distribution](rng, (VECTORS, WIDTH))
        exact = x @ weights.T
        ours.append(relative_rms(matmul(blocks, activations.quantize(x)).real(), exact))
        theirs.append(relative_rms(q8_k(x) @ weights.T, exact))
    return float(np.mean(ours)), float(np.mean(theirs))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sim.accuracy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write sim/results/accuracy.json")
    args = parser.parse_args(argv)
    print(f"Relative RMS error of a {WIDTH} x {ROWS} product against float64, mean of {SEEDS} seeded matrices with")
    print(f"{VECTORS} vectors each (measured, NumPy golden model)\n")
    print(f"{'activations drawn from':<26}{'int16 blocks (ours)':>22}{'Q8_K (llama.cpp)':>20}{'ratio':>8}")
    table = {}
    for name in DISTRIBUTIONS:
        ours, theirs = errors(name)
        table[name] = {"int16_blocks": ours, "q8_k": theirs}
        print(f"{name:<26}{ours:>22.2e}{theirs:>20.2e}{theirs / ours:>8.0f}", flush=True)
    sizes = {"width": WIDTH, "rows": ROWS, "vectors": VECTORS, "seeds": SEEDS}
    report = sizes | {"errors": table, "provenance": "measured: NumPy golden model against float64"}
    print(f"\nwritten to {record.write('accuracy', 'make accuracy RECORD=1', report, record=args.record)}")


if __name__ == "__main__":
    main()
