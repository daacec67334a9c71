"""Train the small mixture-of-experts model of this directory and write it as GGUF with Q6_K experts.

    python -m models.train_tiny_moe --out models/tiny-moe-q6k.gguf

Makes two files: the model, and beside it ``tiny-moe-suite.json`` with 45 held-out tasks, their answers and what the
model generated. Needs PyTorch (the ``train`` extra) and no data: every task is generated from the seed. Interrupting
(ctrl-C or SIGTERM) stops training and exports what there is; ``--from-checkpoint`` exports again without training.

The architecture is GGUF's ``granitemoe``: RMSNorm, rotary positions on adjacent pairs, grouped-query attention, a
router whose top-k logits go through one softmax, SwiGLU experts, tied embeddings and four scalar multipliers.
"""

import argparse
import hashlib
import json
import math
import random
import signal
import string
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F

from host import q6_k
from models.byte_tokenizer import byte_tokens

# A task is one line: "<word> <arguments>=<answer>\n", ASCII only, so that one byte is one token.

LETTERS = string.ascii_lowercase
END = "\n"
"""Ends every answer; it is also the model's end-of-sequence token."""

SUITE_SEED = 45
TASKS_PER_KIND = 5
RESERVED_ONE_IN = 32
"""One prompt in so many is never trained on: the suite and the validation set come from those alone."""


def _word(rng: random.Random, longest: int = 6, letters: str = LETTERS) -> str:
    return "".join(rng.choices(letters, k=rng.randint(3, longest)))


