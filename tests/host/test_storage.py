import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from host import storage
from host.bench_storage import process_io
from host.storage import BLOCK_BYTES, StorageError, Store
from tests.host.devices import refuse_direct_reads

FILE_BYTES = 300_000  # no multiple of a block: direct reads are cut at the end
PATIENCE = 10.0

AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["inline", "ahead"])
DIRECT = pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])


@pytest.fixture
def path(tmp_path) -> Path:
    """A file of random bytes, written long ago."""
    path = tmp_path / "model.gguf"
    path.write_bytes(np.random.default_rng(1).bytes(FILE_BYTES))
    os.utime(path, (10**9, 10**9))
    return path


@pytest.fixture
def open_store(path):
    """Opens stores and closes them at the end; skips direct ones where the filesystem has none."""
    stores = []

    def open_one(**options) -> Store:
        try:
            stores.append(Store(path, **options))
        except StorageError as error:
            if options.get("direct") and "refuses direct reads" in str(error):
                pytest.skip(f"no direct reads: {error}")
            raise
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def fails(call: Callable[[], object], path: Path, *parts: str) -> str:
    """The message, of one line with the file's path and ``parts``, with which ``call`` fails."""
    with pytest.raises(StorageError) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def threads(path: Path) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if str(path) in thread.name]


def requests(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """Odd places and lengths, from a byte to many blocks."""
    lengths = np.minimum(2 ** rng.uniform(0, 17, count), FILE_BYTES).astype(int)
    return [(int(rng.integers(0, FILE_BYTES - length + 1)), int(length)) for length in lengths]


class Faulty:
    """``os.preadv``, but ``fault`` is asked first: it may raise, wait, or say how many bytes to read at most."""

    def __init__(self, fault: Callable[[int, int], int | None]) -> None:
        self.fault = fault
        self.places: list[int] = []

    def __call__(self, fd: int, views: list[memoryview], offset: int) -> int:
        (view,) = views
        self.places.append(offset)
        most = self.fault(len(self.places) - 1, offset)
        if most is None:
            return os.preadv(fd, views, offset)
        with view[:most] as part:
            return _copy(fd, part, offset) if most else 0


def _copy(fd: int, part: memoryview, offset: int) -> int:
    # A direct descriptor reads whole blocks only, so into a buffer of our own.
    block = BLOCK_BYTES
    start, end = offset // block * block, -(-(offset + len(part)) // block) * block
    buffer = storage.new_buffer(end - start)
    with memoryview(buffer)[: end - start] as whole:
        got = os.preadv(fd, [whole], start)
        data = bytes(whole[:got])[offset - start :][: len(part)]
    part[: len(data)] = data
    return len(data)


# Bytes


@DIRECT
@AHEAD
@pytest.mark.parametrize("seed", range(3))
def test_random_reads(path, open_store, direct, ahead, seed):
    """Exactly the bytes of the file, in order, however many reads wait and however slow either side is."""
    rng = np.random.default_rng(seed)
    data = path.read_bytes()
    naps = rng.random(1000) < 0.1

    def nap(call: int, offset: int) -> None:
        if naps[call % len(naps)]:
            time.sleep(0.001)

    store = open_store(direct=direct, ahead=ahead, pread=Faulty(nap))
    asked = requests(rng, 120)
    waiting: list[tuple[int, int]] = []
    left = list(asked)
    while left or waiting:
        if left and len(waiting) < 8 and (not waiting or rng.random() < 0.5):
            waiting.append(left.pop(0))
            store.submit(*waiting[-1])
            continue
        offset, length = waiting.pop(0)
        assert store.take(PATIENCE) == data[offset : offset + length]
        if rng.random() < 0.1:
            time.sleep(0.001)
    counts = store.counts
    assert (counts.reads, counts.requested) == (len(asked), sum(length for _, length in asked))
    assert counts.requested + counts.spilled == counts.read
    assert direct or counts.spilled == 0


@DIRECT
@AHEAD
@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, 1),
        (FILE_BYTES - 1, 1),
        (0, FILE_BYTES),
        (0, 4096),
        (4096, 8192),
        (4095, 1),
        (4095, 2),
        (4096, 1),
        (1, 4095),
        (1, 4096),
        (299_007, 993),
        (294_912, 5088),
    ],
)
def test_corners(path, open_store, direct, ahead, offset, length):
    store = open_store(direct=direct, ahead=ahead)
    assert store.read(offset, length) == path.read_bytes()[offset : offset + length]


