from collections import Counter as Bag

import numpy as np
import pytest
from amaranth.sim import Simulator

from hw.counters import Counters
from hw.decode import ACTIVITY
from hw.formats.messages import LENGTH_BITS, Counter
from hw.formats.params import Params
from hw.formats.q6_k import BLOCK_BYTES

LEVELS = (Counter.MATRICES_HELD, Counter.BLOCKS_HELD, Counter.ROWS_HELD)
KINDS = ("active", "back_pressured", "starved", "draining", None)
"""What a cycle was spent on: at most one of these."""


def count(bag: Bag, cycle: dict, link_bytes: int) -> None:
    """Add what a cycle of a running layer holds."""
    bag[Counter.CYCLES] += 1
    bag[Counter.ACTIVE] += cycle["kind"] == "active"
    bag[Counter.BACK_PRESSURED] += cycle["kind"] == "back_pressured"
    bag[Counter.STARVED] += cycle["kind"] == "starved"
    bag[Counter.OVERHEAD] += cycle["kind"] in ("draining", None)
    bag[Counter.DRAINING] += cycle["kind"] == "draining"
    bag[Counter.WAITING] += cycle["kind"] is None and cycle["waiting"]
    bag[Counter.USEFUL_BYTES] += BLOCK_BYTES * cycle["useful_block"]
    bag[Counter.DRAINED_BYTES] += BLOCK_BYTES * cycle["drained_block"]
    bag[Counter.MOVED_BYTES] += link_bytes * cycle["moved"]
    bag[Counter.REQUESTED_BYTES] += cycle["length"] * cycle["requested"]
    bag[Counter.REQUESTS] += cycle["requested"]
    bag[Counter.LINK_IDLE] += cycle["idle"]


def random_cycle(rng, often: float) -> dict:
    flags = ("waiting", "moved", "idle", "requested", "useful_block", "drained_block", "matrix_end")
    return {name: int(rng.random() < often) for name in flags} | {
        "kind": KINDS[int(rng.integers(len(KINDS)))],
        "length": int(rng.integers(1 << LENGTH_BITS)),
        "levels": rng.integers(1 << int(rng.integers(9)), size=3).tolist(),
    }


def drive(ctx, dut: Counters, cycle: dict, *, start: int, running: int) -> None:
    ctx.set(dut.start, start)
    ctx.set(dut.running, running)
    ctx.set(dut.activity, {name: cycle.get(name, int(name == cycle["kind"])) for name, _ in ACTIVITY})
    for name in ("waiting", "moved", "idle", "requested", "length", "levels"):
        ctx.set(getattr(dut, name), cycle[name])


async def read(ctx, dut: Counters) -> Bag:
    """All counters, one named every cycle, each read ``LATENCY`` cycles later."""
    found = Bag()
    names = list(Counter)
    for n in range(len(names) + Counters.LATENCY):
        if n >= Counters.LATENCY:
            found[names[n - Counters.LATENCY]] = ctx.get(dut.value)
        ctx.set(dut.counter, names[min(n, len(names) - 1)])
        await ctx.tick()
    return found


@pytest.mark.parametrize("often", [1.0, 0.5, 0.02])
@pytest.mark.parametrize("link_bytes", [1, 16])
def test_counters(link_bytes, often):
    """Several layers of random events, also before and after each, which belong to none; then all are read."""
    rng = np.random.default_rng(link_bytes)
    dut = Counters(Params(link_bytes=link_bytes))

    async def process(ctx):
        for length in (0, 1, 150, 100):
            bag, most = Bag(), [0, 0, 0]
            for n in range(-5, length + 6):
                cycle = random_cycle(rng, often)
                drive(ctx, dut, cycle, start=n == 0, running=n <= length)
                if 0 < n <= length:
                    count(bag, cycle, link_bytes)
                if n > 0:
                    most = np.maximum(most, cycle["levels"]).tolist()
                await ctx.tick()
            quiet = dict.fromkeys(("useful_block", "drained_block", "matrix_end"), 0)
            quiet |= {"kind": None, "waiting": 0, "moved": 0, "idle": 0, "requested": 0, "length": 0, "levels": [0] * 3}
            drive(ctx, dut, quiet, start=0, running=0)
            got = await read(ctx, dut)
            assert got == bag | Bag(dict(zip(LEVELS, most, strict=True)))
            kinds = (Counter.ACTIVE, Counter.BACK_PRESSURED, Counter.STARVED, Counter.OVERHEAD)
            assert sum(got[kind] for kind in kinds) == got[Counter.CYCLES] == length

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(process)
    sim.run()
