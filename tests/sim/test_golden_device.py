"""The golden device: whole layers through the driver's link, every error of the engine, and the hardware beside it."""

import struct
from dataclasses import replace

import numpy as np
import pytest

from host.link import Link
from hw.formats import frames, messages
from hw.formats.frames import Flag, Header, Type
from hw.formats.messages import Counter, Error, Layer, Message, Mode
from hw.formats.params import Params
from hw.formats.q6_k import D_OFFSET
from sim.engine_sim import EngineError, EngineSim, start_messages
from sim.golden import activations
from sim.golden import layer as golden
from sim.golden.device import GoldenDevice, GoldenEngine, GoldenTransport
from sim.golden.layer import Route
from tests.sim.test_engine import IMPOSSIBLE, SMALL, Bank

PARAMS = replace(SMALL, frame_bytes=1024, memory_bits=24)
BYTE_COUNTERS = (
    Counter.USEFUL_BYTES,
    Counter.DRAINED_BYTES,
    Counter.MOVED_BYTES,
    Counter.REQUESTED_BYTES,
    Counter.REQUESTS,
    Counter.MEMORY_BYTES,
)


class LayerError(RuntimeError):
    """The engine reported an error, or said nothing more."""


def run_layer(link: Link, layer: Layer, x, routes, read, *, homes=None, timeout: float = 10):
    """Drive a layer over a link: outputs, requests, counters."""
    first, *rest = start_messages(layer, x, routes)
    link.send(first)
    if homes:
        link.send(messages.homes(homes))
    for message in rest:
        link.send(message)
    y = np.zeros((x.exponents.shape[0], layer.width), np.int64)
    asked = []
    for _ in range(10_000):
        message = link.receive(timeout)
        if message is None:
            raise LayerError(f"nothing came within {timeout} s")
        if message[0] == Message.FETCH:
            offset = int.from_bytes(message[2:8], "little")
            asked.append((offset, int.from_bytes(message[8:12], "little")))
            link.send(messages.weights(b""), read(*asked[-1]))
        elif message[0] == Message.OUTPUT:
            token, width = struct.unpack_from("<BH", message, 1)
            y[token] = np.frombuffer(message, "<i8", width, messages.HEADER_BYTES)
        elif message[0] == Message.ERROR:
            raise LayerError(Error(message[1]))
        elif message[0] == Message.DONE:
            link.send(messages.bare(Message.READ_COUNTERS))
        elif message[0] == Message.COUNTERS:
            values = np.frombuffer(message, "<u8", message[1], messages.HEADER_BYTES)
            return y, asked, {counter: int(values[counter]) for counter in Counter}
        else:
            raise LayerError(f"unexpected message {message[:16].hex()}")
    raise AssertionError("no end")


def connected(params: Params = PARAMS) -> tuple[Link, GoldenTransport]:
    transport = GoldenTransport(params)
    link = Link(transport)
    link.connect(number=1)
    return link, transport


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", Mode)
def test_layers(seed, mode):
    """Layer after layer over one link, each the golden model's bits, requests and bytes."""
    link, _ = connected()
    for case in range(3):
        rng = np.random.default_rng([seed, case])
        width, expert_width = (int(rng.choice([256, 512])) for _ in range(2))
        experts = int(rng.integers(1, 7))
        used = int(rng.integers(0, min(3, experts) + 1))
        bank = Bank(
            100 * seed + case, width=width, expert_width=expert_width, experts=experts, batch=case + 1, used=used
        )
        layer = bank.with_(mode=mode, outstanding=int(rng.integers(1, 9)))
        y, asked, counters = run_layer(link, layer, bank.x, bank.routes, bank.read)
        np.testing.assert_array_equal(y, bank.golden)
        assert asked == golden.requests(layer, bank.routes)
        wanted = len({route.expert for route in bank.routes})
        size = layer.matrix_bytes
        assert counters[Counter.USEFUL_BYTES] == 3 * size * wanted
        assert counters[Counter.DRAINED_BYTES] == size * (len(asked) - 3 * wanted)
        assert counters[Counter.REQUESTED_BYTES] == counters[Counter.MOVED_BYTES] == size * len(asked)
        assert counters[Counter.REQUESTS] == len(asked)
        assert not any(counters[counter] for counter in Counter if counter not in BYTE_COUNTERS)