@pytest.mark.parametrize("seed", range(2))
def test_direct_and_buffered_are_the_same(open_store, seed):
    direct, buffered = open_store(direct=True), open_store(direct=False)
    for place in requests(np.random.default_rng(seed), 50):
        assert direct.read(*place) == buffered.read(*place)


@AHEAD
def test_views_stay_while_they_are_held(path, open_store, ahead):
    """Also where only a slice or an array of a piece is left."""
    data = path.read_bytes()
    store = open_store(ahead=ahead)
    held = []
    for number in range(20):
        piece = store.read(number * 10_000, 10_000)
        held.append([piece, piece[100:9000], np.frombuffer(piece, np.uint8)][number % 3])
        del piece
    for number, view in enumerate(held):
        whole = data[number * 10_000 :][:10_000]
        assert bytes(view) == (whole[100:9000] if number % 3 == 1 else whole)


@pytest.mark.parametrize(("ahead", "buffers"), [(False, 1), (True, 2)])
def test_buffers_are_used_again(open_store, monkeypatch, ahead, buffers):
    made = []
    new = storage.new_buffer
    monkeypatch.setattr(storage, "new_buffer", lambda size: made.append(size) or new(size))
    store = open_store(ahead=ahead)
    for number in range(2):
        store.submit(number * 1000, 1000)
    for number in range(2, 100):
        with store.take():
            pass
        store.submit(number * 1000, 1000)
    assert len(made) <= buffers


def test_larger_reads_get_larger_buffers(path):
    size = storage.HUGE_PAGE_BYTES
    with path.open("r+b") as file:
        file.truncate(2 * size)  # a hole
    with Store(path, ahead=False) as store:
        for length in (1, size, size + 1, 2 * size, 5):
            with store.read(0, length) as piece:
                assert len(piece) == length


def test_view_is_read_only_and_aligned(open_store):
    piece = open_store(ahead=False).read(8192, 100)
    assert piece.readonly
    assert np.frombuffer(piece, np.uint8).ctypes.data % 4096 == 0


def test_one_piece_ahead_and_no_more(open_store):
    begun = Faulty(lambda call, offset: None)
    store = open_store(pread=begun)
    for number in range(8):
        store.submit(number * 1000, 1000)
    for taken in range(8):
        until(lambda: len(begun.places) > taken)  # noqa: B023 called at once
        assert begun.places == [number * 1000 for number in range(taken + 1)]
        store.take(PATIENCE)


# Counts


@pytest.mark.parametrize(
    ("offset", "length", "read"),
    [
        (5000, 100, 4096),
        (4096, 4096, 4096),
        (4095, 2, 8192),
        (0, 4097, 8192),
        (299_500, 100, 992),  # from 299,008 to the end of the file, not to 303,104
        (299_999, 1, 992),
        (299_007, 2, 5088),
        (0, FILE_BYTES, FILE_BYTES),
    ],
)
def test_spill(open_store, offset, length, read):
    store = open_store(direct=True, ahead=False)
    store.read(offset, length)
    counts = store.counts
    assert (counts.reads, counts.requested, counts.spilled, counts.read) == (1, length, read - length, read)


def test_smaller_blocks_spill_less(open_store):
    try:
        store = open_store(direct=True, ahead=False, block=512)
        store.read(5000, 100)
    except StorageError as error:
        pytest.skip(f"the device's block is larger: {error}")
    assert store.counts.read == 512


@DIRECT
@AHEAD
def test_counts_are_the_systems(open_store, direct, ahead):
    """``read`` is what the system counts for this process."""
    store = open_store(direct=direct, ahead=ahead)
    places = requests(np.random.default_rng(2), 40)
    before, _, own = process_io()
    if not before:
        pytest.skip("no /proc/self/io")
    for place in places:
        store.read(*place)
    seen = process_io()[0] - before - own
    # Other threads of the test runner may read a little, too.
    assert store.counts.read <= seen < store.counts.read + 65_536
    assert store.counts.read_seconds > 0
    assert store.counts.waited_seconds > 0


