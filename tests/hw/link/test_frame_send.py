from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hw.formats import frames
from hw.formats.frames import SEQUENCES, WORD_BYTES, Flag, Header, Type
from hw.link.frame_send import FrameSend
from tests.hw.streams import STALLS

from .bench import Taken, give, message_beats, parse, simulate

WIDTHS = [1, 4, 8, 16]
FRAME_WORDS = 4
BUFFER_WORDS = 64
RESEND_CYCLES = 300
WINDOW = 8
NONCE = 0xBEEF


class Sender:
    """A ``FrameSend`` in the simulator, whose frames are parsed as they come."""

    def __init__(self, width: int, *, seed: int = 0, p_in: float = 1.0, p_out: float = 1.0, **changes) -> None:
        sizes = {"frame_words": FRAME_WORDS, "buffer_words": BUFFER_WORDS, "resend_cycles": RESEND_CYCLES, **changes}
        self.dut = FrameSend(width, **sizes)
        self.rngs = np.random.default_rng(seed).spawn(2)
        self.p_in, self.p_out = p_in, p_out
        self.taken = Taken()
        self.given = 0

    @property
    def frames(self) -> list[tuple[Header, bytes]]:
        return [parse(run) for run in self.taken.runs]

    async def pulse(self, ctx, name: str, **beside: int) -> None:
        """One cycle of ``name``, with what is given ``beside`` it; that stays, unless it is a pulse, too."""
        for other, value in beside.items():
            ctx.set(getattr(self.dut, other), value)
        ctx.set(getattr(self.dut, name), 1)
        await ctx.tick()
        ctx.set(getattr(self.dut, name), 0)
        ctx.set(self.dut.resend, 0)

    async def until(self, ctx, count: int) -> None:
        """Wait for ``count`` frames, from the start on."""
        while len(self.taken.runs) < count:
            await ctx.tick()

    async def quiet(self, ctx, count: int, cycles: int = 60) -> None:
        """Claim that there are ``count`` frames, now and ``cycles`` later."""
        await ctx.tick().repeat(cycles)
        assert len(self.taken.runs) == count

    def run(
        self,
        script: Callable[[Any], Awaitable[None]],
        messages: Sequence[bytes] = (),
        *,
        before_sync: bool = False,
        limit: int = 20000,
    ) -> None:
        """Start a connection, send ``messages`` beside the ``script``, and end with that."""

        async def play(ctx) -> None:
            if not before_sync:
                await self.pulse(ctx, "sync", nonce=NONCE)
            await script(ctx)

        async def feed(ctx) -> None:
            if not before_sync:
                await ctx.tick().until(self.dut.sync)
            for message in messages:
                await give(ctx, self.dut.i, message_beats(message, self.dut.width), rng=self.rngs[0], p=self.p_in)
                self.given += 1

        take = self.taken.process(self.dut.o, rng=self.rngs[1], p=self.p_out)
        simulate(self.dut, play, background=[feed, take], limit=limit)
        if not before_sync:
            assert parse(self.taken.runs[0]) == (Header(Type.SYNC, sequence=NONCE), b"")


def cut(messages: Sequence[bytes], words: int = FRAME_WORDS) -> list[tuple[bytes, Flag]]:
    """The payloads of the frames that messages make, and their flags."""
    size = words * WORD_BYTES
    return [
        (message[low : low + size], Flag.LAST if low + size >= len(message) else Flag(0))
        for message in messages
        for low in range(0, len(message), size)
    ]


def sent(headers_and_payloads: Sequence[tuple[Header, bytes]]) -> list[tuple[int, bytes, Flag]]:
    """Number, payload and flags of the ``MESSAGE`` frames."""
    return [(h.sequence, payload, h.flags) for h, payload in headers_and_payloads if h.type == Type.MESSAGE]


@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", [0])
def test_messages_are_cut_into_frames(width, p_in, p_out, seed):
    rng = np.random.default_rng(seed)
    messages = [rng.bytes(16 * int(words)) for words in [1, 4, 5, 8, 9, *rng.integers(1, 12, 5)]]
    pieces = cut(messages)
    sender = Sender(width, seed=seed, p_in=p_in, p_out=p_out, resend_cycles=5000)

    async def script(ctx) -> None:
        for count in range(1, len(pieces) + 2):
            await sender.until(ctx, count)
            await sender.pulse(ctx, "acked", peer_ack=count - 1)
        await sender.quiet(ctx, len(pieces) + 1)
        assert ctx.get(sender.dut.resent) == 0

    sender.run(script, messages)
    assert sent(sender.frames) == [(n, payload, flags) for n, (payload, flags) in enumerate(pieces)]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_frame_costs_its_beats_and_the_overhead(width):
    sender = Sender(width, frame_words=16, buffer_words=256, resend_cycles=20000)

    async def script(ctx) -> None:
        await sender.until(ctx, 9)

    sender.run(script, [bytes(256)] * 8)
    ends = sender.taken.cycles[2:]  # the first message may have come late
    beats = (16 + 2) * WORD_BYTES // width
    assert set(np.diff(ends)) == {beats + sender.dut.overhead}


