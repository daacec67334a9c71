import dataclasses
import os
import signal
import subprocess
import sys
import time
import tty
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from host.device import Device, DeviceError, Ledger
from host.link import LinkError
from host.storage import StorageError, Store
from hw.formats import messages
from hw.formats.messages import Counter, Error, Layer, Message, Mode
from hw.formats.params import Params
from sim.golden import device as golden_device
from sim.golden.activations import quantize
from sim.golden.device import GoldenEngine, GoldenTransport
from sim.golden.layer import requests
from tests.host.devices import HEAD_BYTES, MATRIX_BYTES, PARAMS, Peer, case

ROOT = Path(__file__).parents[2]
MODES = list(Mode)
LOAD = "load one built with"


@pytest.fixture
def device():
    with Device(GoldenTransport(PARAMS)) as device:
        yield device


def broken(result) -> list:
    return [each for each in result.ledger.check() if not each.holds]


def works(device: Device, layer, store: Store) -> bool:
    """Whether the device does what it should, whatever it did before."""
    result = device.run_layer(layer.layer, layer.x, layer.routes, store)
    return bool((result.sums == layer.sums).all()) and not broken(result)


class Damaging(GoldenTransport):
    """Flips a bit in some of what passes, either way."""

    def __init__(self, params: Params, seed: int) -> None:
        super().__init__(params)
        self._rng = np.random.default_rng(seed)

    def _damage(self, data: bytes) -> bytes:
        damaged = bytearray(data)
        if damaged and self._rng.random() < 0.02:
            damaged[self._rng.integers(len(damaged))] ^= 1 << int(self._rng.integers(8))
        return bytes(damaged)

    def write(self, data) -> None:
        super().write(self._damage(bytes(data)))

    def read(self, timeout: float) -> bytes:
        return self._damage(super().read(timeout))


def engine_of(device: Device) -> GoldenEngine:
    return cast(GoldenTransport, device.transport).device.engine


def instead(monkeypatch, device: Device, kind: Message, act) -> None:
    """The engine does ``act(engine, take, message)`` where it gets a message of this kind."""
    engine = engine_of(device)
    real = engine.take
    monkeypatch.setattr(
        engine, "take", lambda message: act(engine, real, message) if message[0] == kind else real(message)
    )


# Layers.


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [1, 4, 6, 9])
@pytest.mark.parametrize("ahead", [True, False])
def test_layer(device, tmp_path, seed, mode, tokens, ahead):
    """Of one token, of all that the device holds (4), of more."""
    layer = case(tmp_path, seed, tokens=tokens)
    layer = layer.taped() if mode == Mode.TAPE else layer
    seen: list[tuple[int, int]] = []
    with Store(layer.path, ahead=ahead) as store:
        progress = lambda done, total: seen.append((done, total))  # noqa: E731
        result = device.run_layer(layer.layer, layer.x, layer.routes, store, progress=progress)
    assert (result.sums == layer.sums).all()
    assert result.sums.dtype == np.int64
    assert result.y.dtype == np.float32
    assert (result.y == (layer.sums * 2.0**-40).astype(np.float32)).all()
    asked = []
    for first in range(0, tokens, 4):
        mine = [route for route in layer.routes if first <= route.token < first + 4]
        asked += requests(layer.layer, mine)
    assert result.requests == asked
    total = len(asked) * MATRIX_BYTES
    assert seen == [(done, total) for done in range(MATRIX_BYTES, total + 1, MATRIX_BYTES)]
    assert broken(result) == []
    ledger = result.ledger
    assert ledger.requested == ledger.answered == ledger.storage_requested == ledger.storage_read == total
    assert result.counters[Counter.REQUESTED_BYTES] == total
    assert (ledger.drained > 0) == (mode == Mode.TAPE)
    assert ledger.link_resent == 0
    assert ledger.framing / total < 0.02
    if ledger.os_rchar is not None:
        # Other threads of the test runner may read a little, too.
        assert total <= ledger.os_rchar < total + 65_536


