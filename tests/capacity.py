"""``make capacity``: how much memory a Granite-size model takes, wherever its experts are, beside llama.cpp.

``python -m tests.capacity [--only NAME ...] [--record]`` runs a file of Granite 3.1 1B-A400M's shapes, all 24 layers,
made in ``build/`` with random weights: a prompt and two tokens, each placement in a process of its own. Peak memory is
what the kernel says of that process (``VmHWM``); bytes of experts alive are counted while a layer runs. Exit status 1
if a claim of ``docs/runtime.md`` does not hold.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
import tracemalloc
from importlib import metadata
from pathlib import Path
from typing import Any

from sim import record
from sim.run import say
from sim.whole_token import synthetic_file

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "experts!"
MAX_TOKENS = 2
THREADS = 1
MB = 1_000_000
LEAST_SAVED = 700 * MB
MOST_ALIVE = 16 * MB
CHILD_SECONDS = 1800
RUNS: dict[str, tuple[str, ...]] = {
    "selected": ("selected", "float32"),
    "tape": ("tape", "float32"),
    "resident": ("resident", "float32"),
    "selected, bfloat16": ("selected", "bfloat16"),
    "resident, bfloat16": ("resident", "bfloat16"),
    "llama.cpp, mapped": ("MMAP",),
    "llama.cpp, read": ("NONE",),
    "PyTorch alone": (),
}
"""Placement and type of our own, or how llama.cpp loads; the last one only imports."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.capacity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--record", action="store_true", help="write sim/results/capacity.json")
    parser.add_argument("--child", choices=RUNS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    path = synthetic_file("granite-1b")
    if args.child:
        print(json.dumps(child(args.child, path)))
        return 0
    rows = {}
    for name in args.only:
        say(name)
        begin = time.monotonic()
        command = [sys.executable, "-m", "tests.capacity", "--child", name]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=CHILD_SECONDS, check=True)
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        rows[name]["process_seconds"] = round(time.monotonic() - begin, 1)
    report = make_report(rows, path)
    written = record.write("capacity", "make capacity RECORD=1", report, record=args.record)
    print(table(report))
    print(f"written to {written}")
    return 0 if all(claim is not False for claim in report["claims"].values()) else 1


def child(name: str, path: Path) -> dict[str, Any]:
    """One run, in this process; what it took."""
    settings = RUNS[name]
    if not settings:
        import greenlet  # noqa: F401
        import torch  # noqa: F401
        from transformers import AutoModelForCausalLM, GraniteMoeForCausalLM  # noqa: F401

        return {"memory": memory()}
    return ours(path, *settings) if len(settings) == 2 else llama(path, *settings)