def test_failed_reads_are_spill(open_store):
    """What a read got before it failed is counted, though nobody was given it."""

    def fault(call: int, offset: int) -> int | None:
        if call == 1:
            raise OSError(errno.EIO, "Input/output error")
        return 600

    store = open_store(ahead=False, pread=Faulty(fault))
    with pytest.raises(StorageError):
        store.read(0, 1000)
    counts = store.counts
    assert (counts.reads, counts.requested, counts.spilled, counts.read) == (0, 0, 600, 600)


# Faults


@DIRECT
@AHEAD
@pytest.mark.parametrize("seed", range(2))
def test_short_reads_go_on(path, open_store, direct, ahead, seed):
    rng = np.random.default_rng(seed)
    data = path.read_bytes()
    # A direct read moves on by whole blocks; what comes beside them comes again.
    short = Faulty(lambda call, offset: int(rng.integers(1, 5000)) + BLOCK_BYTES * direct)
    store = open_store(direct=direct, ahead=ahead, pread=short)
    for offset, length in requests(rng, 30):
        assert store.read(offset, length) == data[offset : offset + length]
    counts = store.counts
    assert len(short.places) > counts.reads == 30
    assert counts.requested + counts.spilled == counts.read
    assert direct or counts.spilled == 0


def test_short_direct_read_goes_on_from_a_block(path, open_store):
    short = Faulty(lambda call, offset: 5000 if call == 0 else None)
    store = open_store(direct=True, ahead=False, pread=short)
    assert store.read(10, 9000) == path.read_bytes()[10:9010]
    assert short.places == [0, 4096]
    assert store.counts.read == 5000 + (12_288 - 4096)
    assert store.counts.spilled == store.counts.read - 9000


@AHEAD
@pytest.mark.parametrize(
    ("direct", "gives", "missing"),
    [
        (False, [0], 50),
        (False, [20, 20, 0], 10),
        (True, [0], 50),
        (True, [100, 100, 100], 50),  # of the block, which has 3,617 bytes before those
        (True, [3657, 3657, 3657], 10),  # a direct read that comes short starts its block again
    ],
)
def test_end_before_the_bytes(path, open_store, ahead, direct, gives, missing):
    calls = Faulty(lambda call, offset: gives[call])
    store = open_store(direct=direct, ahead=ahead, pread=calls)
    parts = ("offset 20001", f"{missing} of 50 bytes are missing", "truncated", "get it again")
    fails(lambda: store.read(20_001, 50), path, *parts)
    assert len(calls.places) <= len(gives)
    assert store.counts.read == store.counts.spilled == sum(gives[: len(calls.places)])


@AHEAD
def test_input_error_belongs_to_its_read(path, open_store, ahead):
    def fault(call: int, offset: int) -> None:
        if offset == 2000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    data = path.read_bytes()
    store = open_store(ahead=ahead, pread=Faulty(fault))
    for number in range(5):
        store.submit(number * 1000, 1000)
    for number in range(5):
        if number == 2:
            fails(lambda: store.take(PATIENCE), path, "offset 2000", "Input/output error", "check the device")
        else:
            assert store.take(PATIENCE) == data[number * 1000 :][:1000]


def write(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"other")


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(FILE_BYTES))
    os.utime(other, (10**9, 10**9))
    os.replace(other, path)


CHANGES = {
    "written": (write, "was written to"),
    "truncated": (lambda path: os.truncate(path, 1000), "had 300000 bytes and has 1000"),
    "longer": (append, "had 300000 bytes and has 300004"),
    "replaced": (replace, "was replaced or removed"),
    "removed": (Path.unlink, "was replaced or removed"),
}