@pytest.mark.parametrize("params", [Params(link_bytes=1), Params(link_bytes=8, tokens=4), Params(frame_bytes=65536)])
def test_layer_on_other_designs(tmp_path, params):
    layer = case(tmp_path, tokens=1, used=3)  # their routes end in the middle of a word
    with Device(GoldenTransport(params)) as device, Store(layer.path) as store:
        assert device.params == params
        assert works(device, layer, store)
        assert works(device, layer.taped(), store)


def test_layer_quantised_before(device, tmp_path):
    layer = case(tmp_path)
    with Store(layer.path) as store:
        result = device.run_layer(layer.layer, quantize(layer.x), [tuple(route) for route in layer.routes], store)
    assert (result.sums == layer.sums).all()


def test_layer_without_routes(device, tmp_path):
    layer = case(tmp_path)
    with Store(layer.path) as store:
        result = device.run_layer(layer.layer, layer.x, [], store)
    assert not result.sums.any()
    assert result.requests == []
    assert broken(result) == []


def test_direct_reads_spill(device, tmp_path):
    layer = case(tmp_path)
    try:
        store = Store(layer.path, direct=True)
        store.read(0, 1)
    except StorageError as error:
        pytest.skip(str(error))
    with store:
        result = device.run_layer(layer.layer, layer.x, layer.routes, store)
    assert (result.sums == layer.sums).all()
    assert broken(result) == []
    assert result.ledger.storage_spilled > 0


@pytest.mark.parametrize("seed", range(4))
def test_damaged_link(tmp_path, seed):
    """Whatever has to be sent again is accounted for, and the numbers are right."""
    layer = case(tmp_path)
    with Device(Damaging(PARAMS, seed)) as device, Store(layer.path) as store:
        result = device.run_layer(layer.layer, layer.x, layer.routes, store)
    assert (result.sums == layer.sums).all()
    assert broken(result) == []
    assert result.ledger.link_resent > 0


def test_ledgers_add_up(device, tmp_path):
    layer = case(tmp_path)
    with Store(layer.path) as store:
        one = device.run_layer(layer.layer, layer.x, layer.routes, store).ledger
        two = device.run_layer(layer.layer, layer.x, layer.routes, store).ledger
    total = one + two
    assert total.payload == one.payload + two.payload
    assert all(each.holds for each in total.check())
    assert one + Ledger() == one
    assert (one + dataclasses.replace(two, os_rchar=None)).os_rchar is None
    assert not (one + dataclasses.replace(two, os_is_storage=False)).os_is_storage


@pytest.mark.parametrize(
    ("changed", "texts"),
    [
        ("requested", ["requested = answered + stored", "requested = useful + drained"]),
        ("useful", ["requested = useful + drained"]),
        ("drained", ["requested = useful + drained"]),
        ("moved", ["moved = answered + padding"]),
        ("padding", ["moved = answered + padding"]),
        ("memory", ["memory = stored"]),
        ("storage_read", ["storage read = requested + spilled", "read by the process, at least = storage read"]),
        ("storage_spilled", ["storage read = requested + spilled"]),
        ("link_resent", ["written = payload + framing + resent"]),
        ("framing", ["written = payload + framing + resent"]),
        ("os_rchar", ["read by the process, at least = storage read"]),
    ],
)
def test_ledger_that_does_not_add_up(changed, texts):
    ledger = dataclasses.replace(Ledger(), **{changed: -1 if changed == "os_rchar" else 1})
    assert [each.text for each in ledger.check() if not each.holds] == texts