def ours(path: Path, placement: str, dtype: str) -> dict[str, Any]:
    import torch

    from host.runtime import Runtime

    torch.set_num_threads(THREADS)
    told = time.monotonic()

    def progress(what: str, done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told > 5:
            told = time.monotonic()
            print(f"  {what}: {done:,} of {total:,} bytes", file=sys.stderr, flush=True)

    with Runtime.open(str(path), placement=placement, dtype=dtype, progress=progress) as runtime:
        loaded = memory()
        passes = []
        runtime.watch = passes.append
        runtime.layer_progress = lambda layer, done, total: progress(f"layer {layer}", done, total)
        request = runtime.add(PROMPT, max_tokens=MAX_TOKENS)
        digest, seconds = hashlib.sha256(), []
        while runtime.live:
            begin = time.monotonic()
            for event in runtime.step():
                assert event.request.logits is not None
                digest.update(event.request.logits.tobytes())
            seconds.append(round(time.monotonic() - begin, 2))
        used = memory()
        row = {
            "memory": used,
            "memory_loaded": loaded,
            "prompt_tokens": len(request.prompt),
            "token_ids": request.tokens,
            "logits_sha256": digest.hexdigest(),
            "step_seconds": seconds,
            "bytes_requested": [
                sum(each.result.ledger.requested for each in passes[first : first + len(runtime.model.layers)])
                for first in range(0, len(passes), len(runtime.model.layers))
            ],
            "broken": [each.text for each in runtime.ledger.check() if not each.holds],
        }
        if runtime.device is not None:
            row["experts_alive"] = alive(runtime)
        return row


def alive(runtime: Any) -> dict[str, int]:
    """Bytes that exist while a layer of as many tokens as the device takes at once runs, and did not before.

    All of Python's and NumPy's allocations (``tracemalloc``): the file's blocks wherever they are in driver, link and
    golden device, what golden decodes of them, and also token vectors and sums, which are no experts. Beside that the
    store's buffers, in whole huge pages.
    """
    device, store = runtime.device, runtime.store
    run, peaks = device.run_layer, []

    def measured(*args: Any, **options: Any) -> Any:
        if len(peaks) == 2:
            return run(*args, **options)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            result = run(*args, **options)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        finally:
            tracemalloc.stop()
        return result

    device.run_layer = measured
    runtime.add(PROMPT, max_tokens=1)
    runtime.step()
    buffers = sum(len(buffer) for buffer in store._reader.buffers)
    return {"allocated": max(peaks), "store_buffers": buffers, "all": max(peaks) + buffers}


def llama(path: Path, mode: str) -> dict[str, Any]:
    from tests.models.llama import LlamaCpp

    model = LlamaCpp(path, threads=THREADS, load_mode=mode)
    loaded = memory()
    text, answer = model.complete(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True)
    return {
        "memory": memory(),
        "memory_loaded": loaded,
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "text": text,
    }


def memory() -> dict[str, int]:
    """Bytes of this process: the most it ever had in RAM, and what it has now, of its own and mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in lines)
        if name in FIELDS
    }
    return {FIELDS[name]: value for name, value in found.items()}


FIELDS = {"VmHWM": "peak", "RssAnon": "own", "RssFile": "mapped"}


def make_report(rows: dict[str, dict[str, Any]], path: Path) -> dict[str, Any]:
    """What was measured, and whether it is what we claim; None where a claim's rows were not run."""

    def saved(dtype: str) -> int | None:
        names = [f"{placement}{dtype}" for placement in ("resident", "selected")]
        if not all(name in rows for name in names):
            return None
        resident, selected = (rows[name]["memory"]["peak"] for name in names)
        return resident - selected

    most = [row["experts_alive"]["all"] for row in rows.values() if "experts_alive" in row]
    bits = {row["logits_sha256"] for name, row in rows.items() if name in ("selected", "tape")}
    both = {"selected", "tape"} <= rows.keys()
    differences = {"float32": saved(""), "bfloat16": saved(", bfloat16")}
    claims = {
        f"{LEAST_SAVED // MB} MB less than resident, {dtype}": None if less is None else less >= LEAST_SAVED
        for dtype, less in differences.items()
    }
    claims[f"at most {MOST_ALIVE // MB} MB of experts alive"] = max(most) <= MOST_ALIVE if most else None
    claims["tape and selected: the same bits of every logit"] = len(bits) == 1 if both else None
    claims["the ledgers add up"] = not any(row.get("broken") for row in rows.values())
    return {
        "model": path.name,
        "file_bytes": path.stat().st_size,
        "prompt": PROMPT,
        "tokens_generated": MAX_TOKENS,
        "rows": rows,
        "peak_saved_bytes": differences,
        "claims": claims,
        "threads": THREADS,
        "packages": {name: metadata.version(name) for name in ("torch", "transformers", "xllamacpp")},
        "provenance": {
            "model": "synthetic: random weights in Granite 3.1 1B-A400M's shapes, seed 1",
            "memory": "measured once a row: VmHWM, RssAnon and RssFile of a process that does nothing else",
            "experts_alive": "measured: most bytes allocated while a layer ran (tracemalloc), token vectors and sums "
            "included, and the store's buffers",
            "bytes_requested": "counted by the device, for each step",
            "step_seconds": "measured once, this computer: golden, PyTorch and driver together; no board's time",
        },
    }


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["", f"{'MB':<22}{'peak':>8}{'own':>8}{'mapped':>8}{'loaded':>8}{'experts alive':>15}{'s a token':>11}"]
    for name, row in report["rows"].items():
        memory = [row["memory"][key] / MB for key in ("peak", "own", "mapped")]
        loaded = row.get("memory_loaded", {}).get("peak")
        most = row.get("experts_alive", {}).get("all")
        seconds = row.get("step_seconds")
        lines.append(
            f"{name:<22}{memory[0]:>8,.0f}{memory[1]:>8,.0f}{memory[2]:>8,.0f}"
            + (f"{loaded / MB:>8,.0f}" if loaded else f"{'-':>8}")
            + (f"{most / MB:>15.1f}" if most else f"{'-':>15}")
            + (f"{seconds[-1]:>11.2f}" if seconds else f"{'-':>11}")
        )
    lines.append("")
    lines += [
        f"{'-' if holds is None else 'yes' if holds else 'NO':<4}{claim}" for claim, holds in report["claims"].items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
