import zlib

import numpy as np
import pytest

from hw.link.crc32 import Crc32

from .bench import simulate


@pytest.mark.parametrize("width", [1, 4, 8, 16])
@pytest.mark.parametrize("seed", range(3))
def test_crc32_is_that_of_zlib(width, seed):
    rng = np.random.default_rng(seed)
    dut = Crc32(width)
    runs = [bytes(width), b"\xff" * 3 * width, *(rng.bytes(width * int(n)) for n in rng.integers(1, 20, 20))]

    async def check(ctx) -> None:
        for run in runs:
            ctx.set(dut.start, 1)
            ctx.set(dut.valid, int(rng.integers(2)))  # left out
            await ctx.tick()
            ctx.set(dut.start, 0)
            for low in range(0, len(run), width):
                while rng.random() < 0.3:
                    ctx.set(dut.valid, 0)
                    ctx.set(dut.data, int.from_bytes(rng.bytes(width), "little"))
                    await ctx.tick()
                ctx.set(dut.valid, 1)
                ctx.set(dut.data, int.from_bytes(run[low : low + width], "little"))
                await ctx.tick()
            ctx.set(dut.valid, 0)
            await ctx.tick().repeat(dut.LATENCY - 1)
            assert ctx.get(dut.crc) == zlib.crc32(run)

    simulate(dut, check)


@pytest.mark.parametrize("bad", [0, 2, "8"])
def test_rejected(bad):
    with pytest.raises(ValueError, match=r"width must be one of \(1, 4, 8, 16\)"):
        Crc32(bad)
