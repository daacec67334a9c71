"""A SwiGLU expert of a model file, or a cut of one that high-level synthesis can hold."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from host.model_file import ModelFile
from hw.formats.arithmetic import FRACTION_BITS
from hw.formats.messages import WEIGHT_FRACTION_BITS
from hw.formats.q6_k import BLOCK_WEIGHTS
from sim.golden import q6_k
from sim.golden.activations import quantize
from sim.golden.matmul import matmul
from sim.golden.swiglu import swiglu
from sim.workload import expert_blocks, silu, token_vectors

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "models" / "tiny-moe-q6k.gguf"
TEXT = bytes(range(256))
"""Every token of the tiny model once."""

Matrix = NDArray[np.float64]
MATRICES = ("gate", "up", "down")


@dataclass(frozen=True)
class Expert:
    """The first ``size`` rows and columns of an expert's matrices, and the vectors that it is given.

    Attributes
    ----------
    gate, up, down
        ``(size, size)`` float64: the model file's Q6_K values, exact.
    blocks
        The same rows as raw Q6_K ``(size, columns, 210)``, by the matrices' names; whole blocks.
    x
        ``(tokens, size)`` float64: the model's embeddings under the layer's norm, cut like the matrices.
    """

    gate: Matrix
    up: Matrix
    down: Matrix
    blocks: dict[str, NDArray[np.uint8]]
    x: Matrix

    @property
    def size(self) -> int:
        """Rows and columns of each matrix."""
        return self.x.shape[1]

    def steps(self) -> dict[str, Matrix]:
        """In float64, every value between: ``x, gate, up, sigmoid, silu, hidden, y``, each ``(tokens, size)``."""
        gate, up = self.x @ self.gate.T, self.x @ self.up.T
        hidden = silu(gate) * up
        y = hidden @ self.down.T
        sigmoid = np.exp(-np.logaddexp(0, -gate))
        return dict(x=self.x, gate=gate, up=up, sigmoid=sigmoid, silu=silu(gate), hidden=hidden, y=y)

    def golden(self) -> Matrix:
        """What this project's hardware makes of it, bit for bit: ``(tokens, size)``.

        Vectors are filled up with zeros to whole blocks, so that the columns beyond the cut count for nothing; a
        block's exponent is that of its largest element and zeros do not change it.
        """
        sums = {name: matmul(self.blocks[name], quantize(self._padded(self.x))) for name in ("gate", "up")}
        one = 1 << WEIGHT_FRACTION_BITS
        hidden = swiglu(sums["gate"].values, sums["up"].values, one)
        return np.ldexp(
            matmul(self.blocks["down"], quantize(self._padded(hidden))).values.astype(np.float64), -FRACTION_BITS
        )

    def _padded(self, vectors: Matrix) -> Matrix:
        columns = self.blocks["gate"].shape[1] * BLOCK_WEIGHTS
        return np.pad(vectors, ((0, 0), (0, columns - self.size)))


def load(size: int, *, path: Path = MODEL, layer: int = 0, expert: int = 0) -> Expert:
    """A cut of an expert of a model file, in which width and expert width are the same.

    Raises ValueError for a size that the expert does not have, and what :class:`host.model_file.ModelFile` raises.
    """
    with ModelFile.open(path) as model:
        if not 1 <= size <= min(model.width, model.expert_width):
            raise ValueError(
                f"{path}: a cut must be in 1..{min(model.width, model.expert_width)} rows and columns, not {size}"
            )
        place = model.layers[layer]
        blocks = {name: expert_blocks(model, getattr(place, name), expert)[:size] for name in MATRICES}
        matrices = {name: q6_k.dequantize(raw).reshape(size, -1)[:, :size] for name, raw in blocks.items()}
        x = token_vectors(model, place, TEXT)[:, :size]
    return Expert(**matrices, blocks=blocks, x=x)
