"""The trace of the pipeline's streams, and the section that draws it."""

import itertools
import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from amaranth.back import rtlil  # pyright: ignore[reportAttributeAccessIssue] the stubs lack it

from host.report import page
from host.report.inputs import Inputs
from host.report.sections import pipeline
from hw.align import Align
from hw.engine import Engine
from hw.formats.messages import Counter
from hw.formats.params import Params
from hw.formats.q6_k import BLOCK_BYTES
from sim import trace
from sim.trace import Matrix, Point, TraceError

PARAMS = Params()
LINK = 16


def moving(count: int, gap: int = 0) -> np.ndarray:
    """States of a stream with ``count`` transfers, each after ``gap`` cycles in which one waits."""
    return np.array(([1] * gap + [3]) * count, np.uint8)


def made(matrices: list[Matrix], lacks: str = "") -> dict[str, np.ndarray]:
    """States of every point for these matrices, one transfer short at the point ``lacks``."""
    beats = sum(-(-matrix.blocks * BLOCK_BYTES // LINK) for matrix in matrices)
    wanted = [matrix for matrix in matrices if matrix.wanted]
    blocks = sum(matrix.blocks for matrix in wanted)
    counts = {
        "fetch": beats,
        "align": 13 * sum(matrix.blocks for matrix in matrices),
        "mac": 16 * blocks,
        "sum": blocks,
        "row": sum(matrix.rows for matrix in wanted),
    }
    counts[lacks or "fetch"] -= bool(lacks)
    states = {name: moving(count) for name, count in counts.items()}
    longest = max(map(len, states.values()))
    return {name: np.pad(each, (0, longest - len(each))) for name, each in states.items()}


def expert(wanted: bool) -> list[Matrix]:
    return [Matrix(4, 2, kind, wanted) for kind in range(3)]


def test_every_transfer_has_its_block():
    matrices = expert(True) + expert(False)
    found = trace.attribute(made(matrices), matrices, [3, 5], LINK)
    assert len(found.blocks) == 48
    assert found.blocks[8] == (3, "gate", 0, True)
    assert found.blocks[24] == (5, "up", 0, False)
    assert found.owners["align"][13 * 30] == 30
    assert found.owners["mac"].tolist() == np.repeat(np.arange(24), 16).tolist()
    assert found.owners["row"].tolist() == list(range(1, 24, 2))  # two blocks a row
    # A matrix of eight blocks is 105 beats; the block that a beat's first byte is of, by hand at the first two ends.
    assert found.owners["fetch"][:28].tolist() == [0] * 14 + [1] * 13 + [2]
    assert found.owners["fetch"][105] == 8


@pytest.mark.parametrize("name", trace.DRAWN)
def test_a_transfer_too_few_is_told(name):
    matrices = expert(True) + expert(False)
    with pytest.raises(TraceError, match=f"{name}: "):
        trace.attribute(made(matrices, lacks=name), matrices, [3, 5], LINK)


def test_matrices_that_are_not_announced_are_told():
    with pytest.raises(TraceError, match="5 matrices were announced for 2 experts"):
        trace.attribute(made(expert(True)), (expert(True) + expert(False))[:5], [3, 5], LINK)


def test_the_engines_counters_must_agree():
    matrices = expert(True) + expert(False)
    found = trace.attribute(made(matrices), matrices, [3, 5], LINK)
    counters = dict.fromkeys(Counter, 0) | {
        Counter.ACTIVE: 16 * 24,
        Counter.MOVED_BYTES: 6 * 105 * 16,
        Counter.USEFUL_BYTES: 24 * 210,
        Counter.DRAINED_BYTES: 24 * 210,
    }
    trace.check(found, counters, LINK)
    for counter in (Counter.ACTIVE, Counter.MOVED_BYTES, Counter.DRAINED_BYTES, Counter.BACK_PRESSURED):
        with pytest.raises(TraceError, match=counter.name):
            trace.check(found, counters | {counter: counters[counter] + 1}, LINK)


def test_a_window_needs_an_edge():
    matrices = expert(True) + expert(True)
    found = trace.attribute(made(matrices), matrices, [3, 5], LINK)
    with pytest.raises(TraceError, match="tape"):
        trace.window(found)


def test_every_point_is_in_the_hardware():
    with trace.watched():
        text = rtlil.convert(Engine(PARAMS), name="engine")
    assert len(re.findall(r"cell \\trace_point ", text)) == len(trace.POINTS)
    assert "trace_point" not in rtlil.convert(Engine(PARAMS), name="engine")


@pytest.mark.parametrize(
    ("point", "said"),
    [
        (Point("x", "hw.align", "Align", "o_gone"), "Align.o_gone"),
        (Point("x", "hw.align", "Aligner", "o"), "hw.align.Aligner"),
        (Point("x", "hw.gone", "Align", "o"), "hw.gone.Align"),
    ],
)
def test_a_point_that_is_gone_is_named(point, said):
    with pytest.raises(TraceError, match=said), trace.watched([point]):
        Align().elaborate(None)


def test_the_design_id_tells_parameters_apart():
    assert trace.design_id(PARAMS) == trace.design_id(Params())
    assert trace.design_id(PARAMS) != trace.design_id(replace(PARAMS, tokens=2))


@pytest.fixture(scope="module")
def traced():
    return trace.pipeline(trace.MODEL)


def test_the_hardware_as_it_is(traced):
    """The Verilated engine: bit-exact, counters as the streams show, and no more cycles than the design allows."""
    counted, shown = traced["figures"], traced["window"]
    assert traced["bit_exact"]
    assert 16 <= counted["cycles_per_selected_block"] <= 16.25
    assert 13.125 <= counted["cycles_per_drained_block"] <= 14
    mac = next(point for point in shown["points"] if point["name"] == "mac")
    assert mac["states"].count("x") == 16 * trace.SELECTED_BLOCKS
    assert mac["states"].startswith("x" * 16)
    fates = [block["wanted"] for block in shown["blocks"]]
    assert fates == sorted(fates, reverse=True)
    assert fates.count(False) >= trace.DRAINED_BLOCKS
    assert set(pipeline.stages(shown)) == set(pipeline.STAGES)


def test_tracing_again_gives_the_same(traced):
    assert json.dumps(trace.pipeline(trace.MODEL)) == json.dumps(traced)


@pytest.fixture(scope="module")
def committed():
    return Inputs().need("pipeline")


def test_the_section_shows_what_is_committed(committed):
    made_section = pipeline.section(Inputs())
    counted = committed["figures"]
    assert f"{counted['cycles_per_selected_block']:.2f}" in made_section.answer
    assert f"{counted['cycles_per_drained_block']:.2f}" in made_section.answer
    assert f"{counted['cycles_per_selected_block']:.3f}" in made_section.body
    cycles = made_section.data["cycles"]
    assert len(cycles) == committed["window"]["cycles"]
    blocks = committed["window"]["blocks"]
    for point in committed["window"]["points"]:
        for cycle, state in enumerate(point["states"]):
            names = ("align", "drain") if point["name"] == "align" else (point["name"],)
            rows = [cycles[cycle][name] for name in names]
            assert ("moves" in rows) == (state == "x"), (point["name"], cycle)
        assert sum(span["moves"] for span in point["spans"]) == point["states"].count("x")
    assert all(row["drain_block"] is None or not blocks[row["drain_block"]]["wanted"] for row in cycles)
    assert all(row["align_block"] is None or blocks[row["align_block"]]["wanted"] for row in cycles)


def test_the_picture_is_true_to_scale(committed):
    """The multipliers' marks are as long as the cycles in which they took weights."""
    window = committed["window"]
    svg = pipeline.overview(window, pipeline.stages(window), committed["upstream"])
    scale = float(re.search(r'data-scale="([\d.]+)"', svg)[1])  # pyright: ignore[reportOptionalSubscript]
    lines = re.findall(r'<rect class="mac s\d" x="[\d.]+" y="([\d.]+)" width="([\d.]+)"', svg)
    own = min(float(y) for y, _ in lines)  # upstream's are below
    widths = [float(width) for y, width in lines if float(y) == own]
    mac = next(point for point in window["points"] if point["name"] == "mac")
    assert sum(widths) / scale == pytest.approx(mac["states"].count("x"), abs=0.05)


def test_upstream_is_drawn_as_it_says(committed):
    window, upstream = committed["window"], committed["upstream"]
    cells = pipeline.stages(window)
    steps = list(pipeline.their_steps(window, cells, upstream))
    assert [end - begin for _, _, begin, end in steps[:3]] == [14, 32, 16]
    assert all(one[3] == other[2] for one, other in itertools.pairwise(steps))
    assert {step for step, wanted, *_ in steps if not wanted} == {"fetch", "decode"}


def put(root, report):
    folder = root / "sim" / "results"
    folder.mkdir(parents=True)
    (folder / "pipeline.json").write_text(report if isinstance(report, str) else json.dumps(report))
    return Inputs(root)


def test_an_absent_trace_is_named(tmp_path):
    made_section = pipeline.section(Inputs(tmp_path))
    assert "sim/results/pipeline.json: not there" in made_section.missing[0]
    assert "make pipeline RECORD=1" in made_section.missing[0]


def test_a_broken_trace_is_named(tmp_path, committed):
    made_section = pipeline.section(put(tmp_path, "{"))
    assert "not JSON" in made_section.missing[0]
    without = tmp_path / "without"
    made_section = pipeline.section(put(without, {"figures": {}, "window": {}}))
    assert "has no key 'window.points'" in made_section.missing[0]
    changed = json.loads(json.dumps(committed))
    changed["window"]["points"][2]["states"] = changed["window"]["points"][2]["states"].replace("x", ".", 1)
    other = tmp_path / "other"
    other.mkdir()
    shown, failed = page.make(pipeline.section, "pipeline", put(other, changed))
    assert failed is not None
    assert "mac" in failed
    assert shown.missing


def test_a_trace_of_other_hardware_is_named(tmp_path, committed):
    changed = committed | {"design_id": "00000000"}
    made_section = pipeline.section(put(tmp_path, changed))
    assert "another state of the hardware (design 00000000" in made_section.missing[0]
    assert made_section.body
    now = trace.design_id(Params(**committed["params"]))
    assert pipeline.stale(committed | {"design_id": now}) is None


def test_a_made_window(tmp_path, committed):
    """Three cycles by hand: one that waits, one that moves, one idle."""
    blocks = [{"expert": 1, "kind": "up", "block": 7, "wanted": True}]
    span = {"block": 0, "from": 1, "to": 1, "moves": 1, "before": 4, "of": 13}
    points = [{"name": "align", "watches": "Decode.i", "states": "wx.", "spans": [span]}]
    rows = pipeline.stages({"cycles": 3, "blocks": blocks, "points": points})
    assert rows["align"] == [("waits", 0, 5, 13), ("moves", 0, 5, 13), ("idle", None, None, None)]
    assert rows["drain"] == [("idle", None, None, None)] * 3
    with pytest.raises(ValueError, match="transfers after"):
        pipeline.stages({"cycles": 3, "blocks": blocks, "points": [points[0] | {"states": "wxx"}]})
    with pytest.raises(ValueError, match="2 states for 3 cycles"):
        pipeline.stages({"cycles": 3, "blocks": blocks, "points": [points[0] | {"states": "wx"}]})


def test_params_are_those_of_the_run(committed):
    assert asdict(Params(**committed["params"])) == committed["params"]
