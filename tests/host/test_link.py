"""The driver's side of the link: frames found in any garbage, credit kept, every fault repaired or reported."""

from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from host.link import FLOOD_BYTES, TRIES, Link, LinkCounts, LinkError, Parser
from hw.formats import frames, messages
from hw.formats.frames import MAX_PAYLOAD_WORDS, SEQUENCES, WORD_BYTES, Flag, Header, Type
from hw.formats.params import Params
from sim.golden.device import GoldenEngine, GoldenTransport
from tests.host.faulty import KINDS, Faulty
from tests.sim.test_engine import Bank
from tests.sim.test_golden_device import PARAMS, LayerError, run_layer

MAGIC = frames.MAGIC.to_bytes(2, "little")


def message_frame(rng: np.random.Generator, length: int, sequence: int = 0) -> bytes:
    return frames.frame(Header(Type.MESSAGE, Flag.LAST, sequence=sequence, credit=9), rng.bytes(length))


def parsed(parser: Parser) -> Iterator[bytes]:
    """Whole frames, made again."""
    while (found := parser.next()) is not None:
        yield frames.frame(*found)


def check_parser(data: bytes, want: list[bytes], *, chunk: int, damaged: int = 0) -> None:
    counts = LinkCounts()
    parser = Parser(counts)
    got = []
    for start in range(0, len(data), chunk):
        parser.feed(data[start : start + chunk])
        got += parsed(parser)
    for _ in range(10):  # what would come no more
        if parser.since is None:
            break
        parser.drop()
        got += parsed(parser)
    assert got == want
    assert counts.damaged == damaged
    left = len(data) - sum(map(len, want)) - counts.garbage
    assert 0 <= left < WORD_BYTES, "bytes that are neither a frame nor garbage are the beginning of a header"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_frame_behind_garbage_of_every_length(seed, chunk):
    rng = np.random.default_rng(seed)
    for length in range(50):
        frame = message_frame(rng, int(rng.integers(100)))
        alphabet = np.frombuffer(MAGIC + b"\0\1", np.uint8) if length % 2 else np.arange(256, dtype=np.uint8)
        garbage = rng.choice(alphabet, length).tobytes()
        check_parser(garbage + frame + garbage + frame, [frame, frame], chunk=chunk)
        check_parser(garbage + MAGIC[:1] + frame, [frame], chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_a_frame_behind_one_cut_off_at_every_byte(chunk):
    """The cut frame swallows some of the next; that one is found all the same."""
    rng = np.random.default_rng(4)
    cut, frame, after = message_frame(rng, 60), message_frame(rng, 21, 1), message_frame(rng, 200, 2)
    for length in range(1, len(cut)):
        damaged = int(length >= WORD_BYTES)
        check_parser(cut[:length] + frame + after, [frame, after], chunk=chunk, damaged=damaged)
        check_parser(cut[:length] + frame, [frame], chunk=chunk, damaged=damaged)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 255, 256, 65535, 65536])
def test_a_frame_of_each_length(length):
    rng = np.random.default_rng(length)
    frame = message_frame(rng, length)
    check_parser(frame + frame, [frame, frame], chunk=100)