@pytest.fixture
def bank():
    return Bank(20, width=512, expert_width=256, experts=4, batch=3, used=2)


@pytest.mark.parametrize("mode", Mode)
def test_homes(bank, mode):
    """Experts in the board's memory are not asked for, and give the same bits."""
    link, _ = connected()
    layer = bank.with_(mode=mode)
    size = layer.matrix_bytes
    addresses = {1: 1 << 20, 3: 4096}
    for expert, address in addresses.items():
        for number, offset in enumerate(layer.offsets):
            for start in range(0, size, size // 3):
                data = bank.read(offset + expert * size, size)[start : start + size // 3]
                link.send(messages.store(address + number * size + start, b""), data)
    homes = [addresses.get(expert) for expert in range(layer.experts)]
    y, asked, counters = run_layer(link, layer, bank.x, bank.routes, bank.read, homes=homes)
    np.testing.assert_array_equal(y, bank.golden)
    at_home = {offset + expert * size for offset in layer.offsets for expert in addresses}
    at_host = [(offset, length) for offset, length in golden.requests(layer, bank.routes) if offset not in at_home]
    assert asked == at_host
    assert counters[Counter.MOVED_BYTES] == size * len(asked)
    passed = len(golden.requests(layer, bank.routes))
    assert counters[Counter.MEMORY_BYTES] == size * (passed - len(asked)) > 0
    assert counters[Counter.REQUESTS] == passed
    assert counters[Counter.REQUESTED_BYTES] == size * passed
    assert counters[Counter.USEFUL_BYTES] + counters[Counter.DRAINED_BYTES] == size * passed
    # CONFIG forgets them.
    _, asked, _ = run_layer(link, layer, bank.x, bank.routes, bank.read)
    assert asked == golden.requests(layer, bank.routes)


def engine(params: Params = PARAMS) -> tuple[GoldenEngine, list[bytes]]:
    said: list[bytes] = []
    golden_engine = GoldenEngine(params, 0, said.append)
    golden_engine.reset()
    assert said == [messages.hello(params)]
    said.clear()
    return golden_engine, said


def error(code: Error) -> bytes:
    return bytes([Message.ERROR, code]).ljust(16, b"\0")


def start(golden_engine: GoldenEngine, layer: Layer, bank: Bank, routes=None) -> None:
    for message in start_messages(layer, bank.x, bank.routes if routes is None else routes):
        golden_engine.take(message)


def recovers(golden_engine: GoldenEngine, said: list[bytes], bank: Bank) -> None:
    """Nothing is heard until RESET; then the engine is as good as new."""
    said.clear()
    start(golden_engine, bank.layer, bank)
    golden_engine.take(messages.bare(Message.READ_COUNTERS))
    assert said == []
    golden_engine.take(messages.bare(Message.RESET))
    assert said == [messages.hello(golden_engine.params)]
    start(golden_engine, bank.layer, bank)
    assert [message[0] for message in said[1:]] == [Message.FETCH] * 2


@pytest.mark.parametrize("changes", [*IMPOSSIBLE, {"mode": 2}], ids=str)
def test_impossible_configuration(bank, changes):
    golden_engine, said = engine()
    golden_engine.take(messages.config(bank.with_(**changes)))
    assert said == [error(Error.CONFIG)]
    recovers(golden_engine, said, bank)


BAD_ROUTES = [
    *([Route(0, 0, 1), route] for route in (Route(3, 0, 1), Route(0, 4, 1), Route(0, 65535, 1), Route(0, 3, 65537))),
    [Route(1, 2, 3), Route(1, 2, 4)],
]


@pytest.mark.parametrize("routes", BAD_ROUTES, ids=range(5))
def test_impossible_route(bank, routes):
    golden_engine, said = engine()
    start(golden_engine, bank.layer, bank, routes)
    assert said == [error(Error.ROUTE)]
    recovers(golden_engine, said, bank)


BAD_MESSAGES = [
    b"",
    b"\x00" * 16,
    b"\xff" * 40,
    messages.bare(Message.OUTPUT),
    messages.weights(b"\x00" * 64),
    messages.load_x(8, 0, 0, b"\x00" * 512),
    messages.load_x(0, 2, 0, b"\x00" * 512),
    messages.load_x(0, 0, 0, b"\x00" * 512)[:-16],
    messages.load_x(0, 0, 0, b"\x00" * 512) + b"\x00" * 16,
    messages.routes(1, []),
    messages.bare(Message.RESET) + b"\x00",
    messages.bare(Message.READ_COUNTERS)[:15],
    messages.homes([None]),
    messages.store(8, b"\x00" * 16),
    messages.store(0, b"\x00" * 8),
    messages.store(0, b""),
    messages.store((1 << PARAMS.memory_bits) - 16, bytes(32)),
]


@pytest.mark.parametrize("message", BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
def test_impossible_message(bank, message):
    golden_engine, said = engine()
    golden_engine.take(message)
    assert said == [error(Error.MESSAGE)]
    recovers(golden_engine, said, bank)


@pytest.mark.parametrize(
    "message",
    [
        messages.routes(0, []),
        messages.routes(9, []),
        messages.routes(1, [(0, 0, 1)])[:-1],
        messages.routes(1, [(0, 0, 1)]) + bytes(8),
        messages.homes([None] * 5),
        messages.homes([0, 16])[:-8],
        messages.homes([0, 8]),
        messages.homes([1 << PARAMS.memory_bits]),
        messages.homes([1 << 48]),
    ],
    ids=range(9),
)
def test_impossible_message_when_configured(bank, message):
    golden_engine, said = engine()
    golden_engine.take(messages.config(bank.layer))
    golden_engine.take(message)
    assert said == [error(Error.MESSAGE)]
    recovers(golden_engine, said, bank)


@pytest.mark.parametrize("kind", [Message.CONFIG, Message.READ_COUNTERS, Message.HOMES, Message.STORE])
def test_only_weights_and_reset_while_a_layer_runs(bank, kind):
    golden_engine, said = engine()
    start(golden_engine, bank.layer, bank)
    said.clear()
    golden_engine.take(
        {
            Message.CONFIG: messages.config(bank.layer),
            Message.READ_COUNTERS: messages.bare(Message.READ_COUNTERS),
            Message.HOMES: messages.homes([None]),
            Message.STORE: messages.store(0, bytes(16)),
        }[kind]
    )
    assert said == [error(Error.MESSAGE)]
    recovers(golden_engine, said, bank)


@pytest.mark.parametrize("change", [-210, -1, 1, 210])
@pytest.mark.parametrize("which", [0, 4])
def test_answer_of_a_wrong_length(bank, change, which):
    golden_engine, said = engine()
    start(golden_engine, bank.layer, bank)
    size = bank.layer.matrix_bytes
    for number in range(which + 1):
        golden_engine.take(messages.weights(bytes(size + (change if number == which else 0))))
    assert said[-1] == error(Error.LENGTH)
    recovers(golden_engine, said, bank)


def test_memory_beyond_its_end(bank):
    golden_engine, said = engine()
    end = 1 << PARAMS.memory_bits
    golden_engine.take(messages.store(end - 16, bytes(16)))
    assert said == []
    golden_engine.take(messages.config(bank.layer))
    golden_engine.take(messages.homes([end - 16] * 4))
    golden_engine.take(messages.routes(1, [(0, 0, 1)]))
    assert said[-1] == error(Error.MEMORY)
    recovers(golden_engine, said, bank)


def test_bad_scale_and_overflow_end_their_layer_only(bank):
    link, _ = connected()
    expert = bank.routes[0].expert

    def spoilt(offset, length):
        data = bank.read(offset, length).copy()
        if offset == bank.layer.offsets[2] + expert * length:
            data[D_OFFSET : D_OFFSET + 2] = [0x00, 0x7C]
        return data

    large = activations.Activations(bank.x.mantissas, np.full_like(bank.x.exponents, 20))
    for code, given in ((Error.SCALE, (bank.x, spoilt)), (Error.OVERFLOW, (large, bank.read))):
        x, read = given
        with pytest.raises(LayerError) as caught:
            run_layer(link, bank.layer, x, bank.routes, read)
        assert caught.value.args == (code,)
        done = link.receive(1)
        assert done == messages.bare(Message.DONE)
        np.testing.assert_array_equal(run_layer(link, bank.layer, bank.x, bank.routes, bank.read)[0], bank.golden)


def test_moved_bytes_are_whole_beats(bank, monkeypatch):
    """A matrix always fills its beats, so the padding is seen with a matrix that is none."""
    monkeypatch.setattr(Layer, "matrix_bytes", 1001)
    monkeypatch.setattr("sim.golden.device.add_expert", lambda *_: 0)
    golden_engine, said = engine()
    start(golden_engine, bank.layer, bank, [Route(0, 1, 1)])
    for _ in range(3):
        golden_engine.take(messages.weights(bytes(1001)))
    said.clear()
    golden_engine.take(messages.bare(Message.READ_COUNTERS))
    values = struct.unpack_from(f"<{len(Counter)}Q", said[0], 16)
    assert (values[Counter.MOVED_BYTES], values[Counter.USEFUL_BYTES]) == (3 * 1008, 3 * 1001)


# The device's side of the link, against frames written by hand.


def parse(data: bytes) -> list[tuple[Header, bytes]]:
    out = []
    while data:
        header = frames.unpack_header(data[:16])
        assert header is not None
        frame, data = data[: header.frame_bytes], data[header.frame_bytes :]
        payload = frame[16:][: header.payload_bytes]
        assert frame == frames.frame(header, payload)
        out.append((header, payload))
    return out


def device() -> GoldenDevice:
    """One with which a connection has begun, its greeting acknowledged."""
    golden_device = GoldenDevice(PARAMS, 7)
    golden_device.write(frames.frame(Header(Type.SYNC, sequence=99)))
    said = parse(golden_device.read())
    credit = 2 * PARAMS.frame_bytes // 16
    assert said[-2:] == [
        (Header(Type.SYNC, sequence=99, credit=credit), b""),
        (Header(Type.MESSAGE, Flag.LAST, words=1, credit=credit), messages.hello(PARAMS, 7)),
    ]
    golden_device.write(frames.frame(Header(Type.ACK, ack=1)))
    assert golden_device.read() == b""
    return golden_device


ASK = messages.bare(Message.READ_COUNTERS)


def ask(sequence: int, ack: int = 1, flags: Flag = Flag.LAST) -> bytes:
    return frames.frame(Header(Type.MESSAGE, flags, sequence=sequence, ack=ack), ASK)


def test_a_message_repeated_lost_or_damaged():
    golden_device = device()
    golden_device.write(ask(0))
    ((header, payload),) = parse(golden_device.read())
    assert (header.type, header.sequence, header.ack, payload[0]) == (Type.MESSAGE, 1, 1, Message.COUNTERS)
    golden_device.write(ask(0, ack=2))  # came before
    assert [(h.type, h.flags, h.ack) for h, _ in parse(golden_device.read())] == [(Type.ACK, Flag(0), 1)]
    golden_device.write(ask(2, ack=2))  # one lacks
    assert [(h.type, h.flags, h.ack) for h, _ in parse(golden_device.read())] == [(Type.ACK, Flag.NAK, 1)]
    golden_device.write(ask(1, ack=2)[:-1] + b"\xff")
    assert [(h.type, h.flags, h.ack) for h, _ in parse(golden_device.read())] == [(Type.ACK, Flag.NAK, 1)]
    golden_device.write(frames.frame(Header(Type.ACK, Flag.POLL, ack=2)))
    ((header, payload),) = parse(golden_device.read())
    assert (header.type, frames.STATUS.unpack(payload)) == (Type.STATUS, (1, 2, 0, 0))


def test_what_is_not_acknowledged_comes_again():
    golden_device = device()
    golden_device.write(ask(0))
    first = golden_device.read()
    golden_device.poke()
    assert golden_device.read() == first
    golden_device.write(frames.frame(Header(Type.ACK, Flag.NAK, ack=1)))
    assert golden_device.read() == first
    golden_device.write(frames.frame(Header(Type.ACK, ack=2)))
    golden_device.poke()
    assert golden_device.read() == b""
    assert golden_device.status.resent == 2


def test_a_frame_that_stops_coming_is_given_up():
    golden_device = device()
    golden_device.write(ask(0)[:40])
    assert golden_device.read() == b""
    golden_device.poke()
    assert [h.flags for h, _ in parse(golden_device.read())] == [Flag.NAK]
    golden_device.write(ask(0))
    assert [h.type for h, _ in parse(golden_device.read())] == [Type.MESSAGE]
    assert golden_device.status.damaged == 1


@pytest.mark.parametrize("seed", range(3))
def test_garbage_before_a_frame(seed):
    rng = np.random.default_rng(seed)
    for length in range(1, 60):
        golden_device = device()
        garbage = rng.bytes(length - 1) + bytes(rng.choice([0xE5, 0x9F, 0], 1).astype(np.uint8))
        for byte in garbage + ask(0):
            golden_device.write(bytes([byte]))
        assert [h.type for h, _ in parse(golden_device.read())] == [Type.MESSAGE]
        assert golden_device.status.garbage == length // PARAMS.link_bytes


def test_few_frames_are_on_their_way(bank):
    """A layer's outputs wait until those before are acknowledged, and all frames but a message's last are whole."""
    link, transport = connected()
    taken = []
    golden_read = transport.device.read

    def read() -> bytes:
        data = golden_read()
        headers = [header for header, _ in parse(data)]
        taken.extend(headers)
        assert sum(header.type == Type.MESSAGE for header in headers) <= 4
        return data

    transport.device.read = read
    run_layer(link, bank.layer, bank.x, bank.routes, bank.read)
    sizes = {header.words for header in taken if header.type == Type.MESSAGE and not header.flags & Flag.LAST}
    assert sizes == {64}


# The hardware beside it.


@pytest.mark.cosim
@pytest.mark.parametrize("seed", range(3))
def test_counts_what_the_hardware_counts(seed):
    link, _ = connected(SMALL)
    with EngineSim(SMALL) as hardware:
        for mode in Mode:
            bank = Bank(50 + seed, width=512, expert_width=256, experts=5 + seed, batch=1 + seed, used=2)
            layer = bank.with_(mode=mode, outstanding=1 + seed)
            run = hardware.run_layer(layer, bank.x, bank.routes, bank.read)
            y, asked, counters = run_layer(link, layer, bank.x, bank.routes, bank.read)
            np.testing.assert_array_equal(y, run.y)
            assert asked == run.requests
            assert {name: counters[name] for name in BYTE_COUNTERS} == {
                name: run.counters[name] for name in BYTE_COUNTERS
            }


@pytest.mark.cosim
def test_refuses_what_the_hardware_refuses(bank):
    with EngineSim(SMALL) as hardware:
        layers = [bank.with_(experts=17), bank.with_(width=300), bank.with_(outstanding=9)]
        cases = [(layer, bank.routes) for layer in layers] + [(bank.layer, routes) for routes in BAD_ROUTES]
        for layer, routes in cases:
            golden_engine, said = engine(SMALL)
            start(golden_engine, layer, bank, routes)
            with pytest.raises(EngineError) as caught:
                hardware.run_layer(layer, bank.x, routes, bank.read)
            hardware.reset()
            assert said == [error(caught.value.error)]
        for message in BAD_MESSAGES[1:11]:
            golden_engine, said = engine(SMALL)
            golden_engine.take(message)
            hardware.send(message)
            assert said == [hardware.receive()]
            hardware.reset()
