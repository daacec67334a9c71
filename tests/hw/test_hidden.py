from typing import NamedTuple

import numpy as np
import pytest
from amaranth.hdl import Value
from amaranth.sim import Simulator
from numpy.typing import NDArray

from hw.formats.params import Params
from hw.hidden import Hidden
from hw.layouts import Kind, activation_word
from sim.golden import swiglu

from .blocks import heavy_tailed
from .elements import as_tuple, hidden_words, router_weights

PARAMS = Params(max_batch=4, max_width=768)


class Expert(NamedTuple):
    """Row sums (tokens, rows) and router weights of an expert's tokens."""

    tokens: list[int]
    g: NDArray[np.int64]
    u: NDArray[np.int64]
    p: NDArray[np.int64]


def random_expert(rng: np.random.Generator, tokens: list[int], rows: int) -> Expert:
    shape = len(tokens), rows
    g, u = (np.rint(heavy_tailed(rng, *shape) * 2.0 ** rng.integers(34, 44, (shape[0], 1))) for _ in range(2))
    g[:, ::50], u[:, 1::60] = 0, 0
    return Expert(tokens, g.astype(np.int64), u.astype(np.int64), rng.integers(1, 65537, len(tokens)))


def run(experts: list[Expert], rng: np.random.Generator, *, pause=0.0, burst=1.0):
    """Offer each expert's sums, pausing with chance ``pause`` and going on with chance ``burst``, until it is done.

    Returns the words, their count at each ``done``, and the cycles from the first gate sum taken to ``done``.
    """
    dut = Hidden(PARAMS)
    layout = activation_word(PARAMS)
    words, dones, times = [], [], []

    async def bench(ctx):
        ctx.set(dut.o.ready, 1)
        for tokens, g, u, p in experts:
            rows = g.shape[1]
            ctx.set(dut.rows, rows)
            weights = router_weights(rng.integers(1, 65537, PARAMS.max_batch).tolist())
            for token, weight in zip(tokens, router_weights(p.tolist()), strict=True):
                weights[token] = weight
            sums = [
                {"value": int(values[n, row]), "token": token, "error": 0, "kind": kind, "end": token == tokens[-1]}
                for kind, values in ((Kind.UP, u), (Kind.GATE, g))
                for row in range(rows)
                for n, token in enumerate(tokens)
            ]
            waits = offered = paused = False
            read = taken = since = 0
            for _ in range(30000):
                paused = rng.random() >= burst if paused else rng.random() < pause
                if not waits and taken < len(sums):
                    offered = not paused
                    ctx.set(dut.i.payload, sums[taken])
                ctx.set(dut.i.valid, offered)
                *_, ready, asked, valid, word, done = await ctx.tick().sample(
                    dut.i.ready, dut.weight_token, dut.o.valid, Value.cast(dut.o.payload), dut.done
                )
                ctx.set(dut.weight, weights[read])
                read = asked
                waits = offered and not ready
                if offered and ready:
                    taken += 1
                    offered = False
                since += taken > rows * len(tokens)
                if valid:
                    words.append(as_tuple(layout.from_bits(word)))
                if done:
                    assert valid, "done without the last word"
                    dones.append(len(words))
                    times.append(since)
                    break
            else:
                raise TimeoutError(f"{taken} of {len(sums)} sums taken, {len(words)} words given")
        for _ in range(300):
            *_, valid, done = await ctx.tick().sample(dut.o.valid, dut.done)
            assert not valid
            assert not done

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
    return words, dones, times


def check(experts, rng, **how):
    words, dones, times = run(experts, rng, **how)
    want, ends = [], []
    for tokens, g, u, p in experts:
        want += hidden_words(PARAMS, tokens, swiglu.swiglu(g, u, p[:, None]))
        ends.append(len(want))
    assert words == want
    assert dones == ends
    return times


def test_hidden_back_to_back():
    """Two experts; each sum as soon as it is taken: an element every eight cycles, then the last block's rounding."""
    rng = np.random.default_rng(0)
    experts = [random_expert(rng, [0, 2, 3], 256), random_expert(rng, [1], 512)]
    times = check(experts, rng)
    for expert, cycles in zip(experts, times, strict=True):
        tokens, rows = expert.g.shape
        assert 8 * tokens * rows < cycles < 8 * tokens * rows + 256 * tokens + 200


@pytest.mark.parametrize(("pause", "burst"), [(0.5, 0.1), (0.02, 0.005)])
def test_hidden(pause, burst):
    """Single sums and pauses, or bursts of fifty and long pauses."""
    rng = np.random.default_rng(int(100 * pause))
    check([random_expert(rng, tokens, 256) for tokens in ([3], [0, 1])], rng, pause=pause, burst=burst)
