"""``emufpga run``: a prompt's answer, token by token, from a model whose experts come through a device."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from host.device import Ledger
from host.expert_cache import MIB, CacheError, ExpertCache, in_place_of
from host.layers import ledger_table
from host.model_file import ModelFile
from host.runtime import CHUNK, PLACEMENTS, Request, RequestError, Runtime
from host.storage import Store

EVERY_SECONDS = 1.0
"""Between lines of progress."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``emufpga run`` takes."""
    add_model_arguments(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--max-tokens", type=number(int, 1), default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--temperature", type=number(float, 0), default=0.0, metavar="T", help="0: the likeliest token")
    parser.add_argument("--seed", type=number(int, 0), metavar="S", help="fixes what is drawn at a temperature above 0")
    parser.add_argument("--json", action="store_true", help="print JSON when all is done, instead of text")
    parser.add_argument("--routing", type=Path, metavar="FILE.json", help="write what the routers chose")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command takes that opens a model with ``open_model``."""
    parser.add_argument("--model", required=True, metavar="FILE.gguf")
    parser.add_argument("--device", metavar="SPEC", help="as emufpga devices lists them (golden)")
    parser.add_argument("--placement", choices=PLACEMENTS, default="selected", help="where the experts are")
    cache = parser.add_mutually_exclusive_group()
    cache.add_argument("--cache-mib", type=number(float, 0), metavar="M", help="keep experts in RAM: MiB in all")
    cache.add_argument("--cache-slots", type=number(int, 1), metavar="S", help="the same: experts a layer")
    parser.add_argument("--torch-device", default="cpu", metavar="DEVICE", help="where attention is (cpu, cuda, ...)")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of attention")
    parser.add_argument(
        "--chunk", type=number(int, 1), default=CHUNK, metavar="N", help="prompt tokens in one pass (%(default)s)"
    )


def open_model(args: argparse.Namespace, progress: Progress) -> Runtime:
    """The model of ``add_model_arguments``; ``RequestError`` for a device that it would not use."""
    if args.placement == "resident" and args.device:
        raise RequestError(f"--device {args.device}: --placement resident uses none; leave one of them out")
    device = args.device or "golden"
    compiled = " (compiled when first used, which takes minutes)" if device.startswith("sim") else ""
    where = args.placement if args.placement == "resident" else f"{args.placement}, {device}{compiled}"
    progress.say(f"opening {args.model}, {where}")
    runtime = Runtime.open(
        args.model,
        placement=args.placement,
        device=device,
        torch_device=args.torch_device,
        dtype=args.dtype,
        chunk=args.chunk,
        cache=cache_hook(args.placement, args.cache_mib, args.cache_slots),
        progress=progress.load,
    )
    if isinstance(runtime.store, ExpertCache) and runtime.store.warning:
        progress.say(runtime.store.warning)
    return runtime


def run(args: argparse.Namespace) -> int:
    """Answer the prompt; 130 if it was interrupted, 1 if the ledger does not add up or the model gave no numbers."""
    progress = Progress()
    _check(args)
    with open_model(args, progress) as runtime:
        request = runtime.add(args.prompt, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
        loaded, interrupted, shown = time.monotonic(), False, 0
        first: float | None = None
        runtime.layer_progress = progress.layer(runtime, request)
        try:
            while not request.done:
                progress.chunk(runtime, request)
                for event in runtime.step():
                    first = first or time.monotonic()
                    shown += len(event.text)
                    if not args.json:
                        print(event.text, end="", flush=True)
                        progress.open_line = not event.text.endswith("\n") and sys.stdout.isatty()
        except KeyboardInterrupt:
            interrupted = True
            runtime.cancel(request)
        ended = time.monotonic()
        if not args.json:
            print(request.text[shown:], flush=True)
            progress.open_line = False
        report = _report(runtime, request, (loaded, first, ended))
        if args.routing:
            args.routing.write_text(json.dumps(runtime.routing.report(), indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(table(report), file=sys.stderr)
    if interrupted:
        return 130
    return 1 if report["broken"] or request.error else 0


def cache_hook(placement: str, mib: float | None, slots: int | None) -> Callable[[Store, ModelFile], Store] | None:
    """What ``Runtime.open`` takes as its cache; CacheError where no expert is ever read."""
    if mib is None and slots is None:
        return None
    if placement == "resident":
        raise CacheError("an expert cache is of no use where the experts are resident: leave --cache-... out")
    return functools.partial(in_place_of, capacity=None if mib is None else int(mib * MIB), slots=slots)


def table(report: dict[str, Any]) -> str:
    """The report without the text, for people."""
    wall, n = report["wall_seconds"], report["tokens"]
    first = "no token" if wall["first_token"] is None else f"first token after {wall['first_token']:.2f} s"
    lines = [
        "",
        f"{report['prompt_tokens']} tokens in, {n} out, ended by {report['finish_reason']}"
        + (f": {report['error']}" if report["error"] else ""),
        f"{first}, all after {wall['all']:.2f} s (measured here, n=1: this machine's time, not a board's)",
    ]
    if report["placement"] == "resident":
        return "\n".join([*lines, "resident: no device, no ledger"])
    passes = f"{report['passes']} layer passes, {report['device_seconds']:.4f} s on its clock"
    lines += [
        f"{report['device']}, {report['placement']}: {passes}",
        "bytes of all layers, counted",
        *ledger_table(Ledger(**report["ledger"])),
    ]
    broken = report["broken"]
    lines.append("NOT EQUAL: " + "; ".join(broken) if broken else "the ledger adds up")
    return "\n".join(lines)


def _report(runtime: Runtime, request: Request, times: tuple[float, float | None, float]) -> dict[str, Any]:
    loaded, first, ended = times
    ledger, device = runtime.ledger, runtime.device
    return {
        "model": runtime.model.path,
        "placement": runtime.placement,
        "device": None if device is None else device.name,
        "torch_device": runtime.torch_device,
        "chunk": runtime.chunk,
        "text": request.text,
        "token_ids": request.tokens,
        "prompt_tokens": len(request.prompt),
        "tokens": len(request.tokens),
        "finish_reason": request.finish_reason,
        "error": request.error,
        "wall_seconds": {"first_token": first and first - loaded, "all": ended - loaded},
        "passes": runtime.passes,
        "device_seconds": runtime.device_seconds,
        "ledger": dataclasses.asdict(ledger),
        "ledger_by_layer": {layer: dataclasses.asdict(each) for layer, each in sorted(runtime.ledgers.items())},
        "broken": [each.text for each in ledger.check() if not each.holds],
        "provenance": {
            "wall_seconds": "measured on this machine's clock, n=1, from the loaded model on",
            "device_seconds": "measured on the device's clock (simulated devices: derived from cycles at 100 MHz; "
            "golden has no time)",
            "passes": "counted: layers that the device ran",
            "ledger": "counted by device, driver, storage and system; 'broken' names sums that do not agree",
        },
    }


class Progress:
    """Lines on stderr, each with the time since the start.

    ``open_line``: the terminal's last line is text; one of ours begins on the next.
    """

    def __init__(self) -> None:
        self.open_line = False
        self._begin = time.monotonic()
        self._told = -EVERY_SECONDS
        self._what = ""

    def say(self, line: str) -> None:
        self._told = time.monotonic()
        if self.open_line and sys.stderr.isatty():
            print(file=sys.stderr)
        self.open_line = False
        print(f"[{self._told - self._begin:6.1f} s] {line}", file=sys.stderr, flush=True)

    def load(self, what: str, done: int, total: int) -> None:
        if time.monotonic() - self._told > EVERY_SECONDS or what != self._what:
            self._what = what
            self.say(f"{what}: {done:,} of {total:,} bytes")

    def chunk(self, runtime: Runtime, request: Request) -> None:
        if request.prefilling:
            count = -(-len(request.prompt) // runtime.chunk)
            number = request.prompt_done // runtime.chunk + 1
            self.say(f"prompt: chunk {number} of {count}, {runtime.ledger.requested:,} expert bytes so far")

    def layer(self, runtime: Runtime, request: Request) -> Callable[[int, int, int], None]:
        def told(layer: int, done: int, total: int) -> None:
            if time.monotonic() - self._told > EVERY_SECONDS:
                what = "prompt" if request.prefilling else f"token {len(request.tokens) + 1}"
                self.say(f"{what}: layer {layer} of {runtime.model.block_count}, {done:,} of {total:,} bytes")

        return told


def _check(args: argparse.Namespace) -> None:
    """RequestError for options that would do nothing, and for a file that cannot be written."""
    if args.seed is not None and not args.temperature:
        raise RequestError(f"--seed {args.seed}: nothing is drawn at --temperature 0; give one above 0")
    if args.routing:
        try:
            args.routing.open("a").close()
        except OSError as error:
            raise RequestError(f"--routing {args.routing}: cannot write ({error.strerror}); give another") from error


def number(kind: type, least: float) -> Callable[[str], Any]:
    """A type for ``argparse``: an ``int`` or ``float`` of ``least`` or more."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a number of {least} or more, not {text!r}")
        return value

    return parse
