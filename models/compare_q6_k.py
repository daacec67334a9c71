"""Compare ``host.q6_k`` with llama.cpp's own Q6_K encoder by the error of the decoded values.

    python -m models.compare_q6_k [--checkpoint build/tiny-moe.pt]

llama.cpp is called through a C function that the ``xllamacpp`` wheel exports; the ``gguf`` package decodes both
results. The tensors come from seeds, and from a checkpoint of ``train_tiny_moe.py`` where one is named (needs PyTorch).

Two errors are shown, both relative RMS over the tensor: *plain*, which ``host.q6_k`` minimises, and *weighed* by the
square of each weight. Neither encoder is best at both.
"""

import argparse
import ctypes
import importlib.util
import sys
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from host import q6_k
from hw.formats.q6_k import BLOCK_BYTES, BLOCK_WEIGHTS, SUB_BLOCK_WEIGHTS, SUB_BLOCKS

Floats = NDArray[np.float32]


def llama_cpp(values: Floats) -> NDArray[np.uint8]:
    """Encode ``values`` (rows, n * 256) with llama.cpp, without importance matrix, as (rows, n * 210) bytes."""
    spec = importlib.util.find_spec("xllamacpp.xllamacpp")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("xllamacpp is missing; it is in the `test` extra")
    encode = ctypes.CDLL(spec.origin).quantize_q6_K
    encode.restype = ctypes.c_size_t
    # source, target, rows, row length, importance
    encode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    source = np.ascontiguousarray(values, np.float32)
    rows, length = source.shape
    if length % BLOCK_WEIGHTS:
        raise ValueError(f"rows must be a multiple of {BLOCK_WEIGHTS} long, not {length}")
    target = np.empty((rows, length // BLOCK_WEIGHTS * BLOCK_BYTES), np.uint8)
    written = encode(source.ctypes.data, target.ctypes.data, rows, length, None)
    if written != target.nbytes:
        raise RuntimeError(f"quantize_q6_K wrote {written} bytes instead of {target.nbytes}")
    return target


def decode(data: NDArray[np.uint8]) -> Floats:
    """Decode blocks (rows, n * 210) with the ``gguf`` package."""
    return gguf.dequantize(data, gguf.GGMLQuantizationType.Q6_K)


def without_search(values: Floats) -> Floats:
    """Return what is decoded when each largest number goes to the limit of its range: weight to 31, scale to 127."""
    x = values.astype(np.float64).reshape(-1, SUB_BLOCKS, SUB_BLOCK_WEIGHTS)
    steps = np.abs(x).max(-1) / q6_k.LEVEL_MAX
    d = (steps.max(-1, keepdims=True) / q6_k.SCALE_MAX).astype(np.float16).astype(np.float64)
    stored = d * np.clip(np.rint(steps / np.where(d, d, 1)), q6_k.SCALE_MIN, q6_k.SCALE_MAX)
    levels = np.clip(np.rint(x / np.where(stored, stored, 1)[..., None]), q6_k.LEVEL_MIN, q6_k.LEVEL_MAX)
    return (levels * stored[..., None]).reshape(values.shape).astype(np.float32)


def relative_rms(decoded: Floats, values: Floats, *, weighed: bool = False) -> float:
    """Return the relative RMS error over the tensor; ``weighed`` multiplies each square by the value's square."""
    x, error = values.astype(np.float64), decoded.astype(np.float64) - values
    weight = x if weighed else 1.0
    return float(np.linalg.norm(error * weight) / np.linalg.norm(x * weight))


def seeded(seed: int = 0, shape: tuple[int, int] = (256, 1024)) -> dict[str, Floats]:
    """Return the seeded tensors by name."""
    rng = np.random.default_rng(seed)
    tensors = {
        "normal": rng.normal(size=shape),
        "uniform": rng.uniform(-1, 1, shape),
        "Laplace": rng.laplace(size=shape),
        "Student t, 3 degrees": rng.standard_t(3, shape),
    }
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def experts(checkpoint: Path) -> dict[str, Floats]:
    """Return the trained experts, all layers of one matrix together, each (rows, 256)."""
    import torch  # the `train` extra; only this option needs it

    state = torch.load(checkpoint, weights_only=True)["model"]
    return {
        f"trained experts, {part}": np.concatenate(
            [state[key].numpy().reshape(-1, state[key].shape[-1]) for key in state if key.endswith(f".{part}")]
        )
        for part in ("gate", "up", "down")
    }


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare the errors of Q6_K encoders.")
    parser.add_argument("--checkpoint", type=Path, help="also compare on the experts of this checkpoint")
    args = parser.parse_args(argv)
    tensors = seeded() | (experts(args.checkpoint) if args.checkpoint else {})
    print("Relative RMS error, 1e-3          plain                             weighed")
    print(f"{'tensor':22}" + f"{'no search':>11}{'llama.cpp':>11}{'host.q6_k':>11}" * 2)
    for name, values in tensors.items():
        decoded = [without_search(values), decode(llama_cpp(values)), decode(q6_k.quantize(values))]
        errors = [relative_rms(each, values, weighed=weighed) for weighed in (False, True) for each in decoded]
        print(f"{name:22}" + "".join(f"{1000 * error:11.3f}" for error in errors), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