@pytest.mark.parametrize("width", [1, 16])
def test_nothing_is_sent_before_a_connection(width):
    sender = Sender(width)

    async def script(ctx) -> None:
        await sender.pulse(ctx, "tell")
        await sender.pulse(ctx, "nak")
        await sender.pulse(ctx, "poll")
        await sender.quiet(ctx, 0, 2 * RESEND_CYCLES)
        await sender.pulse(ctx, "sync", nonce=NONCE)
        await sender.until(ctx, 1)
        await sender.quiet(ctx, 1, 2 * RESEND_CYCLES)

    sender.run(script, [b"before the first"], before_sync=True)
    assert sender.frames == [(Header(Type.SYNC, sequence=NONCE), b"")]


@pytest.mark.parametrize("width", [1, 8, 16])
def test_headers_tell_what_is_wanted_now(width):
    sender = Sender(width)

    async def script(ctx) -> None:
        await sender.until(ctx, 1)
        await sender.pulse(ctx, "tell", wanted=7, credit=300)
        await sender.until(ctx, 2)
        await sender.pulse(ctx, "nak", wanted=8, credit=200)
        await sender.until(ctx, 3)
        await sender.pulse(ctx, "tell", wanted=9, credit=65535)
        await sender.until(ctx, 4)
        await sender.quiet(ctx, 4)

    sender.run(script)
    assert [header for header, _ in sender.frames[1:]] == [
        Header(Type.ACK, ack=7, credit=300),
        Header(Type.ACK, Flag.NAK, ack=8, credit=200),
        Header(Type.ACK, ack=9, credit=65535),
    ]


@pytest.mark.parametrize("width", [1, 16])
def test_a_message_tells_as_well(width):
    """No acknowledgement of its own while a message is there, but a loss is told at once."""
    sender = Sender(width, resend_cycles=20000)

    async def script(ctx) -> None:
        while not (sender.given and len(sender.taken.runs)):
            await ctx.tick()
        await sender.until(ctx, 3)
        await sender.pulse(ctx, "tell", wanted=1)  # while frames are sent, with more of them waiting
        await sender.until(ctx, 5)
        await sender.pulse(ctx, "nak")
        await sender.until(ctx, 10)
        await sender.quiet(ctx, 10)

    sender.run(script, [bytes(64)] * 8)
    kinds = [header.type for header, _ in sender.frames]
    assert kinds.count(Type.ACK) == 1
    (place,) = [n for n, kind in enumerate(kinds) if kind == Type.ACK]
    assert place in (5, 6, 7)
    assert sender.frames[place][0].flags == Flag.NAK
    assert [header.ack for header, _ in sender.frames][-3:] == [1] * 3


