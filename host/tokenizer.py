"""Text to tokens and back, as a GGUF file describes it: byte-level BPE and SentencePiece's BPE, through ``tokenizers``.

A token's bytes are exact, so text can be put together byte by byte: a character that comes in several tokens appears
when its last byte is there.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from host.model_file import ModelFile, ModelFileError

CONTROL, USER_DEFINED, BYTE = 3, 4, 6
"""GGUF's token types that are not plain text."""

_DIGITS = r"\p{N}"
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CASELESS}|\p{{N}}{{1,3}}|{_SYMBOLS}"
SPLITS = {
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "refact": (_DIGITS, _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (rf"{_CASELESS}|\p{{N}}|{_SYMBOLS}",),
}
"""How text is cut before merging, by ``tokenizer.ggml.pre``: one pattern after another. Granite's is ``refact``."""


class Tokenizer:
    """A file's tokenizer.

    ``encode`` and ``decode`` between text and token ids, ``bytes_of`` a token's own bytes. ``ends``: the tokens that
    end a text. ``ModelFileError`` if the file describes none that is known here.
    """

    def __init__(self, model: ModelFile) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
        from tokenizers import Regex as Pattern

        self._path = model.path
        tokens = model.array("tokenizer.ggml.tokens")
        kind = model.metadata.get("tokenizer.ggml.model")
        if tokens is None or kind not in ("gpt2", "llama"):
            raise ModelFileError(
                f"{model.path}: key 'tokenizer.ggml.model' = {kind!r}: known are 'gpt2' and 'llama', with "
                "'tokenizer.ggml.tokens'"
            )
        types = model.array("tokenizer.ggml.token_type") or [1] * len(tokens)
        vocabulary = {token: number for number, token in enumerate(tokens)}
        if kind == "gpt2":
            pre = model.metadata.get("tokenizer.ggml.pre")
            if not isinstance(pre, str) or pre not in SPLITS:
                raise ModelFileError(
                    f"{model.path}: key 'tokenizer.ggml.pre' = {pre!r} is not known; known are {', '.join(SPLITS)}"
                )
            pairs = (merge.partition(" ")[::2] for merge in model.array("tokenizer.ggml.merges") or [])
            # One whose result is no token stands in some files because llama.cpp wants at least one.
            built = Tokenizer(models.BPE(vocabulary, [pair for pair in pairs if "".join(pair) in vocabulary]))
            splits = [pre_tokenizers.Split(Pattern(split), "isolated") for split in SPLITS[pre]]
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            built.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
            built.decoder = decoders.ByteLevel()
        else:
            scores = model.array("tokenizer.ggml.scores") or [0.0] * len(tokens)
            unknown = tokens[int(model.metadata.get("tokenizer.ggml.unknown_token_id", 0))]
            merges = _merges(vocabulary, scores)
            built = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
            prefix = [normalizers.Prepend("▁")] if model.metadata.get("tokenizer.ggml.add_space_prefix", True) else []
            built.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
        special = [
            AddedToken(token, normalized=False, special=number == CONTROL)
            for token, number in zip(tokens, types, strict=True)
            if number in (CONTROL, USER_DEFINED)
        ]
        built.add_tokens(special)
        self._built = built
        self._bytes = _token_bytes(tokens, types, kind == "gpt2")
        known = {name: model.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
        self.ends = {int(number) for number in (known["eos"], known["eot"]) if number is not None}
        # Where the file does not say: as llama.cpp does.
        usual = kind == "llama" or model.metadata.get("tokenizer.ggml.pre") == "llama-bpe"
        begin = model.metadata.get("tokenizer.ggml.add_bos_token", usual)
        self._begin = [int(known["bos"])] if begin and known["bos"] is not None else []

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``, behind the token that begins a text where the file asks for it."""
        return self._begin + self._built.encode(text, add_special_tokens=False).ids

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes; none for one that only controls. ``IndexError`` for a token that is not there."""
        if not 0 <= token < len(self._bytes):
            raise IndexError(f"token must be in 0..{len(self._bytes) - 1}, not {token} ({self._path})")
        return self._bytes[token]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens``; what is no UTF-8 becomes U+FFFD."""
        return b"".join(self.bytes_of(token) for token in tokens).decode(errors="replace")


class TextStream:
    """Tokens in, text out as soon as it is certain; ends at the first of the ``stop`` strings.

    ``put`` returns the text that a token completes, ``finish`` what was held back: bytes of an unfinished character,
    and text that could have been the beginning of a stop string. ``stopped`` tells that one came; it is left out.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def put(self, token: int) -> str:
        return self._add(self._decoder.decode(self._tokenizer.bytes_of(token)))

    def finish(self) -> str:
        text = self._add(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _add(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped, self._held = True, ""
            return text[:found]
        keep = max(
            (n for stop in self._stop for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that make SentencePiece's tokens: the pair whose result scores highest is merged first."""
    found = []
    for token in vocabulary:
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[vocabulary[token]], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _token_bytes(tokens: list[str], types: list[int], byte_level: bool) -> list[bytes]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    # GPT-2's spelling: printable bytes of Latin-1 stand for themselves, the others for characters from U+0100 on.
    spelled = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}

    def one(token: str, kind: int) -> bytes:
        if kind == CONTROL:
            return b""
        if byte_level:
            if kind != USER_DEFINED and all(character in spelled for character in token):
                return bytes(spelled[character] for character in token)
            return token.encode()
        return bytes([int(token[3:5], 16)]) if kind == BYTE else token.replace("▁", " ").encode()

    return [one(token, kind) for token, kind in zip(tokens, types, strict=True)]
