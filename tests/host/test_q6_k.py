"""Encoder ``host.q6_k`` against the ``gguf`` package's decoder, against no search, and against llama.cpp's encoder."""

import gguf
import numpy as np
import pytest

from host import q6_k
from hw.formats.q6_k import BLOCK_BYTES, BLOCK_WEIGHTS, D_OFFSET, SCALES_OFFSET
from models import compare_q6_k as comparison

SUBNORMAL = 2.0**-24  # the smallest half above zero


def decode(data):
    return gguf.dequantize(data, gguf.GGMLQuantizationType.Q6_K).astype(np.float64)


def round_trip(values):
    return decode(q6_k.quantize(values))


def on_the_grid(rng, d, blocks=4):
    """Return values that a block can hold exactly and that use the ends of both ranges."""
    levels = rng.integers(-32, 32, (blocks, 16, 16))
    levels[..., 0] = -32
    scales = rng.integers(-127, 128, (blocks, 16))
    scales[:, 3] = -128
    return (d * scales[..., None] * levels).reshape(blocks, BLOCK_WEIGHTS)


def alone(value):
    """Return how near a value must come that shares its block with nothing else."""
    # A normal d has 11 significant bits. The smallest d leaves the scale to be rounded, by up to half of it, and a
    # level of up to 32 multiplies that.
    return max(abs(value) * 2**-11, 16 * SUBNORMAL)


DISTRIBUTIONS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "laplace": lambda rng, shape: rng.laplace(size=shape),
    "student": lambda rng, shape: rng.standard_t(3, shape),
    "one-sided": lambda rng, shape: rng.exponential(size=shape),
    "sparse": lambda rng, shape: rng.normal(size=shape) * (rng.random(shape) < 0.1),
}


def test_zeros():
    data = q6_k.quantize(np.zeros(BLOCK_WEIGHTS))
    assert not decode(data).any()
    assert not data[SCALES_OFFSET:].any(), "scales and d of an empty block are zero"


@pytest.mark.parametrize("value", [1.0, -1.0, 0.37, -123.456, 1e-4, 65504.0, -2e8])
def test_constant(value):
    assert np.abs(round_trip(np.full(BLOCK_WEIGHTS, value)) - value).max() <= alone(value)


@pytest.mark.parametrize("place", [0, 15, 16, 127, 128, 255])
@pytest.mark.parametrize("value", [1.0, -1.0, 3e-5])
def test_single_spike(place, value):
    x = np.zeros(BLOCK_WEIGHTS)
    x[place] = value
    got = round_trip(x)
    assert abs(got[place] - value) <= alone(value)
    assert not np.delete(got, place).any()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("d", [1.0, 2.0**-14, SUBNORMAL, 3 * SUBNORMAL, 1.5 * 2.0**-9, 65504.0])
def test_values_on_the_grid_are_kept(seed, d):
    x = on_the_grid(np.random.default_rng(seed), d)
    assert np.array_equal(round_trip(x), x)


def test_smallest_values():
    steps = np.tile(np.arange(-32, 32) * SUBNORMAL, 4)
    assert np.array_equal(round_trip(steps), steps)
    assert not round_trip(np.full(BLOCK_WEIGHTS, SUBNORMAL / 2)).any(), "half a step rounds to zero"
    assert np.array_equal(round_trip(np.full(BLOCK_WEIGHTS, 0.51 * SUBNORMAL)), np.full(BLOCK_WEIGHTS, SUBNORMAL))
    assert not round_trip(np.full(BLOCK_WEIGHTS, 5e-324)).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_largest_values(sign):
    x = np.full(BLOCK_WEIGHTS, sign * q6_k.LARGEST)
    assert np.array_equal(round_trip(x), x)
    x[77] = np.nextafter(x[77], sign * np.inf)
    with pytest.raises(ValueError, match=r"values\[77\] = .* is beyond 268304384"):
        q6_k.quantize(x)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("exponent", [-12, -8, -4, 0, 4, 7])
