"""Independent requests in slots, as many agents would send them: one run of one placement, and what it took.

``python -m host.agents '[{"placement": ...}, ...]'`` does each :class:`Job` so many times, each time in a process of
its own, so that its peak memory is its own, and prints a :class:`Run` as JSON in a line for each. ``n`` slots are kept
full: where a request ends, the next task joins. Nothing here knows boards or their time; ``host.bench_agents`` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from host.architectures import TorchMissingError
from host.device import DeviceError
from host.expert_cache import CacheError, in_place_of
from host.link import LinkError
from host.model_file import ModelFileError
from host.runtime import LayerPass, Request, RequestError, Runtime
from host.storage import StorageError
from host.transports import SpecError
from hw.formats.messages import Counter

ROOT = Path(__file__).resolve().parent.parent
SUITE = ROOT / "models" / "tiny-moe-suite.json"
ORDER_SEED = 1
"""Of the order of the tasks: those of a kind stand together in the file, and are no independent requests."""
MAX_TOKENS = 10
"""Of an answer to a task; the longest right one has 7 with its newline."""
THREADS = 1
TOLD_SECONDS = 5.0
POLL_SECONDS = 0.05
RUN_SECONDS = 3600
REQUEST_SECONDS = 600
"""One request to llama.cpp."""
POWERCAP = Path("/sys/class/powercap")
STATUS = Path("/proc/self/status")
PLACEMENTS = {
    "resident": "wall",
    "llama.cpp": "wall",
    "llama.cpp-read": "wall",
    "tape": "modelled",
    "selected": "modelled",
    "cache": "modelled",
}
"""Where the experts are, and on which clock that has a speed. llama.cpp maps its file, -read reads it."""

EXPECTED = (
    *(CacheError, DeviceError, LinkError, ModelFileError, RequestError, SpecError, StorageError, TorchMissingError),
    OSError,
)
"""Errors that are one line for the user."""


@dataclass(frozen=True)
class Task:
    """A prompt; ``answer`` None: there is no right one."""

    prompt: str
    answer: str | None


@dataclass(frozen=True)
class Job:
    """What one process does.

    Attributes
    ----------
    model, placement, n
        The file; one of :data:`PLACEMENTS`; slots.
    tasks
        Of the suite in its seeded order, or (``max_tokens`` given) of random letters.
    device
        For tape, selected and cache, as ``Device.open`` takes it.
    torch_device
        Where attention is.
    cache_slots
        Of the placement "cache": experts a layer.
    prompt_tokens, max_tokens
        None: the suite. Otherwise every prompt has so many letters, every answer so many tokens, whatever they are.
    runs
        How often.
    """

    model: str
    placement: str
    n: int
    tasks: int
    device: str = "golden"
    torch_device: str = "cpu"
    cache_slots: int | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    runs: int = 1


@dataclass
class Answer:
    """How a task went. Times are steps begun before (``Run.steps`` given) or seconds from the first request's on.

    A token is there when its step has ended, so ``first`` and ``ended`` are one more than the number of that step.
    """

    right: bool | None
    prompt_tokens: int
    tokens: int
    joined: float
    first: float
    ended: float


@dataclass
class Pass:
    """A layer on the device: each token's experts, in the device's order; cycles, 0 where it has no time; bytes."""

    chosen: list[list[int]]
    cycles: int
    requested: int
    read: int
    """From the file: ``requested`` less what the cache had."""


@dataclass
class Step:
    """One forward pass of all live requests.

    ``host`` is everything but the device and its driver: CPU seconds of the one thread that does it, or wall seconds
    where attention is on another device. ``wall`` is all of it on this machine's clock.
    """

    wall: float
    host: float
    passes: list[Pass]


@dataclass
class Run:
    """What a process did and took. ``steps`` is empty for llama.cpp, which tells seconds."""

    answers: list[Answer]
    steps: list[Step]
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int | None
    gpu_peak_bytes: int | None
    joules: dict[str, float]
    """By meter; empty: there is none."""
    load: float
    ledger: dict[str, Any] | None = None
    routing: dict[str, Any] | None = None
    broken: list[str] = field(default_factory=list)

    @classmethod
    def load_json(cls, text: str) -> Run:
        """What :func:`main` printed."""
        fields = json.loads(text)
        fields["answers"] = [Answer(**each) for each in fields["answers"]]
        fields["steps"] = [
            Step(each["wall"], each["host"], [Pass(**one) for one in each["passes"]]) for each in fields["steps"]
        ]
        return cls(**fields)


def workload(job: Job, suite: Path = SUITE) -> list[Task]:
    """The job's tasks, the same for every placement and number of slots."""
    if job.max_tokens is None:
        every = json.loads(suite.read_text(encoding="utf-8"))["tasks"]
        chosen = random.Random(ORDER_SEED).sample(every, len(every))[: job.tasks]
        return [Task(each["prompt"], each["answer"]) for each in chosen]
    letters = random.Random(ORDER_SEED)
    size = job.prompt_tokens or 1
    return [Task("".join(chr(letters.randrange(97, 123)) for _ in range(size)), None) for _ in range(job.tasks)]


