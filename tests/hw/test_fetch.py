from collections import deque

import numpy as np
import pytest
from amaranth.hdl import Value
from amaranth.sim import Simulator

from hw.fetch import Fetch
from hw.formats.messages import MAX_OUTSTANDING, OFFSET_BITS, Layer, Mode
from hw.formats.params import Params
from hw.layouts import Kind
from sim.golden import layer as golden

PARAMS = Params(max_batch=4, max_width=1024, max_expert_width=512, max_experts=9)
OFFSETS = (0x1234_5678, (1 << OFFSET_BITS) - 210, 7)
"""The second one passes the end of the offsets' range: that is modulo 2**48."""


def make_layer(experts: int, *, mode: Mode = Mode.SELECTED, outstanding: int = 2) -> Layer:
    return Layer(768, 512, experts, OFFSETS, mode, outstanding)


def routes_of(masks: list[int]) -> list[golden.Route]:
    return [golden.Route(t, e, 1) for e, mask in enumerate(masks) for t in range(PARAMS.max_batch) if mask >> t & 1]


def expected(layer: Layer, masks: list[int]) -> list[tuple]:
    """Names, requests and commands in the order in which they have to leave."""
    events = []
    requests = iter(golden.requests(layer, routes_of(masks)))
    wide, high = (layer.expert_width, layer.width // 256), (layer.width, layer.expert_width // 256)
    shapes = {Kind.UP: wide, Kind.GATE: wide, Kind.DOWN: high}
    for expert, mask in enumerate(masks):
        if mask:
            events.append(("expert", expert))
        if mask or layer.mode == Mode.TAPE:
            for kind in Kind:
                offset, length = next(requests)
                events.append(("request", offset % (1 << OFFSET_BITS), length, expert, kind))
                events.append(("matrix", *shapes[kind], kind, mask))
    assert next(requests, None) is None
    return events


async def walk(ctx, dut: Fetch, layer: Layer, masks: list[int], rng, *, p_out: float = 1.0, slow: int = 0):
    """Run a layer; answers follow up to ``slow`` cycles after the latest they may: (events, cycles busy)."""
    ctx.set(dut.config.tape, layer.mode == Mode.TAPE)
    for name in ("outstanding", "experts", "width", "expert_width"):
        ctx.set(getattr(dut.config, name), getattr(layer, name))
    ctx.set(dut.config.columns, layer.width // 256)
    ctx.set(dut.config.hidden_columns, layer.expert_width // 256)
    for n, offset in enumerate(layer.offsets):
        ctx.set(dut.config.offsets[n], offset)
        ctx.set(dut.config.lengths[n], layer.matrix_bytes)
    ports = {"request": dut.o_request, "matrix": dut.o_matrix, "expert": dut.o_expert}
    ctx.set(dut.start, 1)
    assert not ctx.get(dut.busy)
    await ctx.tick()
    ctx.set(dut.start, 0)

    events = []
    memory = [*masks, *rng.integers(1, 16, (1 << len(dut.mask_expert)) - len(masks)).tolist()]
    coming = 0
    forgotten = []
    unanswered: deque[int] = deque()  # the cycles in which the answers will have come
    waited: dict[str, int | None] = dict.fromkeys(ports)
    limit = (len(masks) + 2) * (200 + 3 * min(slow, 100))
    for cycle in range(limit):
        for port in ports.values():
            ctx.set(port.ready, bool(rng.random() < p_out))
        answered = bool(unanswered) and unanswered[0] <= cycle
        ctx.set(dut.answered, answered)
        ctx.set(dut.mask, coming)
        coming = memory[ctx.get(dut.mask_expert)]
        assert ctx.get(dut.waiting) == len(unanswered) <= layer.outstanding
        if answered:
            unanswered.popleft()
        if not ctx.get(dut.busy):
            assert not unanswered
            assert not any(ctx.get(port.valid) for port in ports.values())
            assert forgotten == list(range(layer.experts))
            return events, cycle
        for name, port in ports.items():
            valid, bits = ctx.get(port.valid), ctx.get(Value.cast(port.payload))
            assert waited[name] is None or (valid and bits == waited[name]), f"{name} did not wait"
            waited[name] = bits if valid and not ctx.get(port.ready) else None
            if valid and ctx.get(port.ready):
                p = ctx.get(port.payload)
                if name == "request":
                    events.append((name, p.offset, p.length, p.expert, p.kind))
                    unanswered.append(max(cycle + 1, *unanswered, 0) + int(rng.integers(slow + 1)))
                elif name == "matrix":
                    events.append((name, p.rows, p.columns, p.kind, p.mask))
                else:
                    events.append((name, p))
        if ctx.get(dut.forget):
            forgotten.append(ctx.get(dut.mask_expert))
        await ctx.tick()
        if forgotten:
            memory[forgotten[-1]] = 0
    raise TimeoutError(f"busy after {limit} cycles: {events}")


def run(process) -> None:
    dut = Fetch(PARAMS)
    sim = Simulator(dut)
    sim.add_clock(1e-6)

    async def testbench(ctx):
        await process(ctx, dut)

    sim.add_testbench(testbench)
    sim.run()


CORNERS = [[0], [5], [0] * 9, [15] * 9, [0] * 8 + [1], [8] + [0] * 8, [0, 3, 0, 0, 12, 1]]
"""Masks by expert: one expert that nobody wants or somebody does; none, all, the last, the first, some wanted."""


@pytest.mark.parametrize(("p_out", "slow"), [(1.0, 0), (0.3, 0), (1.0, 30), (0.5, 8)])
@pytest.mark.parametrize("outstanding", [1, 2, MAX_OUTSTANDING])
@pytest.mark.parametrize("mode", Mode, ids=["selected", "tape"])
def test_fetch(mode, outstanding, p_out, slow):
    """One layer after another: what leaves, in which order, and never more unanswered than allowed."""
    rng = np.random.default_rng(outstanding)
    some = [
        (rng.integers(16, size=n) * (rng.random(n) < 0.5)).tolist()
        for n in rng.integers(1, PARAMS.max_experts + 1, size=8)
    ]

    async def process(ctx, dut):
        for masks in [*CORNERS, *some]:
            layer = make_layer(len(masks), mode=mode, outstanding=outstanding)
            events, _ = await walk(ctx, dut, layer, masks, rng, p_out=p_out, slow=slow)
            assert events == expected(layer, masks)

    run(process)


@pytest.mark.parametrize("mode", Mode, ids=["selected", "tape"])
def test_fetch_cycles(mode):
    """An expert passed over takes eleven cycles, each request two more when nothing waits, and the end one."""
    rng = np.random.default_rng(0)

    async def process(ctx, dut):
        for masks in CORNERS:
            layer = make_layer(len(masks), mode=mode, outstanding=MAX_OUTSTANDING)
            events, cycles = await walk(ctx, dut, layer, masks, rng)
            requests = sum(event[0] == "request" for event in events)
            assert cycles == 12 * len(masks) + 2 * requests + 1

    run(process)


@pytest.mark.parametrize("outstanding", [1, 2, 5, MAX_OUTSTANDING])
def test_fetch_goes_to_the_limit(outstanding):
    """With answers that never come, as many requests leave as may be unanswered, and no more."""
    layer = make_layer(9, mode=Mode.TAPE, outstanding=outstanding)
    most = 0

    async def process(ctx, dut):
        nonlocal most
        try:
            await walk(ctx, dut, layer, [1] * 9, np.random.default_rng(0), slow=10**6)
        except TimeoutError:
            most = ctx.get(dut.waiting)

    run(process)
    assert most == outstanding
