"""The host's side of the link: whole messages over a transport that may damage, drop or repeat what it carries.

:mod:`hw.formats.frames` is the protocol. All work happens inside calls; there are no threads here.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hw.formats import frames, messages
from hw.formats.frames import MAX_PAYLOAD_WORDS, SEQUENCES, WINDOW, WORD_BYTES, Flag, Header, Type
from hw.formats.messages import Hello, Message

TRIES = 8
FLOOD_EVERY = 3
"""Of the tries to connect, each third first fills up a frame that an earlier program may have left unfinished."""
FLOOD_BYTES = (MAX_PAYLOAD_WORDS + 2) * WORD_BYTES
TICK = 1e-6
"""Seconds that are waited for at least: a simulated clock stands still for less than a cycle."""
_MAGIC = frames.MAGIC.to_bytes(2, "little")


class LinkError(RuntimeError):
    """The link or the device behind it failed; one line that names the port and says what to do."""


class Transport(Protocol):
    """Bytes to and from a device, nothing more.

    Attributes
    ----------
    name
        As the user wrote it, for errors.
    patience
        Seconds after which an unanswered frame is worth sending again: a round trip plus what may be queued.
    """

    name: str
    patience: float

    def write(self, data: bytes | memoryview) -> None:
        """Take all of it, waiting if need be; LinkError if that cannot be within a limit."""
        ...

    def read(self, timeout: float) -> bytes:
        """What has come; waits up to ``timeout`` seconds for the first byte, b"" if there is none."""
        ...

    def now(self) -> float:
        """Seconds on the transport's clock; of a simulation, simulated ones."""
        ...

    def close(self) -> None:
        """Give back what the transport holds."""
        ...


@dataclass
class LinkCounts:
    """What the host's side counted, over all connections of its link."""

    bytes_written: int = 0
    bytes_read: int = 0
    frames_sent: int = 0
    """Of every type, those sent again included."""
    frames_resent: int = 0
    bytes_resent: int = 0
    """Of whole frames."""
    naks: int = 0
    """Received."""
    timeouts: int = 0
    damaged: int = 0
    """Frames dropped because payload and trailer do not fit, or because the rest did not come."""
    refused: int = 0
    """Intact ``MESSAGE`` frames dropped because they were not the one wanted."""
    garbage: int = 0
    """Bytes that belong to no intact frame."""


class Parser:
    """Bytes in, intact frames out; counts what it drops into ``counts``.

    A frame that turns out damaged may have swallowed the start of a good one, where bytes between them are lost. So
    the search goes on right behind its header.
    """

    def __init__(self, counts: LinkCounts) -> None:
        self._counts = counts
        self._bytes = bytearray()
        self._place = 0
        self.since: float | None = None
        """When the header was found of the frame whose rest is awaited; None: no frame is."""

    def feed(self, data: bytes) -> None:
        """More bytes, in the order in which they came."""
        del self._bytes[: self._place]
        self._place = 0
        self._bytes += data

    def next(self, now: float = 0.0) -> tuple[Header, bytes] | None:
        """The next frame and its payload without padding; None: more bytes are needed."""
        while (header := self._find()) is not None:
            start, end = self._place, self._place + header.frame_bytes
            if end > len(self._bytes):
                self.since = now if self.since is None else self.since
                return None
            if self._intact(start, end, header):
                self.since = None
                self._place = end
                return header, bytes(self._bytes[start + WORD_BYTES :][: header.payload_bytes])
            self.drop()
        return None

    def drop(self) -> None:
        """Give up the frame whose header was found."""
        self._counts.damaged += 1
        self._skip_to(self._place + WORD_BYTES)
        self.since = None

    def _intact(self, start: int, end: int, header: Header) -> bool:
        if not header.words:
            return True
        body = slice(start + WORD_BYTES, end - WORD_BYTES)
        with memoryview(self._bytes) as view, view[body] as payload:
            return frames.trailer(bytes(view[start : body.start]), payload) == view[body.stop : end]

    def _skip_to(self, place: int) -> None:
        self._counts.garbage += place - self._place
        self._place = place

    def _find(self) -> Header | None:
        """Go to the next header; None: there is none yet."""
        while True:
            place = self._bytes.find(_MAGIC, self._place)
            if place < 0:  # the last byte may be half of the magic
                place = len(self._bytes) - self._bytes.endswith(_MAGIC[:1])
            self._skip_to(max(place, self._place))
            head = self._bytes[self._place : self._place + WORD_BYTES]
            if len(head) < WORD_BYTES:
                return None
            header = frames.unpack_header(head)
            if header is not None and header.words <= MAX_PAYLOAD_WORDS:
                return header
            self._skip_to(self._place + 1)


