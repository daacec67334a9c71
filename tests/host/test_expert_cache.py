import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from host import cache_replay
from host.cache_replay import passes
from host.device import Device, DeviceError, Ledger
from host.expert_cache import MIB, BoardCache, CacheError, ExpertCache, Lru, check, pools
from host.routing import RouteTrace, TraceRow
from host.storage import Pread, StorageError, Store, held_bytes
from hw.formats.messages import Layer, Mode
from sim.golden import layer as golden
from sim.golden.activations import quantize
from sim.golden.device import GoldenTransport
from sim.golden.layer import Route
from sim.workload import random_blocks
from tests.host.devices import HEAD_BYTES, MATRIX_BYTES, PARAMS

LAYERS, EXPERTS, USED = 3, 6, 2
EXPERT_BYTES = 3 * MATRIX_BYTES
MEMORY = replace(PARAMS, memory_bits=20)  # six experts


@dataclass(frozen=True)
class Model:
    """A file of several layers of random experts; routes of decoded tokens."""

    path: Path
    layers: list[Layer]
    tokens: list[list[list[Route]]]
    """Of each step, of each layer."""

    def read(self, offset: int, length: int):
        return np.frombuffer(self.path.read_bytes(), np.uint8, length, offset)

    def trace(self) -> RouteTrace:
        """The same routes as a trace; the engine asks in ascending order."""
        rows = [
            TraceRow(0, True, step, layer, route.expert, 1.0, None)
            for step, routes in enumerate(self.tokens)
            for layer, mine in enumerate(routes)
            for route in sorted(mine, key=lambda route: route.expert)
        ]
        return RouteTrace(self.path, "made", EXPERTS, USED, dict.fromkeys(range(LAYERS), EXPERT_BYTES), rows)

    def sums(self, layer: Layer, x, routes):
        y, errors = golden.run(layer, self.read, quantize(x), routes)
        assert errors == 0
        return y


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "experts.bin"
    blocks = random_blocks(np.random.default_rng(1), 3 * LAYERS * EXPERTS * 256)
    path.write_bytes(bytes(HEAD_BYTES) + blocks.tobytes() + b"\0")
    return path


def model_of(path: Path, seed: int = 1, *, steps: int = 7, batch: int = 1) -> Model:
    rng = np.random.default_rng(seed)
    size = EXPERTS * MATRIX_BYTES
    layers = [
        Layer(256, 256, EXPERTS, (start, start + size, start + 2 * size))
        for start in range(HEAD_BYTES, HEAD_BYTES + LAYERS * 3 * size, 3 * size)
    ]
    favour = rng.dirichlet(np.full(EXPERTS, 0.7)) * 0.9 + 0.1 / EXPERTS
    tokens = [
        [
            [
                Route(token, int(expert), int(rng.integers(1, 65537)))
                for token in range(batch)
                for expert in rng.choice(EXPERTS, USED, replace=False, p=favour)
            ]
            for _ in layers
        ]
        for _ in range(steps)
    ]
    return Model(path, layers, tokens)


def run_all(model: Model, run, batch: int = 1) -> Ledger:
    """All layers of all tokens; what comes out is golden's and every byte is accounted for."""
    rng = np.random.default_rng(7)
    total = Ledger()
    for routes in model.tokens:
        for layer, mine in zip(model.layers, routes, strict=True):
            x = rng.normal(0, 1, (batch, 256))
            result = run(layer, x, mine)
            assert (result.sums == model.sums(layer, x, mine)).all()
            assert [each for each in result.ledger.check() if not each.holds] == []
            total += result.ledger
    return total


# Bookkeeping.


def test_lru():
    lru = Lru(3)
    lru.begin([])
    for expert in range(3):
        assert lru.touch((0, expert), 1) == (False, [])
    assert lru.touch((0, 0), 1) == (True, [])
    assert lru.touch((0, 3), 2) == (False, [(0, 1), (0, 2)])
    assert (lru.used, len(lru), (0, 0) in lru) == (3, 2, True)
    assert lru.touch((0, 4), 4) == (False, [])
    assert (0, 4) not in lru
    lru.drop((0, 3))
    lru.drop((0, 3))
    assert lru.used == 1


