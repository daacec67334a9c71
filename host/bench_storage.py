"""``emufpga bench storage FILE``: how much of what this machine's storage gives reaches the link.

The ceiling is a bare loop of ``os.preadv`` into one buffer. The feed is ``host.storage.Store`` reading the same slices
in the same order. Both, and the feed with and without a thread that reads ahead, take turns in each run, so that they
meet the machine in the same state; every other run goes through them backwards. A share or a gain is taken from the two
passes of one run.

GB are 10^9 bytes of those asked for. Times are of this process on this machine: every figure is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from host.model_file import ModelFile, ModelFileError
from host.storage import BLOCK_BYTES, StorageError, Store, new_buffer
from hw.formats import frames

SLICE_BYTES = 430_080
"""A matrix of one expert of Granite 3.1 1B-A400M."""
EXPERTS, SELECTED = 32, 8
MATRICES = 3
FRAME_BYTES = frames.MAX_PAYLOAD_WORDS * frames.WORD_BYTES
OUTSTANDING = 2
"""Reads submitted at a time, as requests of the engine that are unanswered."""
GOAL = 0.9
MODES = {
    "buffered": "through the page cache, which holds the file",
    "evicted": "through the page cache, which was told to drop the file before each pass",
    "direct": "past the page cache (O_DIRECT)",
}
SCHEDULES = ("tape", "selected")
DIRECT_NOTE = "direct is a cache-bypass proxy, not a power-on cold read"

Say = Callable[[str], None]
Piece = tuple[int, int]
"""Offset and length."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("file", metavar="FILE", help="a GGUF file with experts, or any large file")
    parser.add_argument("--schedule", choices=SCHEDULES, default="tape", help="all experts, or 8 of 32 (default: tape)")
    parser.add_argument("--mode", choices=MODES, action="append", help="may be given more than once (default: all)")
    parser.add_argument("--layers", type=_positive, default=2, metavar="N", help="read the experts of N layers (2)")
    parser.add_argument("--runs", type=_positive, default=31, metavar="N", help="passes of each kind (31)")
    parser.add_argument("--seconds", type=_positive, default=20, metavar="N", help="fewer if a mode takes N s (20)")
    parser.add_argument("--seed", type=_seed, default=1, metavar="N", help="of the selected experts (1)")
    parser.add_argument("--json", metavar="PATH", help="write the report as JSON too; - for stdout, without the table")


def run(args: argparse.Namespace) -> None:
    """The command; ``StorageError`` for a file that cannot be read."""
    begin = perf_counter()

    def say(text: str) -> None:
        print(f"[{perf_counter() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    report = bench(
        args.file,
        schedule=args.schedule,
        modes=tuple(dict.fromkeys(args.mode or MODES)),
        layers=args.layers,
        runs=args.runs,
        seconds=args.seconds,
        seed=args.seed,
        say=say,
    )
    text = json.dumps(report, indent=2)
    if args.json == "-":
        print(text)
        return
    print(table(report))
    if args.json:
        try:
            Path(args.json).write_text(text + "\n")
        except OSError as error:
            raise StorageError(f"{args.json}: cannot write: {error.strerror}; give another path to --json") from error


def _positive(text: str) -> int:
    return _whole(text, 1)


