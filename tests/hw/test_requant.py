from collections import deque
from typing import NamedTuple

import numpy as np
import pytest
from amaranth.hdl import Value
from amaranth.sim import Simulator
from numpy.typing import NDArray

from hw.formats.params import Params
from hw.layouts import activation_word
from hw.requant import Requant

from .elements import as_tuple, hidden_words, scaled_float

PARAMS = Params(max_batch=8, max_width=768)


class Expert(NamedTuple):
    """An expert's ``h``, a row for each of its tokens."""

    tokens: list[int]
    h: NDArray[np.float64]


def run(params: Params, experts: list[Expert], rng: np.random.Generator, *, p_ready=1.0, p_in=1.0):
    """Elements six cycles apart at least, and a memory that answers after ``READ_LATENCY`` cycles what was written.

    Each expert begins in the cycle after the one before was done. Returns the words, and their count at each ``done``.
    """
    dut = Requant(params)
    layout = activation_word(params)
    words, dones, content = [], [], {}
    void = {"magnitude": 0x2AAAA, "exponent": 100, "negative": 1}

    async def cycles(ctx, queue, finished):
        wait, reads = 0, deque([void] * Requant.READ_LATENCY)
        for _ in range(50000):
            place, element = queue[0] if queue and wait <= 0 and rng.random() < p_in else (None, void)
            if place is not None:
                queue.pop(0)
                wait = 6
            wait -= 1
            ready = rng.random() < p_ready
            ctx.set(dut.i_valid, place is not None)
            ctx.set(dut.i, {"h": element, "place": place or {"token": 0, "row": 255, "end": 1}})
            ctx.set(dut.r_ready, ready)
            ctx.set(dut.r_data, reads.popleft())
            *_, asked, token, row, valid, word, done = await ctx.tick().sample(
                dut.r_valid, dut.r_token, dut.r_row, dut.o.valid, Value.cast(dut.o.payload), dut.done
            )
            if place is not None:
                content[place["token"], place["row"]] = element
            reads.append(content.get((token, row), void) if asked and ready else void)
            if valid:
                words.append(as_tuple(layout.from_bits(word)))
            if done:
                assert valid, "done without the last word"
                dones.append(len(words))
            if finished(done):
                return
        raise TimeoutError(f"{len(queue)} elements not taken, {len(words)} words given, done after {dones}")

    async def bench(ctx):
        ctx.set(dut.o.ready, 1)
        for tokens, h in experts:
            ctx.set(dut.rows, h.shape[1])
            elements = [scaled_float(vector) for vector in h]
            for vector in elements:
                for element in vector:
                    if element["magnitude"] == 0:
                        element["exponent"] = int(rng.integers(-512, 512))  # void
            queue = [
                ({"token": token, "row": row, "end": token == tokens[-1]}, elements[n][row])
                for row in range(h.shape[1])
                for n, token in enumerate(tokens)
            ]
            await cycles(ctx, queue, bool)
        left = iter(range(20))
        await cycles(ctx, [], lambda done: next(left, None) is None)

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
    return words, dones


def check(params, experts, rng, **how):
    words, dones = run(params, experts, rng, **how)
    want, ends = [], []
    for tokens, h in experts:
        want += hidden_words(params, tokens, h)
        ends.append(len(want))
    assert words == want
    assert dones == ends


def numbers(rng, size: int | tuple[int, ...], exponents) -> NDArray[np.float64]:
    """Of 18 bits, ``exponents`` being those of their highest bit."""
    magnitude = rng.integers(1 << 17, 1 << 18, size) * rng.choice([-1, 1], size)
    return np.ldexp(magnitude.astype(np.float64), np.broadcast_to(exponents, size) - 17)


def test_requant_corners():
    """A block for each token."""
    rng = np.random.default_rng(0)
    peak, above, ties, tiny, clamped, mixed, far = (np.zeros(256) for _ in range(7))
    small = rng.integers(-(1 << 17), 1 << 17, 255).astype(np.float64)
    peak[rng.permutation(256)] = [*small, 262136]  # the largest that keeps its exponent, 32767 units
    above[rng.permutation(256)] = [*small, -262137]
    ties[rng.permutation(256)] = [20000, *(np.arange(-127, 128) + 0.5)]
    tiny[:] = numbers(rng, 256, rng.integers(-140, -114, 256))
    tiny[100] = np.ldexp(262136.0, -128 - 3)  # the least exponent, by itself
    clamped[:] = np.ldexp(ties, -129 - rng.integers(0, 40, 256))
    clamped[100] = np.ldexp(262136.0, -129 - 3)  # it would be one less
    mixed[:] = numbers(rng, 256, rng.integers(-6, 14, 256))
    mixed[:90] = [m * 2.0**-right for right in range(4, 22) for m in (131072, 131073, 196608, 262142, -262143)]
    mixed[90] = 32767  # units of 1, so that is how far they are shifted
    far[:] = numbers(rng, 256, rng.integers(-190, 60, 256))
    far[::3] = 0
    h = np.stack([peak, np.zeros(256), above, ties, tiny, clamped, mixed, far])
    check(PARAMS, [Expert(list(range(8)), h)], rng)
    check(PARAMS, [Expert(list(range(8)), -h[::-1])], rng, p_ready=0.7)


@pytest.mark.parametrize(
    ("max_batch", "p_ready", "p_in"), [(8, 1.0, 1.0), (8, 0.35, 0.5), (3, 0.6, 1.0), (1, 0.6, 1.0)]
)
def test_requant(max_batch, p_ready, p_in):
    """Experts in turn, of several blocks and other tokens each; lone tokens, too, and blocks of zeros in between."""
    rng = np.random.default_rng(max_batch)
    params = Params(max_batch=max_batch, max_width=768)
    last = max_batch - 1
    experts = []
    for tokens, columns in [({0, last}, 2), ({last}, 2), ({0, last // 3, last // 2}, 1)]:
        shape = len(tokens), columns, 256
        base = rng.integers(-60, 20, shape[:2])[..., None]
        h = numbers(rng, shape, base + rng.integers(-22, 1, shape))
        h *= rng.random(shape) < 0.9
        h[0, 0] *= len(experts) != 1
        experts.append(Expert(sorted(tokens), h.reshape(len(tokens), -1)))
    check(params, experts, rng, p_ready=p_ready, p_in=p_in)
