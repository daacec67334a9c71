"""Bytes over two wires: every value, any clock ratio, clocks that differ, broken lines."""

from fractions import Fraction

import numpy as np
import pytest
from amaranth.hdl import Module
from amaranth.sim import Simulator

from hw.link.uart import BITS, MIN_CLOCKS, Uart

from ..streams import STALLS

CLOCK_HZ = 100_000_000


def levels(data, period: Fraction, *, idle: int = 3) -> list[int]:
    """The line in every clock: bytes one after another, each edge at the clock in or after which it falls."""
    bits = [1] * idle + [bit for byte in data for bit in (0, *(byte >> n & 1 for n in range(8)), 1)] + [1] * 3
    return [bits[int(Fraction(n) / period)] for n in range(int(len(bits) * period))]


def listen(line: list[int], period: Fraction, *, take=lambda: True) -> list[int]:
    """What a ``Uart`` of 100 MHz and ``period`` clocks a bit hears on the line."""
    dut = Uart(period.numerator * 1000, period.denominator * 1000)
    heard = []

    async def drive(ctx) -> None:
        for level in line:
            ctx.set(dut.rx, level)
            ready = take()
            ctx.set(dut.o.ready, ready)
            _, _, valid, byte = await ctx.tick().sample(dut.o.valid, dut.o.payload[0])
            if valid and ready:
                heard.append(byte)

    simulate(dut, drive)
    return heard


def simulate(dut, *benches) -> None:
    top = Module()
    top.submodules.dut = dut
    sim = Simulator(top)
    sim.add_clock(1e-8)
    for bench in benches:
        sim.add_testbench(bench)
    sim.run()


@pytest.mark.parametrize("period", [Fraction(4), Fraction(8), Fraction(25, 3), Fraction(100, 3), Fraction(347, 8)])
def test_hears(period):
    data = [*range(0, 256, 5), 0, 255, 85, 170]
    assert listen(levels(data, period), period) == data


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("period", [Fraction(8), Fraction(100, 3)])
def test_hears_clocks_that_differ(period, sign):
    """As far apart as the docstring's bound allows."""
    apart = (Fraction(1, 2) - Fraction(3, 2) / period) / Fraction(19, 2)
    data = [*range(0, 256, 5), 0, 255, 85, 170]
    assert listen(levels(data, period * (1 + sign * apart)), period) == data


def test_hears_nothing_of_broken_bytes():
    """No stop bit: the byte is lost and the next one, after an idle line, is not."""
    period = Fraction(8)
    broken = levels([0xA5], period)
    stop = (3 + BITS - 1) * 8
    broken[stop : stop + 8] = [0] * 8
    assert listen(broken + levels([0x3C], period), period) == [0x3C]


def test_keeps_what_waits():
    """A byte that finds the one before untaken is lost; the one that waits is not."""
    ready = iter([False] * 300 + [True] * 1000)
    assert listen(levels([1, 2, 3], Fraction(8)) + [1] * 100, Fraction(8), take=lambda: next(ready)) == [1]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize("period", [Fraction(4), Fraction(25, 3)])
def test_both_ways(period, p_in, p_out, seed):
    """What one sends the other hears, at ten bits a byte where there is no pause."""
    rng = np.random.default_rng(seed)
    data = [int(byte) for byte in rng.integers(0, 256, 40)]
    dut = Uart(period.numerator * 1000, period.denominator * 1000)
    heard, cycles = [], []
    cycle = 0

    async def loop(ctx) -> None:
        nonlocal cycle
        while len(heard) < len(data):
            ctx.set(dut.rx, ctx.get(dut.tx))
            # A byte lasts ten bits: the taker may be late by less.
            ready = bool(rng.random() < max(p_out, 0.5))
            ctx.set(dut.o.ready, ready)
            _, _, valid, byte = await ctx.tick().sample(dut.o.valid, dut.o.payload[0])
            cycle += 1
            assert cycle < 100 * len(data) * period
            if valid and ready:
                heard.append(byte)

    async def feed(ctx) -> None:
        for byte in data:
            while rng.random() > p_in:
                await ctx.tick().repeat(5)
            ctx.set(dut.i.payload[0], byte)
            ctx.set(dut.i.valid, 1)
            await ctx.tick().until(dut.i.ready)
            cycles.append(cycle)
            ctx.set(dut.i.valid, 0)

    simulate(dut, loop, feed)
    assert heard == data
    if p_in == 1:
        assert abs(cycles[-1] - cycles[1] - BITS * period * (len(data) - 2)) <= 1


def test_rejects():
    with pytest.raises(ValueError, match="at least 400000000 Hz, 4 times the rate"):
        Uart(CLOCK_HZ, 100_000_000)
    with pytest.raises(ValueError, match="baud must be positive, not 0"):
        Uart(CLOCK_HZ, 0)
    assert Uart(4_000, 1_000).period == MIN_CLOCKS
