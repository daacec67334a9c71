"""Drive a component's streams in Amaranth's simulator, with stalls, a cycle limit and the stream rules checked."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from amaranth.hdl import ClockDomain, Module, Value
from amaranth.lib import data, stream
from amaranth.sim import Simulator


class Run(NamedTuple):
    """What came out: payloads by output, and the cycle in which each transfer of every port happened."""

    payloads: list[list[Any]]
    in_cycles: list[list[int]]
    out_cycles: list[list[int]]


STALLS = [(1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.3, 0.7)]
"""(chance that an input offers, chance that an output accepts) in a cycle."""


def run_streams(
    dut: Any,
    inputs: Sequence[tuple[stream.Interface, Sequence[Any]]],
    outputs: Sequence[tuple[stream.Interface, int]],
    *,
    rng: np.random.Generator,
    p_in: float = 1.0,
    p_out: float = 1.0,
    limit: int = 20000,
    settle: int = 0,
    in_turn: bool = False,
    setup: Sequence[tuple[Any, int]] = (),
    finish: Callable[[Any], None] | None = None,
) -> Run:
    """Feed every input its payloads and take ``count`` payloads from every output.

    Fails with AssertionError if a waiting payload changes or vanishes, and with TimeoutError after ``limit`` cycles.
    ``settle`` more cycles are run at the end, in which no output may offer more. ``setup`` sets plain ports before the
    start; ``finish(ctx)`` may look at them at the end. With ``in_turn`` an input starts four cycles after the one
    before it is done. Struct payloads are given as dicts and returned as ``data.Const``.
    """
    run = Run([[] for _ in outputs], [[] for _ in inputs], [[] for _ in outputs])
    cycle = 0
    generators = rng.spawn(len(inputs) + len(outputs))

    def feeder(index: int, port: stream.Interface, payloads: Sequence[Any], source: np.random.Generator):
        async def feed(ctx) -> None:
            while in_turn and index > 0 and len(run.in_cycles[index - 1]) < len(inputs[index - 1][1]):
                await ctx.tick()
            for _ in range(4 if in_turn and index > 0 else 0):
                await ctx.tick()
            for payload in payloads:
                while source.random() >= p_in:
                    await ctx.tick()
                ctx.set(port.payload, payload)
                ctx.set(port.valid, 1)
                await ctx.tick().until(port.ready)
                run.in_cycles[index].append(cycle)
                ctx.set(port.valid, 0)

        return feed

    def taker(index: int, port: stream.Interface, count: int, source: np.random.Generator):
        async def take(ctx) -> None:
            waiting = None
            extra = 0
            got = run.payloads[index]
            while len(got) < count or extra < settle:
                extra += len(got) == count
                ready = bool(source.random() < p_out)
                ctx.set(port.ready, ready)
                _, _, valid, bits = await ctx.tick().sample(port.valid, Value.cast(port.payload))
                if waiting is not None:
                    assert valid, f"output {index} withdrew a payload that waited"
                    assert bits == waiting, f"output {index} changed a payload that waited"
                assert not (valid and len(got) == count), f"output {index} offers more than {count} payloads"
                waiting = bits if valid and not ready else None
                if valid and ready:
                    layout = port.payload.shape()
                    got.append(layout.from_bits(bits) if isinstance(layout, data.Layout) else bits)
                    run.out_cycles[index].append(cycle)
            ctx.set(port.ready, 0)

        return take

    async def watch(ctx) -> None:
        nonlocal cycle
        while True:
            await ctx.tick()
            cycle += 1
            if cycle > limit:
                given = [f"{len(got)} of {count}" for got, (_, count) in zip(run.payloads, outputs, strict=True)]
                taken = [f"{len(t)} of {len(all_)}" for t, (_, all_) in zip(run.in_cycles, inputs, strict=True)]
                raise TimeoutError(f"after {limit} cycles: inputs took {taken}, outputs gave {given}")

    async def prepare(ctx) -> None:
        for port, value in setup:
            ctx.set(port, value)

    async def end(ctx) -> None:
        while any(len(got) < count for got, (_, count) in zip(run.payloads, outputs, strict=True)) or any(
            len(taken) < len(payloads) for taken, (_, payloads) in zip(run.in_cycles, inputs, strict=True)
        ):
            await ctx.tick()
        for _ in range(settle):
            await ctx.tick()
        if finish is not None:
            finish(ctx)

    top = Module()
    top.domains.sync = ClockDomain()  # a purely combinational component brings none
    top.submodules.dut = dut
    sim = Simulator(top)
    sim.add_clock(1e-6)
    sim.add_testbench(prepare)
    for index, ((port, payloads), source) in enumerate(zip(inputs, generators, strict=False)):
        sim.add_testbench(feeder(index, port, payloads, source))
    for index, ((port, count), source) in enumerate(zip(outputs, generators[len(inputs) :], strict=True)):
        sim.add_testbench(taker(index, port, count, source))
    sim.add_testbench(end)
    sim.add_testbench(watch, background=True)
    sim.run()
    return run
