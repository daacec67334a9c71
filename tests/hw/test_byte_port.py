import numpy as np
import pytest
from amaranth.sim import Simulator

from hw.byte_port import BytePort, Channel, struct_bytes
from hw.decode import ERROR_LENGTH
from hw.formats.params import Params
from hw.layouts import activation_word, matrix_command, row_sum
from sim.golden import activations, matmul
from sim.workload import random_blocks

from .blocks import heavy_tailed, load_words


def as_bytes(layout, payload: dict) -> bytes:
    return layout.const(payload).as_value().value.to_bytes(struct_bytes(layout), "little")


def load_bytes(params: Params, x: activations.Activations) -> list[tuple[Channel, int]]:
    words = b"".join(as_bytes(activation_word(params), word) for word in load_words(x))
    return [(Channel.ACTIVATION, byte) for byte in words]


def matrix_bytes(params: Params, blocks: np.ndarray, mask: int) -> list[tuple[Channel, int]]:
    rows, columns = blocks.shape[:2]
    command = as_bytes(matrix_command(params), {"rows": rows, "columns": columns, "mask": mask})
    weights = [(Channel.WEIGHTS, byte) for byte in blocks.tobytes()]
    weights[-1] = (Channel.WEIGHTS_LAST, weights[-1][1])
    return [(Channel.MATRIX, byte) for byte in command] + weights


def exchange(dut: BytePort, send, count: int, *, rng, slow: int, limit: int = 150_000) -> tuple[bytes, int]:
    """Send (channel, byte) pairs and take ``count`` bytes, each side waiting up to ``slow`` cycles at every step."""
    got = bytearray()
    errors = []
    sent = 0
    send_rng, take_rng = rng.spawn(2)

    async def pause(ctx, source):
        if slow:
            await ctx.tick().repeat(int(source.integers(slow)) + 1)

    async def sender(ctx):
        nonlocal sent
        for channel, byte in send:
            ctx.set(dut.i_data, byte)
            ctx.set(dut.i_channel, channel)
            await pause(ctx, send_rng)
            ctx.set(dut.i_strobe, 1)
            await ctx.tick().until(dut.i_ack)
            await pause(ctx, send_rng)
            ctx.set(dut.i_strobe, 0)
            ctx.set(dut.i_data, int(send_rng.integers(256)))  # nothing may look at it any more
            ctx.set(dut.i_channel, int(send_rng.integers(4)))
            await ctx.tick().until(~dut.i_ack)
            sent += 1

    async def taker(ctx):
        before = None
        while len(got) < count:
            strobe, byte = ctx.get(dut.o_strobe), ctx.get(dut.o_data)
            if not strobe:
                before = byte
                await ctx.tick()
                continue
            assert byte == before, "data changed together with its strobe"
            await pause(ctx, take_rng)
            assert ctx.get(dut.o_data) == byte, "data changed under its strobe"
            got.append(byte)
            ctx.set(dut.o_ack, 1)
            await ctx.tick().until(~dut.o_strobe)
            await pause(ctx, take_rng)
            ctx.set(dut.o_ack, 0)
        while sent < len(send):
            await ctx.tick()
        await ctx.tick().repeat(40)
        assert not ctx.get(dut.o_strobe)
        errors.append(ctx.get(dut.error))

    async def watch(ctx):
        for _ in range(limit):
            await ctx.tick()
        raise TimeoutError(f"{len(got)} of {count} bytes after {limit} cycles")

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(sender)
    sim.add_testbench(taker)
    sim.add_testbench(watch, background=True)
    sim.run()
    return bytes(got), errors[0]


@pytest.mark.parametrize(("link_bytes", "slow"), [(16, 0), (16, 5), (1, 2)])
def test_byte_port(link_bytes, slow):
    """Vectors, two matrices with other masks and one drained between them: the golden sums, byte for byte."""
    rng = np.random.default_rng(slow)
    params = Params(link_bytes=link_bytes, max_batch=2, max_width=256)
    x = activations.quantize(heavy_tailed(rng, 2, 256))
    matrices = [(random_blocks(rng, 2, 1), 0b11), (random_blocks(rng, 1, 1), 0), (random_blocks(rng, 1, 1), 0b10)]
    send = load_bytes(params, x) + [item for blocks, mask in matrices for item in matrix_bytes(params, blocks, mask)]
    want = []
    for blocks, mask in matrices:
        columns = blocks.shape[1]
        sums = matmul.matmul(blocks, activations.Activations(x.mantissas[:, :columns], x.exponents[:, :columns]))
        for row in range(blocks.shape[0]):
            for token in (t for t in range(2) if mask >> t & 1):
                error = int(sums.errors[token, row])
                want.append({"value": int(sums.values[token, row]), "token": token, "error": error})
    want_bytes = b"".join(as_bytes(row_sum(params), row) for row in want)
    got, error = exchange(BytePort(params), send, len(want_bytes), rng=rng, slow=slow)
    assert got == want_bytes
    assert error == 0


def test_byte_port_tells_errors():
    """A run that ends a block early is reported at the port."""
    rng = np.random.default_rng(0)
    params = Params(max_batch=1, max_width=256)
    send = matrix_bytes(params, random_blocks(rng, 2, 1), 0)
    send = [*send[:-211], (Channel.WEIGHTS_LAST, send[-211][1])]
    _, error = exchange(BytePort(params), send, 0, rng=rng, slow=0)
    assert error == ERROR_LENGTH
