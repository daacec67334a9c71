"""Bytes of a model file, exactly those asked for, read by position and one piece ahead of its use.

A ``Store`` reads through the page cache or, ``direct``, past it. A direct read starts and ends at multiples of the
device's block, so it reads more than was asked for: those bytes are counted as *spilled*, and cut off.

Offsets are absolute byte offsets in the file; lengths are bytes; times are seconds.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from queue import SimpleQueue
from time import perf_counter
from typing import NoReturn, Self

from hw.formats.messages import MAX_OUTSTANDING

BLOCK_BYTES = 4096
"""What direct reads are rounded out to: a multiple of every common device's logical block."""
CHECK_SECONDS = 0.001
"""How long reads go on before the file is looked at again, while others wait: a look costs 1 µs, a read 40 µs."""
HUGE_PAGE_BYTES = 1 << 21
TIMEOUT = 10.0
"""Seconds that ``take`` waits unless told otherwise."""
CLOSE_TIMEOUT = 1.0
"""Seconds that ``close`` waits for a read under way."""

Pread = Callable[[int, list[memoryview], int], int]
"""As ``os.preadv``."""


class StorageError(RuntimeError):
    """Bytes that cannot be had. The message is one line: the file, where in it, what is wrong, what to do."""


@dataclass(slots=True)
class ReadCounts:
    """What a store has read; ``requested + spilled == read``."""

    reads: int = 0
    """That gave what they were asked for."""
    requested: int = 0
    """Bytes that those were asked for."""
    spilled: int = 0
    """Bytes read beside those: what direct reads are rounded out by, and all that failed reads got."""
    read: int = 0
    """Bytes that the system gave: what it counts as ``rchar``. Which of them came from a disk it does not say."""
    read_seconds: float = 0.0
    """Spent reading, by whichever thread."""
    waited_seconds: float = 0.0
    """Spent in ``take``, waiting or reading."""
    cached: int = 0
    """Bytes handed over without a read: :class:`host.expert_cache.ExpertCache` had them."""
    hits: int = 0
    """Experts that it had, once for each time that they were wanted; 0 without it."""
    misses: int = 0

    def add(self, other: ReadCounts) -> None:
        """Add ``other`` to this, field by field."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Store:
    """Reads of one model file, handed over in the order in which they were submitted; a context manager that closes it.

    ``submit`` queues a read, ``take`` gives the oldest one's bytes, ``read`` does both. At most 8 reads are unanswered
    at a time. The bytes are a read-only view of a page-aligned buffer. It is valid for as long as it, or a slice of it,
    is held: a buffer is used again only when nobody holds any of it. A caller that lets go of a piece before it takes
    the next one keeps the store at two buffers (one without ``ahead``). The bytes themselves are not checked.

    Parameters
    ----------
    path
        The file; opened here, and closed by ``close``.
    direct
        Past the page cache (``O_DIRECT``).
    ahead
        A thread reads one piece further than was taken. Otherwise ``take`` reads, and its timeout cannot end a read
        that hangs.
    block
        Bytes that direct reads are rounded out to: a power of two, a multiple of the device's logical block.
    pread
        Reads, as ``os.preadv`` does.

    Raises
    ------
    StorageError
        From ``submit`` for bytes that are not within the file or a ninth read; nothing is read then. From ``take``: no
        answer in time (the read stays the oldest: take again, or ``clear``), and whatever became of that one read: the
        file ended early or could not be read. Reads after it are not affected. A file that was written to, replaced or
        removed since it was opened fails the ``take`` that leaves no read waiting, and others within a millisecond: the
        pieces since the last such ``take`` are from the file that was opened only if it went well.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        direct: bool = False,
        ahead: bool = True,
        block: int = BLOCK_BYTES,
        pread: Pread = os.preadv,
    ) -> None:
        if block < 1 or block & (block - 1):
            raise ValueError(f"block must be a power of two, not {block!r}")
        self.path = os.fspath(path)
        self.direct, self.ahead = direct, ahead
        self._block = block if direct else 1
        self._pread = pread
        self._fd = _open(self.path, direct)
        self._state = os.fstat(self._fd)
        self.file_bytes = self._state.st_size
        self._waiting: deque[_Read] = deque()
        self._waited = 0.0
        self._counts: list[ReadCounts] = []
        self._closed = False
        self._start()

    def announce(self, requests: Sequence[tuple[int, int]]) -> None:
        """What will be asked for next, in order; nothing is read for it. For a store that keeps what it read."""

    def submit(self, offset: int, length: int) -> None:
        """Queue a read of ``length`` bytes from ``offset``."""
        if self._closed:
            self._fail("the store is closed; open it again")
        if offset < 0 or length < 1 or offset + length > self.file_bytes:
            self._fail(
                f"offset {offset}: {length} bytes from there are not within the file's {self.file_bytes}; "
                "it is not the file that the request was made for, or the request is damaged"
            )
        if self.waiting >= MAX_OUTSTANDING:
            self._fail(f"offset {offset}: {MAX_OUTSTANDING} reads wait already; take one before submitting another")
        read = _Read(offset, length)
        self._waiting.append(read)
        if self._thread:
            self._thread.put(read)

    def take(self, timeout: float = TIMEOUT) -> memoryview:
        """The bytes of the oldest read; waits for them for ``timeout`` seconds at most."""
        if not self._waiting:
            self._fail("the store is closed; open it again" if self._closed else "no read waits; submit one first")
        # It leaves the queue with its outcome, not before, so that Ctrl-C in here loses no read.
        read = self._waiting[0]
        if not self._thread:
            try:
                data = self._reader.read(read.offset, read.length, len(self._waiting) == 1)
            except Exception:
                self._waiting.popleft()
                raise
            self._waiting.popleft()
            return data
        begin = perf_counter()
        try:
            ended = self._thread.wait(read, timeout)
        finally:
            self._waited += perf_counter() - begin
        if not ended:
            self._fail(
                f"offset {read.offset}: {read.length} bytes did not come within {timeout:g} s; "
                "the storage hangs: check the device (dmesg), or allow more time"
            )
        self._waiting.popleft()
        if read.data is None:
            assert read.error
            raise read.error
        return read.data

    def read(self, offset: int, length: int, timeout: float = TIMEOUT) -> memoryview:
        """``submit``, then ``take``; nothing else may wait."""
        if self.waiting:
            self._fail(f"offset {offset}: {self.waiting} reads wait; take them before reading at once")
        self.submit(offset, length)
        return self.take(timeout)

    def clear(self) -> None:
        """Forget every read that waits; one that is under way ends by itself, and nobody sees it."""
        if self._closed:
            self._fail("the store is closed; open it again")
        self._stop()
        self._start()

    @property
    def waiting(self) -> int:
        """Reads submitted and not taken."""
        return len(self._waiting)

    @property
    def counts(self) -> ReadCounts:
        """The counts so far; of a read under way nothing yet."""
        counts = ReadCounts(waited_seconds=self._waited)
        for part in self._counts:
            counts.add(part)
        if not self.ahead:
            counts.waited_seconds = counts.read_seconds
        return counts

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Close the file. Waits for a read under way, ``timeout`` seconds at most; then it is left to its thread."""
        if not self._closed:
            self._closed = True
            self._stop()
            os.close(self._fd)
            if self._thread:
                self._thread.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        try:
            # Each has a descriptor of its own: a thread whose read hangs may outlive the store and this one's number.
            fd = os.dup(self._fd)
        except OSError as error:
            self._closed = True
            os.close(self._fd)
            raise StorageError(f"{self.path}: cannot open: {error.strerror or error}") from error
        self._reader = _Reader(self.path, fd, self._state, self._block, self._pread)
        self._counts.append(self._reader.counts)
        self._thread = _Thread(self._reader) if self.ahead else None

    def _stop(self) -> None:
        self._waiting.clear()
        if self._thread:
            self._thread.stop()
        else:
            self._reader.close()

    def _fail(self, what: str) -> NoReturn:
        raise StorageError(f"{self.path}: {what}")


def held_bytes(length: int, *, direct: bool = False, ahead: bool = True) -> int:
    """Most bytes of buffers that a :class:`Store` holds for pieces of ``length`` bytes.

    As long as its caller lets go of each before the next: two buffers, one without ``ahead``, in whole huge pages.
    """
    size = length + (2 * (BLOCK_BYTES - 1) if direct else 0)
    return (1 + ahead) * (size + -size % HUGE_PAGE_BYTES)


def new_buffer(size: int) -> mmap.mmap:
    """``size`` bytes or more of whole huge pages, where the system has them.

    A direct read into a huge page is one piece for the device; into ordinary pages it is many, and took 1.2 times as
    long here.
    """
    buffer = mmap.mmap(-1, size + -size % HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    # A child process must not share pages that a device is writing to.
    buffer.madvise(mmap.MADV_DONTFORK)
    return buffer


def _open(path: str, direct: bool) -> int:
    flag = getattr(os, "O_DIRECT", None) if direct else 0
    if flag is None:
        raise StorageError(f"{path}: this system has no direct reads; read through the page cache (direct off)")
    try:
        # Looked at before opening: opening a FIFO waits for a writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise StorageError(f"{path}: not a regular file; give the path of a model file")
        return os.open(path, os.O_RDONLY | flag)
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            raise StorageError(_no_direct(path)) from error
        raise StorageError(f"{path}: cannot open: {error.strerror or error}; check the path and its rights") from error


def _no_direct(path: str) -> str:
    return (
        f"{path}: its filesystem or device refuses direct reads in these blocks; "
        "read through the page cache (direct off), or move the file"
    )


class _Reader:
    """Reads of an open file into buffers that are used again; for one thread. Owns ``fd``."""

    def __init__(self, path: str, fd: int, state: os.stat_result, block: int, pread: Pread) -> None:
        self.path, self.fd, self.block, self.pread = path, fd, block, pread
        self.size, self.mtime, self.links = state.st_size, state.st_mtime_ns, state.st_nlink
        self.checked = 0.0
        self.counts = ReadCounts()
        self.closed = False
        self.buffers: list[mmap.mmap] = []

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self.fd)

    def read(self, offset: int, length: int, last: bool) -> memoryview:
        """The bytes; StorageError if they are not to be had. ``last``: no other read waits."""
        begin = perf_counter()
        block = self.block
        head = offset % block
        start, want = offset - head, head + length
        size = want + -want % block
        whole = memoryview(self.buffer(size))
        read = requested = done = 0
        try:
            while True:
                got = self.pread(self.fd, [whole[done:size]], start + done)
                read += got
                if done + got >= want:
                    break
                # A direct read can only go on from the start of a block, which then is read again.
                further = (done + got) // block * block
                if further <= done:
                    self.check_unchanged(offset)
                    self.fail(
                        offset,
                        f"{min(want - done - got, length)} of {length} bytes are missing, the file ends before them; "
                        "it is truncated: get it again",
                    )
                done = further
            # After the bytes: what came before a change is from the file that was opened.
            if last or begin - self.checked > CHECK_SECONDS:
                self.check_unchanged(offset)
                self.checked = begin
            requested = length
        except OSError as error:
            if block > 1 and error.errno == errno.EINVAL:
                raise StorageError(_no_direct(self.path)) from error
            self.fail(offset, f"cannot read {length} bytes: {error.strerror or error}; check the device (dmesg)", error)
        finally:
            counts = self.counts
            if requested:
                counts.reads += 1
                counts.requested += requested
            counts.spilled += read - requested
            counts.read += read
            counts.read_seconds += perf_counter() - begin
        return whole[head:want].toreadonly()

    def buffer(self, size: int) -> mmap.mmap:
        """A buffer of ``size`` bytes or more of which nobody holds a view."""
        for buffer in self.buffers:
            try:
                # To its own size: changes nothing, and is refused while there is a view of it.
                buffer.resize(len(buffer))
            except BufferError:
                continue
            if len(buffer) >= size:
                return buffer
            self.buffers.remove(buffer)
            break
        self.buffers.append(new_buffer(size))
        return self.buffers[-1]

    def check_unchanged(self, offset: int) -> None:
        """StorageError if the file is not what was opened. Fewer links say that its name was given to another file."""
        now = os.fstat(self.fd)
        if now.st_size != self.size:
            what = f"it had {self.size} bytes and has {now.st_size}"
        elif now.st_mtime_ns != self.mtime:
            what = "it was written to"
        elif now.st_nlink < self.links:
            what = "it was replaced or removed"
        else:
            return
        self.fail(offset, f"changed while in use ({what}): open it again")

    def fail(self, offset: int, what: str, cause: Exception | None = None) -> NoReturn:
        raise StorageError(f"{self.path}: offset {offset}: {what}") from cause


class _Read:
    """What is asked for; later ``data`` or ``error``. A thread that reads it holds ``ended`` until either is there."""

    data: memoryview | None = None
    error: Exception | None = None
    ended: threading.Lock

    def __init__(self, offset: int, length: int) -> None:
        self.offset, self.length = offset, length


class _Thread:
    """Does the reads that are put, in order; one before anything is taken, then one more for each ``wait``."""

    def __init__(self, reader: _Reader) -> None:
        self._queue: SimpleQueue[_Read | None] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()
        self._room.put(None)
        self._stopped = False
        self._reader = reader
        # A daemon: a read that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"read {reader.path}", daemon=True)
        self._thread.start()

    def put(self, read: _Read) -> None:
        read.ended = threading.Lock()
        read.ended.acquire()
        self._queue.put(read)

    def wait(self, read: _Read, timeout: float) -> bool:
        """Whether the read, the oldest, has ended or does within ``timeout`` seconds."""
        # The caller has done with the piece before. Told again after a timeout, it reads one further ahead: no harm.
        self._room.put(None)
        return bool(read.data or read.error or read.ended.acquire(timeout=max(timeout, 0)))

    def stop(self) -> None:
        """End after the read under way."""
        self._stopped = True
        self._queue.put(None)
        self._room.put(None)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while True:
                read = self._queue.get()
                self._room.get()
                if self._stopped or read is None:
                    return
                try:
                    read.data = self._reader.read(read.offset, read.length, self._queue.empty())
                except Exception as error:
                    read.error = error
                read.ended.release()
                del read  # and its view with it: the buffer is the caller's now
        finally:
            self._reader.close()
