"""The Verilated engine as a device in this process: messages and requests in bulk, a clock cycle without Python.

A Granite-size layer (786,000 cycles) takes seconds; through cocotb it takes half a minute.
"""

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from hw.formats import messages
from hw.formats.messages import Counter, Error, Layer, Message
from hw.formats.params import Params
from hw.formats.q6_k import BLOCK_BYTES
from sim import shared_library
from sim.golden import layer as golden
from sim.golden.activations import Activations
from sim.golden.layer import Route
from sim.shared_library import Say

SHIM = Path(__file__).with_suffix(".cpp")
CERTAIN = (1 << 32) - 1
IDLE_CYCLES = 100_000
"""What is asked while no layer runs is answered within so many cycles."""
PATIENCE = 10
"""A matrix may take so many times the cycles that it should."""

Read = Callable[[int, int], NDArray[np.uint8]]


class EngineError(RuntimeError):
    """The engine reported an error, or fell silent."""

    def __init__(self, text: str, error: Error = Error(0)) -> None:  # noqa: B008 an immutable flag
        super().__init__(text)
        self.error = error


@dataclass(frozen=True)
class Feed:
    """How bytes reach the engine.

    Attributes
    ----------
    latency
        Cycles from a request to the first beat of its answer, at least.
    rate
        Bytes a cycle, at most; None: a beat every cycle.
    p_in, p_out
        Chances, in every cycle, that a beat is offered and that one is taken.
    seed
        Of these chances.
    """

    latency: int = 0
    rate: float | None = None
    p_in: float = 1.0
    p_out: float = 1.0
    seed: int = 1


@dataclass
class LayerRun:
    """What a layer gave.

    Attributes
    ----------
    y
        ``(batch, width)`` int64 in Q24.40.
    counters
        As the hardware counted.
    requests
        ``(offset, length)`` in the order of asking.
    cycles
        From the first beat of the first message to the last beat of the last, vectors, routes and outputs included.
    """

    y: NDArray[np.int64]
    counters: dict[Counter, int]
    requests: list[tuple[int, int]] = field(default_factory=list)
    cycles: int = 0


def differences(run: LayerRun, layer: Layer, read: Read, x: Activations, routes: list[Route]) -> int:
    """Outputs of a run that differ from the golden model's, one more for an error there and one for other requests."""
    y, errors = golden.run(layer, read, x, routes)
    return int(np.count_nonzero(run.y != y)) + (errors != 0) + (run.requests != golden.requests(layer, routes))


def start_messages(layer: Layer, x: Activations, routes: list[Route]) -> Iterator[bytes]:
    """What starts a layer: ``CONFIG``, ``LOAD_X`` of every block of ``x`` and ``ROUTES``."""
    yield messages.config(layer)
    batch, columns = x.exponents.shape
    for token in range(batch):
        for column in range(columns):
            block = x.mantissas[token, column].astype("<i2").tobytes()
            yield messages.load_x(token, column, int(x.exponents[token, column]), block)
    yield messages.routes(batch, routes)


def build(params: Params, *, say: Say = lambda text: None) -> Path:
    """The engine with these parameters as a shared library."""

    def make():
        from hw.engine import Engine

        return Engine(params)

    defines = {"LINK_BYTES": params.link_bytes}
    return shared_library.build("engine", make, SHIM, key=asdict(params), defines=defines, say=say)


