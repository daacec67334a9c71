"""What a model file asks the hardware to do: token vectors, routes and matrices, taken from the file itself."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from host.model_file import ExpertTensor, ModelFile, MoeLayer, Slice
from hw.formats.messages import Layer, Mode
from hw.formats.q6_k import BLOCK_BYTES, BLOCK_WEIGHTS
from sim.golden import q6_k
from sim.golden.layer import Route
from sim.golden.swiglu import quantize_weight


class Routes(NamedTuple):
    """Each token's experts, best first, and their weights, which sum to 1.

    Attributes
    ----------
    experts
        ``(tokens, k)`` int64.
    weights
        ``(tokens, k)`` float64.
    """

    experts: NDArray[np.int64]
    weights: NDArray[np.float64]


def token_vectors(model: ModelFile, layer: MoeLayer, text: bytes) -> NDArray[np.float64]:
    """A vector for each byte of ``text``: the file's embedding of token id = byte value, normalised for ``layer``.

    These are real rows of the model with the layer's own norm, not the hidden states that attention would make of
    them. ``(len(text), width)``.
    """
    return normalise(model, layer, embeddings(model, text))


def embeddings(model: ModelFile, text: bytes) -> NDArray[np.float64]:
    """The file's embedding of each byte of ``text``, ``(len(text), width)``."""
    return model.tensor("token_embd.weight")[list(text)].astype(np.float64)


def normalise(model: ModelFile, layer: MoeLayer, hidden: NDArray[np.float64]) -> NDArray[np.float64]:
    """The layer's own RMS norm of hidden states ``(tokens, width)``."""
    gain = model.tensor(f"blk.{layer.index}.ffn_norm.weight")
    epsilon = float(model.metadata.get(f"{model.architecture}.attention.layer_norm_rms_epsilon", 1e-6))
    return hidden / np.sqrt(np.mean(hidden**2, axis=-1, keepdims=True) + epsilon) * gain


def route(model: ModelFile, layer: MoeLayer, x: NDArray[np.float64]) -> Routes:
    """The router's decision: the ``k`` highest logits of each token, softmax over those alone (as granitemoe does)."""
    logits = x @ model.tensor(layer.router).T.astype(np.float64)
    experts = np.argsort(-logits, axis=-1, kind="stable")[:, : model.experts_used]
    best = np.take_along_axis(logits, experts, axis=-1)
    weights = np.exp(best - best.max(axis=-1, keepdims=True))
    return Routes(experts, weights / weights.sum(axis=-1, keepdims=True))


def engine_routes(routes: Routes) -> list[Route]:
    """The router's decision as the engine takes it."""
    weights = quantize_weight(routes.weights)
    return [
        Route(token, int(expert), int(weight))
        for token, (experts, row) in enumerate(zip(routes.experts, weights, strict=True))
        for expert, weight in zip(experts, row, strict=True)
    ]


def engine_layer(model: ModelFile, layer: MoeLayer, mode: Mode = Mode.SELECTED, *, outstanding: int = 2) -> Layer:
    """Where the layer's experts lie in the model file, as the engine is told."""
    offsets = (layer.up.file_offset, layer.gate.file_offset, layer.down.file_offset)
    return Layer(model.width, model.expert_width, layer.experts, offsets, mode, outstanding)


def reader(model: ModelFile) -> Callable[[int, int], NDArray[np.uint8]]:
    """Bytes of the model file by offset and length."""
    return lambda offset, length: model.read_slice(Slice(offset, length))


def float64_expert(model: ModelFile, layer: MoeLayer, expert: int, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """``down(silu(gate(x)) * up(x))`` of the dequantised matrices in float64; ``(width,)`` to ``(width,)``."""
    gate, up, down = (
        q6_k.dequantize(expert_blocks(model, tensor, expert)).reshape(tensor.rows, -1)
        for tensor in (layer.gate, layer.up, layer.down)
    )
    return down @ (silu(gate @ x) * (up @ x))


def expert_blocks(model: ModelFile, tensor: ExpertTensor, expert: int) -> NDArray[np.uint8]:
    """One expert's matrix as it lies in the file: ``(rows, columns / 256, 210)`` uint8."""
    return model.read_slice(tensor.slice(expert)).reshape(tensor.rows, tensor.columns // BLOCK_WEIGHTS, BLOCK_BYTES)


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """``x / (1 + exp(-x))``, without overflow for large negative ``x``."""
    return x * np.exp(-np.logaddexp(0, -x))


def random_blocks(rng: np.random.Generator, *lead: int, d: float = 1e-3) -> NDArray[np.uint8]:
    """``(*lead, 210)`` blocks of random bits whose scale ``d`` is normally distributed around 0."""
    blocks = rng.integers(0, 256, (*lead, 210), dtype=np.uint8)
    blocks[..., 208:] = rng.normal(0, d, lead).astype("<f2")[..., None].view(np.uint8)
    return blocks
