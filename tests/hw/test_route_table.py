from typing import Any, NamedTuple

import numpy as np
import pytest
from amaranth.hdl import ResetInserter, Signal
from amaranth.sim import Simulator

from hw.formats.params import Params
from hw.formats.sigmoid import SIGNIFICANT_BITS
from hw.route_table import RouteTable

ONE = 1 << 16
LIMIT = 21


class Filled(NamedTuple):
    """The cycle in which each route was taken, the cycles with ``error`` and the one in which the table was empty."""

    taken: list[int]
    errors: list[int]
    empty: int

    def blame(self) -> list[int]:
        """Error cycles for each route, told a cycle late: those after it was taken and not after the next one was."""
        ends = [*self.taken[1:], self.empty]
        return [sum(a + 1 < c <= b + 1 for c in self.errors) for a, b in zip(self.taken, ends, strict=True)]


async def fill(ctx, dut: RouteTable, entries, rng, p_in: float = 1.0) -> Filled:
    """Offer (token, expert, weight) entries, with junk between them, until the table is empty again."""
    taken, errors = [], []
    cycle = 0
    offered = False
    while True:
        left = len(taken) < len(entries)
        offered = left and (offered or rng.random() < p_in)
        token, expert, weight = entries[len(taken)] if offered else rng.integers(1 << 16, size=3).tolist()
        ctx.set(dut.i.payload, {"token": token, "expert": expert, "weight": weight})
        ctx.set(dut.i.valid, offered)
        if ctx.get(dut.error):
            errors.append(cycle)
        if not left and ctx.get(dut.empty):
            await ctx.tick()
            if ctx.get(dut.error):
                errors.append(cycle + 1)
            return Filled(taken, errors, cycle)
        assert not (offered and ctx.get(dut.empty))
        if offered and ctx.get(dut.i.ready):
            taken.append(cycle)
            offered = False
        assert cycle < LIMIT * (len(entries) + 10) / p_in, f"{len(taken)} of {len(entries)} taken"
        await ctx.tick()
        cycle += 1


async def masks(ctx, dut: RouteTable, experts: int) -> list[int]:
    """All masks, each two cycles after that in which its expert is named, once the last write has been made."""
    found = []
    await ctx.tick()
    for expert in range(experts + 1):
        ctx.set(dut.mask_expert, min(expert, experts - 1))
        await ctx.tick()
        found.append(ctx.get(dut.mask))
    return found[1:]


async def weights(ctx, dut: RouteTable, places) -> list[tuple[int, int]]:
    """(magnitude, exponent) at (token, expert) places, one named every cycle, each read ``LATENCY`` cycles later."""
    found = []
    for cycle in range(len(places) + RouteTable.LATENCY):
        if cycle >= RouteTable.LATENCY:
            found.append((ctx.get(dut.weight.magnitude), ctx.get(dut.weight.exponent)))
        token, expert = places[min(cycle, len(places) - 1)]
        ctx.set(dut.weight_token, token)
        ctx.set(dut.weight_expert, expert)
        await ctx.tick()
    return found


def run(dut: Any, process) -> None:
    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(process)
    sim.run()


def limits(ctx, dut: RouteTable, batch: int, experts: int) -> None:
    ctx.set(dut.batch, batch)
    ctx.set(dut.experts, experts)


def expected_masks(entries, experts: int) -> list[int]:
    found = [0] * experts
    for token, expert, _ in entries:
        found[expert] |= 1 << token
    return found


def check_weights(entries, found) -> None:
    for (_, _, weight), (magnitude, exponent) in zip(entries, found, strict=True):
        assert weight == magnitude * 2.0 ** (exponent + 16)
        assert magnitude == 0 if weight == 0 else magnitude.bit_length() == SIGNIFICANT_BITS


def cycles(weight: int) -> int:
    """From one route taken to the next: look up, check, shift the highest bit to the top, write."""
    return 4 + (SIGNIFICANT_BITS - weight.bit_length() if weight else 0)