def test_every_flipped_bit_is_seen():
    rng = np.random.default_rng(5)
    frame, after = message_frame(rng, 40), message_frame(rng, 0, 1)
    for bit in range(8 * len(frame)):
        spoilt = bytearray(frame)
        spoilt[bit // 8] ^= 1 << bit % 8
        check_parser(bytes(spoilt) + after, [after], chunk=1 << 20, damaged=int(bit >= 8 * WORD_BYTES))


def test_a_header_beyond_bounds_is_none():
    rng = np.random.default_rng(6)
    long = frames.pack_header(Header(Type.MESSAGE, words=MAX_PAYLOAD_WORDS + 1))
    frame = message_frame(rng, 30)
    check_parser(long + frame, [frame], chunk=1 << 20)


# Connecting.


class Scripted:
    """A transport whose device is a function: bytes written to bytes that come back."""

    name, patience = "port", 0.5

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        self.come: deque[bytes] = deque()
        self._now = 0.0

    def write(self, data: bytes | memoryview) -> None:
        self.come.append(self._answer(bytes(data)))

    def read(self, timeout: float) -> bytes:
        if self.come:
            return self.come.popleft()
        self._now += timeout
        return b""

    def now(self) -> float:
        return self._now

    def close(self) -> None:
        pass


def greeting(message: bytes) -> Callable[[bytes], bytes]:
    """A device that greets with ``message``."""

    def answer(data: bytes) -> bytes:
        header = frames.unpack_header(data[-WORD_BYTES:])
        if header is None or header.type != Type.SYNC:
            return b""
        hello = frames.frame(Header(Type.MESSAGE, Flag.LAST), message)
        return frames.frame(Header(Type.SYNC, sequence=header.sequence)) + hello

    return answer


OLD = messages.hello(PARAMS, version=1)
IMPOSSIBLE = bytearray(messages.hello(PARAMS))
IMPOSSIBLE[2] = 3  # link bytes


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda _: b"", "port: nothing came within 4 s; is it powered"),
        (lambda _: b"\x9f" * 100, "port: 1000 bytes came but no frame among them; is the baud rate right"),
        (lambda _: frames.frame(Header(Type.ACK)), "port: no connection after 8 tries in 4 s; power it off and on"),
        (greeting(OLD), "port: speaks version 1, this emufpga speaks 2: load the bitstream of this release, or inst"),
        (greeting(bytes(IMPOSSIBLE)), "port: greets with impossible parameters (link_bytes must be one of"),
        (greeting(messages.bare(messages.Message.DONE)), "port: greets with 8200"),
        (greeting(messages.hello(PARAMS)[:10]), "port: greets with 8502"),
    ],
    ids=["silent", "garbage", "no echo", "old version", "impossible parameters", "no greeting", "short greeting"],
)
def test_no_connection(answer, text):
    link = Link(Scripted(answer))
    with pytest.raises(LinkError) as caught:
        link.connect(number=3)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
    assert "emufpga selftest --device port" in str(caught.value)
    assert link.hello is None
    with pytest.raises(LinkError, match="port: there is no connection; connect first"):
        link.send(bytes(16))


def test_connect():
    transport = GoldenTransport(PARAMS, 0x12345678)
    link = Link(transport)
    hello = link.connect()
    assert hello == link.hello == messages.Hello(messages.VERSION, PARAMS, 0x12345678)
    assert transport.now() == 0  # nothing was waited for
    assert link.status() == (0, 0, 0, 0)


@pytest.mark.parametrize("words", [1, 64])
@pytest.mark.parametrize("cut", [0, 1, 500, 1000])
def test_connect_inside_an_unfinished_frame(words, cut, monkeypatch):
    """Even if the device waits for the rest for ever, and whatever was left at its word boundary."""
    transport = GoldenTransport(PARAMS)
    monkeypatch.setattr(transport.device, "poke", lambda: None)
    transport.write(frames.frame(Header(Type.MESSAGE, Flag.LAST), bytes(16 * words))[: 16 + cut % (16 * words)])
    link = Link(transport)
    assert link.connect(number=65535).params == PARAMS
    assert link.counts.bytes_written < 2 * FLOOD_BYTES


class Device:
    """For :class:`Scripted`: connects as it should, and says in ``answers`` what comes after that, one a frame."""

    def __init__(self, before: bytes = b"") -> None:
        self.before = before
        self.answers: deque[bytes] = deque()
        self.told: list[Header] = []

    def __call__(self, data: bytes) -> bytes:
        header = frames.unpack_header(data[:WORD_BYTES])
        assert header is not None
        if header.type == Type.SYNC:
            return self.before + greeting(messages.hello(PARAMS))(data)
        if header.flags & Flag.POLL:
            return frames.frame(Header(Type.STATUS, credit=128), bytes(16))
        self.told.append(header)
        return self.answers.popleft() if self.answers else b""


