"""GGUF files as transformers models: which module takes which tensor, for the architectures that run here.

A model is built without storage and every tensor but the experts is read into it, so the experts exist as shapes only
unless they are asked for. What llama.cpp's converter changes is undone: it stores the rows of Q and K for rotations of
adjacent pairs where transformers rotates halves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from host.model_file import ModelFile, ModelFileError, MoeLayer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]
"""Told what happens, and how many bytes of how many are done."""


class TorchMissingError(RuntimeError):
    """PyTorch, or what goes with it, is not installed, or has not the device asked for. One line, and what to do."""


@dataclass(frozen=True)
class Architecture:
    """How transformers names a GGUF architecture's parts.

    Attributes
    ----------
    model_type
        Of the transformers configuration.
    experts, router
        Modules of a decoder layer that hold the experts' matrices and the router's weight.
    pairs
        Q and K are stored for rotations of adjacent pairs.
    qk_norm
        There are norms behind the projections to Q and K.
    constants
        Configuration that the architecture implies.
    scalars
        Configuration that is the same number in the metadata: name to key.
    """

    model_type: str
    experts: str
    router: str
    pairs: bool
    qk_norm: bool = False
    constants: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, str] = field(default_factory=dict)


ARCHITECTURES = {
    "granitemoe": Architecture(
        "granitemoe",
        "block_sparse_moe.experts",
        "block_sparse_moe.router",
        pairs=True,
        scalars={
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "olmoe": Architecture(
        "olmoe", "mlp.experts", "mlp.gate", pairs=False, qk_norm=True, constants={"norm_topk_prob": False}
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "mlp.experts", "mlp.gate", pairs=False, qk_norm=True, constants={"norm_topk_prob": True}
    ),
    "llama": Architecture("mixtral", "mlp.experts", "mlp.gate", pairs=True),
}
"""By the file's ``general.architecture``; Mixtral's is ``llama``."""

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = re.compile(r"blk\.[0-9]+\.ffn_(gate|up|down)_exps\.weight")
_UNSUPPORTED = ("rope.scaling.type", "expert_weights_scale", "expert_shared_count", "attention.sliding_window")
"""Keys that change the numbers and are not understood here; 0, 1 and "none" change nothing."""


def architecture(model: ModelFile) -> Architecture:
    """The file's architecture; ``ModelFileError`` for one that does not run here."""
    found = ARCHITECTURES.get(model.architecture)
    if found is None:
        raise ModelFileError(
            f"{model.path}: architecture {model.architecture!r} does not run here; supported are "
            f"{', '.join(ARCHITECTURES)} (llama with experts: Mixtral)"
        )
    return found


def parameters(model: ModelFile) -> dict[str, str]:
    """Name of the transformers parameter to name of the file's tensor, of all but the experts.

    ``ModelFileError`` for a tensor that lacks, and for one that nothing here would use: leaving out a bias or a norm
    would give other numbers.
    """
    kind = architecture(model)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    if "output.weight" in model.tensors:
        names["lm_head"] = "output"
    inside = {**_LAYER, "ffn_gate_inp": kind.router, **(_QK_NORM if kind.qk_norm else {})}
    for layer in range(model.block_count):
        names |= {f"model.layers.{layer}.{module}": f"blk.{layer}.{name}" for name, module in inside.items()}
    wanted = {f"{module}.weight": f"{name}.weight" for module, name in names.items()}
    for name in wanted.values():
        if name not in model.tensors:
            raise ModelFileError(
                f"{model.path}: tensor {name!r} is missing, which architecture {model.architecture!r} needs; "
                "get the file again"
            )
    known = set(wanted.values())
    for name, info in model.tensors.items():
        if name not in known and not _EXPERTS.fullmatch(name):
            raise ModelFileError(
                f"{model.path}: {info}: architecture {model.architecture!r} has no place for it here, and leaving it "
                "out would change the numbers"
            )
    return wanted


