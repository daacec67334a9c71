"""``emufpga selftest``: what a device says of itself, how fast its link is, whether link and arithmetic are right.

Needs no model file. Times are the transport's; the golden model takes none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from host.device import PATIENCES, Device
from host.link import LinkError
from host.storage import Store
from hw.formats import frames, messages
from hw.formats.frames import SEQUENCES, WORD_BYTES, Flag, Header, Status, Type
from hw.formats.messages import Layer, Message, Mode
from sim.golden import layer as golden
from sim.golden.activations import quantize
from sim.golden.layer import Route
from sim.workload import random_blocks

STORM = 200
"""Damaged frames of each kind."""
SEED = 1
ROUND_TRIPS = 20
REPEATS = 5
LOADS = 64
"""``LOAD_X`` messages whose way is timed at once."""
GARBAGE_WORDS = 4
HELLO_TAKEN = 1
"""A fresh connection's state: the device has sent its greeting, which is message 0, and wants message 0 itself."""

Say = Callable[[str], None]

DAMAGES: dict[str, str] = {
    "header": "garbage",
    "payload": "damaged",
    "payload CRC": "damaged",
    "header copy": "damaged",
    "truncated": "damaged",
    "repeated": "refused",
    "ahead": "refused",
    "no frame": "garbage",
}
"""Kinds of damage, and which count of :class:`hw.formats.frames.Status` each must raise."""
HINTS = {
    "storm": "the link's receiver is broken: load the bitstream of this release",
    "answer": "the arithmetic is wrong: check the board's power and the bitstream's timing report",
    "ledger": "bytes are miscounted: load the bitstream of this release",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``emufpga selftest`` takes."""
    parser.add_argument("--device", required=True, metavar="SPEC", help="as emufpga devices lists them")
    parser.add_argument(
        "--storm", type=_count, default=STORM, metavar="N", help="damaged frames of each kind (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Test the device and print the report; 1 if anything failed, each failure a line on stderr."""

    def say(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    with Device.open(args.device) as device:
        try:
            report = selftest(device, storm=args.storm, say=say)
        finally:
            say("")
    print(json.dumps(report, indent=2) if args.json else table(report))
    for failure in report["failures"]:
        print(f"emufpga: error: {args.device}: {failure}", file=sys.stderr)
    return 0 if report["passed"] else 1


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError
    return count


def selftest(device: Device, *, storm: int = STORM, seed: int = SEED, say: Say = lambda text: None) -> dict[str, Any]:
    """Run all tests; the report, whose ``failures`` are lines that say what to do.

    LinkError and DeviceError where the device cannot go on.
    """
    hello = device.hello
    say("link rate")
    rate = link_rate(device)
    rows = []
    for kind in DAMAGES:
        say(f"storm: {kind}")
        rows.append(storm_of(device, kind, storm, seed))
    say("known answer")
    answer = known_answer(device, seed)

    failures = []
    for row in rows:
        if row["wrong"]:
            failures.append(
                f"{row['wrong']} of {row['sent']} frames ({row['kind']}) were not counted as {row['counts']}; "
                f"{HINTS['storm']}"
            )
    for mode, differing in answer["differing"].items():
        if differing:
            failures.append(f"{differing} of {answer['outputs']} outputs differ ({mode}); {HINTS['answer']}")
    failures += [f"{line}; {HINTS['ledger']}" for line in answer["ledger"]]
    return {
        "device": device.name,
        "version": hello.version,
        "design_id": f"{hello.design_id:08x}" if hello.design_id else None,
        "parameters": asdict(hello.params),
        "link": rate,
        "storm": rows,
        "known_answer": answer,
        "passed": not failures,
        "failures": failures,
    }


def link_rate(device: Device) -> dict[str, Any]:
    """Seconds of a question's way there and its answer's back, and bytes of messages a second one way."""
    now = device.transport.now
    trips = []
    for _ in range(ROUND_TRIPS):
        begin = now()
        device.read_counters()
        trips.append(now() - begin)
    message = messages.load_x(0, 0, 0, bytes(512))
    rates = []
    for _ in range(REPEATS):
        begin = now()
        for _ in range(LOADS):
            device.link.send(message)
        device.link.flush(PATIENCES * device.transport.patience)
        seconds = now() - begin
        if seconds > 0:
            rates.append(LOADS * len(message) / seconds)
    timed = any(trips)
    provenance = "counted, simulated at 100 MHz" if device.name.startswith("sim") else "measured"
    return {
        "provenance": provenance if timed else "unknown: no time passes in this model",
        "round_trip_s": _spread(trips) if timed else None,
        "to_device_bytes_per_s": _spread(rates) if timed and rates else None,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"n": len(values), "median": statistics.median(values), "min": min(values), "max": max(values)}


def storm_of(device: Device, kind: str, count: int, seed: int) -> dict[str, Any]:
    """Send ``count`` frames with this damage past the link; after each the device must have counted just that."""
    rng = np.random.default_rng([seed, list(DAMAGES).index(kind)])
    device.reset()  # so that the numbers of messages are known
    counts = DAMAGES[kind]
    wrong = 0
    before = device.link.status()
    total = Status(0, 0, 0, 0)
    for number, frame in enumerate(damaged_frames(kind, count, rng)):
        device.transport.write(frame)
        try:
            if kind == "truncated":  # what follows would be taken for its rest
                device.link.receive(device.transport.patience)
            status = device.link.status()
        except LinkError:  # what should have been dropped has confused it, for the rest of this connection
            wrong += count - number
            break
        rise = Status(*((new - old) % (1 << 32) for new, old in zip(status, before, strict=True)))
        total = Status(*(a + b for a, b in zip(total, rise, strict=True)))
        # Garbage is counted in beats, whose width only the port knows.
        others = [value for name, value in rise._asdict().items() if name not in (counts, "resent")]
        exact = getattr(rise, counts) >= 1 if counts == "garbage" else getattr(rise, counts) == 1
        wrong += not exact or any(others)
        before = status
    return {"kind": kind, "counts": counts, "sent": count, "wrong": wrong, **total._asdict()}


def damaged_frames(kind: str, count: int, rng: np.random.Generator) -> Iterator[bytes]:
    """Frames as a link may leave them, right after a connection began; none of them may reach the engine."""
    for _ in range(count):
        # A message that would have an effect, were it taken: the engine knows no such kind and stops.
        payload = bytearray(rng.integers(0, 0x9F, int(rng.integers(16, 257)), np.uint8))  # no magic in it
        payload[0] = Message.HELLO
        header = Header(Type.MESSAGE, Flag.LAST, ack=HELLO_TAKEN)
        if kind in ("repeated", "ahead"):
            header = header._replace(sequence=SEQUENCES - 1 if kind == "repeated" else int(rng.integers(1, 1000)))
        frame = bytearray(frames.frame(header, payload))
        places = {
            "header": (0, WORD_BYTES),
            "payload": (WORD_BYTES, len(frame) - WORD_BYTES),
            "payload CRC": (len(frame) - WORD_BYTES, len(frame) - WORD_BYTES + 4),
            "header copy": (len(frame) - WORD_BYTES + 4, len(frame)),
        }
        if kind in places:
            first, end = places[kind]
            frame[int(rng.integers(first, end))] ^= 1 << int(rng.integers(8))
        elif kind == "truncated":
            # Whole words, as ports carry them.
            del frame[WORD_BYTES * int(rng.integers(1, len(frame) // WORD_BYTES)) :]
        elif kind == "no frame":
            frame = payload[:1] * (WORD_BYTES * int(rng.integers(1, GARBAGE_WORDS + 1)))
        yield bytes(frame)


def known_answer(device: Device, seed: int) -> dict[str, Any]:
    """Run a small random layer, selected and as a tape, against the golden model."""
    params = device.params
    rng = np.random.default_rng(seed)
    experts, tokens = min(4, params.max_experts), min(2, params.max_batch)
    layer = Layer(256, 256, experts, (0, 0, 0))
    size = layer.matrix_bytes
    layer = replace(layer, offsets=tuple(matrix * experts * size for matrix in range(3)))
    data = random_blocks(rng, 3 * experts * size // 210).reshape(-1)
    x = quantize(rng.normal(0, 1, (tokens, 256)))
    routes = [
        Route(token, int(expert), int(rng.integers(1, 1 << 16)))
        for token in range(tokens)
        for expert in rng.choice(experts, min(2, experts), replace=False)
    ]
    wanted, errors = golden.run(layer, lambda offset, length: data[offset : offset + length], x, routes)
    assert not errors, "these blocks were chosen so"
    differing, unequal = {}, []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experts.bin"
        path.write_bytes(data.tobytes())
        with Store(path) as store:
            for mode in Mode:
                result = device.run_layer(replace(layer, mode=mode), x, routes, store)
                differing[mode.name.lower()] = int(np.count_nonzero(result.sums != wanted))
                unequal += [
                    f"{mode.name.lower()}: {row.text} is {row.left:,} = {row.right:,}"
                    for row in result.ledger.check()
                    if not row.holds
                ]
    return {"outputs": wanted.size, "seed": seed, "differing": differing, "ledger": unequal}


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    parameters = report["parameters"]
    link = report["link"]
    rows = [
        ("device", report["device"]),
        ("protocol version", str(report["version"])),
        ("design id", report["design_id"] or "not said"),
        *((name.replace("_", " "), f"{value:,}") for name, value in parameters.items()),
        ("round trip", _figure(link["round_trip_s"], 1e6, "us", link["provenance"])),
        ("to the device", _figure(link["to_device_bytes_per_s"], 1e-3, "kB/s", link["provenance"])),
    ]
    lines = [f"{label:<24}{value}" for label, value in rows]
    lines += ["", f"{'damaged frames':<16}{'sent':>8}{'damaged':>10}{'refused':>10}{'garbage':>10}{'wrong':>8}"]
    lines += [
        f"{row['kind']:<16}{row['sent']:>8}{row['damaged']:>10}{row['refused']:>10}{row['garbage']:>10}{row['wrong']:>8}"
        for row in report["storm"]
    ]
    answer = report["known_answer"]
    lines += ["", f"{'known answer':<24}{answer['outputs']} outputs, random experts of seed {answer['seed']}"]
    lines += [f"{'  ' + mode:<24}{differing} differ" for mode, differing in answer["differing"].items()]
    lines += ["", "passed" if report["passed"] else "FAILED"]
    return "\n".join(lines)


def _figure(spread: dict[str, float] | None, scale: float, unit: str, provenance: str) -> str:
    if spread is None:
        return provenance
    low, middle, high = (f"{scale * spread[key]:,.1f}" for key in ("min", "median", "max"))
    return f"{middle} {unit} ({low}-{high}, n={spread['n']}, {provenance})"
