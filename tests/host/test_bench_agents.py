"""``emufpga bench agents``: both clocks by hand, every placement on the golden device, and what is refused."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from host import agents, agents_docs, bench_agents, seconds
from host.agents import Answer, Job, Pass, Run, Step
from host.bench_agents import Place
from host.cli import main
from host.seconds import PROVENANCES, Board, Chosen, Counts, Shape

ROOT = Path(__file__).parents[2]
FILE = ROOT / "models" / "tiny-moe-q6k.gguf"
TINY = Shape("tiny", 3, 8, 2, 256, 256)
EXPERT = 161_280
BOARD = Board("a", 100e6, "routed: a test", 1, 16, 16, (1024, 512, 64), 0, 3_000_000)
COUNTS = Counts({"uart": 0.98, "axis": 0.99}, 5000)
PCIE, UART = BOARD.home("pcie-gen2x4"), BOARD.home("uart")
TWO = [[0, 1], [1, 2]]
"""Three experts, four passes of one lane."""
COMPUTE = (16 * 768 * 4 + 2 * 5000 * 256 / 1024) / 100e6
BESIDE = (64 + 48 + 2 * (528 + 2064) + 16) / 1600e6 + 2 * 4.8e-6
"""CONFIG, ROUTES, two LOAD_X of a block and OUTPUT, DONE over the link, and two waits."""


def place(home=PCIE, storage=None) -> Place:
    return Place("a place", home, False, storage, "assumed: a test")


def pass_(chosen=TWO, cycles=0, cached=0) -> Pass:
    requested = len(set().union(*chosen)) * EXPERT
    return Pass(chosen, cycles, requested, requested - cached * EXPERT)


def finished(steps, answers=()) -> Run:
    return Run(list(answers), steps, 1.0, 1.0, 100, None, {}, 0.0)


def taken(chosen=TWO, home=PCIE, board=BOARD, mode="selected", **options) -> float:
    link = home if home.kind == "link" else board.home(board.own[0])
    return seconds.chosen_seconds(TINY, board, home, link, COUNTS, chosen, mode, **options)


# The modelled clock.


def test_chosen_by_hand():
    routes = Chosen(TINY, None, ((0, 1), (1, 2), (0, 1), (5, 6)))
    assert [routes.union(batch) for batch in (1, 2, 3, 4)] == [2, 3, 3, 5]
    assert [routes.passes(4, lanes) for lanes in (1, 2, 4)] == [8, 3 + 4, 5]
    assert routes.passes(3, 2) == 3 + 2


def test_a_layer_by_hand():
    assert taken() == pytest.approx(COMPUTE + BESIDE, rel=1e-12)
    over_uart = 3 * EXPERT / (0.3e6 * 0.98) + (BESIDE - 2 * 4.8e-6) * 1600e6 / 0.3e6 + 2e-3
    assert taken(home=UART) == pytest.approx(over_uart, rel=1e-12)
    tape = COMPUTE + 5 * EXPERT / 16 / 100e6
    assert taken(mode="tape") == pytest.approx(max(tape, 8 * EXPERT / (1600e6 * 0.99)) + BESIDE, rel=1e-12)


def test_a_batch_beyond_the_board_takes_two_runs():
    one = replace(BOARD, max_batch=1)
    assert taken(board=one) == pytest.approx(taken([[0, 1]]) + taken([[1, 2]]), rel=1e-12)


def test_counted_cycles_take_the_formulas_place():
    assert taken(cycles=1_000_000) == pytest.approx(0.01 + BESIDE, rel=1e-12)
    assert taken(cycles=1) == pytest.approx(3 * EXPERT / (1600e6 * 0.99) + BESIDE, rel=1e-12)


def test_no_clock_no_time():
    with pytest.raises(seconds.SecondsError, match="its clock is routed: a test: no time follows"):
        taken(board=replace(BOARD, clock_hz=None))


def modelled(steps, **options) -> tuple[list[float], float, float]:
    return bench_agents.modelled_seconds(finished(steps), TINY, BOARD, place(**options), COUNTS, "selected")


def test_a_step_is_the_hosts_time_and_its_layers():
    steps, host, device = modelled([Step(9.0, 0.5, [pass_(), pass_()]), Step(9.0, 0.25, [pass_()])])
    assert steps == pytest.approx([0.5 + 2 * taken(), 0.25 + taken()], rel=1e-12)
    assert (host, device) == pytest.approx((0.75, 3 * taken()), rel=1e-12)


def test_what_the_cache_has_is_not_read():
    """At 100 MB/s three experts take 4.8 ms, one 1.6 ms; none leaves the link and the multipliers."""
    times = [modelled([Step(0, 0, [pass_(cached=cached)])], storage=100e6)[2] for cached in (0, 2, 3)]
    by_hand = [3 * EXPERT / 100e6 + BESIDE, EXPERT / 100e6 + BESIDE, COMPUTE + BESIDE]
    assert times == pytest.approx(by_hand, rel=1e-12)


def test_timeline():
    """Two slots: the third request joins when the first has ended, after the second step."""
    given = [Answer(True, 1, 2, 0, 1, 2), Answer(True, 1, 3, 0, 1, 3), Answer(False, 1, 1, 2, 3, 3)]
    made = bench_agents.timeline(finished([Step(0, 0, [])] * 3, given), [1.0, 0.5, 0.25])
    assert [(each.joined, each.first, each.ended) for each in made] == [(0, 1, 1.5), (0, 1, 1.75), (1.5, 1.75, 1.75)]
    row = bench_agents._speeds([made], [1.75], "derived: a test")
    value = {name: figure["value"] for name, figure in row.items()}
    assert (value["right"], value["tokens"], value["seconds"]) == (2, 6, 1.75)
    assert value["tasks_per_hour"] == pytest.approx(2 / 1.75 * 3600)
    assert value["tokens_per_second"] == pytest.approx(6 / 1.75)
    assert value["ttft"] == 1
    # 0.25, 1.5, 1.75: the 95th percentile is nine tenths of the way from the second to the third.
    assert (value["latency_p50"], value["latency_p95"]) == pytest.approx((1.5, 1.725))


def test_counted_cycles_are_called_so():
    """And the board's power, where it was given, is the board's alone."""
    ledger = dict.fromkeys(("requested", "useful", "link_written", "link_read", "storage_read"), 1)
    steps = [Step(0, 0.5, [pass_(cycles=100_000_000)])]
    done = replace(finished(steps, [Answer(True, 1, 3, 0, 1, 1)]), ledger=ledger)
    row = bench_agents.modelled_row("selected", 1, [done], TINY, BOARD, place(), argparse.Namespace(watts=4.0))
    assert row["cycles"] == "counted by the Verilated device"
    assert row["board_seconds"]["value"] == pytest.approx(1 + BESIDE)
    assert row["board_seconds"]["provenance"].endswith("counted by the Verilated device")
    assert row["watts"]["value"] == pytest.approx(4)
    assert row["watts"]["provenance"] == "measured: the board's alone, given with --watts"
    assert row["tasks_per_kwh"]["value"] == pytest.approx(3.6e6 / (4 * (1.5 + BESIDE)))


# All placements.


def bench(*argv: str) -> int:
    return main(["bench", "agents", *argv])


@pytest.fixture(scope="module")
def report() -> dict:
    """Two tasks, two at a time, once."""
    parser = argparse.ArgumentParser()
    bench_agents.add_arguments(parser)
    homes = ["--home", "uart", "--home", "pcie-gen2x4/hdd"]
    args = parser.parse_args(["--n", "2", "--tasks", "2", "--runs", "1", *homes])
    return bench_agents.compare(args, lambda line: None)


def rows(report, placement, home=None) -> dict:
    (row,) = [row for row in report["rows"] if (row["placement"], row["home"]) == (placement, home)]
    return row


def test_every_placement_is_right(report):
    assert [(row["placement"], row["home"]) for row in report["rows"]] == [
        *((name, None) for name in ("resident", "llama.cpp", "llama.cpp-read")),
        *((name, home) for name in ("tape", "selected", "cache") for home in ("uart", "pcie-gen2x4/hdd")),
    ]
    for row in report["rows"]:
        assert row["right"]["value"] == 2, row["placement"]
        assert row["tokens"]["value"] == rows(report, "llama.cpp")["tokens"]["value"]
        assert 0 < row["ttft"]["value"] < row["latency_p50"]["value"] <= row["latency_p95"]["value"]
        assert row["latency_p95"]["value"] <= row["seconds"]["value"]
        assert row["peak_ram"]["value"] > 20e6


def test_clocks_are_not_mixed(report):
    for row in report["rows"]:
        assert row["axis"] == agents.PLACEMENTS[row["placement"]]
        assert (row["board"], "board_seconds" in row) == (
            (None, False) if row["axis"] == "wall" else ("ulx3s_25f", True)
        )
        if row["axis"] == "modelled":
            assert row["cycles"].startswith("derived")
            both = row["host_seconds"]["value"] + row["board_seconds"]["value"]
            assert row["seconds"]["value"] == pytest.approx(both)
            assert row["seconds"]["provenance"] == bench_agents.PROVENANCE["modelled"]


def test_every_figure_has_its_provenance(report):
    for row in report["rows"]:
        for name, figure in row.items():
            if isinstance(figure, dict):
                assert figure["provenance"].startswith(PROVENANCES), (name, figure)
                assert (figure["value"] is None) == figure["provenance"].startswith("unknown"), (name, figure)


def test_bytes(report):
    """The ledger's: whole experts; tape asks for all, the cache reads less, the bytes of the link have frames."""
    one = {name: rows(report, name, "uart") for name in ("tape", "selected", "cache")}
    value = {name: {key: row[key]["value"] for key in KEYS} for name, row in one.items()}
    for each in value.values():
        assert each["expert_bytes"] % EXPERT == 0
        assert each["link_bytes"] > each["expert_bytes"]
    assert value["tape"]["useful_share"] < value["selected"]["useful_share"] == value["cache"]["useful_share"] == 1
    assert value["tape"]["union"] == value["selected"]["union"]
    assert value["cache"]["storage_bytes"] < value["selected"]["storage_bytes"] == value["selected"]["expert_bytes"]
    assert rows(report, "resident")["expert_bytes"]["provenance"] == bench_agents.NO_DEVICE
    # Nothing is faster than its bytes on the wire: ten bits each, at 3 Mbaud.
    for name, row in one.items():
        assert row["board_seconds"]["value"] > value[name]["expert_bytes"] * 10 / 3e6
    # Behind a disk of 210 MB/s the cache is worth what it did not read.
    disk = {name: rows(report, name, "pcie-gen2x4/hdd")["board_seconds"]["value"] for name in one}
    assert disk["cache"] < disk["selected"] < disk["tape"]
    assert disk["selected"] > value["selected"]["expert_bytes"] / 210e6