def test_error_follows_the_size(seed, exponent):
    x = np.random.default_rng(seed).uniform(-1, 1, (8, BLOCK_WEIGHTS)) * 10.0**exponent
    error = np.abs(round_trip(x) - x)
    # Half a level of a grid from -32 to 31 is max/62; the scale's rounding and the clipping that the search may prefer
    # stay below as much again. Under the smallest half, half of it is the best that there is.
    assert (error.max(-1) <= np.maximum(np.abs(x).max(-1) / 31, SUBNORMAL / 2)).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_search_beats_no_search(seed, name):
    x = DISTRIBUTIONS[name](np.random.default_rng(seed), (64, 1024)).astype(np.float32)
    ours = comparison.relative_rms(comparison.decode(q6_k.quantize(x)), x)
    assert ours < 0.93 * comparison.relative_rms(comparison.without_search(x), x)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_error_is_below_llama_cpp(name):
    pytest.importorskip("xllamacpp")
    x = DISTRIBUTIONS[name](np.random.default_rng(9), (64, 1024)).astype(np.float32)
    ours, theirs = (
        comparison.relative_rms(comparison.decode(encode(x)), x) for encode in (q6_k.quantize, comparison.llama_cpp)
    )
    assert ours < theirs


def test_shapes_and_independent_blocks():
    x = np.random.default_rng(5).normal(size=(3, 2, 4 * BLOCK_WEIGHTS))
    data = q6_k.quantize(x)
    assert data.dtype == np.uint8
    assert data.shape == (3, 2, 4 * BLOCK_BYTES)
    for index in np.ndindex(3, 2, 4):
        row, block = index[:2], index[2]
        alone = q6_k.quantize(x[row][block * BLOCK_WEIGHTS :][:BLOCK_WEIGHTS])
        assert np.array_equal(alone, data[row][block * BLOCK_BYTES :][:BLOCK_BYTES])
    assert q6_k.quantize(np.zeros((0, BLOCK_WEIGHTS))).shape == (0, BLOCK_BYTES)


def test_chunks_do_not_show(monkeypatch):
    x = np.random.default_rng(6).normal(size=(10, BLOCK_WEIGHTS))
    whole = q6_k.quantize(x)
    monkeypatch.setattr(q6_k, "CHUNK_BLOCKS", 3)
    assert np.array_equal(q6_k.quantize(x), whole)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8, np.int64, np.uint16])
def test_other_number_types(dtype):
    x = np.random.default_rng(7).integers(0, 100, BLOCK_WEIGHTS).astype(dtype)
    assert np.array_equal(q6_k.quantize(x), q6_k.quantize(x.astype(np.float64)))


@pytest.mark.parametrize("seed", range(2))
def test_d_is_finite_and_scales_are_used(seed):
    data = q6_k.quantize(np.random.default_rng(seed).normal(size=(200, BLOCK_WEIGHTS)) * 10.0**seed)
    assert np.isfinite(data[:, D_OFFSET:].copy().view("<f2")).all()
    scales = np.abs(data[:, SCALES_OFFSET:D_OFFSET].view(np.int8).astype(int)).max(-1)
    assert scales.min() > 90, "d is chosen so that the largest scale is near its limit"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(value):
    x = np.zeros((2, 3, BLOCK_WEIGHTS), np.float32)
    x[1, 2, 40] = value
    with pytest.raises(ValueError, match=r"values\[1, 2, 40\] = .* is not finite"):
        q6_k.quantize(x)


@pytest.mark.parametrize("shape", [(), (0,), (255,), (2, 257), (256, 3)])
def test_rejected_shapes(shape):
    with pytest.raises(ValueError, match="the last axis must be a positive multiple of 256"):
        q6_k.quantize(np.zeros(shape))


@pytest.mark.parametrize("dtype", [np.complex128, np.bool_, object, "U1"])
def test_rejected_types(dtype):
    with pytest.raises(TypeError, match="values must be real numbers"):
        q6_k.quantize(np.zeros(BLOCK_WEIGHTS, dtype))
