"""The driver and the Verilated device: the same bits as the golden model over either link and from either memory."""

from dataclasses import replace

import pytest

from host.device import Device, DeviceError
from host.expert_cache import BoardCache
from host.storage import Store
from hw.formats.messages import Counter, Layer, Mode
from hw.formats.params import Params
from hw.link import uart
from sim import board
from sim.device_sim import SimTransport
from sim.golden.device import GoldenTransport
from sim.golden.layer import Route
from tests.host.devices import MATRIX_BYTES, case

PARAMS = Params(max_batch=2, max_width=256, max_expert_width=256, max_experts=8, frame_bytes=8192, memory_bits=20)
NARROW = Params(link_bytes=8, max_batch=2, max_width=256, max_expert_width=256, max_experts=4)
DESIGN_ID = 0xFEEDBEEF
BYTES = (
    Counter.USEFUL_BYTES,
    Counter.DRAINED_BYTES,
    Counter.MOVED_BYTES,
    Counter.REQUESTED_BYTES,
    Counter.REQUESTS,
    Counter.MEMORY_BYTES,
)
STALLS = [(1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.3, 0.7)]


def sim(params: Params, **settings) -> SimTransport:
    """The Verilated device; as few builds as can be."""
    return SimTransport(params, design_id=DESIGN_ID, **settings)


def right(result, given) -> bool:
    """Outputs, requests and every sum of the ledger."""
    broken = [each for each in result.ledger.check() if not each.holds]
    return bool((result.sums == given.sums).all()) and not broken


@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("params", [PARAMS, NARROW], ids=["16", "8"])
def test_axis(tmp_path, params, mode, p_in, p_out):
    """More tokens than the device holds at once, with stalls both ways; the byte counters are the golden device's."""
    given = case(tmp_path, 1, tokens=3)
    given = given.taped() if mode == Mode.TAPE else given
    counters = []
    for transport in (sim(params, p_in=p_in, p_out=p_out, seed=3), GoldenTransport(params)):
        with Device(transport) as device, Store(given.path) as store:
            result = device.run_layer(given.layer, given.x, given.routes, store)
            assert right(result, given)
            assert sum(device.link.status()) == device.link.counts.frames_resent == 0
            counters.append({counter: result.counters[counter] for counter in BYTES})
    assert counters[0] == counters[1]


@pytest.mark.parametrize("here", [[], [2], [1, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.name.lower())
def test_memory(tmp_path, mode, here):
    """Experts in the board's memory are read there and not asked for; the others are; nothing else changes."""
    given = case(tmp_path, 2)
    given = given.taped() if mode == Mode.TAPE else given
    with Device(sim(PARAMS)) as device, Store(given.path) as store:
        device.load_experts(given.layer, here, store)
        assert device.memory_used == len(here) * 3 * MATRIX_BYTES
        for _ in range(2):
            result = device.run_layer(given.layer, given.x, given.routes, store)
            assert right(result, given)
            assert result.requests == [r for r in given.requests if expert(given.layer, r) not in here]
            passing = {expert(given.layer, r) for r in given.requests}
            assert result.counters[Counter.MEMORY_BYTES] == 3 * MATRIX_BYTES * len(passing & set(here))


def expert(layer: Layer, request: tuple[int, int]) -> int:
    """Whose matrix lies at a request's offset."""
    return (request[0] - layer.offsets[0]) // request[1] % layer.experts


def test_cache_in_memory(tmp_path):
    """Experts that come and go between layers: the place of one that went holds the next, and only that."""
    given = case(tmp_path, 5)
    with Device(sim(PARAMS)) as device, Store(given.path) as store:
        cache = BoardCache(device, [given.layer], 2, capacity=3 * 3 * MATRIX_BYTES)
        for pair in ((0, 1), (2, 0), (3, 2), (1, 3), (0, 1)):
            routes = [Route(token, expert, 32768) for token in range(2) for expert in pair]
            result = cache.run_layer(given.layer, given.x, routes, store)
            assert right(result, replace(given, routes=routes))
            assert result.requests == []
            assert result.ledger.memory == 2 * 3 * MATRIX_BYTES
        assert (cache.layers[0].hits, cache.layers[0].misses, cache.layers[0].evicted) == (4, 6, 3)
        assert device.memory_used == 3 * 3 * MATRIX_BYTES


def test_memory_survives_a_connection(tmp_path):
    """A device that is connected anew after an error in the middle of a layer still has the experts."""
    given = case(tmp_path, 4)
    with Device(sim(PARAMS)) as device, Store(given.path) as store:
        device.load_experts(given.layer, [1, 2], store)
        with pytest.raises(DeviceError, match="not finished within"):
            device.run_layer(given.layer, given.x, given.routes, store, deadline=2e-5)
        result = device.run_layer(given.layer, given.x, given.routes, store)
        assert right(result, given)
        assert result.counters[Counter.MEMORY_BYTES] > 0


def test_uart(tmp_path):
    """One expert for two tokens over two wires."""
    given = case(tmp_path, 3, tokens=2, experts=2, used=1)
    with Device(board.device(Params(**board.SIZES))) as device, Store(given.path) as store:
        result = device.run_layer(given.layer, given.x, given.routes, store)
        assert right(result, given)
        slots = result.counters[Counter.CYCLES] / (uart.BITS * board.BIT_CLOCKS)
        assert result.counters[Counter.MOVED_BYTES] / slots >= 0.97  # of what the wires could carry, all included
        assert sum(device.link.status()) == device.link.counts.frames_resent == 0


def test_parameters_of_the_bitstream(tmp_path):
    """What the device says of itself is what it was made of; a model beyond that is refused in a line."""
    given = case(tmp_path, 1)
    with Device(sim(PARAMS)) as device, Store(given.path) as store:
        assert device.params == PARAMS
        assert device.hello.design_id == DESIGN_ID
        wide = Layer(512, 256, 4, given.layer.offsets)
        with pytest.raises(DeviceError, match="holds vectors up to 256, the model needs 512: load one built with"):
            device.run_layer(wide, [[0.0] * 512], [], store)
