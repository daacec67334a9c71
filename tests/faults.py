"""``make faults``: break links, peers and storage on purpose; nothing wrong may come out, and nothing may hang.

``python -m tests.faults [--seed N] [--scale F] [--record]`` lets layers run on the Verilated device, over AXI-Stream
and over its UART, and does one thing at a time to what passes: bits flipped, frames dropped, repeated, cut, exchanged,
garbage between them, in either direction; a peer that stalls, vanishes, restarts or talks nonsense; reads that come
short, fail or hang; a file that changes. After each one all that came out is compared with the golden model, bit for
bit, and what receivers and senders counted tells whether somebody noticed. What became of it:

repaired
    The right numbers came out, and a counter on either side moved.
reported
    A one-line error, within the deadline. Then the same device must do the same work without a fault.
harmless
    The right numbers came out, and there was nothing to notice; :func:`harmless` says when that is accepted.
unseen, wrong, hung, crashed
    The right numbers came out but a counter should have moved; other numbers; no end within the deadline; an error
    that is none of the driver's. Any of them fails the campaign.

Storms damage a hundredth of all frames; their faults are counted apart, since no counter tells them from each other.
First, the campaign runs on a host and on a device whose receiver does not look at the payload's CRC, and must find
wrong numbers. All is decided by the seed: ``--only NAME`` runs a session again as it was.
"""

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from host.device import Device, DeviceError
from host.link import LinkError, Transport
from host.storage import BLOCK_BYTES, StorageError, Store
from hw.formats import frames, messages
from hw.formats.frames import SEQUENCES, WINDOW, WORD_BYTES, Flag, Header, Type
from hw.formats.messages import Counter, Message
from hw.formats.params import Params
from sim import record
from sim.device_sim import CLOCK_HZ, SimTransport
from sim.golden import activations
from sim.golden.device import GoldenTransport
from tests.host.devices import Case, case
from tests.host.faulty import KINDS as FRAME_KINDS
from tests.host.faulty import Faulty

ROOT = Path(__file__).resolve().parent.parent
START = time.monotonic()
SEED = 1
LEAST_FAULTS = 2000
"""That somebody could notice."""
PROCESSES = 2
WALL_SECONDS = 600.0
"""An exchange that takes longer on this machine's clock is called hung. A layer over the simulated UART takes 20."""
STILL_CALLS = 100_000
"""So is one that calls its transport so often while the transport's clock stands."""
TAKE_SECONDS = 0.5
"""What a read of the storage may take here."""
PROGRESS_SECONDS = 5.0

KINDS = (*FRAME_KINDS, "split")
"""``split``: a frame's end comes so late that its receiver has given it up."""
PEER_KINDS = ("stalled", "frozen", "silent", "vanished", "power cycle", "second host", "babble")
STORAGE_KINDS = (
    "short read",
    "short reads",
    "EIO",
    "end of file",
    "hang",
    "truncated",
    "rewritten",
    "replaced",
    "removed",
)
STORM_CHANCE = 0.01
CONNECT_EVERY = 9
"""Of the faults on a link, each so-many-th hits the start of a connection; no multiple of the kinds."""
EDGE_FRAMES = 8
PORT_BYTES = 4096
"""That a kernel takes ahead of a serial port."""
OUTPUTS_A_FAULT = 8
LINGER = 4
"""Patiences; longer than either device waits before it sends again."""
TOKENS = {"uart": 64}
"""A UART is slow: a layer with many tokens checks many vectors that were damaged on their way."""

AXIS = Params(max_batch=4, max_width=256, max_expert_width=256, max_experts=4, frame_bytes=1024)
UART = Params(max_batch=64, max_width=256, max_expert_width=256, max_experts=4, frame_bytes=512)
BIT_CLOCKS = 4
WATCHED = ("frames_resent", "naks", "timeouts", "damaged", "refused", "garbage")

BROKEN = {
    "host": (
        "host/link.py",
        "        if not header.words:\n            return True\n        body",
        "        if True:\n            return True\n        body",
    ),
    "device": ("hw/link/frame_receive.py", "with m.If((compared & ~same.all()) | ~crc_same):", "with m.If(0):"),
}
"""Receivers without their check: file, what stands there, what instead."""
COPIED = ("boards", "host", "hw", "models", "sim", "tests")

Say = Callable[[str], None]


class Hung(BaseException):
    """The deadline passed, and still somebody waits. Not for anybody's ``except Exception``."""


class Outcome(NamedTuple):
    """What became of one fault, or of ``faults`` in one layer."""

    link: str
    kind: str
    what: str
    """Direction and frame, or which read."""
    became: str
    evidence: str
    """Counters that moved, or the error."""
    seconds: float
    """On the transport's clock."""
    usable: bool | None = None
    """Of a reported one: whether the device worked afterwards."""
    faults: int = 1


@dataclass
class Session:
    """Faults in a row on one device; decided by its name and the seed."""

    name: str
    """``link: what: number``"""
    count: int
    seed: int
    kinds: Sequence[str] = ()
    direction: bool | None = None
    """To the device, to the host, None: both in turn."""

    @property
    def link(self) -> str:
        return self.name.split(":")[0]

    @property
    def what(self) -> str:
        return self.name.split(":")[1]

    @cached_property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, *self.name.encode()])


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {text}", flush=True)


