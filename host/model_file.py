"""GGUF model files: which bytes of a file hold which expert, checked before any of them is used.

``ModelFile.open`` walks the header by itself, with every count and length bounded first, and takes types and block
sizes from the ``gguf`` package. It does not open files with ``gguf.GGUFReader``: that makes an array for each
vocabulary entry (measured, 49,152 tokens, types and merges: 2.4 s and 156 MiB; this walk: 0.1 s), wraps products at 64
bits and trusts every length. The tests hold both readers against each other instead.

Offsets are absolute byte offsets in the file; lengths are bytes. Shapes are row-major, so GGUF's ``ne`` reversed.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, NoReturn

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from hw.formats import q6_k

VERSIONS = (2, 3)
"""GGUF versions read here; version 1 has 32-bit counts and is no longer written."""

MAX_TENSORS = 2**16
MAX_KEYS = 2**16
MAX_ARRAY_ITEMS = 2**22
"""Of all arrays of a header together; Gemma's 262,144 tokens with merges need about 1.5 million."""
MAX_STRING_BYTES = 2**24
MAX_NAME_BYTES = 255
"""Of a key or tensor name: the format allows 65,535 and 64, and llama.cpp writes no longer ones than this."""
MAX_DIMENSIONS = 4

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}
_FLOATS = {GGMLQuantizationType.F32: np.dtype("<f4"), GGMLQuantizationType.F16: np.dtype("<f2")}

_INDEX = r"(0|[1-9][0-9]*)"  # no leading zeros: "blk.00" would be a second name of layer 0
_EXPERT_NAME = re.compile(rf"blk\.{_INDEX}\.ffn_(gate|up|down)_exps\.weight")
_ROUTER_NAME = re.compile(rf"blk\.{_INDEX}\.ffn_gate_inp\.weight")
_SPLIT_EXPERT_NAME = re.compile(r"blk\.[0-9]+\.ffn_(gate|up|down)\.[0-9]+\.weight")


class ModelFileError(ValueError):
    """A model file that cannot be used. The message is one line: the file, where in it, what is wrong, what to do."""


@dataclass(frozen=True, slots=True)
class Slice:
    """``length`` bytes of the file from absolute byte ``offset``."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file: row-major ``shape``, absolute ``offset``, ``length`` in bytes."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    length: int

    def __str__(self) -> str:
        return f"tensor {self.name!r} (type {self.type.name}, offset {self.offset})"


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One matrix of every expert of a layer: ``experts`` × ``rows`` × ``columns`` weights, one expert after another.

    ``file_offset`` is where expert 0 starts, ``expert_stride`` the bytes of one expert; nothing lies between experts.
    """

    name: str
    type: GGMLQuantizationType
    file_offset: int
    expert_stride: int
    rows: int
    columns: int
    experts: int

    def slice(self, expert: int) -> Slice:
        """The bytes of one expert's matrix. ``IndexError`` for an expert that is not there."""
        if not 0 <= expert < self.experts:
            raise IndexError(f"expert must be in 0..{self.experts - 1}, not {expert!r} ({self.name})")
        return Slice(self.file_offset + expert * self.expert_stride, self.expert_stride)


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """The experts of one layer.

    ``index`` is the layer's number in the model; ``router`` names the tensor of experts × width router weights.
    ``gate`` and ``up`` have expert-width rows of width columns, ``down`` has width rows of expert-width columns.
    """

    index: int
    router: str
    gate: ExpertTensor
    up: ExpertTensor
    down: ExpertTensor

    @property
    def experts(self) -> int:
        return self.gate.experts

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: its gate, up and down matrix."""
        return self.gate.expert_stride + self.up.expert_stride + self.down.expert_stride

    @property
    def all_bytes(self) -> int:
        """Bytes of all experts of the layer."""
        return self.experts * self.expert_bytes

    def selected_bytes(self, experts_used: int) -> int:
        """Bytes of the experts that one token uses, so what the layer fetches at batch 1."""
        return experts_used * self.expert_bytes

    def slices(self, expert: int) -> dict[str, Slice]:
        """The expert's three slices under "gate", "up" and "down". ``IndexError`` as for ``ExpertTensor.slice``."""
        return {"gate": self.gate.slice(expert), "up": self.up.slice(expert), "down": self.down.slice(expert)}


