import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from hw.formats import frames
from hw.formats.frames import SEQUENCES, Flag, Header, Type
from hw.link.frame_receive import FrameReceive
from hw.link.ring import Ring
from tests.hw.streams import STALLS

from .bench import Process, Taken, beats_of, give, message_frame, simulate

WIDTHS = [1, 4, 8, 16]
FRAME_WORDS = 16
BUFFER_WORDS = 32
IDLE_CYCLES = 64
SYNC = frames.frame(Header(Type.SYNC, sequence=77))
PULSES = {"sync": "nonce", "tell": "credit", "nak": "wanted", "poll": None, "acked": "peer_ack", "resend": None}
"""Each with what is valid beside it."""


def frame_receive(width: int, **changes) -> FrameReceive:
    return FrameReceive(
        width, **{"frame_words": FRAME_WORDS, "buffer_words": BUFFER_WORDS, "idle_cycles": IDLE_CYCLES, **changes}
    )


@dataclass
class Heard:
    """What a receiver made of what it was given."""

    taken: Taken
    pulses: list[tuple[str, int]] = field(default_factory=list)
    """With what was valid beside them."""
    damaged: int = 0
    refused: int = 0
    garbage: int = 0
    wanted: int = 0
    credit: int = 0
    cycles: int = 0
    """From the first beat that was taken to the last."""

    @property
    def messages(self) -> list[bytes]:
        return self.taken.runs

    def count(self, pulse: str) -> int:
        return sum(name == pulse for name, _ in self.pulses)


def hear(
    dut: FrameReceive,
    parts: Iterable[bytes | int],
    *,
    seed: int = 0,
    p_in: float = 1.0,
    p_out: float = 1.0,
    limit: int = 20000,
    patient: bool = False,
    also: Process | None = None,
) -> Heard:
    """Give the bytes of all parts and wait as many cycles as the numbers among them say.

    With ``patient`` each part waits until all words of the buffer are free. ``also`` runs first, beside that.
    """
    rngs = np.random.default_rng(seed).spawn(2)
    heard = Heard(Taken())

    cycle = 0

    async def feed(ctx) -> None:
        start = cycle
        for part in parts:
            if isinstance(part, int):
                await ctx.tick().repeat(part)
                continue
            if patient:
                await ctx.tick().repeat(4)  # the frame before is being checked
                await ctx.tick().until(dut.credit == dut.buffer_words)
            await give(ctx, dut.i, beats_of(part, dut.width), rng=rngs[0], p=p_in)
        heard.cycles = cycle - start
        await ctx.tick().repeat(40)
        quiet, beats = 0, 0
        while p_out and quiet < 40:
            await ctx.tick()
            quiet = quiet + 1 if heard.taken.beats == beats else 0
            beats = heard.taken.beats
        for name in ("damaged", "refused", "garbage", "wanted", "credit"):
            setattr(heard, name, ctx.get(getattr(dut, name)))

    async def note(ctx) -> None:
        nonlocal cycle
        pulses = [getattr(dut, name) for name in PULSES]
        values = [getattr(dut, beside or name) for name, beside in PULSES.items()]
        while True:
            cycle += 1
            _, _, *seen = await ctx.tick().sample(*pulses, *values)
            for name, high, value in zip(PULSES, seen, seen[len(PULSES) :], strict=False):
                if high:
                    heard.pulses.append((name, value))
            assert ctx.get(dut.credit) <= dut.buffer_words

    take = heard.taken.process(dut.o, rng=rngs[1], p=p_out, until=dut.sync)
    simulate(dut, *([also] if also else []), feed, background=[note, take], limit=limit)
    return heard


def padded(message: bytes, width: int) -> bytes:
    return message + bytes(-len(message) % width)


@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", [0])
def test_good_frames(width, p_in, p_out, seed):
    rng = np.random.default_rng(seed)
    lengths = [16, 1, 15, 17, 31, 32, FRAME_WORDS * 16, FRAME_WORDS * 16 - 7, *rng.integers(1, 256, 8).tolist()]
    messages = [rng.bytes(length) for length in lengths]
    parts = [SYNC, *(message_frame(n, message) for n, message in enumerate(messages))]
    heard = hear(frame_receive(width), parts, seed=seed, p_in=p_in, p_out=p_out, patient=True)
    assert heard.messages == [padded(message, width) for message in messages]
    assert heard.taken.rest == b""
    assert (heard.damaged, heard.refused, heard.garbage) == (0, 0, 0)
    assert (heard.wanted, heard.credit) == (len(messages), BUFFER_WORDS)
    assert heard.pulses[0] == ("sync", 77)
    assert heard.count("nak") == 0
    assert heard.count("tell") >= len(messages)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", range(2))
