import struct
from typing import NamedTuple

import numpy as np
import pytest
from amaranth.hdl import Value
from amaranth.sim import Simulator

from hw.formats import messages
from hw.formats.messages import MAX_OUTSTANDING, Error, Layer, Message, Mode
from hw.formats.params import LINK_BYTES, Params
from hw.receive import Receive

from .streams import STALLS

WIDTHS = dict(max_batch=5, max_width=1024, max_expert_width=512, max_experts=200)
LAYER = Layer(512, 256, 200, (1, 2, 3))
ROUTES = [(0, 3, 1), (4, 199, 65536), (0xFFFF, 0xFFFF, 0xFFFFFFFF)]
"""What a route says is the table's business."""


PRELIMINARY = ("x", "route", "forget", "home", "store")
"""What may come of a message before it is known to be bad."""


class Case(NamedTuple):
    """A message as beats, the surroundings that it meets and what it has to cause; ``config`` is checked after it."""

    beats: list[tuple[bytes, bool]]
    want: list[tuple]
    running: int = 0
    waiting: int = 0
    halted: int = 0
    route_fails: bool = False  # the table finds fault with the last route, which halts the engine
    config: dict | None = None


class Outcome(NamedTuple):
    """Events of each case in order, and the cycle in which each beat was taken."""

    events: list[list[tuple]]
    taken: list[list[int]]


def cut(message: bytes, link_bytes: int) -> list[tuple[bytes, bool]]:
    """A message as link beats; padding is 0xEE."""
    starts = range(0, len(message), link_bytes)
    return [(message[low : low + link_bytes].ljust(link_bytes, b"\xee"), low == starts[-1]) for low in starts]


def longer(beats: list[tuple[bytes, bool]], count: int = 1) -> list[tuple[bytes, bool]]:
    return [*((part, False) for part, _ in beats), *((beats[-1][0], n == count - 1) for n in range(count))]


def shorter(beats: list[tuple[bytes, bool]], count: int) -> list[tuple[bytes, bool]]:
    """The first ``count`` beats."""
    return [(part, n == count - 1) for n, (part, _) in enumerate(beats[:count])]


def config_of(layer: Layer) -> dict:
    return {
        "tape": int(layer.mode),
        "outstanding": layer.outstanding,
        "experts": layer.experts,
        "width": layer.width,
        "expert_width": layer.expert_width,
        "columns": layer.width // 256,
        "hidden_columns": layer.expert_width // 256,
        "offsets": list(layer.offsets),
        "lengths": [layer.matrix_bytes] * 3,
    }