@DIRECT
@AHEAD
@pytest.mark.parametrize("change", CHANGES)
def test_changed_file(path, open_store, direct, ahead, change):
    """Every later read fails, also one of bytes that a shorter file no longer has."""
    store = open_store(direct=direct, ahead=ahead)
    store.read(0, 5000)
    act, what = CHANGES[change]
    act(path)
    for place in ((0, 5000), (200_000, 5000), (0, 10)):
        fails(lambda: store.read(*place), path, f"offset {place[0]}", "changed while in use", what, "open it again")  # noqa: B023 called at once


@AHEAD
def test_change_is_seen_by_the_last_take(path, open_store, monkeypatch, ahead):
    monkeypatch.setattr(storage, "CHECK_SECONDS", 1000)
    store = open_store(ahead=ahead)
    store.read(0, 10)
    write(path)
    for _ in range(3):
        store.submit(0, 10)

    def take_all() -> None:
        for _ in range(3):
            store.take(PATIENCE)

    fails(take_all, path, "changed while in use")


def test_change_is_seen_while_others_wait(path, open_store, monkeypatch):
    monkeypatch.setattr(storage, "CHECK_SECONDS", -1)
    store = open_store(ahead=False)
    for _ in range(3):
        store.submit(0, 10)
    store.take()
    write(path)
    fails(store.take, path, "changed while in use")


def test_what_is_no_change(path, open_store):
    store = open_store()
    path.read_bytes()
    path.chmod(0o400)
    os.link(path, path.with_suffix(".link"))
    path.rename(path.with_suffix(".moved"))
    assert len(store.read(0, 1000)) == 1000


@pytest.mark.parametrize(("offset", "length"), [(-1, 10), (0, 0), (0, -5), (299_991, 10), (300_000, 1), (1 << 47, 210)])
@AHEAD
def test_outside_the_file(path, open_store, ahead, offset, length):
    calls = Faulty(lambda call, offset: None)
    store = open_store(ahead=ahead, pread=calls)
    fails(lambda: store.submit(offset, length), path, f"offset {offset}", f"{length} bytes", "not within")
    assert store.read(0, 10) == path.read_bytes()[:10]
    assert calls.places == [0]


@AHEAD
def test_too_many_and_none(path, open_store, ahead):
    store = open_store(ahead=ahead)
    fails(store.take, path, "no read waits")
    for number in range(8):
        store.submit(number, 1)
    fails(lambda: store.submit(8, 1), path, "8 reads wait already")
    fails(lambda: store.read(8, 1), path, "8 reads wait")
    data = path.read_bytes()
    assert [bytes(store.take(PATIENCE)) for _ in range(8)] == [data[i : i + 1] for i in range(8)]
    fails(store.take, path, "no read waits")


# Hanging, stopping


