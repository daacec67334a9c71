"""Whole models of each architecture: against transformers with the same weights, and against llama.cpp."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from host import architectures
from host.model_file import ModelFile, ModelFileError
from host.runtime import Runtime
from tests.host import gguf_files, small_models
from tests.host.gguf_files import Tensor
from tests.models.llama import LlamaCpp

F32 = GGMLQuantizationType.F32
NAMES = list(small_models.SHAPES)
PROMPT = np.random.default_rng(3).integers(0, 256, 40).tolist()
PLACES = [1, 3, 8, 24, 40]
"""Lengths of the prompt's beginnings that llama.cpp is asked about."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    made = {}
    return lambda name: made.get(name) or made.setdefault(name, small_models.make(name, folder))


def logits(path, placement="resident", **options) -> np.ndarray:
    with Runtime.open(path, placement=placement, **options) as runtime:
        return runtime.logits([PROMPT])[0]


def rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize("name", NAMES)
def test_resident_is_transformers(files, name):
    """The same bits where the prompt is one chunk; otherwise sums are added in another order."""
    model = small_models.plain(name, files(name))
    with torch.inference_mode():
        given = model(torch.tensor([PROMPT])).logits[0].numpy()
    assert (logits(files(name)) == given).all()
    # A sum of n float32 products is off by about sqrt(n) · 2^-24 of their size; the longest has 512, and a layer has
    # six matrix products one after another: sqrt(6 · layers · 512) · 2^-24 = 5e-6. Norms and softmax add as much.
    bound = 1e-5 * rms(given)
    difference = rms(logits(files(name), chunk=16) - given)
    assert 0 < difference < bound


@pytest.mark.parametrize("name", NAMES)
def test_selected_is_near_resident(files, name):
    """int16 activations cost an expert 1.8e-4 relative RMS (docs/engine.md); the residual stream is not all experts."""
    resident = logits(files(name))
    difference = rms(logits(files(name), "selected") - resident)
    assert 0 < difference < 1.8e-4 * np.sqrt(small_models.LAYERS) * rms(resident)


def llama_log_probabilities(path) -> np.ndarray:
    """Of every token, after each of ``PLACES``. A bias chooses what is generated; it does not change what is told."""
    llama = LlamaCpp(path, context=256, threads=1)
    found = np.full((len(PLACES), 257), np.nan)
    for row, length in zip(found, PLACES, strict=True):
        _, answer = llama.complete(PROMPT[:length], max_tokens=1, logprobs=257, logit_bias=[[ord("A"), 100.0]])
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
    assert not np.isnan(found).any()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp(files, name, monkeypatch):
    """llama.cpp rounds what enters an expert to 8 bits, which costs it 3.3e-2 relative, and all else to 16.

    The median over the places, since a router's near tie may fall the other way. With the rows of Q and K in the other
    order the distance is much larger.
    """
    path = files(name)
    given = llama_log_probabilities(path)
    bound = 3.3e-2 * np.sqrt(small_models.LAYERS) * given.std()

    def distance(placement):
        ours = torch.from_numpy(logits(path, placement)).log_softmax(-1).numpy()
        return np.median([rms(ours[length - 1] - row) for length, row in zip(PLACES, given, strict=True)])

    right = distance("resident")
    assert right < bound
    assert distance("selected") < bound
    kind = architectures.ARCHITECTURES[small_models.SHAPES[name].architecture]
    turned = dataclasses.replace(kind, pairs=not kind.pairs)
    monkeypatch.setitem(architectures.ARCHITECTURES, small_models.SHAPES[name].architecture, turned)
    assert distance("resident") > 10 * right


@pytest.mark.parametrize("placement", ["selected", "tape"])
def test_experts_have_no_storage(files, placement):
    with Runtime.open(files("mixtral"), placement=placement) as runtime:
        runtime.logits([PROMPT])
        found = dict(architectures.expert_parameters(runtime.network, runtime.model))
        assert len(found) == 2 * small_models.LAYERS
        assert all(parameter.is_meta for parameter in found.values())
        others = {id(p): p for p in runtime.network.parameters()}.values()
        stored = sum(p.nbytes for p in others if not p.is_meta)
        weights = sum(p.numel() for p in others if not p.is_meta)
        assert stored == 4 * weights
        assert weights * 2 < runtime.model.gpu_tensor_bytes * 1.1  # most are F16 in the file


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_types(files, dtype):
    """Half precision rounds to 2^-11 or 2^-8, some 15 times one after another in each layer, norms and routes aside.

    The median over the tokens, since a router's near tie may fall the other way.
    """
    exact = logits(files("mixtral"))
    error = np.median([rms(row) for row in logits(files("mixtral"), "selected", dtype=dtype) - exact])
    step = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    assert error < np.sqrt(15 * small_models.LAYERS) * step * rms(exact)


