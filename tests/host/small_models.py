"""Small random models of each architecture that runs, as GGUF files, and their weights by transformers' names.

The names and the order of rows here are written from the converters' definitions, not with :mod:`host.architectures`.
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.synthetic import Shape, write

LAYERS = 2
SCALES = (6.0, 0.5, 0.125, 0.25)
_COMMON = {
    "name": "small",
    "layers": LAYERS,
    "experts": 8,
    "experts_used": 3,
    "width": 256,
    "expert_width": 256,
    "heads": 4,
    "context": 256,
    "rope_base": 1e4,
    "norm_epsilon": 1e-5,
}
SHAPES = {
    "granitemoe": Shape(architecture="granitemoe", kv_heads=2, head_width=64, tied=True, scales=SCALES, **_COMMON),
    "olmoe": Shape(architecture="olmoe", kv_heads=4, head_width=64, query_norm=256, key_norm=256, **_COMMON),
    "qwen3moe": Shape(
        architecture="qwen3moe",
        kv_heads=2,
        head_width=128,  # heads together are wider than the model
        query_norm=128,
        key_norm=128,
        dense_width=512,
        **_COMMON,
    ),
    "mixtral": Shape(architecture="llama", kv_heads=2, head_width=64, **_COMMON),
}
"""By the name of the transformers model."""


def make(name: str, folder: Path) -> Path:
    """The file of a model; 3.6 MB at most."""
    path = folder / f"{name}.gguf"
    write(path, SHAPES[name])
    return path


def plain(name: str, path: Path) -> torch.nn.Module:
    """The same model as transformers alone builds and runs it, in float32."""
    shape = SHAPES[name]
    common = {
        "vocab_size": 257,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_experts_per_tok": shape.experts_used,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": float(np.float32(shape.norm_epsilon)),
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base},
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    own = {
        "granitemoe": {
            "intermediate_size": 256,
            "num_local_experts": 8,
            "embedding_multiplier": SCALES[0],
            "residual_multiplier": SCALES[1],
            "attention_multiplier": SCALES[2],
            "logits_scaling": SCALES[3],
        },
        "olmoe": {"intermediate_size": 256, "num_experts": 8, "norm_topk_prob": False},
        "qwen3moe": {
            "moe_intermediate_size": 256,
            "num_experts": 8,
            "head_dim": 128,
            "norm_topk_prob": True,
        },
        "mixtral": {"intermediate_size": 256, "num_local_experts": 8},
    }
    config = AutoConfig.for_model({"qwen3moe": "qwen3_moe"}.get(name, name), **common, **own[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    tensors = {
        tensor.name.removesuffix(".weight"): gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in gguf.GGUFReader(path).tensors
    }
    state = {"model.embed_tokens": tensors["token_embd"], "model.norm": tensors["output_norm"]}
    state["lm_head"] = tensors.get("output", tensors["token_embd"])
    block = "block_sparse_moe" if name == "granitemoe" else "mlp"
    router = "router" if name == "granitemoe" else "gate"
    turned = name in ("granitemoe", "mixtral")
    for n in range(shape.layers):
        here, there = f"blk.{n}", f"model.layers.{n}"
        for ours, theirs in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
            weight = tensors[f"{here}.{theirs}"]
            if turned and ours in "qk":
                # llama.cpp: row 2i of a head turns with row 2i + 1; transformers: row i with row i + width / 2.
                order = np.r_[0 : shape.head_width : 2, 1 : shape.head_width : 2]
                heads = weight.reshape(-1, shape.head_width, weight.shape[1])
                weight = heads[:, order].reshape(weight.shape)
            state[f"{there}.self_attn.{ours}_proj"] = weight
        if shape.query_norm:
            state[f"{there}.self_attn.q_norm"] = tensors[f"{here}.attn_q_norm"]
            state[f"{there}.self_attn.k_norm"] = tensors[f"{here}.attn_k_norm"]
        state[f"{there}.input_layernorm"] = tensors[f"{here}.attn_norm"]
        state[f"{there}.post_attention_layernorm"] = tensors[f"{here}.ffn_norm"]
        state[f"{there}.{block}.{router}"] = tensors[f"{here}.ffn_gate_inp"]
        gate, up = tensors[f"{here}.ffn_gate_exps"], tensors[f"{here}.ffn_up_exps"]
        state[f"{there}.{block}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        state[f"{there}.{block}.experts.down_proj"] = tensors[f"{here}.ffn_down_exps"]
    named = {
        name if name.endswith("_proj") and ".experts." in name else f"{name}.weight": torch.from_numpy(array.copy())
        for name, array in state.items()
    }
    model.load_state_dict(named)
    model.set_experts_implementation("eager")
    return model.eval()