KEYS = ("expert_bytes", "useful_share", "link_bytes", "storage_bytes", "union")


def test_routing(report):
    found = {each["placement"]: each for each in report["routing"]}
    assert list(found) == ["resident", "tape", "selected", "cache"]
    assert found["selected"]["counts"] == found["tape"]["counts"] == found["cache"]["counts"]
    one = found["selected"]
    tokens = sum(one["tokens"].values())
    assert [sum(counts) for counts in one["counts"]] == [2 * tokens] * 3
    unions = {row["batch"]: row for row in one["unions"]}
    assert unions[1]["independent"] == 2
    assert unions[2]["independent"] == 8 * (1 - 0.75**2) == 3.5
    assert 2 <= unions[2]["all"]["mean"] <= 4
    assert unions[8]["all"]["mean"] is None


def test_table_says_unknown(report):
    text = bench_agents.table(report)
    assert "this machine's clock, measured" in text
    clock = json.loads((ROOT / "boards" / "results" / "ulx3s_25f.json").read_text())["clock_hz"]
    assert f"a board's clock, modelled: ulx3s_25f, {clock / 1e6:.1f} MHz" in text
    assert max(map(len, text.splitlines())) <= 120
    for word in ("watts: unknown: ", "peak_vram: unknown: no GPU", "pcie-gen2x4/hdd*"):
        assert word in text, word


