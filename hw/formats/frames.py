"""Frames: how messages cross a link that may damage, drop, repeat or truncate what it carries.

A frame is a header of 16 bytes and, if it has a payload, that payload padded with zeros to whole words of 16 bytes and
a trailer of 16 bytes. So every frame, on every link, is a whole number of 16-byte words. Little-endian::

    header   0  magic u16      0x9FE5
             2  type u8        of :class:`Type`
             3  flags u8       bits 0..2 of :class:`Flag`; bits 4..7: padding bytes in the payload's last word
             4  sequence u16   MESSAGE: its number; SYNC: a number that the answer repeats; else 0
             6  ack u16        the number of the MESSAGE that the sender wants next
             8  words u16      of payload
            10  credit u16     words that may follow the acknowledged ones; from the host 0, its memory is large
            12  crc u32        CRC-32 of bytes 0..11
    trailer  0  crc u32        CRC-32 of the padded payload
             4                 bytes 0..11 of the header again, so that no header passes with another frame's payload

``MESSAGE`` frames carry the messages of :mod:`hw.formats.messages`, a message cut into one frame or more; all but its
last frame carry whole words. They are numbered from 0, modulo 65536, in each direction. A receiver takes only the one
that it wants next, intact, and acknowledges it in the next frame that it sends, of whatever type; anything else it
drops. A sender keeps what is not acknowledged and sends all of it again when it is told to (``NAK``) or hears nothing
for too long. So a message arrives whole, once and in order, or not at all.

The engine's side grants credit: the host sends no more words of payload beyond ``ack`` than ``credit`` says. The host
may ask (``POLL``); the answer is a ``STATUS`` frame, whose payload is the four u32 of :class:`Status`.

``SYNC`` starts a connection: the engine's side forgets all of the one before, resets the engine, answers with a
``SYNC`` of the same number, then greets with ``HELLO`` as message 0.

A receiver that is not inside a frame looks at each place for a header: magic and CRC fit, the type is known, ``words``
is within bounds. Bytes that do not begin one are garbage and are skipped.

CRC-32 is that of zlib and Ethernet. It sees every burst of up to 32 bits and any two flipped bits, in payloads of up to
11 KiB any three (P. Koopman, "32-bit cyclic redundancy codes for Internet applications", 2002); of all else one in 2^32
passes.
"""

import enum
import struct
import zlib
from typing import NamedTuple

MAGIC = 0x9FE5
WORD_BYTES = 16
SEQUENCES = 1 << 16
WINDOW = 1 << 15
"""Half of the sequence numbers: ``(a - b) % SEQUENCES < WINDOW`` says that a is b or follows it."""
MAX_PAYLOAD_WORDS = 4096
"""64 KiB."""
_HEADER = struct.Struct("<HBBHHHH")
_CRC = struct.Struct("<I")
_MISSING_SHIFT = 4


class Type(enum.IntEnum):
    """What a frame is for."""

    MESSAGE = 1
    ACK = 2
    """Tells ``ack`` and ``credit``, no more."""
    SYNC = 3
    STATUS = 4
    """Answers ``POLL``; the engine's side only."""


class Flag(enum.IntFlag):
    LAST = 1
    """MESSAGE: the message ends with this frame."""
    NAK = 2
    """What follows ``ack`` was lost or damaged: send it again."""
    POLL = 4
    """Answer with STATUS; the host only."""


class Header(NamedTuple):
    """A frame's header; ``missing`` are the padding bytes in the payload's last word."""

    type: Type
    flags: Flag = Flag(0)
    missing: int = 0
    sequence: int = 0
    ack: int = 0
    words: int = 0
    credit: int = 0

    @property
    def payload_bytes(self) -> int:
        """Bytes of payload, padding not counted."""
        return self.words * WORD_BYTES - self.missing

    @property
    def frame_bytes(self) -> int:
        """Bytes of the whole frame."""
        return (1 + (self.words + 1 if self.words else 0)) * WORD_BYTES


class Status(NamedTuple):
    """What the engine's side counted since ``SYNC``, each modulo 2^32."""

    damaged: int
    """Frames dropped because payload and trailer do not fit, or because they stopped coming."""
    refused: int
    """Intact ``MESSAGE`` frames dropped because they were not the one wanted, or for want of room."""
    garbage: int
    """Beats skipped outside frames."""
    resent: int
    """Frames sent again."""


STATUS = struct.Struct("<4I")


def pack_header(header: Header) -> bytes:
    """The header's 16 bytes."""
    flags = header.flags | header.missing << _MISSING_SHIFT
    fields = (MAGIC, header.type, flags, header.sequence, header.ack, header.words, header.credit)
    data = _HEADER.pack(*fields)
    return data + _CRC.pack(zlib.crc32(data))


def unpack_header(data: bytes | bytearray | memoryview) -> Header | None:
    """The header in 16 bytes; None where they are none. Bounds on ``words`` are the caller's to check."""
    if len(data) != WORD_BYTES or _CRC.unpack_from(data, 12)[0] != zlib.crc32(data[:12]):
        return None
    magic, kind, flags, sequence, ack, words, credit = _HEADER.unpack_from(data)
    if magic != MAGIC or kind not in tuple(Type):
        return None
    return Header(Type(kind), Flag(flags & 7), flags >> _MISSING_SHIFT, sequence, ack, words, credit)


def trailer(header: bytes, payload: bytes | bytearray | memoryview) -> bytes:
    """The 16 bytes behind a padded payload; ``header`` is the frame's."""
    return _CRC.pack(zlib.crc32(payload)) + header[:12]


def frame(header: Header, payload: bytes | bytearray | memoryview = b"") -> bytes:
    """A whole frame; ``words`` and ``missing`` are taken from the payload."""
    words = -(-len(payload) // WORD_BYTES)
    missing = words * WORD_BYTES - len(payload)
    head = pack_header(header._replace(words=words, missing=missing))
    if not words:
        return head
    padded = bytes(payload) + bytes(missing)
    return head + padded + trailer(head, padded)
