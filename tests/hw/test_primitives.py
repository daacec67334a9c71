import numpy as np
import pytest
from amaranth.hdl import Shape, signed, unsigned
from amaranth.sim import Simulator

from hw.primitives.memory import BlockMemory
from hw.primitives.multiplier import Multiplier
from hw.primitives.queue import Queue

from .streams import STALLS, run_streams


def corners(shape: Shape, rng: np.random.Generator) -> list[int]:
    low = -(1 << shape.width - 1) if shape.signed else 0
    high = (1 << shape.width - shape.signed) - 1
    return [low, high, 0, 1, low + 1, high - 1, *rng.integers(low, high + 1, 10).tolist()]


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [(signed(14), signed(16)), (unsigned(18), signed(15)), (signed(18), signed(18))]
)
def test_multiplier(a_shape, b_shape):
    rng = np.random.default_rng(0)
    pairs = [(a, b) for a in corners(a_shape, rng) for b in corners(b_shape, rng)]
    dut = Multiplier(a_shape, b_shape)
    got = []

    async def bench(ctx):
        for a, b in pairs + [(0, 0)] * Multiplier.LATENCY:
            ctx.set(dut.a, a)
            ctx.set(dut.b, b)
            await ctx.tick()
            got.append(ctx.get(dut.p))

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
    assert got[Multiplier.LATENCY - 1 :][: len(pairs)] == [a * b for a, b in pairs]


def test_multiplier_rejects():
    with pytest.raises(ValueError, match=r"a_shape must be 1\.\.18 bits wide, not 19"):
        Multiplier(signed(19), signed(8))
    with pytest.raises(TypeError, match="b_shape must be a Shape"):
        Multiplier(signed(8), 8)  # type: ignore[arg-type]


def test_block_memory():
    rng = np.random.default_rng(0)
    dut = BlockMemory(16, 100)
    content = rng.integers(0, 1 << 16, 100).tolist()
    order = rng.permutation(100).tolist()
    got = []

    async def bench(ctx):
        for address, value in enumerate(content):
            ctx.set(dut.w_addr, address)
            ctx.set(dut.w_data, value)
            ctx.set(dut.w_en, 1)
            await ctx.tick()
        ctx.set(dut.w_en, 0)
        ctx.set(dut.w_data, 0)
        for address in order + [0] * BlockMemory.LATENCY:
            ctx.set(dut.r_addr, address)
            await ctx.tick()
            got.append(ctx.get(dut.r_data))

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
    assert got[BlockMemory.LATENCY - 1 :][:100] == [content[address] for address in order]


def test_block_memory_rejects():
    with pytest.raises(ValueError, match=r"depth must be in 2\.\.16384, not 16385"):
        BlockMemory(16, 16385)
    with pytest.raises(ValueError, match="width must be positive, not 0"):
        BlockMemory(0, 16)


@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize("depth", [2, 5, 16])
def test_queue(depth, p_in, p_out):
    rng = np.random.default_rng(depth)
    items = rng.integers(-128, 128, 200).tolist()
    dut = Queue(signed(8), depth)
    got = run_streams(dut, [(dut.i, items)], [(dut.o, 200)], rng=rng, p_in=p_in, p_out=p_out, settle=depth + 2)
    assert [int(np.int8(np.uint8(bits & 0xFF))) for bits in got.payloads[0]] == items
    if p_in == p_out == 1:
        assert got.out_cycles[0][0] == got.in_cycles[0][0] + Queue.LATENCY
        assert got.out_cycles[0][-1] == got.in_cycles[0][-1] + Queue.LATENCY


def test_queue_fills_to_its_depth():
    dut = Queue(8, 4)
    levels = []
    run_streams(
        dut,
        [(dut.i, [1, 2, 3, 4])],
        [],
        rng=np.random.default_rng(0),
        settle=2,
        finish=lambda ctx: levels.append((ctx.get(dut.level), ctx.get(dut.i.ready))),
    )
    assert levels == [(4, 0)]


def test_queue_rejects():
    with pytest.raises(ValueError, match=r"depth must be in 2\.\.64, not 1"):
        Queue(8, 1)
