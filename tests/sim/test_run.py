"""``make sim`` on the committed model: what it promises, and how it fails."""

import json

import pytest

from hw.formats.params import Params
from sim import run

MODEL = run.ROOT / "models" / "tiny-moe-q6k.gguf"


@pytest.mark.cosim
def test_report(tmp_path, capsys):
    status = run.main(["--model", str(MODEL), "--layers", "1", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "report.json").read_text())
    assert status == 0
    assert report["bit_exact"] is True
    assert report["sums_compared"] >= 8 * 2 * 256 + 4 * 2 * 3 * 256  # selected phase, then each token's two experts
    assert report["blocks_selected"] >= 1000
    assert report["blocks_drained"] >= 1000
    assert 16 <= report["cycles_per_selected_block"] <= 16.1
    assert 13.125 <= report["cycles_per_drained_block"] <= 14
    assert report["mac_utilisation"] == pytest.approx(16 / report["cycles_per_selected_block"])
    # Both phases and the layer move whole matrices of 256 blocks, so beats of 16 bytes are never padded.
    assert report["stream_bytes"] == report["payload_bytes"] == 210 * (4096 + 4096 + 8 * 768)
    assert 0 < report["max_abs_error_vs_float64"] < 1e-2
    assert 0 < report["layer_relative_rms_error"] < 3e-4
    (layer,) = report["tape"]
    used = len({expert for experts in layer["routes"] for expert in experts})
    assert layer["blocks_selected"] == used * 768
    assert layer["blocks_drained"] == (8 - used) * 768
    assert set(report["provenance"]) >= {"bit_exact", "clock_hz", "cycles_per_selected_block", "seconds_per_expert"}
    printed = capsys.readouterr().out
    assert "bit-exact against golden" in printed
    assert "tape mode" in printed  # the simulation's own progress comes through


def phase(**changes) -> dict:
    counts = {"blocks_selected": 0, "blocks_drained": 0, "passes": 0, "cycles": 0, "stream_bytes": 0}
    counts |= {"payload_bytes": 0, "sums": 0, "sums_wrong": 0, "max_abs_error_vs_float64": 0.0, "routes": []}
    counts |= {"layer_relative_rms_error": None}
    return counts | changes


def report(clock, **tape) -> dict:
    selected = phase(blocks_selected=1000, passes=1000, cycles=16050, sums=10)
    drained = phase(blocks_drained=1000, cycles=13130)
    layer = phase(
        **{
            "blocks_selected": 10,
            "blocks_drained": 5,
            "passes": 20,
            "cycles": 400,
            "sums": 7,
            "layer_relative_rms_error": 1e-4,
        }
        | tape
    )
    shape = {"layers": 3, "experts_used": 2}
    return run.make_report([selected, drained, layer], Params(), MODEL, 210 * 768, shape, clock)


def test_seconds_follow_from_cycles_and_clock():
    got = report({"hz": 150e6, "provenance": "routed"})
    assert got["cycles_per_selected_block"] == 16.05
    assert got["seconds_per_expert"] == pytest.approx(768 * 16.05 / 150e6)
    assert got["tape_mac_utilisation"] == pytest.approx(16 * 20 / 400)
    assert "82.2 us" in run.table(got)


def test_an_unknown_clock_stays_unknown():
    got = report(run.clock("no_such_board", Params()))
    assert got["clock_hz"] is None
    assert got["seconds_per_expert"] is None
    assert "unknown: no_such_board was not routed (make synth BOARD=no_such_board)" in run.table(got)


def test_a_clock_of_other_parameters_is_not_used():
    same = run.clock("ulx3s_85f", Params())
    deeper = run.clock("ulx3s_85f", Params(max_batch=32))
    assert deeper["hz"] == same["hz"] > 150e6
    assert deeper["provenance"] == same["provenance"].replace("ulx3s_85f,", "ulx3s_85f with {'max_batch': 8},")
    got = run.clock("ulx3s_85f", Params(tokens=4))
    assert got["hz"] is None
    assert "routed with other parameters" in got["provenance"]


def test_one_wrong_sum_is_told():
    got = report({"hz": None, "provenance": "unknown"}, sums_wrong=1)
    assert got["bit_exact"] is False
    assert "NO" in run.table(got)


def test_missing_file(capsys):
    assert run.main(["--model", "no/such.gguf"]) == 1
    assert "no/such.gguf: cannot read: No such file" in capsys.readouterr().err
