"""``emufpga layers``: a model's layers through a device, bit for bit against golden, and every byte accounted for."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import numpy as np

from host.device import Device, Ledger
from host.model_file import ModelFile
from host.storage import Store
from hw.formats.messages import Counter, Mode
from sim.golden import activations
from sim.golden import layer as golden
from sim.workload import engine_layer, engine_routes, reader, route, token_vectors

TEXT = "moe:"
"""The batch: a token for each byte."""
PROGRESS_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``emufpga layers`` takes."""
    parser.add_argument("file", metavar="FILE.gguf")
    parser.add_argument("--device", required=True, metavar="SPEC", help="as emufpga devices lists them")
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers (default: all)")
    parser.add_argument("--text", default=TEXT, help="the batch, a token for each byte (default: %(default)s)")
    parser.add_argument("--tape", action="store_true", help="let all experts pass, not only those that a token wants")
    parser.add_argument("--direct", action="store_true", help="read past the page cache")
    parser.add_argument("--no-ahead", action="store_true", help="read nothing ahead of its use")
    parser.add_argument("--no-check", action="store_true", help="do not compare with the golden model")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the layers; 1 if an output differs from golden's or the ledger does not add up."""
    with ModelFile.open(args.file) as model, Device.open(args.device) as device:
        store = Store(args.file, direct=args.direct, ahead=not args.no_ahead)
        with store:
            report = layers(model, device, store, args)
    print(json.dumps(report, indent=2) if args.json else table(report))
    return 0 if report["right"] else 1


def layers(model: ModelFile, device: Device, store: Store, args: argparse.Namespace) -> dict[str, Any]:
    """The report of all layers."""
    mode = Mode.TAPE if args.tape else Mode.SELECTED
    text = args.text.encode()
    begin = told = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {line}", file=sys.stderr, flush=True)

    def progress(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            say(f"  {done:,} of {total:,} bytes")

    rows = []
    for moe in model.layers[: args.layers]:
        say(f"layer {moe.index}: {len(text)} tokens, {mode.name.lower()}")
        x = token_vectors(model, moe, text)
        routes = engine_routes(route(model, moe, x))
        layer, quantized = engine_layer(model, moe, mode), activations.quantize(x)
        wall = time.monotonic()
        result = device.run_layer(layer, quantized, routes, store, progress=progress)
        wall = time.monotonic() - wall
        differing = None
        if not args.no_check:
            sums, errors = golden.run(layer, reader(model), quantized, routes)
            differing = int(np.count_nonzero(sums != result.sums)) + (errors != 0)
        rows.append(
            {
                "layer": moe.index,
                "outputs": result.sums.size,
                "differing": differing,
                "experts": len({expert for _, expert, _ in routes}),
                "cycles": result.counters[Counter.CYCLES],
                "device_seconds": result.seconds,
                "wall_seconds": wall,
                "ledger": dataclasses.asdict(result.ledger),
                "broken": [each.text for each in result.ledger.check() if not each.holds],
            }
        )
    return {
        "right": all(not row["differing"] and not row["broken"] for row in rows),
        "checked": not args.no_check,
        "device": device.name,
        "design_id": f"{device.hello.design_id:08x}",
        "params": dataclasses.asdict(device.params),
        "model": model.path,
        "tokens": len(text),
        "mode": mode.name.lower(),
        "layers": rows,
        "provenance": {
            "differing": "measured: outputs that are not those of the golden model, bit for bit",
            "cycles": "counted by the device, from the routes to the last output; the golden model has no time",
            "device_seconds": "measured on the device's clock (simulated devices: derived from cycles at 100 MHz)",
            "wall_seconds": "measured on this machine's clock",
            "ledger": "counted by device, driver, storage and system; 'broken' names sums that do not agree",
        },
    }


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"{report['device']}: design {report['design_id']}, {report['tokens']} tokens, {report['mode']}",
        "",
        f"{'layer':>5}{'experts':>9}{'outputs':>9}{'differ':>8}{'cycles':>13}{'on device':>12}{'here':>10}",
    ]
    for row in report["layers"]:
        differing = "-" if row["differing"] is None else row["differing"]
        lines.append(
            f"{row['layer']:>5}{row['experts']:>9}{row['outputs']:>9,}{differing:>8}{row['cycles']:>13,}"
            f"{row['device_seconds']:>10.4f} s{row['wall_seconds']:>8.2f} s"
        )
    total = sum((Ledger(**row["ledger"]) for row in report["layers"]), start=Ledger())
    lines += ["", "bytes of all layers, counted", *ledger_table(total)]
    broken = sorted({text for row in report["layers"] for text in row["broken"]})
    lines += ["", "NOT EQUAL: " + "; ".join(broken) if broken else "the ledger adds up"]
    if report["checked"]:
        lines.append("all outputs equal golden's, bit for bit" if report["right"] else "OUTPUTS DIFFER FROM GOLDEN'S")
    return "\n".join(lines)


def ledger_table(ledger: Ledger) -> list[str]:
    """A line for each count of bytes."""
    values = ((text, getattr(ledger, name)) for name, text in LEDGER_LINES.items())
    return [f"  {text:<52}{'unknown' if value is None else f'{value:,}':>16}" for text, value in values]


LEDGER_LINES = {
    "requested": "requested by the device",
    "useful": "  of blocks that a token wanted",
    "drained": "  of others",
    "memory": "  read in the board's own memory",
    "loaded": "loaded into it",
    "answered": "answered over the link",
    "padding": "  and padding of their last beats",
    "payload": "messages to the device, weights and all else",
    "framing": "  and headers, trailers, padding of their frames",
    "link_resent": "  and sent again",
    "link_written": "written to the link",
    "link_read": "read from the link",
    "storage_requested": "asked of the storage",
    "storage_spilled": "  and read beside that",
    "storage_cached": "answered by the expert cache instead",
    "os_rchar": "read by this process, says the system",
    "os_read_bytes": "  of that from a disk",
}
