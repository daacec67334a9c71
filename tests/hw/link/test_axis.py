"""The crossing between the bus's clock and the device's, either being the faster."""

import numpy as np
import pytest
from amaranth.hdl import Module
from amaranth.sim import Simulator

from hw.link.axis import AxisPort

from ..streams import STALLS
from ..test_gather import beats


def run(width: int, axis_ns: int, sync_ns: int, down, up, rng, p_in: float, p_out: float):
    """What crossed: bytes of each beat that went down, and (bytes, last) of each that went up."""
    dut = AxisPort(width)
    came_down, came_up = [], []
    full = (1 << width) - 1
    expected_down = sum(keep == full for _, keep in down)

    async def bus_out(ctx) -> None:
        for data, keep in down:
            while rng.random() > p_in:
                await ctx.tick("axis")
            ctx.set(dut.s_axis_tdata, int.from_bytes(data, "little"))
            ctx.set(dut.s_axis_tkeep, keep)
            ctx.set(dut.s_axis_tvalid, 1)
            await ctx.tick("axis").until(dut.s_axis_tready)
            ctx.set(dut.s_axis_tvalid, 0)

    async def device_in(ctx) -> None:
        for _ in range(20000):
            ready = bool(rng.random() < p_out)
            ctx.set(dut.o.ready, ready)
            _, _, valid, data = await ctx.tick().sample(dut.o.valid, dut.o.payload)
            if valid and ready:
                came_down.append(bytes(list(data)))
            if len(came_down) == expected_down:
                break
        ctx.set(dut.o.ready, 0)

    async def device_out(ctx) -> None:
        for beat in up:
            while rng.random() > p_in:
                await ctx.tick()
            ctx.set(dut.i.payload, beat)
            ctx.set(dut.i.valid, 1)
            await ctx.tick().until(dut.i.ready)
            ctx.set(dut.i.valid, 0)

    async def bus_in(ctx) -> None:
        waiting = None
        for _ in range(20000):
            ready = bool(rng.random() < p_out)
            ctx.set(dut.m_axis_tready, ready)
            port = (dut.m_axis_tvalid, dut.m_axis_tdata, dut.m_axis_tkeep, dut.m_axis_tlast)
            _, _, valid, *beat = await ctx.tick("axis").sample(*port)
            assert waiting is None or (valid and beat == waiting)
            waiting = beat if valid and not ready else None
            if valid and ready:
                assert beat[1] == full
                came_up.append((beat[0].to_bytes(width, "little"), beat[2]))
            if len(came_up) == len(up):
                break

    top = Module()
    top.submodules.dut = dut
    sim = Simulator(top)
    sim.add_clock(sync_ns * 1e-9)
    sim.add_clock(axis_ns * 1e-9, domain="axis")
    for bench in (bus_out, device_in, device_out, bus_in):
        sim.add_testbench(bench)
    sim.run()
    return came_down, came_up


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize(("axis_ns", "sync_ns"), [(8, 5), (4, 9), (7, 7)])
@pytest.mark.parametrize("width", [8, 16])
def test_both_ways(width, axis_ns, sync_ns, p_in, p_out, seed):
    rng = np.random.default_rng(seed)
    full = (1 << width) - 1
    down = [(rng.bytes(width), full) for _ in range(80)]
    for place in (0, 17, 18, 79):  # pieces of beats belong to no frame
        down[place] = (down[place][0], full >> int(rng.integers(1, width)))
    up = [beat for size in (1, 7, 40) for beat in beats(rng.bytes(size * width), width)]
    came_down, came_up = run(width, axis_ns, sync_ns, down, up, rng, p_in, p_out)
    assert came_down == [data for data, keep in down if keep == full]
    assert came_up == [(bytes(beat["data"]), beat["last"]) for beat in up]


def test_rejects():
    with pytest.raises(ValueError, match=r"width must be one of \(8, 16\) bytes, not 4"):
        AxisPort(4)