def _seed(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, not {text!r}")
    return int(text)


def bench(
    path: str | os.PathLike[str],
    *,
    slice_bytes: int = SLICE_BYTES,
    schedule: str = "tape",
    modes: Sequence[str] = tuple(MODES),
    layers: int = 2,
    runs: int = 31,
    seconds: float = 20,
    seed: int = 1,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Measure; the report holds nothing but what JSON can.

    ``slice_bytes`` counts for files that are no GGUF files with experts: slices of that size, spread evenly. A mode
    ends before its ``runs``, but not before three, once they have taken ``seconds``. ``StorageError`` if the file
    cannot be read; of direct reads the report then has the error instead of figures.
    """
    path = os.fspath(path)
    for name, value, known in (("schedule", [schedule], SCHEDULES), ("modes", modes, MODES)):
        if not set(value) <= set(known):
            raise ValueError(f"{name} must be of {tuple(known)}, not {value!r}")
    for name, least in (("slice_bytes", slice_bytes), ("layers", layers), ("runs", runs)):
        if least < 1:
            raise ValueError(f"{name} must be 1 or more, not {least}")
    say(f"{path}: looking")
    rng = np.random.default_rng(seed)
    with Store(path, ahead=False) as store:
        file_bytes = store.file_bytes
    try:
        with ModelFile.open(path) as model:
            pieces = _expert_pieces(model, schedule, layers, rng)
            source = "the experts' slices"
    except ModelFileError:
        pieces = _even_pieces(path, file_bytes, slice_bytes, schedule, layers, rng)
        source = "evenly spaced slices (no GGUF file with Q6_K experts)"
    return {
        "file": path,
        "file_bytes": file_bytes,
        "filesystem": filesystem(path),
        "kernel": f"{os.uname().sysname} {os.uname().release}",
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "device_block_bytes": device_block(path),
        "direct_block_bytes": BLOCK_BYTES,
        "schedule": schedule,
        "source": source,
        "layers": layers,
        "seed": seed,
        "slices": len(pieces),
        "slice_bytes": sorted({length for _, length in pieces}),
        "pass_bytes": sum(length for _, length in pieces),
        "outstanding": OUTSTANDING,
        "unit": "GB/s, 10^9 bytes of those asked for",
        "provenance": "measured",
        "notes": [DIRECT_NOTE],
        "goal": GOAL,
        "modes": [_measure(path, mode, pieces, (runs, seconds), say) for mode in modes],
    }


def _expert_pieces(model: ModelFile, schedule: str, layers: int, rng: np.random.Generator) -> list[Piece]:
    # In the engine's order: experts ascending, of each up, gate and down.
    pieces = []
    for layer in model.layers[:layers]:
        for expert in _experts(model.expert_count, model.experts_used, schedule, rng):
            slices = layer.slices(expert)
            pieces += [(slices[name].offset, slices[name].length) for name in ("up", "gate", "down")]
    return pieces


def _even_pieces(
    path: str, file_bytes: int, length: int, schedule: str, layers: int, rng: np.random.Generator
) -> list[Piece]:
    if file_bytes < length:
        raise StorageError(f"{path}: {file_bytes} bytes are less than one slice of {length}; give a larger file")
    count = layers * EXPERTS * MATRICES
    places = [(file_bytes - length) * i // max(count - 1, 1) for i in range(count)]
    chosen = [
        (layer * EXPERTS + expert) * MATRICES
        for layer in range(layers)
        for expert in _experts(EXPERTS, SELECTED, schedule, rng)
    ]
    return [(places[first + matrix], length) for first in chosen for matrix in range(MATRICES)]


def _experts(experts: int, used: int, schedule: str, rng: np.random.Generator) -> list[int]:
    if schedule == "tape":
        return list(range(experts))
    return sorted(int(expert) for expert in rng.choice(experts, used, replace=False))


def _measure(path: str, mode: str, pieces: list[Piece], limits: tuple[int, float], say: Say) -> dict[str, Any]:
    pass_bytes = sum(length for _, length in pieces)
    say(f"{mode}: {limits[0]} runs of 5 passes of {pass_bytes:,} bytes; {MODES[mode]}")
    direct = mode == "direct"
    try:
        with (
            Store(path, direct=direct, ahead=False) as plain,
            Store(path, direct=direct, ahead=True) as ahead,
            Ceiling(path, pieces, direct=direct) as ceiling,
        ):
            passes = [
                Pass("ceiling", ceiling.run, lambda: ceiling.read),
                Pass("feed", lambda: _feed(plain, pieces, _hand_on), lambda: plain.counts.read),
                Pass("feed_ahead", lambda: _feed(ahead, pieces, _hand_on), lambda: ahead.counts.read),
                Pass("framing", lambda: _feed(plain, pieces, _frame), lambda: plain.counts.read),
                Pass("framing_ahead", lambda: _feed(ahead, pieces, _frame), lambda: ahead.counts.read),
            ]
            for each in passes:  # buffers, threads and, for "buffered", the page cache
                each.run()
            before = {"without": plain.counts, "ahead": ahead.counts}
            _runs(path, passes, limits, mode == "evicted", lambda text: say(f"{mode}: {text}"))
            ledger = {}
            for name, store in (("without", plain), ("ahead", ahead)):
                now, then = asdict(store.counts), asdict(before[name])
                ledger[name] = {field: now[field] - then[field] for field in now}
    except (StorageError, OSError) as error:
        if isinstance(error, OSError):
            error = StorageError(f"{path}: cannot read: {error.strerror or error}; check the device (dmesg)")
        if not direct:
            raise error from None
        return {"mode": mode, "meaning": MODES[mode], "error": str(error)}
    return {"mode": mode, "meaning": MODES[mode], **_figures(passes, pass_bytes), "reads": ledger}


@dataclass
class Pass:
    """One kind of pass over the pieces, and what its runs took and read."""

    name: str
    run: Callable[[], float]
    """Does one; seconds."""
    counted: Callable[[], int]
    """Bytes that its reader has counted so far."""

    def __post_init__(self) -> None:
        self.seconds: list[float] = []
        self.bytes = {"counted": 0, "rchar": 0, "read_bytes": 0}


def _runs(path: str, passes: list[Pass], limits: tuple[int, float], evict: bool, say: Say) -> None:
    runs, seconds = limits
    begin = said = perf_counter()
    for number in range(runs):
        for each in passes[:: -1 if number % 2 else 1]:
            if evict:
                _evict(path)
            counted, (rchar, read_bytes, own) = each.counted(), process_io()
            each.seconds.append(each.run())
            after = process_io()
            each.bytes["counted"] += each.counted() - counted
            each.bytes["rchar"] += after[0] - rchar - own
            each.bytes["read_bytes"] += after[1] - read_bytes
        now = perf_counter()
        if now - begin > seconds and 3 <= number + 1 < runs:
            say(f"{number + 1} runs took {now - begin:.0f} s: no more")
            return
        if now - said > 2:
            said = now
            say(f"run {number + 1} of {runs}")


def _figures(passes: list[Pass], pass_bytes: int) -> dict[str, Any]:
    ceiling, feed, ahead, framing, framing_ahead = (each.seconds for each in passes)
    speeds = {each.name: _spread(pass_bytes / seconds / 1e9 for seconds in each.seconds) for each in passes}
    shares = {"feed": _ratios(ceiling, feed), "feed_ahead": _ratios(ceiling, ahead)}
    gains = {"idle": _ratios(feed, ahead, less=1), "framing": _ratios(framing, framing_ahead, less=1)}
    return {
        "speeds": speeds,
        "share_of_ceiling": shares,
        "gain_of_reading_ahead": gains,
        "goal_met": max(share["median"] for share in shares.values()) >= GOAL,
        "process_io": {each.name: each.bytes for each in passes},
    }


def _ratios(over: list[float], under: list[float], less: float = 0) -> dict[str, Any]:
    return _spread(a / b - less for a, b in zip(over, under, strict=True))


def _spread(values: Iterable[float]) -> dict[str, Any]:
    values = list(values)
    return {
        "n": len(values),
        "median": median(values),
        "min": min(values),
        "max": max(values),
        "provenance": "measured",
    }


class Ceiling:
    """The bare loop: every read prepared beforehand, nothing looked at but how many bytes came."""

    def __init__(self, path: str, pieces: list[Piece], *, direct: bool) -> None:
        block = BLOCK_BYTES if direct else 1
        places = [(offset // block * block, -(-(offset + length) // block) * block) for offset, length in pieces]
        buffer = memoryview(new_buffer(max(end - start for start, end in places)))
        views = {length: [buffer[:length]] for length in {end - start for start, end in places}}
        self._reads = [(start, views[end - start]) for start, end in places]
        self._fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        self._path = path
        self._least = sum(length for _, length in pieces)
        self.read = 0

    def run(self) -> float:
        """Read everything once; seconds."""
        fd, preadv, read = self._fd, os.preadv, 0
        begin = perf_counter()
        for start, views in self._reads:
            read += preadv(fd, views, start)
        seconds = perf_counter() - begin
        self.read += read
        if read < self._least:
            raise StorageError(f"{self._path}: reads came short; run it again while nothing changes the file")
        return seconds

    def __enter__(self) -> Ceiling:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)


def _feed(store: Store, pieces: list[Piece], use: Callable[[memoryview], object]) -> float:
    first, later = pieces[:OUTSTANDING], pieces[OUTSTANDING:]
    begin = perf_counter()
    for piece in first:
        store.submit(*piece)
    for piece in later:
        with store.take() as data:
            use(data)
        store.submit(*piece)
    for _ in first:
        with store.take() as data:
            use(data)
    return perf_counter() - begin


def _hand_on(data: memoryview) -> None:
    """What is left to do where the link takes the view as it is."""


def _frame(data: memoryview) -> list[tuple[bytes, memoryview, bytes]]:
    """The slice cut into frames: header, payload in place, trailer with its CRC."""
    made = []
    for number, start in enumerate(range(0, len(data), FRAME_BYTES)):
        payload = data[start : start + FRAME_BYTES]
        words = -(-len(payload) // frames.WORD_BYTES)
        head = frames.pack_header(frames.Header(frames.Type.MESSAGE, sequence=number, words=words))
        made.append((head, payload, frames.trailer(head, payload)))
    return made


def _evict(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # pages that wait to be written would stay
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def process_io() -> tuple[int, int, int]:
    """``rchar`` and ``read_bytes`` of this process so far, and the bytes by which this look adds to ``rchar``.

    ``rchar`` is what reads returned, from wherever; ``read_bytes`` is what they made the block layer fetch. Zeros where
    the system does not tell.
    """
    try:
        text = Path("/proc/self/io").read_bytes()
    except OSError:
        return 0, 0, 0
    fields = dict(line.split(b": ") for line in text.splitlines())
    return int(fields[b"rchar"]), int(fields[b"read_bytes"]), len(text)


def filesystem(path: str, mounts: str | None = None) -> dict[str, str]:
    """Type and source of the filesystem that holds ``path``; ``mounts`` is the text of /proc/self/mountinfo."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
    except OSError:
        return {"type": "unknown", "source": "unknown"}
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    real = os.path.realpath(path)
    best = (False, -1, "unknown", "unknown")
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        place = left.split()
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), place[4])
        if real.startswith(point.rstrip("/") + "/"):
            kind, source = right.split()[:2]
            # The number decides, where the filesystem shows one that is its own; then the innermost mount.
            best = max(best, (place[2] == number, len(point), kind, source))
    return {"type": best[2], "source": best[3]}


