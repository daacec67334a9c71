"""What the engine's two byte streams carry: messages of a 16-byte header and a payload, little-endian.

A message is a run of link beats, the final one marked ``last``; what that has beyond the message is padding.
``RESET`` cuts off a message that the engine is sending: a beat marked ``last`` ends it early, then comes ``HELLO``.

================= ========= =========================================================== =============================
to the engine     header    fields from byte 1 on                                       payload
================= ========= =========================================================== =============================
``RESET``         1                                                                     none; as after power-up
``CONFIG``        2         mode u8, outstanding u16, experts u16, width u16,           3 x (offset u64, length u64):
                            expert width u16                                            up, gate, down of expert 0
``LOAD_X``        3         token u8, column u8, exponent i8                            256 x i16
``ROUTES``        4         batch u8, count u16                                         count x (token u16, expert u16,
                                                                                        weight u32); starts the layer
``WEIGHTS``       5                                                                     the bytes of the oldest request
``READ_COUNTERS`` 6                                                                     none
``HOMES``         7         count u16 from byte 2 on                                    count x u64: bit 63: this expert
                                                                                        lies in the board's memory; bits
                                                                                        47..0: at that address
``STORE``         8         address u48 from byte 2 on                                  bytes for the board's memory
================= ========= =========================================================== =============================

=============== ====== =========================================== ==================================================
from the engine header fields from byte 1 on                       payload
=============== ====== =========================================== ==================================================
``OUTPUT``      129    token u8, width u16                         width x i64 in Q24.40
``DONE``        130                                                none; the layer's outputs have all been sent
``COUNTERS``    131    count u8                                    count x u64, in the order of :class:`Counter`
``ERROR``       132    code u8, bits of :class:`Error`             none
``HELLO``       133    version u8, link bytes u8, tokens u8,       none; after power-up and ``RESET``
                       max batch u8, max width / 256 u8, max
                       expert width / 256 u8, max experts
                       u16, frame words u16, memory bits u8,
                       design id u32
``FETCH``       134    offset u48 from byte 2 on, length u32       none; wants ``WEIGHTS``
=============== ====== =========================================== ==================================================

A request is (offset, length) in bytes of the model file: ``offset + expert * length`` for each tensor, since a tensor's
experts lie one after another. The engine has a stream of its own for requests; before the link they become ``FETCH``.

An expert lies with the host, unless ``HOMES``, between ``CONFIG`` and ``ROUTES``, says that it lies in the board's
memory: up, gate and down matrix one after another. Such an expert is read there and not requested. ``HOMES`` speaks of
experts 0, 1, ...; those beyond its count, no more than ``CONFIG`` has, lie with the host. ``CONFIG`` and the next
``HOMES`` forget all homes. ``STORE`` writes that memory, not while a layer runs; address and bytes are multiples of 16.
An engine without such a memory knows neither message.
"""

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from .params import Params

VERSION = 2
HEADER_BYTES = 16
OFFSET_BITS = 48
LENGTH_BITS = 32
WEIGHT_BITS = 17
WEIGHT_FRACTION_BITS = 16
"""Router weights are unsigned Q1.16, up to 65536, so 1 is exact."""
MAX_OUTSTANDING = 8
"""Requests that may be unanswered at a time."""
IN_MEMORY = 1 << 63
"""In a ``HOMES`` entry: the expert lies in the board's memory."""
_HELLO = struct.Struct("<7BHHBI")


class Message(enum.IntEnum):
    """First byte of a header."""

    RESET = 1
    CONFIG = 2
    LOAD_X = 3
    ROUTES = 4
    WEIGHTS = 5
    READ_COUNTERS = 6
    HOMES = 7
    STORE = 8
    OUTPUT = 129
    DONE = 130
    COUNTERS = 131
    ERROR = 132
    HELLO = 133
    FETCH = 134


class Mode(enum.IntEnum):
    """Which experts pass."""

    SELECTED = 0
    """Those that a token of the batch wants."""
    TAPE = 1
    """All; unwanted ones are drained."""


class Error(enum.IntFlag):
    """Why there is no result. ``OVERFLOW`` and ``SCALE`` end their layer only; the others halt until ``RESET``."""

    LENGTH = 1
    """The bytes that answer a request are more or fewer than its matrix has."""
    COMMAND = 2
    """A matrix of no rows, no columns or too long rows: the configuration is impossible."""
    MESSAGE = 4
    """A message that is unknown, of a wrong length, or not allowed at this time."""
    CONFIG = 8
    """A configuration beyond the engine's parameters."""
    ROUTE = 16
    """A route's token or expert is out of range, its weight above 1, or it comes twice."""
    OVERFLOW = 32
    """A sum left Q24.40."""
    SCALE = 64
    """A block's ``d`` is NaN or infinite."""
    MEMORY = 128
    """The board's memory answered with an error, or a matrix said to lie there passes its end."""


