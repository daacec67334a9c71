"""The comparison with hls4ml: what is compared, derived and printed; and, where installed, hls4ml itself."""

import importlib.util
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from host.model_file import ModelFile
from hw.formats.arithmetic import FRACTION_BITS
from sim import record
from sim.accuracy import relative_rms
from sim.golden import activations, layer
from sim.golden.intervals import STEPS
from sim.hls import adders, csim, sizes
from sim.hls.adders import Format
from sim.hls.csim import HlsError, Setting
from sim.hls.expert import MODEL, load
from sim.workload import engine_layer, float64_expert, reader, token_vectors
from tests import hls4ml

NO_HLS4ML = "needs hls4ml and PyTorch: make hls4ml"
needs_hls4ml = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("hls4ml", "torch")), reason=NO_HLS4ML
)
needs_da4ml = pytest.mark.skipif(importlib.util.find_spec("da4ml") is None, reason="needs da4ml: make hls4ml")


@pytest.fixture(scope="module")
def figures() -> dict:
    path = record.RESULTS / "hls4ml.json"
    if not path.exists():
        pytest.skip("nothing is recorded: make hls4ml RECORD=1")
    return json.loads(path.read_text())


# The expert.


def test_a_whole_expert_is_the_models():
    expert = load(256)
    text = bytes([7, 101])
    with ModelFile.open(MODEL) as model:
        place = model.layers[0]
        x = token_vectors(model, place, text)
        want = np.array([float64_expert(model, place, 0, row) for row in x])
        shape, read = engine_layer(model, place), reader(model)
        routes = [layer.Route(token, 0, 1 << 16) for token in range(len(text))]
        y, _ = layer.run(shape, read, activations.quantize(x), routes)
    # The same sums in another order of float64 additions.
    np.testing.assert_allclose(expert.steps()["y"][list(text)], want, rtol=1e-9, atol=1e-12)
    assert (expert.golden()[list(text)] == np.ldexp(y.astype(np.float64), -FRACTION_BITS)).all()


@pytest.mark.parametrize("size", [1, 16, 33])
def test_cuts(size):
    """A cut is the model's with the rest of it zero; golden is as near to it as int16 blocks allow."""
    whole, cut = load(256), load(size)
    x = whole.x.copy()
    x[:, size:] = 0
    gate, up = x @ whole.gate.T, x @ whole.up.T
    hidden = gate / (1 + np.exp(-gate)) * up
    hidden[:, size:] = 0
    want = (hidden @ whole.down.T)[:, :size]
    np.testing.assert_allclose(cut.steps()["y"], want, rtol=1e-9, atol=1e-15)
    # Elements are rounded to 2**-16 of their block's largest, three roundings in a row; a block's RMS is at least 1/16
    # of that, however few of its 256 elements are not zero. Sums of opposite signs may cancel two bits more.
    assert relative_rms(cut.golden(), want) < 3 * 2.0**-10


@pytest.mark.parametrize("size", [0, -1, 257])
def test_refuses_cuts_that_are_none(size):
    with pytest.raises(ValueError, match=rf"tiny-moe-q6k.gguf: a cut must be in 1..256 rows and columns, not {size}"):
        load(size)


# Types.


@pytest.mark.parametrize(
    ("peak", "integer"), [(0.0, 1), (0.2, -1), (0.25, 0), (0.3, 0), (0.99, 1), (1.0, 2), (3.9, 3), (4.0, 4), (33.0, 7)]
)
def test_types_hold_their_values(peak, integer):
    """hls4ml counts the sign among the integer bits, da4ml does not; both hold the peak."""
    values = np.array([peak, -peak / 2])
    assert csim.fixed(12, values) == f"fixed<12,{integer},RND,SAT>"
    fitted = Format.of(12, values)
    assert (fitted.integer, fitted.fraction) == (integer - 1, 12 - integer)
    assert abs(float(fitted.round(values)[0]) - peak) <= 2.0 ** -(fitted.fraction + 1)


# What is derived.


