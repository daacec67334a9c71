"""``make sim``: a model file's experts through the Verilated engine, bit for bit, and the seconds that this takes.

``python -m sim.run [--model FILE.gguf] [--layers N] [--board NAME]`` builds the engine, runs layers, compares every
output with the golden model, prints a table and writes ``build/sim/report.json``. Exit status 1 if a bit differs.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from host.model_file import ModelFile, ModelFileError, MoeLayer
from hw.formats.arithmetic import FRACTION_BITS
from hw.formats.messages import WEIGHT_FRACTION_BITS, Counter, Mode
from hw.formats.params import Params
from hw.formats.q6_k import BLOCK_BYTES
from sim.engine_sim import EngineSim, LayerRun, differences
from sim.golden import activations
from sim.workload import engine_layer, engine_routes, float64_expert, reader, route, token_vectors

ROOT = Path(__file__).resolve().parent.parent
TEXT = "moe:"
"""The batch: one token for each byte."""
START = time.monotonic()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-moe-q6k.gguf", metavar="FILE.gguf")
    parser.add_argument("--layers", type=int, default=None, metavar="N", help="only the first N layers (default: all)")
    parser.add_argument("--board", default="ulx3s_25f", help="whose routed clock turns cycles into seconds")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "sim", metavar="DIR")
    args = parser.parse_args(argv)
    try:
        report = simulate(args.model, layers=args.layers, board=args.board)
    except (ModelFileError, RuntimeError, ValueError) as error:
        print(f"make sim: error: {error}", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "report.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))
    print(f"\nwritten to {path}")
    return 0 if report["bit_exact"] else 1


def say(text: str) -> None:
    """A line of progress, with the time since the start."""
    print(f"[{time.monotonic() - START:5.1f} s] {text}", flush=True)


@dataclass
class Phase:
    """One layer run: what it was, what it counted, and how far it is from golden and from float64."""

    name: str
    tokens: int
    experts: int  # that some token wanted
    passes: int  # blocks times tokens that wanted them
    blocks_selected: int
    blocks_drained: int
    cycles: int
    stream_bytes: int
    requested_bytes: int
    outputs: int
    outputs_wrong: int
    max_abs_error_vs_float64: float
    relative_rms_error: float | None
    routes: list[list[int]]
    counters: dict[str, int]


class Bench:
    """An engine, a model file, and the checks that every layer run goes through."""

    def __init__(self, engine: EngineSim, model: ModelFile) -> None:
        self.engine, self.model = engine, model
        self.read = reader(model)

    def run(
        self, name: str, layer: MoeLayer, text: bytes, mode: Mode, *, wanted: bool = True
    ) -> tuple[Phase, LayerRun]:
        """Run ``layer`` for a token a byte of ``text``; if not ``wanted``, none has an expert and all are drained."""
        say(f"{name}: layer {layer.index}, {layer.experts} experts, {mode.name.lower()}")
        model = self.model
        x = token_vectors(model, layer, text)
        decision = route(model, layer, x)
        routes = engine_routes(decision) if wanted else []
        shape = engine_layer(model, layer, mode)
        quantized = activations.quantize(x)
        run = self.engine.run_layer(shape, quantized, routes, self.read)
        wrong = differences(run, shape, self.read, quantized, routes)
        exact = np.zeros(run.y.shape)
        for token, expert, weight in routes:
            exact[token] += np.ldexp(weight, -WEIGHT_FRACTION_BITS) * float64_expert(model, layer, expert, x[token])
        difference = np.ldexp(run.y.astype(np.float64), -FRACTION_BITS) - exact
        counters = run.counters
        expert_blocks = layer.expert_bytes // BLOCK_BYTES
        phase = Phase(
            name=name,
            tokens=len(text),
            experts=len({expert for _, expert, _ in routes}),
            passes=len(routes) * expert_blocks,
            blocks_selected=counters[Counter.USEFUL_BYTES] // BLOCK_BYTES,
            blocks_drained=counters[Counter.DRAINED_BYTES] // BLOCK_BYTES,
            cycles=run.cycles,
            stream_bytes=counters[Counter.MOVED_BYTES],
            requested_bytes=counters[Counter.REQUESTED_BYTES],
            outputs=run.y.size,
            outputs_wrong=wrong,
            max_abs_error_vs_float64=float(np.abs(difference).max()),
            relative_rms_error=float(np.sqrt(np.mean(difference**2) / np.mean(exact**2))) if routes else None,
            routes=decision.experts.tolist() if wanted else [],
            counters={counter.name.lower(): value for counter, value in counters.items()},
        )
        return phase, run


def simulate(model_path: Path, *, layers: int | None, board: str) -> dict[str, Any]:
    """Build, run and report; ``ValueError`` where the model does not fit the engine's parameters."""
    with ModelFile.open(model_path) as model:
        params = params_for(model)
        say(f"{model_path.name}: {len(model.layers)} layers, {model.expert_count} experts, top-{model.experts_used}")
        with EngineSim(params, say=say) as engine:
            bench = Bench(engine, model)
            chosen = model.layers[:layers]
            text = TEXT.encode()
            one, _ = bench.run("one token", chosen[0], text[:1], Mode.SELECTED)
            drained, _ = bench.run("drained", chosen[0], text[:1], Mode.TAPE, wanted=False)
            tape, selected, same = [], [], True
            for layer in chosen:
                name = f"{len(text)} tokens"
                phase, run = bench.run(name, layer, text, Mode.TAPE)
                tape.append(phase)
                phase, other = bench.run(name, layer, text, Mode.SELECTED)
                selected.append(phase)
                same = same and bool((run.y == other.y).all())
        shape = {"layers": len(model.layers), "experts_used": model.experts_used}
        expert_bytes = model.layers[0].expert_bytes
    return make_report(
        one, drained, tape, selected, same, params, model_path, expert_bytes, shape, clock(board, params)
    )


