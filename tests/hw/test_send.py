import struct
from collections import deque
from typing import NamedTuple

import numpy as np
import pytest
from amaranth.hdl import ResetInserter, Signal, Value
from amaranth.sim import Simulator

from hw.combine import Combine
from hw.counters import Counters
from hw.formats.messages import VERSION, Counter, Error, Message
from hw.formats.params import LINK_BYTES, Params
from hw.send import Cut, Send

from .streams import STALLS, run_streams

WIDTHS = dict(max_batch=3, max_width=512, max_expert_width=1024, max_experts=300)
DESIGN = 0xFEDCBA98
QUIET = 40
"""Cycles without a beat after which nothing more is to come."""


def header(kind: Message, form: str = "", *fields: int) -> bytes:
    return struct.pack("<B" + form, kind, *fields).ljust(16, b"\0")


def hello(params: Params) -> bytes:
    fields = (params.link_bytes, params.tokens, params.max_batch, 2, 4, 300, 256, 0, DESIGN)
    return header(Message.HELLO, "BBBBBBHHBI", VERSION, *fields)


class Step(NamedTuple):
    """What the surroundings want while the engine is silent, or at once; and what is to be said."""

    want: list[bytes]
    batch: int = 1
    width: int = 256
    fatal: int = 0  # stays
    layer_done: int = 0
    layer_error: int = 0
    read_counters: int = 0
    at_once: bool = False  # while the step before is still being said


async def converse(ctx, dut: Send, steps: list[Step], y, counters, rng, p_out: float):
    """The messages, the cycle of each beat and the count of ``done`` pulses, for steps one after another."""
    said, cycles, message = [], [], b""
    dones = 0
    memory = deque([(0, 0)] * Combine.LATENCY)
    number = deque([0] * Counters.LATENCY)
    waited = None
    quiet = cycle = 0
    left = deque(steps)
    layer = settled = 0
    read_counters = 0
    while left or quiet < QUIET:
        read_counters = 0
        if left and (quiet >= QUIET or left[0].at_once) and not layer:
            step = left.popleft()
            for name in ("batch", "width", "layer_error"):
                ctx.set(getattr(dut, name), getattr(step, name))
            if step.fatal:
                ctx.set(dut.fatal, step.fatal)
                ctx.set(dut.halted, 1)
            layer, read_counters = step.layer_done, step.read_counters
            quiet = 0
        ctx.set(dut.layer_done, layer and settled)
        settled = layer
        ctx.set(dut.read_counters, read_counters)
        ctx.set(dut.y, y[memory[0]] if memory[0] in y else int(rng.integers(1 << 62)))
        ctx.set(dut.value, dict(enumerate(counters)).get(number[0], 0))
        ready = rng.random() < p_out
        ctx.set(dut.o.ready, ready)
        valid, bits = ctx.get(dut.o.valid), ctx.get(Value.cast(dut.o.payload))
        assert waited is None or (valid and bits == waited)
        waited = bits if valid and not ready else None
        quiet = 0 if valid else quiet + 1
        if valid and ready:
            p = ctx.get(dut.o.payload)
            message += bytes(p.data)
            cycles.append(cycle)
            if p.last:
                said.append(message)
                message = b""
        if ctx.get(dut.done):
            assert layer
            dones += 1
            layer = 0
        memory.append((ctx.get(dut.y_token), ctx.get(dut.y_row)))
        memory.popleft()
        number.append(ctx.get(dut.counter))
        number.popleft()
        await ctx.tick()
        cycle += 1
        assert cycle < 100_000, f"{len(said)} messages said, {len(left)} steps left"
    assert message == b""
    return said, cycles, dones


def run(params: Params, steps: list[Step], y=None, counters=None, *, seed: int = 0, p_out: float = 1.0):
    dut = Send(params, DESIGN)
    outcomes = []

    async def process(ctx):
        numbers = counters or [0] * len(Counter)
        outcomes.append(await converse(ctx, dut, steps, y or {}, numbers, np.random.default_rng(seed), p_out))

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(process)
    sim.run()
    ((said, cycles, dones),) = outcomes
    assert said == [message for step in steps for message in step.want]
    assert dones == sum(step.layer_done for step in steps)
    return cycles


