"""``emufpga bench agents``: what independent requests get, by where the experts are and how many there are at a time.

Every placement, number of slots and run is a process of its own (:mod:`host.agents`). What is *measured* here, of
resident and llama.cpp, is on this machine's clock; tape, selected and cache are on a *modelled* one: each step takes
the CPU time of attention and all else that stays on the host, measured here, and for each layer the seconds that
:mod:`host.seconds` gives for a board and the very experts that were asked for. A row is on one of the two.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from host import agents, seconds
from host.agents import PLACEMENTS, SUITE, Answer, Job, Run
from host.model_file import ModelFile
from host.routing import independent
from host.run import Progress
from host.seconds import Board, Counts, Home, SecondsError, Shape

ROOT = Path(__file__).resolve().parent.parent
RECORDED = "agents"
"""sim/results/agents.json."""
MODEL = ROOT / "models" / "tiny-moe-q6k.gguf"
SLOTS = (1, 2, 4, 8)
RUNS = 3
MOST_SLOTS = 64
KWH = 3.6e6
STORAGES = {
    "hdd": (210e6, "measured by sw-ml-study/emufpga: HDD, direct, selected experts"),
    "nvme": (746e6, "measured by sw-ml-study/emufpga: NVMe, direct, selected experts"),
}
"""Bytes/s of the storage behind a link."""
UNKNOWN_MEMORY = "unknown: the system does not say"
UNKNOWN_GPU = "unknown: no GPU"
UNKNOWN_WATTS = "unknown: neither RAPL nor NVML can be read here"
NO_DEVICE = "unknown: no device, nothing passes a link"
UNKNOWN_SCORE = "unknown: random weights have no right answer"


class AgentsError(Exception):
    """The comparison cannot be made. One line: what is wrong, and what to do."""


@dataclass(frozen=True)
class Place:
    """Where the experts of a board are: a home of :mod:`host.seconds`, and the rate of the storage behind it."""

    name: str
    home: Home
    own: bool
    storage: float | None
    storage_provenance: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``emufpga bench agents`` takes."""
    parser.add_argument("--n", type=_slots, default=SLOTS, metavar="N,N", help="requests at a time (default: 1,2,4,8)")
    parser.add_argument("--model", metavar="FILE.gguf", help="(default: the tiny model of this project)")
    parser.add_argument("--shape", metavar="NAME", help="a file of a public model's shapes instead, random weights")
    parser.add_argument("--layers", type=_whole, metavar="N", help="of --shape: the first N layers alone")
    parser.add_argument(
        "--placements", type=_placements, default=tuple(PLACEMENTS), metavar="P,P", help=", ".join(PLACEMENTS)
    )
    parser.add_argument("--device", choices=("golden", "sim"), default="golden", help="what computes the experts")
    parser.add_argument("--board", default="ulx3s_25f", metavar="NAME", help="of boards/results (default: %(default)s)")
    parser.add_argument(
        "--home",
        action="append",
        metavar="NAME[/STORAGE]",
        help=f"where its experts lie ({', '.join(('uart', *seconds.HOMES))}); behind a link on storage: "
        f"{', '.join(STORAGES)} or MB/s (default: the board's own link, storage that keeps up)",
    )
    parser.add_argument("--runs", type=_whole, default=RUNS, metavar="R", help="of everything (default: %(default)s)")
    parser.add_argument("--tasks", type=_whole, metavar="T", help="the first T of the suite (default: all 45)")
    parser.add_argument("--max-tokens", type=_whole, metavar="M", help="no suite: answers of so many tokens")
    parser.add_argument("--prompt-tokens", type=_whole, metavar="P", help="with it: prompts of so many (default: 1)")
    parser.add_argument("--cache-slots", type=_whole, metavar="S", help="cache: experts a layer (default: half of all)")
    parser.add_argument("--torch-device", default="cpu", metavar="DEVICE", help="where attention is (cpu, cuda, ...)")
    parser.add_argument("--watts", type=seconds._positive, metavar="W", help="the board's measured power")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep what each process found there, and do not run again what is there",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: every figure with unit and provenance")
    parser.add_argument("--record", action="store_true", help="write sim/results/agents.json, docs/agents.md and .png")


def run(args: argparse.Namespace) -> None:
    """The command; AgentsError, SecondsError and what a model file raises."""
    say = Progress().say
    report = compare(args, say)
    if args.record:
        from host import agents_docs

        path = agents_docs.record(report)
        say(f"written to {path}, and what docs/ shows of it")
    print(json.dumps(report, indent=2) if args.json else table(report))


