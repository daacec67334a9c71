"""The link against a host's side in Python, over channels that damage, drop, repeat and invent bytes."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest

from hw.formats import frames
from hw.formats.frames import SEQUENCES, WORD_BYTES, Flag, Header, Type
from hw.link.link import Link

from .bench import Taken, beats_of, give, message_beats, message_frame, parse, simulate

FRAME_WORDS = 8
BUFFER_WORDS = 16
SEND_FRAME_WORDS = 4
SIZES = dict(
    frame_words=FRAME_WORDS,
    buffer_words=BUFFER_WORDS,
    idle_cycles=200,
    send_frame_words=SEND_FRAME_WORDS,
    send_buffer_words=8,
    resend_cycles=1000,
)
NONCE = 0x1234
PATIENCE = 1500
"""Cycles after which the host sends again what is not acknowledged."""


class Host:
    """The host's side: sends ``messages``, takes whatever comes back into ``heard``; go-back-n in both directions."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        cut = FRAME_WORDS * WORD_BYTES
        self.frames = [
            (message[low : low + cut], low + cut >= len(message))
            for message in messages
            for low in range(0, len(message), cut)
        ]
        self.synced = False
        self.acked = self.upcoming = 0
        self.credit = 0
        self.wanted = 0
        self.tell = True
        self.nak = False
        self.heard: list[bytes] = []
        self.part = b""
        self.progress = 0
        self.status: list[frames.Status] = []
        self.resent = 0
        self.sent = 0

    def next(self, cycle: int) -> bytes | None:
        """The next frame to send, None: nothing now."""
        if not self.synced:
            if cycle < self.progress:
                return None
            self.progress = cycle + PATIENCE
            return frames.frame(Header(Type.SYNC, sequence=NONCE))
        if cycle > self.progress + PATIENCE:
            self.upcoming, self.progress, self.tell = self.acked, cycle, True
        flags = Flag.NAK if self.nak else Flag(0)
        if self.upcoming < len(self.frames):
            payload, last = self.frames[self.upcoming]
            ahead = self.frames[self.acked : self.upcoming + 1]
            if sum(-(-len(part) // WORD_BYTES) for part, _ in ahead) <= self.credit:
                number = self.upcoming
                self.upcoming += 1
                self.resent += self.upcoming <= self.sent
                self.sent = max(self.sent, self.upcoming)
                self.tell = self.nak = False
                return message_frame(number % SEQUENCES, payload, last=last, ack=self.wanted, flags=flags)
        if self.tell or self.nak:
            self.tell = self.nak = False
            return frames.frame(Header(Type.ACK, flags, ack=self.wanted))
        return None

    def take(self, data: bytes, cycle: int) -> None:
        """A run of beats that the link marked as a frame, perhaps damaged on its way."""
        try:
            header, payload = parse(data)
        except AssertionError:
            self.nak = self.synced
            return
        if header.type == Type.SYNC and header.sequence == NONCE and not self.synced:
            self.synced = True
        if not self.synced:
            return
        ahead = (header.ack - self.acked) % SEQUENCES
        assert ahead <= self.sent - self.acked, "acknowledges what was never sent"
        if ahead:
            self.progress = cycle
        self.acked += ahead
        self.upcoming = max(self.upcoming, self.acked)
        self.credit = header.credit
        assert header.credit <= BUFFER_WORDS
        if header.flags & Flag.NAK:
            self.upcoming = self.acked
        if header.type == Type.STATUS:
            self.status.append(frames.Status(*frames.STATUS.unpack(payload)))
        if header.type == Type.MESSAGE:
            self.tell = True
            if header.sequence == self.wanted:
                self.wanted += 1
                self.part += payload
                if header.flags & Flag.LAST:
                    self.heard.append(self.part)
                    self.part = b""


class Channel:
    """Damages, drops, repeats, truncates or precedes with garbage each frame with chance ``p``; may swap two."""

    def __init__(self, rng: np.random.Generator, p: float) -> None:
        self.rng, self.p = rng, p
        self.faults = 0

    def __call__(self, frame: bytes) -> bytes:
        if self.rng.random() >= self.p:
            return frame
        self.faults += 1
        word = int(self.rng.integers(len(frame) // WORD_BYTES)) * WORD_BYTES
        garbage = self.rng.bytes(int(self.rng.integers(1, 4)) * WORD_BYTES)
        flipped = bytearray(frame)
        for bit in self.rng.integers(8 * len(frame), size=self.rng.integers(1, 4)):
            flipped[bit // 8] ^= 1 << bit % 8
        choices = (bytes(flipped), b"", frame + frame, frame[:word], garbage + frame, frame[word:], frame + garbage)
        return choices[self.rng.integers(len(choices))]


def run(width: int, to_engine: Sequence[bytes], to_host: Sequence[bytes], *, seed: int, p_fault: float, p: float):
    """Both sides' messages as they arrived, and the host."""
    rngs = np.random.default_rng(seed).spawn(6)
    dut = Link(width, **SIZES)
    host = Host(to_engine)
    there, back = Channel(rngs[0], p_fault), Channel(rngs[1], p_fault)
    cycle = 0
    resets = 0
    messages, sent = Taken(), Taken()
    queue: deque[bytes] = deque()
    sent_before = 0

    async def send(ctx) -> None:
        nonlocal cycle
        while len(messages.runs) < len(to_engine) or len(host.heard) < len(to_host) or host.acked < len(host.frames):
            frame = host.next(cycle)
            if frame is None:
                await ctx.tick()
            else:
                await give(ctx, dut.i, beats_of(there(frame), width), rng=rngs[2], p=p)

    async def engine(ctx) -> None:
        await ctx.tick().until(dut.reset)
        for message in to_host:
            await give(ctx, dut.i_message, message_beats(message, width), rng=rngs[3], p=p)

    async def watch(ctx) -> None:
        nonlocal cycle, resets, sent_before
        while True:
            _, _, reset = await ctx.tick().sample(dut.reset)
            cycle += 1
            resets += reset
            while sent_before < len(sent.runs):
                frame = sent.runs[sent_before]
                sent_before += 1
                parse(frame)
                queue.append(back(frame))
            while queue:
                if frame := queue.popleft():
                    host.take(frame, cycle)

    background = [
        watch,
        messages.process(dut.o_message, rng=rngs[4], p=p, until=dut.reset),
        sent.process(dut.o, rng=rngs[5], p=p),
    ]
    simulate(dut, send, engine, background=background, limit=300000)
    return messages.runs, host, there.faults + back.faults, resets


@pytest.mark.parametrize("p", [1.0, 0.6])
@pytest.mark.parametrize(("p_fault", "seed"), [(0, 0), (0.15, 1), (0.15, 2)])
@pytest.mark.parametrize("width", [1, 8, 16])
def test_messages_arrive_whole_once_and_in_order(width, p_fault, p, seed):
    rng = np.random.default_rng(seed)
    to_engine = [rng.bytes(16 * int(n)) for n in rng.integers(1, 20, 12)]
    to_host = [rng.bytes(16 * int(n)) for n in rng.integers(1, 10, 12)]
    messages, host, faults, resets = run(width, to_engine, to_host, seed=seed, p_fault=p_fault, p=p)
    assert messages == to_engine
    assert host.heard == to_host
    assert (faults > 5) == (p_fault > 0)
    if not p_fault:
        assert (host.resent, resets) == (0, 1)


@pytest.mark.parametrize("width", [1, 8, 16])
def test_a_connection_starts_from_nothing(width):
    """While messages are under way in both directions, also one that a program left unfinished."""
    rngs = np.random.default_rng(0).spawn(3)
    dut = Link(width, **SIZES)
    messages, sent = Taken(), Taken()
    old = [message_frame(n, bytes([n] * 16 * FRAME_WORDS), last=False) for n in range(3)]
    sync = [frames.frame(Header(Type.SYNC, sequence=number)) for number in (1, 2)]

    async def host(ctx) -> None:
        await give(ctx, dut.i, beats_of(sync[0] + b"".join(old[:2]) + old[2][:64], width), rng=rngs[0])
        await ctx.tick().repeat(SIZES["idle_cycles"] + 10)
        await give(ctx, dut.i, beats_of(sync[1] + message_frame(0, b"new" * 16), width), rng=rngs[0])
        while not messages.runs or len(sent.runs) < before + 3:
            await ctx.tick()

    before = 0

    async def engine(ctx) -> None:
        nonlocal before
        for connection in range(2):
            await ctx.tick().until(dut.reset)
            ctx.set(dut.i_message.valid, 0)
            before = len(sent.runs)
            if not connection:  # a message without an end
                ctx.set(dut.i_message.valid, 1)
        await give(ctx, dut.i_message, message_beats(b"hello".ljust(16), width), rng=rngs[1])

    background = [
        messages.process(dut.o_message, rng=rngs[1], p=0.7, until=dut.reset),
        sent.process(dut.o, rng=rngs[2], p=0.7),
        engine,
    ]
    simulate(dut, host, background=background)
    assert messages.runs == [b"new" * 16]
    assert parse(sent.runs[0])[0].type == Type.SYNC
    synced = [n for n, run in enumerate(sent.runs) if run[2] == Type.SYNC]
    assert len(synced) == 2
    header, _ = parse(sent.runs[synced[1]])
    assert header == Header(Type.SYNC, sequence=2, credit=BUFFER_WORDS)
    after = [parse(run) for run in sent.runs[synced[1] + 1 :]]
    said = [(header.sequence, header.flags, payload) for header, payload in after if header.type == Type.MESSAGE]
    assert said[0] == (0, Flag.LAST, b"hello".ljust(16))
    assert after[-1][0].ack == 1
