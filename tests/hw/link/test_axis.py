"""What of an AXI-Stream becomes a stream of the link, and back."""

import numpy as np
import pytest
from amaranth.sim import Simulator

from hw.link.axis import AxisPort


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("width", [8, 16])
def test_joins(width, seed):
    """Every signal is passed on at once; a beat that is not full is taken and dropped."""
    rng = np.random.default_rng(seed)
    dut = AxisPort(width)
    full = (1 << width) - 1

    async def process(ctx) -> None:
        for _ in range(200):
            data, valid, ready = rng.bytes(width), int(rng.integers(2)), int(rng.integers(2))
            keep = full if rng.random() < 0.5 else full >> int(rng.integers(1, width))
            ctx.set(dut.s_axis_tdata, int.from_bytes(data, "little"))
            ctx.set(dut.s_axis_tkeep, keep)
            ctx.set(dut.s_axis_tlast, int(rng.integers(2)))
            ctx.set(dut.s_axis_tvalid, valid)
            ctx.set(dut.o.ready, ready)
            await ctx.delay(1e-9)
            assert ctx.get(dut.s_axis_tready) == ready
            assert ctx.get(dut.o.valid) == (valid and keep == full)
            assert bytes(list(ctx.get(dut.o.payload))) == data

            beat = {"data": list(rng.bytes(width)), "last": int(rng.integers(2))}
            ctx.set(dut.i.payload, beat)
            ctx.set(dut.i.valid, valid)
            ctx.set(dut.m_axis_tready, ready)
            await ctx.delay(1e-9)
            assert (ctx.get(dut.i.ready), ctx.get(dut.m_axis_tvalid)) == (ready, valid)
            assert ctx.get(dut.m_axis_tdata).to_bytes(width, "little") == bytes(beat["data"])
            assert (ctx.get(dut.m_axis_tkeep), ctx.get(dut.m_axis_tlast)) == (full, beat["last"])

    sim = Simulator(dut)
    sim.add_testbench(process)
    sim.run()


def test_rejects():
    with pytest.raises(ValueError, match=r"width must be one of \(8, 16\) bytes, not 4"):
        AxisPort(4)