def compare(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """All rows; every figure is ``{"value", "min", "max", "n", "unit", "provenance"}``, value None where unknown."""
    noise = args.max_tokens is not None
    if not noise and (args.shape or args.prompt_tokens):
        raise AgentsError("random weights answer no task: give --max-tokens with --shape, and with --prompt-tokens")
    model = _model(args, say)
    modelled = [name for name in args.placements if PLACEMENTS[name] == "modelled"]
    with ModelFile.open(model) as file:
        name = file.name or Path(model).name
        shape = Shape(name, len(file.layers), file.expert_count, file.experts_used, file.width, file.expert_width)
    board, places = _board(args.board), []
    if modelled:
        places = [_place(board, text) for text in dict.fromkeys(args.home or [board.own[0]])]
    slots = args.cache_slots or max(shape.used, shape.experts // 2)
    if any(name.startswith("llama.cpp") for name in args.placements) and not importlib.util.find_spec("xllamacpp"):
        raise AgentsError(
            "llama.cpp: xllamacpp is not installed: pip install xllamacpp, or leave it out of --placements"
        )
    job = Job(
        model=model,
        placement="",
        n=0,
        tasks=args.tasks or (max(args.n) if noise else len(json.loads(SUITE.read_text(encoding="utf-8"))["tasks"])),
        device=_device(args.device, args.board),
        torch_device=args.torch_device,
        cache_slots=slots,
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
    )
    digest = _digest(model)
    jobs = [
        dataclasses.replace(job, placement=placement, n=n, runs=args.runs)
        for placement in args.placements
        for n in args.n
    ]
    found = _kept(args.keep, jobs, digest) if args.keep else {}
    # llama.cpp's processes without PyTorch in their memory.
    for others in (False, True):
        some = [one for one in jobs if one.placement.startswith("llama.cpp") == others and one not in found]
        for one, those in _processes(some, say):
            found[one] = those
            if args.keep:
                _keep(args.keep, one, digest, those)
    runs = {(one.placement, one.n): found[one] for one in jobs}
    rows = []
    for (placement, n), those in runs.items():
        if PLACEMENTS[placement] == "wall":
            rows.append(wall_row(placement, n, those))
        else:
            rows += [modelled_row(placement, n, those, shape, board, place, args) for place in places]
    return {
        "model": shape.name,
        "shape": dataclasses.asdict(shape),
        "file_sha256": digest,
        "file_bytes": Path(model).stat().st_size,
        "tasks": job.tasks,
        "suite": None if noise else SUITE.name,
        "prompt_tokens": job.prompt_tokens or (1 if noise else None),
        "max_tokens": job.max_tokens or agents.MAX_TOKENS,
        "order_seed": agents.ORDER_SEED,
        "slots": list(args.n),
        "runs": args.runs,
        "threads": agents.THREADS,
        "device": args.device,
        "device_spec": job.device,
        "torch_device": args.torch_device,
        "board": args.board,
        "clock": {"value": board.clock_hz, "unit": "Hz", "provenance": board.clock_provenance},
        "cache_slots": slots,
        "cpu": _cpu(),
        "load": _spread([done.load for those in runs.values() for done in those], "1", "measured: mean over a minute"),
        "packages": _versions(),
        "rows": rows,
        "derived": _derived(args, places) if args.shape in seconds.MODELS else [],
        "routing": _routing(runs),
        "provenance": PROVENANCE,
    }


PROVENANCE = {
    "wall": "measured: this machine's clock, from the first request's joining to the last answer",
    "modelled": "derived: each step takes the host's seconds (measured here: CPU time of the thread that does all but "
    "device and driver; wall time where attention is on another device) and each layer's on the board "
    "(host/seconds.py, with the experts that were asked for); slots are filled at the end of a step, so nobody queues",
    "latency": "from joining to the last token; percentiles between neighbours in proportion",
    "load": "programs that wanted this machine's cores while it ran, these included",
    "routing": "of each placement's and n's first run",
}


def timeline(those: Run, step_seconds: Sequence[float]) -> list[Answer]:
    """The answers with seconds in place of steps, where step i takes ``step_seconds[i]``."""
    if not those.steps:
        return those.answers
    ends = np.concatenate([[0.0], np.cumsum(step_seconds)])
    return [
        dataclasses.replace(
            each, **{name: float(ends[int(getattr(each, name))]) for name in ("joined", "first", "ended")}
        )
        for each in those.answers
    ]


def modelled_seconds(
    done: Run, shape: Shape, board: Board, place: Place, counts: Counts, mode: str
) -> tuple[list[float], float, float]:
    """Seconds of each step on the board's clock; of all of them, what the host took and what the board took."""
    link = place.home if place.home.kind == "link" else board.home(board.own[0])
    steps, device = [], 0.0
    for step in done.steps:
        here = 0.0
        for each in step.passes:
            rate = place.storage
            if rate is not None and each.read:
                rate *= each.requested / each.read  # what the cache had was not read
            elif each.read == 0:
                rate = None
            here += seconds.chosen_seconds(
                shape, board, place.home, link, counts, each.chosen, mode, rate, each.cycles or None
            )
        device += here
        steps.append(step.host + here)
    return steps, sum(step.host for step in done.steps), device


def wall_row(placement: str, n: int, those: Sequence[Run]) -> dict[str, Any]:
    """A placement that ran here as it would anywhere."""
    answers = [timeline(done, [step.wall for step in done.steps]) for done in those]
    why = PROVENANCE["wall"]
    row = {"placement": placement, "n": n, "axis": "wall", "board": None, "home": None, "cycles": None}
    row |= _speeds(answers, [_end(each) for each in answers], why)
    row["cpu_seconds"] = _spread([done.cpu_seconds for done in those], "s", "measured: CPU time of the process")
    row["tokens_per_cpu_second"] = _spread(
        [sum(each.tokens for each in done.answers) / done.cpu_seconds for done in those],
        "tokens/s",
        "derived: tokens / CPU time of the process, which other programs on this machine do not stretch",
    )
    joules = [sum(done.joules.values()) or None for done in those]
    which = ", ".join(those[0].joules) or None
    return row | _energy(answers, joules, [done.wall_seconds for done in those], which) | _rest(those)


def modelled_row(
    placement: str,
    n: int,
    those: Sequence[Run],
    shape: Shape,
    board: Board,
    place: Place,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """A placement that needs a board: its runs on the board's clock."""
    counts, mode = Counts.read(), "tape" if placement == "tape" else "selected"
    timed = [modelled_seconds(done, shape, board, place, counts, mode) for done in those]
    answers = [timeline(done, steps) for done, (steps, _, _) in zip(those, timed, strict=True)]
    counted = any(each.cycles for done in those for step in done.steps for each in step.passes)
    row: dict[str, Any] = {
        "placement": placement,
        "n": n,
        "axis": "modelled",
        "board": board.name,
        "home": place.name,
        "board_has_it": place.own,
        "bandwidth": {"value": place.home.bandwidth, "unit": "B/s", "provenance": place.home.provenance},
        "storage": {"value": place.storage, "unit": "B/s", "provenance": place.storage_provenance},
        "cycles": "counted by the Verilated device" if counted else "derived: host/seconds.py, 16 a block and pass",
    }
    row |= _speeds(answers, [_end(each) for each in answers], PROVENANCE["modelled"])
    row["host_seconds"] = _spread(
        [host for _, host, _ in timed], "s", "measured here: CPU time beside device and driver"
    )
    row["board_seconds"] = _spread([device for _, _, device in timed], "s", f"derived; cycles {row['cycles']}")
    joules = [args.watts and args.watts * _end(each) for each in answers]
    which = "the board's alone, given with --watts" if args.watts else None
    unknown = "unknown: the board's power was not measured; give --watts"
    return row | _energy(answers, joules, [_end(each) for each in answers], which, unknown) | _rest(those)


def _end(answers: Iterable[Answer]) -> float:
    return max(each.ended for each in answers)


def _speeds(runs: Sequence[Sequence[Answer]], totals: Sequence[float], why: str) -> dict[str, Any]:
    """Scores and times of all runs, on whichever clock."""
    waits = [[each.ended - each.joined for each in answers] for answers in runs]
    firsts = [[each.first - each.joined for each in answers] for answers in runs]
    right = [_right(answers) for answers in runs]
    score = UNKNOWN_SCORE if None in right else "measured: exact answers"
    hours = [None if good is None else good / total * 3600 for good, total in zip(right, totals, strict=True)]
    tokens = [sum(each.tokens for each in answers) for answers in runs]
    return {
        "right": _spread(right, "tasks", score),
        "tasks_per_hour": _spread(hours, "right tasks/h", score if None in right else why),
        "tokens": _spread(tokens, "tokens", "counted: generated"),
        "seconds": _spread(totals, "s", why),
        "tokens_per_second": _spread(
            [count / total for count, total in zip(tokens, totals, strict=True)], "tokens/s", why
        ),
        "ttft": _spread([median(each) for each in firsts], "s", f"{why}; joining to first token, median of the tasks"),
        "latency_p50": _spread([float(np.percentile(each, 50)) for each in waits], "s", why),
        "latency_p95": _spread([float(np.percentile(each, 95)) for each in waits], "s", why),
    }


def _right(answers: Iterable[Answer]) -> int | None:
    marks = [each.right for each in answers]
    return None if None in marks else sum(map(bool, marks))


def _energy(
    runs: Sequence[Sequence[Answer]],
    joules: Sequence[float | None],
    totals: Sequence[float],
    which: str | None,
    unknown: str = UNKNOWN_WATTS,
) -> dict[str, Any]:
    why = f"measured: {which}" if which else unknown
    watts = [None if energy is None else energy / total for energy, total in zip(joules, totals, strict=True)]
    per_kwh = []
    for answers, energy in zip(runs, joules, strict=True):
        right = _right(answers)
        per_kwh.append(None if right is None or energy is None else right / energy * KWH)
    return {
        "watts": _spread(watts, "W", why),
        "tasks_per_kwh": _spread(per_kwh, "right tasks/kWh", f"derived: right tasks / energy; {why}" if which else why),
    }


def _rest(those: Sequence[Run]) -> dict[str, Any]:
    """Memory, bytes and unions."""
    ledgers = [done.ledger for done in those if done.ledger is not None]
    passes = [[each for step in done.steps for each in step.passes] for done in those]

    def bytes_of(provenance: str, *names: str) -> dict[str, Any]:
        counts = [sum(ledger[name] for name in names) for ledger in ledgers]
        return _spread(counts or [None], "B", provenance if counts else NO_DEVICE)

    gpu, memory = [done.gpu_peak_bytes for done in those], [done.peak_bytes for done in those]
    shares = [ledger["useful"] / ledger["requested"] for ledger in ledgers]
    unions = [fmean(len(set().union(*each.chosen)) for each in one) for one in passes if one]
    return {
        "peak_ram": _spread(memory, "B", UNKNOWN_MEMORY if None in memory else "measured: VmHWM of the process"),
        "peak_vram": _spread(gpu, "B", UNKNOWN_GPU if None in gpu else "measured: torch.cuda.max_memory_allocated"),
        "expert_bytes": bytes_of("counted by the device: asked for", "requested"),
        "useful_share": _spread(
            shares or [None], "1", "counted by the device: blocks that a token wanted" if shares else NO_DEVICE
        ),
        "link_bytes": bytes_of("counted by the driver: both ways, frames and all", "link_written", "link_read"),
        "storage_bytes": bytes_of("counted by the store: read from the file", "storage_read"),
        "union": _spread(
            unions or [None],
            "experts a layer",
            "counted: different experts of all tokens of a step, mean over steps and layers" if unions else NO_DEVICE,
        ),
    }


def _spread(values: Sequence[float | None], unit: str, provenance: str) -> dict[str, Any]:
    """Median, least and most of the runs; all None where one is unknown."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return {"value": None, "min": None, "max": None, "n": len(values), "unit": unit, "provenance": provenance}
    return {
        "value": median(known),
        "min": min(known),
        "max": max(known),
        "n": len(known),
        "unit": unit,
        "provenance": provenance,
    }


def _routing(runs: dict[tuple[str, int], list[Run]]) -> list[dict[str, Any]]:
    """What the routers chose, with the formula for independent tokens beside each union."""
    found = []
    for (placement, n), those in runs.items():
        if those[0].routing is None:
            continue
        report = those[0].routing
        same = all(done.routing == report for done in those)
        unions = [
            row | {"independent": independent(report["experts"], report["experts_used"], row["batch"])}
            for row in report["unions"]
        ]
        found.append({"placement": placement, "n": n, "same_in_all_runs": same, **report, "unions": unions})
    return found


def _derived(args: argparse.Namespace, places: Sequence[Place]) -> list[dict[str, Any]]:
    """All layers of the shape, by :mod:`host.seconds` alone, for homes whose storage keeps up."""
    homes = [place.name for place in places if place.storage is None]
    found = []
    for mode in seconds.MODES if homes else ():
        report = seconds.calculate(
            board_names=[args.board], model=args.shape, home_names=homes, batches=args.n, mode=mode
        )
        for row in report["rows"]:
            found.append(
                {
                    "model": report["model"],
                    "mode": mode,
                    "home": row["home"],
                    "batch": row["batch"]["value"],
                    "experts": row["experts"]["value"] if mode == "selected" else report["shape"]["experts"],
                    "experts_provenance": row["experts"]["provenance"],
                    "tokens_per_second": row["tokens_per_second"]["value"],
                    "provenance": row["tokens_per_second"]["provenance"],
                    "binds": row["binds"],
                }
            )
    return found


def _kept(folder: Path, jobs: Iterable[Job], digest: str) -> dict[Job, list[Run]]:
    """The jobs whose runs are in the folder, which is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = {job: folder / _name(job, digest) for job in jobs}
        return {
            job: [Run.load_json(line) for line in file.read_text().splitlines()]
            for job, file in files.items()
            if file.exists()
        }
    except OSError as error:
        raise AgentsError(f"--keep {folder}: {error.strerror}; give another folder") from error


def _keep(folder: Path, job: Job, digest: str, those: Iterable[Run]) -> None:
    lines = (json.dumps(dataclasses.asdict(done)) for done in those)
    (folder / _name(job, digest)).write_text("".join(f"{line}\n" for line in lines))


def _name(job: Job, digest: str) -> str:
    """Of a file of runs: all that the job asks for, with the model file's digest instead of its path."""
    text = json.dumps(dataclasses.asdict(job) | {"model": digest})
    return f"{job.placement}-{job.n}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"


def _processes(jobs: Sequence[Job], say: Callable[[str], None]) -> Iterator[tuple[Job, list[Run]]]:
    """Each job with its runs, each of which is a process of its own."""
    if not jobs:
        return
    text = json.dumps([dataclasses.asdict(job) for job in jobs])
    command = [sys.executable, "-m", "host.agents", text, str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, process_group=0) as process:
        try:
            for job in jobs:
                what, those = f"{job.placement}, n={job.n}", []
                for turn in range(job.runs):
                    say(f"{what}, run {turn + 1} of {job.runs}")
                    those.append(_run(process, what))
                broken = sorted({text for done in those for text in done.broken})
                if broken:
                    raise AgentsError(f"{what}: the ledger does not add up: {'; '.join(broken)}")
                yield job, those
        finally:
            if process.poll() is None:  # an error, or Ctrl-C; it and what it began
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _run(process: subprocess.Popen[str], what: str) -> Run:
    """What the next run prints; it has a limit of its own."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"error"'):
            raise AgentsError(f"{what}: {json.loads(line)['error']}")
        if line.startswith("{"):
            return Run.load_json(line)
    raise AgentsError(f"{what}: the process ended with status {process.wait()}; see above")


def _model(args: argparse.Namespace, say: Callable[[str], None]) -> str:
    if args.shape is None:
        return str(Path(args.model or MODEL).resolve())
    if args.model:
        raise AgentsError("--shape makes a file of its own: leave --model out")
    from models.synthetic import SHAPES
    from sim.whole_token import synthetic_file

    if args.shape not in SHAPES:
        raise AgentsError(f"--shape {args.shape}: not known; there are {', '.join(SHAPES)}")
    most = SHAPES[args.shape].layers
    if args.layers is not None and args.layers > most:
        raise AgentsError(f"--layers {args.layers}: {args.shape} has {most}")
    say(f"{args.shape}, {args.layers or most} of {most} layers, random weights")
    with contextlib.redirect_stdout(sys.stderr):  # it tells its progress
        return str(synthetic_file(args.shape, args.layers))


def _board(name: str) -> Board:
    there = seconds.boards()
    board = seconds.board_of(name, there)
    if board.clock_hz is None:
        known = [each.name for each in there.values() if each.clock_hz]
        raise SecondsError(
            f"board {name}: its clock is {board.clock_provenance}; no time follows, give one of {', '.join(known)}"
        )
    return board


def _device(kind: str, board: str) -> str:
    """The device of a board's build: as many tokens at a time, as many lanes."""
    params = json.loads((seconds.BOARDS / f"{board}.json").read_text())["params"]
    return f"{kind}:" + ",".join(f"{key}={value}" for key, value in params.items())


def _place(board: Board, text: str) -> Place:
    name, slash, storage = text.partition("/")
    if name != "uart" and name not in seconds.HOMES:
        raise SecondsError(f"home {name}: not known; there are uart, {', '.join(seconds.HOMES)}")
    home, own = board.home(name), name in board.own
    if not slash:
        return Place(text, home, own, None, "unknown: taken to keep up with the link")
    if home.kind != "link":
        raise SecondsError(f"home {text}: the experts lie in the board's memory, behind which there is no storage")
    if storage in STORAGES:
        return Place(text, home, own, *STORAGES[storage])
    try:
        rate = seconds._positive(storage) * 1e6
    except argparse.ArgumentTypeError as error:
        raise SecondsError(f"home {text}: storage must be {', '.join(STORAGES)} or MB/s, not {storage!r}") from error
    return Place(text, home, own, rate, "measured: given with --home")


def _digest(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "xllamacpp"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def table(report: dict[str, Any]) -> str:
    """The report for people: one block a clock; 120 columns."""
    what = f"suite of {report['tasks']} tasks" if report["suite"] else f"{report['tasks']} requests, no score"
    lines = [
        f"{report['model']}: {what}, {report['runs']} runs: median (min-max)",
        f"{report['cpu']}, {report['threads']} thread",
        f"load of this machine {show(report['load'], '.1f')}",
    ]
    for axis, title in AXES.items():
        rows = [row for row in report["rows"] if row["axis"] == axis]
        if not rows:
            continue
        board = f": {report['board']}, {report['clock']['value'] / 1e6:.1f} MHz" if axis == "modelled" else ""
        lines += ["", f"{title}{board}"]
        head = f"{'placement':<16}{'home':<18}{'n':>3}{'right':>9}"
        for label, _, _, width in COLUMNS:
            head += f"{label:>{width}}"
        lines.append(head)
        for row in rows:
            mark = "" if row.get("board_has_it", True) else "*"
            right = "-" if row["right"]["value"] is None else f"{row['right']['value']:g}/{report['tasks']}"
            line = f"{row['placement']:<16}{(row['home'] or '-') + mark:<18}{row['n']:>3}{right:>9}"
            for _, key, form, width in COLUMNS:
                line += f"{show(row[key], form, short=width < 14):>{width}}"
            lines.append(line)
    modelled = [row for row in report["rows"] if row["axis"] == "modelled"]
    lines += ["", "Where it comes from:", *seconds._folded([f"{axis}: {PROVENANCE[axis]}" for axis in AXES])]
    lines += seconds._folded(sorted({f"cycles: {row['cycles']}" for row in modelled}))
    keys = ("watts", "peak_vram", "peak_ram", "right")
    lines += seconds._folded(sorted({f"{key}: {row[key]['provenance']}" for row in report["rows"] for key in keys}))
    if any(not row["board_has_it"] for row in modelled):
        lines.append("  * this board does not have it: what if it had")
    return "\n".join(lines)


AXES = {"wall": "this machine's clock, measured", "modelled": "a board's clock, modelled"}
COLUMNS = (
    ("tokens/s", "tokens_per_second", ",.3g", 22),
    ("TTFT s", "ttft", ".3g", 9),
    ("p50 s", "latency_p50", ".3g", 9),
    ("p95 s", "latency_p95", ".3g", 9),
    ("union", "union", ".2f", 8),
    ("W", "watts", ".3g", 9),
)


def show(figure: dict[str, Any], form: str, *, short: bool = False, scale: float = 1) -> str:
    """A figure of :func:`_spread` as text; ``short``: the median alone."""
    if figure["value"] is None:
        return "-" if figure["provenance"] == NO_DEVICE else "unknown"
    value, least, most = (format(figure[name] * scale, form) for name in ("value", "min", "max"))
    return value if short or figure["n"] < 2 or least == most else f"{value} ({least}-{most})"


def _whole(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text!r}")
    return int(text)


def _slots(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_SLOTS for part in parts):
        raise argparse.ArgumentTypeError(f"must be whole numbers from 1 to {MOST_SLOTS}, as 1,2,4,8, not {text!r}")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _placements(text: str) -> tuple[str, ...]:
    parts = tuple(dict.fromkeys(text.split(",")))
    unknown = [part for part in parts if part not in PLACEMENTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none; there are {', '.join(PLACEMENTS)}")
    return parts
