"""Tokens against llama.cpp's, on tokenizers trained here, and text that comes byte by byte."""

import json

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, TokenType
from tokenizers import Tokenizer as Trained
from tokenizers import models, pre_tokenizers, trainers

from host.model_file import ModelFile, ModelFileError
from host.tokenizer import SPLITS, TextStream, Tokenizer
from models.byte_tokenizer import byte_tokens
from models.synthetic import Shape, tensors
from tests.models.llama import LlamaCpp

SHAPE = Shape(
    name="t", architecture="llama", layers=1, experts=2, experts_used=1, width=256, expert_width=256, heads=4,
    kv_heads=4, head_width=64, context=512, rope_base=1e4, norm_epsilon=1e-5,
)  # fmt: skip
TEXT = (
    "The engine walks 1234567 experts, in ascending order; it's asked for 3 pieces.\n    def f(x):\n\t\treturn x**2  "
    "# we'll see, they'RE 100% sure\n\n\nÜber naïve café - 東京の天気は晴れ、12時。 emoji: 🙂🙃 \u00a0end  "
)
SPECIAL = "<|end|>"


def corpus() -> list[str]:
    rng = np.random.default_rng(1)
    words = [word + " " for word in TEXT.split()]
    return [TEXT, *("".join(rng.choice(words, 20)) for _ in range(50))]


def byte_level(pre: str) -> dict:
    """A byte-level BPE of 500 tokens; its merges cross what ``pre`` would cut, so that the cuts matter."""
    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=byte_tokens(), show_progress=False)  # pyright: ignore[reportCallIssue]
    trained.train_from_iterator(corpus(), trainer)
    found = trained.get_vocab()
    tokens = [*sorted(found, key=lambda token: found[token]), SPECIAL]
    merges = json.loads(trained.to_str())["model"]["merges"]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "types": [TokenType.NORMAL] * (len(tokens) - 1) + [TokenType.CONTROL],
        "merges": [" ".join(merge) for merge in merges],
    }


def sentencepiece() -> dict:
    """Tokens as SentencePiece's BPE has them: unknown, control, 256 bytes, then pieces by falling score."""
    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=400, show_progress=False))  # pyright: ignore[reportCallIssue]
    found = trained.get_vocab()
    merged = sorted((token for token in found if len(token) > 1), key=lambda token: found[token])
    letters = sorted(token for token in found if len(token) == 1)
    tokens = ["<unk>", "<s>", SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * (len(tokens) - len(types))
    scores = [0.0] * 259 + [-float(place) for place in range(len(tokens) - 259)]
    return {"model": "llama", "tokens": tokens, "types": types, "scores": scores}


def write(path, given: dict, **more):
    """A model file of one small layer with that tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    count = len(given["tokens"])
    for key, value in {
        "vocab_size": count, "context_length": 512, "embedding_length": 256, "block_count": 1,
        "feed_forward_length": 256, "attention.head_count": 4, "attention.head_count_kv": 4,
        "rope.dimension_count": 64, "expert_count": 2, "expert_used_count": 1,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(given["model"])
    if "pre" in given:
        writer.add_tokenizer_pre(given["pre"])
    writer.add_token_list(given["tokens"])
    writer.add_token_types(given["types"])
    if "merges" in given:
        writer.add_token_merges(given["merges"])
    if "scores" in given:
        writer.add_token_scores(given["scores"])
    for key, value in more.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{key}", value)
    for tensor in tensors(SHAPE, 1):
        shape = (count, *tensor.shape[1:]) if tensor.name in ("token_embd.weight", "output.weight") else tensor.shape
        sized = tensor._replace(shape=shape)
        data = sized.data(1, 0, sized.items).reshape(*shape[:-1], -1)
        if tensor.type == GGMLQuantizationType.Q6_K:
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.type)
        else:
            kind = np.float16 if tensor.type == GGMLQuantizationType.F16 else np.float32
            writer.add_tensor(tensor.name, data.view(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_tokens(path) -> dict[str, list[int]]:
    """llama.cpp's tokens of each piece."""
    model = LlamaCpp(path, context=512, threads=1)
    return {piece: model.tokenize(piece) for piece in pieces()}


def pieces() -> list[str]:
    return [TEXT, *TEXT.splitlines(), "a", " a", "  a", "123 4567", "it's", f"x{SPECIAL}y", "\n \n", "é", "\U0001f642"]


KINDS = {**{pre: (byte_level, pre) for pre in SPLITS}, "sentencepiece": (sentencepiece,)}


@pytest.mark.parametrize("kind", KINDS)
def test_same_tokens_as_llama_cpp(tmp_path, kind):
    make, *args = KINDS[kind]
    path = write(tmp_path / "t.gguf", make(*args), bos_token_id=1, eos_token_id=2)
    given = llama_tokens(path)
    with ModelFile.open(path) as model:
        tokenizer = Tokenizer(model)
        for piece, tokens in given.items():
            assert tokenizer.encode(piece) == tokens, piece


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("t") / "t.gguf", byte_level("gpt-2"), eos_token_id=500, eot_token_id=7)
    with ModelFile.open(path) as model:
        return Tokenizer(model)