# What does not fit, and what is not possible.


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (
            Layer(2048, 512, 8, (0, 0, 0)),
            "this bitstream holds vectors up to 512, the model needs 2,048: load one built with max_width=2048",
        ),
        (
            Layer(512, 768, 8, (0, 0, 0)),
            f"this bitstream holds experts up to 512 wide, the model needs 768: {LOAD} max_expert_width=768",
        ),
        (
            Layer(512, 512, 1024, (0, 0, 0)),
            "this bitstream holds up to 8 experts a layer, the model needs 1,024: load one built with max_experts=1024",
        ),
    ],
)
def test_model_that_does_not_fit(device, tmp_path, layer, text):
    small = case(tmp_path)
    with Store(small.path) as store:
        for use in (
            lambda: device.run_layer(layer, np.zeros((1, layer.width)), [], store),
            lambda: device.load_experts(layer, [0], store),
            lambda: device.check_fits(layer),
        ):
            with pytest.raises(DeviceError) as caught:
                use()
            assert str(caught.value) == f"golden: {text}"
        assert works(device, small, store)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": np.zeros((2, 512))}, "x must be tokens x 256, not of shape"),
        ({"x": np.zeros(256)}, "x must be tokens x 256"),
        ({"x": np.zeros((0, 256))}, "x must be tokens x 256"),
        ({"x": np.full((2, 256), np.nan)}, "is not finite"),
        ({"routes": [(2, 0, 1)]}, "token must be in 0..1"),
        ({"routes": [(0, 4, 1)]}, "expert in 0..3"),
        ({"routes": [(0, 0, 65537)]}, "weight in 0..65536"),
        ({"routes": [(0, -1, 1)]}, r"route \(0, -1, 1\)"),
        ({"routes": [(0, 1, 1), (1, 1, 1), (0, 1, 2)]}, "wants an expert twice"),
        ({"outstanding": 9}, "outstanding must be in 1..8, not 9"),
    ],
)
def test_impossible_batches(device, tmp_path, change, text):
    layer = case(tmp_path)
    shape = dataclasses.replace(layer.layer, outstanding=change.get("outstanding", 2))
    with Store(layer.path) as store:
        with pytest.raises(ValueError, match=text):
            device.run_layer(shape, change.get("x", layer.x), change.get("routes", layer.routes), store)
        assert works(device, layer, store)


def test_weight_must_be_whole(device, tmp_path):
    layer = case(tmp_path)
    with Store(layer.path) as store, pytest.raises(TypeError):
        device.run_layer(layer.layer, layer.x, [(0, 0, 0.5)], store)


def test_bitstream_of_another_version(monkeypatch):
    monkeypatch.setattr(golden_device.messages, "hello", partial(messages.hello, version=1))
    with pytest.raises(LinkError) as caught:
        Device.open("golden")
    assert str(caught.value).startswith("golden: speaks version 1, this emufpga speaks 2: load the bitstream of this")
    assert "\n" not in str(caught.value)


# What goes wrong on the way. The device works afterwards.


@pytest.mark.parametrize("ahead", [True, False])
def test_file_that_ends_early(device, tmp_path, ahead):
    layer = case(tmp_path)
    data = layer.path.read_bytes()
    with Store(layer.path, ahead=ahead) as store:
        os.truncate(layer.path, HEAD_BYTES + 5 * MATRIX_BYTES)
        with pytest.raises(StorageError):
            device.run_layer(layer.layer, layer.x, layer.routes, store)
    layer.path.write_bytes(data)
    with Store(layer.path) as store:
        assert works(device, layer, store)


def test_request_beyond_the_file(device, tmp_path):
    layer = case(tmp_path)
    far = dataclasses.replace(layer.layer, offsets=(*layer.layer.offsets[:2], 10**9))
    with Store(layer.path) as store:
        with pytest.raises(StorageError, match="are not within the file's"):
            device.run_layer(far, layer.x, layer.routes, store)
        assert works(device, layer, store)


def test_damaged_scale(device, tmp_path):
    layer = case(tmp_path)
    data = bytearray(layer.path.read_bytes())
    good = bytes(data)
    offset, _ = layer.requests[0]
    data[offset + 208 : offset + 210] = b"\xff\x7f"
    layer.path.write_bytes(data)
    with Store(layer.path) as store:
        with pytest.raises(DeviceError) as caught:
            device.run_layer(layer.layer, layer.x, layer.routes, store)
    assert str(caught.value) == (
        "golden: the device reports an error: a block's scale is NaN or infinite: the model file is damaged (code 64)"
    )
    layer.path.write_bytes(good)
    with Store(layer.path) as store:
        assert works(device, layer, store)