class _Part(NamedTuple):
    """A message's share of a frame that is not acknowledged yet."""

    sequence: int
    flags: Flag
    pieces: list[memoryview | bytes]
    """The payload, padding included."""
    words: int
    missing: int
    crc: int


class Link:
    """Messages to and from the device behind ``transport``. One at a time may use it; not for several threads.

    After a LinkError or an interrupted call :meth:`connect` starts afresh, whatever state the device is in.

    Parameters
    ----------
    transport
        See :class:`Transport`; the link's own from now on.
    tries
        How often in a row something may be tried without success.

    Attributes
    ----------
    hello
        What the device said of itself; None before :meth:`connect`.
    counts
        See :class:`LinkCounts`.
    """

    def __init__(self, transport: Transport, *, tries: int = TRIES) -> None:
        if tries < 1:
            raise ValueError(f"tries must be positive, not {tries!r}")
        self.tries = tries
        self.hello: Hello | None = None
        self.counts = LinkCounts()
        self._transport = transport
        self._parser = Parser(self.counts)
        self._heard = 0  # frames, since `connect` was called
        self._start(None)

    def connect(self, *, number: int | None = None) -> Hello:
        """Begin a connection, which resets the engine; forgets all of the one before.

        ``number`` is the first SYNC's, random if None. LinkError if there is no device that speaks as this program
        does.
        """
        self.hello = None
        try:
            return self._connect(int.from_bytes(os.urandom(2), "little") if number is None else number)
        finally:
            if self.hello is None:
                self._start(None)

    def _connect(self, number: int) -> Hello:
        read, sent, self._heard = self.counts.bytes_read, self._transport.now(), 0
        for attempt in range(self.tries):
            # Each try has its own number: a late answer to another one must not pass for this one's.
            self._start((number + attempt) % SEQUENCES)
            if attempt % FLOOD_EVERY == FLOOD_EVERY - 1:
                self._write(bytes(FLOOD_BYTES))
            self._write_frame(Header(Type.SYNC, sequence=self._number or 0))
            hello = self._greeting()
            if hello is not None:
                self.hello = hello
                return hello
        seconds, read = self._transport.now() - sent, self.counts.bytes_read - read
        if not read:
            raise self._error(f"nothing came within {seconds:.3g} s; is it powered, is it the right port?")
        if not self._heard:
            raise self._error(f"{read} bytes came but no frame among them; is the baud rate right?")
        raise self._error(f"no connection after {self.tries} tries in {seconds:.3g} s; power it off and on")

    def send(self, message: bytes, data: bytes | memoryview | NDArray[Any] = b"") -> None:
        """Queue ``message``, then ``data`` as its end; frames leave at once as far as the device has room.

        ``data`` is not copied and must stay as it is until it is acknowledged (:meth:`flush`).
        """
        self._connected()
        if not message:
            raise ValueError("a message has at least a header")
        view = data.data if isinstance(data, np.ndarray) else memoryview(data)
        self._queue.append([memoryview(message), view.cast("B")] if view.nbytes else [memoryview(message)])
        self._pump()

    def receive(self, timeout: float) -> bytes | None:
        """The next whole message; None if none came within ``timeout`` seconds. What is queued leaves meanwhile."""
        self._connected()
        deadline = self._transport.now() + timeout
        while not self._inbox:
            self._step(deadline)
            if not self._inbox and self._transport.now() >= deadline:
                return None
        return self._inbox.popleft()

    def flush(self, timeout: float) -> None:
        """Return when all that was sent is acknowledged; LinkError if that takes longer than ``timeout`` seconds."""
        self._connected()
        deadline = self._transport.now() + timeout
        while self._queue or self._parts:
            if self._transport.now() >= deadline:
                raise self._error(f"did not take all that was sent within {timeout:.3g} s; connect again")
            self._step(deadline)

    def status(self) -> frames.Status:
        """What the device's side of the link counted."""
        self._connected()
        return self._poll()

    def close(self) -> None:
        """End the connection and close the transport."""
        self._start(None)
        self.hello = None
        self._transport.close()

    def _error(self, text: str) -> LinkError:
        name = self._transport.name
        return LinkError(f"{name}: {text} (emufpga selftest --device {name})")

    def _connected(self) -> None:
        if self._number is None:
            raise LinkError(f"{self._transport.name}: there is no connection; connect first")

    def _start(self, number: int | None) -> None:
        """Forget the connection before; ``number`` is the SYNC's that begins the next."""
        self._number = number
        self._echoes = 0
        # Sending. The parts of the queue's messages that have numbers are `_parts`, the oldest first; `_sent` of them
        # are on their way, `_fresh` is the number of the first that never was.
        self._queue: deque[list[memoryview]] = deque()
        self._parts: deque[_Part] = deque()
        self._sent = self._words_sent = self._credit = 0
        self._fresh = self._base = 0
        self._since = 0.0  # progress, or the last try to make some
        self._fruitless = 0  # tries since
        self._progress = self._transport.now()
        self._went_back: tuple[int, float] | None = None
        # Receiving.
        self._inbox: deque[bytes] = deque()
        self._chunks: list[bytes] = []
        self._want = 0
        self._owe = False
        self._refused: tuple[int, float] | None = None  # what was wanted when a NAK was sent, and when
        self._status: frames.Status | None = None

    # Connecting.

    def _greeting(self) -> Hello | None:
        """The device's greeting, if it answered the SYNC in time."""
        transport = self._transport
        deadline = transport.now() + transport.patience
        while not self._echoes and transport.now() < deadline:
            self._step(deadline)
        message = self.receive(2 * transport.patience) if self._echoes else None
        if message is None:
            return None
        if len(message) < messages.HEADER_BYTES or message[0] != Message.HELLO:
            raise self._error(f"greets with {message[:16].hex()}, which is none of our devices; load the bitstream")
        if message[1] != messages.VERSION:
            raise self._error(
                f"speaks version {message[1]}, this emufpga speaks {messages.VERSION}: load the bitstream of this "
                "release, or install the release that the bitstream is of"
            )
        try:
            hello = messages.parse_hello(message)
        except ValueError as error:
            raise self._error(f"greets with impossible parameters ({error}); load the bitstream again") from error
        # A SYNC that came twice has been answered twice by the time that this is answered, and we try again.
        try:
            self._poll(tries=2)
        except LinkError:
            return None
        return hello if self._echoes == 1 else None

    def _poll(self, tries: int | None = None) -> frames.Status:
        self._status = None
        begin = self._transport.now()
        for _ in range(tries or self.tries):
            self._write_frame(Header(Type.ACK, Flag.POLL, ack=self._want))
            deadline = self._transport.now() + self._transport.patience
            while self._transport.now() < deadline:
                self._step(deadline)
                if self._status is not None:
                    return self._status
        raise self._silent(begin)

    def _silent(self, since: float) -> LinkError:
        seconds = self._transport.now() - since
        return self._error(f"no answer for {seconds:.3g} s; is it powered, is the baud rate right?")

    # One step: read, take apart, answer, send.

    def _step(self, deadline: float) -> None:
        """Read once, waiting until ``deadline`` or until something else is due, then do all that follows."""
        transport, parser = self._transport, self._parser
        patience = transport.patience
        until = deadline
        if parser.since is not None:
            until = min(until, parser.since + patience)
        if self._parts:
            until = min(until, self._since + patience)
        wait = until - transport.now()
        data = transport.read(max(wait, TICK) if wait > 0 else 0.0)
        now = transport.now()
        self.counts.bytes_read += len(data)
        parser.feed(data)
        damaged = self.counts.damaged
        while True:
            while (frame := parser.next(now)) is not None:
                self._take(*frame, now)
            if parser.since is None or now < parser.since + patience:
                break
            parser.drop()  # its rest does not come
        if self.counts.damaged != damaged:
            self._refuse(now)
        if self._parts and now >= self._since + patience:
            self.counts.timeouts += 1
            self._again()
        self._pump()
        if self._owe:
            self._write_frame(Header(Type.ACK, ack=self._want))

    def _take(self, header: Header, payload: bytes, now: float) -> None:
        self._heard += 1
        if header.type == Type.SYNC:
            if header.sequence == self._number:
                self._echoes += 1
                if self.hello is not None:
                    raise self._error("began a new connection by itself; connect again")
                if self._echoes == 1:
                    self._credit = header.credit
            return
        if not self._echoes or not self._take_ack(header, now):
            return  # of a connection before
        if header.type == Type.STATUS:
            if len(payload) == frames.STATUS.size:
                self._status = frames.Status(*frames.STATUS.unpack(payload))
        elif header.type == Type.MESSAGE:
            if header.sequence == self._want:
                self._want = (self._want + 1) % SEQUENCES
                self._owe = True
                self._chunks.append(payload)
                if header.flags & Flag.LAST:
                    self._inbox.append(b"".join(self._chunks))
                    self._chunks.clear()
            else:
                self.counts.refused += 1
                if (header.sequence - self._want) % SEQUENCES < WINDOW:
                    self._refuse(now)
                else:  # it came before, so what acknowledged it was lost
                    self._owe = True

    def _take_ack(self, header: Header, now: float) -> bool:
        """Drop what the device has; False for an acknowledgment that cannot be."""
        count = (header.ack - self._base) % SEQUENCES
        if count > (self._fresh - self._base) % SEQUENCES:
            return count >= WINDOW  # overtaken by a newer one: its message may be good
        for _ in range(count):
            part = self._parts.popleft()
            if self._sent:
                self._sent -= 1
                self._words_sent -= part.words
        self._base, self._credit = header.ack, header.credit
        if count or (header.type == Type.STATUS and not self._sent):  # a device that tells of no room is alive
            self._since = self._progress = now
            self._fruitless = 0
        if header.flags & Flag.NAK:
            self.counts.naks += 1
            # Every frame on its way behind a lost one brings a NAK; those after the first tell nothing new.
            base, when = self._went_back or (-1, 0.0)
            if self._sent and (base != self._base or now >= when + self._transport.patience):
                self._again()
        return True

    def _refuse(self, now: float) -> None:
        """Ask for what lacks, once a round trip."""
        want, when = self._refused or (-1, 0.0)
        if self._echoes and (want != self._want or now >= when + self._transport.patience):
            self._refused = (self._want, now)
            self._write_frame(Header(Type.ACK, Flag.NAK, ack=self._want))

    def _again(self) -> None:
        """Send what is not acknowledged once more; where there was no room for any, ask for room."""
        self._fruitless += 1
        if self._fruitless > self.tries:
            raise self._silent(self._progress)
        if self._sent:
            self._went_back = (self._base, self._transport.now())
            self._sent = self._words_sent = 0
            self._pump()
        else:
            self._write_frame(Header(Type.ACK, Flag.POLL, ack=self._want))
        self._since = self._transport.now()

    # Sending.

    def _pump(self) -> None:
        """Write all parts that wait, as far as the device has room for them."""
        out: list[bytes | memoryview] = []
        while self._sent < len(self._parts) or self._cut():
            part = self._parts[self._sent]
            if self._words_sent + part.words > self._credit or self._sent == WINDOW - 1:
                break
            self._sent += 1
            self._words_sent += part.words
            self.counts.frames_sent += 1
            if part.sequence == self._fresh:
                self._fresh = (self._fresh + 1) % SEQUENCES
            else:
                self.counts.frames_resent += 1
                self.counts.bytes_resent += (part.words + 2) * WORD_BYTES
            header = Header(Type.MESSAGE, part.flags, part.missing, part.sequence, self._want, part.words)
            head = frames.pack_header(header)
            out += [head, *part.pieces, part.crc.to_bytes(4, "little"), head[:12]]
        if out:
            self._owe = False
            self._write(b"".join(out))
            self._since = self._transport.now()

    def _cut(self) -> bool:
        """Give the queue's next part a number; False if the queue is empty."""
        if not self._queue:
            return False
        if not self._parts:
            self._since = self._progress = self._transport.now()
        assert self.hello is not None, "nothing can be queued before"
        views = self._queue[0]
        room = self.hello.params.frame_bytes
        pieces: list[memoryview | bytes] = []
        crc = 0
        while views and room:
            piece = views[0][:room]
            pieces.append(piece)
            crc = zlib.crc32(piece, crc)
            room -= len(piece)
            views[0] = views[0][len(piece) :]
            if not views[0]:
                del views[0]
        length = self.hello.params.frame_bytes - room
        missing = -length % WORD_BYTES
        pieces.append(bytes(missing))
        number = (self._base + len(self._parts)) % SEQUENCES
        flags = Flag(0) if views else Flag.LAST
        words = (length + missing) // WORD_BYTES
        self._parts.append(_Part(number, flags, pieces, words, missing, zlib.crc32(pieces[-1], crc)))
        if not views:
            self._queue.popleft()
        return True

    def _write_frame(self, header: Header) -> None:
        self._owe = False
        self.counts.frames_sent += 1
        self._write(frames.frame(header))

    def _write(self, data: bytes) -> None:
        self.counts.bytes_written += len(data)
        self._transport.write(data)