@pytest.mark.parametrize(
    "before",
    [
        frames.frame(Header(Type.MESSAGE, Flag.LAST), bytes(16)),
        greeting(OLD)(frames.frame(Header(Type.SYNC, sequence=77))),
        frames.pack_header(Header(Type.MESSAGE, words=1)),
        bytes(7),
    ],
    ids=["a message", "an echo", "a cut frame", "garbage"],
)
def test_what_came_before_is_not_the_connection_s(before):
    transport = Scripted(Device(before))
    link = Link(transport)
    assert link.connect(number=78).params == PARAMS
    assert transport.now() == 0


def test_a_cut_frame_does_not_hide_the_connection():
    """It claims 64 KiB; the bytes behind it are looked at again after a while."""
    transport = Scripted(Device(frames.pack_header(Header(Type.MESSAGE, words=MAX_PAYLOAD_WORDS))))
    link = Link(transport)
    assert link.connect(number=78).params == PARAMS
    assert transport.now() <= 2 * transport.patience
    assert link.counts.damaged > 0


def session() -> tuple[Link, Scripted, Device]:
    device = Device()
    transport = Scripted(device)
    link = Link(transport)
    link.connect(number=1)
    device.told.clear()
    return link, transport, device


def test_what_lacks_is_asked_for_once_a_round_trip():
    link, transport, device = session()
    lacks = [message_frame(np.random.default_rng(n), 20, n) for n in range(2, 6)]
    spoilt = lacks[0][:-1] + b"\xff"
    device.answers.extend([b"".join([spoilt, *lacks])])
    link.send(bytes(16))
    assert link.receive(transport.patience / 2) is None
    naks = [header for header in device.told if header.flags & Flag.NAK]
    assert naks == [Header(Type.ACK, Flag.NAK, ack=1)]
    assert (link.counts.damaged, link.counts.refused) == (1, 4)
    for _ in range(2):
        write_back(transport, lacks[0])
        assert link.receive(transport.patience) is None
    naks = [header for header in device.told if header.flags & Flag.NAK]
    assert len(naks) == 2


@pytest.mark.parametrize("spoil", [lambda frame: frame[:-1] + b"\xff", lambda frame: frame[:-1]], ids=["bits", "end"])
def test_a_damaged_frame_is_asked_for(spoil):
    link, transport, device = session()
    write_back(transport, spoil(message_frame(np.random.default_rng(0), 20, 1)))
    assert link.receive(2 * transport.patience) is None
    assert device.told == [Header(Type.ACK, Flag.NAK, ack=1)]
    assert link.counts.damaged == 1


def test_what_came_before_is_acknowledged_again():
    link, transport, device = session()
    write_back(transport, message_frame(np.random.default_rng(0), 20, 0))
    assert link.receive(transport.patience / 2) is None
    assert device.told == [Header(Type.ACK, ack=1)]
    assert link.counts.refused == 1


def test_an_acknowledgment_that_cannot_be():
    """Of what was never sent, or overtaken by a newer one: neither it nor its credit counts."""
    link, transport, device = session()
    for ack in (1, 30_000, 40_000, 65_535):
        write_back(transport, frames.frame(Header(Type.ACK, ack=ack, credit=0)))
    assert link.receive(0.1) is None
    link.send(bytes(16))  # there is credit
    assert link.receive(0.1) is None
    assert [header.type for header in device.told] == [Type.MESSAGE]
    device.answers.extend([b""] * 2 + [frames.frame(Header(Type.ACK, ack=1))])
    link.flush(5)
    assert link.counts.frames_resent == 3


def test_an_acknowledgment_of_what_waits_for_credit():
    link, transport, device = session()
    write_back(transport, frames.frame(Header(Type.ACK)))
    assert link.receive(0.1) is None
    link.send(bytes(16))
    write_back(transport, frames.frame(Header(Type.ACK, ack=1)))
    assert link.receive(0.1) is None
    assert device.told == []
    assert link.receive(transport.patience) is None  # asked for, and given
    assert [header.type for header in device.told] == [Type.MESSAGE]


def write_back(transport: Scripted, data: bytes) -> None:
    """Something comes by itself."""
    transport.come.append(data)


