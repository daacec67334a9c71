"""Random matrices through the matrix engine, with and without stalls, against the golden model."""

import hashlib
import json
import os

import cocotb
import numpy as np
from cocotb.triggers import ClockCycles

from hw.decode import ERROR_LENGTH
from hw.formats.params import Params
from hw.formats.q6_k import D_OFFSET
from sim.bench.engine_driver import EngineDriver, Matrix
from sim.golden import activations, matmul
from sim.workload import random_blocks

PARAMS = Params(**json.loads(os.environ["EMUFPGA_PARAMS"]))


def random_matrix(rng: np.random.Generator, rows: int, columns: int, mask: int, *, bad: float = 0.0) -> Matrix:
    """Random blocks, of which a share ``bad`` has a ``d`` that is NaN or infinite."""
    blocks = random_blocks(rng, rows, columns)
    wrong = rng.random((rows, columns)) < bad
    not_finite = rng.choice(np.array([np.nan, np.inf, -np.inf], "<f2"), (wrong.sum(), 1))
    blocks[wrong, D_OFFSET:] = not_finite.view(np.uint8)
    return Matrix(blocks, mask)


def check(x: activations.Activations, matrices, outcome) -> None:
    """Every sum and error bit equals the golden model's."""
    for matrix, sums, errors in zip(matrices, outcome.sums, outcome.errors, strict=True):
        columns = matrix.blocks.shape[1]
        want = matmul.matmul(matrix.blocks, activations.Activations(x.mantissas[:, :columns], x.exponents[:, :columns]))
        for slot in sums:
            np.testing.assert_array_equal(sums[slot], want.values[slot])
            np.testing.assert_array_equal(errors[slot], want.errors[slot])


@cocotb.test()
@cocotb.parametrize(p_in=[1.0, 0.4], p_out=[1.0, 0.3, 0.02])
async def random_stalls(dut, p_in, p_out):
    rng = np.random.default_rng(cocotb.RANDOM_SEED)
    driver = EngineDriver(dut, PARAMS, p_in=p_in, p_out=p_out)
    await driver.reset()
    x = activations.quantize(rng.standard_t(2.5, (PARAMS.max_batch, PARAMS.max_width)))
    await driver.load(x)
    everyone = (1 << PARAMS.max_batch) - 1
    matrices = [random_matrix(rng, 3, PARAMS.max_columns, everyone)]
    for _ in range(6):
        mask = int(rng.integers(everyone + 1)) if rng.random() < 0.7 else 0
        rows, columns = int(rng.integers(1, 5)), int(rng.integers(1, PARAMS.max_columns + 1))
        matrices.append(random_matrix(rng, rows, columns, mask, bad=0.05))
    outcome = await driver.stream(matrices)
    check(x, matrices, outcome)
    assert int(dut.error.value) == 0


SAME_SUMS = "27bb162730a3e76bc8f0afaa601a84a04e1945c225e697ac23ad7640beb43497"
"""SHA-256 of the sums of ``same_sums_in_every_build``, little-endian int64."""


@cocotb.test()
async def same_sums_in_every_build(dut):
    """One batch of four tokens, whatever the link's width, the lanes and the slots: always the same bits.

    A build with fewer slots takes the batch in parts, down to one token at a time.
    """
    rng = np.random.default_rng(0)
    blocks = random_matrix(rng, 6, 1, 0).blocks
    x = activations.quantize(rng.standard_t(2.5, (4, 256)))
    driver = EngineDriver(dut, PARAMS, p_in=0.8, p_out=0.8)
    await driver.reset()
    slots = min(4, PARAMS.max_batch)
    sums = []
    for low in range(0, 4, slots):
        await driver.load(activations.Activations(x.mantissas[low : low + slots], x.exponents[low : low + slots]))
        outcome = await driver.stream([Matrix(blocks, (1 << slots) - 1)])
        sums += [outcome.sums[0][slot] for slot in range(slots)]
    digest = hashlib.sha256(np.array(sums).astype("<i8").tobytes()).hexdigest()
    assert digest == SAME_SUMS, f"the sums' SHA-256 is {digest}"
    np.testing.assert_array_equal(np.array(sums), matmul.matmul(blocks, x).values)


@cocotb.test()
async def steady_rate(dut):
    """16 cycles a block and group when the link can keep up, else as many as the link takes; all but nothing lost."""
    rng = np.random.default_rng(cocotb.RANDOM_SEED)
    driver = EngineDriver(dut, PARAMS)
    await driver.reset()
    x = activations.quantize(rng.standard_t(2.5, (PARAMS.max_batch, PARAMS.max_width)))
    await driver.load(x)
    link = 210 / PARAMS.link_bytes
    for mask, cycles in ((1, max(16.0, link)), (0, max(13.125, link)), ((1 << PARAMS.max_batch) - 1, None)):
        matrices = [random_matrix(rng, 64 // PARAMS.max_columns, PARAMS.max_columns, mask) for _ in range(2)]
        outcome = await driver.stream(matrices)
        check(x, matrices, outcome)
        blocks = 2 * (64 // PARAMS.max_columns) * PARAMS.max_columns
        expected = max(16.0 * PARAMS.passes, link) if cycles is None else cycles
        cocotb.log.info("mask %x: %.3f cycles a block over %d blocks", mask, outcome.cycles / blocks, blocks)
        assert expected * blocks <= outcome.cycles + 1  # no faster than counted on
        # Filling the buffers: the first block whole, then the pipeline, then the last row's sums in turn.
        assert outcome.cycles <= expected * blocks + link + 50 + PARAMS.max_batch


@cocotb.test()
async def wrong_length_is_an_error(dut):
    """A run that is a block short sets the error, hangs nothing, and a reset makes the engine whole again."""
    rng = np.random.default_rng(cocotb.RANDOM_SEED)
    driver = EngineDriver(dut, PARAMS)
    await driver.reset()
    x = activations.quantize(rng.standard_t(2.5, (PARAMS.max_batch, PARAMS.max_width)))
    await driver.load(x)
    short = random_matrix(rng, 1, 1, 0)
    announced = Matrix(np.concatenate([short.blocks, short.blocks]), 0)
    await driver.feed("i_matrix", driver.commands([announced]))
    await driver.feed("i", driver.beats([short]) * 2)  # discarded, so that nobody waits
    await ClockCycles(dut.clk, 10)
    assert int(dut.error.value) == ERROR_LENGTH
    await driver.reset()
    assert int(dut.error.value) == 0
    await driver.load(x)
    matrices = [random_matrix(rng, 2, PARAMS.max_columns, 1)]
    check(x, matrices, await driver.stream(matrices))
