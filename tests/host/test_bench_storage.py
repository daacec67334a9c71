import argparse
import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from host import bench_storage
from host.bench_storage import DIRECT_NOTE, MODES, Ceiling, Pass, bench, filesystem, table
from host.model_file import ModelFile
from host.storage import StorageError, Store
from tests.host import gguf_files
from tests.host.devices import refuse_direct_reads

FILE_BYTES, SLICE = 200_000, 5_000
SLICES = 96  # 32 experts x 3 matrices


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "any.bin"
    path.write_bytes(np.random.default_rng(1).bytes(FILE_BYTES))
    return path


@pytest.fixture
def model(tmp_path) -> Path:
    return gguf_files.write(tmp_path / "small.gguf")


def small(path: Path, **options) -> dict:
    return bench(path, **{"slice_bytes": SLICE, "layers": 1, "runs": 2, **options})


def needs_direct(path: Path) -> None:
    try:
        with Store(path, direct=True, ahead=False) as store:
            store.read(0, 1)
    except StorageError as error:
        pytest.skip(f"no direct reads: {error}")


class Recorder:
    """Stands for ``os.preadv`` and keeps the places that were read."""

    def __init__(self, monkeypatch) -> None:
        self.places: list[tuple[int, int]] = []
        real = os.preadv

        def preadv(fd: int, views: list, offset: int) -> int:
            self.places.append((offset, len(views[0])))
            return real(fd, views, offset)

        monkeypatch.setattr(os, "preadv", preadv)


# The report


@pytest.mark.parametrize("mode", MODES)
def test_report(path, mode):
    if mode == "direct":
        needs_direct(path)
    report = small(path, modes=[mode], runs=3)
    assert json.loads(json.dumps(report)) == report
    assert report["file_bytes"] == FILE_BYTES
    assert (report["slices"], report["slice_bytes"], report["pass_bytes"]) == (SLICES, [SLICE], SLICES * SLICE)
    assert report["provenance"] == "measured"
    assert report["notes"] == [DIRECT_NOTE]
    (result,) = report["modes"]
    assert result["mode"] == mode
    for group in ("speeds", "share_of_ceiling", "gain_of_reading_ahead"):
        for spread in result[group].values():
            assert spread["n"] == 3
            assert spread["min"] <= spread["median"] <= spread["max"]
            assert spread["provenance"] == "measured"
    assert all(speed["min"] > 0 for speed in result["speeds"].values())
    assert isinstance(result["goal_met"], bool)


@pytest.mark.parametrize("mode", MODES)
def test_bytes_add_up(path, mode):
    """Counted, by hand and by the system; 3 runs, in which each store passes twice."""
    if mode == "direct":
        needs_direct(path)
    (result,) = small(path, modes=[mode], runs=3)["modes"]
    spilled = 0
    for i in range(SLICES if mode == "direct" else 0):
        offset = (FILE_BYTES - SLICE) * i // (SLICES - 1)
        start, end = offset // 4096 * 4096, -(-(offset + SLICE) // 4096) * 4096
        spilled += min(end, FILE_BYTES) - start - SLICE
    for reads in result["reads"].values():
        assert (reads["reads"], reads["requested"]) == (6 * SLICES, 6 * SLICES * SLICE)
        assert reads["spilled"] == 6 * spilled
        assert reads["read"] == reads["requested"] + reads["spilled"]
    for seen in result["process_io"].values():
        assert seen["counted"] == 3 * (SLICES * SLICE + spilled)
        if seen["rchar"]:  # where the system tells; other threads of the test runner may read a little, too
            assert seen["counted"] <= seen["rchar"] < seen["counted"] + 65_536


def test_figures():
    """Shares and gains are of the two passes of one run."""
    seconds = {
        "ceiling": [1.0, 2.0, 4.0],
        "feed": [2.0, 2.0, 5.0],
        "feed_ahead": [4.0, 1.6, 4.0],
        "framing": [3.0, 3.0, 3.0],
        "framing_ahead": [2.0, 4.0, 1.5],
    }
    passes = [Pass(name, lambda: 0.0, lambda: 0) for name in seconds]
    for each in passes:
        each.seconds = seconds[each.name]
    figures = bench_storage._figures(passes, 2_000_000_000)

    def shown(spread: dict) -> tuple[float, ...]:
        return tuple(round(spread[name], 6) for name in ("n", "median", "min", "max"))

    assert shown(figures["speeds"]["ceiling"]) == (3, 1.0, 0.5, 2.0)
    assert shown(figures["share_of_ceiling"]["feed"]) == (3, 0.8, 0.5, 1.0)
    assert shown(figures["share_of_ceiling"]["feed_ahead"]) == (3, 1.0, 0.25, 1.25)
    assert shown(figures["gain_of_reading_ahead"]["idle"]) == (3, 0.25, -0.5, 0.25)
    assert shown(figures["gain_of_reading_ahead"]["framing"]) == (3, 0.5, -0.25, 1.0)
    assert figures["goal_met"]
    passes[2].seconds = [4.0, 4.0, 4.0]
    assert not bench_storage._figures(passes, 1)["goal_met"]