def configuration(model: ModelFile) -> dict[str, Any]:
    """The fields of the transformers configuration; ``ModelFileError`` naming the key that lacks or is not supported.

    Granite's multipliers and the rotation's base are as the file says; the head's width is ``attention.key_length``,
    else the rotation's, else width / heads.
    """
    kind = architecture(model)
    prefix = model.architecture
    if len(model.layers) != model.block_count:
        raise ModelFileError(
            f"{model.path}: {model.block_count - len(model.layers)} of {model.block_count} layers have no experts; "
            "only models with experts in every layer run here"
        )

    def number(key: str, default: float | None = None) -> Any:
        value = model.metadata.get(f"{prefix}.{key}", default)
        if not isinstance(value, int | float):
            raise ModelFileError(
                f"{model.path}: key '{prefix}.{key}' is missing or no number; convert the model again with llama.cpp"
            )
        return value

    for key in _UNSUPPORTED:
        value = model.metadata.get(f"{prefix}.{key}", 0)
        if value not in (0, 1, "none"):
            raise ModelFileError(f"{model.path}: key '{prefix}.{key}' = {value!r} is not supported here")
    heads = number("attention.head_count")
    head = number("attention.key_length", number("rope.dimension_count", model.width // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head) != head:
            raise ModelFileError(
                f"{model.path}: key '{prefix}.{key}' = {number(key)} with heads of {head}: not supported here"
            )
    fields = {
        "model_type": kind.model_type,
        "vocab_size": model.tensors["token_embd.weight"].shape[0],
        "hidden_size": model.width,
        "intermediate_size": model.expert_width,
        "moe_intermediate_size": model.expert_width,
        "num_hidden_layers": model.block_count,
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head,
        "num_local_experts": model.expert_count,
        "num_experts": model.expert_count,
        "num_experts_per_tok": model.experts_used,
        "max_position_embeddings": model.context_length or 2048,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(number("rope.freq_base", 10000.0))},
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "hidden_act": "silu",
        # Ids that some defaults have beyond a small vocabulary; the tokenizer knows the file's own.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return fields | kind.constants | {name: number(key) for name, key in kind.scalars.items()}


def build(
    model: ModelFile,
    *,
    experts: bool,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Progress = lambda what, done, total: None,
) -> PreTrainedModel:
    """The model with the file's weights in ``dtype`` on ``device``; the experts too, or as shapes without storage.

    Attention is transformers' ``eager``: plain matrix products, so that nothing newer is asked of a GPU. Tensors are
    read one at a time by position, not mapped. ``TorchMissingError``, ``ModelFileError`` as they come.
    """
    kind, names, fields = architecture(model), parameters(model), configuration(model)
    total = model.file_bytes if experts else model.gpu_tensor_bytes
    progress("starting PyTorch", 0, total)
    torch = import_torch(device)
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    kept = getattr(torch, dtype)
    done = 0
    for target, source in names.items():
        progress("loading", done, total)
        array = _unpaired(model, kind, source)
        expected = tuple(built.get_parameter(target).shape)
        if array.shape != expected:
            raise ModelFileError(
                f"{model.path}: {model.tensors[source]}: shape {array.shape}, the metadata wants {expected}; "
                "get the file again"
            )
        _put(built, target, torch.from_numpy(array).to(device, kept))
        done += model.tensors[source].length
    built.tie_weights()
    # Its frequencies are no parameters of the file.
    built.model.rotary_emb = type(built.model.rotary_emb)(config=built.config).to(device)
    for layer in model.layers if experts else ():
        module = expert_module(built, model, layer)
        for name, matrices in (("gate_up_proj", (layer.gate, layer.up)), ("down_proj", (layer.down,))):
            # Straight into its place: a layer's experts in float32 may be a GB.
            whole = torch.empty(getattr(module, name).shape, dtype=kept, device=device)
            at = 0
            for tensor in matrices:
                for expert in range(layer.experts):
                    progress("decoding experts", done, total)
                    piece = torch.from_numpy(model.decoded_slice(tensor, expert))
                    whole[expert, at : at + tensor.rows] = piece
                    done += tensor.expert_stride
                at += tensor.rows
            setattr(module, name, torch.nn.Parameter(whole, requires_grad=False))
    progress("loaded", total, total)
    return built.eval()


def expert_module(built: PreTrainedModel, model: ModelFile, layer: MoeLayer) -> torch.nn.Module:
    """The module that holds a layer's experts."""
    return built.get_submodule(f"model.layers.{layer.index}.{architecture(model).experts}")


def expert_parameters(built: PreTrainedModel, model: ModelFile) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every parameter of every expert, with its name."""
    for layer in model.layers:
        yield from expert_module(built, model, layer).named_parameters(f"layer {layer.index}")


def _unpaired(model: ModelFile, kind: Architecture, name: str) -> np.ndarray:
    """The tensor; Q and K with their rows for rotations of halves."""
    array = model.decoded(name)
    if not kind.pairs or not name.endswith((".attn_q.weight", ".attn_k.weight")):
        return array
    key = "head_count" if name.endswith(".attn_q.weight") else "head_count_kv"
    heads = model.metadata.get(f"{model.architecture}.attention.{key}")
    heads = heads or model.metadata[f"{model.architecture}.attention.head_count"]
    rows, columns = array.shape
    pairs = array.reshape(int(heads), -1, 2, columns)  # head, pair, first or second of it
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _put(built: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
    import torch

    module, _, leaf = name.rpartition(".")
    setattr(built.get_submodule(module), leaf, torch.nn.Parameter(tensor, requires_grad=False))


def import_torch(device: str = "cpu") -> Any:
    """PyTorch, ready for ``device``, where it computes the same bits each time; ``TorchMissingError`` otherwise."""
    try:
        import greenlet  # noqa: F401 all that the extra brings, so that the first error says all
        import tokenizers  # noqa: F401
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise TorchMissingError(
            f"a whole model needs PyTorch and transformers, and {error.name} is not installed: "
            "pip install 'emufpga[gpu]'"
        ) from error
    try:
        if torch.device(device).type == "cuda":
            # cuBLAS adds in a fixed order only with a workspace of its own, which must be asked for before first use.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as error:
        raise TorchMissingError(
            f"PyTorch {torch.__version__} cannot use {device!r} ({str(error).splitlines()[0]}): give cpu, or install a "
            "PyTorch built for it"
        ) from error
    return torch