def random_outputs(rng, batch: int, width: int) -> dict[tuple[int, int], int]:
    values = rng.integers(0, 1 << 64, (batch, width), dtype=np.uint64)
    values[:, [0, -1]] = (1 << 64) - 1, 1 << 63
    return {(token, row): int(values[token, row]) for token in range(batch) for row in range(width)}


def outputs(y: dict[tuple[int, int], int], batch: int, width: int) -> list[bytes]:
    rows = [b"".join(struct.pack("<Q", y[token, row]) for row in range(width)) for token in range(batch)]
    return [header(Message.OUTPUT, "BH", token, width) + row for token, row in enumerate(rows)]


@pytest.mark.parametrize("p_out", [1.0, 0.5])
@pytest.mark.parametrize("link_bytes", [1, 16])
def test_send(link_bytes, p_out):
    """A greeting, layers of several sizes, one with an error, counters whenever asked for, and a fatal error once."""
    rng = np.random.default_rng(link_bytes)
    params = Params(link_bytes=link_bytes, **WIDTHS)
    y = random_outputs(rng, params.max_batch, params.max_width)
    values = [(1 << 64) - 1, 0, *rng.integers(1 << 62, size=len(Counter) - 2).tolist()]
    done = header(Message.DONE)
    said_counters = [header(Message.COUNTERS, "B", len(Counter)) + struct.pack(f"<{len(Counter)}Q", *values)]
    fatal, void = int(Error.LENGTH | Error.ROUTE), int(Error.OVERFLOW | Error.SCALE)

    def layer(batch: int, width: int) -> Step:
        return Step([*outputs(y, batch, width), done], batch, width, layer_done=1)

    steps = [
        Step([hello(params)]),
        layer(1, 256),
        Step(said_counters, read_counters=1, at_once=True),
        Step([header(Message.ERROR, "B", void), done], layer_done=1, layer_error=void),
        layer(3, 512),
        layer(2, 256)._replace(at_once=True),
        Step(said_counters, read_counters=1),
        Step([header(Message.ERROR, "B", fatal)], fatal=fatal),
        Step([], fatal=fatal | 1),
    ]
    run(params, steps, y, values, seed=link_bytes, p_out=p_out)


def test_send_says_what_waits_in_order():
    """Asked for everything at once: the greeting, the layer's error and its end, the counters."""
    params = Params(link_bytes=4, **WIDTHS)
    counters = [header(Message.COUNTERS, "B", len(Counter)) + bytes(8 * len(Counter))]
    steps = [
        Step([hello(params)], at_once=True),
        Step([header(Message.ERROR, "B", 64), header(Message.DONE)], layer_done=1, layer_error=64, at_once=True),
        Step(counters, read_counters=1, at_once=True),
    ]
    run(params, steps)


def test_send_says_nothing_of_a_layer_after_a_fatal_error():
    """The layer may seem to end all the same: neither outputs nor an end of it are told."""
    dut, said = Send(Params(link_bytes=16, **WIDTHS)), []

    async def process(ctx):
        ctx.set(dut.o.ready, 1)
        ctx.set(dut.fatal, 4)
        ctx.set(dut.halted, 1)
        ctx.set(dut.layer_done, 1)
        for _ in range(500):
            if ctx.get(dut.o.valid):
                said.append(ctx.get(dut.o.p.data[0]))
            assert not ctx.get(dut.done)
            await ctx.tick()

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(process)
    sim.run()
    assert said == [Message.HELLO, Message.ERROR]


@pytest.mark.parametrize("link_bytes", [1, 16])
def test_send_starts_again_after_a_reset(link_bytes):
    """Wherever in a message it comes: then the greeting and, of the next layer, nothing but its own outputs."""
    rng = np.random.default_rng(link_bytes)
    params = Params(link_bytes=link_bytes, **WIDTHS)
    y = random_outputs(rng, 1, 256)
    want = [hello(params), *outputs(y, 1, 256), header(Message.DONE)]
    dut, reset = Send(params, DESIGN), Signal()

    async def process(ctx):
        for cycles in (1, 5, *rng.integers(20, 250, 4).tolist()):
            ctx.set(dut.batch, 2)
            ctx.set(dut.width, 512)
            ctx.set(dut.layer_done, 1)
            for _ in range(cycles):
                ctx.set(dut.o.ready, rng.random() < 0.8)
                await ctx.tick()
            ctx.set(reset, 1)
            await ctx.tick()
            ctx.set(reset, 0)
            steps = [Step(want[:1], at_once=True), Step(want[1:], layer_done=1)]
            said, _, dones = await converse(ctx, dut, steps, y, [0] * len(Counter), rng, 1.0)
            assert (said, dones) == (want, 1)

    sim = Simulator(ResetInserter(reset)(dut))
    sim.add_clock(1e-6)
    sim.add_testbench(process)
    sim.run()


