"""Chat templates against transformers' own tokenizer."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer as Built
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from host.chat import Chat
from host.model_file import ModelFileError
from host.runtime import RequestError

TOKENS = ["<s>", "</s>", "a", "b"]
TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == "tool" -%}{{ raise_exception("no role " + message.role) }}{%- endif -%}
{{- "[" + message.role + "]" + message.content | trim + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "[assistant]" -}}{%- endif -%}"""
MESSAGES = [{"role": "system", "content": " a "}, {"role": "user", "content": "b {{ bos_token }}"}]


class Letters:
    """A tokenizer whose tokens are characters, and that begins a text with ``begin``."""

    def __init__(self, begin: list[int]) -> None:
        self.begin = begin

    def encode(self, text: str) -> list[int]:
        return self.begin + [ord(c) for c in text.replace("<s>", "\0")]


def chat(template: str | None, begin: tuple[int, ...] = ()) -> Chat:
    metadata = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
    if template is not None:
        metadata["tokenizer.chat_template"] = cast(Any, template)
    model = SimpleNamespace(path="m.gguf", metadata=metadata, array=lambda key: TOKENS)
    return Chat(cast(Any, model), cast(Any, Letters(list(begin))))


def test_template_as_transformers_renders_it():
    built = Built(models.WordLevel({token: n for n, token in enumerate(TOKENS)}, unk_token="a"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert chat(TEMPLATE).text(MESSAGES) == expected
    assert expected == "<s>[system]a</s>[user]b {{ bos_token }}</s>[assistant]"


@pytest.mark.parametrize("template", [None, " "])
def test_without_a_template(template):
    assert chat(template).text(MESSAGES) == " a \nb {{ bos_token }}"


@pytest.mark.parametrize("begin", [(), (0,)])
def test_one_beginning(begin):
    """Template and tokenizer may both write what begins a text."""
    tokens = chat(TEMPLATE, begin).tokens(MESSAGES)
    assert tokens[:2] == [0, ord("[")]
    assert chat(None, begin).tokens(MESSAGES) == [*begin, *map(ord, " a \nb {{ bos_token }}")]


def test_template_that_refuses():
    with pytest.raises(RequestError, match="chat template does not take these messages: no role tool"):
        chat(TEMPLATE).text([{"role": "tool", "content": "a"}])


def test_template_that_is_none():
    with pytest.raises(ModelFileError, match=r"m\.gguf: key 'tokenizer\.chat_template': .*get the file again"):
        chat("{% for %}")