def device_block(path: str) -> int | None:
    """The logical block of the device under ``path``, in bytes; None where the system does not tell."""
    device = os.stat(path).st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (place / "queue", place / ".." / "queue"):  # a partition's is its disk's
        try:
            return int((queue.resolve() / "logical_block_size").read_text())
        except (OSError, ValueError):
            continue
    return None


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    block = report["device_block_bytes"]
    sizes = " and ".join(f"{size:,}" for size in report["slice_bytes"])
    rows = [
        ("file", f"{_printable(report['file'])}, {report['file_bytes']:,} B"),
        ("filesystem", f"{report['filesystem']['type']} on {_printable(report['filesystem']['source'])}"),
        ("device block", "unknown" if block is None else f"{block:,} B; direct reads use {BLOCK_BYTES:,}"),
        ("system", f"{report['kernel']}, {report['cpus']} CPUs, load {report['load']:.2f}"),
        ("a pass", f"{report['slices']:,} slices of {sizes} B, {report['pass_bytes']:,} B: {report['source']}"),
        ("schedule", f"{report['schedule']}, {report['layers']} layers, seed {report['seed']}"),
    ]
    lines = [f"{label:<16}{value}" for label, value in rows]
    for mode in report["modes"]:
        lines += ["", f"{mode['mode']}: {mode['meaning']}"]
        if "error" in mode:
            lines.append(f"  not measured: {_printable(mode['error'])}")
            continue
        lines += _mode_lines(mode)
    return "\n".join([*lines, "", *(f"Note: {note}." for note in report["notes"]), _legend(report)])


