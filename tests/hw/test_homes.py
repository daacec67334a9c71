import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from amaranth.sim import Simulator

from hw.formats.messages import MAX_OUTSTANDING
from hw.formats.params import Params
from hw.homes import Homes
from hw.layouts import Kind

from .streams import STALLS

PARAMS = Params(max_experts=6, memory_bits=20)
END = 1 << PARAMS.memory_bits
ODDEST = (1 << 48) - 210


class Layer(NamedTuple):
    """What ``HOMES`` tells (an address in the memory or None, by expert), and the experts and lengths that pass."""

    homes: Sequence[int | None]
    experts: list[int]
    lengths: tuple[int, int, int] = (32, 16, 48)


class Request(NamedTuple):
    expert: int
    kind: Kind
    offset: int
    length: int
    address: int | None  # in the memory


def requests_of(layer: Layer, rng) -> list[Request]:
    requests = []
    for expert in layer.experts:
        address = layer.homes[expert] if expert < len(layer.homes) else None
        for kind in Kind:
            length = layer.lengths[kind.value]
            requests.append(Request(expert, kind, int(rng.integers(ODDEST)), length, address))
            address = None if address is None else address + length
    return requests


def answer(place: str, start: int, length: int) -> list[tuple[bytes, int]]:
    """The beats that come from there."""
    starts = range(start, start + length, 16)
    return [((f"{place}{low:015x}").encode(), int(low == starts[-1])) for low in starts]


