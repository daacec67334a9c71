"""The engine and its board's memory under cocotb: experts there and with the host, pauses on every AXI channel."""

import itertools
import random
import struct
from collections.abc import Sequence

import cocotb
import numpy as np
from cocotb.queue import Queue
from cocotb.triggers import ClockCycles, RisingEdge, with_timeout
from cocotbext.axi import AxiBus, AxiRamRead, AxiRamWrite

from hw.formats import messages
from hw.formats.messages import MAX_OUTSTANDING, Counter, Error, Layer, Message, Mode
from sim.bench.engine import PARAMS, Host
from sim.engine_sim import start_messages
from sim.golden import activations
from sim.golden import layer as golden
from sim.golden.layer import Route
from sim.verilator import CLOCK_NS
from sim.workload import random_blocks

EXPERTS = 4
SIZE = 256 * 210
EXPERT_BYTES = 3 * SIZE
BASES = tuple(n * (EXPERT_BYTES + 4096) + 16 * odd for n, odd in enumerate((1, 77, 255, 128)))
"""Of the experts in the memory: each begins at another place within a burst and within 4 KiB."""
OFFSETS = (0, EXPERTS * SIZE, 2 * EXPERTS * SIZE)
MESSAGE_CYCLES = 100_000
STORE_BYTES = 30_000 // 16 * 16


class Link(Host):
    """The host's end, of which a new connection starts anew."""

    async def _send(self) -> None:
        self._sender = cocotb.start_soon(super()._send())

    async def connect_again(self) -> None:
        """Break off what is being sent, reset the engine as the link does, and forget what it was saying."""
        dut = self.dut
        self._sender.cancel()
        self.to_send = Queue()
        dut.i__valid.value = 0
        dut.link_reset.value = 1
        await RisingEdge(dut.clk)
        dut.link_reset.value = 0
        await RisingEdge(dut.clk)
        self._message = b""
        await self._send()


class MemoryRead(AxiRamRead):
    """Answers with an error at address ``bad``."""

    bad: int | None = None

    async def _read(self, address, length):
        if address == self.bad:
            raise OSError("there is no such memory")
        return await super()._read(address, length)


class MemoryWrite(AxiRamWrite):
    """The same for writes."""

    bad: int | None = None

    async def _write(self, address, data):
        if self.bad is not None and address <= self.bad < address + len(data):
            raise OSError("there is no such memory")
        await super()._write(address, data)


