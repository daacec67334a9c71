import numpy as np
import pytest

from hw.formats.frames import SEQUENCES
from hw.link.frame_store import WINDOW, FrameStore
from tests.formal.prove import Opened

from .bench import give, message_beats, simulate


@pytest.mark.parametrize("seed", range(3))
def test_numbers_wrap(seed):
    """Frames around number 65535 are taken, taken again and let go like any other."""
    rng = np.random.default_rng(seed)
    dut = FrameStore(16, frame_words=1, buffer_words=16)
    opened = Opened(dut)
    start = SEQUENCES - WINDOW - 2
    messages = [rng.bytes(16) for _ in range(4 * WINDOW)]
    count = len(messages)

    async def feed(ctx) -> None:
        for name in ("oldest", "upcoming", "fresh", "made"):
            ctx.set(opened[name], start % (1 << len(opened[name])))
        for message in messages:
            await give(ctx, dut.i, message_beats(message, 16), rng=rng, p=0.8)

    async def take(ctx) -> None:
        upcoming = acknowledged = fresh = 0
        while acknowledged < count:
            choice = rng.integers(4)
            if choice < 2 and ctx.get(dut.ready):
                await ctx.tick()
                number = ctx.get(dut.number)
                assert number == (start + upcoming) % SEQUENCES
                assert (ctx.get(dut.words), ctx.get(dut.last)) == (1, 1)
                assert ctx.get(dut.again) == (upcoming < fresh)
                assert upcoming < acknowledged + WINDOW
                ctx.set(dut.r_addr, ctx.get(dut.at))
                ctx.set(dut.take, 1)
                await ctx.tick()
                ctx.set(dut.take, 0)
                await ctx.tick()
                assert bytes(ctx.get(dut.r_data).to_bytes(16, "little")) == messages[upcoming]
                await ctx.tick().repeat(FrameStore.SETTLE)
                upcoming += 1
                fresh = max(fresh, upcoming)
            elif choice == 2:
                heard = int(rng.integers(acknowledged - 2, fresh + 3))
                if acknowledged <= heard <= fresh:
                    acknowledged = heard
                    upcoming = max(upcoming, heard)
                ctx.set(dut.peer_ack, (start + heard) % SEQUENCES)
                ctx.set(dut.acked, 1)
                await ctx.tick()
                ctx.set(dut.acked, 0)
                await ctx.tick().until(~dut.busy)
                assert ctx.get(dut.waiting) == (acknowledged < fresh)
            elif choice == 3 and rng.random() < 0.3:
                ctx.set(dut.back, 1)
                await ctx.tick()
                ctx.set(dut.back, 0)
                await ctx.tick().repeat(FrameStore.SETTLE)
                upcoming = acknowledged
            else:
                await ctx.tick()

    simulate(opened, take, background=[feed])
