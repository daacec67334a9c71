"""``make sim``: a model file's experts through the Verilated hardware, bit for bit, and the seconds that this takes.

``python -m sim.run [--model FILE.gguf] [--layers N] [--board NAME]`` builds the matrix engine, streams, compares every
sum with the golden model, prints a table and writes ``build/sim/report.json``. Exit status 1 if a bit differs.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from host.model_file import ModelFile, ModelFileError
from hw.formats.params import Params
from hw.formats.q6_k import BLOCK_BYTES
from hw.matrix_engine import MatrixEngine
from sim import verilator

ROOT = Path(__file__).resolve().parent.parent
TEXT = "moe:"
"""The batch: one token for each byte."""
EXPERTS_MEASURED = 8
"""Experts whose gate and up matrices give the cycle counts of a selected and of a drained block."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-moe-q6k.gguf", metavar="FILE.gguf")
    parser.add_argument("--layers", type=int, default=None, metavar="N", help="only the first N layers (default: all)")
    parser.add_argument("--board", default="ulx3s_85f", help="whose routed clock turns cycles into seconds")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "sim", metavar="DIR")
    args = parser.parse_args(argv)
    try:
        report = simulate(args.model, args.out, layers=args.layers, board=args.board)
    except (ModelFileError, RuntimeError, ValueError) as error:
        print(f"make sim: error: {error}", file=sys.stderr)
        return 1
    path = args.out / "report.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))
    print(f"\nwritten to {path}")
    return 0 if report["bit_exact"] else 1


def simulate(model_path: Path, out: Path, *, layers: int | None, board: str) -> dict[str, Any]:
    """Build, run and report; ``ValueError`` where the model does not fit the engine's parameters."""
    with ModelFile.open(model_path) as model:
        expert_bytes = model.layers[0].expert_bytes
        tokens = len(TEXT)
        if tokens * model.experts_used > (batch := 64):
            raise ValueError(f"{model_path}: top-{model.experts_used} of {tokens} tokens needs more than {batch} slots")
        width = max(model.width, model.expert_width, 1024)
        params = Params(link_bytes=16, tokens=1, max_batch=max(8, tokens * model.experts_used), max_width=width)
        say(f"{model_path.name}: {len(model.layers)} layers, {model.expert_count} experts, top-{model.experts_used}")
        shape = {"layers": len(model.layers), "experts_used": model.experts_used}
    out.mkdir(parents=True, exist_ok=True)
    runner = verilator.build(MatrixEngine(params), "matrix_engine", out / "engine", say=say)
    say("simulating")
    job = {
        "params": asdict(params),
        "model": str(model_path.resolve()),
        "layers": layers,
        "experts": EXPERTS_MEASURED,
        "text": TEXT,
        "progress": str(out / "progress.txt"),
        "result": str(out / "phases.json"),
    }
    for key in ("progress", "result"):
        Path(job[key]).unlink(missing_ok=True)
    env = {"EMUFPGA_JOB": json.dumps(job)}
    with follow(Path(job["progress"])):
        verilator.run(runner, "matrix_engine", out / "engine", "sim.bench.model_file", seed=1, env=env)
    phases = json.loads(Path(job["result"]).read_text())
    return make_report(phases, params, model_path, expert_bytes, shape, clock(board, params))


START = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:5.1f} s] {text}", flush=True)


@contextmanager
def follow(path: Path) -> Iterator[None]:
    """Print what the simulation appends to ``path`` as it comes."""
    stop = threading.Event()

    def print_lines() -> None:
        seen = 0
        while True:
            final = stop.wait(0.2)
            lines = path.read_text().splitlines() if path.exists() else []
            for line in lines[seen:]:
                say(f"  {line}")
            seen = len(lines)
            if final:
                return

    thread = threading.Thread(target=print_lines)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def clock(board: str, params: Params) -> dict[str, Any]:
    """The board's routed clock: ``hz`` and ``provenance``, or None and why there is none."""
    path = ROOT / "boards" / "results" / f"{board}.json"
    if not path.exists():
        return {"hz": None, "provenance": f"unknown: {board} was not routed (make synth BOARD={board})"}
    result = json.loads(path.read_text())
    other = {name: routed for name, routed in result["params"].items() if routed != asdict(params)[name]}
    if other.keys() & {"link_bytes", "tokens"}:
        return {"hz": None, "provenance": f"unknown: {board} was routed with other parameters, {result['params']}"}
    note = f" with {other}" if other else ""  # deeper memories only: the datapath is the same
    return {"hz": result["clock_hz"], "provenance": f"{board}{note}, {result['clock_provenance']}"}


