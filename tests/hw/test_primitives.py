import numpy as np
import pytest
from amaranth.hdl import Fragment, Module, Shape, Signal, signed, unsigned
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator

from hw.primitives.memory import BlockMemory, BlockRom
from hw.primitives.multiplier import Multiplier
from hw.primitives.queue import CreditQueue, Place, Queue

from .streams import STALLS, run_streams


def corners(shape: Shape, rng: np.random.Generator) -> list[int]:
    low = -(1 << shape.width - 1) if shape.signed else 0
    high = (1 << shape.width - shape.signed) - 1
    return [low, high, 0, 1, low + 1, high - 1, *rng.integers(low, high + 1, 10).tolist()]


class Xc7:
    """As much of a platform as the primitives look at."""

    device = "xc7a35ti"


@pytest.mark.parametrize("platform", [None, Xc7()], ids=["plain", "xc7"])
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [(signed(14), signed(16)), (unsigned(18), signed(15)), (signed(18), signed(18)), (unsigned(18), unsigned(18))],
)
def test_multiplier(a_shape, b_shape, platform):
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

    sim = Simulator(Fragment.get(dut, platform))
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
    assert got[Multiplier.LATENCY - 1 :][: len(pairs)] == [a * b for a, b in pairs]


def test_multiplier_rejects():
    with pytest.raises(ValueError, match=r"a_shape must be 1\.\.18 bits wide, not 19"):
        Multiplier(signed(19), signed(8))
    with pytest.raises(TypeError, match="b_shape must be a Shape"):
        Multiplier(signed(8), 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(("width", "depth"), [(16, 100), (3, 40000)])
def test_block_memory(width, depth):
    rng = np.random.default_rng(0)
    dut = BlockMemory(width, depth)
    borders = [depth - 1, *range(16383, depth, 16384), *range(16384, depth, 16384)]  # where banks meet
    addresses = list(range(depth)) if depth <= 100 else [*borders, *rng.integers(depth, size=500).tolist()]
    content = {address: int(rng.integers(1 << width)) for address in addresses}
    order = rng.permutation(list(content)).tolist()
    got = []

    async def bench(ctx):
        for address, value in content.items():
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
    assert got[BlockMemory.LATENCY - 1 :][: len(order)] == [content[address] for address in order]


def test_block_memory_rejects():
    with pytest.raises(ValueError, match=r"depth must be in 2\.\.1048576, not 1048577"):
        BlockMemory(16, 1048577)
    with pytest.raises(ValueError, match=r"depth must be in 2\.\.1048576, not 1"):
        BlockMemory(16, 1)
    with pytest.raises(ValueError, match="width must be positive, not 0"):
        BlockMemory(0, 16)


@pytest.mark.parametrize("count", [2, 577, 1024])
def test_block_rom(count):
    rng = np.random.default_rng(count)
    words = [*rng.integers(1 << BlockRom.WIDTH, size=count - 1).tolist(), (1 << BlockRom.WIDTH) - 1]
    order = rng.permutation(count).tolist()
    dut = BlockRom(words)
    got = []

    async def bench(ctx):
        for address in order + [0] * BlockRom.LATENCY:
            ctx.set(dut.addr, address)
            await ctx.tick()
            got.append(ctx.get(dut.data))

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
    assert got[BlockRom.LATENCY - 1 :][:count] == [words[address] for address in order]


def test_block_rom_rejects():
    with pytest.raises(ValueError, match=r"a ROM holds 2\.\.1024 words, not 1025"):
        BlockRom([0] * 1025)
    for word in (-1, 1 << 18):
        with pytest.raises(ValueError, match="a ROM's words are unsigned of 18 bits"):
            BlockRom([0, word])


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


class Credited(wiring.Component):
    """A :class:`CreditQueue` behind somebody who counts its places."""

    i: stream.Interface
    o: stream.Interface

    def __init__(self, depth: int) -> None:
        self.queue = CreditQueue(8, depth)
        super().__init__({"i": In(stream.Signature(8)), "o": Out(stream.Signature(8))})

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.queue = queue = self.queue
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        places = Signal(range(queue.depth + 1), init=queue.depth)
        m.d.comb += [
            self.i.ready.eq(places != 0),
            queue.i.valid.eq(self.i.valid & self.i.ready),
            queue.i.payload.eq(self.i.payload),
        ]
        m.d.sync += places.eq(places - queue.i.valid + queue.left)
        return m


@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize("depth", [2, 5, 16])
def test_credit_queue(depth, p_in, p_out):
    rng = np.random.default_rng(depth)
    items = rng.integers(0, 256, 200).tolist()
    dut = Credited(depth)
    got = run_streams(dut, [(dut.i, items)], [(dut.o, 200)], rng=rng, p_in=p_in, p_out=p_out, settle=depth + 4)
    assert got.payloads[0] == items
    assert got.out_cycles[0][0] >= got.in_cycles[0][0] + CreditQueue.LATENCY
    if p_in == p_out == 1:
        assert got.out_cycles[0][0] == got.in_cycles[0][0] + CreditQueue.LATENCY
        assert got.out_cycles[0][-1] == got.in_cycles[0][-1] + CreditQueue.LATENCY
        if depth >= 5:  # a place is free again four cycles after it was taken
            assert got.in_cycles[0] == list(range(got.in_cycles[0][0], got.in_cycles[0][0] + 200))


@pytest.mark.parametrize("depth", [2, 5, 16])
def test_credit_queue_fills_to_its_depth(depth):
    dut = Credited(depth)
    levels = []
    run_streams(
        dut,
        [(dut.i, list(range(depth)))],
        [],
        rng=np.random.default_rng(0),
        settle=4,
        finish=lambda ctx: levels.append((ctx.get(dut.queue.level), ctx.get(dut.i.ready))),
    )
    assert levels == [(depth, 0)]


@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
def test_place(p_in, p_out):
    rng = np.random.default_rng(0)
    items = rng.integers(0, 256, 200).tolist()
    dut = Place(8)
    got = run_streams(dut, [(dut.i, items)], [(dut.o, 200)], rng=rng, p_in=p_in, p_out=p_out, settle=4)
    assert got.payloads[0] == items
    if p_in == p_out == 1:
        assert got.in_cycles[0] == list(range(got.in_cycles[0][0], got.in_cycles[0][0] + 400, 2))
        assert got.out_cycles[0][0] == got.in_cycles[0][0] + Place.LATENCY


def test_queue_rejects():
    with pytest.raises(ValueError, match=r"depth must be in 2\.\.64, not 1"):
        Queue(8, 1)
    with pytest.raises(ValueError, match=r"depth must be in 2\.\.64, not 65"):
        CreditQueue(8, 65)