def test_docs_parts(report):
    """All parts can be made of a small report too; what was not counted is a dash."""
    text = "".join(f"<!-- agents.{name} --><!-- /agents.{name} -->\n" for name in agents_docs.PARTS)
    made = agents_docs.replaced(text, {"suite": report})
    assert made.count(agents_docs.NOT_YET) == 1  # the shape's
    assert "| 8 | 0 | - | - | 7.20 | - - - |" in made
    assert agents_docs.replaced(made, {"suite": report}) == made
    with pytest.raises(ValueError, match=r"needs one line <!-- agents.verdict -->"):
        agents_docs.replaced("", {"suite": report})


def test_plot(report, tmp_path):
    agents_docs.plot({"suite": report}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_docs_hold_the_results():
    """``python -m host.agents_docs`` makes it so."""
    text = agents_docs.DOCS.read_text(encoding="utf-8")
    assert agents_docs.replaced(text, agents_docs.load()) == text


# Parts.


def test_random_letters(tmp_path, capsys):
    """Without a suite there is no score, and answers have exactly the tokens asked for; kept runs are not run again."""
    options = ["--placements", "llama.cpp", "--n", "3", "--max-tokens", "4", "--prompt-tokens", "5", "--runs", "2"]
    options += ["--tasks", "4", "--keep", str(tmp_path / "kept"), "--json"]
    assert bench(*options) == 0
    first = json.loads(capsys.readouterr().out)
    (row,) = first["rows"]
    assert row["tokens"]["value"] == 16
    assert (row["right"]["value"], row["right"]["provenance"]) == (None, bench_agents.UNKNOWN_SCORE)
    assert row["seconds"]["n"] == 2
    assert bench(*options) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == first["rows"]


def test_workload():
    """The same tasks in the same order for everybody; the first of them for fewer."""
    job = Job(str(FILE), "selected", 2, 45)
    every = agents.workload(job)
    assert len({task.prompt for task in every}) == 45
    assert agents.workload(replace(job, tasks=7, n=8, placement="tape")) == every[:7]
    noise = agents.workload(replace(job, tasks=3, max_tokens=2, prompt_tokens=6))
    assert [(len(task.prompt), task.answer) for task in noise] == [(6, None)] * 3


def test_meters(tmp_path):
    """Packages alone count: their parts are in them."""
    for name, energy in (("intel-rapl:0", 5_000_000), ("intel-rapl:0:0", 3), ("intel-rapl:1", 7_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{energy}\n")
    (tmp_path / "intel-rapl:2").mkdir()
    found = {name: read() for name, read in agents.meters(tmp_path).items() if name.startswith("RAPL")}
    assert found == {"RAPL intel-rapl:0": 5, "RAPL intel-rapl:1": 7}


def test_energy():
    answers = [[Answer(True, 1, 1, 0, 1, 1)] * 3]
    row = bench_agents._energy(answers, [36.0], [2.0], "RAPL a")
    assert (row["watts"]["value"], row["tasks_per_kwh"]["value"]) == (18, 300_000)
    row = bench_agents._energy(answers, [None], [2.0], None)
    assert (row["watts"]["value"], row["tasks_per_kwh"]["provenance"]) == (None, bench_agents.UNKNOWN_WATTS)


@pytest.mark.parametrize(
    ("options", "status", "part"),
    [
        (["--n", "0"], 2, "must be whole numbers from 1 to 64, as 1,2,4,8, not '0'"),
        (["--n", "2,"], 2, "not '2,'"),
        (["--runs", "0"], 2, "must be a whole number of 1 or more, not '0'"),
        (["--placements", "gpu"], 2, "'gpu' is none; there are resident, llama.cpp"),
        (["--device", "uart:/dev/ttyUSB0"], 2, "invalid choice"),
        (["--watts", "-1"], 2, "must be a number above 0"),
        (["--board", "none"], 2, "board none: no boards/results/none.json; there are "),
        (["--board", "nitefury_ii"], 2, "board nitefury_ii: its clock is unknown: "),
        (["--home", "moon"], 2, "home moon: not known; there are uart, pcie-gen2x4"),
        (["--home", "sd-50/hdd"], 2, "the experts lie in the board's memory"),
        (["--home", "uart/tape"], 2, "home uart/tape: storage must be hdd, nvme or MB/s, not 'tape'"),
        (["--shape", "granite-1b", "--layers", "1"], 1, "random weights answer no task: give --max-tokens"),
        (["--shape", "none", "--max-tokens", "1"], 1, "--shape none: not known; there are granite-1b"),
        (["--shape", "granite-1b", "--layers", "99", "--max-tokens", "1"], 1, "--layers 99: granite-1b has 24"),
        (["--model", "/nowhere.gguf"], 1, "/nowhere.gguf"),
        (["--placements", "cache", "--cache-slots", "1", "--n", "1"], 1, "less than one token's 2 experts a layer"),
    ],
)
def test_refused(capfd, options, status, part):
    assert bench(*options) == status
    out, err = capfd.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("emufpga: error: ")
    assert part in last


def test_interrupted():
    """Ctrl-C ends it, and all that it began."""
    command = [sys.executable, "-m", "host.cli", "bench", "agents", "--placements", "selected", "--n", "1"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "selected, n=1, run 1 of 3" in process.stderr.readline()
        begun: list[str] = []
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for _ in range(3000):
            if (begun := children.read_text().split()) and "host.agents" in Path(
                f"/proc/{begun[0]}/cmdline"
            ).read_text():
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)  # until all that it began has closed its end
    assert (process.returncode, out) == (130, "")
    assert "emufpga: error: interrupted" in err.splitlines()
    assert begun
    for child in begun:
        with pytest.raises(ProcessLookupError):
            os.kill(int(child), 0)


def test_a_run_has_a_limit(capfd, monkeypatch):
    monkeypatch.setattr(agents, "RUN_SECONDS", -1)
    job = {"model": str(FILE), "placement": "llama.cpp", "n": 1, "tasks": 45}
    assert agents.main([json.dumps([job]), str(os.getppid())]) == 1
    assert json.loads(capfd.readouterr().out) == {"error": "not done in -1 s; give fewer --tasks"}


def test_ends_with_whoever_asked(capfd):
    """A process whose parent is not the one that it was told of gives up its first run."""
    job = {"model": str(FILE), "placement": "llama.cpp", "n": 1, "tasks": 45}
    assert agents.main([json.dumps([job]), "1"]) == signal.SIGKILL
    assert capfd.readouterr().out == ""
