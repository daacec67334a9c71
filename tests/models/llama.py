"""llama.cpp as the outside truth."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest


class LlamaCpp:
    """llama.cpp on the CPU with one file loaded, decoding greedily; close it by ``del``.

    ``load_mode``: how the file gets into memory; "AUTO", "MMAP" or "NONE", which reads it.
    """

    def __init__(self, path: Path, *, context: int = 128, threads: int = 2, load_mode: str = "AUTO") -> None:
        xllamacpp = pytest.importorskip("xllamacpp")
        params = xllamacpp.CommonParams()
        params.load_mode = getattr(xllamacpp.llama_load_mode, f"LLAMA_LOAD_MODE_{load_mode}")
        params.model.path = str(path)
        params.offline = True
        params.n_gpu_layers = 0
        params.n_ctx = context
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.warmup = False
        params.verbosity = -1
        self._server = xllamacpp.Server(params)

    def complete(self, prompt: str | list[int], **more: Any) -> tuple[str, dict[str, Any]]:
        """Return the completion's text and llama.cpp's whole answer; ``more`` goes into the request."""
        request = {"prompt": prompt, "max_tokens": 10, "temperature": 0, "cache_prompt": False}
        answer = self._server.handle_completions(request | more)
        return answer["choices"][0]["text"], answer

    def tokenize(self, text: str) -> list[int]:
        """The tokens of ``text``, with the one that begins a text where the file asks for it."""
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        url, headers = f"{self._server.listening_address}/tokenize", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as answer:
            return json.load(answer)["tokens"]