def ours(job: Job, tasks: list[Task]) -> Run:
    """Through :class:`host.runtime.Runtime`."""
    import torch

    torch.set_num_threads(THREADS)
    on_cpu = job.torch_device == "cpu"
    clock = time.thread_time if on_cpu else time.perf_counter
    cache = functools.partial(in_place_of, slots=job.cache_slots) if job.placement == "cache" else None
    placement = "selected" if cache else job.placement
    with Runtime.open(
        job.model, placement=placement, device=job.device, torch_device=job.torch_device, cache=cache
    ) as runtime:
        if job.max_tokens is not None:
            runtime.tokenizer.ends = set()  # answers of random weights have no end
        passes: list[Pass] = []
        inside = 0.0
        if runtime.device is not None:
            run_layer = runtime.device.run_layer

            def timed(*args: Any, **options: Any) -> Any:
                nonlocal inside
                begin = clock()
                try:
                    return run_layer(*args, **options)
                finally:
                    inside += clock() - begin

            def watch(each: LayerPass) -> None:
                ledger, cycles = each.result.ledger, int(each.result.counters[Counter.CYCLES])
                chosen = each.chosen[each.order].tolist()
                passes.append(Pass(chosen, cycles, ledger.requested, ledger.storage_requested))

            vars(runtime.device)["run_layer"] = timed
            runtime.watch = watch
        requests: dict[Request, Answer] = {}
        steps: list[Step] = []
        waiting = list(reversed(tasks))
        wanted: dict[Request, Task] = {}
        told = _Told(len(tasks))
        with measured() as taken:
            while waiting or runtime.live:
                while waiting and len(runtime.live) < job.n:
                    task = waiting.pop()
                    request = runtime.add(task.prompt, max_tokens=job.max_tokens or MAX_TOKENS)
                    wanted[request] = task
                    requests[request] = Answer(None, len(request.prompt), 0, len(steps), 0, 0)
                inside, wall, host = 0.0, time.perf_counter(), clock()
                events = runtime.step()
                host = clock() - host - inside
                steps.append(Step(time.perf_counter() - wall, host, passes.copy()))
                passes.clear()
                for event in events:
                    answer = requests[event.request]
                    answer.tokens = len(event.request.tokens)
                    answer.first = answer.first or len(steps)
                    if event.finished:
                        answer.ended = len(steps)
                        right = wanted[event.request].answer
                        answer.right = None if right is None else event.request.text == right
                told.ended(sum(request.done for request in requests))
        return taken.run(
            list(requests.values()),
            steps,
            gpu_peak_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            ledger=None if runtime.device is None else dataclasses.asdict(runtime.ledger),
            routing=runtime.routing.report(),
            broken=[each.text for each in runtime.ledger.check() if not each.holds],
        )