def _mode_lines(mode: dict[str, Any]) -> list[str]:
    labels = {
        "ceiling": "ceiling: preadv in a loop",
        "feed": "feed, no thread",
        "feed_ahead": "feed, reading ahead",
        "framing": "feed and frames, no thread",
        "framing_ahead": "feed and frames, reading ahead",
    }
    lines = [f"  {'':<32}{'n':>4}{'GB/s (min-max)':>24}{'of the ceiling':>26}"]
    for name, label in labels.items():
        speed = mode["speeds"][name]
        share = mode["share_of_ceiling"].get(name)
        shown = f"{speed['median']:.2f} ({speed['min']:.2f}-{speed['max']:.2f})"
        of = f"{share['median']:.1%} ({share['min']:.1%}-{share['max']:.1%})" if share else ""
        lines.append(f"  {label:<32}{speed['n']:>4}{shown:>24}{of:>26}".rstrip())
    for name, what in (("idle", "the taker does nothing else"), ("framing", "the taker makes frames")):
        gain = mode["gain_of_reading_ahead"][name]
        lines.append(
            f"  reading ahead, {what}: {gain['median']:+.1%} ({gain['min']:+.1%} to {gain['max']:+.1%}), n {gain['n']}"
        )
    lines.append(
        f"  the better of the two feeds reaches {GOAL:.0%} of the ceiling: {'yes' if mode['goal_met'] else 'NO'}"
    )
    for name, reads in mode["reads"].items():
        parts = f"requested {reads['requested']:,} + spilled {reads['spilled']:,} = read {reads['read']:,}"
        lines.append(f"  bytes, {name:<8}{parts}")
    for name, seen in mode["process_io"].items():
        lines.append(
            f"  /proc/self/io, {name:<14} counted {seen['counted']:>15,}   rchar {seen['rchar']:>15,}   "
            f"read_bytes {seen['read_bytes']:>15,}"
        )
    return lines


def _legend(report: dict[str, Any]) -> str:
    return (
        "rchar: what reads returned; read_bytes: what came from the block layer, read ahead by the kernel included.\n"
        f"All figures are {report['provenance']}; medians of the runs; GB are 10^9 bytes of those asked for."
    )


def _printable(text: str) -> str:
    # Text from a file must not steer the terminal.
    return "".join(c if c.isprintable() else "?" for c in text)