def test_needs():
    """By hand: the tiny expert with RF 256: 3 x 256 multipliers, 256 cycles a vector, 3 x 65,536 x 16 bits."""
    assert sizes.need(256, 256, reuse=256, bits=16) == sizes.Need(768, 256, 512, 3_145_728)
    assert sizes.multipliers(16, 16, 100) == 3
    assert sizes.weights(1024, 512) * 210 / 256 == 1_290_240  # Granite's expert, bytes


@pytest.mark.parametrize("name", sorted(sizes.PARTS))
@pytest.mark.parametrize("bits", [6.5625, 8, 16])
def test_the_largest_square_fits_and_the_next_does_not(name, bits):
    part = sizes.PARTS[name]
    n = sizes.largest_square(part, bits)
    assert 3 * n * n * bits <= part.ram_bits < 3 * (n + 1) ** 2 * bits


def test_parts_are_those_of_the_routed_boards():
    """Where a result says what the part has, it is the same; every board of the catalogue has a part."""
    seen = 0
    for path in (hls4ml.ROOT / "boards" / "results").glob("*.json"):
        result = json.loads(path.read_text())
        part, have = sizes.PARTS[result["device"]], result["utilisation"]
        luts = have["lut4" if "lut4" in have else "lut"]["available"]
        counts = (luts, have["multipliers"]["available"], have["block_rams"]["available"])
        assert counts == (part.luts, part.multipliers, part.ram_blocks)
        seen += 1
    assert seen
    assert {name for row in hls4ml.parts() for name in row["boards"]} == set(hls4ml.BOARDS)


def test_one_expert_fits_one_part():
    """What the document says: at 8 bits one expert of Granite 1B fits an XC7A200T, and nothing else fits anything."""
    fitting = {
        (name, device)
        for device, part in sizes.PARTS.items()
        for name in hls4ml.EXPERTS
        if sizes.weights(hls4ml.MODELS[name].width, hls4ml.MODELS[name].expert_width) * 8 <= part.ram_bits
    }
    assert fitting == {("granite-1b", "xc7a200t")}


def test_reload_by_hand():
    """Granite's expert over 1,600 MB/s: 1,290,240 B / 1.6e9 = 0.8064 ms; 16-bit weights 2.438 times that."""
    seconds = sizes.reload_seconds(1024, 512, bits=sizes.Q6_K_BITS, bandwidth=1.6e9)
    assert seconds == pytest.approx(0.8064e-3, rel=1e-12)
    wide = sizes.reload_seconds(1024, 512, bits=16, bandwidth=1.6e9)
    assert wide / seconds == pytest.approx(16 / 6.5625, rel=1e-12)


# Vitis HLS's report.

REPORT = """<?xml version="1.0" encoding="UTF-8" standalone="yes" ?>
<profile>
<section name="Vitis HLS Report for 'expert'" level="0"/>
<ReportVersion><Version>2023.2</Version></ReportVersion>
<UserAssignments>
<unit>ns</unit><ProductFamily>artix7</ProductFamily><Part>xc7a200t-fbg484-2</Part><TopModelName>expert</TopModelName>
<TargetClockPeriod>5.00</TargetClockPeriod><ClockUncertainty>1.35</ClockUncertainty><FlowTarget>vivado</FlowTarget>
</UserAssignments>
<PerformanceEstimates>
<PipelineType>dataflow</PipelineType>
<SummaryOfTimingAnalysis><unit>ns</unit><EstimatedClockPeriod>3.632</EstimatedClockPeriod></SummaryOfTimingAnalysis>
<SummaryOfOverallLatency><unit>clock cycles</unit><Best-caseLatency>58</Best-caseLatency>
<Average-caseLatency>58</Average-caseLatency><Worst-caseLatency>60</Worst-caseLatency>
<Interval-min>19</Interval-min><Interval-max>20</Interval-max></SummaryOfOverallLatency>
</PerformanceEstimates>
<AreaEstimates>
<Resources><BRAM_18K>12</BRAM_18K><DSP>80</DSP><FF>9012</FF><LUT>15034</LUT><URAM>0</URAM></Resources>
<AvailableResources><BRAM_18K>730</BRAM_18K><DSP>740</DSP><FF>269200</FF><LUT>134600</LUT><URAM>0</URAM></AvailableResources>
</AreaEstimates>
</profile>
"""