def test_passes_take_turns(path):
    order = []

    def add(name: str) -> float:
        order.append(name)
        return 1.0

    passes = [Pass(name, lambda name=name: add(name), lambda: 0) for name in "abc"]
    bench_storage._runs(str(path), passes, (3, 1000), False, order.append)
    assert "".join(order) == "abccbaabc"
    assert [each.seconds for each in passes] == [[1.0] * 3] * 3


@pytest.mark.parametrize(("runs", "done"), [(2, 2), (3, 3), (9, 3)])
def test_slow_storage_gets_fewer_runs(path, runs, done):
    said = []
    (result,) = small(path, modes=["buffered"], runs=runs, seconds=0, say=said.append)["modes"]
    assert result["speeds"]["ceiling"]["n"] == done
    assert ("3 runs took 0 s: no more" in said[-1]) == (done < runs)


def test_progress_comes_first(tmp_path):
    said = []
    with pytest.raises(StorageError):
        bench(tmp_path / "none", say=said.append)
    assert said == [f"{tmp_path / 'none'}: looking"]


# What is read


def test_experts_in_the_engines_order(model, monkeypatch):
    """In each pass of the ceiling: experts ascending; of each up, gate and down. The feed's: see below."""
    places = Recorder(monkeypatch).places
    small(model, modes=["buffered"], layers=2)
    with ModelFile.open(model) as file:
        slices = [layer.slices(expert) for layer in file.layers for expert in range(4)]
    expected = [(piece[name].offset, piece[name].length) for piece in slices for name in ("up", "gate", "down")]
    assert places == 3 * expected  # once for nothing, then two runs


@pytest.mark.parametrize("seed", range(3))
def test_selected_experts(model, seed):
    rng = np.random.default_rng(seed)
    with ModelFile.open(model) as file:
        pieces = bench_storage._expert_pieces(file, "selected", 2, rng)
        for number, layer in enumerate(file.layers):
            mine = pieces[number * 9 : number * 9 + 9]
            experts = [expert for expert in range(4) if (layer.up.slice(expert).offset, 107_520) in mine]
            assert len(experts) == 3
            assert mine == [
                (piece.offset, piece.length)
                for expert in experts
                for piece in (layer.up.slice(expert), layer.gate.slice(expert), layer.down.slice(expert))
            ]
        again = bench_storage._expert_pieces(file, "selected", 2, np.random.default_rng(seed))
    assert again == pieces


@pytest.mark.parametrize(("schedule", "count"), [("tape", 2 * 96), ("selected", 2 * 24)])
def test_other_files(path, schedule, count):
    report = small(path, modes=[], schedule=schedule, layers=2)
    assert report["slices"] == count
    assert "evenly spaced" in report["source"]
    pieces = bench_storage._even_pieces("", FILE_BYTES, SLICE, schedule, 2, np.random.default_rng(1))
    offsets = [offset for offset, _ in pieces]
    assert offsets == sorted(set(offsets))
    assert offsets[-1] + SLICE <= FILE_BYTES
    if schedule == "tape":
        assert (offsets[0], offsets[-1]) == (0, FILE_BYTES - SLICE)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_ceiling_and_feed_read_the_same(path, monkeypatch, direct, ahead):
    """In the same order, rounded out alike; and the feed hands on just what was asked for."""
    if direct:
        needs_direct(path)
    data = path.read_bytes()
    pieces = [(5000, 100), (4095, 2), (8192, 4096), (199_999, 1)]
    recorder = Recorder(monkeypatch)
    with Ceiling(str(path), pieces, direct=direct) as ceiling:
        ceiling.run()
    bare = list(recorder.places)
    recorder.places.clear()
    handed = []
    with Store(path, direct=direct, ahead=ahead, pread=os.preadv) as store:
        bench_storage._feed(store, pieces, lambda piece: handed.append(bytes(piece)))
        assert ceiling.read == store.counts.read
    assert handed == [data[offset : offset + length] for offset, length in pieces]
    assert recorder.places == bare


def test_frames():
    """Whole words of at most 64 KiB; put together they are the slice."""
    data = memoryview(np.random.default_rng(1).bytes(430_080)).toreadonly()
    made = bench_storage._frame(data)
    assert [len(payload) for _, payload, _ in made] == [65_536] * 6 + [36_864]
    assert b"".join(payload for _, payload, _ in made) == data
    for head, payload, trailer in made:
        header = bench_storage.frames.unpack_header(head)
        assert header
        assert header.payload_bytes == len(payload)
        assert trailer == bench_storage.frames.trailer(head, payload)


# Where it is read