def test_what_a_pass_wants_stays():
    lru = Lru(2)
    lru.begin([(0, 0), (0, 1)])
    assert lru.touch((0, 0), 1) == lru.touch((0, 1), 1) == (False, [])
    lru.begin([(0, 0), (0, 2), (0, 3)])
    assert lru.touch((0, 2), 1) == (False, [(0, 1)])
    assert lru.touch((0, 3), 1) == (False, [])
    assert lru.touch((0, 0), 1) == (True, [])
    assert (0, 3) not in lru


def test_pools():
    shared = pools("global", 12, range(3))
    assert shared[0] is shared[2]
    assert [pool.capacity for pool in pools("layer", 12, range(3)).values()] == [4, 4, 4]
    with pytest.raises(CacheError, match="policy must be one of layer, global, not 'fifo'"):
        pools("fifo", 1, [0])


@pytest.mark.parametrize("policy", ["layer", "global"])
def test_less_than_a_token_is_refused(policy):
    sizes = dict.fromkeys(range(4), MIB)
    assert check(policy, 4 * 2 * MIB, sizes, 2) is None
    with pytest.raises(CacheError) as caught:
        check(policy, 4 * 2 * MIB - 1, sizes, 2)
    assert str(caught.value).endswith("give 8 MiB at least, or none")
    assert "holds less than one token's 2 experts a layer" in str(caught.value)
    assert check(policy, 4 * 3 * MIB, sizes, 2, union=3.0) is None
    if policy == "layer":
        text = check(policy, 4 * 2 * MIB, sizes, 2, union=3.0)
        assert text == (
            "the expert cache has 2 slots a layer, a batch wants 3 experts: those beyond are read every time; "
            "12 MiB would hold them"
        )


# In RAM.


@pytest.mark.parametrize(("seed", "ahead"), [(0, True), (1, False)])
@pytest.mark.parametrize(("policy", "slots"), [("layer", 2), ("layer", 3), ("layer", 6), ("global", 2), ("global", 4)])
def test_in_ram(path, seed, ahead, policy, slots):
    """Right, within its capacity, and it hits as the replay of the same routes does."""
    model = model_of(path, seed)
    with (
        Device(GoldenTransport(PARAMS)) as device,
        ExpertCache(str(path), model.layers, USED, slots=slots, policy=policy, ahead=ahead) as cache,
    ):

        def run(layer, x, routes):
            result = device.run_layer(layer, x, routes, cache)
            assert cache.kept_bytes <= cache.capacity
            return result

        total = run_all(model, run)
        # What is kept is a copy: the store's buffers are as few as without it.
        assert sum(map(len, cache._reader.buffers)) == held_bytes(MATRIX_BYTES, ahead=ahead)
    trace = model.trace()
    replayed = cache_replay.lru(trace, passes(trace), policy, slots * LAYERS * EXPERT_BYTES)
    assert total.cache_hits == replayed.hits[1] > 0
    assert total.cache_misses == replayed.experts[1] - replayed.hits[1]
    assert total.storage_cached == total.cache_hits * EXPERT_BYTES
    assert total.storage_requested == total.cache_misses * EXPERT_BYTES == replayed.missed_bytes[1]
    assert sum(layer.hits for layer in cache.layers) == total.cache_hits
    assert sum(layer.hit_bytes for layer in cache.layers) == total.storage_cached
    assert sum(layer.missed_bytes for layer in cache.layers) == total.storage_requested
    assert (sum(layer.evicted for layer in cache.layers) > 0) == (slots < EXPERTS)
    assert cache.warning is None