def test_connect_again_forgets_all():
    transport = GoldenTransport(PARAMS)
    link = Link(transport)
    link.connect(number=1)
    transport.device.credit = 0
    link.send(messages.bare(messages.Message.READ_COUNTERS))
    link.send(bytes(40), bytes(100_000))
    transport.device.credit = 64
    link.connect(number=2)
    link.flush(1)
    assert link.receive(0) is None


def test_a_sync_that_came_twice():
    """The device began a second connection behind our back; that is noticed and one more begun."""
    transport = GoldenTransport(PARAMS)
    faulty = Faulty(transport, np.random.default_rng(1), to_device=1.0, kinds=["duplicate"])
    link = Link(faulty)
    write = faulty.write

    def first_twice(data: bytes | memoryview) -> None:
        write(data)
        faulty.to_device = 0.0

    faulty.write = first_twice
    link.connect(number=5)
    assert [fault.kind for fault in faulty.log] == ["duplicate"]
    link.send(messages.bare(messages.Message.READ_COUNTERS))
    message = link.receive(1)
    assert message is not None
    assert message[0] == messages.Message.COUNTERS
    transport.write(frames.frame(Header(Type.SYNC, sequence=6)))
    with pytest.raises(LinkError, match="golden: began a new connection by itself; connect again"):
        link.receive(1)


def test_nothing_without_a_connection():
    link = Link(GoldenTransport(PARAMS))
    for call in (lambda: link.send(bytes(16)), lambda: link.receive(1), lambda: link.flush(1), link.status):
        with pytest.raises(LinkError, match="golden: there is no connection; connect first"):
            call()
    link.connect()
    with pytest.raises(ValueError, match="a message has at least a header"):
        link.send(b"")
    link.close()
    with pytest.raises(LinkError, match="connect first"):
        link.receive(1)
    with pytest.raises(ValueError, match="tries must be positive, not 0"):
        Link(GoldenTransport(PARAMS), tries=0)


# Messages.


@pytest.fixture
def echo(monkeypatch):
    """Golden engines say again what they are told."""
    monkeypatch.setattr(GoldenEngine, "take", lambda self, message: self.say(message))


class Watch:
    """A transport that checks what the host may send against what it was told."""

    def __init__(self, transport: GoldenTransport) -> None:
        self.name, self.patience = transport.name, transport.patience
        self.sent: list[Header] = []
        self._transport = transport
        self._words: dict[int, int] = {}
        self._ack = self._credit = 0

    def write(self, data: bytes | memoryview) -> None:
        parser = Parser(LinkCounts())
        parser.feed(bytes(data))
        while (frame := parser.next()) is not None:
            header = frame[0]
            self.sent.append(header)
            if header.type == Type.MESSAGE:
                self._words[header.sequence] = header.words
                ahead = (header.sequence - self._ack) % SEQUENCES
                on_their_way = sum(self._words[(self._ack + n) % SEQUENCES] for n in range(ahead + 1))
                assert on_their_way <= self._credit, "more than the device has room for"
        self._transport.write(data)

    def read(self, timeout: float) -> bytes:
        data = self._transport.read(timeout)
        parser = Parser(LinkCounts())
        parser.feed(data)
        while (frame := parser.next()) is not None:
            self._ack, self._credit = frame[0].ack, frame[0].credit
        return data

    def now(self) -> float:
        return self._transport.now()

    def close(self) -> None:
        self._transport.close()


