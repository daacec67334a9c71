"""Small GGUF mixture-of-experts files for tests, written by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

Q6_K = GGMLQuantizationType.Q6_K
F32 = GGMLQuantizationType.F32

LAYERS, EXPERTS, EXPERTS_USED, WIDTH, EXPERT_WIDTH = 2, 4, 3, 256, 512

METADATA: dict[str, Any] = {
    "general.name": "test model",
    "granitemoe.block_count": LAYERS,
    "granitemoe.context_length": 1024,
    "granitemoe.embedding_length": WIDTH,
    "granitemoe.feed_forward_length": EXPERT_WIDTH,
    "granitemoe.expert_count": EXPERTS,
    "granitemoe.expert_used_count": EXPERTS_USED,
    "granitemoe.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["a", "bc", "", "def"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1],
    "tokenizer.ggml.add_bos_token": False,
}


class Tensor(NamedTuple):
    """A tensor to write: row-major shape."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]

    @property
    def data_bytes(self) -> int:
        weights, size = GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape)) // weights * size


def layer_tensors(
    layer: int, experts: int = EXPERTS, width: int = WIDTH, expert_width: int = EXPERT_WIDTH
) -> dict[str, Tensor]:
    """The tensors of a layer's mixture of experts and its norm."""
    return {
        f"blk.{layer}.ffn_norm.weight": Tensor(F32, (width,)),
        f"blk.{layer}.ffn_gate_inp.weight": Tensor(F32, (experts, width)),
        f"blk.{layer}.ffn_gate_exps.weight": Tensor(Q6_K, (experts, expert_width, width)),
        f"blk.{layer}.ffn_up_exps.weight": Tensor(Q6_K, (experts, expert_width, width)),
        f"blk.{layer}.ffn_down_exps.weight": Tensor(Q6_K, (experts, width, expert_width)),
    }


def model_tensors() -> dict[str, Tensor]:
    """All tensors of the small model; the last one needs padding to the end of the file."""
    tensors = {"token_embd.weight": Tensor(Q6_K, (4, WIDTH))}
    for layer in range(LAYERS):
        tensors |= layer_tensors(layer)
    return tensors | {
        "scales.weight": Tensor(GGMLQuantizationType.F16, (3, 5)),
        "rope_freqs.weight": Tensor(F32, (3,)),
    }


def write(
    path: Path,
    tensors: dict[str, Tensor] | None = None,
    *,
    metadata: dict[str, Any] | None = None,
    alignment: int | None = None,
    endian: GGUFEndian = GGUFEndian.LITTLE,
    hole: bool = False,
) -> Path:
    """Write a file of ``tensors`` (the small model's if None) filled with random bytes, the same on every call.

    ``metadata`` entries replace or, if None, remove those of ``METADATA``. With ``hole`` the data section is a hole.
    """
    writer = GGUFWriter(path, "granitemoe", endianess=endian)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in (METADATA | (metadata or {})).items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
            case _:
                raise TypeError(f"no GGUF type for {value!r}")
    tensors = model_tensors() if tensors is None else tensors
    for name, tensor in tensors.items():
        dtype = np.dtype(np.int8)  # not uint8, which gguf takes for a shape in bytes
        writer.add_tensor_info(name, tensor.shape, dtype, tensor.data_bytes, raw_dtype=tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    alignment = alignment or 32
    rng = np.random.default_rng(1)
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        for tensor in tensors.values():
            start = -(-end // alignment) * alignment
            end = start + tensor.data_bytes
            if not hole:
                file.seek(start)
                file.write(_random(tensor, rng))
        file.truncate(-(-end // alignment) * alignment)
    return path


def _random(tensor: Tensor, rng: np.random.Generator) -> bytes:
    if tensor.type == F32:
        return rng.normal(size=tensor.shape).astype("<f4").tobytes()
    if tensor.type == GGMLQuantizationType.F16:
        return rng.normal(size=tensor.shape).astype("<f2").tobytes()
    return rng.bytes(tensor.data_bytes)


class Field(NamedTuple):
    """``size`` bytes at ``position`` of a header: a count, length, type, dimension or offset."""

    what: str
    position: int
    size: int


def fields(path: Path) -> list[Field]:
    """Every count, length, type, dimension and offset in the header of a valid file, as the gguf package finds them."""
    reader = GGUFReader(path)
    found = [Field("version", 4, 4), Field("tensor count", 8, 8), Field("key count", 16, 8)]
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        value = field.offset + 8 + len(key.encode())
        found += [Field(f"{key}: key length", field.offset, 8), Field(f"{key}: type", value, 4)]
        if field.types[0] == GGUFValueType.ARRAY:
            found += [Field(f"{key}: item type", value + 4, 4), Field(f"{key}: items", value + 8, 8)]
            if field.types[1] == GGUFValueType.STRING:
                found.append(Field(f"{key}: length of item 0", value + 16, 8))
        elif field.types[0] == GGUFValueType.STRING:
            found.append(Field(f"{key}: length", value + 4, 8))
        else:
            found.append(Field(f"{key}: value", value + 4, field.parts[-1].nbytes))
    for tensor in reader.tensors:
        start, dimensions = tensor.field.offset, len(tensor.shape)
        position = start + 8 + len(tensor.name.encode())
        found += [Field(f"{tensor.name}: name length", start, 8), Field(f"{tensor.name}: dimensions", position, 4)]
        found += [Field(f"{tensor.name}: dimension {i}", position + 4 + 8 * i, 8) for i in range(dimensions)]
        position += 4 + 8 * dimensions
        found += [Field(f"{tensor.name}: type", position, 4), Field(f"{tensor.name}: offset", position + 4, 8)]
    return found


def patch(path: Path, what: str, value: int) -> Path:
    """Overwrite the field ``what`` of the file in place."""
    (field,) = [field for field in fields(path) if field.what == what]
    with path.open("r+b") as file:
        file.seek(field.position)
        file.write(value.to_bytes(field.size, "little"))
    return path