def test_decode(byte_tokenizer):
    for piece in pieces():
        assert byte_tokenizer.decode(byte_tokenizer.encode(piece)) == piece.replace(SPECIAL, "")
    assert byte_tokenizer.size == 501
    assert byte_tokenizer.ends == {500, 7}
    assert byte_tokenizer.bytes_of(500) == b""
    for token in (-1, 501):
        with pytest.raises(IndexError, match=r"token must be in 0\.\.500"):
            byte_tokenizer.bytes_of(token)


def test_decode_sentencepiece(tmp_path):
    path = write(tmp_path / "t.gguf", sentencepiece(), bos_token_id=1, eos_token_id=2)
    with ModelFile.open(path) as model:
        tokenizer = Tokenizer(model)
    tokens = tokenizer.encode("Über 🙂\n")
    assert tokens[0] == 1
    assert tokenizer.decode(tokens) == " Über 🙂\n"


@pytest.mark.parametrize("seed", range(3))
def test_stream_of_bytes(byte_tokenizer, seed):
    """Cut anywhere: nothing but whole characters comes, all of it, whatever the bytes are."""
    rng = np.random.default_rng(seed)
    data = [*TEXT.encode(), *rng.integers(0, 256, 50).tolist(), *"🙂".encode()[:2]]
    token = {byte_tokenizer.bytes_of(number): number for number in range(500)}
    stream = TextStream(byte_tokenizer)
    parts = [stream.put(token[bytes([byte])]) for byte in data] + [stream.finish()]
    assert "".join(parts) == bytes(data).decode(errors="replace")
    text = len(TEXT.encode())
    assert "\ufffd" not in "".join(parts[: text - 1])
    assert [part for part in parts[:text] if part] == list(TEXT)


@pytest.mark.parametrize("stop", [["abc"], ["bcx", "abcd", "c"], ["aab"], ["é!"], ["zz"], []])
@pytest.mark.parametrize("text", ["aabcd", "ababcabc", "é!", "aaé", "abcaabcdzzz"])
def test_stream_stops_where_the_text_has_it(byte_tokenizer, text, stop):
    stream = TextStream(byte_tokenizer, stop)
    token = {byte_tokenizer.bytes_of(number): number for number in range(500)}
    got = ""
    for byte in text.encode():
        got += stream.put(token[bytes([byte])])
        assert not any(each in got for each in stop)
        if stream.stopped:
            break
    got += stream.finish()
    # The first to be complete, byte by byte, is the one that stops.
    whole = next((text[:n] for n in range(len(text) + 1) if any(text[:n].endswith(each) for each in stop)), None)
    expected = text if whole is None else whole[: min(whole.find(each) for each in stop if each in whole)]
    assert (got, stream.stopped) == (expected, whole is not None)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model": "bert"}, "key 'tokenizer.ggml.model' = 'bert': known are 'gpt2' and 'llama'"),
        ({"pre": "unheard-of"}, "key 'tokenizer.ggml.pre' = 'unheard-of' is not known; known are gpt-2, olmo"),
    ],
)
def test_unknown_tokenizers(tmp_path, change, part):
    path = write(tmp_path / "t.gguf", {**byte_level("gpt-2"), **change})
    with ModelFile.open(path) as model, pytest.raises(ModelFileError) as caught:
        Tokenizer(model)
    assert str(caught.value).startswith(f"{path}: {part}")
