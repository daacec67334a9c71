"""GGUF files in the shape of public mixture-of-experts models, with seeded random weights.

    python -m models.synthetic --shape granite-1b [--layers N] [--seed S] OUT.gguf

For measuring storage, links and hardware at a real model's size without the model: the experts have the type, shapes,
names and bytes of the public Q6_K file, so everything about expert traffic is the same. The rest is only such that
llama.cpp runs the file: attention and embeddings are F16 (public Q6_K files have Q6_K there), the vocabulary is 256
bytes and one end token, and the text that comes out means nothing. A file is "Granite-shaped", never Granite.

Each byte is a function of (seed, tensor name, place) alone, so that any piece can be made by itself (``Tensor.data``),
a file of fewer layers starts with the layers of the whole, and neither the chunk size nor the NumPy release changes a
file: NumPy fixes the bits of PCG64 for good, not its distributions, hence the uniform weights made from bits here.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from hw.formats import q6_k
from models.byte_tokenizer import byte_tokens

F16, F32, Q6_K = GGMLQuantizationType.F16, GGMLQuantizationType.F32, GGMLQuantizationType.Q6_K

CHUNK_BYTES = 2**22
"""Of tensor data made and written at once; memory stays below about eight times this."""
ALIGNMENT = gguf.GGUF_DEFAULT_ALIGNMENT
HEADER_BYTES = 2**20
"""More than any header written here: 48 layers have 41 kB."""
SEEDS = 2**64


class OutputError(Exception):
    """An output file that is refused. The message is one line: the file, what is wrong, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes and constants of a model, as its GGUF metadata states them.

    ``scales`` are Granite's four multipliers (embedding, residual, attention, logit), ``query_norm`` and ``key_norm``
    the widths of the norms after those projections (0: none), ``dense_width`` the metadata's feed-forward width where
    it is not the experts'. ``ValueError`` for widths that Q6_K cannot hold and for a top-k larger than the experts.
    """

    name: str
    architecture: str
    layers: int
    experts: int
    experts_used: int
    width: int
    expert_width: int
    heads: int
    kv_heads: int
    head_width: int
    context: int
    rope_base: float
    norm_epsilon: float
    tied: bool = False  # one matrix for embedding and output
    scales: tuple[float, float, float, float] | None = None
    query_norm: int = 0
    key_norm: int = 0
    dense_width: int = 0

    def __post_init__(self) -> None:
        for field in ("width", "expert_width"):
            value = getattr(self, field)
            if value < 1 or value % q6_k.BLOCK_WEIGHTS:
                raise ValueError(f"{field} must be a multiple of {q6_k.BLOCK_WEIGHTS}, not {value!r}")
        if not 1 <= self.experts_used <= self.experts:
            raise ValueError(f"experts_used must be in 1..{self.experts}, not {self.experts_used!r}")

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: gate, up and down."""
        return 3 * self.width * self.expert_width // q6_k.BLOCK_WEIGHTS * q6_k.BLOCK_BYTES

    @property
    def token_bytes(self) -> int:
        """Bytes of the experts that one token needs, over all layers."""
        return self.layers * self.experts_used * self.expert_bytes

    @property
    def bank_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return self.layers * self.experts * self.expert_bytes


