"""The ``emufpga`` command.

``main`` takes the arguments and returns the exit status: 0, 1 for a file or device that is refused or fails, 2 for a
wrong command line, 130 for Ctrl-C; an error is one line on stderr. A command is a function of its parsed arguments,
listed in ``_parser``, which gives the status or None for 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from host import (
    bench_agents,
    bench_storage,
    cache_replay,
    layers,
    ledger,
    run,
    seconds,
    selftest,
    serve,
    transports,
)
from host.architectures import TorchMissingError
from host.bench_agents import AgentsError
from host.device import DeviceError
from host.expert_cache import CacheError
from host.link import LinkError
from host.model_file import ModelFile, ModelFileError
from host.routing import RoutingError
from host.runtime import RequestError
from host.seconds import SecondsError
from host.serve import ServeError
from host.storage import StorageError
from host.transports import SpecError
from hw.formats import q6_k

COUNTED = "counted from the file"
FAILED = (
    AgentsError,
    DeviceError,
    LinkError,
    ModelFileError,
    RoutingError,
    ServeError,
    StorageError,
    TorchMissingError,
)
"""Not what was asked for, but what came of it."""


class _UsageError(Exception):
    """The command line asks for something that is not there."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` without the program's name, None for the process's own."""
    try:
        args = _parser().parse_args(argv)
        return args.command(args) or 0
    except FAILED as error:
        return _error(error, 1)
    except (CacheError, RequestError, SecondsError, SpecError, _UsageError) as error:
        return _error(error, 2)
    except KeyboardInterrupt:
        return _error("interrupted", 130)


def _error(error: Exception | str, status: int) -> int:
    print(f"emufpga: error: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="emufpga", description="Expert weights of GGUF models, streamed through FPGA hardware.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="check a model file and count what its experts cost in bytes")
    inspect.add_argument("file", metavar="FILE.gguf")
    inspect.add_argument("--json", action="store_true", help="print JSON, bytes and offsets as numbers")
    inspect.add_argument("--layer", type=int, metavar="N", help="with --expert: where that expert's bytes lie")
    inspect.add_argument("--expert", type=int, metavar="E")
    inspect.set_defaults(command=_inspect)

    devices = commands.add_parser("devices", help="list the devices that there are, and what to type for each")
    devices.add_argument("--json", action="store_true", help="print JSON")
    devices.set_defaults(command=_devices)

    for name, module, text in (
        ("selftest", selftest, "test a device: version, parameters, link rate, damaged frames, a known answer"),
        ("layers", layers, "run a model's layers through a device and check every output"),
        ("run", run, "answer a prompt: the whole model, its experts through a device"),
        ("serve", serve, "answer OpenAI's API with a model: many requests at once, experts through a device"),
        ("seconds", seconds, "seconds a layer and tokens a second, by board, home of the experts and batch"),
        ("ledger", ledger, "bytes that a model needs by context, and which memories hold it"),
        ("replay", cache_replay, "recorded routes through an expert cache: hit rates by its size and policy"),
    ):
        command = commands.add_parser(name, help=text)
        module.add_arguments(command)
        command.set_defaults(command=module.run)

    bench = commands.add_parser("bench", help="measure this machine").add_subparsers(required=True, metavar="WHAT")
    storage = bench.add_parser("storage", help="how fast a model file's experts can be read")
    bench_storage.add_arguments(storage)
    storage.set_defaults(command=bench_storage.run)
    agents = bench.add_parser("agents", help="independent requests, by where the experts are and how many at a time")
    bench_agents.add_arguments(agents)
    agents.set_defaults(command=bench_agents.run)
    return parser


def _inspect(args: argparse.Namespace) -> None:
    if (args.layer is None) != (args.expert is None):
        raise _UsageError("--layer and --expert are given together or not at all")
    with ModelFile.open(args.file) as model:
        report = _report(model)
        if args.layer is not None:
            report["slices"] = _slices(model, args.layer, args.expert)
    print(json.dumps(report, indent=2) if args.json else _table(report))


