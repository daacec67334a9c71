"""A model file's experts through the Verilated engine; measures into a JSON file for ``sim.run``.

Three phases: the experts of the first layer all selected for one token, the same bytes all drained, and whole layers
in tape mode for a small batch, in which every expert passes and serves the tokens that chose it.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import cocotb
import numpy as np
from numpy.typing import NDArray

from host.model_file import ModelFile, MoeLayer
from hw.formats.arithmetic import FRACTION_BITS
from hw.formats.params import Params
from hw.formats.q6_k import BLOCK_BYTES
from sim.bench.engine_driver import EngineDriver, Matrix
from sim.golden import activations, q6_k
from sim.golden.activations import Activations
from sim.golden.matmul import matmul
from sim.golden.swiglu import quantize_weight, swiglu
from sim.workload import expert_blocks, route, silu, token_vectors

JOB = json.loads(os.environ["EMUFPGA_JOB"])
PARAMS = Params(**JOB["params"])


@dataclass
class Phase:
    """Counts of one phase; ``passes`` counts a block once for each group of tokens that it served."""

    name: str
    blocks_selected: int = 0
    blocks_drained: int = 0
    passes: int = 0
    cycles: int = 0
    stream_bytes: int = 0
    payload_bytes: int = 0
    sums: int = 0
    sums_wrong: int = 0
    max_abs_error_vs_float64: float = 0.0
    layer_relative_rms_error: float | None = None
    routes: list[list[int]] = field(default_factory=list)


class Bench:
    """The engine with its model file, and the checks that every stream of matrices goes through."""

    def __init__(self, dut, model: ModelFile) -> None:
        self.driver = EngineDriver(dut, PARAMS)
        self.model = model
        self.done = 0

    def say(self, text: str) -> None:
        with open(JOB["progress"], "a") as file:
            print(text, file=file)

    async def stream(self, phase: Phase, x: NDArray[np.float64], matrices: list[Matrix]) -> list[dict]:
        """Load vectors ``x`` (slots, width), stream, compare with golden and float64; Q24.40 sums by matrix, slot."""
        quantized = activations.quantize(x)
        await self.driver.load(quantized)
        outcome = await self.driver.stream(matrices)
        phase.cycles += outcome.cycles
        phase.stream_bytes += outcome.beats * PARAMS.link_bytes
        for matrix, sums, errors in zip(matrices, outcome.sums, outcome.errors, strict=True):
            rows, columns = matrix.blocks.shape[:2]
            blocks = rows * columns
            groups = sum(
                1 for g in range(PARAMS.passes) if matrix.mask >> (g * PARAMS.tokens) & (1 << PARAMS.tokens) - 1
            )
            phase.blocks_selected += blocks if matrix.mask else 0
            phase.blocks_drained += 0 if matrix.mask else blocks
            phase.passes += blocks * groups
            phase.payload_bytes += blocks * BLOCK_BYTES
            slots = sorted(sums)
            if not slots:
                continue
            golden = matmul(matrix.blocks, Activations(quantized.mantissas[slots], quantized.exponents[slots]))
            exact = x[slots] @ q6_k.dequantize(matrix.blocks).reshape(rows, -1).T
            got = np.array([sums[slot] for slot in slots])
            wrong = (got != golden.values) | np.array([errors[slot] for slot in slots]).astype(bool)
            phase.sums += got.size
            phase.sums_wrong += int(np.count_nonzero(wrong))
            error = float(np.abs(np.ldexp(got.astype(np.float64), -FRACTION_BITS) - exact).max())
            phase.max_abs_error_vs_float64 = max(phase.max_abs_error_vs_float64, error)
        return outcome.sums

    async def layer_in_tape_mode(self, layer: MoeLayer) -> Phase:
        """Every expert of the layer passes; returns the phase, with the routes of its tokens."""
        text = JOB["text"].encode()
        phase = Phase(f"layer {layer.index}, tape, {len(text)} tokens")
        x = token_vectors(self.model, layer, text)
        routes = route(self.model, layer, x)
        phase.routes = routes.experts.tolist()
        users = [np.flatnonzero((routes.experts == expert).any(axis=-1)) for expert in range(layer.experts)]
        masks = [sum(1 << int(token) for token in tokens) for tokens in users]
        pairs = [(expert, token) for expert, tokens in enumerate(users) for token in tokens]

        first = [
            Matrix(expert_blocks(self.model, tensor, expert), masks[expert])
            for expert in range(layer.experts)
            for tensor in (layer.gate, layer.up)
        ]
        sums = await self.stream(phase, x, first)
        weights = [routes.weights[token, routes.experts[token] == expert] for expert, token in pairs]
        gate, up = (np.array([sums[2 * expert + which][token] for expert, token in pairs]) for which in (0, 1))
        h = swiglu(gate, up, quantize_weight(weights))  # between the matrices the host computes, for now
        # Each (expert, token) pair has a vector of its own, so a slot of its own, for the down matrix.
        masks = [sum(1 << slot for slot, pair in enumerate(pairs) if pair[0] == e) for e in range(layer.experts)]
        second = [Matrix(expert_blocks(self.model, layer.down, e), masks[e]) for e in range(layer.experts)]
        sums = await self.stream(phase, h, second)
        y = np.zeros((len(text), self.model.width), np.int64)
        exact = np.zeros(y.shape)
        for slot, (expert, token) in enumerate(pairs):
            y[token] += sums[expert][slot]
            exact[token] += weights[slot] * float64_expert(self.model, layer, expert, x[token])
        difference = np.ldexp(y.astype(np.float64), -FRACTION_BITS) - exact
        phase.layer_relative_rms_error = float(np.sqrt(np.mean(difference**2) / np.mean(exact**2)))
        return phase


def float64_expert(model: ModelFile, layer: MoeLayer, expert: int, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """``down(silu(gate(x)) * up(x))`` of the dequantised matrices in float64; ``(width,)`` to ``(width,)``."""
    gate, up, down = (
        q6_k.dequantize(expert_blocks(model, tensor, expert)).reshape(tensor.rows, -1)
        for tensor in (layer.gate, layer.up, layer.down)
    )
    return down @ (silu(gate @ x) * (up @ x))


@cocotb.test()
async def model_file(dut):
    with ModelFile.open(JOB["model"]) as model:
        bench = Bench(dut, model)
        await bench.driver.reset()
        layers = model.layers[: JOB["layers"]]
        x = token_vectors(model, layers[0], JOB["text"].encode()[:1])
        experts = range(min(layers[0].experts, JOB["experts"]))
        matrices = [expert_blocks(model, t, e) for e in experts for t in (layers[0].gate, layers[0].up)]
        phases = []
        for name, mask in (("selected", 1), ("drained", 0)):
            bench.say(f"{name}: {sum(m.shape[0] * m.shape[1] for m in matrices)} blocks of layer {layers[0].index}")
            phases.append(Phase(name))
            await bench.stream(phases[-1], x, [Matrix(m, mask) for m in matrices])
        for layer in layers:
            bench.say(f"layer {layer.index} of {len(model.layers)}: all {layer.experts} experts pass, tape mode")
            phases.append(await bench.layer_in_tape_mode(layer))
    Path(JOB["result"]).write_text(json.dumps([asdict(phase) for phase in phases]))