@pytest.mark.parametrize("mode", list(Mode))
def test_the_second_time_nothing_is_read(path, mode):
    model = model_of(path, batch=5)  # in two parts
    layer, routes = replace(model.layers[1], mode=mode), model.tokens[0][1]
    x = np.random.default_rng(1).normal(0, 1, (5, 256))
    with (
        Device(GoldenTransport(PARAMS)) as device,
        ExpertCache(str(path), model.layers, USED, slots=EXPERTS) as cache,
    ):
        device.run_layer(layer, x, routes, cache)
        reads = cache.counts.reads
        result = device.run_layer(layer, x, routes, cache)
        assert cache.counts.reads == reads
    assert (result.sums == model.sums(layer, x, routes)).all()
    assert result.ledger.storage_requested == result.ledger.cache_misses == 0
    assert result.ledger.storage_cached == result.ledger.answered > 0
    assert (result.ledger.os_rchar or 0) < 65_536 < result.ledger.storage_cached
    assert all(each.holds for each in result.ledger.check())


def test_a_batch_beyond_the_slots(path):
    """What finds no room passes; the rest hits; a warning says so."""
    model = model_of(path, steps=6, batch=4)
    with (
        Device(GoldenTransport(PARAMS)) as device,
        ExpertCache(str(path), model.layers, USED, slots=2, union=4.5) as cache,
    ):
        total = run_all(model, lambda layer, x, routes: device.run_layer(layer, x, routes, cache), batch=4)
        assert cache.kept_bytes <= cache.capacity
        assert cache.warning is not None
        assert "2 slots a layer, a batch wants 4.5 experts" in cache.warning
    assert total.cache_hits > 0


def test_too_few_slots(path):
    layers = model_of(path).layers
    with pytest.raises(CacheError, match="holds less than one token's 2 experts a layer"):
        ExpertCache(str(path), layers, USED, slots=1)
    both: list[dict[str, Any]] = [{}, {"slots": 2, "capacity": 10**9}]
    for options in both:
        with pytest.raises(ValueError, match="give capacity or slots, one of them"):
            ExpertCache(str(path), layers, USED, **options)
    with pytest.raises(StorageError, match="cannot open"):
        ExpertCache(str(path) + "x", layers, USED, slots=2)


@pytest.fixture
def cache(path):
    with ExpertCache(str(path), model_of(path).layers, USED, slots=USED) as cache:
        yield cache


def pieces(expert: int, layer: int = 0) -> list[tuple[int, int]]:
    base = HEAD_BYTES + layer * 3 * EXPERTS * MATRIX_BYTES
    return [(base + (matrix * EXPERTS + expert) * MATRIX_BYTES, MATRIX_BYTES) for matrix in range(3)]


def get(cache: ExpertCache, expert: int, layer: int = 0) -> None:
    data = Path(cache.path).read_bytes()
    for offset, length in pieces(expert, layer):
        assert cache.read(offset, length) == data[offset : offset + length]


def test_as_a_store(cache, path):
    """Hits and misses in the order of asking; other pieces are read as ever; nothing is written into."""
    data = path.read_bytes()
    get(cache, 1)
    asked = [*pieces(1), (0, 50), *pieces(2), (HEAD_BYTES + MATRIX_BYTES, 210)]
    for offset, length in asked:
        cache.submit(offset, length)
    with pytest.raises(StorageError, match="8 reads wait already"):
        cache.submit(0, 1)
    with pytest.raises(StorageError, match="8 reads wait; take them"):
        cache.read(0, 1)
    for offset, length in asked:
        piece = cache.take()
        assert piece == data[offset : offset + length]
        assert piece.readonly
        del piece
    with pytest.raises(StorageError, match="no read waits"):
        cache.take()
    assert (cache.counts.hits, cache.counts.misses, cache.counts.cached) == (1, 2, EXPERT_BYTES)
    assert cache.counts.requested == 2 * EXPERT_BYTES + 50 + 210
    with pytest.raises(StorageError, match="are not within the file's"):
        cache.submit(10**9, 210)
    cache.close()
    for call in (cache.take, lambda: cache.submit(0, 1), lambda: cache.submit(*pieces(1)[0]), cache.clear):
        with pytest.raises(StorageError, match="the store is closed"):
            call()
    assert cache.kept_bytes == 0