def params_for(model: ModelFile) -> Params:
    """Parameters that fit the model: one token lane, a 16-byte link, and memories no smaller than the defaults'."""
    return Params(
        max_width=max(model.width, 1024),
        max_expert_width=max(model.expert_width, 512),
        max_experts=max(model.expert_count, 128),
    )


def clock(board: str, params: Params) -> dict[str, Any]:
    """The board's routed clock: ``hz`` and ``provenance``, or None and why there is none.

    A board may have been routed with other token lanes than the catalogue's too.
    """
    results = ROOT / "boards" / "results"
    lanes = results / f"{board}_t{params.tokens}.json"
    path = lanes if lanes.exists() else results / f"{board}.json"
    if not path.exists():
        return {"hz": None, "provenance": f"unknown: {board} was not routed (make synth BOARD={board})"}
    result = json.loads(path.read_text())
    other = {name: routed for name, routed in result["params"].items() if routed != asdict(params).get(name)}
    if other.keys() & {"link_bytes", "tokens"}:
        return {"hz": None, "provenance": f"unknown: {board} was routed with other parameters, {result['params']}"}
    note = f" with {other}" if other else ""  # deeper memories only: the datapath is the same
    return {"hz": result["clock_hz"], "provenance": f"{board}{note}, {result['clock_provenance']}"}


