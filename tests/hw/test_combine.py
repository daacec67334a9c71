from typing import NamedTuple

import numpy as np
import pytest
from amaranth.sim import Simulator
from numpy.typing import NDArray

from hw.combine import Combine
from hw.formats.params import Params
from hw.layouts import Kind

PARAMS = Params(max_batch=4, max_width=512)
MIN, MAX = -(1 << 63), (1 << 63) - 1


class Expert(NamedTuple):
    """Down sums, a row of them for each of its tokens."""

    tokens: list[int]
    sums: NDArray[np.int64]


def golden(experts: list[Expert], rows: int) -> tuple[list[list[int]], int]:
    """What each token reads, and how many additions were clamped, by Python's integers."""
    y, clamped = [[0] * rows for _ in range(PARAMS.max_batch)], 0
    for tokens, sums in experts:
        for token, vector in zip(tokens, sums.tolist(), strict=True):
            exact = [a + b for a, b in zip(y[token], vector, strict=True)]
            y[token] = [min(max(value, MIN), MAX) for value in exact]
            clamped += sum(a != b for a, b in zip(exact, y[token], strict=True))
    return y, clamped


def check(layers: list[list[Expert]], rng: np.random.Generator, p_in=1.0):
    """Every layer: start, its experts one right after the other, then all that can be read; the last sum first."""
    dut = Combine(PARAMS)

    async def bench(ctx):
        cycle, finished, overflows = 0, [], []

        async def step():
            nonlocal cycle
            *_, ready, end, overflow = await ctx.tick().sample(dut.i.ready, dut.finished, dut.overflow)
            assert ready
            finished.extend([cycle] * end)
            overflows.extend([cycle] * overflow)
            cycle += 1

        for experts in layers:
            rows = experts[0].sums.shape[1]
            finished.clear()
            overflows.clear()
            ctx.set(dut.rows, rows)
            ctx.set(dut.start, 1)
            await step()
            ctx.set(dut.start, 0)
            await step()
            ends = []
            for tokens, sums in experts:
                for row in range(rows):
                    for token, value in zip(tokens, sums[:, row].tolist(), strict=True):
                        ctx.set(dut.i.valid, 0)
                        while rng.random() >= p_in:
                            await step()
                        end = token == tokens[-1]
                        ctx.set(dut.i.payload, dict(value=value, token=token, error=0, kind=Kind.DOWN, end=end))
                        ctx.set(dut.i.valid, 1)
                        await step()
                ends.append(cycle - 1 + Combine.ADD_LATENCY + 1)  # in place, and told in the next cycle
            ctx.set(dut.i.valid, 0)
            for _ in range(Combine.ADD_LATENCY + 1 + Combine.LATENCY):
                await step()

            want, clamped = golden(experts, rows)
            places = [(token, row) for token in range(PARAMS.max_batch) for row in range(rows)]
            rng.shuffle(places)
            places = [(experts[-1].tokens[-1], rows - 1), *places]
            got = []
            for token, row in places + [(0, 0)] * Combine.LATENCY:
                ctx.set(dut.r_token, token)
                ctx.set(dut.r_row, row)
                await step()
                got.append(ctx.get(dut.r_data))
            got = got[Combine.LATENCY - 1 :][: len(places)]
            assert [
                (place, value, want[place[0]][place[1]])
                for place, value in zip(places, got, strict=True)
                if value != want[place[0]][place[1]]
            ] == []
            assert finished == ends
            assert len(overflows) == clamped

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()


def test_combine_corners():
    """Each pair of corners, one after the other; the sums that leave 64 bits are clamped, and go on from there."""
    corners = [0, 1, -1, MIN, MIN + 1, MAX, MAX - 1, (1 << 32) - 1, 1 << 32, -(1 << 32), -(1 << 32) - 1, 1 << 62, 123]
    first, second = (grid.ravel() for grid in np.meshgrid(corners, corners))
    first, second = (np.resize(v, 256) for v in (first, second))
    third = np.where(second < 0, 5, -5)  # away from the border again
    experts = [
        Expert([0, 2], np.stack([first, second])),
        Expert([2], third[None]),
        Expert([0], second[None]),
        Expert([0], third[None]),
    ]
    _, clamped = golden(experts, 256)
    assert clamped > 20
    check([experts], np.random.default_rng(0))


@pytest.mark.parametrize("p_in", [1.0, 0.3])
def test_combine(p_in):
    """Layers of other tokens and rows; who had no expert reads zero, whatever was there in the layer before."""
    rng = np.random.default_rng(0)
    layers = [
        [
            Expert(
                tokens, rng.integers(MIN, MAX, (len(tokens), rows), endpoint=True) >> rng.choice([0, 1, 20, 40], rows)
            )
            for tokens in sets
        ]
        for sets, rows in [([[0, 1, 3], [0, 3], [3]], 256), ([[1]], 512), ([[2], [2]], 256)]
    ]
    assert all(golden(experts, experts[0].sums.shape[1])[1] for experts in (layers[0], layers[2]))
    check(layers, rng, p_in)