class Counter(enum.IntEnum):
    """Of the layer run last, from its routes to its last output. The first four tell what each cycle was: together they
    are :attr:`CYCLES`."""

    ACTIVE = 0
    """The multipliers took a sub-block."""
    BACK_PRESSURED = 1
    """A sub-block was there, but they could not take it."""
    STARVED = 2
    """A matrix was under way, but bytes that it needs had not arrived."""
    OVERHEAD = 3
    """Anything else: draining unwanted blocks, waiting between matrices, sending outputs."""
    CYCLES = 4
    USEFUL_BYTES = 5
    """Of blocks that a token wanted."""
    DRAINED_BYTES = 6
    MOVED_BYTES = 7
    """Of ``WEIGHTS`` payloads, padding of the last beat included."""
    REQUESTED_BYTES = 8
    """Of ``REQUESTS``."""
    REQUESTS = 9
    """Matrices asked for, of the host and of the board's memory."""
    LINK_IDLE = 10
    """Cycles in which an answer from the host was due and the engine ready for it, but no beat came."""
    DRAINING = 11
    """Cycles of OVERHEAD in which an unwanted matrix passed."""
    WAITING = 12
    """Cycles of OVERHEAD in which a down matrix waited for its input and nothing passed."""
    MATRICES_HELD = 13
    """The most that ever waited: matrices announced but not begun."""
    BLOCKS_HELD = 14
    """The most blocks inside the multiplier pipeline."""
    ROWS_HELD = 15
    """The most row sums that waited behind the accumulator."""
    MEMORY_BYTES = 16
    """That came from the board's memory; 0 where there is none."""
    MEMORY_IDLE = 17
    """Cycles in which the oldest answer was due from that memory and the engine ready for it, but no beat came."""


@dataclass(frozen=True)
class Layer:
    """Where a layer's experts lie and how they are to pass.

    Attributes
    ----------
    width, expert_width
        Elements of a token vector, and of the vector between an expert's matrices; multiples of 256.
    experts
        How many the layer has.
    offsets
        Of expert 0's up, gate and down matrix, in bytes of the model file.
    mode
        See :class:`Mode`.
    outstanding
        Requests that may be unanswered, 1..8; 2 hides a store's latency behind the matrix before.
    """

    width: int
    expert_width: int
    experts: int
    offsets: tuple[int, int, int]
    mode: Mode = Mode.SELECTED
    outstanding: int = 2

    @property
    def matrix_bytes(self) -> int:
        """Bytes of each of an expert's three matrices."""
        return self.width * self.expert_width // 256 * 210


def config(layer: Layer) -> bytes:
    """The ``CONFIG`` message."""
    header = struct.pack(
        "<BBHHHH", Message.CONFIG, layer.mode, layer.outstanding, layer.experts, layer.width, layer.expert_width
    )
    places = b"".join(struct.pack("<QQ", offset, layer.matrix_bytes) for offset in layer.offsets)
    return header.ljust(HEADER_BYTES, b"\0") + places


def load_x(token: int, column: int, exponent: int, mantissas: bytes) -> bytes:
    """The ``LOAD_X`` message of one block; ``mantissas`` are its 256 int16, little-endian."""
    if len(mantissas) != 512:
        raise ValueError(f"a block has 512 bytes of mantissas, not {len(mantissas)}")
    return struct.pack("<BBBb12x", Message.LOAD_X, token, column, exponent) + mantissas


def routes(batch: int, entries: Sequence[tuple[int, int, int]]) -> bytes:
    """The ``ROUTES`` message; ``entries`` are (token, expert, weight in Q1.16), in any order."""
    header = struct.pack("<BBH12x", Message.ROUTES, batch, len(entries))
    return header + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def weights(data: bytes) -> bytes:
    """The ``WEIGHTS`` message that answers the oldest request."""
    return struct.pack("<B15x", Message.WEIGHTS) + data


def homes(addresses: Sequence[int | None]) -> bytes:
    """The ``HOMES`` message; where each expert lies in the board's memory, None: with the host."""
    header = struct.pack("<BxH12x", Message.HOMES, len(addresses))
    entries = (0 if address is None else address | IN_MEMORY for address in addresses)
    return header + b"".join(struct.pack("<Q", entry) for entry in entries)


def store(address: int, data: bytes) -> bytes:
    """The ``STORE`` message; ``address`` and the length of ``data`` are multiples of 16."""
    return struct.pack("<BxQ6x", Message.STORE, address) + data


def fetch(offset: int, length: int) -> bytes:
    """The ``FETCH`` message."""
    return struct.pack("<BxQ", Message.FETCH, offset)[:8] + struct.pack("<I4x", length)


@dataclass(frozen=True)
class Hello:
    """What the engine says of itself."""

    version: int
    params: Params
    design_id: int
    """Of the hardware's sources and parameters; 0: not said."""


def hello(params: Params, design_id: int = 0, *, version: int = VERSION) -> bytes:
    """The ``HELLO`` message."""
    return _HELLO.pack(
        Message.HELLO,
        version,
        params.link_bytes,
        params.tokens,
        params.max_batch,
        params.max_columns,
        params.max_hidden_columns,
        params.max_experts,
        params.frame_bytes // 16,
        params.memory_bits,
        design_id,
    )


def parse_hello(message: bytes) -> Hello:
    """What a ``HELLO`` of this version says; ValueError for parameters that cannot be."""
    _, version, link, tokens, batch, columns, hidden, experts, frame, memory, design_id = _HELLO.unpack_from(message)
    params = Params(link, tokens, batch, 256 * columns, 256 * hidden, experts, 16 * frame, memory)
    return Hello(version, params, design_id)


def bare(kind: Message) -> bytes:
    """A message that is all header."""
    return struct.pack("<B15x", kind)
