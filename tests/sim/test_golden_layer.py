"""The golden layer against float64 and its own words: a formula that is wrong here would be wrong in hardware, too."""

from dataclasses import replace

import numpy as np
import pytest

from hw.formats.arithmetic import ERROR_OVERFLOW, ERROR_SCALE, FRACTION_BITS
from hw.formats.messages import Layer, Mode
from hw.formats.q6_k import D_OFFSET
from sim.golden import activations, q6_k
from sim.golden import layer as golden
from sim.golden.layer import Route
from sim.workload import random_blocks, silu

WIDTH, EXPERT_WIDTH, EXPERTS = 512, 256, 3
LAYER = Layer(WIDTH, EXPERT_WIDTH, EXPERTS, (3 * 107_520 * 2, 0, 3 * 107_520))
"""The file holds the gate matrices first, then down, then up."""


@pytest.fixture(scope="module")
def file():
    return random_blocks(np.random.default_rng(0), 3 * EXPERTS * 512, d=3e-5).reshape(-1)


def reader(file):
    return lambda offset, length: file[offset:][:length]


def matrix(file, number: int, expert: int, rows: int):
    """Expert's matrix of the tensor that lies ``number``-th in the file, in float64."""
    size = LAYER.matrix_bytes
    start = (number * EXPERTS + expert) * size
    return q6_k.dequantize(file[start : start + size].reshape(-1, 210)).reshape(rows, -1)


def test_against_float64(file):
    rng = np.random.default_rng(1)
    x = rng.standard_t(3, (2, WIDTH))
    routes = [Route(0, 2, 65536), Route(1, 0, 20000), Route(0, 0, 45536), Route(1, 1, 0)]
    y, errors = golden.run(LAYER, reader(file), activations.quantize(x), routes)
    want = np.zeros((2, WIDTH))
    for token, expert, weight in routes:
        gate = matrix(file, 0, expert, EXPERT_WIDTH) @ x[token]
        up = matrix(file, 2, expert, EXPERT_WIDTH) @ x[token]
        want[token] += matrix(file, 1, expert, WIDTH) @ (silu(gate) * up) * weight / 65536
    assert errors == 0
    error = np.ldexp(y.astype(np.float64), -FRACTION_BITS) - want
    assert np.sqrt(np.mean(error**2) / np.mean(want**2)) < 3e-4


def test_the_order_of_routes_does_not_matter(file):
    rng = np.random.default_rng(2)
    x = activations.quantize(rng.standard_t(3, (4, WIDTH)))
    routes = [Route(token, expert, int(rng.integers(65537))) for token in range(4) for expert in range(EXPERTS)]
    y, _ = golden.run(LAYER, reader(file), x, routes)
    shuffled = [routes[n] for n in rng.permutation(len(routes))]
    np.testing.assert_array_equal(golden.run(LAYER, reader(file), x, shuffled)[0], y)


def test_requests():
    size = LAYER.matrix_bytes
    up, gate, down = LAYER.offsets
    routes = [Route(0, 2, 1), Route(1, 0, 1), Route(2, 2, 1)]
    assert golden.requests(LAYER, routes) == [
        (up, size),
        (gate, size),
        (down, size),
        (up + 2 * size, size),
        (gate + 2 * size, size),
        (down + 2 * size, size),
    ]
    tape = replace(LAYER, mode=Mode.TAPE)
    assert len(golden.requests(tape, [])) == 9
    assert golden.requests(LAYER, []) == []


def test_errors(file):
    x = activations.quantize(np.random.default_rng(3).standard_t(3, (1, WIDTH)))
    bad = file.copy()
    bad[D_OFFSET : D_OFFSET + 2] = [0, 0x7C]  # the first block of expert 0's gate matrix
    assert golden.run(LAYER, reader(bad), x, [Route(0, 0, 1)])[1] == ERROR_SCALE
    assert golden.run(LAYER, reader(bad), x, [Route(0, 1, 1)])[1] == 0
    large = activations.Activations(x.mantissas, np.full_like(x.exponents, 20))
    assert golden.run(LAYER, reader(file), large, [Route(0, 0, 65536)])[1] & ERROR_OVERFLOW