SHAPES = {
    # huggingface.co/ibm-granite/granite-3.1-1b-a400m-instruct, config.json
    "granite-1b": Shape(
        name="Granite 3.1 1B-A400M",
        architecture="granitemoe",
        layers=24,
        experts=32,
        experts_used=8,
        width=1024,
        expert_width=512,
        heads=16,
        kv_heads=8,
        head_width=64,
        context=131072,
        rope_base=1.5e6,
        norm_epsilon=1e-6,
        tied=True,
        scales=(12.0, 0.22, 0.015625, 6.0),
    ),
    # huggingface.co/ibm-granite/granite-3.0-3b-a800m-instruct, config.json
    "granite-3b": Shape(
        name="Granite 3.0 3B-A800M",
        architecture="granitemoe",
        layers=32,
        experts=40,
        experts_used=8,
        width=1536,
        expert_width=512,
        heads=24,
        kv_heads=8,
        head_width=64,
        context=4096,
        rope_base=1e4,
        norm_epsilon=1e-6,
        tied=True,
        scales=(12.0, 0.22, 0.015625, 6.0),
    ),
    # huggingface.co/allenai/OLMoE-1B-7B-0924, config.json
    "olmoe": Shape(
        name="OLMoE-1B-7B",
        architecture="olmoe",
        layers=16,
        experts=64,
        experts_used=8,
        width=2048,
        expert_width=1024,
        heads=16,
        kv_heads=16,
        head_width=128,
        context=4096,
        rope_base=1e4,
        norm_epsilon=1e-5,
        query_norm=2048,
        key_norm=2048,
    ),
    # huggingface.co/Qwen/Qwen3-30B-A3B, config.json
    "qwen3-30b": Shape(
        name="Qwen3-30B-A3B",
        architecture="qwen3moe",
        layers=48,
        experts=128,
        experts_used=8,
        width=2048,
        expert_width=768,
        heads=32,
        kv_heads=4,
        head_width=128,
        context=40960,
        rope_base=1e6,
        norm_epsilon=1e-6,
        query_norm=128,
        key_norm=128,
        dense_width=6144,
    ),
    # huggingface.co/mistralai/Mixtral-8x7B-Instruct-v0.1, config.json
    "mixtral": Shape(
        name="Mixtral-8x7B",
        architecture="llama",
        layers=32,
        experts=8,
        experts_used=2,
        width=4096,
        expert_width=14336,
        heads=32,
        kv_heads=8,
        head_width=128,
        context=32768,
        rope_base=1e6,
        norm_epsilon=1e-5,
    ),
}


def _rms(values: range) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


SCALE_RMS = _rms(range(-128, 128))
WEIGHT_RMS = _rms(range(-q6_k.WEIGHT_BIAS, q6_k.WEIGHT_BIAS))
D_SPREAD_RMS = math.sqrt(13 / 12)  # of a uniform factor in 0.5..1.5


class Tensor(NamedTuple):
    """A tensor of the file: row-major ``shape``; ``mean`` and standard ``deviation`` of its random weights."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    mean: float
    deviation: float

    @property
    def items(self) -> int:
        """Q6_K blocks or single numbers: what ``data`` counts in."""
        return math.prod(self.shape) // GGML_QUANT_SIZES[self.type][0]

    @property
    def item_bytes(self) -> int:
        return GGML_QUANT_SIZES[self.type][1]

    @property
    def data_bytes(self) -> int:
        return self.items * self.item_bytes

    def data(self, seed: int, first: int, count: int) -> np.ndarray:
        """The file's bytes of items ``first`` to ``first + count``, uint8; ``IndexError`` for items not there."""
        if first < 0 or count < 0 or first + count > self.items:
            raise IndexError(f"items {first}..{first + count} are not all in 0..{self.items} of {self.name}")
        if self.type == Q6_K:
            return self._blocks(seed, first, count)
        numbers = (_random_bytes(seed, self.name, 4 * first, 4 * count).view("<u4") >> 8).astype(np.float32)
        half_width = math.sqrt(3) * self.deviation  # of a uniform distribution
        numbers *= half_width * 2.0**-23
        numbers += self.mean - half_width
        return numbers.astype("<f2" if self.type == F16 else "<f4", copy=False).view(np.uint8)

    def _blocks(self, seed: int, first: int, count: int) -> np.ndarray:
        """Blocks of random bits, but ``d``: a random sign, and uniform in 0.5..1.5 times what ``deviation`` needs."""
        size = q6_k.BLOCK_BYTES
        blocks = _random_bytes(seed, self.name, size * first, size * count).reshape(count, size)
        place = blocks[:, q6_k.D_OFFSET : q6_k.D_OFFSET + q6_k.D_BYTES]
        bits = place.copy().view("<u2")
        factor = self.deviation / (SCALE_RMS * WEIGHT_RMS * D_SPREAD_RMS)
        d = ((bits & 0x7FFF).astype(np.float32) * 2.0**-15 + 0.5) * factor
        place[:] = (d.astype("<f2").view("<u2") | (bits & 0x8000)).view(np.uint8)
        return blocks.reshape(-1)