def test_a_piece_outlives_its_expert(cache, path):
    get(cache, 0)
    offset, length = pieces(0)[0]
    held = cache.read(offset, length)
    for expert in range(1, EXPERTS):
        get(cache, expert)
    assert held == path.read_bytes()[offset : offset + length]
    assert cache.layers[0].evicted == EXPERTS - USED


def test_clear(cache):
    """An expert of which only a part came is no hit, and its bytes are right."""
    for piece in pieces(3):
        cache.submit(*piece)
    cache.take()
    cache.clear()
    get(cache, 3)
    assert (cache.counts.hits, cache.counts.misses) == (0, 2)
    get(cache, 3)
    assert cache.counts.hits == 1


def failing(number: int) -> Pread:
    """Reads of which that one fails."""
    calls = []

    def pread(*args) -> int:
        calls.append(args)
        if len(calls) == number + 1:
            raise OSError(5, "Input/output error")
        return os.preadv(*args)

    return pread


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("call", range(3))
def test_failing_read(path, ahead, call):
    with ExpertCache(str(path), model_of(path).layers, USED, slots=2, ahead=ahead, pread=failing(call)) as cache:
        for piece in pieces(4):
            cache.submit(*piece)
        failed = 0
        for offset, length in pieces(4):
            try:
                assert cache.take() == path.read_bytes()[offset : offset + length]
            except StorageError:
                failed += 1
        assert failed == 1
        get(cache, 4)
        assert (cache.counts.hits, cache.counts.misses) == (0, 2)
        get(cache, 4)
        assert cache.counts.hits == 1


@pytest.mark.parametrize("count", [1, 2, 4])
def test_interrupted_layer(path, count):
    """The device and the cache work afterwards."""
    model = model_of(path)
    with (
        Device(GoldenTransport(PARAMS)) as device,
        ExpertCache(str(path), model.layers, USED, slots=3) as cache,
    ):

        def stop(done: int, total: int) -> None:
            if done == count * MATRIX_BYTES:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            device.run_layer(model.layers[0], np.ones((1, 256)), model.tokens[0][0], cache, progress=stop)
        run_all(model, lambda layer, x, routes: device.run_layer(layer, x, routes, cache))


def test_file_that_changes(tmp_path, path):
    own = tmp_path / "own.bin"
    own.write_bytes(path.read_bytes())
    with ExpertCache(str(own), model_of(own).layers, USED, slots=2) as cache:
        get(cache, 0)
        os.utime(own, ns=(1, 1))
        with pytest.raises(StorageError, match="changed while in use"):
            cache.read(*pieces(1)[0])


# In the board's memory.


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", ["layer", "global"])
@pytest.mark.parametrize("memory_bits", [20, 22])
def test_on_the_board(path, seed, policy, memory_bits):
    """Right, every byte accounted for, and it hits as the replay of the same routes does; then again from RAM."""
    model = model_of(path, seed)
    capacity = min(1 << memory_bits, 12 * EXPERT_BYTES)
    with Device(GoldenTransport(replace(PARAMS, memory_bits=memory_bits))) as device, Store(path) as store:
        cache = BoardCache(device, model.layers, USED, policy=policy, capacity=capacity)
        total = run_all(model, lambda layer, x, routes: cache.run_layer(layer, x, routes, store))
        assert device.memory_used <= capacity
    trace = model.trace()
    replayed = cache_replay.lru(trace, passes(trace), policy, capacity)
    assert sum(layer.hits for layer in cache.layers) == replayed.hits[1] > 0
    assert total.loaded == total.storage_requested == replayed.missed_bytes[1]
    assert total.stored == total.memory == replayed.experts[1] * EXPERT_BYTES
    assert total.answered == 0
    assert sum(layer.evicted for layer in cache.layers) > 0


@pytest.mark.parametrize("mode", list(Mode))
def test_a_batch_beyond_the_memory(path, mode):
    """What finds no room comes over the link."""
    model = model_of(path, steps=3, batch=5)
    model = replace(model, layers=[replace(layer, mode=mode) for layer in model.layers])
    with Device(GoldenTransport(MEMORY)) as device, Store(path) as store:
        cache = BoardCache(device, model.layers, USED, union=4.5)
        assert cache.warning is not None
        total = run_all(model, lambda layer, x, routes: cache.run_layer(layer, x, routes, store), batch=5)
    assert total.answered > 0
    assert total.stored > total.loaded > 0