class Bench:
    """:class:`Homes` between a fetch controller, a host and a memory, a cycle at a time.

    ``slow``: most cycles that host and memory, each by itself, let pass before the next answer.
    """

    def __init__(self, dut: Homes, rng, *, p_in: float = 1.0, p_out: float = 1.0, slow: int = 0) -> None:
        self.dut, self.rng, self.p_in, self.p_out, self.slow = dut, rng, p_in, p_out, slow
        self.host: deque[tuple[bytes, int]] = deque()
        self.memory: deque[tuple[bytes, int]] = deque()
        self.asked: list[tuple] = []
        self.got: list[tuple[bytes, int]] = []
        self.unanswered: deque[str] = deque()
        self.errors = 0
        self._due = {"host": 0, "memory": 0}
        self.cycle = 0

    async def tell(self, ctx, homes: Sequence[int | None]) -> None:
        """As a ``HOMES`` message does."""
        ctx.set(self.dut.forget, 1)
        await ctx.tick()
        ctx.set(self.dut.forget, 0)
        for expert, address in enumerate(homes):
            ctx.set(
                self.dut.i_home.payload, {"expert": expert, "word": (address or 0) // 16, "here": address is not None}
            )
            ctx.set(self.dut.i_home.valid, 1)
            assert ctx.get(self.dut.i_home.ready)
            await ctx.tick()
            ctx.set(self.dut.i_home.valid, 0)
            if self.rng.random() < 0.5:
                await ctx.tick()

    async def run(self, ctx, requests: list[Request], *, until=None, limit: int = 5000) -> None:
        """Pass all requests and answers; checks what is said of them in every cycle. Appends to ``got``."""
        dut, rng = self.dut, self.rng
        left = deque(requests)
        want = sum(-(-request.length // 16) for request in requests) + len(self.got)
        offered, waited = set(), {}
        ports = {"request": dut.o_request, "read": dut.o_read, "weights": dut.o_weights}
        sources = {"host": (dut.i_weights, self.host), "memory": (dut.i_read, self.memory)}
        end = self.cycle + limit
        while not (until() if until else len(self.got) == want and not left):
            assert self.cycle < end, f"stuck after {len(self.asked)} requests and {len(self.got)} beats"
            self.cycle += 1
            if left and len(self.unanswered) < MAX_OUTSTANDING and rng.random() < self.p_in:
                offered.add("fetch")
                request = left[0]
                fields = {name: getattr(request, name) for name in ("expert", "kind", "offset", "length")}
                ctx.set(dut.i_request.payload, fields)
            ctx.set(dut.i_request.valid, "fetch" in offered)
            for name, (port, queue) in sources.items():
                if queue and self.cycle >= self._due[name] and rng.random() < self.p_in:
                    offered.add(name)
                    ctx.set(port.payload, {"data": list(queue[0][0]), "last": queue[0][1]})
                ctx.set(port.valid, name in offered)
            for port in ports.values():
                ctx.set(port.ready, rng.random() < self.p_out)

            assert ctx.get(dut.waiting) == ("host" in self.unanswered)
            self.errors += ctx.get(dut.error)
            taken = {name: name in offered and ctx.get(port.ready) for name, (port, _) in sources.items()}
            due = self.unanswered[0] if self.unanswered else None
            assert ctx.get(dut.moved) == taken["memory"]
            assert ctx.get(dut.idle) == (due == "memory" and "memory" not in offered and ctx.get(dut.o_weights.ready))
            fetched = "fetch" in offered and ctx.get(dut.i_request.ready)
            given = ctx.get(dut.o_weights.valid) and ctx.get(dut.o_weights.ready)
            ended = given and ctx.get(dut.o_weights.p.last)
            assert ctx.get(dut.answered) == ended
            assert given == any(taken.values())
            if given:
                p = ctx.get(dut.o_weights.payload)
                self.got.append((bytes(p.data), p.last))
            if ended:
                self.unanswered.popleft()
            for name, taken_now in taken.items():
                if taken_now:
                    offered.discard(name)
                    if sources[name][1].popleft()[1]:
                        self._due[name] = self.cycle + int(rng.integers(self.slow + 1))
            for name, port in ports.items():
                if name == "weights":
                    continue
                p = ctx.get(port.payload)
                said = (name, p.offset, p.length) if name == "request" else (name, p.address, p.length)
                valid, ready = ctx.get(port.valid), ctx.get(port.ready)
                assert name not in waited or (valid and waited[name] == said), f"{name} did not wait"
                waited.pop(name, None)
                if valid and ready:
                    self.asked.append(said)
                    self.unanswered.append("host" if name == "request" else "memory")
                    (self.host if name == "request" else self.memory).extend(answer(name[2], *said[1:]))
                elif valid:
                    waited[name] = said
            if fetched:
                left.popleft()
                offered.discard("fetch")
            await ctx.tick()
        for port in (dut.i_request, dut.i_weights, dut.i_read):
            ctx.set(port.valid, 0)


def expected(requests: list[Request]) -> tuple[list[tuple], list[tuple[bytes, int]]]:
    """What is asked and what is answered."""
    asked, beats = [], []
    for request in requests:
        if request.address is None:
            asked.append(("request", request.offset, request.length))
            beats += answer("q", request.offset, request.length)
        else:
            asked.append(("read", request.address, request.length))
            beats += answer("a", request.address, request.length)
    return asked, beats


def run(process) -> None:
    dut = Homes(PARAMS)
    sim = Simulator(dut)
    sim.add_clock(1e-6)

    async def testbench(ctx):
        await process(ctx, dut)

    sim.add_testbench(testbench)
    sim.run()


def layers(rng) -> list[Layer]:
    """Four experts, each at one or the other place in all 16 ways; then some of few and many, told of or not."""
    cases = [
        Layer([16 * int(rng.integers(1, 4000)) if here else None for here in heres], [0, 1, 2, 3])
        for heres in itertools.product((False, True), repeat=4)
    ]
    for _ in range(6):
        told = int(rng.integers(PARAMS.max_experts + 1))
        homes = [16 * int(rng.integers(4000)) if rng.random() < 0.6 else None for _ in range(told)]
        experts = sorted(rng.permutation(PARAMS.max_experts)[: rng.integers(1, 7)].tolist())
        lengths = tuple(16 * int(n) for n in rng.integers(1, 6, 3))
        cases.append(Layer(homes, experts, (lengths[0], lengths[1], lengths[2])))
    cases.append(Layer([None, END - 96, 0], [0, 1, 2]))  # up to the memory's very end; from its start
    return cases


@pytest.mark.parametrize("slow", [0, 60])
@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
def test_homes(p_in, p_out, slow):
    """Each request goes where its expert lies, and the answers come out in the order of requests."""
    rng = np.random.default_rng(slow)

    async def process(ctx, dut):
        for layer in layers(rng):
            bench = Bench(dut, rng, p_in=p_in, p_out=p_out, slow=slow)
            await bench.tell(ctx, layer.homes)
            requests = requests_of(layer, rng)
            await bench.run(ctx, requests)
            assert (bench.asked, bench.got) == expected(requests)
            assert not bench.errors

    run(process)


def test_homes_are_forgotten():
    """By ``forget``, and in full by a shorter list."""
    rng = np.random.default_rng(0)

    async def process(ctx, dut):
        for told, left in ((6, 0), (6, 2), (1, 0), (0, 0)):
            bench = Bench(dut, rng)
            await bench.tell(ctx, [256 * n for n in range(told)])
            await bench.tell(ctx, [256 * n for n in range(left)])
            requests = requests_of(Layer([256 * n for n in range(left)], list(range(6))), rng)
            await bench.run(ctx, requests)
            assert bench.asked == expected(requests)[0]

    run(process)


def test_homes_cycles():
    """A request takes five cycles; beats pass at once, one a cycle."""
    rng = np.random.default_rng(0)

    async def process(ctx, dut):
        for home in (None, 4096):
            bench = Bench(dut, rng)
            await bench.tell(ctx, [home])
            start = bench.cycle
            await bench.run(ctx, requests_of(Layer([home], [0], (1600, 1600, 1600)), rng))
            assert bench.cycle - start == 5 + 300

    run(process)


@pytest.mark.parametrize(
    ("home", "lengths", "good"),
    [
        (END - 16, (32, 32, 32), 0),
        (END - 32, (32, 32, 32), 1),  # the next one begins behind the end, not at address 0
        (END - 64, (32, 32, 32), 2),
        (END - 80, (32, 32, 32), 2),
        (0, ((1 << 32) - 16, 32, 32), 0),
        (END - 16, ((1 << 32) - 16, 32, 32), 0),
        (0, (32, 0, 32), 1),
        (0, (40, 32, 32), 0),
        (0, (32, 15, 32), 1),
    ],
)
def test_homes_tells_what_cannot_be_read(home, lengths, good):
    """One error, and nothing is asked for any more."""
    rng = np.random.default_rng(0)

    async def process(ctx, dut):
        bench = Bench(dut, rng)
        await bench.tell(ctx, [home])
        requests = requests_of(Layer([home], [0], lengths), rng)
        await bench.run(ctx, requests, until=lambda: bench.cycle > 100)
        assert bench.errors == 1
        assert bench.asked == expected(requests[:good])[0]

    run(process)


def test_a_halted_host_is_not_kept_waiting():
    """What it sends is dropped while the memory's answer, which may never come, is due before it."""
    rng = np.random.default_rng(0)

    async def process(ctx, dut):
        bench = Bench(dut, rng)
        await bench.tell(ctx, [0, None])
        requests = requests_of(Layer([0, None], [0, 1], (16, 16, 160)), rng)
        bench._due["memory"] = 10**6
        await bench.run(ctx, requests, until=lambda: len(bench.host) == 12)
        ctx.set(dut.i_weights.valid, 1)
        for halted in (0, 1, 0):
            ctx.set(dut.halted, halted)
            assert ctx.get(dut.i_weights.ready) == halted
            assert not ctx.get(dut.o_weights.valid)
            await ctx.tick()

    run(process)


def test_nothing_passes_that_is_not_due():
    """Neither before the first request nor after the last answer, from wherever that came."""
    rng = np.random.default_rng(0)

    async def process(ctx, dut):
        for homes in ([None], [0]):
            for port in (dut.i_weights, dut.i_read):
                ctx.set(dut.o_weights.ready, 1)
                ctx.set(port.valid, 1)
                for _ in range(3):
                    assert not ctx.get(dut.o_weights.valid)
                    assert not ctx.get(port.ready)
                    await ctx.tick()
                ctx.set(port.valid, 0)
            bench = Bench(dut, rng)
            await bench.tell(ctx, homes)
            await bench.run(ctx, requests_of(Layer(homes, [0]), rng))

    run(process)


def test_rejected_parameters():
    with pytest.raises(ValueError, match="memory_bits must not be 0"):
        Homes(Params())