class Short(Store):
    """Gives a block less than was asked for."""

    def take(self, timeout: float = 1.0) -> memoryview:
        return super().take(timeout)[:-210]


def test_answer_of_a_wrong_length(device, tmp_path):
    layer = case(tmp_path)
    with Short(layer.path) as store:
        with pytest.raises(DeviceError, match=r"an answer had more or fewer bytes than its matrix \(code 1\)"):
            device.run_layer(layer.layer, layer.x, layer.routes, store)
    with Store(layer.path) as store:
        assert works(device, layer, store)


@pytest.mark.parametrize("error", list(Error))
def test_errors_in_words(device, tmp_path, monkeypatch, error):
    layer = case(tmp_path)

    def refuse(engine, take, message) -> None:
        engine.say(bytes([Message.ERROR, error]).ljust(16, b"\0"))

    with Store(layer.path) as store:
        instead(monkeypatch, device, Message.WEIGHTS, refuse)
        with pytest.raises(
            DeviceError, match=rf"^golden: the device reports an error: .* \(code {error:d}\)$"
        ) as caught:
            device.run_layer(layer.layer, layer.x, layer.routes, store)
        assert "none that is known" not in str(caught.value)
        monkeypatch.undo()
        assert works(device, layer, store)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (messages.fetch(HEAD_BYTES, MATRIX_BYTES), "request 3 of this layer"),
        (messages.bare(Message.DONE), "what a layer brings"),
        (bytes([Message.OUTPUT, 0, 0, 1]).ljust(16, b"\0") + bytes(8 * 256), "outputs of this layer"),
        (bytes([Message.OUTPUT, 0, 0, 2]).ljust(16, b"\0") + bytes(8 * 512), "outputs of this layer"),
        (bytes([Message.OUTPUT, 7, 0, 1]).ljust(16, b"\0") + bytes(8 * 256), "outputs of this layer"),
        (bytes([99]).ljust(16, b"\0"), "what a layer brings"),
    ],
    ids=["a request that is not due", "done too early", "outputs twice", "too wide", "unknown token", "unknown"],
)
def test_engine_that_says_what_it_must_not(device, tmp_path, monkeypatch, said, wanted):
    layer = case(tmp_path)
    said_it = []

    def speak(engine, take, message) -> None:
        if not said_it:
            said_it.append(True)
            engine.say(said)
        take(message)

    with Store(layer.path) as store:
        instead(monkeypatch, device, Message.WEIGHTS, speak)
        with pytest.raises(DeviceError, match=f"^golden: got .* instead of {wanted}; load the bitstream of this"):
            device.run_layer(layer.layer, layer.x, layer.routes, store)
        monkeypatch.undo()
        assert works(device, layer, store)


@pytest.mark.parametrize("token", [0, 1])
def test_engine_that_leaves_an_output_out(device, tmp_path, monkeypatch, token):
    layer = case(tmp_path)
    engine = engine_of(device)
    say = engine.say
    lost = bytes([Message.OUTPUT, token])
    monkeypatch.setattr(engine, "say", lambda message: None if message.startswith(lost) else say(message))
    with Store(layer.path) as store:
        with pytest.raises(DeviceError, match=r"got 82.* instead of what a layer brings"):
            device.run_layer(layer.layer, layer.x, layer.routes, store)
        monkeypatch.undo()
        assert works(device, layer, store)


def test_link_that_dies_while_nothing_is_due(device, tmp_path, monkeypatch):
    """The host waits for the engine, so it must ask whether anybody is there."""
    layer = case(tmp_path)
    transport = cast(GoldenTransport, device.transport)
    real = transport.read

    def die(engine, take, message) -> None:
        last = [True]

        def read(timeout: float) -> bytes:
            if last:
                last.clear()
                return real(timeout)
            transport.device.read()
            transport._now += timeout
            return b""

        monkeypatch.setattr(transport, "read", read)

    instead(monkeypatch, device, Message.ROUTES, die)
    with Store(layer.path) as store:
        with pytest.raises(LinkError, match=r"^golden: no answer for "):
            device.run_layer(layer.layer, layer.x, layer.routes, store, deadline=1e6)
        assert device.transport.now() < 10
        monkeypatch.undo()
        assert works(device, layer, store)