def llama(job: Job, tasks: list[Task]) -> Run:
    """Through llama.cpp's own server in this process, a slot for each of ``n`` clients, all layers on the CPU."""
    xllamacpp: Any = importlib.import_module("xllamacpp")  # it has no stubs
    longest = max(len(task.prompt) for task in tasks) + (job.max_tokens or MAX_TOKENS)
    mode = "NONE" if job.placement == "llama.cpp-read" else "MMAP"
    params = xllamacpp.CommonParams()
    params.load_mode = getattr(xllamacpp.llama_load_mode, f"LLAMA_LOAD_MODE_{mode}")
    params.model.path = job.model
    params.offline = True
    params.n_gpu_layers = 0
    params.n_parallel = job.n
    params.n_ctx = job.n * -(-(longest + 1) // 128) * 128
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.verbosity = -1
    server = xllamacpp.Server(params)
    url = f"{server.listening_address}/v1/completions"
    answers: list[Answer | None] = [None] * len(tasks)
    failed: list[BaseException] = []
    waiting, lock, told = list(reversed(range(len(tasks)))), threading.Lock(), _Told(len(tasks))

    def client(begin: float) -> None:
        while not failed:
            with lock:
                if not waiting:
                    return
                place = waiting.pop()
            try:
                answers[place] = _ask(url, job, tasks[place], begin)
            except BaseException as error:
                failed.append(error)
                return
            told.ended(sum(answer is not None for answer in answers))

    with measured() as taken:
        begin = time.perf_counter()
        clients = [threading.Thread(target=client, args=(begin,), daemon=True) for _ in range(job.n)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
    if failed:
        raise failed[0]
    return taken.run([answer for answer in answers if answer is not None], [])


def _ask(url: str, job: Job, task: Task, begin: float) -> Answer:
    body: dict[str, Any] = {
        "prompt": task.prompt,
        "max_tokens": job.max_tokens or MAX_TOKENS,
        "temperature": 0,
        "cache_prompt": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {"stop": ["\n"]} if job.max_tokens is None else {"ignore_eos": True}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    joined, first, text, usage = time.perf_counter() - begin, None, "", {}
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            if first is None:
                first = time.perf_counter() - begin
            event = json.loads(line[len(b"data: ") :])
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
    ended = time.perf_counter() - begin
    right = None if task.answer is None else text == task.answer
    return Answer(right, usage["prompt_tokens"], usage["completion_tokens"], joined, first or ended, ended)


class _Taken:
    """What a stretch of this process took: time, energy, memory."""

    def __init__(self) -> None:
        self._meters = meters()
        self._joules = {name: read() for name, read in self._meters.items()}
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def end(self) -> None:
        self._cpu, self._wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        self._joules = {name: read() - self._joules[name] for name, read in self._meters.items()}
        # A counter that began anew tells nothing.
        self._joules = {name: joules for name, joules in self._joules.items() if joules > 0}

    def run(self, answers: list[Answer], steps: list[Step], **more: Any) -> Run:
        fields: dict[str, Any] = {"gpu_peak_bytes": None} | more
        return Run(
            answers=answers,
            steps=steps,
            wall_seconds=self._wall,
            cpu_seconds=self._cpu,
            peak_bytes=peak_memory(),
            joules=self._joules,
            load=os.getloadavg()[0],
            **fields,
        )


@contextmanager
def measured() -> Iterator[_Taken]:
    """Measures what is done inside."""
    taken = _Taken()
    yield taken
    taken.end()


def peak_memory() -> int | None:
    """The most bytes that this process ever had in RAM (``VmHWM``); None where the system does not say."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return None if found is None else int(found) * 1024


def meters(powercap: Path = POWERCAP) -> dict[str, Callable[[], float]]:
    """Joules so far, by meter: the processor packages (RAPL) and the GPUs (NVML), where they can be read."""
    found: dict[str, Callable[[], float]] = {}
    for zone in sorted(powercap.glob("intel-rapl:[0-9]*")):
        if zone.name.count(":") == 1:  # those with two are parts of one with one
            file = zone / "energy_uj"
            try:
                file.read_text()
            except OSError:
                continue  # since 2020 for root only
            found[f"RAPL {zone.name}"] = lambda file=file: int(file.read_text()) / 1e6
    try:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            energy = pynvml.nvmlDeviceGetTotalEnergyConsumption
            energy(handle)
            found[f"NVML {number}"] = lambda handle=handle, energy=energy: energy(handle) / 1e3
    except Exception:
        pass  # no such package, no driver, or a GPU without a meter: nothing is claimed then
    return found


class _Told:
    """A line on stderr now and then."""

    def __init__(self, tasks: int) -> None:
        self._tasks, self._last = tasks, time.monotonic()

    def ended(self, count: int) -> None:
        if time.monotonic() - self._last > TOLD_SECONDS:
            self._last = time.monotonic()
            print(f"           {count} of {self._tasks} requests answered", file=sys.stderr, flush=True)


def work(job: Job) -> int:
    """Do the job once and print the run, or ``{"error": ...}``; the exit status."""
    try:
        tasks = workload(job)
        run = llama(job, tasks) if job.placement.startswith("llama.cpp") else ours(job, tasks)
    except EXPECTED as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps(dataclasses.asdict(run)), flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Do the jobs of the first argument while the process of the second lives; the first status that is not 0."""
    text, parent = sys.argv[1:] if argv is None else argv
    jobs = [Job(**each) for each in json.loads(text)]
    if any(not job.placement.startswith("llama.cpp") for job in jobs):
        with contextlib.suppress(ImportError):  # said where it is needed
            # Once for all runs, which begin as copies of this process: importing takes seconds.
            from transformers import AutoModelForCausalLM, DynamicCache, GraniteMoeForCausalLM  # noqa: F401
    for job in jobs:
        for _ in range(job.runs):
            child = os.fork()
            if child == 0:
                status = 2
                try:
                    status = work(job)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            end = time.monotonic() + RUN_SECONDS
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                late = time.monotonic() > end
                if late or os.getppid() != int(parent):  # whoever asked for this is gone, however it ended
                    os.kill(child, signal.SIGKILL)
                if late:
                    print(json.dumps({"error": f"not done in {RUN_SECONDS:,} s; give fewer --tasks"}), flush=True)
                    return 1
                time.sleep(POLL_SECONDS)
            if status := os.waitstatus_to_exitcode(ended[1]):
                return abs(status)
    return 0


if __name__ == "__main__":
    sys.exit(main())
