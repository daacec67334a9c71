"""The report reader on text in the layout of Vivado's reports, as AMD's guides UG906 and published reports show it."""

import json

import pytest

from boards import vivado

PART = "xc7a35ticsg324-1L"
RULE = "-" * 96
CHECKS = (("WNS", "TNS"), ("WHS", "THS"), ("WPWS", "TPWS"))
COLUMNS = "".join(
    f"{worst}(ns)      {total}(ns)  {total} Failing Endpoints  {total} Total Endpoints      " for worst, total in CHECKS
)
DASHES = "".join("-------      -------  ---------------------  -------------------      " for _ in CHECKS)


def heading(title: str) -> str:
    return f"{RULE}\n| {title}\n| {'-' * len(title)}\n{RULE}\n"


def slack_row(wns="0.521", failing="0", hold_failing="0") -> str:
    return (
        f"  {wns}        0.000                      {failing}                 1696        0.057        0.000"
        f"                      {hold_failing}                 1696        2.225        0.000"
        "                       0                  1077  "
    )


def timing(
    wns="0.521",
    failing="0",
    hold_failing="0",
    device="7a35ti-csg324",
    state: str | None = "Routed",
    delay="routed",
    period="10.000",
) -> str:
    stage = f"| Design State      : {state}\n" if state else ""
    return (
        "Copyright 1986-2021 Xilinx, Inc. All Rights Reserved.\n"
        f"{RULE}\n"
        "| Tool Version      : Vivado v.2021.2 (lin64) Build 3367213 Tue Oct 19 02:47:39 MDT 2021\n"
        "| Date              : Thu Jul  7 03:10:06 2022\n"
        "| Command           : report_timing_summary -file timing.rpt\n"
        "| Design            : top\n"
        f"| Device            : {device}\n"
        "| Speed File        : -1L  PRODUCTION 1.27 2018-12-12\n"
        f"{stage}{RULE}\n\nTiming Summary Report\n\n"
        f"{heading('Timer Settings')}\n  Enable Multi Corner Analysis               :  Yes\n\n\n"
        f"{heading('Design Timing Summary')}\n    {COLUMNS}\n    {DASHES}\n"
        f"    {slack_row(wns, failing, hold_failing)}\n\n\n"
        "All user specified timing constraints are met.\n\n\n"
        f"{heading('Clock Summary')}\n"
        "Clock              Waveform(ns)         Period(ns)      Frequency(MHz)\n"
        "-----              ------------         ----------      --------------\n"
        "clk100_0__io       {0.000 40.000}       80.000          12.500          \n"
        f"  clock            {{0.000 5.000}}        {period}          100.000         \n"
        "  feedback         {0.000 40.000}       80.000          12.500          \n\n\n"
        f"{heading('Intra Clock Table')}\n"
        f"Clock             {COLUMNS}\n-----             {DASHES}\n"
        "clk100_0__io                                                                                    "
        "                                               3.000        0.000                       0        1  \n"
        f"  clock           {slack_row(wns, failing, hold_failing)}\n\n\n"
        f"{heading('Inter Clock Table')}\n\n\n"
        f"{heading('Timing Details')}\n\nMax Delay Paths\n"
        f"                         net (fo=31, {delay})       0.401     0.534    device/a\n"
    )


def utilization(state="Routed", device=PART, prohibited=True, luts="12002") -> str:
    def table(title: str, rows: list[tuple[str, str, str]]) -> str:
        extra, zero = (" Prohibited |", "          0 |") if prohibited else ("", "")
        edge = (
            f"+----------------------------+-------+-------+{'-' * 12 + '+' if prohibited else ''}-----------+-------+"
        )
        body = "".join(f"| {site:26} | {used:>5} |     0 |{zero} {total:>9} |  1.00 |\n" for site, used, total in rows)
        head = f"|          Site Type         |  Used | Fixed |{extra} Available | Util% |"
        return f"{title}\n{'-' * len(title)}\n\n{edge}\n{head}\n{edge}\n{body}{edge}\n\n"

    return (
        f"{RULE}\n"
        "| Tool Version : Vivado v.2021.2 (lin64) Build 3367213 Tue Oct 19 02:47:39 MDT 2021\n"
        "| Command      : report_utilization -file utilization.rpt\n"
        f"| Design       : top\n| Device       : {device}\n| Speed File   : -1L\n| Design State : {state}\n{RULE}\n\n"
        "Utilization Design Information\n\n"
        + table(
            "1. Slice Logic",
            [
                ("Slice LUTs*", luts, "20800"),
                ("  LUT as Logic", "9000", "20800"),
                ("Slice Registers", "11500", "41600"),
            ],
        )
        + table("2. Memory", [("Block RAM Tile", "37.5", "50"), ("  RAMB36/FIFO*", "23", "50")])
        + table("3. DSP", [("DSPs", "67", "90"), ("  DSP48E1 only", "67", "")])
    )


def prepared() -> dict:
    return {
        "board": "arty_a7_35",
        "result": "arty_a7_35",
        "device": "xc7a35ti",
        "package": "csg324",
        "speed_grade": "1L",
        "target_hz": 100_000_000,
        "clock_hz": None,
        "clock_provenance": vivado.UNKNOWN,
        "utilisation": {"lut": {"used": 1, "available": 2, "percent": 50.0}},
        "tools": {"amaranth": "0.5.10"},
    }


