"""The whole engine against the golden model: every schedule the same bits, every byte accounted for, every error told.

All runs are of the Verilated engine in this process (``sim.engine_sim``); the same Verilog under cocotb, with stalls
and stream rules checked from outside, is in ``test_engine_cocotb.py``.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest

from hw.formats import messages
from hw.formats.arithmetic import FRACTION_BITS
from hw.formats.messages import Counter, Error, Layer, Message, Mode
from hw.formats.params import Params
from hw.formats.q6_k import D_OFFSET
from sim.engine_sim import EngineError, EngineSim, Feed, start_messages
from sim.golden import activations, q6_k
from sim.golden import layer as golden
from sim.golden.layer import Route
from sim.workload import random_blocks, silu
from tests.hw.blocks import heavy_tailed

SMALL = Params(max_batch=8, max_width=512, max_expert_width=512, max_experts=16)
BASE = 1 << 33
"""Where the file's first expert lies: beyond 32 bits."""


class Bank:
    """A layer of random experts, as bytes of a file, and token vectors and routes for them."""

    def __init__(self, seed: int, *, width: int, expert_width: int, experts: int, batch: int, used: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        size = width * expert_width // 256 * 210
        self.bytes = random_blocks(rng, 3 * experts * size // 210, d=3e-5).reshape(-1)
        offsets = [BASE + n * experts * size for n in range(3)]
        self.layer = Layer(width, expert_width, experts, (offsets[2], offsets[0], offsets[1]))
        self.x = activations.quantize(heavy_tailed(rng, batch, width))
        self.routes = [
            Route(token, int(expert), int(rng.integers(65537)))
            for token in range(batch)
            for expert in rng.permutation(experts)[:used]
        ]

    def read(self, offset: int, length: int):
        return self.bytes[offset - BASE :][:length]

    def with_(self, **changes) -> Layer:
        return replace(self.layer, **changes)

    @functools.cached_property
    def golden(self) -> np.ndarray:
        y, errors = golden.run(self.layer, self.read, self.x, self.routes)
        assert errors == 0
        return y


def tokens_of(x: activations.Activations, tokens: list[int]) -> activations.Activations:
    return activations.Activations(x.mantissas[tokens], x.exponents[tokens])


def check_counters(run, *, link_bytes: int) -> None:
    """What holds for every layer run."""
    c = run.counters
    assert c[Counter.ACTIVE] + c[Counter.BACK_PRESSURED] + c[Counter.STARVED] + c[Counter.OVERHEAD] == c[Counter.CYCLES]
    assert c[Counter.CYCLES] <= run.cycles
    assert c[Counter.DRAINING] + c[Counter.WAITING] <= c[Counter.OVERHEAD]
    assert c[Counter.REQUESTS] == len(run.requests)
    requested = sum(length for _, length in run.requests)
    padding = sum(-length % link_bytes for _, length in run.requests)
    assert c[Counter.REQUESTED_BYTES] == requested == c[Counter.USEFUL_BYTES] + c[Counter.DRAINED_BYTES]
    assert c[Counter.MOVED_BYTES] == requested + padding


@pytest.fixture(scope="module")
def engine():
    with EngineSim(SMALL) as engine:
        yield engine


@pytest.mark.cosim
@pytest.mark.parametrize("seed", range(4))
def test_random_layers(engine, seed):
    """Shapes, batches, routes and stalls of all kinds, one layer after another in the same engine."""
    rng = np.random.default_rng(seed)
    for case in range(3):
        experts = int(rng.integers(1, SMALL.max_experts + 1))
        shape = {"width": int(rng.choice([256, 512])), "expert_width": int(rng.choice([256, 512])), "experts": experts}
        used = int(rng.integers(0, min(3, experts) + 1))
        bank = Bank(10 * seed + case, **shape, batch=int(rng.integers(1, SMALL.max_batch + 1)), used=used)
        p_in, p_out = ((1.0, 1.0), (0.3, 1.0), (0.8, 0.1))[case]
        latency, outstanding = int(rng.integers(2000)), int(rng.integers(1, messages.MAX_OUTSTANDING + 1))
        engine.feed(Feed(latency=latency, p_in=p_in, p_out=p_out, seed=seed + 1))
        mode = Mode(int(rng.integers(2)))
        layer = bank.with_(mode=mode, outstanding=outstanding)
        run = engine.run_layer(layer, bank.x, bank.routes, bank.read)
        np.testing.assert_array_equal(run.y, bank.golden)
        assert run.requests == golden.requests(layer, bank.routes)
        check_counters(run, link_bytes=SMALL.link_bytes)
    engine.feed(Feed())


LINKS = [
    Params(link_bytes=1, tokens=1, max_batch=2, max_width=256, max_expert_width=256, max_experts=2),
    Params(link_bytes=4, tokens=2, max_batch=2, max_width=256, max_expert_width=256, max_experts=3),
    Params(link_bytes=8, tokens=1, max_batch=3, max_width=768, max_expert_width=512, max_experts=5),
    Params(link_bytes=16, tokens=4, max_batch=16, max_width=4096, max_expert_width=2048, max_experts=130),
]


@pytest.mark.cosim
@pytest.mark.parametrize("params", LINKS, ids=str)
def test_parameters(params):
    """Other links, lanes, widths and depths, each filled to its limits."""
    wide = params.max_width > 1024
    experts = 3 if wide else params.max_experts
    bank = Bank(
        1,
        width=params.max_width,
        expert_width=params.max_expert_width,
        experts=experts,
        batch=params.max_batch,
        used=1,
    )
    if wide:  # one expert is 24,576 blocks: enough
        bank.routes = [route._replace(expert=1) for route in bank.routes if route.token % 5 == 0]
    with EngineSim(params) as engine:
        run = engine.run_layer(bank.layer, bank.x, bank.routes, bank.read)
        np.testing.assert_array_equal(run.y, bank.golden)
        check_counters(run, link_bytes=params.link_bytes)


LANES = [
    Params(tokens=tokens, max_batch=8, max_width=512, max_expert_width=512, max_experts=16) for tokens in (1, 2, 4, 8)
]


@pytest.mark.cosim
@pytest.mark.parametrize("params", LANES, ids=lambda params: f"tokens={params.tokens}")
def test_invariance(params):
    """The same eight tokens give the same bits whatever the schedule: all of them equal the one golden output."""
    bank = Bank(3, width=512, expert_width=256, experts=12, batch=8, used=3)
    rng = np.random.default_rng(8)
    with EngineSim(params) as engine:
        outputs = {}

        def run(name: str, layer: Layer, x, routes) -> None:
            outputs[name] = engine.run_layer(layer, x, routes, bank.read).y

        run("selected", bank.with_(mode=Mode.SELECTED), bank.x, bank.routes)
        run("tape", bank.with_(mode=Mode.TAPE), bank.x, bank.routes)
        run("one request at a time", bank.with_(outstanding=1), bank.x, bank.routes)
        for order in range(3):
            run(f"routes in another order {order}", bank.layer, bank.x, [bank.routes[n] for n in rng.permutation(24)])
        for name, feed in {
            "slow link": Feed(rate=1.5, latency=777),
            "stalls in": Feed(p_in=0.2, seed=2),
            "stalls out": Feed(p_out=0.02, seed=3),
            "stalls both": Feed(p_in=0.5, p_out=0.5, latency=50, seed=4),
        }.items():
            engine.feed(feed)
            run(name, bank.layer, bank.x, bank.routes)
        engine.feed(Feed())
        # One token at a time, then in two halves whose tokens also change places.
        for name, parts in {"alone": [[t] for t in range(8)], "halves": [[6, 1, 4, 3], [2, 5, 0, 7]]}.items():
            y = np.zeros_like(bank.golden)
            for tokens in parts:
                routes = [r._replace(token=tokens.index(r.token)) for r in bank.routes if r.token in tokens]
                y[tokens] = engine.run_layer(bank.layer, tokens_of(bank.x, tokens), routes, bank.read).y
            outputs[name] = y
        for name, y in outputs.items():
            np.testing.assert_array_equal(y, bank.golden, err_msg=name)


@pytest.mark.cosim
def test_bytes_follow_the_union(engine):
    """Selected mode moves the batch's union of experts once, tape mode all of them; nothing else."""
    bank = Bank(5, width=256, expert_width=256, experts=16, batch=8, used=4)
    expert_bytes = 3 * bank.layer.matrix_bytes
    for batch in (1, 2, 5, 8):
        routes = [route for route in bank.routes if route.token < batch]
        union = len({route.expert for route in routes})
        x = tokens_of(bank.x, list(range(batch)))
        for mode, experts in ((Mode.SELECTED, union), (Mode.TAPE, 16)):
            run = engine.run_layer(bank.with_(mode=mode), x, routes, bank.read)
            assert run.counters[Counter.REQUESTED_BYTES] == experts * expert_bytes
            assert run.counters[Counter.MOVED_BYTES] == experts * expert_bytes
            assert run.counters[Counter.USEFUL_BYTES] == union * expert_bytes
            check_counters(run, link_bytes=SMALL.link_bytes)


@pytest.mark.cosim
def test_an_always_ready_feed_keeps_the_multipliers_busy(engine):
    """At most 16.25 cycles a block, all included, even for an expert a quarter of Granite's size."""
    bank = Bank(6, width=512, expert_width=512, experts=4, batch=1, used=4)
    run = engine.run_layer(bank.layer, bank.x, bank.routes, bank.read)
    blocks = 4 * 3 * 1024
    assert run.counters[Counter.ACTIVE] == 16 * blocks
    assert run.cycles <= 16.25 * blocks
    assert run.counters[Counter.BACK_PRESSURED] == 0


@pytest.mark.cosim
def test_a_second_request_hides_the_store_s_latency(engine):
    """With two requests out, a latency is paid once; with one, by every matrix."""
    bank = Bank(7, width=512, expert_width=512, experts=4, batch=1, used=4)
    engine.feed(Feed(latency=3000))
    cycles = {}
    for outstanding in (1, 2):
        layer = bank.with_(outstanding=outstanding)
        cycles[outstanding] = engine.run_layer(layer, bank.x, bank.routes, bank.read).cycles
    engine.feed(Feed())
    matrices = 12
    assert cycles[1] - cycles[2] > (matrices - 2) * 2900


def float64_layer(bank: Bank, x: np.ndarray) -> np.ndarray:
    """The layer in float64, from dequantised weights and real vectors."""
    y = np.zeros_like(x)
    size = bank.layer.matrix_bytes
    for token, expert, weight in bank.routes:
        up, gate, down = (
            q6_k.dequantize(bank.read(offset + expert * size, size).reshape(-1, 210)).reshape(rows, -1)
            for offset, rows in zip(
                bank.layer.offsets, (bank.layer.expert_width,) * 2 + (bank.layer.width,), strict=True
            )
        )
        y[token] += weight / 65536 * (down @ (silu(gate @ x[token]) * (up @ x[token])))
    return y


@pytest.mark.cosim
def test_error_against_float64(engine):
    """A whole expert stays within 3e-4 relative RMS of float64 on heavy-tailed vectors."""
    bank = Bank(9, width=512, expert_width=512, experts=2, batch=8, used=1)
    x = heavy_tailed(np.random.default_rng(9), 8, 512)
    bank.x = activations.quantize(x)
    run = engine.run_layer(bank.layer, bank.x, bank.routes, bank.read)
    want = float64_layer(bank, x)
    error = np.ldexp(run.y.astype(np.float64), -FRACTION_BITS) - want
    assert np.sqrt(np.mean(error**2) / np.mean(want**2)) < 3e-4


def refused(engine: EngineSim, error: Error, layer: Layer, bank: Bank, **changes) -> None:
    """The layer is refused with ``error``; after a reset, unless it ended by itself, the engine is as good as new."""
    given = {"x": bank.x, "routes": bank.routes, "read": bank.read} | changes
    with pytest.raises(EngineError) as caught:
        engine.run_layer(layer, **given)
    assert caught.value.error == error
    if error in Error.OVERFLOW | Error.SCALE:
        assert engine.receive()[0] == Message.DONE
    else:
        engine.reset()
    np.testing.assert_array_equal(engine.run_layer(bank.layer, bank.x, bank.routes, bank.read).y, bank.golden)


@pytest.fixture(scope="module")
def bank():
    return Bank(20, width=512, expert_width=256, experts=4, batch=3, used=2)


@pytest.mark.cosim
@pytest.mark.parametrize("cut", [16, 210, 512 * 210 - 1])
@pytest.mark.parametrize("which", [0, 4])
def test_short_answer(engine, bank, cut, which):
    count = 0

    def read(offset, length):
        nonlocal count
        count += 1
        return bank.read(offset, length)[: length - cut if count == which + 1 else length]

    refused(engine, Error.LENGTH, bank.layer, bank, read=read)


@pytest.mark.cosim
def test_long_answer(engine, bank):
    refused(engine, Error.LENGTH, bank.layer, bank, read=lambda offset, length: bank.read(offset, length + 210))


IMPOSSIBLE = [
    {"width": 1024},
    {"width": 0},
    {"width": 300},
    {"expert_width": 768},
    {"experts": 17},
    {"experts": 0},
    {"outstanding": 0},
    {"outstanding": 9},
]
"""Changes of a layer that no engine takes, or none of these parameters."""


@pytest.mark.cosim
@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=str)
def test_impossible_configuration(engine, bank, changes):
    refused(engine, Error.CONFIG, bank.with_(**changes), bank)


@pytest.mark.cosim
@pytest.mark.parametrize("route", [Route(3, 0, 1), Route(0, 4, 1), Route(0, 65535, 1), Route(0, 3, 65537)], ids=str)
def test_impossible_route(engine, bank, route):
    routes = [r for r in bank.routes if (r.token, r.expert) != route[:2]]
    refused(engine, Error.ROUTE, bank.layer, bank, routes=[*routes, route])
    refused(engine, Error.ROUTE, bank.layer, bank, routes=[route, *routes])


@pytest.mark.cosim
def test_route_given_twice(engine, bank):
    refused(engine, Error.ROUTE, bank.layer, bank, routes=[*bank.routes, bank.routes[0]])


@pytest.mark.cosim
def test_bad_scale_and_overflow_end_their_layer_only(engine, bank):
    expert = bank.routes[0].expert

    def spoilt(half: int):
        def read(offset, length):
            data = bank.read(offset, length).copy()
            if offset == bank.layer.offsets[2] + expert * length:
                data[D_OFFSET : D_OFFSET + 2] = [half & 0xFF, half >> 8]
            return data

        return read

    for half in (0x7C00, 0xFC00, 0x7E01):  # infinities, NaN
        refused(engine, Error.SCALE, bank.layer, bank, read=spoilt(half))
    large = activations.Activations(bank.x.mantissas, np.full_like(bank.x.exponents, 20))
    refused(engine, Error.OVERFLOW, bank.layer, bank, x=large)


@pytest.mark.cosim
@pytest.mark.parametrize(
    "message",
    [
        b"\x00" * 16,
        b"\x07" + b"\x00" * 15,
        b"\xff" * 40,
        messages.weights(b"\x00" * 64),
        messages.load_x(8, 0, 0, b"\x00" * 512),
        messages.load_x(0, 2, 0, b"\x00" * 512),
        messages.load_x(0, 0, 0, b"\x00" * 512)[:-16],
        messages.load_x(0, 0, 0, b"\x00" * 512) + b"\x00" * 16,
        messages.routes(1, []),
        messages.bare(Message.RESET) + b"\x00",
    ],
    ids=range(10),
)
def test_impossible_message(engine, bank, message):
    engine.reset()
    engine.send(message)
    told = engine.receive(limit=10_000)
    assert told[:2] == bytes([Message.ERROR, Error.MESSAGE])
    engine.send(messages.config(bank.layer))  # discarded now
    engine.send(messages.bare(Message.READ_COUNTERS))
    engine.reset()
    np.testing.assert_array_equal(engine.run_layer(bank.layer, bank.x, bank.routes, bank.read).y, bank.golden)


@pytest.mark.cosim
@pytest.mark.parametrize("after", [0, 500, 20_000, 60_000, 130_000])
def test_reset_in_the_middle(engine, bank, after):
    """Wherever a layer is broken off, the next one is right."""
    engine.feed(Feed(p_out=0.5, seed=after + 1))
    for message in start_messages(bank.layer, bank.x, bank.routes):
        engine.send(message)
    end = engine.cycle + after
    while engine.cycle < end:
        engine.run(end - engine.cycle)
        for offset, length in engine.requests():
            engine.send(messages.weights(b""), bank.read(offset, length), answer=True)
    engine.reset()
    engine.feed(Feed())
    np.testing.assert_array_equal(engine.run_layer(bank.layer, bank.x, bank.routes, bank.read).y, bank.golden)
