import numpy as np
import pytest
from amaranth.sim import Simulator

from hw.activations import Activations
from hw.formats.params import Params
from sim.golden import activations

from .blocks import heavy_tailed, load_words

PARAMS = [
    Params(max_batch=1, max_width=256),
    Params(max_batch=3, max_width=768),
    Params(tokens=2, max_batch=4, max_width=512),
    Params(tokens=4, max_batch=4, max_width=256),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_activations(params):
    """What was loaded for a token, in any order, is read in its lane and group, ``LATENCY`` cycles later."""
    rng = np.random.default_rng(0)
    x = activations.quantize(heavy_tailed(rng, params.max_batch, params.max_width) * 2.0 ** rng.integers(-9, 9))
    words = load_words(x)
    rng.shuffle(words)
    columns = params.max_columns
    places = [(g, c, j) for g in range(params.passes) for c in range(columns) for j in range(16)]
    rng.shuffle(places)
    dut = Activations(params)
    got = []

    async def bench(ctx):
        for word in words:
            ctx.set(dut.i.payload, word)
            ctx.set(dut.i.valid, rng.random() < 0.7)
            while not ctx.get(dut.i.valid):
                await ctx.tick()
                ctx.set(dut.i.valid, rng.random() < 0.7)
            assert ctx.get(dut.i.ready)
            await ctx.tick()
        ctx.set(dut.i.valid, 0)
        await ctx.tick().repeat(2)
        for group, column, index in places + [places[0]] * Activations.LATENCY:
            for port, value in ((dut.x_group, group), (dut.x_column, column), (dut.x_index, index)):
                ctx.set(port, value)
            ctx.set(dut.e_group, group)
            ctx.set(dut.e_column, column)
            await ctx.tick()
            lanes = [list(ctx.get(lane)) for lane in dut.x]
            got.append((lanes, [ctx.get(e) for e in dut.e]))

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
    for (group, column, index), (lanes, exponents) in zip(places, got[Activations.LATENCY - 1 :], strict=False):
        tokens = slice(group * params.tokens, (group + 1) * params.tokens)
        assert lanes == x.mantissas[tokens, column, 16 * index :][:, :16].tolist()
        assert exponents == x.exponents[tokens, column].tolist()
