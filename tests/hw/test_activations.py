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
    """What was loaded for a token, in any order, is read in its lane and group after the port's latency."""
    rng = np.random.default_rng(0)
    x = activations.quantize(heavy_tailed(rng, params.max_batch, params.max_width) * 2.0 ** rng.integers(-9, 9))
    words = load_words(x)
    rng.shuffle(words)
    columns = params.max_columns
    places = [(g, c, j) for g in range(params.passes) for c in range(columns) for j in range(16)]
    rng.shuffle(places)
    tokens = rng.integers(params.max_batch, size=len(places) + Activations.X_LATENCY).tolist()
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
        await ctx.tick().repeat(Activations.LOAD_LATENCY)
        asked = places + [places[0]] * Activations.X_LATENCY
        for (group, column, index), token in zip(asked, tokens, strict=True):
            for port, value in ((dut.x_group, group), (dut.x_column, column), (dut.x_index, index)):
                ctx.set(port, value)
            ctx.set(dut.e_token, token)
            ctx.set(dut.e_column, column)
            await ctx.tick()
            got.append(([list(ctx.get(lane)) for lane in dut.x], ctx.get(dut.e)))

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
    lanes = [values for values, _ in got[Activations.X_LATENCY - 1 :]]
    for (group, column, index), values in zip(places, lanes, strict=False):
        of_group = slice(group * params.tokens, (group + 1) * params.tokens)
        assert values == x.mantissas[of_group, column, 16 * index :][:, :16].tolist()
    exponents = [exponent for _, exponent in got[Activations.E_LATENCY - 1 :]]
    for (_, column, _), token, exponent in zip(places, tokens, exponents, strict=False):
        assert exponent == x.exponents[token, column]
