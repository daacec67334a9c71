"""``make suite``: the 45 tasks through every placement and device, and the bits of every logit beside one another.

``python -m tests.suite [--only NAME ...] [--record]`` answers the tasks of ``models/tiny-moe-suite.json`` greedily: by
transformers alone, by llama.cpp, and with the experts through golden (tape and selected, one and eight requests at a
time) and through the Verilated device. Exit status 1 if a score, a token or a bit of a logit differs where it must not.
"""

import argparse
import hashlib
import json
import random
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from host.runtime import Request, Runtime
from hw.formats.messages import Counter
from hw.formats.params import Params
from sim import record
from sim.run import clock, say
from tests.models.llama import LlamaCpp

MODELS = Path(__file__).parents[1] / "models"
FILE = MODELS / "tiny-moe-q6k.gguf"
TASKS = json.loads((MODELS / "tiny-moe-suite.json").read_text(encoding="utf-8"))["tasks"]
MAX_TOKENS = 10
ORDER_SEED = 1
"""Of the order of the tasks: those of a kind stand together in the file, and are no independent requests."""
THREADS = 1
RUNS = {
    "resident": ("resident", "golden", 8),
    "golden, 1 request": ("selected", "golden", 1),
    "golden, 8 requests": ("selected", "golden", 8),
    "golden, 8 requests, tape": ("tape", "golden", 8),
    "sim, 8 requests": ("selected", "sim", 8),
}
"""Placement, device and requests at a time."""
EXACT = [name for name in RUNS if name != "resident"]
"""These must agree in every bit."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suite", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*RUNS, "llama.cpp"], help="these alone")
    parser.add_argument("--tasks", type=int, default=len(TASKS), metavar="N", help="the first N of the seeded order")
    parser.add_argument("--record", action="store_true", help="write sim/results/suite.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(THREADS)
    tasks = random.Random(ORDER_SEED).sample(TASKS, len(TASKS))[: args.tasks]
    names = [name for name in [*RUNS, "llama.cpp"] if not args.only or name in args.only]
    rows = {name: llama(tasks) if name == "llama.cpp" else through(name, *RUNS[name], tasks) for name in names}
    report = make_report(rows, len(tasks))
    path = record.write("suite", "make suite RECORD=1", report, record=args.record)
    print(table(report))
    print(f"written to {path}")
    return 0 if report["right"] else 1


def through(name: str, placement: str, device: str, at_once: int, tasks: list[dict[str, str]]) -> dict[str, Any]:
    """Answer the tasks with so many requests at a time; as soon as one ends the next joins."""
    say(f"{name}: {len(tasks)} tasks")
    digest = [hashlib.sha256() for _ in tasks]
    begin = told = time.monotonic()

    def progress(layer: int, done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told > 5:
            told = time.monotonic()
            ended = len(tasks) - len(waiting) - len(runtime.live)
            say(f"  {ended} done; layer {layer}: {done:,} of {total:,} bytes")

    with Runtime.open(str(FILE), placement=placement, device=device) as runtime:
        passes = []
        runtime.watch, runtime.layer_progress = passes.append, progress
        waiting, requests = list(enumerate(tasks)), {}
        places: dict[Request, int] = {}
        while waiting or runtime.live:
            while waiting and len(runtime.live) < at_once:
                place, task = waiting.pop(0)
                requests[place] = runtime.add(task["prompt"], max_tokens=MAX_TOKENS)
                places[requests[place]] = place
            for event in runtime.step():
                assert event.request.logits is not None
                digest[places[event.request]].update(event.request.logits.tobytes())
        ledger, routing = runtime.ledger, runtime.routing.report()
        expert, size = runtime.model.layers[0].expert_bytes, runtime.device.params.max_batch if runtime.device else 1
    cycles = sum(each.result.counters[Counter.CYCLES] for each in passes)
    return {
        "placement": placement,
        "device": None if placement == "resident" else device,
        "requests_at_once": at_once,
        "right": sum(requests[place].text == task["answer"] for place, task in enumerate(tasks)),
        "tokens": [requests[place].tokens for place in range(len(tasks))],
        "logits_sha256": hashlib.sha256(b"".join(each.digest() for each in digest)).hexdigest(),
        "layer_passes": len(passes),
        "bytes_requested": ledger.requested,
        "bytes_useful": ledger.useful,
        "bytes_useful_unsorted": expert * sum(unsorted(each.chosen, size) for each in passes),
        "cycles": cycles or None,
        "broken": [each.text for each in ledger.check() if not each.holds],
        "unions": [{"batch": row["batch"], **row["all"]} for row in routing["unions"]],
        "reuse": {phase: routing["reuse"][phase]["share"] for phase in ("prefill", "decode")},
        "wall_seconds": round(time.monotonic() - begin, 1),
    }


def unsorted(chosen: NDArray[np.int64], size: int) -> int:
    """Experts that parts of so many tokens would fetch if they were taken as they come."""
    return sum(len(np.unique(chosen[first : first + size])) for first in range(0, len(chosen), size))


def llama(tasks: list[dict[str, str]]) -> dict[str, Any]:
    """Answer them with llama.cpp, one after another; it tells text, not tokens."""
    say(f"llama.cpp: {len(tasks)} tasks")
    begin = time.monotonic()
    model = LlamaCpp(FILE, threads=THREADS)
    texts = [model.complete(task["prompt"], max_tokens=MAX_TOKENS, stop=["\n"])[0] for task in tasks]
    return {
        "placement": "llama.cpp",
        "device": None,
        "requests_at_once": 1,
        "right": sum(text == task["answer"] for text, task in zip(texts, tasks, strict=True)),
        "tokens": [[*text.encode(), ord("\n")] for text in texts],
        "wall_seconds": round(time.monotonic() - begin, 1),
    }


def make_report(rows: dict[str, dict[str, Any]], count: int) -> dict[str, Any]:
    """Scores, and whether what must agree does."""
    tokens = {json.dumps(row.pop("tokens")) for row in rows.values()}
    bits = {rows[name]["logits_sha256"] for name in EXACT if name in rows}
    scores = {row["right"] for row in rows.values()}
    generated = sum(len(each) for each in json.loads(min(tokens)))
    routed = clock("ulx3s_25f", Params())
    sim = rows.get("sim, 8 requests")
    return {
        "right": len(tokens) == len(scores) == 1
        and len(bits) <= 1
        and not any(row.get("broken") for row in rows.values()),
        "model": FILE.name,
        "tasks": count,
        "order_seed": ORDER_SEED,
        "tokens_generated": generated,
        "same_tokens_everywhere": len(tokens) == 1,
        "same_score_everywhere": len(scores) == 1,
        "same_logit_bits": len(bits) <= 1,
        "rows": rows,
        "clock_hz": routed["hz"],
        "engine_seconds": sim and routed["hz"] and sim["cycles"] / routed["hz"],
        "threads": THREADS,
        "packages": {name: metadata.version(name) for name in ("torch", "transformers", "xllamacpp")},
        "provenance": {
            "right": "measured: exact answers; all rows with one score and the same tokens, the ledgers adding up",
            "same_logit_bits": f"measured: SHA-256 over the float32 logits of every token of {', '.join(EXACT)}",
            "cycles": "counted by the Verilated device, from the routes to the last output, over all layer passes",
            "bytes_requested": "counted by the device",
            "bytes_useful_unsorted": "derived from the routes: what parts of 8 tokens would fetch, taken as they come",
            "unions": "counted: different experts of so many requests that decoded together, all layers",
            "reuse": "counted: share of a token's experts that the same request's token before chose in that layer",
            "clock_hz": routed["provenance"],
            "engine_seconds": "derived: cycles of sim / clock_hz; the link is AXI-Stream of 16 bytes a cycle",
            "wall_seconds": "measured once, this computer: host, PyTorch and simulation together; no board's time",
        },
    }


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["", f"{'':<28}{'right':>8}{'layer passes':>14}{'bytes requested':>17}{'cycles':>13}  logits"]
    for name, row in report["rows"].items():
        counts = (row.get(key) for key in ("layer_passes", "bytes_requested", "cycles"))
        passes, requested, cycles = (f"{count:,}" if count else "-" for count in counts)
        score = f"{row['right']}/{report['tasks']}"
        bits = row.get("logits_sha256", "")[:12]
        lines.append(f"{name:<28}{score:>8}{passes:>14}{requested:>17}{cycles:>13}  {bits}")
    lines.append("")
    lines.append("same tokens everywhere" if report["same_tokens_everywhere"] else "TOKENS DIFFER")
    lines.append("all but resident: the same bits of every logit" if report["same_logit_bits"] else "LOGITS DIFFER")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
