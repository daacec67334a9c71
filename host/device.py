"""A device as the host uses it: layers in, outputs out, and an account of every byte.

``Device.open`` takes what :func:`host.transports.open_transport` takes; ``Device.run_layer`` runs a layer of experts
whose bytes a :class:`host.storage.Store` gives. The golden model of a layer is :func:`sim.golden.layer.run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from host.link import Link, LinkCounts, LinkError, Transport
from host.storage import ReadCounts, StorageError, Store
from host.transports import FileTransport, open_transport
from hw.formats import messages
from hw.formats.arithmetic import FRACTION_BITS
from hw.formats.frames import WORD_BYTES
from hw.formats.messages import WEIGHT_FRACTION_BITS, Counter, Error, Hello, Layer, Message
from hw.formats.params import Params
from sim.golden import layer as golden
from sim.golden.activations import Activations, quantize
from sim.golden.layer import Route

FRAME_OVERHEAD = 2 * WORD_BYTES
"""Header and trailer of a frame with payload."""
PATIENCES = 100
"""What is asked while no layer runs is answered within so many times the transport's patience."""
READ_SECONDS = 1.0
"""How long reads that nobody wants any more are waited for."""
SLACK = 10
"""A layer may take so many times as long as its bytes need on the link."""
MATRICES = 3
_MOST = (Counter.MATRICES_HELD, Counter.BLOCKS_HELD, Counter.ROWS_HELD)
"""Counters that tell a maximum."""

ERRORS = {
    Error.LENGTH: "an answer had more or fewer bytes than its matrix",
    Error.COMMAND: "the configuration is impossible",
    Error.MESSAGE: "a message is unknown, of a wrong length or out of turn",
    Error.CONFIG: "the configuration is beyond the bitstream's parameters",
    Error.ROUTE: "a route's token or expert is out of range, its weight above 1, or it comes twice",
    Error.OVERFLOW: "a sum left Q24.40: the inputs are too large",
    Error.SCALE: "a block's scale is NaN or infinite: the model file is damaged",
    Error.MEMORY: "the board's memory failed",
}
"""What each bit means, in words."""

Progress = Callable[[int, int], None]


class DeviceError(RuntimeError):
    """A device that cannot do what it should. One line: which device, what is wrong, what to do."""


class Equality(NamedTuple):
    """Two counts of the same bytes."""

    text: str
    left: int
    right: int

    @property
    def holds(self) -> bool:
        return self.left == self.right


@dataclass(frozen=True)
class Ledger:
    """Where the bytes of a layer went. ``+`` adds those of several.

    Attributes
    ----------
    requested, useful, drained, moved, memory
        As the device counted: matrices asked for; of those, blocks that a token wanted, and others; bytes of answers
        over the link with the padding of their last beats; bytes that came from the board's own memory.
    answered, padding
        As the driver counted: bytes of the answers it gave, and what fills up their last beats.
    stored
        As the driver expects: bytes of those experts of the layer that lie in the board's memory.
    loaded
        Bytes sent there to be kept.
    payload, framing
        Of all messages to the device; of headers, trailers and padding of the frames that carried them.
    link_written, link_read, link_resent
        Bytes to and from the transport; bytes of frames that had to be sent again.
    storage_requested, storage_spilled, storage_read, storage_cached, cache_hits, cache_misses
        As :class:`host.storage.ReadCounts`; 0 where nothing was read, or there is no expert cache.
    os_rchar, os_read_bytes
        What the process read according to the system, and how much of it from a disk; None where the system does not
        say. ``os_rchar`` is everything that the process reads, a board's port included.
    os_is_storage
        Nothing but the store read meanwhile: the transport works inside this process.
    """

    requested: int = 0
    useful: int = 0
    drained: int = 0
    moved: int = 0
    memory: int = 0
    answered: int = 0
    padding: int = 0
    stored: int = 0
    loaded: int = 0
    payload: int = 0
    framing: int = 0
    link_written: int = 0
    link_read: int = 0
    link_resent: int = 0
    storage_requested: int = 0
    storage_spilled: int = 0
    storage_read: int = 0
    storage_cached: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    os_rchar: int | None = 0
    os_read_bytes: int | None = 0
    os_is_storage: bool = True

    def __add__(self, other: Ledger) -> Ledger:
        sums: dict[str, Any] = {"os_is_storage": self.os_is_storage and other.os_is_storage}
        for name in (each.name for each in dataclasses.fields(self) if each.name not in sums):
            mine, theirs = getattr(self, name), getattr(other, name)
            sums[name] = None if mine is None or theirs is None else mine + theirs
        return Ledger(**sums)

    def check(self) -> list[Equality]:
        """What must be equal, with both sides."""
        rows = [
            Equality("requested = answered + stored", self.requested, self.answered + self.stored),
            Equality("requested = useful + drained", self.requested, self.useful + self.drained),
            Equality("moved = answered + padding", self.moved, self.answered + self.padding),
            Equality("memory = stored", self.memory, self.stored),
            Equality(
                "storage requested + cached = answered + loaded",
                self.storage_requested + self.storage_cached,
                self.answered + self.loaded,
            ),
            Equality(
                "storage read = requested + spilled", self.storage_read, self.storage_requested + self.storage_spilled
            ),
            Equality(
                "written = payload + framing + resent",
                self.link_written,
                self.payload + self.framing + self.link_resent,
            ),
        ]
        if self.os_rchar is not None and self.os_is_storage:
            # A bound: other threads of the process read what is theirs (modules, pipes) meanwhile.
            seen = min(self.os_rchar, self.storage_read)
            rows.append(Equality("read by the process, at least = storage read", seen, self.storage_read))
        return rows


