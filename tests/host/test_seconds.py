import json
from dataclasses import replace
from pathlib import Path

import pytest

from host import routing, seconds
from host.cli import main
from host.seconds import MODELS, PROVENANCES, Board, Counts, Routing

BOARD = Board("a", 100e6, "routed: a test", 1, 16, 16, (1024, 512, 64), 0, 3_000_000)
COUNTS = Counts({"uart": 0.98, "axis": 0.99}, 5000)


def estimate(home="uart", *, board=BOARD, model="granite-1b", batch=1, mode="selected", storage=None):
    shape = MODELS[model]
    granite = routing.GRANITE if model == "granite-1b" else None
    place = board.home(home)
    link = place if place.kind == "link" else board.home(board.own[0])
    return seconds.layer(Routing(shape, granite), board, place, link, COUNTS, batch, mode, storage)


def taken(*args, **options) -> float:
    value = estimate(*args, **options).seconds
    assert value is not None
    return value


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Results of a board with a clock and of one without, which has PCIe and 1 GiB."""
    params = dict(link_bytes=16, tokens=1, max_batch=8, max_width=1024, max_expert_width=512, max_experts=64)
    one = {"params": params, "clock_hz": 100_000_000, "clock_provenance": "routed: a test"}
    two = {"params": {**params, "memory_bits": 30}, "clock_hz": None, "clock_provenance": "unknown: nobody ran Vivado"}
    (tmp_path / "ulx3s_x.json").write_text(json.dumps(one))
    (tmp_path / "nitefury_ii.json").write_text(json.dumps(two))
    monkeypatch.setattr(seconds, "BOARDS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "expert", "token", "bank"),
    [
        ("granite-1b", 1_290_240, 247.7e6, 0.991e9),
        ("granite-3b", 1_935_360, 495.5e6, 2.48e9),
        ("olmoe", 5_160_960, 660.6e6, 5.28e9),
        ("qwen3-30b", 3_870_720, 1486e6, 23.8e9),
        ("mixtral", 144_506_880, 9248e6, 37.0e9),
    ],
)
def test_bytes_of_public_models(model, expert, token, bank):
    shape = MODELS[model]
    assert shape.expert_bytes == expert
    assert shape.token_bytes == pytest.approx(token, rel=5e-4)  # four digits published
    assert shape.bank_bytes == pytest.approx(bank, rel=5e-3)  # three


@pytest.mark.parametrize(("home", "by_hand"), [("uart", 825.75), ("pcie-gen2x4", 0.154829), ("ddr3-800x16", 0.172032)])
def test_a_token_by_hand(home, by_hand):
    """247,726,080 B / 0.3, 1600 and 1440 MB/s."""
    assert MODELS["granite-1b"].token_bytes / BOARD.home(home).bandwidth == pytest.approx(by_hand, rel=1e-5)
    shares = {"uart": 0.98, "pcie-gen2x4": 0.99, "ddr3-800x16": 1}
    assert 24 * estimate(home).transfer * shares[home] == pytest.approx(by_hand, rel=1e-5)


def test_a_layer_by_hand():
    one = estimate("pcie-gen2x4")
    assert one.cycles == 16 * 8 * 6144 + 5000
    assert one.compute is not None
    assert one.compute == one.cycles / 100e6
    # CONFIG, LOAD_X 4 x 528, ROUTES 16 + 64, OUTPUT 16 + 8192, DONE
    assert one.vectors * 1600e6 == 64 + 2112 + 80 + 8208 + 16
    assert one.trips == 2 * 4.8e-6
    assert one.seconds == one.compute + one.vectors + one.trips
    assert one.binds == "multipliers"
    assert one.bound == pytest.approx(16 * 8 * 6144 / 100e6)


def test_counted_layers():
    """Against every counted layer: never 0.02 % below, where fetching passes over experts, nor 0.2 % above."""
    report = json.loads((seconds.COUNTED / "layer_cycles.json").read_text())
    counts = Counts.read()
    for row in report["rows"]:
        board = replace(BOARD, lanes=row["lanes"], max_batch=8)

        class Counted(Routing):
            def union(self, batch, row=row):
                return row["experts"]

            def passes(self, batch, lanes, row=row):
                return row["passes"]

        cycles = seconds._cycles(Counted(MODELS["granite-1b"], None), board, counts, row["tokens"], row["mode"])
        assert -2e-4 < cycles / row["cycles"] - 1 < 2e-3, row


def test_passes_are_of_groups():
    route = Routing(MODELS["granite-1b"], routing.GRANITE)
    assert route.passes(8, 1) == 64
    assert route.passes(8, 4) == 2 * 18.31
    assert route.passes(6, 4) == 18.31 + 13.51


@pytest.mark.parametrize(("batch", "union"), [(1, 8), (2, 14), (3, 18.5), (4, 21.9), (5, 24.4), (6, 26.3), (16, 31.7)])
def test_independent(batch, union):
    assert routing.independent(32, 8, batch) == pytest.approx(union, abs=0.06)  # one digit published


@pytest.mark.parametrize("mode", ["selected", "tape"])
@pytest.mark.parametrize("home", ["uart", "ddr3-800x16"])
def test_larger_batches_take_longer_but_give_no_fewer_tokens(home, mode):
    steps = [taken(home, model="qwen3-30b", batch=batch, mode=mode) for batch in (1, 2, 4, 8, 16)]
    assert steps == sorted(steps)
    rates = [batch / step for batch, step in zip((1, 2, 4, 8, 16), steps, strict=True)]
    assert home != "uart" or rates == sorted(rates)


def test_tape_takes_no_less_and_faster_links_no_more():
    assert taken(mode="tape") > taken()
    assert taken("pcie-gen2x1") > taken("pcie-gen2x4")
    assert taken("uart") > taken("gbe")
    assert estimate("pcie-gen2x4", storage=1e6).binds == "storage"


def test_batch_beyond_the_build():
    one, two = estimate(batch=8), estimate(batch=16, board=replace(BOARD, max_batch=8))
    assert two.runs == 2
    assert two.bytes == 2 * one.bytes


def test_default_output_and_provenance(capsys):
    assert main(["seconds"]) == 0
    out = capsys.readouterr().out
    assert "247,726,080 B / 0.3 MB/s = 825.8 s a token" in out
    assert max(map(len, out.splitlines())) <= 120
    assert main(["seconds", "--watts", "3"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120
    assert main(["seconds", "--home", "all", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    figures = 0
    for row in [*report["rows"], {"power": report["power"], "token": report["token_bytes"]}]:
        for name, figure in row.items():
            if name in ("board", "home", "board_has_it", "binds"):
                continue
            assert figure["provenance"].split()[0].rstrip(":,") in PROVENANCES, (name, figure)
            assert (figure["value"] is None) <= figure["provenance"].startswith("unknown"), (name, figure)
            figures += 1
    assert figures > 100


def test_unknown_clock(capsys, folder):
    assert main(["seconds", "--board", "nitefury_ii", "--batch", "1"]) == 0
    out = capsys.readouterr().out
    assert "pcie-gen2x4" in out
    assert "ddr3-800x16" in out
    assert "unknown, >" in out
    row = seconds.calculate(board_names=["nitefury_ii"], home_names=["ddr3-800x16"], batches=[1])["rows"][0]
    assert row["board_has_it"]
    assert row["transfer"]["value"] == pytest.approx(10_321_920 / 1440e6)
    for name in ("clock", "compute", "seconds", "tokens_per_second", "over_bound"):
        assert row[name]["value"] is None
        assert row[name]["provenance"].startswith("unknown")


def test_experts_that_do_not_fit(capsys, folder):
    assert main(["seconds", "--board", "nitefury_ii", "--home", "ddr3-800x16", "--model", "olmoe"]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_watts(folder):
    rows = seconds.calculate(board_names=["ulx3s_x"], batches=[4], watts=2)["rows"]
    step = 24 * rows[0]["seconds"]["value"]
    assert rows[0]["joules_per_token"]["value"] == pytest.approx(2 * step / 4)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--board", "none"], "there are nitefury_ii, ulx3s_x"),
        (["--model", "none"], "there are granite-1b"),
        (["--batch", "0"], "1 to 1024"),
        (["--watts", "-1"], "above 0"),
        (["--bandwidth", "3"], "give one --home"),
        (["--storage", "/nowhere.json"], "/nowhere.json: cannot read"),
    ],
)
def test_errors(capsys, folder, arguments, text):
    assert main(["seconds", *arguments]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def test_unions_of_a_trace(capsys, tmp_path):
    path = tmp_path / "t.csv"
    rows = [(0, 1, t, 0, s, e) for t, pair in enumerate([(0, 1), (1, 2), (0, 1), (0, 1)]) for s, e in enumerate(pair)]
    lines = ["# route_trace v1", "# model=m.gguf n_expert=8 n_expert_used=2", "turn,phase,step,layer,slot,expert"]
    path.write_text("\n".join([*lines, *(",".join(map(str, row)) for row in rows)]) + "\n")
    assert routing.load(path).means == {1: 2, 2: 2.5, 4: 3}
    assert main(["seconds", "--unions", str(path)]) == 2
    assert "2 of 8 experts" in capsys.readouterr().err
    assert main(["seconds", "--model", "mixtral", "--unions", str(path), "--batch", "2"]) == 0
    path.write_text("something else")
    assert main(["seconds", "--unions", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_recorded_routes():
    unions = routing.recorded()["Qwen3-30B-A3B-Q4_K_M"]
    assert (unions.experts, unions.used) == (128, 6)
    assert unions.means[1] == 6
    assert all(unions.means[b] <= routing.independent(128, 6, b) for b in unions.means)
    assert routing.load(Path(seconds.COUNTED / "unions.json")).means[16] == 53