class Board:
    """The engine, its host and its memory, whose channels pause with chance ``pause`` in each cycle."""

    def __init__(self, dut, *, pause: float = 0.0, stall: float = 0.0) -> None:
        self.dut, self.pause = dut, pause
        self.rng = np.random.default_rng(cocotb.RANDOM_SEED)
        self.host = Link(dut, 1 - stall)
        self.blob = random_blocks(self.rng, 3 * EXPERTS * 256, d=3e-5).reshape(-1)
        self.homes: list[int | None] = []

    async def start(self) -> None:
        """Everything as after power-up."""
        self.dut.link_reset.value = 0
        bus, clock = AxiBus.from_prefix(self.dut, "m_axi"), (self.dut.clk, self.dut.rst)
        self.ram = write = MemoryWrite(bus.write, *clock, size=1 << PARAMS.memory_bits)
        self.ram_read = read = MemoryRead(bus.read, *clock, size=write.size, mem=write.mem)
        for channel in (write.aw_channel, write.w_channel, write.b_channel, read.ar_channel, read.r_channel):
            if self.pause:
                channel.set_pause_generator(random.random() < self.pause for _ in itertools.count())
        await self.host.start()
        await self.greeted()

    async def message(self) -> bytes:
        """The engine's next message."""
        return await with_timeout(self.host.received.get(), MESSAGE_CYCLES * CLOCK_NS, "ns")

    async def greeted(self) -> None:
        """Wait for ``HELLO``; what comes before belongs to the past."""
        while (await self.message()) != messages.hello(PARAMS):
            pass
        while not self.host.requests.empty():
            self.host.requests.get_nowait()

    async def reset(self) -> None:
        """By the message."""
        self.host.to_send.put_nowait(messages.bare(Message.RESET))
        await self.greeted()

    def read(self, offset: int, length: int):
        """Of the model file."""
        return self.blob[offset:][:length]

    def expert(self, expert: int) -> bytes:
        """Its matrices, as they lie in the memory."""
        return b"".join(self.read(offset + expert * SIZE, SIZE).tobytes() for offset in OFFSETS)

    def store(self, expert: int) -> None:
        """Have an expert stored, in several messages."""
        data = self.expert(expert)
        for low in range(0, len(data), STORE_BYTES):
            self.host.to_send.put_nowait(messages.store(BASES[expert] + low, data[low : low + STORE_BYTES]))

    def fill(self) -> None:
        """All experts in the memory, without the engine."""
        for expert, base in enumerate(BASES):
            self.ram.write(base, self.expert(expert))

    def begin(self, homes: Sequence[bool], wanted: Sequence[int], mode: Mode, outstanding: int) -> None:
        """Send what starts a layer in which experts lie in the memory where ``homes`` says so."""
        self.layer = Layer(256, 256, EXPERTS, OFFSETS, mode, outstanding)
        self.x = activations.quantize(self.rng.standard_t(2.5, (PARAMS.max_batch, 256)))
        self.homes = [base if here else None for base, here in zip(BASES, homes, strict=True)]
        self.routes = [Route(n % PARAMS.max_batch, e, int(self.rng.integers(65537))) for n, e in enumerate(wanted)]
        first, *others = start_messages(self.layer, self.x, self.routes)
        for message in (first, messages.homes(self.homes), *others):
            self.host.to_send.put_nowait(message)

    async def serve(self) -> None:
        """Answer the requests to the host, which must be those for the experts that lie there."""
        here = [home is None for home in self.homes]
        for offset, length in golden.requests(self.layer, self.routes):
            if here[offset // SIZE % EXPERTS]:
                assert await self.host.requests.get() == (offset, length)
                self.host.to_send.put_nowait(messages.weights(self.read(offset, length).tobytes()))

    async def finish(self) -> None:
        """Serve a layer that began; its outputs and counters must be right."""
        serving = cocotb.start_soon(self.serve())
        for token in range(PARAMS.max_batch):
            message = await with_timeout(self.host.received.get(), 10 * MESSAGE_CYCLES * CLOCK_NS, "ns")
            assert struct.unpack_from("<BBH", message) == (Message.OUTPUT, token, 256), message[:16]
            y, errors = self.golden()
            assert errors == 0
            np.testing.assert_array_equal(np.frombuffer(message, "<i8", offset=messages.HEADER_BYTES), y[token])
        assert (await self.message())[0] == Message.DONE
        await serving
        assert self.host.requests.empty()
        self.host.to_send.put_nowait(messages.bare(Message.READ_COUNTERS))
        message = await self.message()
        counts = np.frombuffer(message, "<u8", message[1], messages.HEADER_BYTES)
        requests = golden.requests(self.layer, self.routes)
        stored = sum(self.homes[offset // SIZE % EXPERTS] is not None for offset, _ in requests)
        assert counts[Counter.REQUESTS] == len(requests)
        assert counts[Counter.REQUESTED_BYTES] == len(requests) * SIZE
        assert counts[Counter.MOVED_BYTES] == (len(requests) - stored) * SIZE
        assert counts[Counter.MEMORY_BYTES] == stored * SIZE
        assert counts[Counter.USEFUL_BYTES] + counts[Counter.DRAINED_BYTES] == len(requests) * SIZE
        if not stored:
            assert counts[Counter.MEMORY_IDLE] == 0
        if stored == len(requests) and not self.pause:  # the bus of 16 bytes outruns the multipliers
            assert counts[Counter.CYCLES] <= 16.5 * 256 * len(requests) + 3000
        self.dut._log.info(
            "%d of %d matrices from memory: %d cycles, starved %d, memory idle %d, link idle %d", stored, len(requests),
            *(counts[c] for c in (Counter.CYCLES, Counter.STARVED, Counter.MEMORY_IDLE, Counter.LINK_IDLE)),
        )  # fmt: skip

    def golden(self) -> tuple[np.ndarray, int]:
        """Outputs and errors that the layer should have."""
        return golden.run(self.layer, self.read, self.x, self.routes)

    async def run(
        self, homes: Sequence[bool], wanted: Sequence[int], *, mode: Mode = Mode.SELECTED, outstanding: int = 2
    ) -> None:
        """A whole layer."""
        self.begin(homes, wanted, mode, outstanding)
        await self.finish()

    async def refused(self, error: Error) -> None:
        """The next message tells this error."""
        message = await self.message()
        assert message[:2] == bytes([Message.ERROR, error]), message[:16]


HALVES = [tuple(n in here for n in range(EXPERTS)) for here in itertools.combinations(range(EXPERTS), 2)]


@cocotb.test(timeout_time=20, timeout_unit="ms")
@cocotb.parametrize(pause=[0.0, 0.4])
async def stored_then_run(dut, pause):
    """Experts come over the link into the memory; then half of all are read there, in every order of the two homes
    (in two of them with pauses)."""
    board = Board(dut, pause=pause)
    await board.start()
    for expert in range(EXPERTS):
        board.store(expert)
    for number, homes in enumerate(HALVES[:: 3 if pause else 1]):
        await board.run(homes, range(EXPERTS), outstanding=(2, 1, MAX_OUTSTANDING)[number % 3])
        for expert, base in enumerate(BASES):
            assert board.ram.read(base, EXPERT_BYTES) == board.expert(expert)


@cocotb.test(timeout_time=20, timeout_unit="ms")
@cocotb.parametrize(pause=[0.0, 0.5], stall=[0.3])
async def tape_and_selected(dut, pause, stall):
    """All at one place, some, none; unwanted ones are drained from either."""
    board = Board(dut, pause=pause, stall=stall)
    await board.start()
    board.fill()
    await board.run([True] * 4, [0, 3])
    await board.run([False, True, True, False], [1, 3], mode=Mode.TAPE, outstanding=MAX_OUTSTANDING)
    await board.run([False] * 4, [2])
    await board.run([True, False, True, True], [], outstanding=1)


@cocotb.test(timeout_time=20, timeout_unit="ms")
@cocotb.parametrize(pause=[0.0, 0.3])
async def bad_answers(dut, pause):
    """An error of the memory is told, and no output; after a reset the next layer is right."""
    board = Board(dut, pause=pause)
    await board.start()
    board.fill()
    for bad in (BASES[1], BASES[3] + EXPERT_BYTES - 16):  # the first word of all, and the last
        board.ram_read.bad = bad
        board.begin([False, True, False, True], [1, 3], Mode.SELECTED, 2)
        await board.refused(Error.MEMORY)
        board.ram_read.bad = None
        await board.reset()
        await board.run([False, True, False, True], [1])
    board.ram.bad = BASES[2] + 1600
    board.host.to_send.put_nowait(messages.store(BASES[2], board.expert(2)[:3200]))
    board.begin([False] * 4, [0], Mode.SELECTED, 2)  # no longer starts
    await board.refused(Error.MEMORY)
    board.ram.bad = None
    await board.reset()
    await board.run([False, True, False, False], [1])
    # A home that passes the memory's end.
    board.begin([True] * 4, [0], Mode.SELECTED, 2)
    board.host.to_send.put_nowait(messages.weights(bytes(16)))  # and an answer that nobody asked for
    await board.refused(Error.MESSAGE)
    await board.reset()
    board.layer = Layer(256, 256, EXPERTS, OFFSETS)
    for message in (
        messages.config(board.layer),
        messages.homes([(1 << PARAMS.memory_bits) - SIZE - 16]),
        messages.routes(1, [(0, 0, 1)]),
    ):
        board.host.to_send.put_nowait(message)
    await board.refused(Error.MEMORY)
    await board.reset()
    await board.run([False, False, False, True], [3])


@cocotb.test(timeout_time=20, timeout_unit="ms")
@cocotb.parametrize(pause=[0.0, 0.4], link=[False, True])
async def reset_in_the_middle(dut, pause, link):
    """Of bursts, by the message or by a new connection: the next layer is right and the bus at rest."""
    board = Board(dut, pause=pause)
    await board.start()
    board.fill()
    for after in (1200, 1700, 9000):
        board.begin([True, False, True, True], [0, 2], Mode.SELECTED, MAX_OUTSTANDING)
        await ClockCycles(dut.clk, after + random.randrange(40))
        if link:
            await board.host.connect_again()
            await board.greeted()
        else:
            await board.reset()
        await board.run([True] * 4, [after % EXPERTS])


@cocotb.test(timeout_time=20, timeout_unit="ms")
@cocotb.parametrize(pause=[0.0, 0.4])
async def a_store_that_breaks_off(dut, pause):
    """By a new connection: the store that follows and what it stores are right."""
    board = Board(dut, pause=pause)
    await board.start()
    for after in (30, 100, 177):
        board.store(1)
        await ClockCycles(dut.clk, after)
        await board.host.connect_again()
        await board.greeted()
        board.store(1)
        await board.run([False, True, False, False], [1])
        assert board.ram.read(BASES[1], EXPERT_BYTES) == board.expert(1)