@pytest.mark.parametrize("width", [1, 8, 16])
def test_frames_are_sent_again_after_a_while(width):
    messages = [bytes([n] * 16) for n in range(WINDOW + 3)]
    sender = Sender(width)

    async def script(ctx) -> None:
        await sender.until(ctx, 1 + WINDOW)
        await sender.quiet(ctx, 1 + WINDOW, RESEND_CYCLES // 2)  # no more than the window
        assert ctx.get(sender.dut.resent) == 0
        await sender.until(ctx, 1 + 2 * WINDOW)
        assert ctx.get(sender.dut.resent) == WINDOW
        await sender.pulse(ctx, "acked", peer_ack=WINDOW)
        await sender.until(ctx, 1 + 2 * WINDOW + 3)
        await sender.pulse(ctx, "acked", peer_ack=WINDOW + 3)
        await sender.quiet(ctx, 1 + 2 * WINDOW + 3, 3 * RESEND_CYCLES)
        assert ctx.get(sender.dut.resent) == WINDOW

    sender.run(script, messages)
    window = list(range(WINDOW))
    assert [number for number, _, _ in sent(sender.frames)] == window + window + [WINDOW, WINDOW + 1, WINDOW + 2]
    assert all(payload == bytes([number] * 16) for number, payload, _ in sent(sender.frames))


@pytest.mark.parametrize("width", [1, 8, 16])
def test_frames_are_sent_again_when_asked_for(width):
    rng = np.random.default_rng(0)
    messages = [rng.bytes(16 * FRAME_WORDS) for _ in range(5)]
    sender = Sender(width, resend_cycles=20000)

    async def script(ctx) -> None:
        await sender.until(ctx, 6)
        await sender.pulse(ctx, "acked", peer_ack=2, resend=1)
        await sender.until(ctx, 9)
        # While the third of them comes again, it was heard after all: the fourth is next.
        await sender.pulse(ctx, "resend")
        while not (sender.taken.rest and len(sender.taken.runs) == 9):
            await ctx.tick()
        await sender.pulse(ctx, "acked", peer_ack=4)
        await sender.until(ctx, 11)
        await sender.quiet(ctx, 11, 200)
        await sender.pulse(ctx, "acked", peer_ack=5, resend=1)  # nothing is left to be sent again
        await sender.quiet(ctx, 11, 200)
        assert ctx.get(sender.dut.resent) == 5

    sender.run(script, messages)
    assert [number for number, _, _ in sent(sender.frames)] == [0, 1, 2, 3, 4, 2, 3, 4, 2, 4]
    assert all(payload == messages[number] for number, payload, _ in sent(sender.frames))


@pytest.mark.parametrize("wrong", [4, 5, 100, 32768, SEQUENCES - 1])
def test_an_acknowledgement_of_what_was_not_sent_is_ignored(wrong):
    messages = [bytes([n] * 16) for n in range(3)]
    sender = Sender(4)

    async def script(ctx) -> None:
        await sender.until(ctx, 4)
        await sender.pulse(ctx, "acked", peer_ack=wrong)
        await sender.until(ctx, 7)
        await sender.pulse(ctx, "acked", peer_ack=3)
        await sender.quiet(ctx, 7, 2 * RESEND_CYCLES)

    sender.run(script, messages)
    assert [number for number, _, _ in sent(sender.frames)] == [0, 1, 2] * 2


@pytest.mark.parametrize("width", WIDTHS)
def test_status(width):
    counters = dict(damaged=0x01020304, refused=5, garbage=0xFFFFFFFF)
    sender = Sender(width)

    async def script(ctx) -> None:
        await sender.until(ctx, 2)
        await sender.pulse(ctx, "resend")
        await sender.until(ctx, 3)
        await sender.pulse(ctx, "acked", peer_ack=1)
        await sender.pulse(ctx, "poll", **counters)
        await ctx.tick().repeat(6)
        for name in counters:  # what is sent was all true at one time
            ctx.set(getattr(sender.dut, name), 0)
        await sender.until(ctx, 4)
        await sender.quiet(ctx, 4)

    sender.run(script, [bytes(16)])
    header, payload = sender.frames[3]
    assert header == Header(Type.STATUS, words=1)
    assert frames.Status(*frames.STATUS.unpack(payload)) == frames.Status(**counters, resent=1)


@pytest.mark.parametrize("p_out", [0.5, 1.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_connection_begins_while_a_frame_is_sent(width, p_out):
    """The frame is completed, but unfit; what was there of messages, also of one that is incomplete, is forgotten."""
    rng = np.random.default_rng(0)
    old, new = rng.bytes(16 * 16), rng.bytes(48)
    sender = Sender(width, frame_words=16, p_out=p_out)
    beats = message_beats(old, width)

    async def script(ctx) -> None:
        dut = sender.dut
        await sender.until(ctx, 1)
        await give(ctx, dut.i, beats, rng=sender.rngs[0])
        await give(ctx, dut.i, beats[:-1], rng=sender.rngs[0])
        while len(sender.taken.rest) < 32:
            await ctx.tick()
        ctx.set(dut.i.valid, 1)
        await sender.pulse(ctx, "sync", nonce=1)
        ctx.set(dut.i.valid, 0)
        await give(ctx, dut.i, message_beats(new, width), rng=sender.rngs[0])
        await sender.until(ctx, 4)
        await sender.pulse(ctx, "acked", peer_ack=1)
        await sender.quiet(ctx, 4, 2 * RESEND_CYCLES)

    sender.run(script)
    first, cut_off, second, message = sender.taken.runs
    assert parse(first)[0].sequence == NONCE
    assert len(cut_off) == (16 + 2) * 16
    with pytest.raises(AssertionError):
        parse(cut_off)
    assert parse(second)[0] == Header(Type.SYNC, sequence=1)
    assert parse(message) == (Header(Type.MESSAGE, Flag.LAST, words=3), new)


@pytest.mark.parametrize("width", [1, 16])
def test_a_full_buffer_takes_no_more(width):
    messages = [bytes([n] * 16 * FRAME_WORDS) for n in range(4)]
    sender = Sender(width, buffer_words=FRAME_WORDS, resend_cycles=20000)

    async def script(ctx) -> None:
        for count in range(1, 5):
            await sender.until(ctx, 1 + count)
            await sender.quiet(ctx, 1 + count, 100)
            assert sender.given == count
            await sender.pulse(ctx, "acked", peer_ack=count)

    sender.run(script, messages)
    assert [payload for _, payload, _ in sent(sender.frames)] == messages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 3}, r"width must be one of \(1, 4, 8, 16\), not 3"),
        ({"frame_words": 0}, "frame_words"),
        ({"buffer_words": 3}, r"buffer_words must be a power of two in 4\.\.32768, not 3"),
        ({"resend_cycles": 1}, r"resend_cycles must be in 16\.\.4294967296, not 1"),
    ],
)
def test_rejected(changes, message):
    sizes = {"width": 16, "frame_words": 4, "buffer_words": 8, "resend_cycles": 100, **changes}
    with pytest.raises((TypeError, ValueError), match=message):
        FrameSend(sizes.pop("width"), **sizes)