async def exchange(ctx, dut: Receive, cases: list[Case], rng, p_in: float, p_out: float) -> Outcome:
    """Send all cases, one close behind the other. Routes go to a table that works on each for up to four cycles."""
    events: list[list[tuple]] = [[] for _ in cases]
    taken: list[list[int]] = [[] for _ in cases]
    left = [(number, *beat) for number, case in enumerate(cases) for beat in case.beats]
    left.reverse()
    junk = rng.bytes(dut.params.link_bytes)
    now = -1  # the message whose first beat has been taken
    offered = False
    work = 0  # cycles that the table still needs
    routes_to_come = 0
    ports = {"weights": dut.o_weights, "x": dut.o_x, "route": dut.o_route}
    if dut.params.memory_bits:
        ports |= {"home": dut.o_home, "store": dut.o_store}
    waited: dict[str, int | None] = dict.fromkeys(ports)
    settings = ctx.get(dut.batch), ctx.get(Value.cast(dut.config))
    quiet = 0
    cycle = 0
    before = 0  # the message that was now in the cycle before: places come that much later
    earlier = 0  # in the one before that: so do errors
    ended = -1  # the message whose configuration is to be looked at
    while quiet < 20:
        quiet += not left
        offered = bool(left) and (offered or rng.random() < p_in)
        number, data, last = left[-1] if offered else (0, junk, cycle % 2)
        ctx.set(dut.i.payload, {"data": list(data), "last": last})
        ctx.set(dut.i.valid, offered)
        case = cases[max(now, 0)]
        for name in ("running", "waiting"):
            ctx.set(getattr(dut, name), getattr(case, name))
        ctx.set(dut.halted, case.halted or (case.route_fails and routes_to_come == 0 and work == 0))
        ctx.set(dut.routes_held, work > 0)
        for name, port in ports.items():
            ctx.set(port.ready, rng.random() < p_out and not (name == "route" and work))
        here = events[now]
        if ended >= 0:
            check_config(ctx, dut, cases, ended)
            ended = -1
        work -= work > 0
        kept, settings = settings, (ctx.get(dut.batch), ctx.get(Value.cast(dut.config)))
        changes = any(
            one.beats[0][0][0] in (Message.CONFIG, Message.ROUTES) and not (one.running or one.halted)
            for one in (case, cases[max(before, 0)])
        )
        assert changes or settings == kept, "a message changed the settings that is not to"
        for name, port in ports.items():
            if not ctx.get(port.valid):
                assert waited[name] is None, f"o_{name} withdrew a payload"
                continue
            bits = ctx.get(Value.cast(port.payload))
            assert waited[name] in (None, bits), f"o_{name} changed a payload"
            waited[name] = None if ctx.get(port.ready) else bits
            if waited[name] is not None:
                continue
            p = ctx.get(port.payload)
            if name == "weights":
                here.append((name, bytes(p.data), p.last))
            elif name == "x":
                here.append((name, p.token, p.column, p.exponent, p.word, *p["values"]))
            elif name == "home":
                here.append((name, p.expert, p.here, 16 * p.word if p.here else 0))
            elif name == "store":
                here.append((name, p.address, bytes(p.data), p.last))
            else:
                here.append((name, p.token, p.expert, p.weight))
                work = int(rng.integers(1, 5))
                routes_to_come -= 1
        moved = ctx.get(dut.o_weights.valid) and ctx.get(dut.o_weights.ready)
        assert ctx.get(dut.moved) == moved
        assert ctx.get(dut.answered) == (moved and last)
        assert ctx.get(dut.idle) == (case.waiting and ctx.get(dut.i.ready) and not offered)
        if ctx.get(dut.start):
            assert not ctx.get(dut.routes_held)
            here.append(("start", ctx.get(dut.batch)))
        pulses = ("reset", "read_counters", *(["forget"] if dut.params.memory_bits else []))
        here += [(name,) for name in pulses if ctx.get(getattr(dut, name))]
        if ctx.get(dut.error):
            events[earlier].append(("error", ctx.get(dut.error)))
        earlier, before = before, now
        if offered and ctx.get(dut.i.ready):
            if number != now:
                ended = now
                now = number
                routes_to_come = sum(event[0] == "route" for event in cases[number].want)
            taken[number].append(cycle)
            left.pop()
            offered = False
        await ctx.tick()
        cycle += 1
        assert cycle < 2000 + 20 * sum(len(case.beats) for case in cases) / p_in / p_out, f"stuck in case {now}"
    check_config(ctx, dut, cases, now)
    return Outcome(events, taken)


def check_config(ctx, dut: Receive, cases: list[Case], number: int) -> None:
    if number >= 0 and cases[number].config is not None:
        got = ctx.get(dut.config)
        found = {name: getattr(got, name) for name in cases[number].config or {}}
        found |= {name: list(found[name]) for name in ("offsets", "lengths")}
        assert found == cases[number].config


def run(params: Params, cases: list[Case], *, seed: int = 0, p_in: float = 1.0, p_out: float = 1.0) -> Outcome:
    """The outcome of the cases, of which a bad one may let words and routes through before it is known to be bad."""
    dut = Receive(params)
    outcomes = []

    async def process(ctx):
        outcomes.append(await exchange(ctx, dut, cases, np.random.default_rng(seed), p_in, p_out))

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(process)
    sim.run()
    (outcome,) = outcomes
    for number, (case, events) in enumerate(zip(cases, outcome.events, strict=True)):
        bad = [event[0] for event in case.want] == ["error"]
        got = [event for event in events if not (bad and event[0] in PRELIMINARY)]
        assert got == case.want, f"case {number}: {case.beats[0]}"
    return outcome


