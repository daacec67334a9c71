from collections import deque
from typing import Any, NamedTuple

import numpy as np
import pytest
from amaranth.hdl import Cat, Value
from amaranth.sim import Simulator

from hw.link.axi4 import AxiMemory, channel
from tests.hw.streams import STALLS

BITS = 20
SLVERR, DECERR = 2, 3
PAGE = 4096


class Read(NamedTuple):
    """A burst on its way: addresses of its beats that are left, and when the first may come."""

    addresses: deque[int]
    due: int


class Bench:
    """An :class:`AxiMemory` between its user and a memory, a cycle at a time; every rule of the bus is checked.

    Parameters
    ----------
    p_bus, p_user
        Chances of no stall in a cycle, of each channel and of each stream.
    latency
        Cycles from a burst's address to its first beat; bursts overlap.
    gap
        Cycles from a burst's last beat to the next one's first, at least.
    write_order
        "any"; "address": data is taken after its address only; "data": an address is taken once its data is offered.
    bad
        Addresses that answer with the error given for them.
    """

    def __init__(
        self,
        dut: AxiMemory,
        rng: np.random.Generator,
        *,
        p_bus: float = 1.0,
        p_user: float = 1.0,
        latency: int = 0,
        gap: int = 0,
        write_order: str = "any",
        bad: dict[int, int] | None = None,
    ) -> None:
        self.dut, self.rng, self.p_bus, self.p_user = dut, rng, p_bus, p_user
        self.latency, self.gap, self.write_order, self.bad = latency, gap, write_order, bad or {}
        self.memory = bytearray(rng.bytes(1 << dut.memory_bits))
        self.cycle = 0
        self.reads: deque[tuple[int, int]] = deque()
        self.writes: deque[tuple[int, bytes, int]] = deque()
        self.got: list[tuple[bytes, int]] = []
        self.bursts: list[tuple[str, int, int]] = []
        self.unconfirmed = 0  # words taken that the memory has not confirmed
        self.asked: list[int] = []  # cycles in which reads were taken
        self._waiting: dict[str, Any] = {}
        self._offered: set[str] = set()
        self._on_their_way: deque[Read] = deque()
        self._free_at = 0
        self._addresses: deque[deque[int]] = deque()  # of writes: those of beats to come
        self._words: deque[tuple[bytes, int]] = deque()  # data that came before its address
        self._answers: deque[tuple[int, int]] = deque()
        self._ports: dict[int, int] = {}
        self._channels = {name: channel(dut, name) for name in ("ar", "r", "aw", "w", "b")}
        self._beat = Value.cast(dut.o_read.payload)
        valid = (self._channels[name].valid for name in ("ar", "aw", "w"))
        ready = (self._channels[name].ready for name in ("r", "b"))
        self._flags = Cat(dut.o_read.valid, dut.i_read.ready, dut.i_write.ready, dut.write_busy, *valid, *ready)

    def store(self, address: int, data: bytes) -> None:
        """Queue a write of whole words."""
        starts = range(0, len(data), 16)
        self.writes.extend((address + low, data[low : low + 16], low == starts[-1]) for low in starts)

    @property
    def quiet(self) -> bool:
        """Nothing is on its way over the bus."""
        return not (self._on_their_way or self._addresses or self._words or self._answers)

    def _stays(self, name: str, valid: bool, ready: bool, payload) -> bool:
        """Whether a transfer happens; fails if what waited has changed."""
        if name in self._waiting:
            assert valid, f"{name} withdrew what waited"
            assert self._waiting.pop(name) == payload, f"{name} changed what waited"
        if valid and not ready:
            self._waiting[name] = payload
        return valid and ready

    def _set(self, ctx, port, value: int) -> None:
        """Setting a port takes the simulator longer than knowing that it need not."""
        if self._ports.get(id(port)) != value:
            self._ports[id(port)] = value
            ctx.set(port, value)

    def _offer(self, ctx, name: str, queue, p: float, valid, payload) -> None:
        """Offer the queue's first item, held until it is taken; ``payload`` sets what it says."""
        if name not in self._offered and queue and self.rng.random() < p:
            self._offered.add(name)
            payload(queue[0])
        self._set(ctx, valid, name in self._offered)

    async def step(self, ctx, *, flush: int = 0) -> None:
        """One cycle."""
        dut = self.dut
        ar, r, aw, w, b = (self._channels[name] for name in ("ar", "r", "aw", "w", "b"))

        # The user.
        self._set(ctx, dut.flush, flush)
        if flush:  # what it was about to ask is forgotten with the rest
            self._offered.discard("i_read")
            self._waiting.pop("o_read", None)
        self._offer(
            ctx, "i_read", self.reads, self.p_user, dut.i_read.valid,
            lambda read: ctx.set(dut.i_read.payload, {"address": read[0], "length": read[1]}),
        )  # fmt: skip
        self._offer(
            ctx, "i_write", self.writes, self.p_user, dut.i_write.valid,
            lambda word: ctx.set(dut.i_write.payload, {"address": word[0], "data": list(word[1]), "last": word[2]}),
        )  # fmt: skip
        takes = self.rng.random() < self.p_user
        self._set(ctx, dut.o_read.ready, takes)

        # The memory.
        def beat(address: int) -> None:
            self._set(ctx, r.data, int.from_bytes(self.memory[address : address + 16], "little"))
            self._set(ctx, r.resp, self.bad.get(address, 0))
            self._set(ctx, r.last, len(self._on_their_way[0].addresses) == 1)

        ready = self._on_their_way and self._on_their_way[0].due <= self.cycle >= self._free_at
        beats = self._on_their_way[0].addresses if ready else None
        self._offer(ctx, "r", beats, self.p_bus, r.valid, beat)
        self._offer(ctx, "b", self._answers, self.p_bus, b.valid, lambda answer: self._set(ctx, b.resp, answer[0]))
        ar_ready, aw_ready, w_ready = (bool(luck) for luck in self.rng.random(3) < self.p_bus)
        aw_ready &= self.write_order != "data" or bool(ctx.get(w.valid) or self._words)
        w_ready &= self.write_order != "address" or bool(self._addresses)
        for port, value in ((ar.ready, ar_ready), (aw.ready, aw_ready), (w.ready, w_ready)):
            self._set(ctx, port, value)

        # What happens at the end of this cycle.
        flags = ctx.get(self._flags)
        (o_valid, read_ready, write_ready, busy, ar_valid, aw_valid, w_valid, r_ready, b_ready) = (
            bool(flags >> n & 1) for n in range(len(self._flags))
        )
        assert busy or not self.unconfirmed, "not busy with a word unconfirmed"
        if not flush:
            bits = ctx.get(self._beat) if o_valid else 0
            if self._stays("o_read", o_valid, takes, bits):
                self.got.append(((bits & ((1 << 128) - 1)).to_bytes(16, "little"), bits >> 128))
        if "i_read" in self._offered and read_ready and not flush:
            self.reads.popleft()
            self._offered.discard("i_read")
            self.asked.append(self.cycle)
        if "i_write" in self._offered and write_ready:
            assert not flush
            self.writes.popleft()
            self._offered.discard("i_write")
            self.unconfirmed += 1
        for name, port, valid, taken in (("ar", ar, ar_valid, ar_ready), ("aw", aw, aw_valid, aw_ready)):
            said = tuple(ctx.get(getattr(port, field)) for field in ("addr", "len", "size", "burst", "id")) * valid
            if self._stays(name, valid, taken, said):
                self._begin(name, *said)
        if "r" in self._offered:
            assert r_ready, "a beat that was asked for has to wait"
            self._offered.discard("r")
            self._on_their_way[0].addresses.popleft()
            if not self._on_their_way[0].addresses:
                self._on_their_way.popleft()
                self._free_at = self.cycle + 1 + self.gap
        said = (ctx.get(w.data).to_bytes(16, "little"), ctx.get(w.last), ctx.get(w.strb)) if w_valid else None
        if self._stays("w", w_valid, w_ready, said) and said:
            assert said[2] == 0xFFFF
            self._words.append(said[:2])
        if "b" in self._offered and b_ready:
            self.unconfirmed -= self._answers.popleft()[1]
            self._offered.discard("b")
        while self._addresses and len(self._words) >= len(self._addresses[0]):
            self._write(self._addresses.popleft())
        await ctx.tick()
        self.cycle += 1

    def _begin(self, name: str, address: int, more: int, size: int, burst: int, identifier: int) -> None:
        """A burst's address has been taken."""
        end = address + 16 * (more + 1)
        assert (address % 16, size, burst, identifier) == (0, 4, 1, 0)
        assert more < self.dut.burst_beats
        assert address // PAGE == (end - 1) // PAGE, f"{name}: {address:#x}..{end:#x} crosses 4 KiB"
        assert end <= 1 << self.dut.memory_bits
        self.bursts.append((name, address, more + 1))
        addresses = deque(range(address, end, 16))
        if name == "aw":
            self._addresses.append(addresses)
        else:
            self._on_their_way.append(Read(addresses, self.cycle + 1 + self.latency))
            assert len(self._on_their_way) <= self.dut.outstanding

    def _write(self, addresses: deque[int]) -> None:
        """All data of a burst has come."""
        answer = 0
        for address in addresses:
            data, last = self._words.popleft()
            assert last == (address == addresses[-1]), "wlast in the wrong place"
            self.memory[address : address + 16] = data
            answer = max(answer, self.bad.get(address, 0))
        self._answers.append((answer, len(addresses)))

    async def until(self, ctx, done, *, limit: int = 20_000) -> None:
        """Steps until ``done()``; TimeoutError after ``limit``."""
        end = self.cycle + limit
        while not done():
            if self.cycle >= end:
                raise TimeoutError(f"after {limit} cycles: {len(self.got)} beats, {self.unconfirmed} words unconfirmed")
            await self.step(ctx)

    def expected(self, reads) -> list[tuple[bytes, int]]:
        """The beats that answer ``reads``."""
        beats = []
        for address, length in reads:
            end = address + length
            beats += [(bytes(self.memory[at : at + 16]), int(at + 16 == end)) for at in range(address, end, 16)]
        return beats


