import struct

import numpy as np
import pytest
from amaranth.sim import Simulator

from hw.byte_port import BytePort, Channel
from hw.formats import messages
from hw.formats.messages import Counter, Error, Layer, Message
from hw.formats.params import Params

LAYER = Layer(256, 256, 4, (0x123456789ABC, 1 << 20, 2 << 20), outstanding=1)


def exchange(dut: BytePort, script, *, rng, slow: int, limit: int = 300_000) -> list[tuple[str, bytes]]:
    """Send messages and take what comes, each side waiting up to ``slow`` cycles at every step.

    ``script`` is a list of what to send and of how many messages and requests must have come before the next item.
    """
    came: list[tuple[str, bytes]] = []
    send_rng, take_rng = rng.spawn(2)
    done = False

    async def pause(ctx, source):
        if slow:
            await ctx.tick().repeat(int(source.integers(slow)) + 1)

    async def sender(ctx):
        nonlocal done
        for item in script:
            if isinstance(item, int):
                while len(came) < item:
                    await ctx.tick()
                continue
            for place, byte in enumerate(item):
                ctx.set(dut.i_data, byte)
                ctx.set(dut.i_last, place == len(item) - 1)
                await pause(ctx, send_rng)
                ctx.set(dut.i_strobe, 1)
                await ctx.tick().until(dut.i_ack)
                await pause(ctx, send_rng)
                ctx.set(dut.i_strobe, 0)
                ctx.set(dut.i_data, int(send_rng.integers(256)))  # nothing may look at it any more
                ctx.set(dut.i_last, int(send_rng.integers(2)))
                await ctx.tick().until(~dut.i_ack)
        done = True

    async def taker(ctx):
        before = None
        parts = {Channel.REQUEST: b"", Channel.MESSAGE: b""}
        while not done:
            strobe, byte, channel = ctx.get(dut.o_strobe), ctx.get(dut.o_data), ctx.get(dut.o_channel)
            if not strobe:
                before = byte, channel
                await ctx.tick()
                continue
            assert (byte, channel) == before, "data changed together with its strobe"
            await pause(ctx, take_rng)
            assert (ctx.get(dut.o_data), ctx.get(dut.o_channel)) == before, "data changed under its strobe"
            kind = Channel.REQUEST if channel == Channel.REQUEST else Channel.MESSAGE
            parts[kind] += bytes([byte])
            if channel == Channel.MESSAGE_LAST or (kind == Channel.REQUEST and len(parts[kind]) == 10):
                came.append((kind.name, parts[kind]))
                parts[kind] = b""
            ctx.set(dut.o_ack, 1)
            await ctx.tick().until(~dut.o_strobe)
            await pause(ctx, take_rng)
            ctx.set(dut.o_ack, 0)

    async def watch(ctx):
        for _ in range(limit):
            await ctx.tick()
        raise TimeoutError(f"{came} after {limit} cycles")

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(sender)
    sim.add_testbench(taker)
    sim.add_testbench(watch, background=True)
    sim.run()
    return came


def padded(header: bytes, link_bytes: int) -> bytes:
    return header.ljust(-(-16 // link_bytes) * link_bytes, b"\0")


@pytest.mark.parametrize(("link_bytes", "slow"), [(16, 0), (16, 4), (4, 2)])
def test_byte_port(link_bytes, slow):
    """A layer that nobody wants anything of, its counters, a request, a short answer to it, and a new start."""
    rng = np.random.default_rng(slow)
    params = Params(link_bytes=link_bytes, max_batch=2, max_width=256, max_expert_width=256, max_experts=4)
    vector = messages.load_x(0, 0, -3, rng.integers(-9, 9, 256, np.int16).tobytes())
    script = [1, messages.config(LAYER), vector, messages.routes(1, []), 3, messages.bare(Message.READ_COUNTERS), 4]
    script += [messages.routes(1, [(0, 2, 65536)]), 5, messages.weights(bytes(16)), 7, messages.bare(Message.RESET), 8]
    came = exchange(BytePort(params), script, rng=rng, slow=slow)
    hello = struct.pack("<7BHHBI", Message.HELLO, messages.VERSION, link_bytes, 1, 2, 1, 1, 4, 256, 0, 0)
    hello = ("MESSAGE", padded(hello, link_bytes))
    size = 256 * 210
    counters = came[3][1]
    assert came[0] == hello
    assert came[1] == ("MESSAGE", padded(struct.pack("<BBH", Message.OUTPUT, 0, 256), link_bytes) + bytes(8 * 256))
    assert came[2] == ("MESSAGE", padded(bytes([Message.DONE]), link_bytes))
    assert counters[:2] == bytes([Message.COUNTERS, len(Counter)])
    values = np.frombuffer(counters, "<u8", offset=16)
    assert values[: Counter.CYCLES].sum() == values[Counter.CYCLES] > 0
    assert values[Counter.REQUESTS] == 0
    # The second is asked for as soon as the first has been answered, however short.
    for request, start in zip(came[4:6], LAYER.offsets[:2], strict=True):
        assert request == ("REQUEST", (start + 2 * size).to_bytes(6, "little") + size.to_bytes(4, "little"))
    assert came[6] == ("MESSAGE", padded(bytes([Message.ERROR, Error.LENGTH]), link_bytes))
    assert came[7:] == [hello]
