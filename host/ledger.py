"""``emufpga ledger``: how many bytes a model needs resident and how many serially, by context; what fits which memory.

Nothing is measured here but this machine's RAM; every figure is counted from the file or derived from counts. The
account of the bytes that a device moved is another: :class:`host.device.Ledger`. docs/capacity.md has the equations.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from host import expert_cache, storage
from host.model_file import ModelFile, ModelFileError
from host.transports import DMA_BYTES
from hw.formats import frames

CONTEXTS = tuple(2048 << n for n in range(7))
KV_BYTES = {"f16": 2, "f32": 4}
GPUS_GB = (4, 6, 8, 12, 16, 24)
GB = 10**9
FRAME_BYTES = (frames.MAX_PAYLOAD_WORDS + 2) * frames.WORD_BYTES
FRAMES = 2
"""That the device takes before it acknowledges one; the driver puts them together in one piece."""
UPSTREAM_INPUT = 132_306
UPSTREAM = "reported by sw-ml-study/emufpga: two buffers of 64 KiB, a block of 210 B, 1,024 B decoded"
UNKNOWN = "unknown: activations and workspace of the GPU's framework; they come on top of every floor"


@dataclass(frozen=True)
class Kv:
    """What the KV cache takes a token: ``values`` over all layers, and where that is from."""

    values: int
    provenance: str
    bound: bool
    """A window of attention keeps some layers from growing: what is said is the most."""


def kv(model: ModelFile) -> Kv:
    """Keys and values that a token leaves behind: rows of the attention's key and value matrices.

    From the metadata, layers x KV heads x (key length + value length), where ``head_count_kv`` defaults to
    ``head_count`` and both lengths to width / heads (the GGUF specification); or, where they are there, from the
    tensors ``attn_k`` and ``attn_v`` of all layers. ``ModelFileError`` where neither tells or they disagree.
    """
    name = f"{model.architecture}.attention"
    rows = []
    for layer in range(model.block_count):
        tensors = [model.tensors.get(f"blk.{layer}.attn_{part}.weight") for part in "kv"]
        rows += [tensor.shape[0] for tensor in tensors if tensor]
    counted = sum(rows) if len(rows) == 2 * model.block_count else None
    said, formula = None, ""
    if f"{name}.head_count" in model.metadata and f"{name}.kv_lora_rank" not in model.metadata:
        heads = _number(model, f"{name}.head_count")
        kv_heads = _number(model, f"{name}.head_count_kv", heads)
        key, value = (_number(model, f"{name}.{part}_length", model.width // heads) for part in ("key", "value"))
        said = model.block_count * kv_heads * (key + value)
        formula = f"{model.block_count} layers x {kv_heads} KV heads x ({key} + {value}) values"
    if said is None and counted is None:
        raise ModelFileError(
            f"{model.path}: neither key '{name}.head_count' nor tensors blk.N.attn_k and attn_v of all "
            f"{model.block_count} layers say what the KV cache takes; a latent or a recurrent one is not known here"
        )
    if said is not None and counted is not None and said != counted:
        raise ModelFileError(
            f"{model.path}: keys '{name}.*' make {said:,} KV values a token, tensors attn_k and attn_v {counted:,}; "
            "heads differ by layer or the file is damaged: convert it again"
        )
    bound = bool(model.metadata.get(f"{name}.sliding_window"))
    return Kv(said or counted or 0, formula or "rows of all attn_k and attn_v tensors", bound)


def _number(model: ModelFile, key: str, default: int = 0) -> int:
    value = model.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFileError(f"{model.path}: key {key!r} must be a whole number above 0, not {value!r}")
    return value


def ram_bytes() -> int | None:
    """Of this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``emufpga ledger`` takes."""
    parser.add_argument("file", metavar="FILE.gguf")
    parser.add_argument(
        "--context", type=whole, action="append", metavar="N", help="tokens of context; may be given several times"
    )
    parser.add_argument("--kv", choices=KV_BYTES, default="f16", help="type of the KV cache (default: %(default)s)")
    parser.add_argument("--cache-slots", type=whole, metavar="N", help="beside: an expert cache of N experts a layer")
    parser.add_argument("--json", action="store_true", help="print JSON, bytes as numbers")


def whole(text: str) -> int:
    """A number above 0 on the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def run(args: argparse.Namespace) -> None:
    """Print the ledger; ``ModelFileError``, ``CacheError`` for slots that do not help."""
    with ModelFile.open(args.file) as model:
        report = ledger(model, args.context or CONTEXTS, args.kv, args.cache_slots)
    print(json.dumps(report, indent=2) if args.json else table(report))


