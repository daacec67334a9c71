import numpy as np
from amaranth.sim import Simulator

from hw.formats.arithmetic import ACCUMULATOR_BITS, FRACTION_BITS
from hw.formats.sigmoid import ONE, SIGNIFICANT_BITS
from hw.normalise import ARGUMENT_BITS, Normalise
from sim.golden import swiglu

MIN, MAX = -(1 << ACCUMULATOR_BITS - 1), (1 << ACCUMULATOR_BITS - 1) - 1


def corners() -> list[int]:
    values = [0, MIN, MAX, MIN + 1]
    for k in range(ACCUMULATOR_BITS - 1):
        values += [(1 << k) + d for d in (-1, 0, 1)]
    for shift in range(ACCUMULATOR_BITS - 1 - SIGNIFICANT_BITS):  # what lies around a half, and a carry to a 19th bit
        half = 1 << shift >> 1
        for top in (ONE - 1, ONE - 2, ONE // 2, ONE // 2 + 1):
            values += [(top << shift) + half + d for d in (-1, 0, 1)]
    for z in (1, 2, 1 << 16, 63 << 16, (64 << 16) - 2, (64 << 16) - 1, 64 << 16):  # the same for the argument
        values += [(z << 24) + (1 << 23) + d for d in (-1, 0, 1)]
    return [sign * value for value in values for sign in (1, -1) if MIN <= sign * value <= MAX]


def golden(values: list[int]) -> list[tuple]:
    """(magnitude, exponent, negative, argument) of each; the exponent of zero is void."""
    rounded = swiglu._round_to_18_bits(swiglu._magnitude(np.array(values, np.int64)), -FRACTION_BITS)
    arguments = [min((abs(value) + (1 << 23)) >> 24, (1 << ARGUMENT_BITS) - 1) for value in values]
    return [
        (magnitude, exponent if value else None, int(value < 0), argument)
        for value, magnitude, exponent, argument in zip(values, *(v.tolist() for v in rounded), arguments, strict=True)
    ]


def run(values: list[int]) -> list[tuple]:
    """What is there ``LATENCY`` cycles after each value, a new one every cycle."""
    dut = Normalise()
    got = []

    async def bench(ctx):
        for value in values + [0] * Normalise.LATENCY:
            ctx.set(dut.value, value)
            await ctx.tick()
            scaled = ctx.get(dut.scaled)
            got.append((scaled.magnitude, scaled.exponent, scaled.negative, ctx.get(dut.argument)))

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
    return [
        (magnitude, exponent if value else None, negative, argument)
        for value, (magnitude, exponent, negative, argument) in zip(values, got[Normalise.LATENCY - 1 :], strict=False)
    ]


def test_normalise():
    rng = np.random.default_rng(0)
    values = corners() + (rng.integers(MIN, MAX, 1000, endpoint=True) >> rng.integers(0, 63, 1000)).tolist()
    got, want = run(values), golden(values)
    assert [(v, g, w) for v, g, w in zip(values, got, want, strict=True) if g != w] == []