class Kinds:
    """Cases for one link width."""

    def __init__(self, link_bytes: int, *, memory_bits: int = 0) -> None:
        self.link_bytes = link_bytes
        self.params = Params(link_bytes=link_bytes, memory_bits=memory_bits, **WIDTHS)

    def cut(self, message: bytes) -> list[tuple[bytes, bool]]:
        return cut(message, self.link_bytes)

    def reset(self, **surroundings) -> Case:
        return Case(self.cut(messages.bare(Message.RESET)), [("reset",)], **surroundings)

    def read_counters(self, **surroundings) -> Case:
        return Case(self.cut(messages.bare(Message.READ_COUNTERS)), [("read_counters",)], **surroundings)

    def config(self, layer: Layer = LAYER, **surroundings) -> Case:
        want = [("forget",)] if self.params.memory_bits else []
        return Case(self.cut(messages.config(layer)), want, config=config_of(layer), **surroundings)

    def load_x(self, rng, token: int, column: int, **surroundings) -> Case:
        exponent, values = int(rng.integers(-128, 128)), rng.integers(-(1 << 15), 1 << 15, (32, 8))
        want = [("x", token, column, exponent, word, *values[word].tolist()) for word in range(32)]
        message = messages.load_x(token, column, exponent, values.astype("<i2").tobytes())
        return Case(self.cut(message), want, **surroundings)

    def routes(self, batch: int, entries: list[tuple[int, int, int]], **surroundings) -> Case:
        want = [*(("route", *entry) for entry in entries), ("start", batch)]
        return Case(self.cut(messages.routes(batch, entries)), want, **surroundings)

    def weights(self, data: bytes, **surroundings) -> Case:
        beats = self.cut(messages.weights(data))
        payload = beats[16 // self.link_bytes :]
        return Case(beats, [("weights", *beat) for beat in payload], waiting=1, **surroundings)

    def homes(self, addresses: list[int | None], **surroundings) -> Case:
        homes = (("home", n, int(address is not None), address or 0) for n, address in enumerate(addresses))
        return Case(self.cut(messages.homes(addresses)), [("forget",), *homes], **surroundings)

    def store(self, address: int, data: bytes, **surroundings) -> Case:
        starts = range(0, len(data), 16)
        want = [("store", address + low, data[low : low + 16], int(low == starts[-1])) for low in starts]
        return Case(self.cut(messages.store(address, data)), want, **surroundings)

    def random(self, rng) -> Case:
        """A good message, any but ``RESET``; a configuration has come before."""

        def u16() -> int:
            return int(rng.integers(1 << 16))

        link_bytes, p = self.link_bytes, self.params
        kind = rng.choice(["config", "load_x", "routes", "weights", "read_counters"], p=[0.2, 0.1, 0.3, 0.3, 0.1])
        if kind == "config":
            width, expert_width = (256 * int(rng.integers(1, n + 1)) for n in (p.max_columns, p.max_hidden_columns))
            offsets = tuple(rng.integers(1 << 48, size=3).tolist())
            experts, outstanding = int(rng.integers(1, p.max_experts + 1)), int(rng.integers(1, MAX_OUTSTANDING + 1))
            return self.config(Layer(width, expert_width, experts, offsets, Mode(rng.integers(2)), outstanding))
        if kind == "load_x":
            return self.load_x(rng, int(rng.integers(p.max_batch)), int(rng.integers(p.max_columns)))
        if kind == "routes":
            entries = [(u16(), u16(), u16() << 16 | u16()) for _ in range(rng.integers(6))]
            return self.routes(int(rng.integers(1, p.max_batch + 1)), entries)
        if kind == "weights":
            return self.weights(rng.bytes(link_bytes * int(rng.integers(1, 20))), running=int(rng.integers(2)))
        return self.read_counters(waiting=int(rng.integers(2)))


@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize("link_bytes", LINK_BYTES)
def test_receive(link_bytes, p_in, p_out):
    """Every kind of message, corners first, then at random; each does what it says and nothing else."""
    rng = np.random.default_rng(link_bytes)
    kinds = Kinds(link_bytes)
    params = kinds.params
    smallest = Layer(256, 256, 1, (0, 0, 0), Mode.SELECTED, 1)
    far = (1 << 48) - 1
    largest = Layer(
        params.max_width, params.max_expert_width, params.max_experts, (far, far, far), Mode.TAPE, MAX_OUTSTANDING
    )
    cases = [
        kinds.config(largest),
        kinds.load_x(rng, 0, 0),
        kinds.load_x(rng, params.max_batch - 1, params.max_columns - 1),
        kinds.routes(params.max_batch, ROUTES),
        kinds.weights(rng.bytes(210 * 8), running=1),
        kinds.weights(rng.bytes(1), running=1),
        kinds.config(smallest),
        kinds.read_counters(),
        kinds.routes(1, []),
        kinds.routes(1, ROUTES[:1]),
        kinds.routes(1, ROUTES[:2]),
        kinds.reset(running=1),
        kinds.reset(),
        kinds.config(),
        *(kinds.random(rng) for _ in range(16)),
        kinds.reset(),
    ]
    run(params, cases, seed=link_bytes, p_in=p_in, p_out=p_out)


@pytest.mark.parametrize("link_bytes", LINK_BYTES)
def test_receive_cycles(link_bytes):
    """A header costs five cycles beside its beats, a payload's beats one each, a gathered word one, its end one."""
    rng = np.random.default_rng(0)
    kinds = Kinds(link_bytes)
    cases = [
        kinds.config(),
        kinds.weights(rng.bytes(210)),
        kinds.weights(rng.bytes(32)),
        kinds.read_counters(),
        kinds.load_x(rng, 0, 0),
        kinds.reset(),
        kinds.reset(),
    ]
    taken = run(kinds.params, cases).taken
    header = 16 // link_bytes
    for number, cycles in enumerate(taken[:-1]):
        begin, follows = cycles[0], taken[number + 1][0]
        payload = len(cycles) - header
        assert cycles[:header] == list(range(begin, begin + header))
        gathered = number == 4
        after = begin + header + 5
        assert cycles[header:] == [after + n + gathered * (n // header) for n in range(payload)]
        assert follows == after + payload + gathered * (payload // header) + (payload > 0)


def bad_messages(kinds: Kinds, rng) -> list[Case]:
    """Of every sort that there is, each after a good ``CONFIG``."""
    link_bytes, params = kinds.link_bytes, kinds.params
    header = 16 // link_bytes
    load_x, weights = kinds.load_x(rng, 0, 0), kinds.weights(rng.bytes(64), running=1)
    config, four = kinds.config(), kinds.routes(1, [(n, n, n) for n in range(4)])
    three = kinds.routes(1, [(n, n, n) for n in range(3)])
    good = [kinds.reset(), kinds.read_counters(), config, load_x, four, three, weights]
    wrong_lengths = [longer(case.beats, n) for case in good if case is not weights for n in (1, 20)]
    wrong_lengths += [shorter(case.beats, n) for case in good for n in {1, header - 1} if 0 < n < header]
    for case in (config, load_x, four, three):
        whole = len(case.beats)
        wrong_lengths += [shorter(case.beats, n) for n in sorted({header, whole - max(1, 8 // link_bytes), whole - 1})]
    wrong_lengths.append(shorter(weights.beats, header))

    def counted(count: int, entries: int) -> bytes:
        return struct.pack("<BBH12x", Message.ROUTES, 1, count) + bytes(8 * entries)

    counts = [(0, 1), (1, 0), (0xFFFF, 0), (6, 4), (2, 4), (0x104, 4), *([(3, 4), (4, 3)] if link_bytes < 16 else [])]

    def load(token: int, column: int) -> bytes:
        return messages.load_x(token, column, 0, bytes(512))

    def configured(**fields) -> bytes:
        place = {"mode": (1, "B"), "outstanding": (2, "H"), "experts": (4, "H"), "width": (6, "H"), "high": (8, "H")}
        message = bytearray(messages.config(LAYER))
        for name, value in fields.items():
            offset, form = place[name]
            struct.pack_into("<" + form, message, offset, value)
        return bytes(message)

    out_of_range = [
        *({"mode": mode} for mode in (2, 255)),
        *({"outstanding": n} for n in (0, 9, 16, 0x102, 0xFFFF)),
        *({"experts": n} for n in (0, params.max_experts + 1, 256 + 1, 0xFFFF)),
        *({"width": n} for n in (0, 255, 257, params.max_width + 256, 1 << 15)),
        *({"high": n} for n in (0, 384, params.max_expert_width + 256, 1 << 15)),
    ]
    wrong = [("error", int(Error.MESSAGE))]
    return [
        *(Case(kinds.cut(struct.pack("<B15x", kind)), wrong) for kind in (0, 9, 129, 255)),
        *(Case(kinds.cut(message), wrong) for message in (messages.homes([]), messages.homes([0]))),
        Case(kinds.cut(messages.store(0, bytes(32))), wrong),
        *(Case(kinds.cut(struct.pack("<B15x", kind) + bytes(50)), wrong) for kind in (0, 9)),
        *(Case(beats, wrong, waiting=1) for beats in wrong_lengths),
        *(Case(kinds.cut(configured(**fields)), [("error", int(Error.CONFIG))]) for fields in out_of_range),
        *(Case(kinds.cut(load(token, 0)), wrong) for token in (params.max_batch, 8, 255)),
        *(Case(kinds.cut(load(0, column)), wrong) for column in (params.max_columns, 255)),
        *(Case(kinds.cut(messages.routes(batch, ROUTES)), wrong) for batch in (0, params.max_batch + 1, 9, 255)),
        *(Case(kinds.cut(counted(count, entries)), wrong) for count, entries in counts),
        *(Case(case.beats, wrong, running=1) for case in (config, load_x, four, kinds.read_counters())),
        Case(weights.beats, wrong, running=1),
    ]


@pytest.mark.parametrize(("link_bytes", "p"), [(1, 1.0), (4, 0.6), (8, 1.0), (8, 0.6), (16, 1.0), (16, 0.6)])
def test_receive_tells_bad_messages(link_bytes, p):
    """Each gives one error and starts nothing; what follows is understood, and ``ROUTES`` needs ``CONFIG`` again."""
    rng = np.random.default_rng(0)
    kinds = Kinds(link_bytes)
    early = Case(kinds.routes(1, ROUTES).beats, [("error", int(Error.MESSAGE))])
    cases = [early, kinds.reset()]
    for number, bad in enumerate(bad_messages(kinds, rng)):
        cases += [kinds.config(), bad, kinds.reset(halted=number % 2, running=bad.running)]
        cases += [early, kinds.reset()] if number % 8 == 0 else []
    run(kinds.params, [*cases, kinds.config(), kinds.routes(2, ROUTES)], p_in=p, p_out=p)


@pytest.mark.parametrize("link_bytes", LINK_BYTES)
def test_receive_is_silent_while_halted(link_bytes):
    """Nothing but ``RESET`` has any effect, good or bad."""
    rng = np.random.default_rng(0)
    kinds = Kinds(link_bytes)
    good = [kinds.config(), kinds.load_x(rng, 0, 0), kinds.routes(1, ROUTES), kinds.routes(1, [])]
    good += [kinds.read_counters(), kinds.weights(rng.bytes(64))]
    cases = [kinds.config()]
    for case in [*good, *bad_messages(kinds, rng)]:
        cases.append(case._replace(want=[], halted=1, config=None))
    run(kinds.params, [*cases, kinds.reset(halted=1), kinds.config(), kinds.routes(2, ROUTES)], p_in=0.9)


@pytest.mark.parametrize("link_bytes", LINK_BYTES)
def test_receive_does_not_start_after_a_wrong_route(link_bytes):
    """Not even after a wrong last one, which the table tells a cycle before it is free."""
    kinds = Kinds(link_bytes)
    cases = [kinds.config()]
    for count in (1, 2, 3):
        routes = kinds.routes(1, ROUTES[:count], route_fails=True)
        cases += [routes._replace(want=routes.want[:-1]), kinds.reset(halted=1), kinds.config()]
    run(kinds.params, [*cases, kinds.routes(1, ROUTES)])


MEMORY_BITS = 20
END = 1 << MEMORY_BITS


@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
def test_receive_homes_and_stores(p_in, p_out):
    """Each home and each word goes where it should; messages of the other kinds in between do what they always did."""
    rng = np.random.default_rng(0)
    kinds = Kinds(16, memory_bits=MEMORY_BITS)
    cases = [
        kinds.store(0, rng.bytes(16)),
        kinds.store(END - 64, rng.bytes(64)),
        kinds.config(),
        kinds.homes([]),
        kinds.homes([0]),
        kinds.homes([None, END - 16]),
        kinds.homes([16 * n if n % 3 else None for n in range(LAYER.experts)]),
        kinds.routes(2, ROUTES),
        kinds.homes([16]),
        kinds.routes(1, []),
    ]
    for _ in range(12):
        count, length = int(rng.integers(1, LAYER.experts + 1)), 16 * int(rng.integers(1, 40))
        homes = [16 * int(rng.integers(END // 16)) if rng.random() < 0.5 else None for _ in range(count)]
        store = kinds.store(16 * int(rng.integers((END - length) // 16 + 1)), rng.bytes(length))
        cases += [kinds.config(), kinds.homes(homes), store, kinds.random(rng)]
    run(kinds.params, [*cases, kinds.reset()], p_in=p_in, p_out=p_out)


def bad_homes_and_stores(kinds: Kinds) -> list[Case]:
    def counted(count: int, entries: int) -> bytes:
        return struct.pack("<BxH12x", Message.HOMES, count) + bytes(8 * entries)

    def entries(*values: int) -> bytes:
        return struct.pack(f"<BxH12x{len(values)}Q", Message.HOMES, len(values), *values)

    here = messages.IN_MEMORY
    homes, store = kinds.homes([0, 16, 32, 48, 64]), kinds.store(0, bytes(64))
    wrong = [("error", int(Error.MESSAGE))]
    bad = [counted(*c) for c in ((0, 2), (1, 0), (6, 4), (2, 4), (0x102, 2), (LAYER.experts + 1, LAYER.experts + 1))]
    bad += [entries(here | address) for address in (1, 8, END, END + 16, 1 << 47, 1 << 48, 1 << 62)]
    bad += [
        entries(here, here | 8),
        entries(here | 8, here),
        entries(here, here, here | 8, 0),
        entries(0, 0, here | END),
    ]
    bad += [messages.store(address, bytes(32)) for address in (1, 8, END, END + 16, 1 << 47)]
    bad += [messages.store(END - 16, bytes(size)) for size in (32, 48, 160)]
    return [
        *(Case(kinds.cut(message), wrong) for message in bad),
        *(Case(beats, wrong) for beats in (longer(homes.beats), longer(homes.beats, 9), shorter(homes.beats, 2))),
        Case(shorter(store.beats, 1), wrong),
        *(Case(case.beats, wrong, running=1) for case in (homes, store)),
    ]


@pytest.mark.parametrize("p", [1.0, 0.6])
def test_receive_tells_bad_homes_and_stores(p):
    """Each gives one error; what follows is understood, and ``HOMES`` needs ``CONFIG``."""
    kinds = Kinds(16, memory_bits=MEMORY_BITS)
    early = Case(kinds.homes([0, 0]).beats, [("error", int(Error.MESSAGE))])
    smaller = kinds.config(Layer(256, 256, 3, (0, 0, 0)))
    cases = [early, kinds.reset(), smaller, Case(kinds.homes([0] * 4).beats, early.want), kinds.reset()]
    cases += [kinds.store(0, bytes(32))]
    for number, bad in enumerate(bad_homes_and_stores(kinds)):
        cases += [kinds.config(), bad, kinds.reset(halted=number % 2, running=bad.running)]
        cases += [early, kinds.reset()] if number % 8 == 0 else []
    run(kinds.params, [*cases, kinds.config(), kinds.homes([0, None, 16]), kinds.routes(2, ROUTES)], p_in=p, p_out=p)


def test_receive_keeps_the_memory_while_halted():
    """No home and no word gets through."""
    kinds = Kinds(16, memory_bits=MEMORY_BITS)
    cases = [kinds.config()]
    for case in [kinds.homes([0, 16]), kinds.store(0, bytes(64)), *bad_homes_and_stores(kinds)]:
        cases.append(case._replace(want=[], halted=1))
    run(kinds.params, [*cases, kinds.reset(halted=1), kinds.config(), kinds.homes([0])], p_in=0.9)


def test_a_memory_needs_a_link_of_its_width():
    with pytest.raises(ValueError, match="memory_bits = 20 needs link_bytes = 16, not 8"):
        Receive(Params(link_bytes=8, memory_bits=MEMORY_BITS))
