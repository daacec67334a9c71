"""Integer SwiGLU against float64, and its tables against their definition.

In units of 2**-18, relative: the six products, the roundings of ``g`` and ``u`` and the entry of ``EXP_WHOLE`` cost at
most 1 each; the entry of ``EXP_PART``, not shifted up, 1.4; ``z`` rounded to 2**-16, 2; the exp series cut after its
second term with a rest of at most 2**-9, 0.5; the same for the line through a reciprocal of at least 1/2, 2; the line's
roundings, 3; ``t`` cut to 2**-18 before it, 2. Together 19.9, so below 2**-13.5 and within the contract's 2**-13.
"""

import math

import numpy as np
import pytest

from hw.formats import sigmoid
from sim.golden import swiglu

UNIT = 2.0**-40


def real(g, u, p):
    """``silu(g) * u * p`` in float64, whose own error is below 2**-48 here."""
    g = np.asarray(g) * UNIT
    return g * np.exp(-np.logaddexp(0, -g)) * (np.asarray(u) * UNIT) * (np.asarray(p) / 65536)


def check(g, u, p):
    want, got = real(g, u, p), swiglu.swiglu(g, u, p)
    assert (np.abs(got - want) <= np.maximum(2.0**-13.5 * np.abs(want), 2.0**-20)).all()
    inside = np.abs(np.asarray(g) * UNIT) < 63.9  # beyond, exp is no longer followed: below 2**-20 in any case
    assert (np.abs(got - want)[inside] <= 2.0**-13.5 * np.abs(want)[inside]).all()


@pytest.mark.parametrize("seed", range(3))
def test_random(seed):
    rng = np.random.default_rng(seed)
    size = 200_000
    g, u = (rng.standard_t(2, size) * np.exp2(rng.uniform(-30, 10, size)) for _ in range(2))
    g[: size // 2] = rng.uniform(-64, 64, size // 2)
    g, u = (np.rint(np.clip(v, -(2**22), 2**22) / UNIT).astype(np.int64) for v in (g, u))
    check(g, u, rng.integers(0, 65537, size))


def test_corners():
    edges = [0, 1, 2, 2**17, 2**18 - 1, 2**18, 2**24, 2**40, 64 * 2**40 - 1, 64 * 2**40, 2**53 + 1, 2**62, 2**63 - 1]
    edges += [2**k + d for k in range(20, 47) for d in (-1, 0, 1)]
    edges = np.array([sign * edge for edge in edges for sign in (1, -1)])
    p = np.array([0, 1, 65535, 65536])
    check(*(grid.ravel() for grid in np.meshgrid(edges, edges, p)))


def test_every_interval():
    """Around every boundary of both tables."""
    z = np.arange(64 << 8) / 256
    z = np.concatenate([z, z - 2.0**-17, z + 2.0**-17])
    t = np.arange(1, 257) / 256
    g = np.concatenate([z, -z, np.log(t), np.log(t) * (1 + 2.0**-30), np.log(t) * (1 - 2.0**-30)])
    check(np.rint(g / UNIT).astype(np.int64), np.int64(3 << 40), np.int64(65536))


def test_exponential_of_every_argument():
    """Below 1 always, also of 0, whose product of tables comes nearest; and what it should be, within 7 roundings."""
    z = np.arange(1 << 22)
    t = swiglu.exponential(z)
    assert t.exponent.max() == -18
    assert t.magnitude.min() >= 1 << 17
    real = np.exp(-z / 65536)
    assert (np.abs(np.ldexp(t.magnitude.astype(np.float64), t.exponent) / real - 1) < 7 * 2.0**-18).all()


def test_exact_cases():
    one = 1 << 40
    assert swiglu.swiglu(0, one, 65536) == 0
    assert swiglu.swiglu(one, 0, 65536) == 0
    assert swiglu.swiglu(one, one, 0) == 0
    # Far to the right the logistic function is 1 to 18 bits, less the line's last unit at most.
    assert swiglu.swiglu(40 * one, one, 65536) == pytest.approx(40, rel=2**-17)
    assert swiglu.swiglu(one, -one, 65536) == -swiglu.swiglu(one, one, 65536)
    assert swiglu.swiglu(one, one, 32768) == swiglu.swiglu(one, one, 65536) / 2


@pytest.mark.parametrize("p", [-1, 65537])
def test_rejects_weights(p):
    with pytest.raises(ValueError, match=r"router weights must be in 0\.\.65536"):
        swiglu.swiglu(1, 1, p)


def test_quantize_weight():
    assert swiglu.quantize_weight([0, 1, 0.5, 2**-17, 3 * 2**-17]).tolist() == [0, 65536, 32768, 0, 2]
    with pytest.raises(ValueError, match=r"router weights must be in 0\.\.1"):
        swiglu.quantize_weight([1.1])
    with pytest.raises(ValueError, match=r"router weights must be in 0\.\.1"):
        swiglu.quantize_weight([math.nan])


def test_tables():
    one = sigmoid.ONE
    for z, (magnitude, exponent) in enumerate(sigmoid.EXP_WHOLE):
        assert one // 2 <= magnitude < one
        assert magnitude * 2.0**exponent == pytest.approx(math.exp(-z), rel=2**-18)
    for part, value in enumerate(sigmoid.EXP_PART):
        assert abs(value - one * math.exp(-(part + 0.5) / 256)) <= 0.5 + 1e-9
    for part, (value, slope) in enumerate(zip(sigmoid.RECIPROCAL, sigmoid.RECIPROCAL_SLOPE, strict=True)):
        t = (part + 0.5) / 256
        assert abs(value - one / (1 + t)) <= 0.5 + 1e-9
        assert abs(slope - one / (1 + t) ** 2) <= 0.5 + 1e-9
    # All entries together fit one 1024-word memory of 18 bits.
    assert 64 + 256 + 257 + 257 <= 1024