@pytest.mark.parametrize("link_bytes", LINK_BYTES)
def test_send_cycles(link_bytes):
    """Within an output a beat every cycle, and rest after each word: one cycle, or two where words are beats."""
    params = Params(link_bytes=link_bytes, **WIDTHS)
    y = random_outputs(np.random.default_rng(0), 1, 256)
    cycles = run(params, [Step([hello(params)]), Step([*outputs(y, 1, 256), header(Message.DONE)], layer_done=1)], y)
    beats = 16 // link_bytes
    payload = cycles[2 * beats : -beats]
    rest = 3 if beats == 1 else 2
    want = [rest if (n + 1) % beats == 0 else 1 for n in range(len(payload) - beats - 1)]
    assert np.diff(payload[beats:]).tolist() == want


@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize("link_bytes", [1, 16])
def test_cut_passes(link_bytes, p_in, p_out):
    """Uncut messages go through unchanged, a beat every other cycle."""
    rng = np.random.default_rng(link_bytes)
    dut = Cut(link_bytes)
    items = [{"data": list(rng.bytes(link_bytes)), "last": int(rng.random() < 0.2)} for _ in range(200)]
    got = run_streams(dut, [(dut.i, items)], [(dut.o, len(items))], rng=rng, p_in=p_in, p_out=p_out, settle=4)
    assert [{"data": list(beat.data), "last": beat.last} for beat in got.payloads[0]] == items
    if p_in == p_out == 1:
        assert got.out_cycles[0] == [cycle + Cut.LATENCY for cycle in got.in_cycles[0]]
        assert np.diff(got.in_cycles[0]).tolist() == [2] * (len(items) - 1)


@pytest.mark.parametrize(("p_in", "p_out"), [*STALLS, (1.0, 0.1)])
@pytest.mark.parametrize("link_bytes", [1, 16])
@pytest.mark.parametrize("seed", range(3))
def test_cut(seed, link_bytes, p_in, p_out):
    """The sender is reset at any time, several times in a row too, and starts a new message: one beat ends the old one.

    Every beat that was taken comes out; what the sender offered while it was reset does not.
    """
    rng = np.random.default_rng(seed)
    dut = Cut(link_bytes)
    expected: list[tuple[bytes, int] | None] = []  # None: the beat that ends a message
    got = []

    async def process(ctx):
        inside = False
        beat = None
        waited = None
        for cycle in range(1500):
            late = cycle > 1450
            cut = not late and rng.random() < (0.4 if cycle % 100 < 20 else 0.02)
            if beat is None and not late and rng.random() < p_in:
                beat = rng.bytes(link_bytes), int(rng.random() < 0.2)
            ctx.set(dut.i.valid, beat is not None)
            data, last = beat or (rng.bytes(link_bytes), int(rng.random() < 0.5))
            ctx.set(dut.i.payload, {"data": list(data), "last": last})
            ctx.set(dut.cut, cut)
            ready = bool(late or rng.random() < p_out)
            ctx.set(dut.o.ready, ready)
            valid, bits = ctx.get(dut.o.valid), ctx.get(Value.cast(dut.o.payload))
            assert waited is None or (valid and bits == waited)
            waited = bits if valid and not ready else None
            if valid and ready:
                p = ctx.get(dut.o.payload)
                got.append((bytes(p.data), p.last))
            if beat is not None and ctx.get(dut.i.ready):
                assert not cut
                expected.append(beat)
                inside = not beat[1]
                beat = None
            if cut:
                expected.extend([None] if inside else [])
                inside = False
                beat = None  # the sender forgets what it was about to say
            await ctx.tick()
        assert not ctx.get(dut.o.valid)

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(process)
    sim.run()
    assert None in expected
    assert len(got) == len(expected)
    for beat, want in zip(got, expected, strict=True):
        assert beat == want or (want is None and beat[1])
