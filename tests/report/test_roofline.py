"""The report's roofline: the same numbers as ``emufpga seconds``, and everything that is missing named."""

import json
import re
import shutil

import pytest

from host import seconds
from host.report.inputs import ROOT, Inputs
from host.report.sections import roofline
from host.report.sections.roofline import Scenario
from host.seconds import BATCHES, HOMES, MODELS, MODES


@pytest.fixture(scope="module")
def world():
    found, missing = roofline.read(Inputs())
    assert found is not None
    assert not missing
    return found


@pytest.fixture(scope="module")
def made():
    return roofline.section(Inputs())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_of_the_command(world, model, mode):
    report = seconds.calculate(home_names=["all"], batches=range(1, 17), model=model, mode=mode)
    assert len(report["rows"]) == len(world.boards) * (1 + len(HOMES)) * 16
    for row in report["rows"]:
        found = world.answer(Scenario(row["board"], row["home"], model, mode, row["batch"]["value"]))
        assert found.rate == row["tokens_per_second"]["value"]
        assert found.at_most == row["tokens_per_second_at_most"]["value"]
        assert found.own == row["board_has_it"]
        if found.rate is not None:
            assert found.layer.binds == row["binds"]


def test_settings_are_those_of_the_command(world):
    row = seconds.calculate(board_names=["ulx3s_25f"], home_names=["gbe"], batches=[4], megabytes=50)["rows"][0]
    found = world.answer(Scenario("ulx3s_25f", "gbe", batch=4, bandwidth=50e6))
    assert found.rate == row["tokens_per_second"]["value"]


def test_by_hand(world):
    """One Granite token over the UART, from the bytes alone: within what vectors and waits add."""
    board = world.boards["ulx3s_25f"]
    share = json.loads((ROOT / "sim" / "results" / "link.json").read_text())["uart"]["payload_share"]
    found = world.answer(Scenario(board.name, "uart"))
    alone = 247_726_080 / (board.uart_baud / 10 * share)
    assert 1 / found.rate == pytest.approx(alone, rel=2e-3)
    assert 1 / found.rate > alone
    assert found.layer.binds == "link"


def test_a_clock_that_is_set_counts(world):
    board = next(board for board in world.boards.values() if board.clock_hz is None)
    assert world.answer(Scenario(board.name, "pcie-gen2x4")).rate is None
    slow = world.answer(Scenario(board.name, "pcie-gen2x4", clock=1e6))
    assert slow.layer.binds == "multipliers"
    assert slow.rate < world.answer(Scenario(board.name, "pcie-gen2x4", clock=1e8)).rate


def test_other_experts_leave_the_measured_unions(world):
    ask = Scenario("ulx3s_25f", "uart", batch=4)
    measured = world.answer(ask).layer.union
    assert measured == world.unions["granite-1b"].means[4]
    assert world.answer(Scenario("ulx3s_25f", "uart", batch=4, experts=32, used=8)).layer.union == measured
    changed = world.answer(Scenario("ulx3s_25f", "uart", batch=4, experts=64)).layer.union
    assert changed == pytest.approx(64 * (1 - (1 - 8 / 64) ** 4))


def test_the_grid_covers_the_controls(world):
    rows = roofline.grid(world)
    assert len(rows) > 500
    assert {row["model"] for row in rows} == set(MODELS)
    assert {row["home"] for row in rows} == {"uart", *HOMES}
    assert {row["mode"] for row in rows} == set(MODES)
    assert {row["board"] for row in rows} == set(world.boards)
    assert {row["binds"] for row in rows} >= {None, "link", "memory", "multipliers"}
    for name in ("bandwidth", "clock", "experts", "used"):
        assert sum(name in row for row in rows) > 40
        assert sum(name not in row for row in rows) > 40


def test_the_table_has_every_board_link_and_batch(made, world):
    rows = made.data["granite"]
    assert len(rows) == len(world.boards) * (1 + len(HOMES)) * len(BATCHES) * len(MODES)
    cells = re.findall(r'data-board="([^"]+)" data-home="([^"]+)" data-batch="(\d+)">([^<]*)<small>([^<]*)<', made.body)
    assert len(cells) == len(rows) / len(MODES)
    shown = {(board, home, int(batch)): (text, binds) for board, home, batch, text, binds in cells}
    for row in rows:
        if row["mode"] != "selected":
            continue
        text, binds = shown[row["board"], row["home"], row["batch"]]
        if row["tokens_per_second"] is None:
            assert text in ("does not fit", "&lt; " + roofline.rate_text(row["tokens_per_second_at_most"]))
        else:
            assert (text, binds) == (roofline.rate_text(row["tokens_per_second"]), row["binds"])


def test_the_answer_tells_wins_and_losses(made, world):
    rows = [row for row in made.data["granite"] if row["mode"] == "selected" and row["board_has_it"]]
    best = max(row["tokens_per_second"] for row in rows if row["tokens_per_second"] is not None)
    assert f"at most {roofline.rate_text(best)} tokens/s" in made.answer
    unknown = max(row["tokens_per_second_at_most"] for row in rows if row["tokens_per_second"] is None)
    assert f"below {roofline.rate_text(unknown)} tokens/s" in made.answer


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0.00119412, "0.00119"),
        (0.0999, "0.0999"),
        (1.0, "1.00"),
        (25.84, "25.8"),
        (99.96, "100"),
        (123.4, "123"),
        (1234.0, "1230"),
    ],
)
def test_rates_have_three_digits(rate, text):
    assert roofline.rate_text(rate) == text


def results(root):
    shutil.copytree(ROOT / "boards" / "results", root / "boards" / "results")
    return root / "boards" / "results"


def test_a_broken_board_is_named_and_the_others_shown(tmp_path):
    folder = results(tmp_path)
    (folder / "arty_a7_35.json").write_text("{")
    changed = json.loads((folder / "ulx3s_12f.json").read_text())
    del changed["params"]["max_batch"]
    (folder / "ulx3s_12f.json").write_text(json.dumps(changed))
    made_section = roofline.section(Inputs(tmp_path))
    assert any("arty_a7_35.json" in each for each in made_section.missing)
    assert any("ulx3s_12f.json" in each and "max_batch" in each for each in made_section.missing)
    assert {row["board"] for row in made_section.data["granite"]} == {path.stem for path in folder.glob("*.json")} - {
        "arty_a7_35",
        "ulx3s_12f",
    }


def test_no_board_at_all(tmp_path):
    made_section = roofline.section(Inputs(tmp_path))
    assert "make boards" in made_section.missing[0]


def test_counts_that_are_absent_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(seconds, "COUNTED", tmp_path)
    made_section = roofline.section(Inputs())
    assert any("link.json" in each for each in made_section.missing)


def test_unions_that_are_broken_are_named(monkeypatch):
    def broken():
        raise ValueError("no such trace")

    monkeypatch.setattr(seconds, "recorded", broken)
    made_section = roofline.section(Inputs())
    assert any("qwen3-30b-k6: its measured unions cannot be read" in each for each in made_section.missing)
    assert made_section.body


def test_without_a_routed_clock(tmp_path):
    folder = results(tmp_path)
    for path in folder.glob("*.json"):
        if json.loads(path.read_text())["clock_hz"] is not None:
            path.unlink()
    made_section = roofline.section(Inputs(tmp_path))
    assert made_section.answer.startswith("Boards whose clock nobody knows yet stay below")
    assert all(row["tokens_per_second"] is None for row in made_section.data["granite"])