def run(dut: AxiMemory, process) -> None:
    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(process)
    sim.run()


def random_spans(rng, count: int, *, longest: int = 200) -> list[tuple[int, int]]:
    """(address, length) of whole words, each inside the memory; corners first."""
    end = 1 << BITS
    corners = [(0, 16), (16, 16), (PAGE - 16, 32), (PAGE - 16, 16), (PAGE + 16, 2 * PAGE), (end - 16, 16)]
    corners += [(end - PAGE - 32, PAGE + 32), (1008, 32), (1024, 1024), (1040, 1024)]
    spans = []
    for _ in range(count):
        length = 16 * int(rng.integers(1, longest + 1))
        spans.append((16 * int(rng.integers((end - length) // 16 + 1)), length))
    return corners + spans


@pytest.mark.parametrize(("p_bus", "p_user"), STALLS)
@pytest.mark.parametrize(("burst_beats", "outstanding"), [(64, 4), (256, 2), (4, 16)])
def test_reads(burst_beats, outstanding, p_bus, p_user):
    """Whatever address and length: the bytes that lie there, in order."""
    rng = np.random.default_rng(burst_beats)
    dut = AxiMemory(BITS, burst_beats=burst_beats, outstanding=outstanding)
    bench = Bench(dut, rng, p_bus=p_bus, p_user=p_user, latency=int(rng.integers(40)))
    spans = random_spans(rng, 4)

    async def process(ctx):
        bench.reads.extend(spans)
        want = bench.expected(spans)
        await bench.until(ctx, lambda: len(bench.got) == len(want))
        for _ in range(50):
            await bench.step(ctx)
        assert bench.got == want
        assert bench.quiet
        assert not ctx.get(dut.error)
        assert not bench.unconfirmed

    run(dut, process)


@pytest.mark.parametrize(
    ("burst_beats", "write_order", "p_bus", "p_user"),
    [
        *((64, "any", *stalls) for stalls in STALLS),
        *((64, order, 0.5, 0.7) for order in ("address", "data")),
        (2, "data", 1.0, 1.0),
        (256, "address", 0.7, 0.7),
    ],
)
def test_writes(burst_beats, p_bus, p_user, write_order):
    """They arrive where they belong, nothing else changes, and a read afterwards finds them."""
    rng = np.random.default_rng(burst_beats)
    dut = AxiMemory(BITS, burst_beats=burst_beats)
    bench = Bench(dut, rng, p_bus=p_bus, p_user=p_user, write_order=write_order)
    want = bytearray(bench.memory)
    spans = random_spans(rng, 3)

    async def process(ctx):
        for address, length in spans:
            data = rng.bytes(length)
            want[address : address + length] = data
            bench.store(address, data)
        await bench.until(ctx, lambda: not bench.writes and not bench.unconfirmed)
        await bench.step(ctx)
        assert not ctx.get(dut.write_busy)
        assert bench.memory == want
        assert bench.quiet
        assert not ctx.get(dut.error)
        bench.reads.extend(spans)
        beats = bench.expected(spans)
        await bench.until(ctx, lambda: len(bench.got) == len(beats))
        assert bench.got == beats

    run(dut, process)


def test_bursts_are_long():
    """Only the first and the last of a read or write are shorter than they may be."""
    rng = np.random.default_rng(0)
    dut = AxiMemory(BITS)
    bench = Bench(dut, rng)
    address, length = 3 * PAGE + 48, 1024 * 5 + 160

    async def process(ctx):
        bench.store(address, rng.bytes(length))
        await bench.until(ctx, lambda: not bench.writes and not bench.unconfirmed)
        bench.reads.append((address, length))
        await bench.until(ctx, lambda: len(bench.got) == length // 16)
        for name in ("aw", "ar"):
            lengths = [beats for channel, _, beats in bench.bursts if channel == name]
            assert lengths == [61, 64, 64, 64, 64, 13]

    run(dut, process)


@pytest.mark.parametrize("answer", [SLVERR, DECERR, 1])
@pytest.mark.parametrize("beat", [0, 70, 199])
def test_bad_read(beat, answer):
    """An answer other than OKAY shows no later than its beat and stays until ``flush``."""
    rng = np.random.default_rng(beat)
    dut = AxiMemory(BITS)
    bench = Bench(dut, rng, latency=20, bad={16 * beat: answer})

    async def process(ctx):
        bench.reads.append((0, 3200))
        while len(bench.got) < 200:
            before = len(bench.got)
            error = ctx.get(dut.error)
            await bench.step(ctx)
            assert error or not before <= beat < len(bench.got)
            assert bench.cycle < 1000
        bench.bad = {}
        for _ in range(20):
            await bench.step(ctx)
        assert ctx.get(dut.error)
        await bench.step(ctx, flush=1)
        assert not ctx.get(dut.error)
        bench.reads.append((0, 3200))
        await bench.until(ctx, lambda: len(bench.got) == 400)
        assert not ctx.get(dut.error)

    run(dut, process)


@pytest.mark.parametrize("answer", [SLVERR, DECERR])
def test_bad_write(answer):
    """Shows when ``write_busy`` falls, and stays until ``flush``."""
    dut = AxiMemory(BITS)
    bench = Bench(dut, np.random.default_rng(answer), bad={160: answer}, p_bus=0.5)

    async def process(ctx):
        bench.store(0, bytes(3200))
        await bench.step(ctx)
        await bench.until(ctx, lambda: not bench.writes and not ctx.get(dut.write_busy))
        assert ctx.get(dut.error)
        bench.bad = {}
        await bench.step(ctx, flush=1)
        assert not ctx.get(dut.error)

    run(dut, process)


@pytest.mark.parametrize("seed", range(4))
def test_flush(seed):
    """Wherever it comes, no beat of a read before it comes after it, and the bus comes to rest by itself.

    Errors of what is dropped are nobody's concern.
    """
    rng = np.random.default_rng(seed)
    dut = AxiMemory(BITS, burst_beats=(64, 8)[seed % 2])
    p = (1.0, 0.5)[seed // 2]
    bench = Bench(dut, rng, p_bus=p, p_user=p, latency=20)

    async def process(ctx):
        for _ in range(15):
            bench.bad = dict.fromkeys(range(1 << 17, 1 << BITS, 16), SLVERR)
            bench.reads.extend(
                (16 * int(rng.integers(1 << 13, 1 << 15)), 16 * int(rng.integers(1, 200))) for _ in range(3)
            )
            for _ in range(int(rng.integers(150))):
                await bench.step(ctx)
            bench.reads.clear()
            for _ in range(int(rng.integers(1, 4))):
                await bench.step(ctx, flush=1)
            bench.got.clear()
            spans = [(16 * int(rng.integers(1 << 12)), 16 * int(rng.integers(1, 100))) for _ in range(2)]
            bench.reads.extend(spans)
            want = bench.expected(spans)
            await bench.until(ctx, lambda: len(bench.got) >= len(want))  # noqa: B023 called at once
            assert bench.got == want
            assert not ctx.get(dut.error)
            assert bench.quiet
            bench.got.clear()

    run(dut, process)


@pytest.mark.parametrize("seed", range(3))
def test_flush_while_writing(seed):
    """A write that stops in the middle is written as far as it came; the next one is right."""
    rng = np.random.default_rng(seed)
    dut = AxiMemory(BITS)
    bench = Bench(dut, rng, p_bus=(1.0, 0.5, 0.1)[seed])
    want = bytearray(bench.memory)

    async def process(ctx):
        for _ in range(10):
            address, data = 16 * int(rng.integers(1 << 15)), rng.bytes(16 * int(rng.integers(2, 200)))
            bench.store(address, data)
            kept = int(rng.integers(1, len(data) // 16))
            await bench.until(ctx, lambda: len(bench.writes) <= len(data) // 16 - kept)  # noqa: B023 called at once
            stored = len(data) // 16 - len(bench.writes)
            bench.writes.clear()
            bench._offered.discard("i_write")
            await bench.step(ctx, flush=1)
            want[address : address + 16 * stored] = data[: 16 * stored]
            await bench.until(ctx, lambda: not bench.unconfirmed)
            await bench.step(ctx)
            assert not ctx.get(dut.write_busy)
            assert bench.quiet
            assert bench.memory == want

    run(dut, process)


MATRIX_BYTES = 1024 * 512 // 256 * 210
"""Of Granite 3.1 1B-A400M."""


@pytest.mark.parametrize(
    ("latency", "gap", "part", "least"),
    [(0, 0, 1, 0.999), (30, 0, 1, 0.998), (150, 0, 8, 0.95), (30, 30, 8, 0.67)],
)
def test_efficiency(latency, gap, part, least):
    """Beats a cycle over one matrix or a part of it, from the request to the last beat.

    The matrix begins inside a burst. A memory whose bursts overlap hides its latency; one that pauses
    between two bursts costs what it pauses.
    """
    dut = AxiMemory(BITS)
    bench = Bench(dut, np.random.default_rng(0), latency=latency, gap=gap)
    beats = MATRIX_BYTES // 16 // part

    async def process(ctx):
        bench.reads.append((PAGE + 48, 16 * beats))
        await bench.until(ctx, lambda: len(bench.got) == beats, limit=2 * beats)
        cycles = bench.cycle - bench.asked[0]
        print(f"latency {latency}, gap {gap}: {beats} beats in {cycles} cycles, {beats / cycles:.4f}")
        assert beats / cycles >= least

    run(dut, process)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"memory_bits": 19}, r"memory_bits must be in 20\.\.40, not 19"),
        ({"memory_bits": 41}, r"memory_bits must be in 20\.\.40, not 41"),
        ({"memory_bits": 30, "burst_beats": 512}, r"burst_beats must be a power of two in 2\.\.256, not 512"),
        ({"memory_bits": 30, "burst_beats": 48}, r"burst_beats must be a power of two in 2\.\.256, not 48"),
        ({"memory_bits": 30, "outstanding": 1}, r"outstanding must be in 2\.\.16, not 1"),
        ({"memory_bits": 30, "outstanding": 17}, r"outstanding must be in 2\.\.16, not 17"),
    ],
)
def test_rejected_parameters(arguments, text):
    with pytest.raises(ValueError, match=text):
        AxiMemory(**arguments)