class EngineSim:
    """One engine, reset, with nothing configured. A context manager; not for use by several threads.

    Parameters
    ----------
    params
        See :class:`hw.formats.params.Params`.
    feed
        How bytes reach the engine.
    library
        Another build of the engine with these parameters, by default :func:`build`'s.
    say
        Told each step of a build.
    """

    def __init__(
        self,
        params: Params,
        feed: Feed = Feed(),
        *,
        library: Path | None = None,
        say: Say = lambda text: None,
    ) -> None:
        self.params = params
        self._library = _load(library or build(params, say=say))
        self._sim = self._library.sim_new()
        self.feed(feed)
        greeting = self.receive(limit=1000)
        if greeting != messages.hello(params):
            raise EngineError(f"the engine greets with {greeting.hex()}, not with its parameters")

    def __enter__(self) -> "EngineSim":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free the engine."""
        if self._sim is not None:
            self._library.sim_free(self._sim)
            self._sim = None

    @property
    def cycle(self) -> int:
        """Cycles since reset."""
        return self._library.sim_cycle(self._sim)

    def feed(self, feed: Feed) -> None:
        """Bytes reach the engine like this from now on."""
        link = self.params.link_bytes
        rate = feed.rate or link
        if not 0 < rate <= link:
            raise ValueError(f"rate must be in 0..{link} bytes a cycle, not {feed.rate}")
        chances = (min(round(p * (1 << 32)), CERTAIN) for p in (feed.p_in, feed.p_out))
        self._feed = feed
        self._library.sim_feed(self._sim, feed.latency, round(256 * link / rate), *chances, feed.seed)

    def send(self, message: bytes, data: NDArray[np.uint8] | None = None, *, answer: bool = False) -> None:
        """Queue a message, with ``data`` behind it; an ``answer`` belongs to the oldest unanswered request."""
        pointer = None if data is None else data.ctypes.data_as(ctypes.c_void_p)
        self._library.sim_send(self._sim, message, len(message), pointer, 0 if data is None else data.size, answer)

    def run(self, cycles: int) -> int:
        """Run until a message or a request has come or so many cycles have passed; which of them: 2, 1, 0."""
        status = self._library.sim_run(self._sim, cycles)
        if status == 3:
            raise EngineError(f"cycle {self.cycle}: a beat that waited on o changed or vanished")
        return status

    def requests(self) -> Iterator[tuple[int, int]]:
        """Requests that have come and were not looked at."""
        offset, length = ctypes.c_uint64(), ctypes.c_uint64()
        while self._library.sim_next_request(self._sim, offset, length):
            yield offset.value, length.value

    def message(self) -> bytes | None:
        """The oldest message that has come, if any."""
        size = self._library.sim_next_message(self._sim, None)
        if not size:
            return None
        text = ctypes.create_string_buffer(size)
        self._library.sim_next_message(self._sim, text)
        return text.raw

    def receive(self, *, limit: int = IDLE_CYCLES) -> bytes:
        """The next message; EngineError if there is none within ``limit`` cycles."""
        end = self.cycle + limit
        while (message := self.message()) is None:
            if self.cycle >= end:
                raise EngineError(f"no message within {limit} cycles")
            self.run(end - self.cycle)
        return message

    def run_layer(
        self,
        layer: Layer,
        x: Activations,
        routes: list[Route],
        read: Read,
        *,
        say: Say = lambda text: None,
    ) -> LayerRun:
        """Run a layer; ``read(offset, length)`` gives bytes of the model file.

        ``x`` holds ``(batch, width / 256, 256)`` mantissas. Raises EngineError with the bits that the engine reports.
        """
        start = self.cycle
        for message in start_messages(layer, x, routes):
            self.send(message)
        y = np.zeros((x.exponents.shape[0], layer.width), np.int64)
        asked = []
        limit = self._limit(layer)
        while True:
            if not self.run(limit):
                raise EngineError(f"nothing happened for {limit} cycles after {len(asked)} requests")
            for offset, length in self.requests():
                asked.append((offset, length))
                say(f"request {len(asked)}: {length:,} bytes at {offset:,}")
                self.send(messages.weights(b""), read(offset, length), answer=True)
            while (message := self.message()) is not None:
                kind = message[0]
                if kind == Message.ERROR:
                    error = Error(message[1])
                    raise EngineError(f"the engine reports {error!r} after {len(asked)} requests", error)
                if kind == Message.OUTPUT:
                    token, width = struct.unpack_from("<BH", message, 1)
                    y[token] = np.frombuffer(message, "<i8", width, messages.HEADER_BYTES)
                elif kind == Message.DONE:
                    cycles = self.cycle - start
                    return LayerRun(y, self.counters(), asked, cycles)
                else:
                    raise EngineError(f"unexpected message {message[:16].hex()}")

    def _limit(self, layer: Layer) -> int:
        """Cycles without a request or message after which a layer must have failed."""
        feed = self._feed
        matrix = layer.matrix_bytes / (feed.rate or self.params.link_bytes) / feed.p_in
        matrix += layer.matrix_bytes / BLOCK_BYTES * 16 * self.params.passes
        outputs = 8 * layer.width / self.params.link_bytes / feed.p_out
        return round(IDLE_CYCLES + PATIENCE * (feed.latency + matrix + outputs))

    def counters(self) -> dict[Counter, int]:
        """The engine's counters of the layer run last."""
        self.send(messages.bare(Message.READ_COUNTERS))
        message = self.receive()
        if message[0] != Message.COUNTERS:
            raise EngineError(f"asked for counters, got {message[:16].hex()}")
        values = np.frombuffer(message, "<u8", message[1], messages.HEADER_BYTES)
        return {counter: int(values[counter]) for counter in Counter}

    def reset(self) -> None:
        """Reset the engine; whatever it had to say is dropped. EngineError if it does not greet again."""
        self.send(messages.bare(Message.RESET))
        while self.receive()[0] != Message.HELLO:
            pass
        self._library.sim_forget_requests(self._sim)


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    sim, size, u64, u32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint32
    pointer = ctypes.c_void_p
    signatures = {
        "sim_new": (sim, []),
        "sim_free": (None, [sim]),
        "sim_feed": (None, [sim, u64, u64, u32, u32, u64]),
        "sim_send": (None, [sim, ctypes.c_char_p, size, pointer, size, ctypes.c_int]),
        "sim_run": (ctypes.c_int, [sim, u64]),
        "sim_cycle": (u64, [sim]),
        "sim_next_request": (ctypes.c_int, [sim, ctypes.POINTER(u64), ctypes.POINTER(u64)]),
        "sim_next_message": (size, [sim, pointer]),
        "sim_forget_requests": (None, [sim]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