class ModelFile:
    """A checked GGUF file of a mixture-of-experts model with Q6_K experts; a context manager that closes it.

    Build it with ``open``. Members:

    - ``path``, ``file_bytes``; ``metadata``: key to number, bool or string (``array`` reads the others);
      ``tensors``: name to ``TensorInfo``, all of the file.
    - ``architecture``, ``name`` ("" where the file has none), ``context_length`` (None where the file has none).
    - ``layers``: a ``MoeLayer`` for each layer that has experts, ascending; ``block_count``: layers with and without.
    - ``expert_count``, ``experts_used`` (top-k), ``width``, ``expert_width``: the same in every layer.

    What ``open`` has made sure of: the tensors tile the data section in aligned steps, without gap or overlap, exactly
    to the end of the file; all shapes agree with one another and with the metadata. What no reader can see in a file
    alone: changed weights, two tensors of one shape that changed places, another top-k that is also possible, a tensor
    outside the experts whose length changed by less than its padding.
    """

    def __init__(self, path: str, file: BinaryIO) -> None:
        """Take over ``file``, open for reading at byte 0; ``ModelFileError`` as for ``open``."""
        self.path = path
        self._file = file
        self.file_bytes = os.fstat(file.fileno()).st_size
        header = _Header(path, file, self.file_bytes)
        header.walk()
        self.metadata = header.metadata
        self._arrays = header.arrays
        self._check_metadata(header)
        self.tensors = {tensor.name: tensor for tensor in header.tensors}
        self._check_experts()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ModelFile:
        """Open and check the file at ``path``; reads its header only. ``ModelFileError`` if anything is amiss."""
        path = os.fspath(path)
        try:
            # Looked at before opening: opening a FIFO waits for a writer.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ModelFileError(f"{path}: not a regular file; give the path of a .gguf file")
            file = open(path, "rb", buffering=2**16)  # noqa: SIM115 the model file keeps it open and closes it
            try:
                return cls(path, file)
            except BaseException:
                file.close()
                raise
        except OSError as error:
            raise ModelFileError(f"{path}: cannot read: {error.strerror or error}") from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def experts_bytes(self) -> int:
        """Bytes of all expert tensors of the file."""
        return sum(layer.all_bytes for layer in self.layers)

    @property
    def gpu_bytes(self) -> int:
        """Bytes of the file that stay with the GPU: all but the experts, header and padding included."""
        return self.file_bytes - self.experts_bytes

    @property
    def gpu_tensor_bytes(self) -> int:
        """Bytes of the tensors that stay with the GPU: ``gpu_bytes`` without header and padding."""
        return sum(tensor.length for tensor in self.tensors.values()) - self.experts_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of expert weights that one token needs at batch 1, over all layers."""
        return sum(layer.selected_bytes(self.experts_used) for layer in self.layers)

    @property
    def type_counts(self) -> dict[str, int]:
        """How many tensors of the file have each type, most frequent first."""
        return dict(Counter(tensor.type.name for tensor in self.tensors.values()).most_common())

    def layer(self, index: int) -> MoeLayer:
        """The experts of layer ``index`` of the model. ``IndexError`` where that layer has none."""
        for layer in self.layers:
            if layer.index == index:
                return layer
        first, last = self.layers[0].index, self.layers[-1].index
        raise IndexError(f"no experts in layer {index!r}; layers with experts are in {first}..{last} ({self.path})")

    def read_slice(self, piece: Slice) -> np.ndarray:
        """The bytes of ``piece``, uint8; positioned reads, so safe from several threads.

        ``ModelFileError`` naming the offset if the slice is not within the file or the file gives fewer bytes.
        """
        if piece.offset < 0 or piece.length < 0 or piece.offset + piece.length > self.file_bytes:
            self._fail(f"offset {piece.offset}: {piece.length} bytes from there are not within {self.file_bytes} bytes")
        data = np.empty(piece.length, np.uint8)
        done = 0
        while done < piece.length:
            try:
                got = os.preadv(self._file.fileno(), [data.data[done:]], piece.offset + done)
            except OSError as error:
                raise ModelFileError(
                    f"{self.path}: offset {piece.offset + done}: cannot read: {error.strerror or error}"
                ) from error
            if got == 0:
                self._fail(
                    f"offset {piece.offset + done}: the file ends {piece.length - done} bytes early; "
                    "it became shorter after it was opened, get it again"
                )
            done += got
        return data

    def tensor(self, name: str) -> np.ndarray:
        """An F32 or F16 tensor as float32 in its row-major shape; ``ModelFileError`` for other types and names."""
        info = self.tensors.get(name)
        if info is None:
            self._fail(f"no tensor {name!r}")
        dtype = _FLOATS.get(info.type)
        if dtype is None:
            self._fail(f"{info}: only F32 and F16 are read as numbers here")
        data = self.read_slice(Slice(info.offset, info.length))
        return data.view(dtype).reshape(info.shape).astype(np.float32, copy=False)

    def decoded(self, name: str) -> np.ndarray:
        """A tensor of any type that the ``gguf`` package decodes, as float32 in its row-major shape.

        ``ModelFileError`` for other types and names.
        """
        info = self.tensors.get(name)
        if info is None:
            self._fail(f"no tensor {name!r}")
        if info.type in _FLOATS:
            return self.tensor(name)
        data = self.read_slice(Slice(info.offset, info.length))
        try:
            return gguf.dequantize(data.reshape(*info.shape[:-1], -1), info.type)
        except NotImplementedError as error:
            raise ModelFileError(
                f"{self.path}: {info}: the gguf package does not decode this type; quantise the model again"
            ) from error

    def decoded_slice(self, tensor: ExpertTensor, expert: int) -> np.ndarray:
        """One expert's matrix as float32, rows × columns. ``IndexError`` for an expert that is not there."""
        data = self.read_slice(tensor.slice(expert))
        return gguf.dequantize(data.reshape(tensor.rows, -1), tensor.type)

    def array(self, key: str) -> list[Any] | None:
        """The array under a metadata key; None where there is none. ``ModelFileError`` for text that is not UTF-8."""
        if key not in self._arrays:
            return None
        kind, count, piece = self._arrays[key]
        data = self.read_slice(piece)
        if kind != GGUFValueType.STRING:
            return np.frombuffer(data, _SCALARS[kind], count).tolist()
        found, at, view = [], 0, data.tobytes()
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(view[at:start], "little")
            try:
                found.append(view[start:at].decode())
            except UnicodeDecodeError as error:
                self._fail(f"offset {piece.offset + start}: {error.reason} in key {key!r}; damaged, get the file again")
        return found

    def _fail(self, what: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {what}")

    def _number(self, key: str) -> int:
        value = self.metadata.get(key)
        if value is None:
            self._fail(f"key {key!r} is missing or no single number; convert the model again with llama.cpp")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self._fail(f"key {key!r} must be a whole number, not {value!r}")
        return value

    def _check_metadata(self, header: _Header) -> None:
        parts = self.metadata.get("split.count", 0)
        if parts not in (0, 1):
            self._fail(
                f"one of {parts!r} parts of a split model; join them: llama-gguf-split --merge FIRST_PART OUT.gguf"
            )
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            self._fail("key 'general.architecture' is missing or no string; this is not a model file")
        self.architecture = architecture
        name = self.metadata.get("general.name", "")
        self.name = name if isinstance(name, str) else ""

        names = [tensor.name for tensor in header.tensors]
        for split in filter(_SPLIT_EXPERT_NAME.fullmatch, names):
            self._fail(
                f"tensor {split!r}: one tensor per expert; convert the model again with llama.cpp of April 2024 or "
                "later, which writes ffn_gate_exps"
            )
        if not any("exps" in name for name in names):
            self._fail(
                f"architecture {architecture!r} has no expert tensors (blk.N.ffn_gate_exps.weight): "
                "not a mixture-of-experts model, give one that is"
            )

        self.block_count = self._number(f"{architecture}.block_count")
        self.expert_count = self._number(f"{architecture}.expert_count")
        self.experts_used = self._number(f"{architecture}.expert_used_count")
        self.width = self._number(f"{architecture}.embedding_length")
        context = f"{architecture}.context_length"
        self.context_length = self._number(context) if context in self.metadata else None
        if not 1 <= self.experts_used <= self.expert_count:
            self._fail(
                f"key '{architecture}.expert_used_count': {self.experts_used} experts a token of "
                f"{self.expert_count}; the metadata is damaged, get the file again"
            )

    def _check_experts(self) -> None:
        matrices: dict[int, dict[str, TensorInfo]] = {}
        routers: dict[int, TensorInfo] = {}
        for info in self.tensors.values():
            if match := _EXPERT_NAME.fullmatch(info.name):
                matrices.setdefault(int(match[1]), {})[match[2]] = info
            elif match := _ROUTER_NAME.fullmatch(info.name):
                routers[int(match[1])] = info
            elif "ffn_gate_up_exps" in info.name:
                self._fail(f"{info}: gate and up are fused into one tensor; convert the model again, not fused")
            elif "exps" in info.name:
                # Experts with biases, scales or norms: leaving those out would give wrong numbers.
                self._fail(f"{info}: the engine does not know this expert tensor; it computes gate, up and down only")
        self.layers: list[MoeLayer] = []
        self.expert_width = 0
        for index in sorted(matrices.keys() | routers.keys()):
            found = next(iter(matrices.get(index, {}).values()), None) or routers[index]
            if index >= self.block_count:
                self._fail(f"{found}: layer {index} of a model of {self.block_count} layers; get the file again")
            missing = [
                f"blk.{index}.ffn_{role}_exps.weight"
                for role in ("gate", "up", "down")
                if role not in matrices.get(index, {})
            ] + [f"blk.{index}.ffn_gate_inp.weight"] * (index not in routers)
            if missing:
                self._fail(f"{found}: tensor {missing[0]!r} is missing; get the file again")
            self.layers.append(self._layer(index, routers[index], **matrices[index]))

    def _layer(self, index: int, router: TensorInfo, gate: TensorInfo, up: TensorInfo, down: TensorInfo) -> MoeLayer:
        for info in (gate, up, down):
            if info.type != GGMLQuantizationType.Q6_K:
                self._fail(
                    f"{info}: experts must be Q6_K; quantise the model again with llama-quantize MODEL OUT Q6_K "
                    "(files named Q4_K_M, Q5_K_M and the like mix types)"
                )
        # Every layer has the first one's expert width: the hardware is told the shapes once.
        self.expert_width = self.expert_width or (gate.shape[-2] if len(gate.shape) > 1 else 0)
        up_shape = (self.expert_count, self.expert_width, self.width)
        down_shape = (self.expert_count, self.width, self.expert_width)
        router_shape = (self.expert_count, self.width)
        for info, shape in ((router, router_shape), (gate, up_shape), (up, up_shape), (down, down_shape)):
            if info.shape != shape:
                self._fail(
                    f"{info}: shape {_by(info.shape)}, but metadata and the other tensors want {_by(shape)}; "
                    "get the file again"
                )
        return MoeLayer(index, router.name, *(self._expert_tensor(info) for info in (gate, up, down)))

    def _expert_tensor(self, info: TensorInfo) -> ExpertTensor:
        experts, rows, columns = info.shape
        stride = rows * (columns // q6_k.BLOCK_WEIGHTS) * q6_k.BLOCK_BYTES
        # gguf's block size made the length, ours the stride.
        assert experts * stride == info.length
        return ExpertTensor(info.name, info.type, info.offset, stride, rows, columns, experts)


class _Header:
    """A bounded walk over a GGUF header: nothing is read or counted before it is known to fit into the file."""

    def __init__(self, path: str, file: BinaryIO, file_bytes: int) -> None:
        self.path, self.file, self.file_bytes = path, file, file_bytes
        self.offset = 0
        self.items = 0
        self.metadata: dict[str, int | float | bool | str] = {}
        self.arrays: dict[str, tuple[GGUFValueType, int, Slice]] = {}
        self.tensors: list[TensorInfo] = []

    def walk(self) -> None:
        """Fill ``metadata`` and ``tensors``, in the order of the file."""
        magic = self.take(4, "the magic")
        if magic != b"GGUF":
            self.fail_at(0, f"starts with {magic!r}, not 'GGUF'; give the path of a .gguf file")
        version = self.number("<I", "the version")
        if version not in VERSIONS and int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS:
            self.fail_at(4, "big-endian; convert the model again on a little-endian machine")
        if version not in VERSIONS:
            self.fail_at(4, f"GGUF version {version}, not one of {VERSIONS}; convert the model again with llama.cpp")
        tensors = self.count(self.number("<Q", "the tensor count"), 32, MAX_TENSORS, "tensors")
        keys = self.count(self.number("<Q", "the key count"), 13, MAX_KEYS, "keys")
        every_key: set[str] = set()
        for _ in range(keys):
            start = self.offset
            key = self.string(MAX_NAME_BYTES, "a key")
            if key in every_key or not key:
                self.fail_at(start, f"key {key!r} is empty or comes twice")
            every_key.add(key)
            kind = self.value_type(key)
            if key == "general.alignment" and kind != GGUFValueType.UINT32:
                self.fail_at(start, f"key {key!r} has type {kind.name}, not UINT32; get the file again")
            value = self.value(kind, key)
            if value is not None:
                self.metadata[key] = value
        infos = [self.tensor_info() for _ in range(tensors)]
        self.place(infos)

    def fail(self, what: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {what}")

    def fail_at(self, offset: int, what: str) -> NoReturn:
        self.fail(f"offset {offset}: {what}")

    def take(self, length: int, what: str) -> bytes:
        if length > self.file_bytes - self.offset:
            self.fail_at(
                self.offset,
                f"{what} needs {length} bytes, the file ends at {self.file_bytes}; truncated or damaged, get it again",
            )
        data = self.file.read(length)
        if len(data) != length:
            self.fail_at(self.offset, f"the file became shorter while {what} was read; get it again")
        self.offset += length
        return data

    def skip(self, length: int) -> None:
        """Step over ``length`` bytes that are known to fit."""
        self.offset += length
        self.file.seek(self.offset)

    def number(self, form: str, what: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def count(self, count: int, least_bytes: int, limit: int, what: str) -> int:
        """``count``, just read; an error if so many, of ``least_bytes`` each, do not fit or pass ``limit``."""
        if count > min(limit, (self.file_bytes - self.offset) // least_bytes):
            self.fail_at(
                self.offset - 8,
                f"{count} {what} in a file of {self.file_bytes} bytes (limit {limit}); "
                "truncated or damaged, get it again",
            )
        return count

    def string_bytes(self, limit: int, what: str) -> int:
        return self.count(self.number("<Q", f"the length of {what}"), 1, limit, f"bytes of {what}")

    def string(self, limit: int, what: str) -> str:
        data = self.take(self.string_bytes(limit, what), what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.fail_at(self.offset - len(data), f"{what} is not UTF-8; damaged, get the file again")

    def value_type(self, key: str) -> GGUFValueType:
        raw = self.number("<I", f"the type of key {key!r}")
        try:
            return GGUFValueType(raw)
        except ValueError:
            self.fail_at(self.offset - 4, f"key {key!r} has unknown type {raw}; damaged, get the file again")

    def value(self, kind: GGUFValueType, key: str) -> int | float | bool | str | None:
        """The value of a key; None for an array, which is stepped over and noted in ``arrays``."""
        what = f"the value of key {key!r}"
        if kind == GGUFValueType.STRING:
            return self.string(MAX_STRING_BYTES, what)
        if kind != GGUFValueType.ARRAY:
            return self.number(_SCALARS[kind], what)
        kind = self.value_type(key)
        length = self.number("<Q", f"the length of {what}")
        if kind == GGUFValueType.ARRAY:
            self.fail_at(self.offset - 12, f"key {key!r} is an array of arrays; damaged, get the file again")
        item_bytes = 8 if kind == GGUFValueType.STRING else struct.calcsize(_SCALARS[kind])
        self.items += self.count(length, item_bytes, MAX_ARRAY_ITEMS - self.items, f"items of key {key!r}")
        start = self.offset
        if kind == GGUFValueType.STRING:
            for _ in range(length):
                self.skip(self.string_bytes(MAX_STRING_BYTES, what))
        else:
            self.skip(length * item_bytes)
        self.arrays[key] = (kind, length, Slice(start, self.offset - start))
        return None

    def tensor_info(self) -> TensorInfo:
        """A tensor's entry; its ``offset`` is still relative to the data section."""
        start = self.offset
        name = self.string(MAX_NAME_BYTES, "a tensor's name")
        if not name:
            self.fail_at(start, "a tensor without name; damaged, get the file again")
        what = f"tensor {name!r}"
        dimensions = self.number("<I", what)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self.fail_at(self.offset - 4, f"{what} has {dimensions} dimensions, not 1..{MAX_DIMENSIONS}; damaged")
        shape = tuple(self.number("<Q", what) for _ in range(dimensions))[::-1]
        raw_type = self.number("<I", what)
        try:
            kind = GGMLQuantizationType(raw_type)
        except ValueError:
            self.fail_at(
                self.offset - 4,
                f"{what} has type {raw_type}, unknown to the gguf package; upgrade gguf or get the file again",
            )
        block_weights, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block_weights:
            self.fail_at(
                start,
                f"{what} (type {kind.name}) is {_by(shape)}, but rows of {kind.name} must be a multiple of "
                f"{block_weights} wide; give a model of such widths, or the file is damaged",
            )
        length = math.prod(shape) // block_weights * block_bytes
        return TensorInfo(name, kind, shape, self.number("<Q", what), length)

    def place(self, infos: list[TensorInfo]) -> None:
        """Check that the tensors tile the rest of the file, and give them their absolute offsets.

        This is what catches a wrong shape, type, offset, count or alignment: the extents no longer meet, or they end
        at least one alignment step away from the end of the file.
        """
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        assert isinstance(alignment, int)
        if alignment < 1 or alignment & (alignment - 1):
            self.fail(f"key 'general.alignment' must be a power of two, not {alignment!r}; get the file again")
        data_start = _align(self.offset, alignment)
        names: set[str] = set()
        for info in infos:
            tensor = replace(info, offset=data_start + info.offset)
            if tensor.name in names:
                self.fail(f"{tensor} comes twice; get the file again")
            if info.offset % alignment:
                self.fail(f"{tensor} is not aligned to {alignment} bytes; get the file again")
            if tensor.offset + tensor.length > self.file_bytes:
                self.fail(
                    f"{tensor} needs {tensor.length} bytes, the file ends at {self.file_bytes}; "
                    "truncated or damaged, get it again"
                )
            names.add(tensor.name)
            self.tensors.append(tensor)
        end, before = data_start, "the header"
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self.fail(f"{tensor} overlaps {before}, which ends at {end}; get the file again")
            if tensor.offset > _align(end, alignment):
                self.fail(f"{tensor} leaves a gap after {before}, which ends at {end}; get the file again")
            end, before = tensor.offset + tensor.length, str(tensor)
        if self.file_bytes > _align(end, alignment):
            self.fail_at(end, f"{self.file_bytes - end} bytes follow {before}; damaged, get the file again")


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