def _devices(args: argparse.Namespace) -> None:
    found = [{"device": "golden", "what": "the golden model: exact, fast, without time"}]
    missing = transports.sim_missing()
    if missing is None:
        found.append({"device": "sim", "what": "the Verilated hardware, built when first used (minutes)"})
    found += [{"device": f"uart:{port}", "what": what} for port, what in transports.serial_ports()]
    found += [{"device": f"pcie:{path}", "what": "XDMA streams"} for path in transports.xdma_devices()]
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for entry in found:
        print(f"{entry['device']:<32}{_printable(entry['what'])}")
    if missing is not None:
        print(f"(no sim: the package {missing} is not installed; pip install 'emufpga[sim]')")
    print("to test one: emufpga selftest --device ...")


def _report(model: ModelFile) -> dict[str, Any]:
    first = model.layers[0]  # all layers have the same shapes
    traffic = {
        "expert": first.expert_bytes,
        "layer_all": first.all_bytes,
        "layer_selected": first.selected_bytes(model.experts_used),
        "token": model.token_bytes,
        "experts": model.experts_bytes,
    }
    return {
        "file": model.path,
        "provenance": COUNTED,
        "architecture": model.architecture,
        "name": model.name,
        "file_bytes": model.file_bytes,
        "layers": model.block_count,
        "moe_layers": len(model.layers),
        "experts": model.expert_count,
        "experts_used": model.experts_used,
        "width": model.width,
        "expert_width": model.expert_width,
        "context_length": model.context_length,
        "tensor_types": model.type_counts,
        "bytes": traffic | {"gpu": model.gpu_bytes, "gpu_tensors": model.gpu_tensor_bytes},
        "blocks": {key: count // q6_k.BLOCK_BYTES for key, count in traffic.items()},
    }


def _slices(model: ModelFile, layer: int, expert: int) -> list[dict[str, Any]]:
    try:
        moe = model.layer(layer)
        slices = moe.slices(expert)
    except IndexError as error:
        raise _UsageError(f"--layer {layer} --expert {expert}: {error}") from error
    tensors = {"gate": moe.gate, "up": moe.up, "down": moe.down}
    return [
        {"matrix": matrix, "tensor": tensors[matrix].name, "offset": piece.offset, "length": piece.length}
        for matrix, piece in slices.items()
    ]


def _table(report: dict[str, Any]) -> str:
    context = report["context_length"]
    rows = [
        ("file", f"{_printable(report['file'])}, {report['file_bytes']:,} B"),
        ("architecture", _printable(report["architecture"])),
        ("name", _printable(report["name"]) or "not in the file"),
        ("layers", f"{report['layers']}, {report['moe_layers']} with experts"),
        ("experts", f"{report['experts']}, top-{report['experts_used']}"),
        ("width x expert width", f"{report['width']:,} x {report['expert_width']:,}"),
        ("context length", "not in the file" if context is None else f"{context:,}"),
        ("tensor types", ", ".join(f"{count} {kind}" for kind, count in report["tensor_types"].items())),
    ]
    lines = [f"{label:<24}{value}" for label, value in rows]

    lines += ["", f"{'expert weights':<36}{'bytes':>16}{'Q6_K blocks':>16}"]
    labels = {
        "expert": "one expert",
        "layer_all": "a layer, all experts",
        "layer_selected": f"a layer, selected (top-{report['experts_used']}, batch 1)",
        "token": "a token, all layers (batch 1)",
        "experts": "all experts of the file",
    }
    for key, label in labels.items():
        lines.append(f"{label:<36}{report['bytes'][key]:>16,}{report['blocks'][key]:>16,}")
    lines += [
        f"{'stays with the GPU (all the rest)':<36}{report['bytes']['gpu']:>16,}",
        f"{'  of that, tensors':<36}{report['bytes']['gpu_tensors']:>16,}",
    ]

    if "slices" in report:
        lines += ["", f"{'tensor':<36}{'offset':>16}{'length':>16}"]
        for piece in report["slices"]:
            lines.append(f"{piece['tensor']:<36}{piece['offset']:>16}{piece['length']:>16}")
    return "\n".join([*lines, "", f"All figures are {report['provenance']}; bytes unless said otherwise."])


def _printable(text: str) -> str:
    # Text from a file must not steer the terminal.
    return "".join(c if c.isprintable() else "?" for c in text)


if __name__ == "__main__":
    sys.exit(main())
