"""A transport that spoils what passes through it, frame by frame, and says how."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from host.link import Transport
from hw.formats import frames
from hw.formats.frames import WORD_BYTES

KINDS = ("flip", "burst", "drop", "duplicate", "truncate", "reorder", "garbage")
FLIPS = 3
"""Bits at most that are flipped anywhere in a frame; the CRC sees them all."""
BURST_BITS = 32
GARBAGE_BYTES = 96


class Fault(NamedTuple):
    """What was done to which frame: ``frame`` counts those of its direction from 0."""

    to_device: bool
    frame: int
    kind: str
    detail: str


class _Direction:
    """One direction's bytes: cut into frames, each handed to ``spoil`` with its number."""

    def __init__(self, spoil: Callable[["_Direction", int, bytes], list[bytes]]) -> None:
        self._spoil = spoil
        self._bytes = bytearray()
        self._frames = 0
        self.late: bytes = b""
        """A frame that is to come behind the next."""

    def put(self, data: bytes | memoryview) -> bytes:
        """What arrives for what was sent."""
        self._bytes += data
        out = bytearray()
        while self._bytes:
            header = frames.unpack_header(self._bytes[:WORD_BYTES])
            # What is no frame passes as it is; the rest of a word or of a frame is waited for.
            length = header.frame_bytes if header else WORD_BYTES
            if len(self._bytes) < length:
                break
            piece = bytes(self._bytes[:length])
            del self._bytes[:length]
            if not header:
                out += piece
                continue
            before = self.late
            out += b"".join(self._spoil(self, self._frames, piece))
            self._frames += 1
            if before:  # whose turn has come
                out += before
                self.late = b"" if self.late is before else self.late
        return bytes(out)


class Faulty:
    """A :class:`host.link.Transport` around another, which damages, drops, repeats, cuts and exchanges frames.

    Parameters
    ----------
    transport
        What it stands before; carries whole frames, as it loses nothing itself.
    rng
        Decides all.
    to_device, to_host
        Chances of a fault for each frame of that direction.
    kinds
        Which faults; of :data:`KINDS`.
    unit
        Bytes that the port moves at a time: garbage and truncated frames have a multiple of it.

    Attributes
    ----------
    to_device, to_host, kinds
        As given; may be changed at any time.
    log
        All faults so far.
    """

    def __init__(
        self,
        transport: Transport,
        rng: np.random.Generator,
        *,
        to_device: float = 0.0,
        to_host: float = 0.0,
        kinds: Sequence[str] = KINDS,
        unit: int = 1,
    ) -> None:
        self.name, self.patience = transport.name, transport.patience
        self.to_device, self.to_host, self.kinds = to_device, to_host, kinds
        self.log: list[Fault] = []
        self._transport, self._rng, self._unit = transport, rng, unit
        self._down, self._up = _Direction(self._spoil), _Direction(self._spoil)

    def write(self, data: bytes | memoryview) -> None:
        self._transport.write(self._down.put(data))

    def read(self, timeout: float) -> bytes:
        data = self._up.put(self._transport.read(timeout))
        if data:
            return data
        if self._down.late:  # nothing overtakes it any more
            late, self._down.late = self._down.late, b""
            self._transport.write(late)
        late, self._up.late = self._up.late, b""
        return late

    def now(self) -> float:
        return self._transport.now()

    def close(self) -> None:
        self._transport.close()

    def _units(self, limit: int) -> int:
        """A length below ``limit`` bytes, in whole units."""
        return int(self._rng.integers(limit // self._unit)) * self._unit

    def _spoil(self, direction: _Direction, number: int, frame: bytes) -> list[bytes]:
        if self._rng.random() >= (self.to_device if direction is self._down else self.to_host):
            return [frame]
        kind = str(self._rng.choice(self.kinds))
        spoilt, detail = bytearray(frame), ""
        pieces = [spoilt]
        if kind in ("flip", "burst"):
            bits = 8 * len(frame)
            if kind == "flip":
                count = int(self._rng.integers(1, FLIPS + 1))
                places = self._rng.choice(bits, count, replace=False).tolist()
            else:
                start = int(self._rng.integers(bits - BURST_BITS + 1))
                inner = [start + n for n in range(1, BURST_BITS - 1) if self._rng.random() < 0.5]
                places = [start, *inner, start + BURST_BITS - 1]
            for place in places:
                spoilt[place // 8] ^= 1 << place % 8
            detail = f"bits {sorted(places)}"
        elif kind == "drop":
            pieces = []
        elif kind == "duplicate":
            pieces = [spoilt, spoilt]
        elif kind == "truncate":
            del spoilt[self._units(len(frame)) :]
            detail = f"to {len(spoilt)} of {len(frame)} bytes"
        elif kind == "reorder":
            pieces = [] if not direction.late else [spoilt]
            direction.late = direction.late or frame
        elif kind == "garbage":
            garbage = self._rng.bytes(self._unit + self._units(GARBAGE_BYTES))
            pieces = [bytearray(garbage), spoilt]
            detail = f"{len(garbage)} bytes before it"
        else:
            raise ValueError(f"unknown kind of fault {kind!r}; possible are {KINDS}")
        self.log.append(Fault(direction is self._down, number, kind, detail))
        return [bytes(piece) for piece in pieces]