@pytest.mark.parametrize("frame_bytes", [256, 4096, 65536])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("echo")
def test_messages_of_all_lengths(frame_bytes, seed):
    rng = np.random.default_rng(seed)
    watch = Watch(GoldenTransport(Params(frame_bytes=frame_bytes)))
    link = Link(watch)
    link.connect(number=seed)
    sent = []
    lengths = [*range(1, 40), *(n * frame_bytes + d for n in (1, 2, 5) for d in (-17, -16, -15, -1, 0, 1, 16))]
    for length in rng.permutation(lengths):
        head = rng.bytes(min(int(length), int(rng.integers(1, 40))))
        data = np.frombuffer(rng.bytes(int(length) - len(head)), np.uint8)
        kinds: list = [data, data.tobytes(), memoryview(data.tobytes())]
        if length % 8 == len(head) % 8:
            kinds.append(data.view("<i8"))
        sent.append(head + data.tobytes())
        link.send(head, kinds[int(rng.integers(len(kinds)))])
    assert [link.receive(1) for _ in sent] == sent
    assert link.receive(0.1) is None
    link.flush(0)
    counts = link.counts
    assert (counts.frames_resent, counts.timeouts, counts.naks, counts.damaged, counts.garbage) == (0,) * 5
    words = frame_bytes // WORD_BYTES
    ours = [header for header in watch.sent if header.type == Type.MESSAGE]
    assert len(ours) == sum(-(-len(message) // frame_bytes) for message in sent)
    assert all(header.flags & Flag.LAST or (header.words, header.missing) == (words, 0) for header in ours)
    assert counts.frames_sent == len(watch.sent)
    assert counts.bytes_written == sum(header.frame_bytes for header in watch.sent)


@pytest.mark.usefixtures("echo")
def test_sequence_numbers_start_over():
    """66,000 messages of one frame each way."""
    transport = GoldenTransport(Params(frame_bytes=65536))
    link = Link(transport)
    link.connect()
    for start in range(0, SEQUENCES + 500, 1000):
        sent = [(start + n).to_bytes(16, "little") for n in range(1000)]
        for message in sent:
            link.send(message)
        assert [link.receive(1) for _ in sent] == sent
    assert link.counts.frames_resent == link.counts.refused == 0


@pytest.mark.usefixtures("echo")
def test_credit_is_waited_and_asked_for():
    transport = GoldenTransport(PARAMS)
    watch = Watch(transport)
    link = Link(watch)
    transport.device.credit = 63
    link.connect(number=1)
    link.send(bytes(16), bytes(5000))
    assert link.receive(3.3 * watch.patience) is None  # no room for a frame of 64 words
    assert [header.type for header in watch.sent].count(Type.MESSAGE) == 0
    polls = [header for header in watch.sent[3:] if header.flags & Flag.POLL]
    assert len(polls) == 3
    assert link.receive(100 * watch.patience) is None  # a device that is busy is not given up
    transport.device.credit = 64
    assert link.receive(10 * watch.patience) == bytes(5016)
    assert link.counts.frames_resent == 0


@pytest.mark.usefixtures("echo")
def test_a_lost_frame_is_sent_again_once():
    """Each frame behind it brings a NAK; only the first counts."""
    transport = GoldenTransport(PARAMS)
    link = Link(transport)
    transport.device.credit = 0  # so that all wait and leave together
    link.connect(number=1)
    lost = [4]
    write = transport.write

    def lossy(data: bytes | bytearray | memoryview) -> None:
        for place in range(0, len(data), 48):
            header = frames.unpack_header(data[place : place + 16])
            assert header is not None
            if header.type == Type.MESSAGE and header.sequence in lost:
                lost.remove(header.sequence)
            else:
                write(data[place : place + 48])

    transport.write = lossy
    sent = [bytes([n]) * 16 for n in range(20)]
    for message in sent:
        link.send(message)
    transport.device.credit = 1000
    assert [link.receive(1) for _ in sent] == sent
    assert transport.now() == pytest.approx(transport.patience), "more than asking for credit took"
    assert link.counts.naks == 15
    assert link.counts.frames_resent == 16
    assert link.counts.bytes_resent == 16 * 48
    assert link.status().refused == 15


@pytest.mark.usefixtures("echo")
def test_the_last_frame_lost_is_sent_after_patience():
    transport = GoldenTransport(PARAMS)
    rng = np.random.default_rng(0)
    faulty = Faulty(transport, rng, kinds=["drop"])
    link = Link(faulty)
    link.connect(number=1)
    faulty.to_device = 1.0
    link.send(bytes(range(16)))
    faulty.to_device = 0.0
    assert link.receive(1) == bytes(range(16))
    assert link.counts.timeouts == link.counts.frames_resent == 1
    assert transport.now() == pytest.approx(transport.patience)


@pytest.mark.parametrize("when", ["before", "damaging"])
@pytest.mark.usefixtures("echo")
def test_a_peer_that_vanished(when):
    """It takes everything and answers nothing, or damages everything; that ends in time."""
    transport = GoldenTransport(PARAMS)
    faulty = Faulty(transport, np.random.default_rng(0), kinds=["drop" if when == "before" else "flip"])
    link = Link(faulty)
    link.connect(number=1)
    faulty.to_device = 1.0
    link.send(bytes(16))
    begin = transport.now()
    with pytest.raises(LinkError, match=r"golden: no answer for 0\.\d+ s; is it powered, is the baud rate right\?"):
        link.receive(1000)
    assert transport.now() - begin <= (TRIES + 2) * transport.patience
    assert link.counts.frames_resent <= TRIES
    with pytest.raises(LinkError, match="no answer for"):
        link.status()
    faulty.to_device = 0.0
    link.connect(number=50)
    link.send(bytes(16))
    assert link.receive(1) == bytes(16)


def test_a_clock_that_is_coarse(monkeypatch):
    """It advances by whole steps of what was waited for; the last part of a step must not be waited for for ever."""
    link, transport, _ = session()
    read, step = transport.read, 1e-6
    monkeypatch.setattr(transport, "read", lambda timeout: read(round(timeout / step) * step))
    assert link.receive(7.3 * step) is None


@pytest.mark.usefixtures("echo")
def test_flush_has_an_end():
    transport = GoldenTransport(PARAMS)
    link = Link(transport)
    transport.device.credit = 0
    link.connect()
    link.flush(0)
    link.send(bytes(16))
    with pytest.raises(LinkError, match=r"golden: did not take all that was sent within 0\.3 s; connect again"):
        link.flush(0.3)
    assert transport.now() == pytest.approx(0.3)


# Faults.


def outcome(bank: Bank, seed: int, **faults) -> tuple[str, Faulty, LinkCounts]:
    """What became of two layers over a faulty link: "repaired" or "reported"; anything else fails here."""
    transport = GoldenTransport(PARAMS)
    faulty = Faulty(transport, np.random.default_rng(seed), **faults)
    link = Link(faulty)
    result = "repaired"
    try:
        link.connect(number=seed)
        for _ in range(2):
            y, *_ = run_layer(link, bank.layer, bank.x, bank.routes, bank.read)
            np.testing.assert_array_equal(y, bank.golden)
    except LinkError:
        result = "reported"
    assert transport.now() < 10, "it took too long"
    return result, faulty, link.counts


@pytest.fixture(scope="module")
def bank():
    return Bank(31, width=256, expert_width=256, experts=3, batch=2, used=2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_one_kind(bank, kind, seed):
    """Three in a hundred frames, both ways: repaired, but for what looks like a new connection."""
    result, faulty, counts = outcome(bank, seed, to_device=0.03, to_host=0.03, kinds=[kind])
    assert len(faulty.log) > 10
    assert result == "repaired"
    if kind in ("flip", "burst", "truncate", "drop"):
        assert counts.frames_resent > 0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(10))
def test_faults_of_all_kinds(bank, p, seed):
    """Whatever comes together, the result is right or there is none."""
    unit = (1, 8, 16)[seed % 3]
    result, faulty, _ = outcome(bank, seed, to_device=p, to_host=p, unit=unit)
    assert p > 0.1 or result == "repaired"
    assert faulty.log


def test_without_the_crc_wrong_numbers_come_out(bank, monkeypatch):
    """The faults above are such that a receiver that does not look is caught."""
    monkeypatch.setattr(Parser, "_intact", lambda self, start, end, header: True)
    results = Tally()
    for seed in range(10):
        try:
            results[outcome(bank, seed, to_host=0.1, kinds=["flip"])[0]] += 1
        except (AssertionError, LayerError):
            results["wrong"] += 1
    assert results["wrong"] > 0
