"""Layers of random experts in small files, and golden devices at the far end of a port."""

import errno
import os
import select
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hw.formats.messages import Layer, Mode
from hw.formats.params import Params
from sim.golden import layer as golden
from sim.golden.activations import quantize
from sim.golden.device import GoldenDevice
from sim.golden.layer import Route
from sim.workload import random_blocks

PARAMS = Params(link_bytes=16, max_batch=4, max_width=512, max_expert_width=512, max_experts=8)
HEAD_BYTES = 100
"""Of the file, before its first expert: offsets are not multiples of anything."""
MATRIX_BYTES = 256 * 210
GIVE_UP_TICKS = 3
"""Hundredths of a second after which a frame that stopped coming is given up; much less than a UART's patience."""


@dataclass(frozen=True)
class Case:
    """A layer of 256 x 256, its file, a batch, and what must come out."""

    path: Path
    layer: Layer
    x: NDArray[np.float64]
    routes: list[Route]

    def read(self, offset: int, length: int) -> NDArray[np.uint8]:
        return np.frombuffer(self.path.read_bytes(), np.uint8, length, offset)

    @property
    def sums(self) -> NDArray[np.int64]:
        y, errors = golden.run(self.layer, self.read, quantize(self.x), self.routes)
        assert errors == 0
        return y

    @property
    def requests(self) -> list[tuple[int, int]]:
        return golden.requests(self.layer, self.routes)

    def taped(self) -> "Case":
        return replace(self, layer=replace(self.layer, mode=Mode.TAPE))


def case(folder: Path, seed: int = 1, *, tokens: int = 2, experts: int = 4, used: int = 2) -> Case:
    """Random blocks, vectors and routes; the first expert is nobody's."""
    rng = np.random.default_rng(seed)
    blocks = random_blocks(rng, 3 * experts * 256)
    path = folder / f"experts-{seed}.bin"
    path.write_bytes(bytes(HEAD_BYTES) + blocks.tobytes() + b"\0")
    size = experts * MATRIX_BYTES
    layer = Layer(256, 256, experts, (HEAD_BYTES, HEAD_BYTES + size, HEAD_BYTES + 2 * size))
    routes = [
        Route(token, int(expert), int(rng.integers(1, 65537)))
        for token in range(tokens)
        for expert in rng.choice(np.arange(1, experts), used, replace=False)
    ]
    return Case(path, layer, rng.normal(0, 1, (tokens, 256)), routes)


def refuse_direct_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """``O_DIRECT`` is an invalid argument from now on, as on filesystems that have no such thing."""
    real = os.open

    def refuse(name: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(name, flags)

    monkeypatch.setattr(os, "open", refuse)


class Peer:
    """A golden device that answers through file descriptors, in a thread; a context manager that ends it."""

    def __init__(self, reader: int, writer: int, params: Params = PARAMS) -> None:
        self.device = GoldenDevice(params)
        self._reader, self._writer = reader, writer
        self._stop, self._silent = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Peer":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def silence(self) -> None:
        """Take everything, answer nothing."""
        self._silent.set()

    def speak(self) -> None:
        """Answer again, as after power-up."""
        self.device = GoldenDevice(self.device.engine.params)
        self._silent.clear()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        silent = 0
        while not self._stop.is_set():
            if select.select([self._reader], [], [], 0.01)[0]:
                silent = 0
                data = os.read(self._reader, 1 << 16)
                if not data:
                    return
                if self._silent.is_set():
                    continue
                self.device.write(data)
            else:
                silent += 1
                if silent == GIVE_UP_TICKS:
                    self.device.poke()
            rest = memoryview(self.device.read())
            while rest and not self._stop.is_set():
                if select.select([], [self._writer], [], 0.02)[1]:
                    rest = rest[os.write(self._writer, rest[:512]) :]