def _random_bytes(seed: int, name: str, first: int, count: int) -> np.ndarray:
    """Bytes ``first`` to ``first + count`` of the endless random string of this seed and name."""
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=tuple(name.encode())))
    bits.advance(first // 8)
    words = bits.random_raw((first + count + 7) // 8 - first // 8)
    return words.astype("<u8", copy=False).view(np.uint8)[first % 8 : first % 8 + count]


END_TOKEN = "<|endoftext|>"
VOCABULARY = 257


def tensors(shape: Shape, layers: int) -> Iterator[Tensor]:
    """All tensors of a file of the shape's first ``layers`` layers, in file order.

    Matrices, the embedding among them, have mean 0 and deviation ``1/sqrt(columns)``, so that none drowns another and
    nothing grows from layer to layer; norms are about 1.
    """

    def matrix(name: str, kind: GGMLQuantizationType, *size: int) -> Tensor:
        return Tensor(f"{name}.weight", kind, size, 0.0, size[-1] ** -0.5)

    def norm(name: str, size: int) -> Tensor:
        return Tensor(f"{name}.weight", F32, (size,), 1.0, 0.05)

    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    width, experts, inner = shape.width, shape.experts, shape.expert_width
    yield matrix("token_embd", F16, VOCABULARY, width)
    for n in range(layers):
        yield norm(f"blk.{n}.attn_norm", width)
        yield matrix(f"blk.{n}.attn_q", F16, queries, width)
        yield matrix(f"blk.{n}.attn_k", F16, keys, width)
        yield matrix(f"blk.{n}.attn_v", F16, keys, width)
        yield matrix(f"blk.{n}.attn_output", F16, width, queries)
        if shape.query_norm:
            yield norm(f"blk.{n}.attn_q_norm", shape.query_norm)
            yield norm(f"blk.{n}.attn_k_norm", shape.key_norm)
        yield norm(f"blk.{n}.ffn_norm", width)
        yield matrix(f"blk.{n}.ffn_gate_inp", F32, experts, width)
        yield matrix(f"blk.{n}.ffn_gate_exps", Q6_K, experts, inner, width)
        yield matrix(f"blk.{n}.ffn_up_exps", Q6_K, experts, inner, width)
        yield matrix(f"blk.{n}.ffn_down_exps", Q6_K, experts, width, inner)
    yield norm("output_norm", width)
    if not shape.tied:
        yield matrix("output", F16, VOCABULARY, width)


def write(
    path: Path,
    shape: Shape,
    layers: int | None = None,
    *,
    seed: int = 1,
    force: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Write a file of the first ``layers`` layers (None: all), ``chunk_bytes`` at a time.

    The file is written as ``path`` with ``.part`` added and renamed when it is whole; nothing stays after an error or
    an interrupt. ``progress`` is called with bytes written and bytes of the file, before each chunk and at the end.
    ``ValueError`` for numbers out of range. ``OutputError``, before anything is written, if ``path`` exists (with
    ``force``: if it is no regular file), if the ``.part`` file does, or if the disk has not enough space.
    """
    layers = shape.layers if layers is None else layers
    if not 1 <= layers <= shape.layers:
        raise ValueError(f"layers must be in 1..{shape.layers}, not {layers!r}")
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed must be in 0..{SEEDS - 1}, not {seed!r}")
    if chunk_bytes < q6_k.BLOCK_BYTES:
        raise ValueError(f"chunk_bytes must be at least {q6_k.BLOCK_BYTES}, not {chunk_bytes!r}")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}: not a regular file; give the name of a file")
    if path.exists() and not force:
        raise OutputError(f"{path}: exists already; give another name, or --force to replace it")
    infos = list(tensors(shape, layers))
    data_bytes = sum(_padded(tensor.data_bytes) for tensor in infos)
    needed, free = data_bytes + HEADER_BYTES, shutil.disk_usage(path.parent).free
    if needed > free:
        raise OutputError(f"{path}: needs {needed:,} B, the disk has {free:,} B left; make room or give fewer --layers")
    part = path.with_name(f"{path.name}.part")
    try:
        part.open("xb").close()
    except FileExistsError:
        raise OutputError(f"{part}: exists; another run is writing it, or delete it") from None
    try:
        _write_header(part, shape, layers, seed, infos)
        with part.open("ab") as file:
            file.write(bytes(_padded(file.tell()) - file.tell()))
            total = file.tell() + data_bytes
            for tensor in infos:
                step = chunk_bytes // tensor.item_bytes
                for first in range(0, tensor.items, step):
                    progress(file.tell(), total)
                    file.write(tensor.data(seed, first, min(step, tensor.items - first)).data)
                file.write(bytes(_padded(tensor.data_bytes) - tensor.data_bytes))
            progress(total, total)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _padded(count: int) -> int:
    return gguf.GGUFWriter.ggml_pad(count, ALIGNMENT)


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f}"


def _write_header(path: Path, shape: Shape, layers: int, seed: int, infos: Sequence[Tensor]) -> None:
    """Write everything in front of the data: keys that llama.cpp needs, tokeniser, tensor table."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(f"Synthetic, {shape.name}-shaped")
    writer.add_author("the emufpga authors")
    writer.add_license("mit")
    writer.add_description(f"Random weights (seed {seed}) in the shape of {shape.name}; no model, its text is noise.")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q6_K)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(shape.dense_width or shape.expert_width)
    if shape.dense_width:
        writer.add_expert_feed_forward_length(shape.expert_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.experts_used)
    if shape.scales is not None:
        embedding, residual, attention, logit = shape.scales
        writer.add_embedding_scale(embedding)
        writer.add_residual_scale(residual)
        writer.add_attention_scale(attention)
        writer.add_logit_scale(logit)
    tokens = [*byte_tokens(), END_TOKEN]
    assert len(tokens) == VOCABULARY
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL])
    # llama.cpp wants a merge; two bytes 255 never follow each other in UTF-8, so this one never applies.
    writer.add_token_merges([f"{tokens[255]} {tokens[255]}"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    writer.add_add_bos_token(False)
    for tensor in infos:
        dtype = np.dtype(np.int8)  # not uint8, which gguf takes for a shape in bytes
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, tensor.data_bytes, raw_dtype=tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


class _Progress:
    """Bytes written, on stderr: one live line on a terminal, else a line at the start, every 5 s and at the end."""

    def __init__(self, what: str) -> None:
        self._what, self._next, self._open_line = what, 0.0, False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next and done < total:
            return
        live = sys.stderr.isatty()
        self._next = now + (0.2 if live else 5.0)
        self._open_line = live and done < total
        text = f"{self._what}: {_mb(done)} of {_mb(total)} MB"
        print(f"\r{text}" if live else text, end="" if self._open_line else "\n", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End an unfinished live line, so that an error starts on its own."""
        if self._open_line:
            print(file=sys.stderr)


class _UsageError(Exception):
    """The command line asks for something that is not there."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}; see {self.prog} --help")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="synthetic", description="Write a GGUF file of a public shape with random Q6_K experts.")
    parser.add_argument("out", metavar="OUT.gguf", type=Path)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--layers", type=int, metavar="N", help="write the first N layers only")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--force", action="store_true", help="replace OUT.gguf if it exists")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Write one file; the exit status is 0, 1 for a file that cannot be written, 2 for a wrong command line, 130 for
    an interrupt. An error is one line on stderr.
    """
    try:
        args = _parse(argv)
    except _UsageError as error:
        return _error(error, 2)
    progress = _Progress(f"writing {args.out}")
    try:
        write(args.out, SHAPES[args.shape], args.layers, seed=args.seed, force=args.force, progress=progress)
    except (ValueError, OutputError, OSError, KeyboardInterrupt) as error:
        progress.stop()
        match error:
            case ValueError():
                return _error(f"--{error}", 2)
            case OSError():
                return _error(f"{args.out}: cannot write: {error.strerror or error}", 1)
            case KeyboardInterrupt():
                return _error(f"{args.out}: interrupted; nothing was kept", 130)
            case _:
                return _error(error, 1)
    return 0


def _error(error: object, status: int) -> int:
    print(f"synthetic: error: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    # A polite kill cleans up as ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