def _copy(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return f"copy {word}=", word


def _reverse(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return f"reverse {word}=", word[::-1]


def _upper(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return f"upper {word}=", word.upper()


def _sort(rng: random.Random) -> tuple[str, str]:
    word = _word(rng, longest=5)
    return f"sort {word}=", "".join(sorted(word))


def _add(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return f"add {a} {b}=", str(a + b)


def _compare(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    if rng.random() < 0.5:  # half of the pairs differ in the last digit at most, or the first digit would decide
        b = a // 10 * 10 + rng.choice((a % 10, rng.randint(0, 9)))
    return f"compare {a} {b}=", "<" if a < b else ">" if a > b else "="


# Counting and look-up keep to a few letters. With all 26, finding the letter that equals the last one stayed at
# guessing for as long as training may last here: it takes two attention heads that pay only together.


def _count(rng: random.Random) -> tuple[str, str]:
    word, letter = _word(rng, letters="abc"), rng.choice("abc")
    return f"count {word} {letter}=", str(word.count(letter))


def _look_up(rng: random.Random) -> tuple[str, str]:
    table, key = {letter: rng.choice(string.digits) for letter in "abcd"}, rng.choice("abcd")
    return f"find {''.join(k + v for k, v in table.items())} {key}=", table[key]


def _next_letter(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return f"next {word}=", "".join(LETTERS[(LETTERS.index(c) + 1) % 26] for c in word)


KINDS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "copy": _copy,
    "reverse": _reverse,
    "upper-case": _upper,
    "sort letters": _sort,
    "add": _add,
    "compare": _compare,
    "count": _count,
    "look-up": _look_up,
    "next letter": _next_letter,
}

TURN = {"reverse": 2, "sort letters": 4, "add": 4, "compare": 3, "count": 2, "look-up": 2}
"""How often a kind comes in one turn of training, where more than once: these take more examples to learn."""


@dataclass(frozen=True)
class Task:
    """``prompt`` ends in ``=``; ``answer`` is what greedy decoding must produce before ``END``."""

    kind: str
    prompt: str
    answer: str


def reserved(prompt: str) -> bool:
    """Whether ``prompt`` is kept out of training; a property of its bytes, so no list has to be carried along."""
    return hashlib.sha256(prompt.encode()).digest()[0] % RESERVED_ONE_IN == 0


def draw(rng: random.Random, kind: str, *, held_out: bool) -> Task:
    """Draw one task of ``kind`` from the reserved prompts or from the others."""
    while True:
        prompt, answer = KINDS[kind](rng)
        if reserved(prompt) == held_out:
            return Task(kind, prompt, answer)


def held_out_tasks(seed: int, per_kind: int, *, without: frozenset[str] = frozenset()) -> list[Task]:
    """Return ``per_kind`` different reserved tasks of every kind, none whose prompt is in ``without``."""
    rng = random.Random(seed)
    tasks = []
    for kind in KINDS:
        seen = set(without)
        while len(seen) < len(without) + per_kind:
            task = draw(rng, kind, held_out=True)
            if task.prompt not in seen:
                seen.add(task.prompt)
                tasks.append(task)
    return tasks


def suite() -> list[Task]:
    """Return the 45 tasks that the score is about."""
    return held_out_tasks(SUITE_SEED, TASKS_PER_KIND)


def validation_tasks() -> list[Task]:
    """Return 450 other held-out tasks; a finer measure to watch training by than the suite."""
    return held_out_tasks(SUITE_SEED + 1, 50, without=frozenset(task.prompt for task in suite()))


def training_tasks(seed: int) -> Iterator[Task]:
    """Yield tasks without end, each kind as often as ``TURN`` says, never a reserved prompt."""
    rng = random.Random(seed)
    turn = [kind for kind in KINDS for _ in range(TURN.get(kind, 1))]
    while True:
        for kind in turn:
            yield draw(rng, kind, held_out=False)


@dataclass(frozen=True)
class Shape:
    """Sizes and constants of the model, as its GGUF metadata states them.

    The four multipliers are the architecture's own. None is at the value that would make it disappear, so a reader
    that leaves one out generates something else.
    """

    layers: int = 3
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_width: int = 32
    experts: int = 8
    experts_used: int = 2
    expert_width: int = 256
    vocabulary: int = 256
    context: int = 128
    norm_epsilon: float = 1e-5
    rope_base: float = 10000.0
    embedding_scale: float = 8.0  # multiplies the embedding
    residual_scale: float = 0.875  # multiplies each block's output before it is added
    attention_scale: float = 0.125  # multiplies query times key
    logit_scale: float = 4.0  # divides the logits


def rotate(x: torch.Tensor, position: torch.Tensor, base: float) -> torch.Tensor:
    """Turn each adjacent pair of ``x[token, head, :]`` by ``position[token] * base**(-pair / pairs)`` radians."""
    pairs = x.shape[-1] // 2
    angle = position[:, None].float() * base ** (-torch.arange(pairs) / pairs)
    cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(torch.nn.Module):
    """Causal grouped-query attention over right-padded rows; inputs and outputs are the unpadded tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, head = shape.width, shape.head_width
        self.q = torch.nn.Parameter(torch.randn(shape.heads * head, width) / math.sqrt(width))
        self.k = torch.nn.Parameter(torch.randn(shape.kv_heads * head, width) / math.sqrt(width))
        self.v = torch.nn.Parameter(torch.randn(shape.kv_heads * head, width) / math.sqrt(width))
        self.out = torch.nn.Parameter(torch.randn(width, shape.heads * head) / math.sqrt(shape.heads * head))

    def forward(self, x: torch.Tensor, slots: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Attend; token ``t`` of ``x`` stands at ``divmod(slots[t], columns)`` of the ``rows`` x ``columns`` batch."""
        shape, position = self.shape, slots % columns

        def padded(flat: torch.Tensor) -> torch.Tensor:  # (tokens, heads, head) -> (rows, heads, columns, head)
            grid = flat.new_zeros(rows * columns, *flat.shape[1:]).index_copy(0, slots, flat)
            return grid.view(rows, columns, *flat.shape[1:]).transpose(1, 2)

        q = rotate((x @ self.q.T).view(-1, shape.heads, shape.head_width), position, shape.rope_base)
        k = rotate((x @ self.k.T).view(-1, shape.kv_heads, shape.head_width), position, shape.rope_base)
        v = (x @ self.v.T).view(-1, shape.kv_heads, shape.head_width)
        group = shape.heads // shape.kv_heads
        y = F.scaled_dot_product_attention(
            padded(q),
            padded(k).repeat_interleave(group, dim=1),
            padded(v).repeat_interleave(group, dim=1),
            is_causal=True,
            scale=shape.attention_scale,
        )
        return y.transpose(1, 2).reshape(rows * columns, -1).index_select(0, slots) @ self.out.T


class Experts(torch.nn.Module):
    """Router and SwiGLU experts; each token goes through the ``experts_used`` experts with the largest logits.

    ``balance`` is set by every forward pass: ``experts * sum(share of choices * mean router probability)``, which is 1
    when the load is even and grows with imbalance. ``load`` is the share of choices per expert.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        n, width, inner = shape.experts, shape.width, shape.expert_width
        self.router = torch.nn.Parameter(torch.randn(n, width) / math.sqrt(width))
        self.gate = torch.nn.Parameter(torch.randn(n, inner, width) / math.sqrt(width))
        self.up = torch.nn.Parameter(torch.randn(n, inner, width) / math.sqrt(width))
        self.down = torch.nn.Parameter(torch.randn(n, width, inner) / math.sqrt(inner))
        self.balance = torch.ones(())
        self.load = torch.zeros(n)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return expert indices and weights, both (tokens, experts_used); the weights of a token add up to 1."""
        logits = x @ self.router.T
        best, chosen = logits.topk(self.shape.experts_used, dim=-1)
        self.load = torch.bincount(chosen.flatten(), minlength=self.shape.experts) / chosen.numel()
        self.balance = self.shape.experts * (self.load * logits.softmax(-1).mean(0)).sum()
        return chosen, best.softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gather each expert's tokens, so that an expert costs what it is used."""
        chosen, weight = self.route(x)
        order = chosen.flatten().argsort(stable=True)  # choices grouped by expert
        token = order // self.shape.experts_used
        gathered = x.index_select(0, token)
        outputs, start = [], 0
        for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=self.shape.experts).tolist()):
            rows = gathered[start : start + count]
            hidden = F.silu(rows @ self.gate[expert].T) * (rows @ self.up[expert].T)
            outputs.append(hidden @ self.down[expert].T)
            start += count
        scaled = torch.cat(outputs) * weight.flatten().index_select(0, order)[:, None]
        return torch.zeros_like(x).index_add(0, token, scaled)


class TinyMoe(torch.nn.Module):
    """The whole decoder, ``Shape`` in, logits out."""

    attention: Any  # a ModuleList has no type for its members
    experts: Any

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = torch.nn.Parameter(torch.randn(shape.vocabulary, shape.width) / 16)
        self.attention = torch.nn.ModuleList(Attention(shape) for _ in range(shape.layers))
        self.experts = torch.nn.ModuleList(Experts(shape) for _ in range(shape.layers))
        self.attention_norm = torch.nn.ParameterList(torch.ones(shape.width) for _ in range(shape.layers))
        self.expert_norm = torch.nn.ParameterList(torch.ones(shape.width) for _ in range(shape.layers))
        self.norm = torch.nn.Parameter(torch.ones(shape.width))

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.shape.width,), weight, self.shape.norm_epsilon)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return logits (wanted places, vocabulary) in row order.

        ``tokens`` is (rows, columns), right-padded with anything to ``lengths``; ``wanted`` is a mask of that shape
        within the lengths.
        """
        rows, columns = tokens.shape
        inside = torch.arange(columns) < lengths[:, None]
        slots = inside.flatten().nonzero().squeeze(1)
        x = self.embedding[tokens.flatten()[slots]] * self.shape.embedding_scale
        for attention, experts, norm_a, norm_e in zip(
            self.attention, self.experts, self.attention_norm, self.expert_norm, strict=True
        ):
            x = x + attention(self._normed(x, norm_a), slots, rows, columns) * self.shape.residual_scale
            x = x + experts(self._normed(x, norm_e)) * self.shape.residual_scale
        x = x[wanted.flatten()[slots]]
        return self._normed(x, self.norm) @ self.embedding.T / self.shape.logit_scale

    def balance(self) -> torch.Tensor:
        """Mean over the layers of the last forward pass's ``Experts.balance``."""
        return torch.stack([experts.balance for experts in self.experts]).mean()

    def load(self) -> list[list[float]]:
        """Share of choices per layer and expert in the last forward pass."""
        return [experts.load.tolist() for experts in self.experts]


def batch(tasks: list[Task]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (tokens, lengths, wanted, targets) that teach each task's answer and its end, not its prompt."""
    lines = [(task.prompt + task.answer + END).encode() for task in tasks]
    longest = max(map(len, lines))
    grid = np.zeros((len(lines), longest), np.int64)
    for row, line in enumerate(lines):
        grid[row, : len(line)] = list(line)
    lengths = torch.tensor([len(line) - 1 for line in lines])  # the last byte is only ever a target
    starts = torch.tensor([len(task.prompt) - 1 for task in tasks])
    columns = torch.arange(longest - 1)
    wanted = (columns >= starts[:, None]) & (columns < lengths[:, None])
    tokens = torch.from_numpy(grid)
    return tokens[:, :-1], lengths, wanted, tokens[:, 1:][wanted]


@torch.no_grad()
def generate(model: TinyMoe, prompts: list[str], limit: int = 10) -> list[str]:
    """Decode greedily until ``END`` or ``limit`` bytes; returns the text before ``END``."""
    texts = [prompt.encode() for prompt in prompts]
    starts = [len(text) for text in texts]
    going = list(range(len(texts)))
    for _ in range(limit):
        if not going:
            break
        longest = max(len(texts[i]) for i in going)
        tokens = torch.tensor([list(texts[i].ljust(longest, b"\0")) for i in going])
        lengths = torch.tensor([len(texts[i]) for i in going])
        best = model(tokens, lengths, torch.arange(longest) == lengths[:, None] - 1).argmax(-1).tolist()
        for i, byte in zip(going, best, strict=True):
            texts[i] += bytes([byte])
        going = [i for i in going if texts[i][-1:] != END.encode()]
    return [text[start:].split(END.encode())[0].decode("latin-1") for text, start in zip(texts, starts, strict=True)]


def score(model: TinyMoe, tasks: list[Task]) -> tuple[dict[str, int], list[str]]:
    """Return the number of exact answers per kind and what was generated."""
    generated = generate(model, [task.prompt for task in tasks])
    exact = dict.fromkeys(KINDS, 0)
    for task, text in zip(tasks, generated, strict=True):
        exact[task.kind] += text == task.answer
    return exact, generated


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rise over 100 steps, then fall along half a cosine to a hundredth of ``peak``."""
    fall = 0.01 + 0.99 * (1 + math.cos(math.pi * min(1, step / steps))) / 2
    return peak * min(1, (step + 1) / 100) * fall


def train(model: TinyMoe, args: argparse.Namespace, stop: list[int]) -> int:
    """Train in place and return the steps made: ``args.steps``, or fewer once ``stop`` has an entry."""
    tasks, validation = suite(), validation_tasks()
    held = frozenset(task.prompt for task in (*tasks, *validation))
    source = training_tasks(args.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    began = shown = time.monotonic()
    smooth = math.nan
    for step in range(args.steps):
        if stop:
            return step
        chosen = [next(source) for _ in range(args.batch)]
        if not held.isdisjoint(task.prompt for task in chosen):
            raise AssertionError("a held-out prompt was about to be trained on")
        tokens, lengths, wanted, targets = batch(chosen)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.rate)
        loss = F.cross_entropy(model(tokens, lengths, wanted), targets)
        optimiser.zero_grad(set_to_none=True)
        (loss + args.balance * model.balance()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

        smooth = loss.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss.item()
        now, done = time.monotonic(), step + 1
        if done == 1 or now - shown > 5 or done == args.steps:
            shown, rate = now, done / (now - began)
            print(
                f"step {done}/{args.steps}  loss {smooth:.4f}  {rate * args.batch:.0f} examples/s  "
                f"ETA {(args.steps - done) / rate / 60:.1f} min",
                flush=True,
            )
        if done % args.check_every == 0 or done == args.steps:
            spread = "  ".join(f"{100 * min(load):.0f}-{100 * max(load):.0f} %" for load in model.load())
            wide, _ = score(model, validation)
            exact, _ = score(model, tasks)
            print(
                f"step {done}  suite {sum(exact.values())}/{len(tasks)}  validation {sum(wide.values())}"
                f"/{len(validation)} {list(wide.values())}  expert load per layer {spread}",
                flush=True,
            )
            torch.save({"model": model.state_dict(), "steps": done}, args.checkpoint)
    return args.steps


EXPERT_TENSORS = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}


def as_stored(model: TinyMoe) -> tuple[dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]], TinyMoe]:
    """Return the file's tensors by GGUF name, and the model that has exactly their values.

    Experts are Q6_K, the other matrices F16, router and norms F32.
    """
    kinds = gguf.GGMLQuantizationType
    stored = TinyMoe(model.shape)
    tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] = {}

    def keep(name: str, source: torch.Tensor, target: torch.Tensor, kind: gguf.GGMLQuantizationType) -> None:
        values = source.detach().float().numpy()
        if kind is kinds.Q6_K:
            data = q6_k.quantize(values)
            values = gguf.dequantize(data, kind)
        else:
            data = values.astype(np.float16 if kind is kinds.F16 else np.float32)
            values = data.astype(np.float32)
        tensors[name] = data, kind
        with torch.no_grad():
            target.copy_(torch.from_numpy(values))

    keep("token_embd.weight", model.embedding, stored.embedding, kinds.F16)
    keep("output_norm.weight", model.norm, stored.norm, kinds.F32)
    for n in range(model.shape.layers):
        at, to = model.attention[n], stored.attention[n]
        keep(f"blk.{n}.attn_norm.weight", model.attention_norm[n], stored.attention_norm[n], kinds.F32)
        keep(f"blk.{n}.attn_q.weight", at.q, to.q, kinds.F16)
        keep(f"blk.{n}.attn_k.weight", at.k, to.k, kinds.F16)
        keep(f"blk.{n}.attn_v.weight", at.v, to.v, kinds.F16)
        keep(f"blk.{n}.attn_output.weight", at.out, to.out, kinds.F16)
        keep(f"blk.{n}.ffn_norm.weight", model.expert_norm[n], stored.expert_norm[n], kinds.F32)
        keep(f"blk.{n}.ffn_gate_inp.weight", model.experts[n].router, stored.experts[n].router, kinds.F32)
        for name, field in EXPERT_TENSORS.items():
            source, target = getattr(model.experts[n], field), getattr(stored.experts[n], field)
            keep(f"blk.{n}.{name}.weight", source, target, kinds.Q6_K)
    return tensors, stored


def write_gguf(path: Path, shape: Shape, tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]) -> None:
    """Write ``tensors`` and the metadata that llama.cpp needs to run them."""
    writer = gguf.GGUFWriter(path, "granitemoe")
    writer.add_name("emufpga tiny MoE")
    writer.add_author("the emufpga authors")
    writer.add_license("mit")
    writer.add_description("Byte-level mixture of experts for nine kinds of short tasks; a test object, not a product.")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q6_K)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.expert_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.experts_used)
    writer.add_embedding_scale(shape.embedding_scale)
    writer.add_residual_scale(shape.residual_scale)
    writer.add_attention_scale(shape.attention_scale)
    writer.add_logit_scale(shape.logit_scale)
    tokens = byte_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    # llama.cpp wants a merge; two bytes 255 never follow each other in UTF-8, so this one never applies.
    writer.add_token_merges([f"{tokens[255]} {tokens[255]}"])
    writer.add_eos_token_id(ord(END))
    writer.add_bos_token_id(ord(END))
    writer.add_add_bos_token(False)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_suite(path: Path, tasks: list[Task], generated: list[str]) -> None:
    """Write the suite with what the model, at the file's own weights, generated for it."""
    rows = [
        {"kind": task.kind, "prompt": task.prompt, "answer": task.answer, "generated": text}
        for task, text in zip(tasks, generated, strict=True)
    ]
    body = ",\n".join("    " + json.dumps(row) for row in rows)
    path.write_text(f'{{\n  "seed": {SUITE_SEED},\n  "tasks": [\n{body}\n  ]\n}}\n', encoding="utf-8")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults are those that made the committed file."""
    parser = argparse.ArgumentParser(description="Train the tiny mixture-of-experts model and write it as GGUF.")
    parser.add_argument(
        "--out", type=Path, required=True, help="GGUF file to write; tiny-moe-suite.json goes beside it"
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("build/tiny-moe.pt"))
    parser.add_argument("--from-checkpoint", action="store_true", help="do not train, export the checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--batch", type=int, default=80, help="examples a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="largest learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--balance", type=float, default=0.02, help="weight of the load-balancing loss")
    parser.add_argument("--threads", type=int, default=2, help="part of the result: sums are split by thread")
    parser.add_argument("--check-every", type=int, default=350, help="steps between scores and checkpoints")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train, export, report; returns the exit status."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    model = TinyMoe(Shape())
    total = sum(p.numel() for p in model.parameters())
    print(f"{total} parameters, torch {torch.__version__}, {args.threads} threads, seed {args.seed}", flush=True)
    began = time.monotonic()
    if args.from_checkpoint:
        model.load_state_dict(torch.load(args.checkpoint, weights_only=True)["model"])
    else:
        stop: list[int] = []
        before_us = {
            number: signal.signal(number, lambda got, _frame: stop.append(got))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            steps = train(model, args, stop)
        finally:
            for number, handler in before_us.items():
                signal.signal(number, handler)
        print(f"trained {steps} steps in {(time.monotonic() - began) / 60:.1f} min", flush=True)
        torch.save({"model": model.state_dict(), "steps": steps}, args.checkpoint)

    tasks = suite()
    before, _ = score(model, tasks)
    tensors, stored = as_stored(model)
    after, generated = score(stored, tasks)
    wide, _ = score(stored, validation_tasks())
    with torch.no_grad():
        stored(*batch(validation_tasks())[:3])
    write_gguf(args.out, model.shape, tensors)
    write_suite(args.out.with_name("tiny-moe-suite.json"), tasks, generated)
    print("exact answers   suite, trained  suite, stored  validation, stored")
    for kind in KINDS:
        print(f"{kind:14}  {before[kind]:14}  {after[kind]:13}  {wide[kind]:18}")
    print(f"{'all':14}  {sum(before.values()):14}  {sum(after.values()):13}  {sum(wide.values()):18}")
    print(f"{'of':14}  {len(tasks):14}  {len(tasks):13}  {len(validation_tasks()):18}")
    for layer, load in enumerate(stored.load()):
        print(f"layer {layer}: share of expert choices, % {' '.join(f'{100 * share:.1f}' for share in load)}")
    print(f"{args.out}: {args.out.stat().st_size} bytes, sha256 {hashlib.sha256(args.out.read_bytes()).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