def make_report(phases, params: Params, model_path: Path, expert_bytes: int, shape, clock) -> dict[str, Any]:
    """The figures of ``report.json`` from the counts of each phase."""
    selected, drained, *tape = phases
    per_selected = selected["cycles"] / selected["passes"]
    per_drained = drained["cycles"] / drained["blocks_drained"]
    expert_blocks = expert_bytes // BLOCK_BYTES
    seconds = None if clock["hz"] is None else expert_blocks * per_selected / clock["hz"]
    counted = "counted: cycles of the Verilated engine, feed and sink always ready"
    return {
        "bit_exact": all(phase["sums_wrong"] == 0 and (phase["sums"] or phase is drained) for phase in phases),
        "blocks_selected": selected["blocks_selected"],
        "blocks_drained": drained["blocks_drained"],
        "cycles_per_selected_block": per_selected,
        "cycles_per_drained_block": per_drained,
        "mac_utilisation": 16 * selected["passes"] / selected["cycles"],
        "stream_bytes": sum(phase["stream_bytes"] for phase in phases),
        "payload_bytes": sum(phase["payload_bytes"] for phase in phases),
        "max_abs_error_vs_float64": max(phase["max_abs_error_vs_float64"] for phase in phases),
        "layer_relative_rms_error": max(phase["layer_relative_rms_error"] for phase in tape),
        "clock_hz": clock["hz"],
        "seconds_per_expert": seconds,
        "expert_bytes": expert_bytes,
        "sums_compared": sum(phase["sums"] for phase in phases),
        "model": model_path.name,
        "model_shape": shape,
        "params": asdict(params),
        "tape": tape,
        "tape_mac_utilisation": 16 * sum(p["passes"] for p in tape) / sum(p["cycles"] for p in tape),
        "provenance": {
            "bit_exact": "measured: every sum of every phase compared with the NumPy golden model",
            "blocks_selected": "counted: blocks of the phase that cycles_per_selected_block is taken over",
            "blocks_drained": "counted: blocks of the phase that cycles_per_drained_block is taken over",
            "cycles_per_selected_block": f"{counted}; first beat to last sum, over blocks_selected",
            "cycles_per_drained_block": f"{counted}; first beat to last beat, over blocks_drained",
            "mac_utilisation": "derived: 16 / cycles_per_selected_block",
            "stream_bytes": "counted: bytes of all beats taken, all phases",
            "payload_bytes": "counted: blocks x 210, all phases",
            "max_abs_error_vs_float64": "measured: sums against float64, dequantised weights times unquantised vectors",
            "layer_relative_rms_error": "measured: outputs of the experts of the worst layer against float64",
            "clock_hz": clock["provenance"],
            "seconds_per_expert": "derived: expert_bytes / 210 x cycles_per_selected_block / clock_hz, fed fast enough",
        },
    }


def table(report: dict[str, Any]) -> str:
    hz, seconds = report["clock_hz"], report["seconds_per_expert"]
    why = report["provenance"]
    rows = [
        ("bit-exact against golden", f"{'yes' if report['bit_exact'] else 'NO'}", f"{report['sums_compared']:,} sums"),
        (
            "cycles a selected block",
            f"{report['cycles_per_selected_block']:.3f}",
            f"counted over {report['blocks_selected']:,} blocks; 16 is the multipliers' own",
        ),
        (
            "cycles a drained block",
            f"{report['cycles_per_drained_block']:.3f}",
            f"counted over {report['blocks_drained']:,} blocks; 13.125 is the bus's own",
        ),
        ("MAC utilisation, selected", f"{report['mac_utilisation']:.2%}", "derived: 16 / cycles a selected block"),
        (
            "MAC utilisation, tape",
            f"{report['tape_mac_utilisation']:.2%}",
            f"counted: whole layers, {len(TEXT)} tokens, every expert passes",
        ),
        ("bytes streamed / payload", f"{report['stream_bytes']:,} / {report['payload_bytes']:,}", "counted"),
        ("largest error of a sum", f"{report['max_abs_error_vs_float64']:.2e}", "measured against float64"),
        (
            "relative RMS error, layer",
            f"{report['layer_relative_rms_error']:.2e}",
            "measured against float64, outputs of the experts of the worst layer",
        ),
        ("clock", "unknown" if hz is None else f"{hz / 1e6:.1f} MHz", why["clock_hz"].split(", capped at")[0]),
        (
            "one expert",
            "unknown" if seconds is None else f"{seconds * 1e6:.1f} us",
            f"derived: {report['expert_bytes']:,} B at 16 B/cycle, selected",
        ),
    ]
    lines = ["", *(f"{name:<28}{value:>24}   {note}" for name, value, note in rows)]
    if seconds is not None:
        shape = report["model_shape"]
        need = report["expert_bytes"] / seconds
        experts = shape["layers"] * shape["experts_used"]
        token = seconds * experts
        uart = report["expert_bytes"] / 0.3e6
        lines += [
            "",
            f"A token's experts at batch 1, {experts} of them: {token * 1e3:.2f} ms (derived).",
            f"This wants {need / 1e6:,.0f} MB/s. A slower link binds instead, seconds = bytes / bandwidth:",
            f"a 3 Mbaud UART (0.3 MB/s, derived) takes {uart:.2f} s an expert.",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