# What is refused.


def refused(path) -> str:
    with ModelFile.open(path) as model, pytest.raises(ModelFileError) as caught:
        architectures.build(model, experts=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    """A model with the tensors of one layer of granitemoe, changed as the test says."""
    f16, width = GGMLQuantizationType.F16, gguf_files.WIDTH
    tensors = {
        "token_embd.weight": Tensor(f16, (4, width)),
        "output_norm.weight": Tensor(F32, (width,)),
        **gguf_files.layer_tensors(0),
        **{f"blk.0.attn_{name}.weight": Tensor(f16, (width, width)) for name in ("q", "k", "v", "output")},
        **{f"blk.0.{name}_norm.weight": Tensor(F32, (width,)) for name in ("attn", "ffn")},
    }
    metadata = {
        "granitemoe.block_count": 1,
        "granitemoe.attention.head_count": 4,
        "granitemoe.attention.layer_norm_rms_epsilon": 1e-5,
        "granitemoe.embedding_scale": 1.0,
        "granitemoe.residual_scale": 1.0,
        "granitemoe.attention.scale": 1.0,
        "granitemoe.logit_scale": 1.0,
    }

    def changed(given=None, *, less=(), **more):
        kept = {name: tensor for name, tensor in {**tensors, **(given or {})}.items() if name not in less}
        return gguf_files.write(tmp_path / "m.gguf", kept, metadata={**metadata, **more})

    return changed


def test_what_the_refused_files_are_made_of(file):
    with ModelFile.open(file()) as model:
        assert architectures.build(model, experts=False).config.model_type == "granitemoe"


def test_unknown_architecture(file):
    keys = ("block_count", "expert_count", "expert_used_count", "embedding_length")
    path = file(
        **{"general.architecture": "gemma4"} | {f"gemma4.{k}": v for k, v in zip(keys, (1, 4, 3, 256), strict=True)}
    )
    assert refused(path) == (
        f"{path}: architecture 'gemma4' does not run here; supported are granitemoe, olmoe, qwen3moe, llama "
        "(llama with experts: Mixtral)"
    )


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "output_norm.weight"])
def test_missing_tensor(file, name):
    path = file(less=[name])
    assert refused(path).startswith(f"{path}: tensor {name!r} is missing, which architecture 'granitemoe' needs")


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "rope_freqs.weight"])
def test_tensor_without_place(file, name):
    text = refused(file({name: Tensor(F32, (64,))}))
    assert f"tensor {name!r} (type F32, offset " in text
    assert "leaving it out would change the numbers" in text


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("attention.scale", None, "key 'granitemoe.attention.scale' is missing or no number"),
        ("attention.head_count", None, "key 'granitemoe.attention.head_count' is missing or no number"),
        ("rope.scaling.type", "yarn", "key 'granitemoe.rope.scaling.type' = 'yarn' is not supported here"),
        ("expert_weights_scale", 2.5, "key 'granitemoe.expert_weights_scale' = 2.5 is not supported here"),
        ("rope.dimension_count", 32, None),
        ("attention.value_length", 32, "key 'granitemoe.attention.value_length' = 32 with heads of 64"),
    ],
)
def test_metadata(file, key, value, part):
    path = file(**{f"granitemoe.{key}": value})
    if part is not None:
        assert part in refused(path)
    else:  # it says how wide a head is, and then Q has another shape
        assert "shape (256, 256), the metadata wants (128, 256)" in refused(path)


def test_wrong_shape(file):
    text = refused(file({"blk.0.attn_output.weight": Tensor(F32, (256, 128))}))
    assert "tensor 'blk.0.attn_output.weight' (type F32, offset " in text
    assert "shape (256, 128), the metadata wants (256, 256)" in text


def test_without_torch(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with ModelFile.open(file()) as model, pytest.raises(architectures.TorchMissingError) as caught:
        architectures.build(model, experts=False)
    assert str(caught.value).endswith("torch is not installed: pip install 'emufpga[gpu]'")


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_torch_device_that_is_not_there(file, device):
    with (
        ModelFile.open(file()) as model,
        pytest.raises(architectures.TorchMissingError, match=f"cannot use '{device}'"),
    ):
        architectures.build(model, experts=False, device=device)