def test_messages_of_several_frames(width, seed):
    rng = np.random.default_rng(seed)
    cuts = [[16, 16 * FRAME_WORDS, 5], [32, 48], [16 * FRAME_WORDS, 16]]
    messages = [[rng.bytes(length) for length in lengths] for lengths in cuts]
    pieces = [(piece, n == len(message) - 1) for message in messages for n, piece in enumerate(message)]
    parts = [SYNC, *(message_frame(n, piece, last=last) for n, (piece, last) in enumerate(pieces))]
    heard = hear(frame_receive(width), parts, seed=seed, p_in=0.8, p_out=0.8, patient=True)
    assert heard.messages == [padded(b"".join(message), width) for message in messages]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_frame_costs_its_beats_and_the_overhead(width):
    rng = np.random.default_rng(0)
    dut = frame_receive(width)
    messages = [rng.bytes(16 * FRAME_WORDS) for _ in range(12)]
    heard = hear(dut, [b"".join(message_frame(n, message) for n, message in enumerate(messages))])
    assert heard.messages == messages
    beats = (FRAME_WORDS + 2) * 16 // width
    # The last frame's cycles behind its last beat are not counted.
    assert heard.cycles == len(messages) * (beats + dut.overhead) - 4


FLIPS = [(16, 1), (8, 1), (4, 3), (1, 7)]
"""Width, and each how many-th bit is flipped: narrow ones are slow to simulate."""


@pytest.mark.parametrize(("width", "step"), FLIPS)
def test_no_flipped_bit_passes(width, step):
    rng = np.random.default_rng(0)
    bits = range(0, 8 * 48, step)
    messages = [rng.bytes(16) for _ in bits]
    parts = []
    for n, (bit, message) in enumerate(zip(bits, messages, strict=True)):
        good = message_frame(n, message)
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        parts += [bytes(flipped), good]
    heard = hear(frame_receive(width), parts, limit=60000)
    assert heard.messages == messages
    in_body = sum(bit >= 8 * 16 for bit in bits)
    assert heard.damaged == heard.count("nak") == in_body
    assert heard.garbage == (len(bits) - in_body) * 48 // width
    assert (heard.refused, heard.wanted) == (0, len(messages))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", range(2))