class Gate:
    """A fault that holds the read at ``offset`` until it is opened."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, call: int, offset: int) -> None:
        if offset == self.offset:
            self.reached.set()
            assert self.opened.wait(PATIENCE)


@pytest.fixture
def gate():
    gate = Gate(1000)
    yield gate
    gate.opened.set()


def test_hanging_read(path, open_store, gate):
    """Reported in time; the bytes are still to be had when it goes on, and in order."""
    store = open_store(pread=Faulty(gate))
    for number in range(3):
        store.submit(number * 1000, 1000)
    store.take(PATIENCE)
    for timeout in (0.02, 0, -1):
        fails(lambda: store.take(timeout), path, "offset 1000", "1000 bytes did not come within", "hangs")  # noqa: B023 called at once
    gate.opened.set()
    data = path.read_bytes()
    assert store.take(PATIENCE) == data[1000:2000]
    assert store.take(PATIENCE) == data[2000:3000]


def test_close_while_a_read_hangs(path, open_store, gate):
    store = open_store(pread=Faulty(gate))
    store.submit(1000, 1000)
    assert gate.reached.wait(PATIENCE)
    (thread,) = threads(path)
    store.close(timeout=0.02)
    assert thread.is_alive()
    assert thread.daemon
    gate.opened.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_clear(path, open_store, gate):
    """What waited is forgotten, what hung too; new reads get their own bytes."""
    store = open_store(pread=Faulty(gate))
    for number in range(1, 5):
        store.submit(number * 1000, 1000)
    assert gate.reached.wait(PATIENCE)
    store.clear()
    fails(store.take, path, "no read waits")
    data = path.read_bytes()
    assert store.read(7000, 1000) == data[7000:8000]
    gate.opened.set()
    until(lambda: len(threads(path)) == 1)
    assert store.read(8000, 1000) == data[8000:9000]
    assert store.counts.requested == 3000  # with the one that nobody saw


def test_clear_without_thread(path, open_store):
    store = open_store(ahead=False)
    store.submit(0, 1000)
    store.clear()
    assert store.read(7, 1000) == path.read_bytes()[7:1007]
    assert store.counts.requested == 1000


@AHEAD
@pytest.mark.parametrize("waiting", [0, 1, 5])
def test_close(path, ahead, waiting):
    before = len(os.listdir("/proc/self/fd"))
    with Store(path, ahead=ahead) as store:
        assert len(threads(path)) == ahead
        for _ in range(waiting):
            store.submit(0, 1000)
    assert threads(path) == []
    assert len(os.listdir("/proc/self/fd")) == before
    store.close()
    for call in (store.take, store.clear, lambda: store.submit(0, 1)):
        fails(call, path, "closed", "open it again")


def test_interrupt_while_reading(path, open_store):
    def fault(call: int, offset: int) -> None:
        if call == 0:
            raise KeyboardInterrupt

    store = open_store(ahead=False, pread=Faulty(fault))
    store.submit(0, 1000)
    with pytest.raises(KeyboardInterrupt):
        store.take()
    assert store.take() == path.read_bytes()[:1000]


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread")
def test_interrupt_while_waiting(path, open_store, gate):
    main = threading.main_thread().ident
    assert main
    interrupted = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def fault(call: int, offset: int) -> None:
        # A signal that comes just before the wait's system call does not end it; the next one does.
        while not interrupted.wait(0.05):
            signal.pthread_kill(main, signal.SIGINT)
        gate(call, offset)

    store = open_store(pread=Faulty(fault))

    def begin() -> None:
        store.submit(1000, 1000)
        store.take(PATIENCE)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            begin()
    finally:
        interrupted.set()
        signal.signal(signal.SIGINT, before)
    gate.opened.set()
    data = path.read_bytes()
    assert store.take(PATIENCE) == data[1000:2000]
    assert store.read(0, 1000) == data[:1000]


def test_interrupt_with_the_bytes_there(path, open_store, monkeypatch):
    """Between the end of the wait and handing over."""
    wait = storage._Thread.wait

    def interrupted(thread, read, timeout) -> bool:
        assert wait(thread, read, timeout)
        raise KeyboardInterrupt

    store = open_store()
    store.submit(0, 1000)
    with monkeypatch.context() as patch:
        patch.setattr(storage._Thread, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.take(PATIENCE)
    assert store.take(0.5) == path.read_bytes()[:1000]


# Opening


def test_no_file(tmp_path):
    path = tmp_path / "none"
    fails(lambda: Store(path), path, "cannot open: No such file or directory", "check the path")


def test_no_regular_file(tmp_path):
    fails(lambda: Store(tmp_path), tmp_path, "not a regular file")
    path = tmp_path / "fifo"
    os.mkfifo(path)
    fails(lambda: Store(path), path, "not a regular file")


def test_no_direct_reads_at_open(path, monkeypatch):
    refuse_direct_reads(monkeypatch)
    fails(lambda: Store(path, direct=True), path, "refuses direct reads", "read through the page cache")
    Store(path).close()


def test_no_direct_reads_at_reading(path, open_store):
    def refuse(call: int, offset: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    store = open_store(direct=True, pread=Faulty(refuse))
    fails(lambda: store.read(0, 10), path, "refuses direct reads", "read through the page cache")


def test_system_without_direct_reads(path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    fails(lambda: Store(path, direct=True), path, "no direct reads", "read through the page cache")


@pytest.mark.parametrize("block", [0, -4096, 1000])
def test_rejected_block(path, block):
    with pytest.raises(ValueError, match=f"block must be a power of two, not {block}"):
        Store(path, direct=True, block=block)