def read_timing(text: str) -> dict:
    return vivado.read_timing(text, target_hz=100e6, part=PART)


@pytest.mark.parametrize("state", ["Routed", None])
def test_timing(state):
    """WNS 0.521 ns of 10 ns: 1 / 9.479 ns. Older releases write no state."""
    got = read_timing(timing(state=state))
    assert got == {
        "clock": "clock",
        "period_ns": 10.0,
        "wns_ns": 0.521,
        "fmax_hz": 105_496_360,
        "met": True,
        "hold_met": True,
        "failing": "",
        "version": "2021.2",
    }


@pytest.mark.parametrize("prohibited", [True, False])
def test_utilization(prohibited):
    """With and without the column that came with 2020.2."""
    assert vivado.read_utilization(utilization(prohibited=prohibited), part=PART) == {
        "lut": {"used": 12002, "available": 20800, "percent": 57.7},
        "flip_flops": {"used": 11500, "available": 41600, "percent": 27.6},
        "multipliers": {"used": 67, "available": 90, "percent": 74.4},
        "block_rams": {"used": 37.5, "available": 50, "percent": 75.0},
    }


def test_merge():
    got = vivado.merge(prepared(), timing(), utilization())
    assert got["clock_hz"] == got["fmax_worst_hz"] == 105_496_360
    assert got["clock_provenance"] == f"routed: Vivado 2021.2, {PART}, one run"
    assert got["met"]
    assert got["utilisation"]["multipliers"]["used"] == 67
    assert got["counted_before_vivado"] == prepared()["utilisation"]
    assert got["tools"] == {"amaranth": "0.5.10", "vivado": "2021.2"}


def test_missed_timing_is_marked():
    got = vivado.merge(prepared(), timing(wns="-0.500", failing="12"), utilization())
    assert not got["met"]
    assert got["clock_hz"] == round(1e9 / 10.5)
    assert got["clock_provenance"].endswith("TIMING MISSED at 100 MHz (12 setup endpoints)")


def test_no_clock_heals_a_hold_violation():
    got = vivado.merge(prepared(), timing(hold_failing="3"), utilization())
    assert got["clock_hz"] is None
    assert got["clock_provenance"] == "unknown: routed by Vivado 2021.2, but 3 hold endpoints fail"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (timing(state="Placed"), "timing.rpt: the design is Placed, which is an estimate"),
        (timing(state=None, delay="estimated"), "timing.rpt: has estimated delays"),
        (timing(device="7a100t-csg324"), "timing.rpt: is of 7a100t-csg324, not of xc7a35ticsg324-1L"),
        (timing().replace("-1L  PROD", "-2  PROD"), "timing.rpt: is of speed grade 2, not of"),
        (
            timing(period="8.000"),
            "no clock of 10.000 ns with paths; there are: clk100_0__io 80 ns, clock 8 ns",
        ),
        (timing(wns="NA"), "timing.rpt: WNS(ns) is 'NA', not a number: are there no timing constraints?"),
        (timing().replace("| Design Timing Summary", "| Design Summary"), "no table 'Design Timing Summary'"),
        (timing().replace("| Clock Summary", "| Clocks"), "no table 'Clock Summary'"),
        (timing().replace("| Intra Clock Table", "| Clocks"), "no table 'Intra Clock Table'"),
        ("nonsense", "no line '| Tool Version'"),
        ("", "no line '| Tool Version'"),
    ],
)
def test_bad_timing_is_refused(text, message):
    with pytest.raises(vivado.ReportError) as refused:
        read_timing(text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (utilization(state="Synthesized"), "utilization.rpt: the design is Synthesized, which is an estimate"),
        (utilization(state="Fully Placed"), "the design is Fully Placed"),
        (utilization(device="xc7a35tcpg236-1"), "is of xc7a35tcpg236-1, not of"),
        (utilization().replace("| Block RAM Tile", "| Block RAMs    "), "no row 'Block RAM Tile'"),
        (utilization().replace("| Design State", "| Design Stage"), "no line '| Design State'"),
        (utilization(luts="many"), "Slice LUTs is 'many', not a number"),
    ],
)
def test_bad_utilization_is_refused(text, message):
    with pytest.raises(vivado.ReportError) as refused:
        vivado.read_utilization(text, part=PART)
    assert message in str(refused.value)


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vivado, "RESULTS", tmp_path)
    assert vivado.main(["report", str(tmp_path)]) == 2
    assert "report.json: No such file or directory; make synth BOARD=... writes it" in capsys.readouterr().err
    (tmp_path / "report.json").write_text(json.dumps(prepared()))
    assert vivado.main(["report", str(tmp_path)]) == 2
    assert "timing.rpt: No such file or directory; Vivado writes it" in capsys.readouterr().err
    (tmp_path / "timing.rpt").write_text(timing())
    (tmp_path / "utilization.rpt").write_text(utilization())
    assert vivado.main(["report", str(tmp_path), "--record"]) == 0
    assert "arty_a7_35: 105.5 MHz, routed: Vivado 2021.2" in capsys.readouterr().out
    assert json.loads((tmp_path / "arty_a7_35.json").read_text())["clock_hz"] == 105_496_360
    (tmp_path / "timing.rpt").write_text(timing(wns="-0.100", failing="1"))
    assert vivado.main(["report", str(tmp_path)]) == 1