@pytest.fixture
def report(tmp_path) -> Path:
    path = tmp_path / "expert_csynth.xml"
    path.write_text(REPORT)
    return path


def test_reads_a_report_of_vitis_hls(report, capsys):
    assert csim.read_synthesis(report) == csim.Synthesis(
        version="2023.2",
        part="xc7a200t-fbg484-2",
        clock_ns=5.0,
        estimated_ns=3.632,
        latency=(58, 60),
        interval=(19, 20),
        resources={"BRAM_18K": 12, "DSP": 80, "FF": 9012, "LUT": 15034, "URAM": 0},
        available={"BRAM_18K": 730, "DSP": 740, "FF": 269200, "LUT": 134600, "URAM": 0},
    )
    assert hls4ml.main(["--report", str(report)]) == 0
    text = capsys.readouterr().out
    assert "Vitis HLS 2023.2, xc7a200t-fbg484-2, 5 ns (estimated by Vitis HLS, not placed)" in text
    assert "interval   19..20 cycles; derived: at least 16" in text
    assert "DSP        80 of 740 (10.8 %)" in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<Interval-min>19</Interval-min>", "", "has no PerformanceEstimates/SummaryOfOverallLatency/Interval-min"),
        (">58<", ">?<", "Best-caseLatency is '?', not a number; a loop without a fixed trip count"),
        ("<Resources>", "<Resource>", "not a csynth.xml of Vitis HLS: mismatched tag"),
        (REPORT, "", "not a csynth.xml of Vitis HLS: no element found"),
        (REPORT, "<profile/>", "has no ReportVersion/Version"),
    ],
)
def test_refuses_other_reports(report, old, new, message, capsys):
    report.write_text(REPORT.replace(old, new))
    assert hls4ml.main(["--report", str(report)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"make hls4ml: error: {report}: ")
    assert message in error
    assert hls4ml.main(["--report", str(report / "none")]) == 1


# The document.


def test_the_document_holds_the_results(figures):
    """Every table is made of sim/results/hls4ml.json; ``make hls4ml RECORD=1`` makes it so."""
    text = hls4ml.DOCS.read_text()
    assert hls4ml.replaced(text, hls4ml.DOCS, figures) == text


def test_the_results_are_right_and_say_where_they_are_from(figures):
    assert hls4ml.passed(figures)
    parts = {name: figures[name] for name in hls4ml.PARTS if name in figures}
    assert all(part["provenance"] for part in parts.values())
    derived = figures["derived"]
    assert derived["parts"] == hls4ml.parts()
    assert derived["reload"] == hls4ml.reloads()
    for row, case in zip(derived["sigmoid"], hls4ml.TABLE_CASES, strict=True):
        assert row == pytest.approx(hls4ml.sigmoid_row(*case))  # sums of float64 in whatever order
    assert derived["reuse"] == [hls4ml.reuse_row(reuse) for reuse in hls4ml.REUSES]
    assert [(row["low"], row["high"]) for row in derived["widths"]] == [(i.low, i.high) for i in STEPS.values()]


def test_a_part_that_was_not_run_is_unknown():
    assert hls4ml.table("error", {}) == "**Unknown**: not run yet, `make hls4ml ONLY=errors RECORD=1`."


def test_refuses_parts_that_are_none(capsys):
    with pytest.raises(SystemExit):
        hls4ml.main(["--only", "derived,error"])
    assert "parts are errors, frozen, engine, derived: not 'error'" in capsys.readouterr().err


def test_reuse_and_strategy_do_not_change_a_bit(figures):
    """The document says so."""
    if "errors" not in figures:
        pytest.skip("not recorded: make hls4ml ONLY=errors RECORD=1")
    rows = figures["errors"]["rows"]
    assert [row["size"] for row in rows] == [size for size, setting in hls4ml.SWEEP if setting.backend != "oneAPI"]
    assert [row["reason"] for row in figures["errors"]["refused"]]
    same = [r for r in rows if (r["size"], r["bits"], r["table"], r["backend"]) == (16, 16, 1024, "Vitis")]
    assert len(same) == 3
    assert len({row["outputs_sha256"] for row in same}) == 1


def test_what_remains_of_the_error_is_the_sigmoids_table(figures):
    """The document says so: NumPy with nothing but that table has the error of hls4ml's C++ with fine types."""
    if "errors" not in figures:
        pytest.skip("not recorded: make hls4ml ONLY=errors RECORD=1")
    big = [row for row in figures["errors"]["rows"] if row["table"] == hls4ml.BIG_TABLE]
    assert {row["size"] for row in big} == {16, 256}
    for row in big:
        alone = csim.table_error(load(row["size"]), row["table"], csim.TABLE_STEP)
        assert row["relative_rms_error"] == pytest.approx(alone, rel=0.05)  # 16 bits of all else: 2**-16 of each peak


@pytest.mark.parametrize("marker", ["<!-- hls4ml.error -->", "<!-- /hls4ml.cycles -->"])
def test_a_document_without_a_marker_is_refused(marker, figures):
    text = hls4ml.DOCS.read_text().replace(marker, "")
    with pytest.raises(ValueError, match=r"x.md needs one line <!-- hls4ml\.\w+ --> and after it one line"):
        hls4ml.replaced(text, Path("x.md"), figures)


# hls4ml and da4ml themselves.


@needs_hls4ml
def test_c_simulation(tmp_path):
    """One tiny cut through hls4ml and g++; the vendors' types round to 2**-16 of each value's range."""
    expert = load(4)
    setting = Setting(bits=18, reuse=4, table=8192)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's
        result = csim.simulate(expert, setting, tmp_path / "project")
    assert result.reuse == {"gate": 4, "up": 4, "down": 4}
    assert result.types["gate"]["weight_t"].startswith("fixed<18,")
    row = csim.row(expert, setting, result)
    assert row["relative_rms_error"] < 0.01  # the table's step of 2**-9 times the slope of 1/4, over a sigmoid near 1/2
    assert (tmp_path / "project" / "hls4ml.log").read_text()


@needs_hls4ml
def test_the_vendors_project_and_the_missing_compiler(tmp_path):
    expert = load(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's
        script = csim.project(expert, Setting(reuse=4), tmp_path / "vitis")
        assert "csynth_design" in script.read_text()
        assert 'set project_name "expert"' in (tmp_path / "vitis" / "project.tcl").read_text()
        with pytest.raises(HlsError, match=r"oneapi_resource_rf4_16bit_t1024: .*icpx.* \(see .*hls4ml.log\)"):
            csim.simulate(expert, Setting(backend="oneAPI", reuse=4), tmp_path / "oneapi")


def test_without_hls4ml_the_error_says_what_to_install(monkeypatch, tmp_path):
    for name in ("hls4ml", "da4ml", "da4ml.codegen"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(HlsError, match=r"hls4ml is not installed: pip install 'emufpga\[hls4ml\]'"):
        csim.simulate(load(4), Setting(), tmp_path / "a")
    with pytest.raises(HlsError, match=r"da4ml.* is not installed: pip install 'emufpga\[hls4ml\]'"):
        adders.trace(load(4), tmp_path / "b", bits=8, depth=4)


@needs_da4ml
@pytest.mark.parametrize(("size", "bits"), [(3, 8), (6, 10)])
def test_adders_compute_what_their_formats_say(size, bits, tmp_path):
    """da4ml's logic against the same steps in NumPy, every rounding written out: half up, clipped."""
    expert = load(size)
    traced = adders.trace(expert, tmp_path, bits=bits, depth=4)
    formats = traced.formats

    def rounded(values, name):
        to = formats[name]
        limit = 2 ** (to.integer + to.fraction)
        return np.clip(np.floor(values * 2.0**to.fraction + 0.5), -limit, limit - 1) / 2.0**to.fraction

    gate, up, down = (formats[f"{name} weight"].round(getattr(expert, name)) for name in ("gate", "up", "down"))
    g = rounded(traced.x @ gate.T, "gate")
    h = rounded(rounded(g / (1 + np.exp(-g)), "silu") * rounded(traced.x @ up.T, "up"), "hidden")
    np.testing.assert_array_equal(adders.interpret(traced), h @ down.T)
    assert traced.stages >= 1
    text = adders.harness(traced)
    assert f"reg [{size * bits - 1}:0] x;" in text