def random_entries(rng, batch: int, experts: int, count: int) -> list[tuple[int, int, int]]:
    """Different places in random order; the first weights are the corners."""
    places = rng.permutation(batch * experts)[:count]
    corners = [0, 1, 2, ONE, ONE - 1, ONE >> 1, (ONE >> 1) - 1, (ONE >> 1) + 1]
    some = [*corners, *(rng.integers(ONE + 1, size=count) >> rng.integers(17, size=count)).tolist()]
    return [(int(p) % batch, int(p) // batch, w) for p, w in zip(places, some, strict=False)]


@pytest.mark.parametrize("p_in", [1.0, 0.2])
@pytest.mark.parametrize(
    ("params", "batch", "experts"),
    [
        (Params(max_batch=1, max_experts=1), 1, 1),
        (Params(max_batch=3, max_experts=5), 3, 5),
        (Params(max_batch=8, max_experts=64), 8, 64),
        (Params(max_batch=8, max_experts=64), 7, 33),
    ],
    ids=str,
)
def test_route_table(params, batch, experts, p_in):
    """Three fillings, each of other routes, with the masks of the one before forgotten in between."""
    rng = np.random.default_rng(batch)
    dut = RouteTable(params)

    async def process(ctx):
        limits(ctx, dut, batch, experts)
        for _ in range(3):
            entries = random_entries(rng, batch, experts, max(1, batch * experts // 3))
            got = await fill(ctx, dut, entries, rng, p_in)
            assert got.errors == []
            if p_in == 1:
                assert np.diff(got.taken).tolist() == [cycles(w) for *_, w in entries[:-1]]
                assert max(cycles(w) for *_, w in entries) <= LIMIT
            want = expected_masks(entries, params.max_experts)
            assert await masks(ctx, dut, params.max_experts) == want
            order = rng.permutation(len(entries))
            entries = [entries[n] for n in order]
            check_weights(entries, await weights(ctx, dut, [place for *place, _ in entries]))
            for expert in rng.permutation(params.max_experts).tolist():
                ctx.set(dut.mask_expert, expert)
                ctx.set(dut.forget, 1)
                await ctx.tick()
                ctx.set(dut.forget, 0)
                want[expert] = 0
                assert await masks(ctx, dut, params.max_experts) == want

    run(dut, process)


@pytest.mark.parametrize("seed", range(3))
def test_route_table_tells_errors(seed):
    """Every bad route pulses ``error`` once and leaves no trace; the good ones around it arrive."""
    rng = np.random.default_rng(seed)
    params, batch, experts = Params(max_batch=8, max_experts=16), 5, 11
    dut = RouteTable(params)
    good = random_entries(rng, batch, experts, 25)
    again = [(*good[n][:2], 3) for n in (0, 7, 24)]
    bad = [
        *((token, 0, 1) for token in (batch, 7, 8, 256, 1 << 15, (1 << 16) - 1)),
        *((0, expert, 1) for expert in (experts, 15, 16, 32, 1 << 15, (1 << 16) - 1)),
        *((1, 1, weight) for weight in (ONE + 1, 1 << 17, 1 << 18, 3 << 17, 1 << 31, (1 << 32) - 1)),
        (batch, experts, ONE + 1),
    ]
    mixed = [(entry, 0) for entry in good]
    for entry in bad:
        mixed.insert(int(rng.integers(len(mixed) + 1)), (entry, 1))
    mixed += [(entry, 1) for entry in again]
    entries = [entry for entry, _ in mixed]

    async def process(ctx):
        limits(ctx, dut, batch, experts)
        got = await fill(ctx, dut, entries, rng)
        assert got.blame() == [error for _, error in mixed]
        assert await masks(ctx, dut, params.max_experts) == expected_masks(good, params.max_experts)
        rest = [entry for entry in good if entry[:2] not in [place[:2] for place in again]]
        check_weights(rest, await weights(ctx, dut, [place for *place, _ in rest]))

    run(dut, process)


@pytest.mark.parametrize("max_experts", [1, 5, 16])
def test_route_table_clears_itself(max_experts):
    """After power-up and after a reset, ``max_experts`` cycles in which nothing is taken; then all masks are clear."""
    rng = np.random.default_rng(0)
    params = Params(max_batch=2, max_experts=max_experts)
    dut = RouteTable(params)
    reset = Signal()

    async def process(ctx):
        limits(ctx, dut, 2, max_experts)
        for at_work in (0, 1):  # the second reset comes while a route is on its way
            got = await fill(ctx, dut, [(0, 0, 1)], rng)
            assert got.taken == [max_experts]
            everything = [(token, expert, 1) for expert in range(max_experts) for token in range(2)][1:]
            assert (await fill(ctx, dut, everything, rng)).errors == []
            assert await masks(ctx, dut, max_experts) == [3] * max_experts
            ctx.set(dut.i.valid, at_work)
            await ctx.tick().repeat(2)
            ctx.set(dut.i.valid, 0)
            ctx.set(reset, 1)
            await ctx.tick()
            ctx.set(reset, 0)
        await ctx.tick().repeat(max_experts)
        assert ctx.get(dut.i.ready)
        assert await masks(ctx, dut, max_experts) == [0] * max_experts

    run(ResetInserter(reset)(dut), process)
