"""Messages of a chat to a prompt, by the model file's own template.

A file without a template is no chat model: the messages' texts are then put together, a line each, without their roles,
and the model goes on behind the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from host.model_file import ModelFile, ModelFileError
from host.runtime import RequestError
from host.tokenizer import Tokenizer

KEY = "tokenizer.chat_template"


class Chat:
    """A model file's way to write a chat. ``template`` is None where it has none.

    ``ModelFileError`` if its template is none that Jinja can read.
    """

    def __init__(self, model: ModelFile, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begin = tokenizer.encode("")
        template = model.metadata.get(KEY)
        self.template = template if isinstance(template, str) and template.strip() else None
        if self.template is None:
            return
        tokens = model.array("tokenizer.ggml.tokens") or []
        self._special = {}
        for name in ("bos", "eos"):
            number = model.metadata.get(f"tokenizer.ggml.{name}_token_id")
            if number is not None and int(number) < len(tokens):
                self._special[f"{name}_token"] = tokens[int(number)]
        import jinja2

        try:
            self.text([{"role": "user", "content": ""}])
        except RequestError:
            pass  # it wants other messages
        except jinja2.TemplateError as error:
            raise ModelFileError(f"{model.path}: key {KEY!r}: {error}; get the file again") from error

    def text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt of ``messages``, each with ``role`` and ``content``; ``RequestError`` if the template refuses."""
        if self.template is None:
            return "\n".join(message["content"] for message in messages)
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=self.template,
                add_generation_prompt=True,
                **self._special,
            )
        except jinja2.TemplateSyntaxError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(f"the model's chat template does not take these messages: {error}") from error
        return rendered[0]

    def tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt as tokens. What begins a text is there once, though template and tokenizer may both write it."""
        tokens = self._tokenizer.encode(self.text(messages))
        begin = self._begin
        return tokens[len(begin) :] if begin and tokens[: 2 * len(begin)] == 2 * begin else tokens
