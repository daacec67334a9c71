"""Between two clocks, either being the faster: nothing is lost, and nothing of one connection gets into the next."""

import numpy as np
import pytest
from amaranth.hdl import Module
from amaranth.sim import Simulator

from hw.link.crossing import DEPTH, QUIET, Crossing

from ..streams import STALLS
from ..test_gather import beats

CLOCKS = [(8, 5), (4, 9), (7, 7), (12, 3)]
"""Periods of ``link`` and ``sync``."""
LIMIT = 20_000


def run(dut: Crossing, link_ns: int, sync_ns: int, benches) -> None:
    top = Module()
    top.submodules.dut = dut
    sim = Simulator(top)
    sim.add_clock(sync_ns * 1e-9)
    sim.add_clock(link_ns * 1e-9, domain="link")
    for bench in benches:
        sim.add_testbench(bench)
    sim.run()


async def until(ctx, signal, value: int, domain: str) -> int:
    """Cycles of ``domain`` until the signal has the value."""
    for cycle in range(LIMIT):
        if ctx.get(signal) == value:
            return cycle
        await ctx.tick(domain)
    raise TimeoutError(f"{signal.name} is not {value} after {LIMIT} cycles")


async def give(ctx, port, items, rng, p: float, domain: str) -> None:
    for item in items:
        while rng.random() > p:
            await ctx.tick(domain)
        ctx.set(port.payload, item)
        ctx.set(port.valid, 1)
        await ctx.tick(domain).until(port.ready)
        ctx.set(port.valid, 0)


async def take(ctx, port, count: int, rng, p: float, domain: str) -> list[tuple[bytes, int]]:
    got, waiting = [], None
    for _ in range(LIMIT):
        ready = bool(rng.random() < p)
        ctx.set(port.ready, ready)
        _, _, valid, beat = await ctx.tick(domain).sample(port.valid, port.payload)
        beat = (bytes(list(beat.data)), beat.last)
        assert waiting is None or (valid and beat == waiting)
        waiting = beat if valid and not ready else None
        if valid and ready:
            got.append(beat)
        if len(got) == count:
            ctx.set(port.ready, 0)
            return got
    raise TimeoutError(f"{len(got)} of {count} beats after {LIMIT} cycles")


def pairs(items) -> list[tuple[bytes, int]]:
    return [(bytes(item["data"]), item["last"]) for item in items]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize(("link_ns", "sync_ns"), CLOCKS)
@pytest.mark.parametrize("width", [1, 16])
def test_both_ways(width, link_ns, sync_ns, p_in, p_out, seed):
    rng = np.random.default_rng(seed)
    dut = Crossing(width)
    down, up = ([beat for n in (1, 7, 72) for beat in beats(rng.bytes(n * width), width)] for _ in range(2))
    came = {}

    async def link_out(ctx) -> None:
        await give(ctx, dut.i_link, down, rng, p_in, "link")

    async def engine_in(ctx) -> None:
        came["down"] = await take(ctx, dut.o, len(down), rng, p_out, "sync")

    async def engine_out(ctx) -> None:
        await until(ctx, dut.reset, 0, "sync")
        await give(ctx, dut.i, up, rng, p_in, "sync")

    async def link_in(ctx) -> None:
        came["up"] = await take(ctx, dut.o_link, len(up), rng, p_out, "link")

    run(dut, link_ns, sync_ns, [link_out, engine_in, engine_out, link_in])
    assert came == {"down": pairs(down), "up": pairs(up)}


@pytest.mark.parametrize(("link_ns", "sync_ns"), [(8, 5), (9, 8), (7, 7)])
def test_a_beat_every_cycle_of_the_slower_clock(link_ns, sync_ns):
    dut = Crossing(16)
    rng = np.random.default_rng(0)
    items = beats(rng.bytes(16 * 200), 16)
    cycles = []

    async def link_out(ctx) -> None:
        await until(ctx, dut.busy, 0, "link")
        ctx.set(dut.i_link.valid, 1)
        for item in items:
            ctx.set(dut.i_link.payload, item)
            cycle = 0
            while True:
                _, _, ready = await ctx.tick("link").sample(dut.i_link.ready)
                cycle += 1
                if ready:
                    break
            cycles.append(cycle)
        ctx.set(dut.i_link.valid, 0)

    async def engine_in(ctx) -> None:
        assert await take(ctx, dut.o, len(items), rng, 1.0, "sync") == pairs(items)

    run(dut, link_ns, sync_ns, [link_out, engine_in])
    assert cycles == [1] * len(items)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("link_ns", "sync_ns"), CLOCKS)
def test_begins_again(link_ns, sync_ns, seed):
    """Connection after connection, beats on their way and nobody taking them: only the present one's arrive."""
    rng = np.random.default_rng(seed)
    dut = Crossing(1)
    connections = 5
    own = [[{"data": [16 * n + k], "last": k & 1} for k in range(12)] for n in range(connections)]
    number = 0  # of the connection, seen by both sides from its beginning on

    async def link(ctx) -> None:
        nonlocal number
        for n in range(connections):
            # Perhaps in the middle of it: told once more while it is busy with that.
            for _ in range(1 + (n & 1)):
                ctx.set(dut.begin, 1)
                await ctx.tick("link")
                ctx.set(dut.begin, 0)
                await ctx.tick("link").repeat(int(rng.integers(1, 2 * QUIET)))
            number = n
            cycles = await until(ctx, dut.busy, 0, "link")
            assert cycles <= (2 + 2 * sync_ns / link_ns) * (QUIET + 8)
            await give(ctx, dut.i_link, own[n], rng, 0.5, "link")
            assert await take(ctx, dut.o_link, len(own[n]), rng, 0.5, "link") == pairs(own[n])
            # What nobody takes any more, in both directions.
            ctx.set(dut.o_link.ready, 0)
            await give(ctx, dut.i_link, [{"data": [255], "last": 0}] * int(rng.integers(DEPTH)), rng, 1.0, "link")
            await ctx.tick("link").repeat(int(rng.integers(1, 2 * DEPTH)))

    async def engine(ctx) -> None:
        for n in range(connections):
            await until(ctx, dut.reset, 1, "sync")
            ctx.set(dut.i.valid, 1)  # in reset: of no effect
            await until(ctx, dut.reset, 0, "sync")
            ctx.set(dut.i.valid, 0)
            got = await take(ctx, dut.o, len(own[n]), rng, 0.5, "sync")
            assert (got, number) == (pairs(own[n]), n)
            await give(ctx, dut.i, own[n], rng, 0.5, "sync")
            ctx.set(dut.i.payload, {"data": [254], "last": 0})
            ctx.set(dut.i.valid, 1)  # goes on until the next begins
        ctx.set(dut.i.valid, 0)

    run(dut, link_ns, sync_ns, [link, engine])