def make_report(
    one: Phase,
    drained: Phase,
    tape: list[Phase],
    selected: list[Phase],
    same: bool,
    params: Params,
    model_path: Path,
    expert_bytes: int,
    shape: dict[str, int],
    clock: dict[str, Any],
) -> dict[str, Any]:
    """The figures of ``report.json`` from the counts of each phase."""
    phases = [one, drained, *tape, *selected]
    under_way = sum(one.counters[name] for name in ("active", "back_pressured", "starved"))
    passing = sum(drained.counters[name] for name in ("starved", "draining"))
    whole = one.cycles / one.passes
    seconds = None if clock["hz"] is None else expert_bytes / BLOCK_BYTES * whole / clock["hz"]
    counted = "counted: cycles of the Verilated engine, feed and sink always ready"
    return {
        "bit_exact": same and all(phase.outputs_wrong == 0 for phase in phases),
        "blocks_selected": one.blocks_selected,
        "blocks_drained": drained.blocks_drained,
        "cycles_per_selected_block": under_way / one.passes,
        "cycles_per_block_whole_layer": whole,
        "cycles_per_drained_block": passing / drained.blocks_drained,
        "mac_utilisation": one.counters["active"] / under_way,
        "tape_mac_utilisation": sum(p.counters["active"] for p in tape) / sum(p.cycles for p in tape),
        "stream_bytes": sum(phase.stream_bytes for phase in phases),
        "payload_bytes": BLOCK_BYTES * sum(phase.blocks_selected + phase.blocks_drained for phase in phases),
        "requested_bytes": sum(phase.requested_bytes for phase in phases),
        "max_abs_error_vs_float64": max(phase.max_abs_error_vs_float64 for phase in phases),
        "layer_relative_rms_error": max(p.relative_rms_error for p in phases if p.relative_rms_error is not None),
        "clock_hz": clock["hz"],
        "seconds_per_expert": seconds,
        "expert_bytes": expert_bytes,
        "outputs_compared": sum(phase.outputs for phase in phases),
        "model": model_path.name,
        "model_shape": shape,
        "params": asdict(params),
        "phases": [asdict(phase) for phase in phases],
        "provenance": {
            "bit_exact": "measured: every output of every run compared with the NumPy golden model, tape with selected",
            "blocks_selected": "counted: blocks of the run that cycles_per_selected_block is taken over",
            "blocks_drained": "counted: blocks of the run that cycles_per_drained_block is taken over",
            "cycles_per_selected_block": f"{counted}, in which a matrix was under way, over blocks_selected",
            "cycles_per_block_whole_layer": f"{counted}, from the layer's configuration to its last output",
            "cycles_per_drained_block": f"{counted}, in which a matrix was under way, over blocks_drained",
            "mac_utilisation": "counted: share of the cycles in which a matrix was under way and the MAC took weights",
            "tape_mac_utilisation": "counted: share of all cycles of the tape runs in which the MAC took weights",
            "stream_bytes": "counted: bytes of all beats of weights taken, all runs",
            "payload_bytes": "counted: blocks x 210, all runs",
            "requested_bytes": "counted: lengths of all requests, all runs",
            "max_abs_error_vs_float64": "measured: outputs against float64, dequantised weights, unquantised vectors",
            "layer_relative_rms_error": "measured: outputs of the worst run against float64",
            "clock_hz": clock["provenance"],
            "seconds_per_expert": "derived: expert_bytes / 210 x cycles_per_block_whole_layer / clock_hz",
        },
    }


def table(report: dict[str, Any]) -> str:
    """The report's figures for people, each with where it comes from."""
    hz, seconds = report["clock_hz"], report["seconds_per_expert"]
    rows = [
        (
            "bit-exact against golden",
            "yes" if report["bit_exact"] else "NO",
            f"{report['outputs_compared']:,} outputs; tape and selected mode alike",
        ),
        (
            "cycles a selected block",
            f"{report['cycles_per_selected_block']:.3f}",
            f"counted over {report['blocks_selected']:,} blocks; 16 is the multipliers' own",
        ),
        (
            "with all else of a layer",
            f"{report['cycles_per_block_whole_layer']:.3f}",
            "counted: vectors, routes, SwiGLU, outputs included",
        ),
        (
            "cycles a drained block",
            f"{report['cycles_per_drained_block']:.3f}",
            f"counted over {report['blocks_drained']:,} blocks; 13.125 is the bus's own",
        ),
        ("MAC utilisation, selected", f"{report['mac_utilisation']:.2%}", "counted"),
        (
            "MAC utilisation, tape",
            f"{report['tape_mac_utilisation']:.2%}",
            f"counted: whole layers, {len(TEXT)} tokens, every expert passes",
        ),
        ("bytes requested", f"{report['requested_bytes']:,}", "counted"),
        ("bytes streamed / payload", f"{report['stream_bytes']:,} / {report['payload_bytes']:,}", "counted"),
        ("largest error of an output", f"{report['max_abs_error_vs_float64']:.2e}", "measured against float64"),
        (
            "relative RMS error, layer",
            f"{report['layer_relative_rms_error']:.2e}",
            "measured against float64, worst run",
        ),
        (
            "clock",
            "unknown" if hz is None else f"{hz / 1e6:.1f} MHz",
            report["provenance"]["clock_hz"].split(", capped at")[0],
        ),
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
