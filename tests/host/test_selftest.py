import json
import os
import tty
from unittest.mock import ANY

import numpy as np
import pytest

from host import selftest
from host.cli import main
from host.device import Device
from host.selftest import DAMAGES, damaged_frames
from hw.formats import frames
from sim.golden import device as golden_device
from sim.golden.device import GoldenDevice, GoldenTransport
from tests.host.devices import PARAMS, Peer

STORM = 20


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = main(["selftest", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_golden_passes(capsys):
    status, out, err = run(capsys, "--device", "golden:max_batch=4,frame_bytes=1024", "--storm", str(STORM))
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    for row in [
        ["device", "golden"],
        ["protocol", "version", "2"],
        ["design", "id", "not", "said"],
        ["max", "batch", "4"],
        ["max", "width", "1,024"],
        ["frame", "bytes", "1,024"],
        ["payload", "20", "20", "0", "0", "0"],
        ["payload", "CRC", "20", "20", "0", "0", "0"],
        ["header", "copy", "20", "20", "0", "0", "0"],
        ["truncated", "20", "20", "0", "0", "0"],
        ["repeated", "20", "0", "20", "0", "0"],
        ["ahead", "20", "0", "20", "0", "0"],
        ["selected", "0", "differ"],
        ["tape", "0", "differ"],
        ["passed"],
    ]:
        assert row in rows
    assert "unknown: no time passes in this model" in out


def test_json(capsys):
    status, out, err = run(capsys, "--device", "golden", "--storm", "2", "--json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["passed"]
    assert report["failures"] == []
    assert report["parameters"]["max_width"] == 1024
    assert [row["kind"] for row in report["storm"]] == list(DAMAGES)
    assert all(row["sent"] == 2 and row["wrong"] == 0 for row in report["storm"])
    assert report["known_answer"]["differing"] == {"selected": 0, "tape": 0}


def test_uart_is_timed():
    master, slave = os.openpty()
    tty.setraw(slave)
    with Peer(master, master), Device.open(f"uart:{os.ttyname(slave)}") as device:
        report = selftest.selftest(device, storm=1)
    os.close(master)
    os.close(slave)
    assert report["passed"]
    link = report["link"]
    assert link["provenance"] == "measured"
    assert link["round_trip_s"]["n"] == selftest.ROUND_TRIPS
    assert link["to_device_bytes_per_s"]["n"] == selftest.REPEATS
    for spread in (link["round_trip_s"], link["to_device_bytes_per_s"]):
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert " us (" in selftest.table(report)


def test_design_id_is_shown():
    with Device(GoldenTransport(PARAMS, 0x1234ABCD)) as device:
        report = selftest.selftest(device, storm=1)
    assert report["design_id"] == "1234abcd"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_frames(kind, seed):
    """None is good, or the one that is wanted; all end at a word."""
    made = list(damaged_frames(kind, 50, np.random.default_rng(seed)))
    assert made == list(damaged_frames(kind, 50, np.random.default_rng(seed)))
    assert len(set(made)) > 1
    for frame in made:
        assert len(frame) % 16 == 0
        header = frames.unpack_header(frame[:16])
        assert (header is None) == (DAMAGES[kind] == "garbage")
        if header is not None:
            whole = len(frame) == header.frame_bytes
            intact = whole and frame[-16:] == frames.trailer(frame[:16], frame[16:-16])
            assert intact == (DAMAGES[kind] == "refused")
            assert header.sequence != 0 or not intact


def test_receiver_without_crc_check(capsys, monkeypatch):
    """A receiver that believes every payload: the storm's messages reach the engine, which stops."""
    formats = golden_device.frames

    class Formats:
        def __getattr__(self, name: str):
            return (lambda head, payload: ANY) if name == "trailer" else getattr(formats, name)

    monkeypatch.setattr(golden_device, "frames", Formats())
    status, out, err = run(capsys, "--device", "golden", "--storm", "3")
    assert status == 1
    assert out.endswith("FAILED\n")
    for kind in ("payload", "payload CRC", "header copy"):
        assert f"emufpga: error: golden: 3 of 3 frames ({kind}) were not counted as damaged; " in err
    assert "(repeated)" not in err


@pytest.mark.parametrize("kind", ["payload", "truncated"])
def test_receiver_that_does_not_count(capsys, monkeypatch, kind):
    count = GoldenDevice._count
    monkeypatch.setattr(GoldenDevice, "_count", lambda self, **rises: count(self, **{**rises, "damaged": 0}))
    status, out, err = run(capsys, "--device", "golden", "--storm", "3")
    assert status == 1
    assert out.endswith("FAILED\n")
    assert (
        f"emufpga: error: golden: 3 of 3 frames ({kind}) were not counted as damaged; "
        "the link's receiver is broken: load the bitstream of this release\n"
    ) in err


def test_wrong_arithmetic(capsys, monkeypatch):
    add = golden_device.add_expert

    def wrong(y, *rest) -> int:
        errors = add(y, *rest)
        y[0, 3] += 1
        return errors

    monkeypatch.setattr(golden_device, "add_expert", wrong)
    status, out, err = run(capsys, "--device", "golden", "--storm", "1")
    assert status == 1
    assert out.endswith("FAILED\n")
    assert err.splitlines() == [
        f"emufpga: error: golden: 1 of 512 outputs differ ({mode}); the arithmetic is wrong: "
        "check the board's power and the bitstream's timing report"
        for mode in ("selected", "tape")
    ]


def test_wrong_counters(capsys, monkeypatch):
    real = golden_device.GoldenEngine._read_counters

    def wrong(self, message) -> None:
        self._counters[golden_device.Counter.DRAINED_BYTES] += 210
        real(self, message)

    monkeypatch.setattr(golden_device.GoldenEngine, "_read_counters", wrong)
    status, _, err = run(capsys, "--device", "golden", "--storm", "1")
    assert status == 1
    assert err.startswith("emufpga: error: golden: selected: requested = useful + drained is ")
    assert err.count("bytes are miscounted: load the bitstream") == 2


@pytest.mark.parametrize("storm", ["0", "-1", "many"])
def test_usage(capsys, storm):
    status, out, err = run(capsys, "--device", "golden", "--storm", storm)
    assert (status, out) == (2, "")
    assert "--storm" in err
    assert err.count("\n") == 1
