"""What ``models/train_tiny_moe.py`` teaches and computes, against definitions written independently of it."""

import functools
import json
import random
import re
import signal
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from models import train_tiny_moe as script

MODELS = Path(__file__).parents[2] / "models"

WORD = r" [a-z]{3,6}="
DEFINITIONS = {
    "copy": ("copy" + WORD, lambda a: a),
    "reverse": ("reverse" + WORD, lambda a: "".join(reversed(a))),
    "upper-case": ("upper" + WORD, lambda a: "".join(chr(ord(c) - 32) for c in a)),
    "sort letters": (r"sort [a-z]{3,5}=", lambda a: "".join(chr(c) * a.count(chr(c)) for c in range(97, 123))),
    "add": (r"add \d\d \d\d=", lambda a, b: f"{int(a) + int(b)}"),
    "compare": (r"compare \d\d \d\d=", lambda a, b: "<=>"[(int(a) > int(b)) - (int(a) < int(b)) + 1]),
    "count": (r"count [abc]{3,6} [abc]=", lambda a, b: str(len(a) - len(a.replace(b, "")))),
    "look-up": (r"find a\db\dc\dd\d [a-d]=", lambda a, b: a[a.index(b) + 1]),
    "next letter": ("next" + WORD, lambda a: "".join(chr((ord(c) - 96) % 26 + 97) for c in a)),
}


@pytest.mark.parametrize("kind", DEFINITIONS)
@pytest.mark.parametrize("held_out", [False, True])
def test_tasks_are_what_they_say(kind, held_out):
    pattern, answer = DEFINITIONS[kind]
    rng = random.Random(3)
    tasks = [script.draw(rng, kind, held_out=held_out) for _ in range(300)]
    for task in tasks:
        assert re.fullmatch(pattern, task.prompt)
        assert task.answer == answer(*task.prompt[:-1].split()[1:])
        assert script.reserved(task.prompt) == held_out
    assert len({task.prompt for task in tasks}) > 60


def test_kinds_are_those_nine():
    assert list(script.KINDS) == list(DEFINITIONS)


def test_training_never_meets_the_suite():
    source = script.training_tasks(seed=1)
    seen = [next(source) for _ in range(20 * 1000)]
    assert not {task.prompt for task in seen} & {task.prompt for task in (*script.suite(), *script.validation_tasks())}
    assert not {task.prompt for task in script.suite()} & {task.prompt for task in script.validation_tasks()}
    assert not any(script.reserved(task.prompt) for task in seen)
    assert all(script.reserved(task.prompt) for task in script.suite())
    assert {task.kind for task in seen[:20]} == set(script.KINDS), "the kinds take turns"


def test_suite_is_the_committed_one():
    rows = json.loads((MODELS / "tiny-moe-suite.json").read_text(encoding="utf-8"))["tasks"]
    committed = [(row["kind"], row["prompt"], row["answer"]) for row in rows]
    assert committed == [(task.kind, task.prompt, task.answer) for task in script.suite()]


def dense(x, layer):
    """Every expert on every token, in float64; the weights of the experts that are not chosen are zero."""
    x, router, gate, up, down = (p.detach().double() for p in (x, layer.router, layer.gate, layer.up, layer.down))
    logits = x @ router.T
    chosen = logits >= logits.sort(dim=-1, descending=True).values[:, layer.shape.experts_used - 1, None]
    weight = torch.where(chosen, logits.exp(), 0.0)
    weight = weight / weight.sum(-1, keepdim=True)
    g, u = torch.einsum("tw,eiw->tei", x, gate), torch.einsum("tw,eiw->tei", x, up)
    return torch.einsum("te,tei,ewi->tw", weight, g / (1 + (-g).exp()) * u, down)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_gathered_experts_equal_the_dense_definition(seed, tokens):
    torch.manual_seed(seed)
    layer = script.Experts(script.Shape(width=32, expert_width=48, experts=8))
    x = torch.randn(tokens, 32)
    # float32 sums of 48 terms of size one: 1e-5 is some ten times their rounding.
    assert torch.allclose(layer(x).double(), dense(x, layer), rtol=0, atol=1e-5)


