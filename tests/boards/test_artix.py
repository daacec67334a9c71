import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from boards import artix, build, vivado
from boards.catalogue import ARTIX_BOARDS, Board
from boards.nitefury import AcornCle215Plus, NiteFuryII, memory_pins
from hw.formats.params import Params
from hw.primitives.pll import xc7_pll_settings

SMALL = Params(tokens=1, max_batch=1, max_width=256, max_expert_width=256, max_experts=2, frame_bytes=256)
SMALL_PCIE = Params(
    tokens=1, max_batch=1, max_width=256, max_expert_width=256, max_experts=2, frame_bytes=256, memory_bits=30
)
CONSTRAINTS = sorted({build.constraints(board) for board in ARTIX_BOARDS.values()})


@pytest.fixture(scope="module", params=["arty_a7_35", "arty_a7_100", "nitefury_ii", "acorn_cle_215p"])
def written(request, tmp_path_factory) -> tuple[Board, Path]:
    """Vivado's inputs for a board, with small parameters."""
    board = ARTIX_BOARDS[request.param]
    out = tmp_path_factory.mktemp(request.param)
    f_in = round(board.platform().default_clk_frequency)
    pll = xc7_pll_settings(f_in, round(board.target_mhz) * 1_000_000)
    artix.write_inputs(board, SMALL_PCIE if board.family == "artix_pcie" else SMALL, pll, 0x01234567, out)
    return board, out


def run_tcl(path: Path) -> list[list[str]]:
    """The commands of a script of Vivado's in order, run by a Tcl to which all of them but ``set`` are unknown."""
    tkinter = pytest.importorskip("tkinter")
    tcl = tkinter.Tcl()
    seen: list[list[str]] = []

    def unknown(*words: str) -> str:
        seen.append(list(words))
        return "100%" if words[0] == "get_property" else words[0]

    tcl.createcommand("unknown", unknown)
    tcl.eval("rename file {}")  # nothing is to be copied
    tcl.eval(path.read_text())
    return seen


def test_every_file_that_the_script_reads_is_there(written):
    board, out = written
    commands = run_tcl(out / "build.tcl")
    named = {words[-1] for words in commands if words[0] in ("read_verilog", "read_xdc", "add_files")}
    named |= {words[3] for words in commands if words[:2] == ["file", "copy"]}
    files = {name for name in named if name.endswith((".v", ".xdc", ".prj"))}
    assert files == ({"device.v", "top.xdc", "mig.prj"} if board.family == "artix_pcie" else {"top.v", "top.xdc"})
    assert all((out / name).stat().st_size for name in files)
    part = board.platform()._part
    assert any(words[0] == "create_project" and words[-1] == part for words in commands)
    ran = [words[0] for words in commands]
    steps = [
        "opt_design",
        "place_design",
        "phys_opt_design",
        "route_design",
        "report_timing_summary",
        "write_bitstream",
    ]
    assert [step for step in ran if step in steps] == steps
    assert "@" not in (out / "build.tcl").read_text()


def test_every_port_of_the_constraints_exists(written):
    board, out = written
    constrained = set(re.findall(r'get_(?:ports|nets) [{"]?(\w+)', (out / "top.xdc").read_text()))
    assert constrained
    if board.family == "artix_pcie":
        # Vivado's wrapper names them: a port as itself, an interface's signals with its name in front.
        commands = run_tcl(out / "build.tcl")
        ports = {words[-1] for words in commands if words[0] == "create_bd_port"}
        clocks = [words[-1] for words in commands if words[0] == "create_bd_intf_port" and "diff_clock" in words[-2]]
        ports |= {f"{clock}_clk_{side}" for clock in clocks for side in "pn"}
    else:
        header = re.search(r"^module top\(([^)]*)\);", (out / "top.v").read_text(), re.MULTILINE)
        assert header
        ports = set(re.split(r"[,\s]+", header[1]))
    assert constrained == ports


def test_vivado_finds_the_buses(written):
    """By the ports' names and the attributes of their clocks; instances of the block design use the same names."""
    board, out = written
    if board.family != "artix_pcie":
        pytest.skip("no block design")
    text = (out / "device.v").read_text()
    found = re.findall(r'X_INTERFACE_PARAMETER = "(.*?)" \*\)\n  (?:input|output) (\w+);', text)
    ports = {port: parameter for parameter, port in found}
    assert ports["axi_aclk"] == "ASSOCIATED_BUSIF s_axis:m_axis, ASSOCIATED_RESET axi_aresetn"
    assert ports["clk"] == "ASSOCIATED_BUSIF m_axi, ASSOCIATED_RESET resetn, FREQ_HZ 150000000"
    assert ports["resetn"] == ports["axi_aresetn"] == "POLARITY ACTIVE_LOW"
    module = re.search(r"^module emufpga\((.*?)\);", text, re.MULTILINE | re.DOTALL)
    assert module
    names = re.split(r"[,\s]+", module[1])
    for words in run_tcl(out / "build.tcl"):
        if words[0] in ("get_bd_pins", "get_bd_intf_pins") and words[1].startswith("device/"):
            name = words[1].removeprefix("device/")
            assert name in names or any(port.startswith(f"{name}_") for port in names), name