def open_link(link: str, say: Say = say) -> Transport:
    """A device behind a link, just powered up."""
    if link == "axi-stream":
        return SimTransport(AXIS, idle_cycles=500, resend_cycles=20_000, say=say)
    if link == "uart":
        return SimTransport(UART, bit_clocks=BIT_CLOCKS, idle_cycles=2_000, resend_cycles=200_000, say=say)
    return GoldenTransport(AXIS)


# Faults.


class Hit(NamedTuple):
    """A fault that happened."""

    kind: str
    to_device: bool
    header: Header
    detail: str
    place: int
    """Bytes of the frame that came in time."""


class Injector(Faulty):
    """Does one thing to one frame, or at one frame to the peer; also counts what it sees.

    Attributes
    ----------
    hit
        What was done since ``arm``; None: nothing yet.
    superseded
        A later frame of that direction said all that the one hit had said.
    follower
        The first frame behind the one hit.
    passed
        Frames so far, from and to the device.
    polls, syncs
        What the host sent of them.
    """

    def __init__(self, link: str, rng: np.random.Generator, say: Say = say) -> None:
        self._open = lambda: open_link(link, say)
        super().__init__(self._open(), rng)
        self.link = link
        self._lag = 0.0
        self.passed = [0, 0]
        self.polls = self.syncs = 0
        self._held: list[bytes] = []
        self._rest: tuple[float, bytes] | None = None
        self.heal()
        self.allow(float("inf"))

    # What is to happen.

    def arm(self, kind: str, to_device: bool, frame: int, *, unit: int = 1, payload: bool = False) -> None:
        """Do it to, or at, the ``frame``-th frame from now in that direction; ``payload``: the next that has any."""
        self.hit, self.superseded = None, False
        self.follower: Header | None = None
        self._unit = unit
        self._due = (kind, to_device, self.passed[to_device] + frame, payload)

    def disarm(self) -> None:
        """What has not happened yet does not."""
        self._due = None

    def heal(self) -> None:
        """From now on all is well."""
        self.hit: Hit | None = None
        self.superseded, self.follower = False, None
        self.to_device = self.to_host = 0.0
        self.disarm()
        self._mute_until, self._device_runs = 0.0, True
        self._gone: str | None = None
        # A port keeps the order of bytes: no frame of one connection comes in the next.
        self._down.late = self._up.late = b""

    def allow(self, seconds: float) -> None:
        """Raise ``Hung`` when so much time has passed on the transport's clock, or too much here."""
        self._end = self.now() + seconds
        self._wall_end = time.monotonic() + WALL_SECONDS
        self._seen, self._still = self.now(), 0

    # The transport.

    def now(self) -> float:
        return self._transport.now() + self._lag

    def write(self, data: bytes | memoryview) -> None:
        self._watch()
        device = self._transport
        data = self._down.put(data)
        if self._gone == "vanished":
            raise LinkError(f"{self.name}: the device vanished (pulled out); plug it in, then connect again")
        if self._gone or device is not self._transport:  # lost with what stood in the device
            return
        self._held.append(data)
        self._deliver()

    def read(self, timeout: float) -> bytes:
        self._watch()
        if timeout > 0 and self._lag:  # a sum of two clocks may lose less than this
            timeout = max(timeout, 1 / CLOCK_HZ)
        if self._gone:
            return self._nothing(timeout)
        if (left := self._mute_until - self.now()) > 0:
            self._wait(min(timeout, left), self._device_runs)
            return b""
        self._deliver()
        if self._rest is not None:
            when, rest = self._rest
            if self.now() < when:
                self._wait(min(timeout, when - self.now()), True)
                return b""
            self._rest = None
            return rest
        return self._up.put(self._transport.read(timeout))

    def _deliver(self) -> None:
        if self.now() < self._mute_until:
            return
        self._transport.write(b"".join(self._held))
        self._held.clear()
        # A port's buffer is small, so that writing takes time.
        while self.link == "uart" and isinstance(self._transport, SimTransport) and self._transport.unsent > PORT_BYTES:
            self._watch()
            self._transport.spin(PORT_BYTES)

    def _watch(self) -> None:
        now = self.now()
        self._still = self._still + 1 if now == self._seen else 0
        self._seen = now
        if now > self._end or self._still > STILL_CALLS or time.monotonic() > self._wall_end:
            raise Hung(
                "deadline passed" if now > self._end else "the clock stands" if self._still else "takes for ever"
            )

    def _nothing(self, timeout: float) -> bytes:
        if self._gone == "vanished":
            raise LinkError(f"{self.name}: the device vanished (pulled out); plug it in, then connect again")
        if self._gone == "babble":
            self._lag += min(timeout, self.patience / 20)
            return self._rng.bytes(64)
        self._lag += timeout + 1 / CLOCK_HZ
        return b""

    def _wait(self, seconds: float, device_runs: bool) -> None:
        if device_runs and isinstance(self._transport, SimTransport):
            self._transport.spin(round(seconds * CLOCK_HZ) + 1)
            return
        self._lag += seconds + 1 / CLOCK_HZ
        if device_runs and isinstance(self._transport, GoldenTransport) and seconds >= self.patience:
            self._transport.device.poke()

    # Frames.

    def _spoil(self, direction: Any, number: int, frame: bytes) -> list[bytes]:
        to_device = direction is self._down
        header = frames.unpack_header(frame[:WORD_BYTES])
        assert header is not None, "only frames come here"
        if to_device:
            self.polls += bool(header.flags & Flag.POLL)
            self.syncs += header.type == Type.SYNC
        if self.hit and self.hit.to_device == to_device:
            self.superseded |= (header.ack - self.hit.header.ack) % SEQUENCES < WINDOW
            self.follower = self.follower or header
        here = self.passed[to_device]
        self.passed[to_device] += 1
        if not self._due or self._due[1] != to_device or here < self._due[2] or (self._due[3] and not header.words):
            return super()._spoil(direction, number, frame)
        kind = self._due[0]
        self.disarm()
        detail, pieces, place = "", [frame], len(frame)
        if kind in FRAME_KINDS:
            before = self.kinds, self.to_device, self.to_host
            self.kinds, self.to_device, self.to_host = (kind,), 1.0, 1.0
            pieces = super()._spoil(direction, number, frame)
            self.kinds, self.to_device, self.to_host = before
            detail = self.log[-1].detail
        elif kind == "split":
            pieces, place = self._split(to_device, frame)
            detail = f"after {place} of {len(frame)} bytes"
        elif kind == "second host":
            pieces = [frames.frame(Header(Type.SYNC, sequence=int(self._rng.integers(SEQUENCES)))), frame]
        else:
            detail = self._befall(kind)
        self.hit = Hit(kind, to_device, header, detail, place)
        return pieces

    def _split(self, to_device: bool, frame: bytes) -> tuple[list[bytes], int]:
        place = self._unit * int(self._rng.integers(1, len(frame) // self._unit)) if len(frame) > self._unit else 0
        if to_device:
            self._transport.write(frame[:place])
            self._wait(2 * self.patience, True)
            return [frame[place:]], place
        self._rest = (self.now() + 1.5 * self.patience, frame[place:])
        return [frame[:place]], place

    def _befall(self, kind: str) -> str:
        """Something happens to the peer as a whole."""
        if kind in ("stalled", "frozen"):
            seconds = float(self._rng.choice([0.5, 3, 30])) * self.patience * (1 + self._rng.random())
            self._mute_until, self._device_runs = self.now() + seconds, kind == "stalled"
            return f"for {seconds / self.patience:.1f} patiences"
        if kind == "power cycle":
            self._lag += self._transport.now()
            self._transport.close()
            self._transport = self._open()
            self._held.clear()
        else:
            self._gone = kind
        return ""


def harmless(injector: Injector) -> str:
    """Why nobody could notice; "": somebody should have."""
    hit, superseded, follower = injector.hit, injector.superseded, injector.follower
    if hit is None:
        return ""
    kind, header = hit.kind, hit.header
    lost = kind in ("drop", "truncate", "reorder", "split")
    if lost and header.type == Type.ACK and not header.flags and superseded:
        return "superseded"  # an acknowledgment that the next one repeated before it was missed
    if kind == "reorder" and header.type == Type.MESSAGE and follower and follower.type != Type.MESSAGE:
        return "no message overtook"  # only messages have an order
    if kind == "duplicate" and header.type in (Type.ACK, Type.STATUS):
        return "said twice"  # what these say holds as long as nothing newer is said
    if kind == "garbage" and header.type == Type.SYNC and hit.to_device:
        return "before the connection"  # which starts the device's counters
    if kind == "split" and hit.place < WORD_BYTES:
        return "waited out"  # nobody gives up a frame whose header has not come
    if kind in ("stalled", "frozen"):
        return "waited out"  # nothing was due meanwhile, or it came before anybody was impatient
    return ""


# Exchanges.


class Bench:
    """A device behind an injector, a layer for it, and the judge of what comes out."""

    def __init__(self, session: Session, folder: Path, say: Say = say) -> None:
        self.session, self.say = session, say
        self.link, self.rng = session.link, session.rng
        tokens = TOKENS.get(self.link, 2)
        self.case: Case = case(folder, int(self.rng.integers(1 << 31)), tokens=tokens, experts=2, used=1)
        self.x = activations.quantize(self.case.x)
        self.sums = self.case.sums
        self.outcomes: list[Outcome] = []
        self.early: list[bytes] = []
        """Messages that came before they were asked for."""
        self._told = 0.0
        self.injector = Injector(self.link, self.rng, say)
        self.device = Device(self.injector)
        self.unit = 1 if self.link == "uart" else WORD_BYTES
        self._statuses = 0
        self._last = self.look()

    def close(self) -> None:
        self.device.close()

    def look(self) -> dict[str, int]:
        """All that is counted."""
        self._statuses += 1
        status = self.device.link.status()
        counts = self.device.link.counts
        return {
            **{f"host: {name}": getattr(counts, name) for name in WATCHED},
            **{f"device: {name}": value for name, value in status._asdict().items()},
            "asked again": self.injector.polls - self._statuses,
            "connected again": self.injector.syncs,
        }

    def last(self) -> None:
        """What moves from now on counts."""
        self._last = self.look()

    def moved(self, after: dict[str, int], connects: int) -> str:
        """Which counters moved since the last look; the device's began anew if a connection did."""
        before = dict(self._last)
        if after["connected again"] != before["connected again"]:
            before |= {name: 0 for name in before if name.startswith("device")}
        for name in ("asked again", "connected again"):
            before[name] += connects
        return ", ".join(f"{name} {after[name] - before[name]}" for name in after if after[name] != before[name])

    def layer(self, store: Store | None = None) -> bool:
        """Run the layer; whether all numbers are right."""
        opened = contextlib.nullcontext(store) if store else Store(self.case.path)
        with opened as store:
            result = self.device.run_layer(self.case.layer, self.x, self.case.routes, store)
        asked = len(result.requests) * self.case.layer.matrix_bytes
        return (
            bool((result.sums == self.sums).all())
            and result.requests == self.case.requests
            and result.counters[Counter.REQUESTED_BYTES] == asked
            and all(each.holds for each in result.ledger.check())
        )

    def connect(self) -> bool:
        """Connect anew; whether the device says of itself what it said before."""
        self.early.clear()
        hello = self.device.hello
        self.device.reset()
        return self.device.hello == hello

    def settle(self, quiet: bool = True) -> bool:
        """Let what is still under way arrive; False if it is a message that nobody waits for."""
        self._statuses += 1
        self.device.link.status()
        return not quiet or self.device.link.receive(self.injector.patience / 4) is None

    def linger(self) -> dict[str, int]:
        """All that is counted, after a time in which everybody has missed what is missing; messages are kept."""
        link, end = self.device.link, self.injector.now() + LINGER * self.injector.patience
        while (left := end - self.injector.now()) > 0:
            message = link.receive(left)
            if message is not None:
                self.early.append(message)
        return self.look()

    def deadline(self) -> float:
        """Seconds that an exchange may take with everything that may go wrong: its own limit and connecting twice."""
        total = len(self.case.requests) * self.case.layer.matrix_bytes
        return self.device._limit(total) + 100 * self.injector.patience

    def judge(
        self,
        kind: str,
        exchange: Callable[[], bool],
        *,
        connects: int = 0,
        quiet: bool = True,
        again: Callable[[], bool] | None = None,
    ) -> Outcome | None:
        """Let the exchange go with the fault that is armed; None if the fault did not happen.

        ``connects``: connections that the exchange starts. ``quiet``: nothing may come after it. ``again``: what must
        work after a reported error; the exchange itself if None.
        """
        injector = self.injector
        begin = injector.now()
        injector.allow(self.deadline())
        evidence = ""
        over = False
        try:
            right = exchange()
            over = True
            right = self.settle(quiet) and right
            injector.disarm()
            after = self.look()
            hit = injector.hit
            evidence = self.moved(after, connects)
            if not evidence and not quiet:
                after = self.linger()
                evidence = self.moved(after, connects)
            self._last = after
            became = "wrong" if not right else "repaired" if evidence else "unseen"
            if became == "unseen" and (why := harmless(injector)):
                became, evidence = "harmless", why
        except (LinkError, DeviceError, StorageError) as error:
            became, evidence = "reported", str(error)
        except Hung as error:
            became, evidence = "hung", str(error)
        except Exception as error:
            became, evidence = "crashed", repr(error)
        hit, seconds = injector.hit, injector.now() - begin
        if hit is None:
            if evidence or became == "wrong":
                raise RuntimeError(f"{self.session.name}: without a fault: {became}: {evidence}")
            return None
        usable = None
        if became in ("reported", "crashed", "wrong"):
            # An error behind the exchange came from the link, and the device does not know that it has to connect.
            usable = self.works(again or ((lambda: self.connect() and exchange()) if over else exchange))
        if became == "reported" and (not evidence or "\n" in evidence):
            became = "crashed"  # an error, but not one line
        what = f"{'to device' if hit.to_device else 'to host'}: {hit.header.type.name}"
        outcome = Outcome(self.link, kind, f"{what} {hit.detail}", became, evidence, seconds, usable)
        self.add(outcome)
        return outcome

    def works(self, exchange: Callable[[], bool]) -> bool:
        """Whether the exchange goes right, without a fault, on the device as it was left."""
        self.injector.heal()
        self.injector.allow(self.deadline())
        try:
            right = exchange() and self.settle()
            self._last = self.look()
        except (Exception, Hung) as error:
            self.say(f"{self.session.name}: not usable afterwards: {error}")
            return False
        return right

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if outcome.became in FAILURES and self.session.direction is None:  # else they are what is hoped for
            self.say(f"{self.session.name}: fault {len(self.outcomes)}: {outcome}")
        elif time.monotonic() - self._told > PROGRESS_SECONDS:
            self._told = time.monotonic()
            self.say(f"{self.session.name}: {len(self.outcomes)} of {self.session.count} faults")

    def choose(self, number: int, frames_there: Sequence[int]) -> tuple[str, bool, int]:
        """Kind, direction and frame of the next fault: kinds and directions in turn; a layer's ends more often."""
        kinds = self.session.kinds or KINDS
        to_device = bool(number // len(kinds) % 2)
        if self.session.direction is not None:
            to_device = self.session.direction
        count = frames_there[to_device]
        edge = min(EDGE_FRAMES, count)
        place = int(
            self.rng.choice([self.rng.integers(count), self.rng.integers(edge), count - 1 - self.rng.integers(edge)])
        )
        return kinds[number % len(kinds)], to_device, place

    def arm(self, kind: str, to_device: bool, frame: int) -> None:
        # A beat of AXI-Stream that is not full is dropped, so most faults there are whole beats.
        odd = self.link == "axi-stream" and self.rng.random() < 0.25
        unit = 1 if odd else self.unit
        # Most frames are acknowledgments, and few of those matter.
        self.injector.arm(kind, to_device, frame, unit=unit, payload=self.rng.random() < 0.75)

    def control(self, exchange: Callable[[], bool]) -> tuple[int, int]:
        """Without a fault: all right and no counter moves; returns the frames from and to the device."""
        before = list(self.injector.passed)
        self.injector.allow(self.deadline())
        right = exchange() and self.settle()
        first, second = (now - then for now, then in zip(self.injector.passed, before, strict=True))
        after = self.look()
        if not right or self.moved(after, 0):
            raise RuntimeError(f"{self.session.name}: without a fault: right {right}, moved: {self.moved(after, 0)}")
        self._last = after
        return first, second


def layers(bench: Bench) -> None:
    """One fault in each layer or connection."""
    there = bench.control(bench.layer)
    number = tries = 0
    while number < bench.session.count and tries < 2 * bench.session.count:
        tries += 1
        connects = not bench.session.kinds and number % CONNECT_EVERY == CONNECT_EVERY - 1
        if connects:
            kind, to_device, _ = bench.choose(number // CONNECT_EVERY, there)
            bench.arm(kind, to_device, int(bench.rng.integers(2)))
            outcome = bench.judge(kind, bench.connect, connects=1, again=bench.layer)
        else:
            kind, to_device, frame = bench.choose(number, there)
            bench.arm(kind, to_device, frame)
            outcome = bench.judge(kind, bench.layer)
        if outcome is None:
            continue
        number += 1
        if outcome.became in ("hung", "crashed"):
            break


def peers(bench: Bench) -> None:
    """Something happens to the peer in the middle of each layer; on a UART, of two messages."""
    exchange, again = bench.layer, None
    if bench.link == "uart":
        work = Parts(bench)
        work.start()
        exchange, again = lambda: work.load(0) and work.read_counters(), lambda: work.load_all(1)
    there = bench.control(exchange)
    kinds = bench.session.kinds or PEER_KINDS
    for number in range(bench.session.count):
        kind = kinds[number % len(kinds)]
        to_device = kind == "second host" or bool(bench.rng.integers(2))
        bench.injector.arm(kind, to_device, int(bench.rng.integers(max(there[to_device] - 3, 1))))
        outcome = bench.judge(kind, exchange, again=again)
        if outcome and outcome.became in ("hung", "crashed"):
            break
        bench.injector.heal()


def storms(bench: Bench) -> None:
    """Many faults in each layer."""
    bench.control(bench.layer)
    injector = bench.injector
    while sum(outcome.faults for outcome in bench.outcomes) < bench.session.count:
        chance = STORM_CHANCE * float(bench.rng.choice([1, 1, 3, 10]))
        injector.heal()
        injector.to_device = injector.to_host = chance
        injector._unit = bench.unit
        begin, before = injector.now(), len(injector.log)
        injector.allow(bench.deadline())
        usable = None
        try:
            became, evidence = ("repaired" if bench.layer() else "wrong"), ""
        except (LinkError, DeviceError, StorageError) as error:
            became, evidence = "reported", str(error)
        except Hung as error:
            became, evidence = "hung", str(error)
        faults, seconds = len(injector.log) - before, injector.now() - begin
        if became != "hung":
            usable = bench.works(bench.layer)
        bench.add(Outcome(bench.link, f"storm {chance:.0%}", "", became, evidence, seconds, usable, faults))
        if became == "hung":
            break


# Over the UART: the parts of a layer one by one, since a whole one takes seconds.


@dataclass
class Parts:
    """A layer taken apart into exchanges, each of which says whether its numbers were right."""

    bench: Bench
    counters: bytes = b""

    def start(self) -> bool:
        self._send(messages.config(self.bench.case.layer))
        return True

    def load(self, token: int) -> bool:
        """Right or not shows in the outputs."""
        x = self.bench.x
        mantissas = x.mantissas[token, 0].astype("<i2").tobytes()
        self._send(messages.load_x(token, 0, int(x.exponents[token, 0]), mantissas))
        return True

    def load_all(self, count: int) -> bool:
        """Those vectors, on a new connection."""
        return self.bench.connect() and self.start() and all(self.load(token) for token in range(count))

    def read_counters(self) -> bool:
        """Whether they are what they were; nothing runs that could change them."""
        self._send(messages.bare(Message.READ_COUNTERS))
        message = self._receive(Message.COUNTERS)
        self.counters = self.counters or message
        return message == self.counters

    def routes(self) -> bool:
        self._send(messages.routes(len(self.bench.sums), self.bench.case.routes))
        return True

    def weights(self, request: tuple[int, int], store: Store) -> bool:
        """Answer a request; whether it is this one."""
        message = self._receive(Message.FETCH)
        asked = int.from_bytes(message[2:8], "little"), int.from_bytes(message[8:12], "little")
        self._send(messages.weights(b"") + store.read(*asked))
        return asked == request

    def outputs(self, tokens: Sequence[int]) -> bool:
        right = True
        for token in tokens:
            message = self._receive(Message.OUTPUT)
            sums = np.frombuffer(message, "<i8", -1, messages.HEADER_BYTES)
            right &= message[1] == token and np.array_equal(sums, self.bench.sums[token])
        return right

    def done(self) -> bool:
        self._receive(Message.DONE)
        return True

    def _send(self, message: bytes) -> None:
        self.bench.device.link.send(message)
        self.bench.device.link.flush(self.bench.deadline())

    def _receive(self, kind: Message) -> bytes:
        bench = self.bench
        message = bench.early.pop(0) if bench.early else bench.device.link.receive(bench.deadline())
        if message is None or message[0] != kind:
            got = "nothing" if message is None else message[:WORD_BYTES].hex()
            raise DeviceError(f"{bench.device.name}: got {got} instead of {kind.name}; connect again")
        return message


def parts(bench: Bench) -> None:
    """One fault in each message of a layer that is run message by message."""
    while len(bench.outcomes) < bench.session.count:
        first = len(bench.outcomes)
        if not parts_of_a_layer(bench):
            # Vectors that were damaged were not seen in outputs: those faults do not count.
            del bench.outcomes[first:-1]
        if bench.outcomes[-1].became in FAILURES:
            break


def parts_of_a_layer(bench: Bench) -> bool:
    """Whether all outputs were seen."""
    tokens = len(bench.sums)
    work = Parts(bench)

    def fault(exchange: Callable[[], bool], there: Sequence[int], loaded: int, **more: Any) -> bool:
        """With the next fault; False if the layer cannot go on."""
        kind, to_device, frame = bench.choose(len(bench.outcomes), there)
        bench.arm(kind, to_device, frame)
        outcome = bench.judge(kind, exchange, again=lambda: work.load_all(loaded), **more)
        return outcome is None or outcome.became in ("repaired", "harmless")

    bench.connect()
    bench.last()
    bench.control(work.start)
    loads, reads = bench.control(lambda: work.load(0)), bench.control(work.read_counters)
    for token in range(tokens):
        # After an error the vectors so far are loaded again, so that the layer goes on.
        fault(lambda token=token: work.load(token), loads, token + 1)
        fault(work.read_counters, reads, token + 1)
        if bench.outcomes and bench.outcomes[-1].became in FAILURES:
            return False
    with Store(bench.case.path) as store:
        requests = bench.case.requests
        if not fault(work.routes, loads, tokens, quiet=False):
            return False
        for request in requests:
            frames_there = -(-request[1] // bench.device.params.frame_bytes)
            if not fault(
                lambda request=request: work.weights(request, store),
                (frames_there // 2, frames_there),
                tokens,
                quiet=False,
            ):
                return False
    for start in range(0, tokens, OUTPUTS_A_FAULT):
        some = range(start, min(start + OUTPUTS_A_FAULT, tokens))
        if not fault(lambda some=some: work.outputs(some), (2 * len(some), len(some)), tokens, quiet=False):
            return False
    return fault(work.done, (1, 1), tokens)


def connections(bench: Bench) -> None:
    """A fault in each start of a connection."""
    work = Parts(bench)
    tries = 0
    while len(bench.outcomes) < bench.session.count and tries < 2 * bench.session.count:
        tries += 1
        kind, to_device, _ = bench.choose(tries, (1, 1))
        bench.arm(kind, to_device, int(bench.rng.integers(2)))
        outcome = bench.judge(kind, bench.connect, connects=1, again=lambda: work.load_all(1))
        if outcome and outcome.became in ("hung", "crashed"):
            break


# Storage.


def storage(bench: Bench) -> None:
    """One fault of the storage in each layer; every second with direct reads, where the system has them."""
    bench.control(bench.layer)
    kinds = bench.session.kinds or STORAGE_KINDS
    for number in range(bench.session.count):
        kind = kinds[number % len(kinds)]
        store = FaultyStore(bench, kind, direct=bool(number // len(kinds) % 2))
        begin = time.monotonic()
        bench.injector.allow(bench.deadline())
        usable = None
        try:
            with store:
                right = bench.layer(store)
            became = "wrong" if not right else "repaired" if store.calls > store.counts.reads else "unseen"
            evidence = f"{store.calls} reads for {store.counts.reads} pieces"
        except (LinkError, DeviceError, StorageError) as error:
            became, evidence = "reported", str(error).replace(str(store.copy), "FILE")
            usable = bench.works(bench.layer)
        except Hung as error:
            became, evidence = "hung", str(error)
        except Exception as error:
            became, evidence = "crashed", repr(error)
        finally:
            store.release()
        if not store.done:
            raise RuntimeError(f"{bench.session.name}: {kind}: read {store.at} never came")
        bench.injector.heal()
        how = "direct" if store.direct else "cached"
        what = f"{how}, {'ahead' if store.ahead else 'at once'}, read {store.at}"
        bench.add(Outcome("storage", kind, what, became, evidence, time.monotonic() - begin, usable))
        if became == "hung":
            break


class FaultyStore(Store):
    """A store on a copy of the bench's file, one of whose reads goes wrong."""

    def __init__(self, bench: Bench, kind: str, *, direct: bool) -> None:
        self.kind, self.at = kind, int(bench.rng.integers(len(bench.case.requests)))
        self.calls, self.done = 0, False
        self._end = threading.Event()
        self._rng = bench.rng
        self._pieces = int(bench.rng.integers(2, 9))
        self.copy = bench.case.path.with_suffix(".copy")
        shutil.copyfile(bench.case.path, self.copy)
        os.utime(self.copy, (0, 0))  # so that a change shows, however coarse the system's clock is
        ahead = kind == "hang" or bool(bench.rng.integers(2))
        super().__init__(self.copy, direct=direct, ahead=ahead, pread=self._faulty)

    def take(self, timeout: float = TAKE_SECONDS) -> memoryview:
        return super().take(timeout)

    def release(self) -> None:
        self._end.set()

    def _faulty(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        here = self.calls
        self.calls += 1
        if here < self.at or (self.done and self.kind != "short reads"):
            return os.preadv(fd, buffers, offset)
        kind, self.done = self.kind, True
        size = len(buffers[0])
        if kind in ("short read", "short reads"):
            share = self._rng.random() if kind == "short read" else 1 / self._pieces
            short = max(int(share * size), BLOCK_BYTES)
            # The system reads whole blocks where reads are direct.
            return os.preadv(fd, [buffers[0][: short - short % BLOCK_BYTES if self.direct else short]], offset)
        if kind == "EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if kind == "end of file":
            return 0
        if kind == "hang":
            self._end.wait(100 * TAKE_SECONDS)
        elif kind == "truncated":
            os.truncate(self.copy, offset + int(self._rng.integers(size)))
        elif kind == "rewritten":
            self.copy.write_bytes(self._rng.bytes(self.file_bytes))
        elif kind == "replaced":
            other = self.copy.with_suffix(".other")
            other.write_bytes(self._rng.bytes(self.file_bytes))
            other.replace(self.copy)
        elif kind == "removed":
            self.copy.unlink()
        return os.preadv(fd, buffers, offset)


# The campaign.

FAILURES = ("unseen", "wrong", "hung", "crashed")
BECAME = ("repaired", "reported", "harmless", *FAILURES)
RUN = {
    "layers": layers,
    "parts": parts,
    "connections": connections,
    "peers": peers,
    "storms": storms,
    "storage": storage,
}
"""By what a session's name says."""

PLAN = {
    # Faults in each session, sessions; the longest first.
    "uart:parts": (100, 6),
    "uart:storms": (15, 1),
    "uart:peers": (14, 1),
    "uart:connections": (40, 2),
    "axi-stream:layers": (75, 20),
    "axi-stream:peers": (35, 4),
    "axi-stream:storage": (54, 3),
    "axi-stream:storms": (300, 2),
}
BROKEN_COUNT = 24


def sessions(seed: int, scale: float, only: str = "") -> list[Session]:
    """All that a campaign runs; ``scale`` shortens each kind, by whole sessions first."""
    made = []
    for name, (count, number) in PLAN.items():
        faults = round(count * number * scale)
        for n in range(number):
            share = min(count, faults - n * count)
            if share > 0:
                made.append(Session(f"{name}:{n}", share, seed))
    return [session for session in made if session.name.startswith(only)]


def run(session: Session) -> list[Outcome]:
    """All faults of a session, the same each time."""
    with tempfile.TemporaryDirectory() as folder, patch("os.urandom", session.rng.bytes):
        bench = Bench(session, Path(folder))
        try:
            RUN[session.what](bench)
        finally:
            bench.close()
        return bench.outcomes


def broken_receiver(side: str, seed: int) -> dict[str, Any]:
    """What the campaign finds on a copy of the sources whose receiver on this side does not check payloads."""
    say(f"{side} without its check: copying the sources")
    copy = ROOT / "build" / "faults" / side
    for folder in COPIED:
        shutil.rmtree(copy / folder, ignore_errors=True)
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    # Devices are found by their sources, so both trees may share what was built.
    cache = copy / "build" / "engines"
    if not cache.exists():
        cache.parent.mkdir(exist_ok=True)
        (ROOT / "build" / "engines").mkdir(parents=True, exist_ok=True)
        cache.symlink_to(ROOT / "build" / "engines")
    file, old, new = BROKEN[side]
    source = (copy / file).read_text()
    if source.count(old) != 1:
        raise RuntimeError(f"{file} has {old!r} {source.count(old)} times, not once")
    (copy / file).write_text(source.replace(old, new))
    command = [sys.executable, "-m", "tests.faults", "--seed", str(seed), "--receiver", side]
    process = subprocess.run(command, cwd=copy, stdout=subprocess.PIPE, text=True, timeout=900)
    if process.returncode:
        raise RuntimeError(f"{side} without its check: the campaign ended with {process.returncode}")
    found = json.loads(process.stdout.splitlines()[-1])
    say(f"{side} without its check: {found.get('wrong', 0)} of {found['faults']} faults gave wrong numbers")
    return found


def receiver(side: str, seed: int) -> dict[str, Any]:
    """Flipped bits in what this side receives, counted by what became of them."""
    quiet = lambda text: print(f"  {text}", file=sys.stderr, flush=True)  # noqa: E731
    session = Session("axi-stream:layers:receiver", BROKEN_COUNT, seed, ("flip", "burst"), side == "device")
    with tempfile.TemporaryDirectory() as folder, patch("os.urandom", session.rng.bytes):
        bench = Bench(session, Path(folder), quiet)
        try:
            layers(bench)
        finally:
            bench.close()
    return {"receiver": side, "faults": len(bench.outcomes), **Tally(outcome.became for outcome in bench.outcomes)}


def row(link: str, kind: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """A line of the table."""
    became = Tally(outcome.became for outcome in outcomes)
    usable = [outcome.usable for outcome in outcomes if outcome.became == "reported"]
    return {
        "link": link,
        "kind": kind,
        "faults": sum(outcome.faults for outcome in outcomes),
        "detected": became["repaired"] + became["reported"],
        **{name: became[name] for name in BECAME},
        "usable_afterwards": sum(map(bool, usable)),
        "seconds_max": max((outcome.seconds for outcome in outcomes), default=0.0),
    }


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The table: a line for each link and kind."""
    keys = dict.fromkeys((outcome.link, outcome.kind) for outcome in outcomes)
    return [row(*key, [outcome for outcome in outcomes if (outcome.link, outcome.kind) == key]) for key in sorted(keys)]


def figures(outcomes: Sequence[Outcome], receivers: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The report; ``ok`` says whether the campaign passed, but for the number of faults."""
    single = [outcome for outcome in outcomes if not outcome.kind.startswith("storm")]
    storm = [outcome for outcome in outcomes if outcome.kind.startswith("storm")]
    total = row("all", "", single)
    failed = sum(outcome.became in FAILURES for outcome in outcomes)
    stuck = sum(outcome.usable is False for outcome in outcomes)
    caught = all(each.get("wrong", 0) for each in receivers)
    errors = Tally(outcome.evidence for outcome in outcomes if outcome.became == "reported")
    return {
        **more,
        "ok": not failed and not stuck and caught,
        "total": total,
        "rows": rows(single),
        "storms": rows(storm),
        "receivers": list(receivers),
        "harmless": dict(Tally(outcome.evidence for outcome in outcomes if outcome.became == "harmless")),
        "reported": dict(errors.most_common(40)),
        "failures": [
            outcome._asdict() for outcome in outcomes if outcome.became in FAILURES or outcome.usable is False
        ],
        "provenance": {
            "rows": "counted: one fault at a time; detected = repaired + reported, harmless ones could not be detected",
            "storms": "counted: layers by what became of them; faults in all of them",
            "receivers": "counted: flipped bits in payloads and headers of frames to a receiver without its payload "
            "check, on the Verilated device",
            "seconds_max": "links: simulated seconds at 100 MHz; storage: seconds on this machine's clock",
        },
    }


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    names = ("faults", "detected", *BECAME)

    def line(each: dict[str, Any]) -> str:
        counts = "".join(f"{each[name] or '-':>10}" for name in names)
        usable = f"{each['usable_afterwards']} of {each['reported']}" if each["reported"] else "-"
        return f"{each['link']:<11}{each['kind']:<13}{counts}{usable:>13}{each['seconds_max']:>10.4f}"

    head = f"{'link':<11}{'kind':<13}" + "".join(f"{name:>10}" for name in names) + f"{'usable':>13}{'s max':>10}"
    lines = [head, *map(line, report["rows"]), line(report["total"])]
    if report["storms"]:
        lines += ["", "storms (columns from 'repaired' on count layers)", *map(line, report["storms"])]
    if report["harmless"]:
        why = ", ".join(f"{number} {reason}" for reason, number in report["harmless"].items())
        lines += ["", f"harmless: {why}"]
    for each in report["receivers"]:
        wrong = each.get("wrong", 0)
        verdict = "caught" if wrong else "NOT CAUGHT"
        unseen = each.get("unseen", 0)
        found = f"{wrong} of {each['faults']} faults gave wrong numbers, {unseen} nobody noticed: {verdict}"
        lines.append(f"{each['receiver']} without its payload check: {found}")
    return "\n".join(lines)


def campaign(plan: Sequence[Session], processes: int) -> Iterator[tuple[Session, list[Outcome]]]:
    """Run sessions, several at a time; each as it ends."""
    with ProcessPoolExecutor(processes) as pool:
        futures = {pool.submit(run, session): session for session in plan}
        for future in as_completed(futures):
            yield futures[future], future.result()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the faults (below 1 it cannot pass)")
    parser.add_argument("--only", default="", metavar="NAME", help="only sessions whose name begins so")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--record", action="store_true", help="write sim/results/faults.json")
    parser.add_argument("--receiver", choices=BROKEN, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.receiver:
        print(json.dumps(receiver(args.receiver, args.seed)))
        return 0
    try:
        return fault(args)
    except RuntimeError as error:
        print(f"make faults: error: {error}", file=sys.stderr)
        return 1


def fault(args: argparse.Namespace) -> int:
    """The whole campaign; 0 if it passed."""
    plan = sessions(args.seed, args.scale, args.only)
    if not plan:
        raise RuntimeError(f"no session's name begins with {args.only!r}; names begin with {', '.join(PLAN)}")
    faults = sum(each.count for each in plan)
    say(f"seed {args.seed}: {faults} faults in {len(plan)} sessions, {args.processes} at a time")
    # Built before the sessions start, or each of them would build its own.
    for link in dict.fromkeys(each.link for each in plan):
        open_link(link).close()
    receivers = [] if args.only else [broken_receiver(side, args.seed) for side in BROKEN]
    outcomes: list[Outcome] = []
    for session, found in campaign(plan, args.processes):
        outcomes += found
        tally = ", ".join(f"{number} {name}" for name, number in Tally(each.became for each in found).items())
        say(f"{session.name}: done: {tally}; {sum(each.faults for each in outcomes)} faults so far")
    report = figures(outcomes, receivers, seed=args.seed, sessions=[dataclasses.asdict(each) for each in plan])
    print(table(report))
    noticeable = report["total"]["faults"] - report["total"]["harmless"]
    enough = noticeable >= LEAST_FAULTS
    if not enough:
        print(f"{noticeable} faults that somebody could notice are fewer than {LEAST_FAULTS}: no verdict")
    path = ROOT / "build" / "faults" / "report.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    if args.record:
        path = record.write("faults", "make faults RECORD=1", report, record=True)
    ok = report["ok"] and enough
    print(f"{'passed' if ok else 'FAILED'} after {time.monotonic() - START:.0f} s; written to {path}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