@pytest.mark.parametrize("deadline", [None, 5.0])
def test_engine_that_hangs(device, tmp_path, monkeypatch, deadline):
    """Its link answers all the time, so only the deadline ends this."""
    layer = case(tmp_path)
    instead(monkeypatch, device, Message.ROUTES, lambda *_: None)
    with Store(layer.path) as store:
        with pytest.raises(DeviceError) as caught:
            device.run_layer(layer.layer, layer.x, layer.routes, store, deadline=deadline)
        text = str(caught.value)
        total = len(layer.requests) * MATRIX_BYTES
        assert f"s; 0 of {total:,} bytes went; allow more, or try emufpga selftest" in text
        if deadline:
            assert text.startswith("golden: layer not finished within 5 s; ")
            assert deadline <= device.transport.now() <= 2 * deadline
        monkeypatch.undo()
        assert works(device, layer, store)


def test_no_time_at_all(device, tmp_path):
    layer = case(tmp_path)
    with Store(layer.path) as store:
        with pytest.raises(DeviceError, match="layer not finished within 0 s"):
            device.run_layer(layer.layer, layer.x, layer.routes, store, deadline=0)
        assert works(device, layer, store)


def test_peer_that_falls_silent(tmp_path):
    """In the middle of a layer; the port itself is still there."""
    layer = case(tmp_path)
    master, slave = os.openpty()
    tty.setraw(slave)
    peer = Peer(master, master)
    with peer, Device.open(f"uart:{os.ttyname(slave)}:12000000") as device, Store(layer.path) as store:

        def stop(done: int, total: int) -> None:
            if done == 2 * MATRIX_BYTES:
                peer.silence()

        with pytest.raises(LinkError, match=r"^uart:.*no answer for .* s; is it powered"):
            device.run_layer(layer.layer, layer.x, layer.routes, store, progress=stop)
        with pytest.raises(LinkError):
            device.run_layer(layer.layer, layer.x, layer.routes, store)
        peer.speak()
        assert works(device, layer, store)
    os.close(master)
    os.close(slave)


# Ctrl-C.


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_interrupted_by_a_callback(device, tmp_path, ahead, count):
    layer = case(tmp_path)

    def progress(done: int, total: int) -> None:
        if done == count * MATRIX_BYTES:
            raise KeyboardInterrupt

    with Store(layer.path, ahead=ahead) as store:
        with pytest.raises(KeyboardInterrupt):
            device.run_layer(layer.layer, layer.x, layer.routes, store, progress=progress)
        assert works(device, layer, store)


@pytest.mark.parametrize("count", [0, 2, 5])
def test_interrupted_while_reading(device, tmp_path, count):
    layer = case(tmp_path)
    calls = []

    def pread(*args) -> int:
        calls.append(args)
        if len(calls) == count + 1:
            raise KeyboardInterrupt
        return os.preadv(*args)

    with Store(layer.path, ahead=False, pread=pread) as store:
        with pytest.raises(KeyboardInterrupt):
            device.run_layer(layer.layer, layer.x, layer.routes, store)
        assert works(device, layer, store)


