"""The golden device: what a board is to the driver, in plain Python, without time.

The engine's messages (:mod:`hw.formats.messages`) and its side of the link (:mod:`hw.formats.frames`), from their
definitions; the arithmetic is :mod:`sim.golden.layer`.
"""

import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hw.formats import frames, messages
from hw.formats.arithmetic import ERROR_OVERFLOW, ERROR_SCALE
from hw.formats.frames import SEQUENCES, WINDOW, WORD_BYTES, Flag, Header, Type
from hw.formats.messages import (
    HEADER_BYTES,
    IN_MEMORY,
    WEIGHT_FRACTION_BITS,
    Counter,
    Error,
    Layer,
    Message,
    Mode,
)
from hw.formats.params import Params
from hw.formats.q6_k import BLOCK_WEIGHTS

from .activations import Activations
from .layer import Route, add_expert

CONFIG = struct.Struct("<BBHHHH6x6Q")
LOAD_X = struct.Struct("<xBBb12x")
ROUTES = struct.Struct("<xBH12x")
ROUTE = struct.Struct("<HHI")
HOMES = struct.Struct("<xxH12x")
X_BYTES = 2 * BLOCK_WEIGHTS
MATRICES = 3
MAGIC = frames.MAGIC.to_bytes(2, "little")
SEND_FRAME_BYTES = 1024
SEND_FRAMES = 4
"""Frames to the host that may be unacknowledged."""


class _Refused(Exception):
    """The engine stops with this error."""

    def __init__(self, error: Error) -> None:
        self.error = error


class _Turn(NamedTuple):
    """A matrix that the host is to send."""

    expert: int
    matrix: int


