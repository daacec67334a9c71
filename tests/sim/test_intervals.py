"""The widths of the hardware are those that interval arithmetic derives, and a constructed case reaches each bound."""

import re

import numpy as np
import pytest
from amaranth.back import rtlil  # pyright: ignore[reportAttributeAccessIssue] the stubs lack it

from hw.accumulate import Accumulate
from hw.formats import arithmetic
from hw.formats.params import Params
from hw.mac import Mac
from sim.golden import activations, intervals, matmul, q6_k
from sim.golden.intervals import STEPS, Interval, signed
from tests.hw.blocks import block
from tests.hw.test_accumulate import results, run_rows, tag
from tests.hw.test_mac import run_mac

PARAMS = Params(max_batch=1)


@pytest.mark.parametrize("seed", range(3))
def test_interval_arithmetic(seed):
    """Against every value of small intervals."""
    rng = np.random.default_rng(seed)
    for _ in range(20):
        a, b = (Interval(*sorted(rng.integers(-9, 10, 2).tolist())) for _ in range(2))
        in_a, in_b = range(a.low, a.high + 1), range(b.low, b.high + 1)
        sums, products = [x + y for x in in_a for y in in_b], [x * y for x in in_a for y in in_b]
        assert a + b == Interval(min(sums), max(sums))
        assert a * b == Interval(min(products), max(products))
        assert a.times(5) == Interval(5 * a.low, 5 * a.high)
        shifted = [x << s for x in in_a for s in range(4)]
        assert a.shifted(Interval(0, 3)) == Interval(min(shifted), max(shifted))


def test_bits():
    assert [Interval(low, high).bits for low, high in ((0, 0), (-1, 0), (0, 1), (-2, 1), (0, 127), (-129, 0))] == [
        *(1, 1, 2, 2, 8, 9)
    ]
    assert all(signed(bits).bits == bits for bits in range(1, 70))
    with pytest.raises(ValueError, match="1 > 0"):
        Interval(1, 0)


def test_the_contract_has_these_widths():
    assert STEPS["weight x scale"].bits == arithmetic.PRODUCT_BITS
    assert STEPS["block sum, 256"].bits == arithmetic.BLOCK_SUM_BITS
    assert STEPS["mantissa of d"].bits == arithmetic.MANTISSA_BITS
    assert STEPS["contribution, unclamped"].bits > arithmetic.ACCUMULATOR_BITS  # or ERROR_OVERFLOW had no reason


def widths(component, *names: str) -> list[int]:
    """Of the signals with these names in the hardware as it is written out, ascending."""
    text = rtlil.convert(component, name="component")
    found = re.findall(r"wire width (\d+)(?: signed)? \\([\w$]+)", text)
    return sorted({int(width) for width, name in found if name.split("$")[0] in names})


def test_the_gateware_has_these_widths():
    mac = Mac(PARAMS)
    assert widths(mac, *(f"product{i}" for i in range(16))) == [intervals.PRODUCT.bits]
    levels = [intervals.TERM.times(1 << level).bits for level in range(1, 5)]
    assert widths(mac, "tree0") == levels
    assert levels[-1] == intervals.SUB_BLOCK_SUM.bits
    assert widths(mac, "total0") == [intervals.BLOCK_SUM.bits]
    accumulate = Accumulate(PARAMS)
    assert widths(accumulate, "factor") == [intervals.FACTOR.bits]
    assert max(widths(accumulate, "product")) == intervals.SCALED_SUM.bits
    assert widths(accumulate, "shift")[0] >= intervals.SHIFT.bits


@pytest.mark.parametrize(("scale", "value", "bound"), [(-128, -32768, "low"), (-128, 32767, "high")])
def test_block_sums_reach_their_bound(scale, value, bound):
    """In golden and in the multipliers: every product at its limit, with the limit of its sign."""
    worst = block(-32, scale, 1.0)
    decoded = q6_k.decode(worst)
    assert int(decoded.weights[0]) * int(decoded.scales[0]) == intervals.PRODUCT.high
    x = activations.Activations(np.full((1, 1, 256), value, np.int16), np.zeros((1, 1), np.int8))
    want = getattr(intervals.BLOCK_SUM, bound)
    assert matmul.block_sums(worst[None, None], x.mantissas)[0, 0, 0] == want
    got = run_mac(PARAMS, x, [worst], [(0, 0)], rng=np.random.default_rng(0))
    assert list(got.payloads[0][0].sums) == [want]


def test_products_reach_their_lower_bound():
    decoded = q6_k.decode(block(-32, 127, 1.0))
    assert int(decoded.weights[0]) * int(decoded.scales[0]) == intervals.PRODUCT.low


@pytest.mark.parametrize(("mantissa", "bound"), [(-2047, "high"), (2047, "low")])
def test_scaled_sums_reach_their_bound(mantissa, bound):
    """The largest block sum times the largest mantissa, moved by all that the factor takes: k + e + 40 = 3."""
    want, total = getattr(intervals.SCALED_SUM, bound), intervals.BLOCK_SUM.low
    assert matmul.contribution(total, mantissa, 3) == want
    got = run_rows(
        PARAMS, np.array([[-37]]), [{"sums": [total], "tag": tag(mantissa, 0)}], rng=np.random.default_rng(0)
    )
    assert [(row.value, row.error) for row in results(got)] == [(want, 0)]


@pytest.mark.parametrize("exponents", [(arithmetic.D_EXPONENT_MIN, -128), (arithmetic.D_EXPONENT_MAX, 127)])
def test_shifts_reach_their_bound(exponents):
    assert sum(exponents) + arithmetic.FRACTION_BITS in (intervals.SHIFT.low, intervals.SHIFT.high)