def ledger(
    model: ModelFile, contexts: tuple[int, ...] | list[int], kv_type: str, slots: int | None = None
) -> dict[str, Any]:
    """The report; bytes throughout."""
    per_token = kv(model)
    kv_bytes = per_token.values * KV_BYTES[kv_type]
    matrix = max(each.expert_stride for layer in model.layers for each in (layer.gate, layer.up, layer.down))
    inputs = input_bytes(matrix)
    floors = {"resident": model.file_bytes, "serial": inputs["pcie"] + model.gpu_bytes}
    provenance = {
        "file_bytes": "counted: size of the file",
        "experts": "counted: expert tensors of the file",
        "others": "derived: file - experts, header and padding included",
        "other_tensors": "counted: tensors outside the experts, without header and padding",
        "kv_token": f"derived: {per_token.provenance} x {KV_BYTES[kv_type]} B"
        + (": at most, some layers' attention has a window" if per_token.bound else ""),
        "input": f"derived: 2 read buffers in huge pages for matrices of {matrix:,} B, {FRAMES} frames of "
        f"{FRAME_BYTES:,} B, for pcie the DMA buffer",
        "input_upstream": UPSTREAM,
        "resident": "derived: file + context x KV",
        "serial": "derived: input over pcie + others + context x KV",
        "framework": UNKNOWN,
        "longest": "derived: (memory - floor at context 0) / KV; GB = 1e9 B; what else is in that memory is unknown",
        "ram": "measured: all of this machine's, said by the system",
        "wall": "derived: bytes / KV, rounded up",
    }
    if slots is not None:
        sizes = {layer.index: layer.expert_bytes for layer in model.layers}
        held = min(slots, model.expert_count) * sum(sizes.values())
        expert_cache.check("layer", held, sizes, model.experts_used)
        floors["cached"] = floors["serial"] + held
        provenance["cached"] = f"derived: serial + {slots} of {model.expert_count} experts of every layer"
    memories: dict[str, int | None] = {f"{size} GB": size * GB for size in GPUS_GB}
    memories["this host's RAM"] = ram_bytes()
    return {
        "file": model.path,
        "name": model.name,
        "context_length": model.context_length,
        "kv_type": kv_type,
        "bytes": {
            "file": model.file_bytes,
            "experts": model.experts_bytes,
            "others": model.gpu_bytes,
            "other_tensors": model.gpu_tensor_bytes,
            "kv_token": kv_bytes,
            "input": inputs,
            "framework": None,
        },
        "floors": floors,
        "contexts": [
            {
                "context": context,
                "beyond_model": model.context_length is not None and context > model.context_length,
                "kv": context * kv_bytes,
                **{name: floor + context * kv_bytes for name, floor in floors.items()},
            }
            for context in contexts
        ],
        "longest": [
            {
                "memory": memory,
                "bytes": size,
                **{name: _longest(size, floor, kv_bytes) for name, floor in floors.items()},
            }
            for memory, size in memories.items()
        ],
        "wall": {
            "others": -(-model.gpu_tensor_bytes // kv_bytes),
            "file": -(-model.file_bytes // kv_bytes),
        },
        "provenance": provenance,
    }


def input_bytes(matrix: int) -> dict[str, int]:
    """What the driver holds of weights on their way, by link, for experts' matrices of ``matrix`` bytes."""
    reads, underway = storage.held_bytes(matrix), FRAMES * FRAME_BYTES
    return {"pcie": reads + underway + DMA_BYTES, "uart": reads + underway, "upstream": UPSTREAM_INPUT}


def _longest(memory: int | None, floor: int, kv_bytes: int) -> int | None:
    """Tokens of context; -1: not even the floor fits, None: the memory is unknown."""
    if memory is None:
        return None
    return (memory - floor) // kv_bytes if memory >= floor else -1


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    count, said, inputs = report["bytes"], report["provenance"], report["bytes"]["input"]
    names = list(report["floors"])
    printable = "".join(c if c.isprintable() else "?" for c in report["file"])
    yield printable
    yield ""
    for text, value, source in (
        ("model file", count["file"], "counted"),
        ("  experts", count["experts"], "counted"),
        ("  all else: stays with the GPU", count["others"], "derived: file - experts"),
        (f"KV a token, {report['kv_type']}", count["kv_token"], said["kv_token"]),
        ("input path, PCIe", inputs["pcie"], "derived: read buffers, frames, DMA buffer"),
        ("  over a UART", inputs["uart"], "derived: the same without the DMA buffer"),
        ("  upstream's, to compare", inputs["upstream"], "reported by sw-ml-study/emufpga"),
        ("framework's activations, workspace", None, "unknown; they come on top"),
    ):
        yield f"{text:<36}{'unknown' if value is None else f'{value:,}':>16}   {source}"
    yield ""
    yield f"{'context':>9}{'KV':>18}" + "".join(f"{name:>18}" for name in names)
    for row in report["contexts"]:
        mark = "*" if row["beyond_model"] else " "
        yield f"{row['context']:>8,}{mark}{row['kv']:>18,}" + "".join(f"{row[name]:>18,}" for name in names)
    if any(row["beyond_model"] for row in report["contexts"]):
        yield f"* beyond the model's own context of {report['context_length']:,}"
    for name in names:
        yield f"{name}: {said[name]}"
    yield "(input path and expert cache lie in the host's RAM, the rest on the GPU; below, in one memory)"
    yield ""
    yield f"{'longest context in':<27}" + "".join(f"{name:>18}" for name in names)
    for row in report["longest"]:
        size = "" if row["memory"].endswith("GB") or row["bytes"] is None else f", {row['bytes'] / GB:.1f} GB"
        yield f"{row['memory'] + size:<27}" + "".join(f"{_context(row[name]):>18}" for name in names)
    yield f"({said['longest']})"
    yield ""
    wall = report["wall"]
    yield (
        f"The KV cache outgrows the tensors beside the experts ({count['other_tensors']:,} B) at a context of "
        f"{wall['others']:,},"
    )
    yield f"and the whole file at {wall['file']:,}: from there on no placement of weights saves half (derived)."


def _context(value: int | None) -> str:
    return "unknown" if value is None else "does not fit" if value < 0 else f"{value:,}"