def test_gathered_experts_pass_gradients_like_the_dense_definition():
    torch.manual_seed(0)
    layer = script.Experts(script.Shape(width=8, expert_width=12, experts=4)).double()
    x = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))


def test_balance_is_one_when_the_load_is_even():
    layer = script.Experts(script.Shape(width=8, expert_width=8, experts=8, experts_used=1))
    with torch.no_grad():
        layer.router.copy_(torch.eye(8))
    layer(torch.eye(8))
    assert layer.balance.item() == pytest.approx(1.0)
    layer(torch.eye(8)[:1].repeat(8, 1) * 50)
    assert layer.balance.item() == pytest.approx(8.0)


def test_padding_changes_nothing():
    torch.manual_seed(0)
    model = script.TinyMoe(script.Shape(layers=2))
    tasks = [script.Task("copy", "copy ab=", "ab"), script.Task("reverse", "reverse abcdef=", "fedcba")]
    together = model(*script.batch(tasks)[:3])
    alone = torch.cat([model(*script.batch([task])[:3]) for task in tasks])
    assert torch.allclose(together, alone, atol=1e-4)


def test_batch_teaches_the_answer_and_its_end():
    tokens, lengths, wanted, targets = script.batch([script.Task("add", "add 1=", "23"), script.Task("x", "y=", "4")])
    assert lengths.tolist() == [8, 3]
    assert bytes(targets.tolist()) == b"23\n4\n"
    assert bytes(tokens[wanted].tolist()) == b"=2" + b"3" + b"=4"


def test_export_holds_the_values_that_were_scored(tmp_path):
    torch.manual_seed(0)
    model = script.TinyMoe(script.Shape(layers=1))
    tensors, stored = script.as_stored(model)
    script.write_gguf(tmp_path / "a.gguf", model.shape, tensors)
    script.write_gguf(tmp_path / "b.gguf", model.shape, tensors)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert read.keys() == tensors.keys()
    for name, field in script.EXPERT_TENSORS.items():
        tensor, trained = read[f"blk.0.{name}.weight"], getattr(model.experts[0], field).detach().numpy()
        decoded = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(decoded, getattr(stored.experts[0], field).detach().numpy())
        assert np.linalg.norm(decoded - trained) < 0.02 * np.linalg.norm(trained)


def small_run(tmp_path, monkeypatch):
    """Return options for a run of seconds: one layer, nine examples a step, five validation tasks."""
    monkeypatch.setattr(script, "Shape", functools.partial(script.Shape, layers=1))
    monkeypatch.setattr(script, "validation_tasks", lambda: script.suite()[::9])
    paths = ["--out", str(tmp_path / "m.gguf"), "--checkpoint", str(tmp_path / "m.pt")]
    return [*paths, "--batch", "9", "--threads", "1"]


def test_same_seed_same_file(tmp_path, monkeypatch):
    options = small_run(tmp_path, monkeypatch)
    assert script.main([*options, "--steps", "2"]) == 0
    first = (tmp_path / "m.gguf").read_bytes()
    assert script.main([*options, "--from-checkpoint"]) == 0
    assert (tmp_path / "m.gguf").read_bytes() == first
    assert script.main([*options, "--steps", "2"]) == 0
    assert (tmp_path / "m.gguf").read_bytes() == first
    assert script.main([*options, "--steps", "2", "--seed", "2"]) == 0
    assert (tmp_path / "m.gguf").read_bytes() != first


def test_stopped_training_still_exports(tmp_path, monkeypatch):
    options = small_run(tmp_path, monkeypatch)
    handler = signal.getsignal(signal.SIGTERM)
    learning_rate = script.learning_rate

    def stop_after_one(*args):
        signal.raise_signal(signal.SIGTERM)
        return learning_rate(*args)

    monkeypatch.setattr(script, "learning_rate", stop_after_one)
    assert script.main([*options, "--steps", "1000"]) == 0
    assert torch.load(tmp_path / "m.pt", weights_only=True)["steps"] == 1
    assert len(gguf.GGUFReader(tmp_path / "m.gguf").tensors) == 2 + 10 * script.Shape().layers
    assert signal.getsignal(signal.SIGTERM) is handler