class GoldenEngine:
    """The engine between its messages. Their lengths must be exact; hardware sees whole link beats only.

    Parameters
    ----------
    params
        See :class:`hw.formats.params.Params`.
    design_id
        For ``HELLO``.
    say
        Is given each message to the host.
    """

    def __init__(self, params: Params, design_id: int, say: Callable[[bytes], None]) -> None:
        self.params, self.design_id, self.say = params, design_id, say
        self._memory = bytearray()  # grows with what is stored; the rest reads as zero
        self._handlers = {
            Message.CONFIG: self._config,
            Message.LOAD_X: self._load_x,
            Message.ROUTES: self._routes,
            Message.WEIGHTS: self._weights,
            Message.READ_COUNTERS: self._read_counters,
            Message.HOMES: self._homes,
            Message.STORE: self._store,
        }

    def reset(self) -> None:
        """As after power-up, except for the board's memory; greets."""
        params = self.params
        self._halted = self._running = False
        self._layer: Layer | None = None
        self._lengths = [0] * MATRICES
        self._home: dict[int, int] = {}
        self._x = Activations(
            np.zeros((params.max_batch, params.max_columns, BLOCK_WEIGHTS), np.int16),
            np.zeros((params.max_batch, params.max_columns), np.int8),
        )
        self._turns: deque[_Turn] = deque()
        self._waiting: deque[_Turn] = deque()
        self._pieces: list[NDArray[np.uint8]] = []  # one expert's matrices
        self._counters = dict.fromkeys(Counter, 0)
        self.say(messages.hello(params, self.design_id))

    def take(self, message: bytes) -> None:
        """Do what a message says."""
        if message == messages.bare(Message.RESET):
            self.reset()
            return
        if self._halted:
            return
        try:
            handler = self._handlers.get(Message(message[0])) if message[:1] in _KNOWN else None
            busy = self._running and message[0] != Message.WEIGHTS
            if handler is None or len(message) < HEADER_BYTES or busy:
                raise _Refused(Error.MESSAGE)
            handler(message)
        except _Refused as refused:
            self._halted = True
            self._tell(refused.error)

    def _tell(self, error: Error) -> None:
        self.say(bytes([Message.ERROR, error]).ljust(HEADER_BYTES, b"\0"))

    def _config(self, message: bytes) -> None:
        self._layer = None
        _need(len(message) == CONFIG.size, Error.MESSAGE)
        _, mode, outstanding, experts, width, expert_width, *places = CONFIG.unpack(message)
        params = self.params
        _need(
            mode in tuple(Mode)
            and 1 <= outstanding <= messages.MAX_OUTSTANDING
            and 1 <= experts <= params.max_experts
            and 1 <= width <= params.max_width
            and 1 <= expert_width <= params.max_expert_width
            and width % BLOCK_WEIGHTS == expert_width % BLOCK_WEIGHTS == 0,
            Error.CONFIG,
        )
        up, gate, down = places[::2]
        self._lengths = places[1::2]
        self._home = {}
        self._layer = Layer(width, expert_width, experts, (up, gate, down), Mode(mode), outstanding)

    def _load_x(self, message: bytes) -> None:
        token, column, exponent = LOAD_X.unpack_from(message)
        fits = token < self.params.max_batch and column < self.params.max_columns
        _need(fits and len(message) == HEADER_BYTES + X_BYTES, Error.MESSAGE)
        self._x.mantissas[token, column] = np.frombuffer(message, "<i2", BLOCK_WEIGHTS, HEADER_BYTES)
        self._x.exponents[token, column] = exponent

    def _homes(self, message: bytes) -> None:
        (count,) = HOMES.unpack_from(message)
        _need(self._layer is not None and self.params.memory_bits > 0, Error.MESSAGE)
        _need(count <= self._now.experts and len(message) == HEADER_BYTES + 8 * count, Error.MESSAGE)
        entries = struct.unpack_from(f"<{count}Q", message, HEADER_BYTES)
        self._home = {expert: entry - IN_MEMORY for expert, entry in enumerate(entries) if entry & IN_MEMORY}
        end = 1 << self.params.memory_bits
        _need(all(home < end and home % WORD_BYTES == 0 for home in self._home.values()), Error.MESSAGE)

    def _store(self, message: bytes) -> None:
        address = int.from_bytes(message[2:8], "little")
        data = memoryview(message)[HEADER_BYTES:]
        whole = len(data) > 0 and address % WORD_BYTES == len(data) % WORD_BYTES == 0
        end = address + len(data)
        # 2**0 bytes of memory hold no word.
        _need(whole and end <= 1 << self.params.memory_bits, Error.MESSAGE)
        self._memory.extend(bytes(max(end - len(self._memory), 0)))
        self._memory[address:end] = data

    def _routes(self, message: bytes) -> None:
        batch, count = ROUTES.unpack_from(message)
        fits = 1 <= batch <= self.params.max_batch and len(message) == HEADER_BYTES + ROUTE.size * count
        _need(self._layer is not None and fits, Error.MESSAGE)
        routes = [Route(*entry) for entry in ROUTE.iter_unpack(message[HEADER_BYTES:])]
        layer = self._now
        possible = all(
            route.token < batch and route.expert < layer.experts and route.weight <= 1 << WEIGHT_FRACTION_BITS
            for route in routes
        )
        _need(possible and len({route[:2] for route in routes}) == count, Error.ROUTE)
        self._wanted: dict[int, list[Route]] = {}
        for route in routes:
            self._wanted.setdefault(route.expert, []).append(route)
        self._running = True
        self._counters = dict.fromkeys(Counter, 0)
        self._y = np.zeros((batch, layer.width), np.int64)
        self._errors = 0
        # Additions can be made in any order, so experts in memory have theirs at once.
        for expert in range(layer.experts):
            if layer.mode == Mode.TAPE or expert in self._wanted:
                if expert in self._home:
                    self._pass_from_memory(expert)
                else:
                    self._turns += [_Turn(expert, matrix) for matrix in range(MATRICES)]
        self._go_on()

    @property
    def _now(self) -> Layer:
        assert self._layer is not None, "checked by the caller"
        return self._layer

    def _pass_from_memory(self, expert: int) -> None:
        size = self._now.matrix_bytes
        start = self._home[expert]
        _need(start + MATRICES * size <= 1 << self.params.memory_bits, Error.MEMORY)
        data = bytes(self._memory[start : start + MATRICES * size]).ljust(MATRICES * size, b"\0")
        for matrix in range(MATRICES):
            self._ask(size)
            self._counters[Counter.MEMORY_BYTES] += size
            self._pass(_Turn(expert, matrix), np.frombuffer(data, np.uint8, size, matrix * size))

    def _weights(self, message: bytes) -> None:
        _need(bool(self._waiting) and len(message) > HEADER_BYTES, Error.MESSAGE)
        turn = self._waiting.popleft()
        data = np.frombuffer(message, np.uint8, offset=HEADER_BYTES)
        _need(data.size == self._lengths[turn.matrix] == self._now.matrix_bytes, Error.LENGTH)
        link = self.params.link_bytes
        self._counters[Counter.MOVED_BYTES] += -(-data.size // link) * link
        self._pass(turn, data)
        self._go_on()

    def _pass(self, turn: _Turn, data: NDArray[np.uint8]) -> None:
        """A matrix has come; with an expert's last one its rows are added."""
        wanted = turn.expert in self._wanted
        self._counters[Counter.USEFUL_BYTES if wanted else Counter.DRAINED_BYTES] += data.size
        if wanted:
            self._pieces.append(data)
            if turn.matrix == MATRICES - 1:
                here = self._wanted[turn.expert]
                columns = self._now.width // BLOCK_WEIGHTS
                x = Activations(self._x.mantissas[:, :columns], self._x.exponents[:, :columns])
                self._errors |= add_expert(self._y, self._now, self._pieces, x, here)
                self._pieces.clear()

    def _go_on(self) -> None:
        """Ask for more; at the end of the layer give its outputs."""
        layer = self._now
        while self._turns and len(self._waiting) < layer.outstanding:
            turn = self._turns.popleft()
            length = self._lengths[turn.matrix]
            self._waiting.append(turn)
            self._ask(length)
            self.say(messages.fetch(layer.offsets[turn.matrix] + turn.expert * length, length))
        if self._waiting:
            return
        self._running = False
        if self._errors:
            self._tell(_sum_errors(self._errors))
        else:
            for token, y in enumerate(self._y):
                header = struct.pack("<BBH12x", Message.OUTPUT, token, layer.width)
                self.say(header + y.astype("<i8").tobytes())
        self.say(messages.bare(Message.DONE))

    def _ask(self, length: int) -> None:
        self._counters[Counter.REQUESTS] += 1
        self._counters[Counter.REQUESTED_BYTES] += length

    def _read_counters(self, message: bytes) -> None:
        _need(len(message) == HEADER_BYTES, Error.MESSAGE)
        values = [self._counters[counter] for counter in Counter]
        self.say(struct.pack(f"<BB14x{len(values)}Q", Message.COUNTERS, len(values), *values))


_KNOWN = {bytes([message]) for message in Message}
_SUM_ERRORS = {ERROR_OVERFLOW: Error.OVERFLOW, ERROR_SCALE: Error.SCALE}


def _need(condition: bool, error: Error) -> None:
    if not condition:
        raise _Refused(error)


def _sum_errors(bits: int) -> Error:
    """The error of a layer whose sums have these bits."""
    return Error(sum(error for bit, error in _SUM_ERRORS.items() if bits & bit))


class _Part(NamedTuple):
    """A message's share of a frame."""

    payload: bytes
    flags: Flag


class GoldenDevice:
    """The engine behind its side of the link: bytes in with :meth:`write`, bytes out with :meth:`read`.

    What is inside a frame stays there until the frame is complete, right or wrong, or given up in :meth:`poke`: like
    hardware, and unlike the host, it cannot look at bytes twice.

    Parameters
    ----------
    params
        See :class:`hw.formats.params.Params`.
    design_id
        For ``HELLO``.

    Attributes
    ----------
    credit
        Words that it grants; it takes every message at once, so always both buffers.
    status
        See :class:`hw.formats.frames.Status`.
    """

    def __init__(self, params: Params, design_id: int = 0) -> None:
        self.credit = 2 * params.frame_bytes // WORD_BYTES
        self._limit = params.frame_bytes // WORD_BYTES
        self._link_bytes = params.link_bytes
        self._in, self._out = bytearray(), bytearray()
        self.engine = GoldenEngine(params, design_id, self._queue_message)
        self._start()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes from the host."""
        self._in += data
        place = 0
        while len(self._in) - place >= WORD_BYTES:
            head = bytes(self._in[place : place + WORD_BYTES])
            header = frames.unpack_header(head)
            if header is None or header.words > self._limit:
                found = self._in.find(MAGIC, place + 1)
                place = self._skip(place, len(self._in) - 1 if found < 0 else found)
                continue
            end = place + header.frame_bytes
            if end > len(self._in):
                break
            payload = bytes(self._in[place + WORD_BYTES : end - WORD_BYTES])
            if header.words and frames.trailer(head, payload) != self._in[end - WORD_BYTES : end]:
                self._lose_frame()
            else:
                self._take(header, payload[: header.payload_bytes])
            place = end
        del self._in[:place]
        self._send()

    def read(self) -> bytes:
        """What it has to say so far."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def poke(self) -> None:
        """Time has passed: give up the frame that stopped coming; send again what the host did not acknowledge."""
        if len(self._in) >= WORD_BYTES:
            self._in.clear()
            self._lose_frame()
        self._send_again()
        self._send()

    def _start(self) -> None:
        """Forget the connection, reset the engine."""
        self.status = frames.Status(0, 0, 0, 0)
        self._garbage_bytes = 0
        self._queue: deque[_Part] = deque()
        self._unacknowledged: deque[_Part] = deque()
        self._base = self._want = 0
        self._owe = False
        self._message = bytearray()
        self.engine.reset()

    def _count(self, **changes: int) -> None:
        self.status = self.status._replace(
            **{name: getattr(self.status, name) + count for name, count in changes.items()}
        )

    def _skip(self, place: int, to: int) -> int:
        self._garbage_bytes += to - place
        self.status = self.status._replace(garbage=self._garbage_bytes // self._link_bytes)
        return to

    def _lose_frame(self) -> None:
        self._count(damaged=1)
        self._emit(Header(Type.ACK, Flag.NAK))

    def _take(self, header: Header, payload: bytes) -> None:
        if header.type == Type.SYNC:
            self._start()
            self._emit(Header(Type.SYNC, sequence=header.sequence))
            return
        count = (header.ack - self._base) % SEQUENCES
        if count <= len(self._unacknowledged):
            for _ in range(count):
                self._unacknowledged.popleft()
            self._base = header.ack
            if header.flags & Flag.NAK:
                self._send_again()
        if header.flags & Flag.POLL:
            self._emit(Header(Type.STATUS), frames.STATUS.pack(*(value % (1 << 32) for value in self.status)))
        if header.type != Type.MESSAGE:
            return
        if header.sequence == self._want:
            self._want = (self._want + 1) % SEQUENCES
            self._owe = True
            self._message += payload
            if header.flags & Flag.LAST:
                message = bytes(self._message)
                self._message.clear()
                self.engine.take(message)
        else:
            self._count(refused=1)
            ahead = (header.sequence - self._want) % SEQUENCES < WINDOW
            self._emit(Header(Type.ACK, Flag.NAK if ahead else Flag(0)))

    def _queue_message(self, message: bytes) -> None:
        for start in range(0, len(message), SEND_FRAME_BYTES):
            last = start + SEND_FRAME_BYTES >= len(message)
            self._queue.append(_Part(message[start : start + SEND_FRAME_BYTES], Flag.LAST if last else Flag(0)))

    def _send(self) -> None:
        while self._queue and len(self._unacknowledged) < SEND_FRAMES:
            self._unacknowledged.append(self._queue.popleft())
            self._emit_part(len(self._unacknowledged) - 1)
        if self._owe:
            self._emit(Header(Type.ACK))

    def _send_again(self) -> None:
        for number in range(len(self._unacknowledged)):
            self._emit_part(number)
        self._count(resent=len(self._unacknowledged))

    def _emit_part(self, number: int) -> None:
        part = self._unacknowledged[number]
        self._emit(Header(Type.MESSAGE, part.flags, sequence=(self._base + number) % SEQUENCES), part.payload)

    def _emit(self, header: Header, payload: bytes = b"") -> None:
        self._owe = False
        self._out += frames.frame(header._replace(ack=self._want, credit=self.credit), payload)


class GoldenTransport:
    """A transport (:class:`host.link.Transport`) to a golden device in this process.

    Its clock runs only while ``read`` waits in vain; after ``patience`` seconds of that the device is poked, once.

    Parameters
    ----------
    params, design_id
        See :class:`GoldenDevice`.
    """

    name = "golden"
    patience = 0.01

    def __init__(self, params: Params, design_id: int = 0) -> None:
        self.device = GoldenDevice(params, design_id)
        self._now = 0.0
        self._silent = 0.0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """All of it reaches the device at once."""
        self.device.write(data)

    def read(self, timeout: float) -> bytes:
        """What the device has to say; time passes only if that is nothing."""
        data = self.device.read()
        if not data:
            wait = min(timeout, max(self.patience - self._silent, 0.0))
            self._pass(wait)
            if self._silent >= self.patience:
                self._silent = 0.0
                self.device.poke()
                data = self.device.read()
                if not data:
                    self._pass(timeout - wait)
        if data:
            self._silent = 0.0
        return data

    def now(self) -> float:
        """Simulated seconds."""
        return self._now

    def close(self) -> None:
        """Nothing is held."""

    def _pass(self, seconds: float) -> None:
        self._now += seconds
        self._silent += seconds