@pytest.mark.parametrize("platform", [NiteFuryII, AcornCle215Plus])
def test_memory_project(platform):
    """Every memory signal has its own pin; 2**30 bytes by address bits, and by the part's rows, columns and banks."""
    project = ElementTree.fromstring(artix.memory_project(platform(), 30))
    pins = {pin.attrib["name"]: pin.attrib["PADName"] for pin in project.iter("Pin") if "IOSTANDARD" in pin.attrib}
    widths = {"addr": 16, "ba": 3, "ck_p": 1, "ck_n": 1, "cke": 1, "dm": 2, "dq": 16, "dqs_p": 2, "dqs_n": 2, "odt": 1}
    names = {f"ddr3_{name}[{bit}]" for name, width in widths.items() for bit in range(width)}
    assert set(pins) == names | {"ddr3_cas_n", "ddr3_ras_n", "ddr3_we_n", "ddr3_reset_n"}
    assert len(set(pins.values())) == len(pins) == len(memory_pins(platform()))
    # From litex-boards' sqrl_acorn.py and the card's own project.
    assert [pins[name] for name in ("ddr3_addr[15]", "ddr3_dq[7]", "ddr3_dqs_n[1]")] == ["J22", "C18", "A21"]
    controller = project.find("Controller")
    assert controller is not None
    row, column, bank = (int(controller.findtext(f"{n}Address") or 0) for n in ("Row", "Col", "Bank"))
    assert 2 << (row + column + bank) == int(controller.findtext("C0_MEM_SIZE") or 0) == 1 << 30
    assert project.findtext("TargetFPGA") == f"xc7a200t-fbg484/-{platform.speed}"


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_each_constraint_has_its_reason(path):
    lines = path.read_text().splitlines()
    for above, line in pairwise(lines):
        assert not line or line.startswith("#") or above.startswith("# "), line


CELLS = {"products": 19, "DSP48E1": 19, "packed": 19, "LUT2": 10, "RAM32M": 2, "FDRE": 5, "RAMB18E1": 3, "RAMB36E1": 1}


def test_counts():
    assert artix.utilisation(CELLS, artix.PARTS["xc7a35t"]) == {
        "lut": {"used": 18, "available": 20800, "percent": 0.1},
        "flip_flops": {"used": 5, "available": 41600, "percent": 0.0},
        "multipliers": {"used": 19, "available": 90, "percent": 21.1},
        "block_rams": {"used": 2.5, "available": 50, "percent": 5.0},
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"products": 20}, "20 products in the design, not 19"),
        ({"DSP48E1": 18}, "18 DSP48E1, not 19"),
        ({"packed": 0}, "0 DSP48E1 with the registers of factors, product and sum in use, not 19"),
    ],
)
def test_other_multipliers_are_refused(change, message):
    artix.check_multipliers(CELLS, tokens=1)
    with pytest.raises(build.BuildError, match=message):
        artix.check_multipliers(CELLS | change, tokens=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--board", "arty_a7_35", "--mhz", "167"], "167000000 Hz cannot be made of 100000000 Hz; nearest: "),
        (
            ["--board", "arty_a7_35", "--tokens", "3"],
            "arty_a7_35 cannot be built with 3 token lanes, only with 1, 2, 4",
        ),
    ],
)
def test_wrong_options_are_explained(options, message, tmp_path, capsys):
    assert artix.main([*options, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["arty_a7_35", "arty_a7_100", "nitefury_ii"])
def test_recorded_results(name):
    """Within 80 % of the part, one DSP48E1 a multiplier, and no clock that nobody has seen."""
    result: dict[str, Any] = json.loads((artix.RESULTS / f"{name}.json").read_text())
    assert result["fits_80"]
    assert result["utilisation"]["multipliers"]["used"] == 16 * result["params"]["tokens"] + 3
    assert result["multipliers_packed"] == 16 * result["params"]["tokens"] + 3
    assert artix.table_row(result) in (build.ROOT / "docs" / "artix.md").read_text()
    if "vivado" not in result["tools"]:
        assert result["clock_hz"] is None
        assert result["clock_provenance"] == vivado.UNKNOWN


@pytest.mark.synth
def test_one_packed_multiplier_for_each(tmp_path):
    """yosys' counts of the whole device at its smallest: 19 products, 19 DSP48E1 with all registers, nothing else."""
    board = ARTIX_BOARDS["arty_a7_35"]
    pll = xc7_pll_settings(100_000_000, 100_000_000)
    _, source, top = artix.write_inputs(board, SMALL, pll, 0, tmp_path)
    cells = artix.count_cells(source, top, tmp_path, build.Progress())
    assert (cells["products"], cells["DSP48E1"], cells["packed"]) == (19, 19, 19)
    assert cells["PLLE2_BASE"] == 1
