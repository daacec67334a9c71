"""``make sim`` on the committed model: what it promises, and how it fails."""

import json
from dataclasses import asdict, replace

import pytest

from boards.catalogue import ECP5_BOARDS
from hw.formats.params import Params
from sim import run

MODEL = run.ROOT / "models" / "tiny-moe-q6k.gguf"


@pytest.mark.cosim
def test_report(tmp_path, capsys):
    status = run.main(["--model", str(MODEL), "--layers", "1", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "report.json").read_text())
    assert status == 0
    assert report["bit_exact"] is True
    assert report["outputs_compared"] == 256 * (1 + 1 + 4 + 4)
    assert report["blocks_selected"] == 2 * 768
    assert report["blocks_drained"] == 8 * 768
    assert 16 <= report["cycles_per_selected_block"] <= 16.1
    assert 16 <= report["cycles_per_block_whole_layer"] <= 17.1
    assert 13.125 <= report["cycles_per_drained_block"] <= 14
    assert 0.99 < report["mac_utilisation"] <= 1
    # Whole matrices of 256 blocks, so beats of 16 bytes are never padded.
    one, drained, tape, selected = report["phases"]
    union = len({expert for experts in selected["routes"] for expert in experts})
    assert report["stream_bytes"] == report["payload_bytes"] == report["requested_bytes"]
    assert report["requested_bytes"] == 210 * 768 * (2 + 8 + 8 + union)
    assert tape["blocks_selected"] == selected["blocks_selected"] == union * 768
    assert tape["blocks_drained"] == (8 - union) * 768
    assert (one["blocks_drained"], selected["blocks_drained"], drained["blocks_selected"]) == (0, 0, 0)
    assert 0 < report["max_abs_error_vs_float64"] < 1e-2
    assert 0 < report["layer_relative_rms_error"] < 3e-4
    assert set(report["provenance"]) >= {"bit_exact", "clock_hz", "cycles_per_selected_block", "seconds_per_expert"}
    printed = capsys.readouterr().out
    assert "bit-exact against golden" in printed
    assert "layer 0, 8 experts, tape" in printed  # progress, run by run


PHASE = run.Phase(
    name="phase",
    tokens=1,
    experts=2,
    passes=1000,
    blocks_selected=1000,
    blocks_drained=0,
    cycles=16500,
    stream_bytes=0,
    requested_bytes=0,
    outputs=10,
    outputs_wrong=0,
    max_abs_error_vs_float64=0.0,
    relative_rms_error=1e-4,
    routes=[],
    counters={"active": 16000, "back_pressured": 20, "starved": 30, "draining": 0},
)
DRAINED = replace(PHASE, passes=0, blocks_selected=0, blocks_drained=1000, relative_rms_error=None)
DRAINED = replace(DRAINED, counters={"active": 0, "back_pressured": 0, "starved": 10, "draining": 13120})


def report(clock, *, same: bool = True, **tape) -> dict:
    shape = {"layers": 3, "experts_used": 2}
    layers = [replace(PHASE, **tape)]
    return run.make_report(PHASE, DRAINED, layers, [PHASE], same, Params(), MODEL, 210 * 768, shape, clock)


def test_seconds_follow_from_cycles_and_clock():
    got = report({"hz": 150e6, "provenance": "routed"})
    assert got["bit_exact"] is True
    assert got["cycles_per_selected_block"] == 16.05
    assert got["cycles_per_block_whole_layer"] == 16.5
    assert got["cycles_per_drained_block"] == 13.13
    assert got["seconds_per_expert"] == pytest.approx(768 * 16.5 / 150e6)
    assert got["tape_mac_utilisation"] == pytest.approx(16000 / 16500)
    assert "84.5 us" in run.table(got)


def test_an_unknown_clock_stays_unknown():
    got = report(run.clock("no_such_board", Params()))
    assert got["clock_hz"] is None
    assert got["seconds_per_expert"] is None
    assert "unknown: no_such_board was not routed (make synth BOARD=no_such_board)" in run.table(got)


def test_a_clock_of_other_parameters_is_not_used():
    params = ECP5_BOARDS["ulx3s_25f"].params
    same = run.clock("ulx3s_25f", params)
    deeper = run.clock("ulx3s_25f", replace(params, max_batch=32))
    assert deeper["hz"] == same["hz"] > 50e6
    assert deeper["provenance"] == same["provenance"].replace("ulx3s_25f,", "ulx3s_25f with {'max_batch': 4},")
    got = run.clock("ulx3s_25f", replace(params, tokens=2))
    assert got["hz"] is None
    assert "routed with other parameters" in got["provenance"]


@pytest.mark.parametrize("changes", [{"outputs_wrong": 1}, {"same": False}], ids=str)
def test_one_wrong_output_is_told(changes):
    got = report({"hz": None, "provenance": "unknown"}, **changes)
    assert got["bit_exact"] is False
    assert "NO" in run.table(got)


def test_missing_file(capsys):
    assert run.main(["--model", "no/such.gguf"]) == 1
    assert "no/such.gguf: cannot read: No such file" in capsys.readouterr().err


def test_a_board_routed_with_the_lanes_asked_for(tmp_path, monkeypatch):
    """``BOARD_tN.json`` is taken for N lanes, the board's own result otherwise."""
    results = tmp_path / "boards" / "results"
    results.mkdir(parents=True)
    for name, tokens, hz in (("b", 4, 80_000_000), ("b_t1", 1, 90_000_000)):
        result = {"params": asdict(Params(tokens=tokens)), "clock_hz": hz, "clock_provenance": "routed"}
        (results / f"{name}.json").write_text(json.dumps(result))
    monkeypatch.setattr(run, "ROOT", tmp_path)
    assert run.clock("b", Params(tokens=1))["hz"] == 90_000_000
    assert run.clock("b", Params(tokens=4))["hz"] == 80_000_000
    assert run.clock("b", Params(tokens=2))["hz"] is None
