"""The committed model: what is in the file, and what llama.cpp makes of it."""

import hashlib
import json
import re
import struct
from pathlib import Path

import gguf
import pytest

from tests.models.llama import LlamaCpp

MODELS = Path(__file__).parents[2] / "models"
FILE = MODELS / "tiny-moe-q6k.gguf"
CARD = (MODELS / "README.md").read_text(encoding="utf-8")
TASKS = json.loads((MODELS / "tiny-moe-suite.json").read_text(encoding="utf-8"))["tasks"]
LAYERS, EXPERTS, WIDTH, EXPERT_WIDTH = 3, 8, 256, 256


def stated(pattern):
    """Return what the model card states, so that card and file cannot drift apart."""
    found = re.search(pattern, CARD)
    assert found, f"models/README.md states nothing like {pattern!r}"
    return found[1]


@pytest.fixture(scope="module")
def reader():
    return gguf.GGUFReader(FILE)


def test_is_the_file_of_the_card():
    data = FILE.read_bytes()
    assert hashlib.sha256(data).hexdigest() == stated(r"sha256 `([0-9a-f]{64})`")
    assert len(data) == int(stated(r"([\d,]+) bytes").replace(",", ""))
    assert len(data) <= 8_000_000


def test_tensors(reader):
    kinds = gguf.GGMLQuantizationType
    expected = {"token_embd.weight": (kinds.F16, [WIDTH, 256]), "output_norm.weight": (kinds.F32, [WIDTH])}
    for n in range(LAYERS):
        expected |= {
            f"blk.{n}.attn_norm.weight": (kinds.F32, [WIDTH]),
            f"blk.{n}.attn_q.weight": (kinds.F16, [WIDTH, 256]),
            f"blk.{n}.attn_k.weight": (kinds.F16, [WIDTH, 128]),
            f"blk.{n}.attn_v.weight": (kinds.F16, [WIDTH, 128]),
            f"blk.{n}.attn_output.weight": (kinds.F16, [256, WIDTH]),
            f"blk.{n}.ffn_norm.weight": (kinds.F32, [WIDTH]),
            f"blk.{n}.ffn_gate_inp.weight": (kinds.F32, [WIDTH, EXPERTS]),
            f"blk.{n}.ffn_gate_exps.weight": (kinds.Q6_K, [WIDTH, EXPERT_WIDTH, EXPERTS]),
            f"blk.{n}.ffn_up_exps.weight": (kinds.Q6_K, [WIDTH, EXPERT_WIDTH, EXPERTS]),
            f"blk.{n}.ffn_down_exps.weight": (kinds.Q6_K, [EXPERT_WIDTH, WIDTH, EXPERTS]),
        }
    assert {tensor.name: (tensor.tensor_type, list(tensor.shape)) for tensor in reader.tensors} == expected


def test_names_no_machine():
    text = FILE.read_bytes()
    for word in (b"/home", b"/tmp", b"/work", b"/root", b"C:\\"):
        assert word not in text, word


def test_suite():
    assert len(TASKS) == 45
    kinds = [task["kind"] for task in TASKS]
    assert len(set(kinds)) == 9
    assert all(kinds.count(kind) == 5 for kind in kinds)
    assert len({task["prompt"] for task in TASKS}) == 45
    assert all(task["prompt"].endswith("=") for task in TASKS)


@pytest.fixture(scope="module")
def llama():
    return LlamaCpp(FILE)


@pytest.fixture(scope="module")
def generated(llama):
    return [llama.complete(task["prompt"], stop=["\n"]) for task in TASKS]


def test_one_byte_is_one_token(llama, generated):
    for task, (text, answer) in zip(TASKS, generated, strict=True):
        assert answer["usage"]["prompt_tokens"] == len(task["prompt"])
        assert llama.complete(list(task["prompt"].encode()), stop=["\n"])[0] == text, "token ids are byte values"


def test_llama_cpp_scores_what_the_card_states(generated):
    exact = sum(text == task["answer"] for task, (text, _) in zip(TASKS, generated, strict=True))
    assert f"{exact}/45" == stated(r"llama\.cpp: \*\*(\d+/45)\*\*")


def test_llama_cpp_generates_what_torch_generated(generated):
    different = [task for task, (text, _) in zip(TASKS, generated, strict=True) if text != task["generated"]]
    assert f"{45 - len(different)}/45" == stated(r"same text as PyTorch: \*\*(\d+/45)\*\*"), different


@pytest.mark.parametrize("name", ["embedding_scale", "residual_scale", "attention.scale", "logit_scale"])
def test_llama_cpp_applies_every_multiplier(llama, tmp_path, name):
    """The multiplier in the file is used: with a third of it, the first token's log-probability is another one."""
    data = bytearray(FILE.read_bytes())
    key = f"granitemoe.{name}".encode()
    at = data.index(key) + len(key)
    kind, value = struct.unpack_from("<If", data, at)
    assert kind == gguf.GGUFValueType.FLOAT32
    struct.pack_into("<f", data, at + 4, value / 3)
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(data)

    def first(model):
        answer = model.complete("add 47 38=", logprobs=1)[1]
        return answer["choices"][0]["logprobs"]["content"][0]["logprob"]

    assert first(llama) == first(llama)
    assert first(LlamaCpp(changed)) != first(llama)