def test_garbage_is_skipped(width, seed):
    rng = np.random.default_rng(seed)
    magic = frames.MAGIC.to_bytes(2, "little")
    header = frames.pack_header(Header(Type.MESSAGE, Flag.LAST, sequence=1, words=1))
    garbages = [
        bytes(width),
        magic * 8,
        (magic + bytes(14)) * 3,
        header[:15] + bytes([header[15] ^ 1]),
        header[:12] + bytes(4),
        rng.bytes(64),
        header[:8] * 3,
    ]
    messages = [rng.bytes(int(rng.integers(1, 64))) for _ in garbages]
    parts = [SYNC]
    for n, (garbage, message) in enumerate(zip(garbages, messages, strict=True)):
        parts += [garbage + bytes(-len(garbage) % width) + message_frame(n, message)]
    heard = hear(frame_receive(width), parts, seed=seed, p_in=0.7, p_out=0.7, patient=True)
    assert heard.messages == [padded(message, width) for message in messages]
    assert heard.garbage == sum(-(-len(garbage) // width) for garbage in garbages)
    assert (heard.damaged, heard.refused) == (0, 0)


NO_HEADERS = {
    "unknown type 0": (0, 0, 1, 0),
    "unknown type 5": (5, 0, 0, 0),
    "message without payload": (Type.MESSAGE, Flag.LAST, 0, 0),
    "payload beyond the limit": (Type.MESSAGE, Flag.LAST, FRAME_WORDS + 1, 0),
    "payload far beyond": (Type.MESSAGE, Flag.LAST, 0x8001, 0),
    "acknowledgement with payload": (Type.ACK, 0, 1, 0),
    "sync with payload": (Type.SYNC, 0, 1, 0),
    "status from the host": (Type.STATUS, 0, 1, 0),
    "padding before the last frame": (Type.MESSAGE, 0, 1, 3),
}


@pytest.mark.parametrize("width", [1, 16])
def test_impossible_headers_are_garbage(width):
    parts = [SYNC]
    for kind, flags, words, missing in NO_HEADERS.values():
        data = frames._HEADER.pack(frames.MAGIC, kind, flags | missing << 4, 0, 0, words, 0)
        parts += [data + frames._CRC.pack(zlib.crc32(data))]
    heard = hear(frame_receive(width), [*parts, message_frame(0, b"x" * 16)])
    assert heard.messages == [b"x" * 16]
    assert heard.garbage == len(NO_HEADERS) * 16 // width
    assert [name for name, _ in heard.pulses if name not in ("tell", "acked")] == ["sync"]
    assert heard.count("acked") == 1


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("words", [1, 2, 3, 5])
def test_a_truncated_frame_is_given_up(width, words):
    rng = np.random.default_rng(words)
    messages = [rng.bytes(64) for _ in range(3)]
    first, second, third = (message_frame(n, message) for n, message in enumerate(messages))
    wait = 2 * IDLE_CYCLES
    # Alone, then before frames that it swallows in part, so that they come again.
    parts = [SYNC, first[: 16 * words], wait, first, second[: 16 * words], second, third, wait, second, third]
    heard = hear(frame_receive(width), parts)
    assert heard.messages == messages
    assert heard.damaged == 2
    assert heard.count("nak") >= 2


@pytest.mark.parametrize("gap", [-2, 8])
def test_idle_cycles(gap):
    frame = message_frame(0, bytes(16))
    heard = hear(frame_receive(16), [frame[:16], IDLE_CYCLES + gap, frame[16:], 20])
    assert (heard.wanted, heard.damaged) == ((1, 0) if gap < 0 else (0, 1))


@pytest.mark.parametrize("width", WIDTHS)
def test_only_the_wanted_frame_is_taken(width):
    rng = np.random.default_rng(0)
    messages = [rng.bytes(20) for _ in range(6)]
    frame = [message_frame(n, message) for n, message in enumerate(messages)]
    last = message_frame(65535, b"before the first")
    order = [SYNC, frame[0], frame[0], frame[2], frame[3], last, frame[1], frame[2], frame[4], frame[3], frame[4]]
    heard = hear(frame_receive(width), [*order, frame[5]])
    assert heard.messages == [padded(message, width) for message in messages]
    assert (heard.refused, heard.damaged, heard.garbage) == (5, 0, 0)
    # One for each gap, however many frames follow it, and none for repeats.
    assert [value for name, value in heard.pulses if name == "nak"] == [1, 3]
    repeats = 2
    assert heard.count("tell") >= len(messages) + repeats


@pytest.mark.parametrize("width", WIDTHS)
def test_a_header_does_not_pass_with_another_frames_payload(width):
    rng = np.random.default_rng(0)
    messages = [rng.bytes(32) for _ in range(2)]
    first, second = (message_frame(n, message) for n, message in enumerate(messages))
    heard = hear(frame_receive(width), [first[:16] + second[16:], second[:16] + first[16:], first, second])
    assert heard.messages == messages
    assert heard.damaged == 2
    assert heard.count("nak") == 1  # the second of them is ahead of the wanted one, for which that was said already


@pytest.mark.parametrize("width", WIDTHS)
def test_a_damaged_wanted_frame_asks_each_time(width):
    good = message_frame(0, bytes(32))
    bad = good[:20] + b"!" + good[21:]
    heard = hear(frame_receive(width), [bad, bad, message_frame(1, bytes(32)), bad, good])
    assert (heard.count("nak"), heard.damaged, heard.refused, heard.wanted) == (3, 3, 1, 1)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_full_buffer_refuses(width):
    rng = np.random.default_rng(0)
    room = BUFFER_WORDS + Ring.QUEUE_DEPTH * width // 16  # some leave for the queue behind the memory
    fit = room // FRAME_WORDS
    messages = [rng.bytes(16 * FRAME_WORDS - 3) for _ in range(fit + 1)]
    dut = frame_receive(width)
    heard = hear(dut, [message_frame(n, message) for n, message in enumerate(messages)], p_out=0)
    assert (heard.wanted, heard.refused, heard.count("nak")) == (fit, 1, 0)
    assert heard.credit == room - fit * FRAME_WORDS


@pytest.mark.parametrize("buffer_words", [FRAME_WORDS, BUFFER_WORDS])
@pytest.mark.parametrize("width", [1, 16])
def test_the_peer_learns_of_room_for_a_frame(width, buffer_words):
    """Whatever the last pulse before a pause told, it lets the peer send the largest frame."""
    rng = np.random.default_rng(0)
    lengths = [1, 16 * FRAME_WORDS, 40, 16 * FRAME_WORDS, 80, 16, 16 * FRAME_WORDS - 20]
    parts: list[bytes | int] = []
    for n, length in enumerate(lengths):
        parts += [message_frame(n, rng.bytes(length)), 16 * FRAME_WORDS // width + 40]
    heard = hear(frame_receive(width, buffer_words=buffer_words), parts)
    assert heard.wanted == len(lengths)
    told = []
    for name, value in heard.pulses:
        if name == "acked":
            told.append(0)
        elif name == "tell":
            told[-1] = value
    assert min(told) >= FRAME_WORDS


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("p_out", [0.3, 1.0])
def test_sync_forgets(width, p_out):
    rng = np.random.default_rng(0)
    old = [message_frame(n, rng.bytes(16 * FRAME_WORDS), last=False) for n in range(2)]
    bad = message_frame(2, bytes(16))[:-1] + b"!"
    new = [rng.bytes(33), rng.bytes(16)]
    parts = [b"garbage " * 2, *old, bad, SYNC, *(message_frame(n, message) for n, message in enumerate(new))]
    heard = hear(frame_receive(width), parts, p_in=0.9, p_out=p_out)
    assert heard.messages == [padded(message, width) for message in new]
    assert (heard.damaged, heard.refused, heard.garbage) == (0, 0, 0)
    assert (heard.wanted, heard.credit) == (2, BUFFER_WORDS)


def test_numbers_wrap():
    dut = frame_receive(16)
    start = SEQUENCES - 3
    messages = [bytes([n] * 16) for n in range(6)]
    frame = [message_frame((start + n) % SEQUENCES, message) for n, message in enumerate(messages)]
    parts = [*frame[:3], frame[5], frame[3], frame[1], frame[4], frame[3], frame[5]]

    async def begin(ctx) -> None:
        ctx.set(dut.wanted, start)

    heard = hear(dut, [4, *parts], also=begin)
    assert heard.messages == messages
    assert (heard.wanted, heard.refused) == (3, 3)
    assert [value for name, value in heard.pulses if name == "nak"] == [0]


@pytest.mark.parametrize("width", WIDTHS)
def test_what_the_peer_says(width):
    parts = [
        SYNC,
        frames.frame(Header(Type.ACK, ack=5)),
        frames.frame(Header(Type.ACK, Flag.NAK, ack=6)),
        frames.frame(Header(Type.ACK, Flag.POLL, ack=7)),
        message_frame(0, b"x", ack=8, flags=Flag.NAK | Flag.POLL),
        message_frame(0, b"y" * 16, ack=9)[:-1] + b"!",
        frames.frame(Header(Type.STATUS, ack=10)),
    ]
    heard = hear(frame_receive(width), parts)
    assert [value for name, value in heard.pulses if name == "acked"] == [5, 6, 7, 8, 9]
    assert [name for name, _ in heard.pulses if name in ("resend", "poll")] == ["resend", "poll", "poll", "resend"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 2}, r"width must be one of \(1, 4, 8, 16\), not 2"),
        ({"width": "8"}, "width must be an int, not '8'"),
        ({"frame_words": 0}, r"frame_words must be in 1\.\.4096, not 0"),
        ({"frame_words": 4097}, "not 4097"),
        ({"buffer_words": 8}, r"buffer_words must be a power of two in 16\.\.32768, not 8"),
        ({"buffer_words": 24}, "not 24"),
        ({"buffer_words": 65536}, "not 65536"),
        ({"idle_cycles": 15}, r"idle_cycles must be in 16\.\.4294967296, not 15"),
    ],
)
def test_rejected(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        frame_receive(**{"width": 16, **changes})