@dataclass(frozen=True)
class LayerResult:
    """What a layer gave.

    Attributes
    ----------
    sums
        ``(tokens, width)`` int64 in Q24.40.
    counters
        As the hardware counted, over all parts of the batch.
    requests
        ``(offset, length)`` in the order of asking.
    ledger
        See :class:`Ledger`.
    seconds
        On the transport's clock, from the first message to the counters.
    """

    sums: NDArray[np.int64]
    counters: dict[Counter, int]
    requests: list[tuple[int, int]]
    ledger: Ledger
    seconds: float

    @property
    def y(self) -> NDArray[np.float32]:
        """The outputs as real numbers."""
        return np.ldexp(self.sums.astype(np.float64), -FRACTION_BITS).astype(np.float32)


class Device:
    """A connected device; a context manager that closes it. Not for use by several threads.

    Whatever ends a call early, Ctrl-C too, the device is connected anew, which resets it: the next call works. Experts
    in the board's memory stay there.

    Parameters
    ----------
    transport
        See :class:`host.link.Transport`; the device's own from now on, closed also if this fails.

    Attributes
    ----------
    hello, params
        What the device said of itself.
    link, transport
        What carries messages and bytes; for tests of them.
    memory_bytes, memory_used
        Of the board's memory (0: it has none); of that, from its start, what holds experts or did.

    Raises
    ------
    LinkError
        Nothing that speaks as this driver does answers.
    """

    def __init__(self, transport: Transport) -> None:
        self.name = transport.name
        self.link = Link(transport)
        self.transport = transport
        self._stale = False
        self._homes: dict[tuple[int, ...], dict[int, int]] = {}
        self._free: dict[int, list[int]] = {}  # addresses below `memory_used` that hold no expert, by size
        self.memory_used = 0
        self._payload = self._framing = self._message_frames = 0
        self._unread = 0  # reads that wait in the store
        try:
            self.hello: Hello = self.link.connect()
        except BaseException:
            self.link.close()
            raise

    @classmethod
    def open(cls, spec: str | Transport) -> Device:
        """Open and connect; ``spec`` as for :func:`host.transports.open_transport`, SpecError for one that is none."""
        return cls(open_transport(spec) if isinstance(spec, str) else spec)

    @property
    def params(self) -> Params:
        return self.hello.params

    @property
    def memory_bytes(self) -> int:
        return 1 << self.params.memory_bits if self.params.memory_bits else 0

    def close(self) -> None:
        """Close the link and its transport."""
        self.link.close()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run_layer(
        self,
        layer: Layer,
        x: ArrayLike | Activations,
        routes: Iterable[tuple[int, int, int]],
        store: Store,
        *,
        deadline: float | None = None,
        progress: Progress | None = None,
    ) -> LayerResult:
        """Run a layer on a batch of any size; what is beyond ``max_batch`` runs in parts.

        Parameters
        ----------
        layer
            Where its experts lie in the store's file.
        x
            ``(tokens, width)`` real numbers, or those quantised.
        routes
            ``(token, expert, weight)``, the weight in Q1.16.
        store
            Gives the bytes that the device asks for; no read may wait in it.
        deadline
            Seconds on the transport's clock for all of it; None: ten times what the bytes need, and more.
        progress
            Called with (bytes answered, bytes in all) after each answer.

        Raises
        ------
        ValueError
            For vectors or routes that are none of this layer's.
        DeviceError
            The layer does not fit the device, the device reports an error, or it is not done in time.
        LinkError, StorageError
            As they come.
        """
        x, checked = self.check(layer, x, routes)
        tokens = len(x.exponents)
        size = self.params.max_batch
        parts = []
        for first in range(0, tokens, size):
            mine = [route for route in checked if first <= route.token < first + size]
            some = Activations(x.mantissas[first : first + size], x.exponents[first : first + size])
            shifted = [route._replace(token=route.token - first) for route in mine]
            parts.append(_Part(layer, some, shifted, self._at(layer)))
        total = sum(length for part in parts for _, length in part.expected)
        begin = self.transport.now()
        limit = self._limit(total) if deadline is None else deadline
        run = _Run(begin + limit, limit, total, progress)
        with self._usable_afterwards(store):
            results = [self._run_part(part, run, store) for part in parts]
        return LayerResult(
            np.concatenate([result.sums for result in results]),
            _sum_counters([result.counters for result in results]),
            [request for result in results for request in result.requests],
            functools.reduce(operator.add, (result.ledger for result in results)),
            self.transport.now() - begin,
        )

    def load_experts(
        self, layer: Layer, experts: Iterable[int], store: Store, *, progress: Progress | None = None
    ) -> Ledger:
        """Keep these experts of the layer in the board's memory; from then on ``run_layer`` has them read there.

        All layers loaded are of one model file. Returns where the bytes went. DeviceError where the board has no memory
        or it is full, LinkError and StorageError as they come: what was loaded before stays.
        """
        self.check_fits(layer)
        here = self._homes.setdefault(_key(layer), {})
        wanted = [expert for expert in dict.fromkeys(experts) if expert not in here]
        for expert in wanted:
            if not 0 <= expert < layer.experts:
                raise ValueError(f"expert must be in 0..{layer.experts - 1}, not {expert}")
        size = MATRICES * layer.matrix_bytes
        free = self._free.setdefault(size, [])
        room = self.memory_bytes - self.memory_used + len(free) * size
        if len(wanted) * size > room:
            raise DeviceError(
                f"{self.name}: {len(wanted)} experts need {len(wanted) * size:,} bytes of the board's memory, "
                f"{room:,} are free: load {max(room // size, 0)} at most"
            )
        total = len(wanted) * size
        with self._usable_afterwards(store):
            before = _Snapshot.take(self.link.counts, store.counts)
            self._payload = self._framing = self._message_frames = 0
            for count, expert in enumerate(wanted):
                address = free[-1] if free else self.memory_used
                for number, offset in enumerate(layer.offsets):
                    data = store.read(offset + expert * layer.matrix_bytes, layer.matrix_bytes)
                    self._send(messages.store(address + number * layer.matrix_bytes, b""), data)
                    self._flush(self.transport.now() + self._limit(layer.matrix_bytes))
                    del data
                here[expert] = address
                if free:
                    free.pop()
                else:
                    self.memory_used += size
                if progress:
                    progress((count + 1) * size, total)
            self._read_counters()  # an error in between would have come before
            after = _Snapshot.take(self.link.counts, store.counts)
            return self._ledger(before, after, dict.fromkeys(Counter, 0), loaded=total)

    def unload_experts(self, layer: Layer, experts: Iterable[int]) -> None:
        """Keep these no longer; others of the same size may be loaded in their place."""
        here = self._homes.get(_key(layer), {})
        for expert in experts:
            if expert in here:
                self._free.setdefault(MATRICES * layer.matrix_bytes, []).append(here.pop(expert))

    def loaded(self, layer: Layer) -> frozenset[int]:
        """The layer's experts that lie in the board's memory."""
        return frozenset(self._at(layer))

    def read_counters(self) -> dict[Counter, int]:
        """The engine's counters of the layer run last."""
        with self._usable_afterwards():
            return self._read_counters()

    def reset(self) -> None:
        """Connect anew, which resets the engine. LinkError if that fails."""
        self._stale = True
        self.hello = self.link.connect()
        self._stale = False

    def check(
        self, layer: Layer, x: ArrayLike | Activations, routes: Iterable[tuple[int, int, int]]
    ) -> tuple[Activations, list[Route]]:
        """What ``run_layer`` would run; ValueError and DeviceError as it raises them before anything is sent."""
        self.check_fits(layer)
        shape = x.mantissas.shape if isinstance(x, Activations) else np.shape(x)
        tokens = shape[0] if shape else 0
        if not tokens or shape not in ((tokens, layer.width), (tokens, layer.width // 256, 256)):
            raise ValueError(f"x must be tokens x {layer.width}, not of shape {shape}")
        return x if isinstance(x, Activations) else quantize(x), _checked(layer, tokens, routes)

    def check_fits(self, layer: Layer) -> None:
        """DeviceError if the device cannot hold a layer of this shape."""
        params = self.params
        for what, parameter, wanted in (
            ("vectors up to {:,}", "max_width", layer.width),
            ("experts up to {:,} wide", "max_expert_width", layer.expert_width),
            ("up to {:,} experts a layer", "max_experts", layer.experts),
        ):
            available = getattr(params, parameter)
            if wanted > available:
                raise DeviceError(
                    f"{self.name}: this bitstream holds {what.format(available)}, the model needs {wanted:,}: "
                    f"load one built with {parameter}={wanted}"
                )
        if not 1 <= layer.outstanding <= messages.MAX_OUTSTANDING:
            raise ValueError(f"outstanding must be in 1..{messages.MAX_OUTSTANDING}, not {layer.outstanding}")

    def _at(self, layer: Layer) -> dict[int, int]:
        """The layer's experts that lie in the board's memory, and where."""
        return self._homes.get(_key(layer), {})

    def _limit(self, count: int) -> float:
        """Seconds that so many bytes may take: many times what they need."""
        # Patience is what two full frames take there and back, at least.
        patience = self.transport.patience
        return patience * (PATIENCES + SLACK * count / (2 * self.params.frame_bytes))

    @contextlib.contextmanager
    def _usable_afterwards(self, store: Store | None = None) -> Iterator[None]:
        if self._stale:
            self.reset()
        try:
            yield
        except BaseException as error:
            # An engine in the middle of something, a frame half written, a read under way: none of it may be left.
            self._stale = True
            if store is not None:
                self._forget_reads(store)
            if not isinstance(error, LinkError):  # it has tried long enough; the next call connects
                with contextlib.suppress(LinkError):
                    self.reset()
            raise

    def _forget_reads(self, store: Store) -> None:
        """Leave no read in the store; those that its thread is at end first, so that they are nobody else's."""
        end = time.monotonic() + READ_SECONDS
        with contextlib.suppress(StorageError):
            while store.ahead and self._unread and time.monotonic() < end:
                self._unread -= 1
                with contextlib.suppress(StorageError):
                    store.take(READ_SECONDS)
            store.clear()
        self._unread = 0

    def _run_part(self, part: _Part, run: _Run, store: Store) -> LayerResult:
        layer, link_bytes = part.layer, self.params.link_bytes
        before = _Snapshot.take(self.link.counts, store.counts)
        begin = self.transport.now()
        self._payload = self._framing = self._message_frames = 0
        store.announce(part.expected)
        for message in part.messages():
            self._send(message)
        sums = np.zeros((part.batch, layer.width), np.int64)
        outputs: set[int] = set()
        requests: list[tuple[int, int]] = []
        answers: list[int] = []
        while True:
            behind = len(answers) < len(requests)
            message = self._receive(run.end, wait=not behind, run=run)
            if message is None:
                # The answer before leaves first; the store reads this one meanwhile.
                self._flush(run.end, run)
                data = store.take()
                self._unread -= 1
                self._send(messages.weights(b""), data)
                answers.append(len(data))
                run.answered(len(data))
                del data  # so that the store can use its buffer again once the link has done with it
                continue
            kind = message[0]
            if kind == Message.FETCH:
                requests.append(_request(message))
                place = len(requests) - 1
                if part.expected[place : place + 1] != requests[place:]:
                    self._wrong(message, f"request {len(requests)} of this layer")
                store.submit(*requests[-1])
                self._unread += 1
            elif kind == Message.OUTPUT:
                token, width = struct.unpack_from("<BH", message, 1)
                if width != layer.width or token >= part.batch or token in outputs:
                    self._wrong(message, "outputs of this layer")
                sums[token] = np.frombuffer(message, "<i8", width, messages.HEADER_BYTES)
                outputs.add(token)
            elif kind == Message.DONE and len(outputs) == part.batch and len(answers) == len(part.expected):
                break
            else:
                self._wrong(message, "what a layer brings")
        counters = self._read_counters()
        padding = sum(-answer % link_bytes for answer in answers)
        counts = {"answered": sum(answers), "padding": padding, "stored": part.stored}
        ledger = self._ledger(before, _Snapshot.take(self.link.counts, store.counts), counters, **counts)
        return LayerResult(sums, counters, requests, ledger, self.transport.now() - begin)

    def _ledger(self, before: _Snapshot, after: _Snapshot, counters: dict[Counter, int], **counts: int) -> Ledger:
        link, storage, system = after.minus(before)
        # Frames that carried no message are all header.
        others = link["frames_sent"] - link["frames_resent"] - self._message_frames
        return Ledger(
            requested=counters[Counter.REQUESTED_BYTES],
            useful=counters[Counter.USEFUL_BYTES],
            drained=counters[Counter.DRAINED_BYTES],
            moved=counters[Counter.MOVED_BYTES],
            memory=counters.get(Counter.MEMORY_BYTES, 0),
            **counts,
            payload=self._payload,
            framing=self._framing + others * WORD_BYTES,
            link_written=link["bytes_written"],
            link_read=link["bytes_read"],
            link_resent=link["bytes_resent"],
            storage_requested=storage["requested"],
            storage_spilled=storage["spilled"],
            storage_read=storage["read"],
            storage_cached=storage["cached"],
            cache_hits=storage["hits"],
            cache_misses=storage["misses"],
            os_rchar=system.get("rchar"),
            os_read_bytes=system.get("read_bytes"),
            os_is_storage=not isinstance(self.transport, FileTransport),
        )

    def _read_counters(self) -> dict[Counter, int]:
        self._send(messages.bare(Message.READ_COUNTERS))
        message = self._receive(self.transport.now() + PATIENCES * self.transport.patience)
        if message is None or message[0] != Message.COUNTERS:
            self._wrong(message, "counters")
        values = np.frombuffer(message, "<u8", message[1], messages.HEADER_BYTES)
        return {counter: int(value) for counter, value in zip(Counter, values, strict=False)}

    def _send(self, message: bytes, data: memoryview | bytes = b"") -> None:
        size = len(message) + len(data)
        count = -(-size // self.params.frame_bytes)
        self._payload += size
        self._message_frames += count
        self._framing += count * FRAME_OVERHEAD + -size % WORD_BYTES
        self.link.send(message, data)

    def _flush(self, end: float, run: _Run | None = None) -> None:
        """Until all that was sent is acknowledged."""
        left = end - self.transport.now()
        try:
            self.link.flush(max(left, 0))
        except LinkError as error:
            if self.transport.now() >= end:
                raise self._late(run) from error
            raise

    def _receive(self, end: float, *, wait: bool = True, run: _Run | None = None) -> bytes | None:
        """The next message; None if none is there and none is waited for. DeviceError for ``ERROR`` and a late one."""
        while True:
            left = end - self.transport.now()
            if left <= 0:
                raise self._late(run)
            message = self.link.receive(min(left, PATIENCES * self.transport.patience) if wait else 0)
            if message is not None:
                break
            if not wait:
                return None
            self.link.status()  # LinkError if nobody is there any more
        if message[0] == Message.ERROR:
            raise DeviceError(f"{self.name}: {_reasons(Error(message[1]))}")
        return message

    def _late(self, run: _Run | None) -> DeviceError:
        if run is None:
            return DeviceError(f"{self.name}: no answer in time; power it off and on, then try again")
        return DeviceError(
            f"{self.name}: layer not finished within {run.limit:.3g} s; {run.done:,} of {run.total:,} bytes went; "
            "allow more, or try emufpga selftest"
        )

    def _wrong(self, message: bytes | None, wanted: str) -> NoReturn:
        got = "nothing" if message is None else message[: messages.HEADER_BYTES].hex()
        raise DeviceError(f"{self.name}: got {got} instead of {wanted}; load the bitstream of this release")


@dataclass(frozen=True)
class _Part:
    """A batch that the device can hold at once."""

    layer: Layer
    x: Activations
    routes: list[Route]
    homes: dict[int, int]

    @property
    def batch(self) -> int:
        return len(self.x.exponents)

    @functools.cached_property
    def expected(self) -> list[tuple[int, int]]:
        """What the device will ask the host for."""
        return [request for expert, request in self._requests() if expert not in self.homes]

    @property
    def stored(self) -> int:
        """Bytes that it will read in the board's memory."""
        return sum(length for expert, (_, length) in self._requests() if expert in self.homes)

    def _requests(self) -> Iterator[tuple[int, tuple[int, int]]]:
        for number, request in enumerate(golden.requests(self.layer, self.routes)):
            offset, length = request
            yield (offset - self.layer.offsets[number % MATRICES]) // length, request

    def messages(self) -> Iterator[bytes]:
        """What starts the layer."""
        yield messages.config(self.layer)
        if self.homes:
            yield messages.homes([self.homes.get(expert) for expert in range(max(self.homes) + 1)])
        for token in range(self.batch):
            for column, block in enumerate(self.x.mantissas[token]):
                exponent = int(self.x.exponents[token, column])
                yield messages.load_x(token, column, exponent, block.astype("<i2").tobytes())
        yield messages.routes(self.batch, self.routes)


@dataclass
class _Run:
    """How far a layer is, over all parts of its batch."""

    end: float
    limit: float
    total: int
    progress: Progress | None
    done: int = 0

    def answered(self, count: int) -> None:
        self.done += count
        if self.progress:
            self.progress(self.done, self.total)


@dataclass(frozen=True)
class _Snapshot:
    """What link, store and system had counted at a moment."""

    link: LinkCounts
    storage: ReadCounts
    system: dict[str, int] = field(default_factory=dict)
    cost: int = 0
    """Bytes that looking at the system's counts cost, counted there only afterwards."""

    @classmethod
    def take(cls, link: LinkCounts, storage: ReadCounts) -> _Snapshot:
        text = b""
        with contextlib.suppress(OSError):
            descriptor = os.open("/proc/self/io", os.O_RDONLY)
            try:
                text = os.read(descriptor, 4096)
            finally:
                os.close(descriptor)
        pairs = (line.split(":") for line in text.decode().splitlines())
        system = {name: int(value) for name, value in pairs}
        return cls(dataclasses.replace(link), dataclasses.replace(storage), system, len(text))

    def minus(self, before: _Snapshot) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """What was counted since ``before``."""
        link, storage = (
            {field.name: getattr(now, field.name) - getattr(then, field.name) for field in dataclasses.fields(now)}
            for now, then in ((self.link, before.link), (self.storage, before.storage))
        )
        system = {name: self.system[name] - before.system[name] for name in self.system if name in before.system}
        if "rchar" in system:
            system["rchar"] -= before.cost
        return link, storage, system


def _checked(layer: Layer, tokens: int, routes: Iterable[tuple[int, int, int]]) -> list[Route]:
    checked = [Route(*(operator.index(number) for number in route)) for route in routes]
    for token, expert, weight in checked:
        if not (0 <= token < tokens and 0 <= expert < layer.experts and 0 <= weight <= 1 << WEIGHT_FRACTION_BITS):
            raise ValueError(
                f"route {(token, expert, weight)}: token must be in 0..{tokens - 1}, expert in 0..{layer.experts - 1}, "
                f"weight in 0..{1 << WEIGHT_FRACTION_BITS} (1 is {1 << WEIGHT_FRACTION_BITS})"
            )
    if len({route[:2] for route in checked}) != len(checked):
        raise ValueError("a token wants an expert twice; add the weights")
    return checked


def _key(layer: Layer) -> tuple[int, ...]:
    return (*layer.offsets, layer.matrix_bytes)


def _request(message: bytes) -> tuple[int, int]:
    return int.from_bytes(message[2:8], "little"), int.from_bytes(message[8:12], "little")


def _reasons(error: Error) -> str:
    known = [text for bit, text in ERRORS.items() if error & bit]
    return f"the device reports an error: {'; '.join(known) or 'none that is known'} (code {int(error)})"


def _sum_counters(parts: Sequence[dict[Counter, int]]) -> dict[Counter, int]:
    return {
        counter: (max if counter in _MOST else sum)(part[counter] for part in parts)  # type: ignore[operator]
        for counter in parts[0]
    }