def test_board_and_ram(path):
    """Misses of the board's memory are hits in RAM."""
    model = model_of(path)
    with (
        Device(GoldenTransport(MEMORY)) as device,
        ExpertCache(str(path), model.layers, USED, slots=EXPERTS) as ram,
    ):
        cache = BoardCache(device, model.layers, USED)
        total = run_all(model, lambda layer, x, routes: cache.run_layer(layer, x, routes, ram))
    assert total.storage_cached + total.storage_requested == total.loaded
    assert total.storage_cached > 0
    assert total.storage_requested <= LAYERS * EXPERTS * EXPERT_BYTES


def test_boards_that_are_too_small(path):
    layers = model_of(path).layers
    with Device(GoldenTransport(PARAMS)) as device, pytest.raises(CacheError, match="holds less than one token's"):
        BoardCache(device, layers, USED)
    with Device(GoldenTransport(MEMORY)) as device, Store(path) as store:
        with pytest.raises(CacheError, match="1,048,576 bytes of the board's memory are free, 1,048,577 asked for"):
            BoardCache(device, layers, USED, capacity=(1 << 20) + 1)
        device.load_experts(layers[0], [0], store)
        with pytest.raises(CacheError, match="give 1 MiB at least"):
            BoardCache(device, layers, USED)


def test_loading_that_fails(path):
    """What was not loaded is loaded the next time."""
    model = model_of(path)
    layer, routes = model.layers[0], [Route(0, 1, 65536), Route(0, 2, 65536)]
    with Device(GoldenTransport(MEMORY)) as device, Store(path, pread=failing(3)) as store:
        cache = BoardCache(device, model.layers, USED)
        with pytest.raises(StorageError, match="Input/output error"):
            cache.run_layer(layer, np.ones((1, 256)), routes, store)
        assert device.loaded(layer) == {1}
        result = cache.run_layer(layer, np.ones((1, 256)), routes, store)
        assert (result.sums == model.sums(layer, np.ones((1, 256)), routes)).all()
        assert (cache.layers[0].hits, cache.layers[0].misses) == (1, 3)
        with pytest.raises(ValueError, match=r"expert in 0\.\.5"):
            cache.run_layer(layer, np.ones((1, 256)), [(0, 6, 1)], store)


def test_room_is_used_again(path):
    """An expert unloaded leaves its place to the next; the device never holds more than the memory."""
    layer = model_of(path).layers[0]
    with Device(GoldenTransport(MEMORY)) as device, Store(path) as store:
        ledger = device.load_experts(layer, range(6), store)
        assert (ledger.loaded, ledger.storage_requested) == (6 * EXPERT_BYTES, 6 * EXPERT_BYTES)
        assert all(each.holds for each in ledger.check())
        device.unload_experts(layer, [2, 2, 5])
        assert device.loaded(layer) == {0, 1, 3, 4}
        device.load_experts(layer, [5], store)
        other = model_of(path).layers[1]
        device.load_experts(other, [0], store)
        assert device.memory_used == 6 * EXPERT_BYTES
        with pytest.raises(DeviceError, match="load 0 at most"):
            device.load_experts(other, [1], store)
        x = np.ones((1, 256))
        for each in (layer, other):
            routes = [Route(0, expert, 8192) for expert in range(EXPERTS)]
            sums, _ = golden.run(each, model_of(path).read, quantize(x), routes)
            assert (device.run_layer(each, x, routes, store).sums == sums).all()


def test_sizes():
    """Granite: a layer's share of a token is 8 x 1,290,240 bytes."""
    sizes = dict.fromkeys(range(24), 1_290_240)
    with pytest.raises(CacheError, match="give 237 MiB at least"):
        check("layer", 236 * MIB, sizes, 8)
    assert check("layer", 237 * MIB, sizes, 8) is None
