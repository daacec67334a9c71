from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from hw.formats import frames
from hw.formats.frames import Flag, Header, Type
from hw.link.frame_receive import FrameReceive
from tests.hw.streams import STALLS

from .bench import Taken, beats_of, give, message_frame, simulate

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
) -> Heard:
    """Give the bytes of all parts and wait as many cycles as the numbers among them say.

    With ``patient`` each part waits until all words of the buffer are free.
    """
    rngs = np.random.default_rng(seed).spawn(2)
    heard = Heard(Taken())

    async def feed(ctx) -> None:
        for part in parts:
            if isinstance(part, int):
                await ctx.tick().repeat(part)
                continue
            if patient:
                await ctx.tick().until(dut.credit == dut.buffer_words)
            await give(ctx, dut.i, beats_of(part, dut.width), rng=rngs[0], p=p_in)
        await ctx.tick().repeat(40)
        quiet, beats = 0, 0
        while p_out and quiet < 40:
            await ctx.tick()
            quiet = quiet + 1 if heard.taken.beats == beats else 0
            beats = heard.taken.beats
        for name in ("damaged", "refused", "garbage", "wanted", "credit"):
            setattr(heard, name, ctx.get(getattr(dut, name)))

    async def note(ctx) -> None:
        pulses = [getattr(dut, name) for name in PULSES]
        values = [getattr(dut, beside or name) for name, beside in PULSES.items()]
        while True:
            _, _, *seen = await ctx.tick().sample(*pulses, *values)
            for name, high, value in zip(PULSES, seen, seen[len(PULSES) :], strict=False):
                if high:
                    heard.pulses.append((name, value))
            assert ctx.get(dut.credit) <= dut.buffer_words

    take = heard.taken.process(dut.o, rng=rngs[1], p=p_out, until=dut.sync)
    simulate(dut, feed, background=[note, take], limit=limit)
    return heard


def padded(message: bytes, width: int) -> bytes:
    return message + bytes(-len(message) % width)


@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", range(2))
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