@pytest.mark.parametrize("call", range(0, 40, 3))
def test_interrupted_while_writing(tmp_path, monkeypatch, call):
    """With half a frame on its way."""
    layer = case(tmp_path)
    with Device(GoldenTransport(PARAMS)) as device, Store(layer.path) as store:
        real, calls = GoldenTransport.write, []

        def write(self, data) -> None:
            calls.append(data)
            if len(calls) == call + 1:
                real(self, bytes(data)[: len(data) // 2])
                raise KeyboardInterrupt
            real(self, data)

        monkeypatch.setattr(GoldenTransport, "write", write)
        with pytest.raises(KeyboardInterrupt):
            device.run_layer(layer.layer, layer.x, layer.routes, store)
        assert works(device, layer, store)


CHILD = """
import sys
from pathlib import Path
from host.device import Device
from host.storage import Store
from tests.host.devices import case
layer = case(Path(sys.argv[2]))
with Device.open(sys.argv[1]) as device, Store(layer.path) as store:
    while True:
        device.run_layer(layer.layer, layer.x, layer.routes, store, progress=lambda *_: print("on", flush=True))
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_process_that_ends(tmp_path, seed, number):
    """At any time, cleanly or not: the next one finds the device usable."""
    layer = case(tmp_path)
    (tmp_path / "child").mkdir()
    master, slave = os.openpty()
    tty.setraw(slave)
    spec = f"uart:{os.ttyname(slave)}"
    with Peer(master, master):
        argv = [sys.executable, "-c", CHILD, spec, str(tmp_path / "child")]
        with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert child.stdout
            child.stdout.readline()
            time.sleep(np.random.default_rng(seed).uniform(0, 0.2))
            child.send_signal(number)
            _, errors = child.communicate(timeout=30)
        assert child.returncode == -number
        assert (b"KeyboardInterrupt" in errors) == (number == signal.SIGINT)
        with Device.open(spec) as device, Store(layer.path) as store:
            assert works(device, layer, store)
    os.close(master)
    os.close(slave)


# Experts in the board's memory.

MEMORY = dataclasses.replace(PARAMS, memory_bits=20)  # six experts of 161,280 bytes


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("experts", [[1], [3, 1], [0, 1, 2, 3]])
def test_experts_in_memory(tmp_path, seed, mode, experts):
    layer = case(tmp_path, seed, tokens=6, used=3)
    layer = layer.taped() if mode == Mode.TAPE else layer
    seen: list[tuple[int, int]] = []
    with Device(GoldenTransport(MEMORY)) as device, Store(layer.path) as store:
        device.load_experts(layer.layer, experts, store, progress=lambda *numbers: seen.append(numbers))
        size = 3 * MATRIX_BYTES
        assert seen == [((n + 1) * size, len(experts) * size) for n in range(len(experts))]
        assert device.memory_used == len(experts) * size
        device.load_experts(layer.layer, experts, store)  # they are there
        assert device.memory_used == len(experts) * size
        for _ in range(2):
            result = device.run_layer(layer.layer, layer.x, layer.routes, store)
            assert (result.sums == layer.sums).all()
            here = {(offset + e * MATRIX_BYTES, MATRIX_BYTES) for e in experts for offset in layer.layer.offsets}
            assert not here & set(result.requests)
            assert result.ledger.stored > 0
            assert broken(result) == []
            device.reset()  # the memory keeps what it has


def test_full_memory(tmp_path):
    layer = case(tmp_path, experts=8)
    with Device(GoldenTransport(MEMORY)) as device, Store(layer.path) as store:
        device.load_experts(layer.layer, range(5), store)
        with pytest.raises(DeviceError) as caught:
            device.load_experts(layer.layer, range(8), store)
        assert str(caught.value) == (
            "golden: 3 experts need 483,840 bytes of the board's memory, 242,176 are free: load 1 at most"
        )
        device.load_experts(layer.layer, range(6), store)
        assert works(device, layer, store)


def test_no_memory(device, tmp_path):
    layer = case(tmp_path)
    with Store(layer.path) as store:
        with pytest.raises(DeviceError, match="bytes of the board's memory, 0 are free: load 0 at most"):
            device.load_experts(layer.layer, [0], store)
        with pytest.raises(ValueError, match=r"expert must be in 0\.\.3, not 4"):
            device.load_experts(layer.layer, [4], store)


def test_loading_that_fails(tmp_path):
    layer = case(tmp_path)
    far = dataclasses.replace(layer.layer, offsets=(*layer.layer.offsets[:2], 10**9))
    with Device(GoldenTransport(MEMORY)) as device, Store(layer.path) as store:
        with pytest.raises(StorageError):
            device.load_experts(far, [0], store)
        assert device.memory_used == 0
        assert works(device, layer, store)