MOUNTS = """\
22 1 {number} / / rw,relatime - ext4 /dev/root rw
23 22 0:99 / /elsewhere rw shared:1 - xfs /dev/other rw
24 22 {number} /sub {place} rw - btrfs /dev/disk\\0401 rw
25 22 0:98 / {place}/deeper rw - zfs pool rw
"""


def test_filesystem(path):
    device = path.stat().st_dev
    text = MOUNTS.format(number=f"{os.major(device)}:{os.minor(device)}", place=str(path.parent).replace("_", "\\137"))
    assert filesystem(str(path), text) == {"type": "btrfs", "source": "/dev/disk\\0401"}
    text = MOUNTS.format(number="0:97", place="/nowhere")
    assert filesystem(str(path), text) == {"type": "ext4", "source": "/dev/root"}
    assert filesystem(str(path), "") == {"type": "unknown", "source": "unknown"}


def test_unknown_device(path, monkeypatch):
    monkeypatch.setattr(bench_storage, "device_block", lambda path: None)
    assert "unknown" in table(small(path, modes=[]))


# The table and the command


def test_table(path):
    needs_direct(path)
    text = table(small(path))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"file {path}, 200,000 B" in lines
    assert any("96 slices of 5,000 B, 480,000 B: evenly spaced" in line for line in lines)
    assert f"Note: {DIRECT_NOTE}." in lines
    for mode, meaning in MODES.items():
        assert f"{mode}: {meaning}" in lines
    assert text.count("of the ceiling: ") == len(MODES)
    assert text.count("reading ahead, the taker makes frames: ") == len(MODES)
    assert "bytes, without requested 1,920,000 + spilled 0 = read 1,920,000" in lines
    assert "All figures are measured" in text


def test_direct_refused(path, monkeypatch):
    refuse_direct_reads(monkeypatch)
    report = small(path)
    assert ["error" in mode for mode in report["modes"]] == [False, False, True]
    assert f"not measured: {path}: its filesystem or device refuses direct reads" in table(report)


def test_input_error(path, monkeypatch):
    def preadv(fd: int, views: list, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StorageError, match=f"^{path}: cannot read: Input/output error"):
        small(path)


def test_ceiling_that_comes_short(path, monkeypatch):
    with Ceiling(str(path), [(0, SLICE)], direct=False) as ceiling:
        monkeypatch.setattr(os, "preadv", lambda fd, views, offset: SLICE - 1)
        with pytest.raises(StorageError, match="reads came short"):
            ceiling.run()


def command(*argv: str | Path) -> None:
    parser = argparse.ArgumentParser()
    bench_storage.add_arguments(parser)
    bench_storage.run(parser.parse_args([str(arg) for arg in argv]))


def test_command(model, tmp_path, capsys):
    out = tmp_path / "report.json"
    command(model, "--layers", "1", "--runs", "2", "--mode", "buffered", "--json", out)
    shown, progress = capsys.readouterr()
    report = json.loads(out.read_text())
    assert shown == table(report) + "\n"
    assert [mode["mode"] for mode in report["modes"]] == ["buffered"]
    assert report["source"] == "the experts' slices"
    assert progress.startswith("[   0.0 s] ")


def test_command_to_stdout(model, capsys):
    command(model, "--layers", "1", "--runs", "1", "--mode", "buffered", "--schedule", "selected", "--json", "-")
    report = json.loads(capsys.readouterr().out)
    assert (report["schedule"], report["slices"]) == ("selected", 9)


def test_command_cannot_write(model, tmp_path):
    out = tmp_path / "none" / "report.json"
    with pytest.raises(StorageError, match=f"^{out}: cannot write: No such file or directory; give another path"):
        command(model, "--layers", "1", "--runs", "1", "--mode", "buffered", "--json", out)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["file", "--runs", "0"], "--runs: must be a whole number, 1 or more, not '0'"),
        (["file", "--layers", "x"], "--layers: must be a whole number, 1 or more, not 'x'"),
        (["file", "--seconds", "1.5"], "--seconds: must be a whole number, 1 or more, not '1.5'"),
        (["file", "--seed=-1"], "--seed: must be a whole number, 0 or more, not '-1'"),
        (["file", "--mode", "x"], "invalid choice: 'x'"),
        (["file", "--schedule", "x"], "invalid choice: 'x'"),
        ([], "required: FILE"),
    ],
)
def test_command_line_errors(capsys, argv, part):
    with pytest.raises(SystemExit):
        command(*argv)
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [{"schedule": "x"}, {"modes": ["x"]}, {"slice_bytes": 0}, {"layers": 0}, {"runs": 0}],
)
def test_rejected_options(path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        small(path, **options)


def test_file_smaller_than_a_slice(path):
    with pytest.raises(StorageError, match=f"^{path}: 200000 bytes are less than one slice of 430080"):
        bench(path)
