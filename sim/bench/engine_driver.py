"""The matrix engine's ports, driven and counted from cocotb."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, RisingEdge, with_timeout
from cocotb.utils import get_sim_time
from numpy.typing import NDArray

from hw.formats import q6_k as fmt
from hw.formats.params import Params
from hw.layouts import activation_word, matrix_command, row_sum
from sim.golden.activations import Activations
from sim.verilator import CLOCK_NS


class Matrix(NamedTuple):
    """One matrix to stream: ``blocks`` (rows, columns, 210) uint8, and the token slots that want it as a bit mask."""

    blocks: NDArray[np.uint8]
    mask: int


class Outcome(NamedTuple):
    """What one stream of matrices gave.

    Attributes
    ----------
    sums
        For each matrix, slot -> (rows,) int64 in Q24.40.
    errors
        The same for the error bits, uint8.
    cycles
        From the first beat taken to the last beat taken or sum given, both included.
    beats
        Beats taken.
    """

    sums: list[dict[int, NDArray[np.int64]]]
    errors: list[dict[int, NDArray[np.uint8]]]
    cycles: int
    beats: int


class EngineDriver:
    """Drives one Verilated ``MatrixEngine``; ``p_in`` and ``p_out`` are the chances of no stall in a cycle."""

    def __init__(self, dut, params: Params, *, p_in: float = 1.0, p_out: float = 1.0) -> None:
        self.dut, self.params, self.p_in, self.p_out = dut, params, p_in, p_out

    async def reset(self) -> None:
        """Start the clock if need be and reset the engine."""
        dut = self.dut
        for name in ("i", "i_matrix", "i_x"):
            getattr(dut, f"{name}__valid").value = 0
            getattr(dut, f"{name}__payload").value = 0
        dut.o__ready.value = 0
        dut.rst.value = 1
        if not getattr(dut, "clock_runs", False):
            Clock(dut.clk, CLOCK_NS, unit="ns").start()
        await ClockCycles(dut.clk, 2)
        dut.rst.value = 0

    async def load(self, x: Activations) -> None:
        """Load token vectors ``(slots, columns, 256)`` into slots 0, 1, ..."""
        layout = activation_word(self.params)
        words = []
        slots, columns = x.exponents.shape
        for slot in range(slots):
            for column in range(columns):
                values = x.mantissas[slot, column].reshape(-1, 8)
                for word, part in enumerate(values):
                    place = {"word": word, "column": column, "token": slot}
                    value = {"values": part.tolist(), "exponent": int(x.exponents[slot, column])}
                    words.append(layout.const({**place, **value}).as_bits())
        await self.feed("i_x", words)
        await ClockCycles(self.dut.clk, 4)  # the last word reaches its memory

    async def stream(self, matrices: Sequence[Matrix]) -> Outcome:
        """Stream matrices and collect every sum; fails after ten times the cycles that this can take."""
        counts = [matrix.blocks.shape[0] * bin(matrix.mask).count("1") for matrix in matrices]
        blocks = sum(int(np.prod(matrix.blocks.shape[:2])) for matrix in matrices)
        limit = 1000 + 10 * blocks * (fmt.BLOCK_BYTES // self.params.link_bytes + 16 * self.params.passes)
        limit = int(limit / min(self.p_in, self.p_out))
        announce = cocotb.start_soon(self.feed("i_matrix", self.commands(matrices)))
        feed = cocotb.start_soon(self.feed("i", self.beats(matrices)))
        take = cocotb.start_soon(self._take(sum(counts)))
        await with_timeout(take, limit * CLOCK_NS, "ns")
        await with_timeout(feed, limit * CLOCK_NS, "ns")
        await announce
        first, last_in, beats = feed.result()
        rows, last_out = take.result()
        layout = row_sum(self.params)
        sums, errors = [], []
        at = 0
        for matrix, count in zip(matrices, counts, strict=True):
            part = [layout.from_bits(bits) for bits in rows[at : at + count]]
            at += count
            slots = [slot for slot in range(self.params.max_batch) if matrix.mask >> slot & 1]
            order = [row.token for row in part]
            assert order == slots * matrix.blocks.shape[0], "sums came out of order"
            sums.append({s: np.array([r.value for r in part[n :: len(slots)]]) for n, s in enumerate(slots)})
            errors.append({s: np.array([r.error for r in part[n :: len(slots)]]) for n, s in enumerate(slots)})
        return Outcome(sums, errors, max(last_in, last_out) - first + 1, beats)

    def commands(self, matrices: Sequence[Matrix]) -> list[int]:
        """The payloads that announce ``matrices``."""
        layout = matrix_command(self.params)
        return [
            layout.const({"rows": m.blocks.shape[0], "columns": m.blocks.shape[1], "mask": m.mask}).as_bits()
            for m in matrices
        ]

    def beats(self, matrices: Sequence[Matrix]) -> list[int]:
        """The payloads that carry ``matrices``, each a run of its own."""
        width = self.params.link_bytes
        beats = []
        for matrix in matrices:
            data = matrix.blocks.tobytes()
            run = [int.from_bytes(data[low : low + width], "little") for low in range(0, len(data), width)]
            run[-1] |= 1 << 8 * width  # last
            beats += run
        return beats

    async def feed(self, name: str, payloads: Sequence[int]) -> tuple[int, int, int]:
        """Offer payloads on stream ``name``; the cycles of the first and last transfer, and how many there were."""
        clk = self.dut.clk
        payload_port, valid, ready = (getattr(self.dut, f"{name}__{part}") for part in ("payload", "valid", "ready"))
        p = self.p_in
        first = None
        for payload in payloads:
            while p < 1 and random.random() > p:
                await RisingEdge(clk)
            payload_port.value = payload
            valid.value = 1
            await RisingEdge(clk)
            while not ready.value:  # right after the edge we read the value before it
                await RisingEdge(clk)
            if first is None:
                first = cycle()
            if p < 1:
                valid.value = 0
        last = cycle()
        valid.value = 0
        return last if first is None else first, last, len(payloads)

    async def _take(self, count: int) -> tuple[list[int], int]:
        """Returns the payloads and the cycle of the last; checks that a waiting payload holds."""
        dut = self.dut
        p = self.p_out
        got: list[int] = []
        waiting = None
        while len(got) < count:
            ready = p >= 1 or random.random() <= p
            dut.o__ready.value = int(ready)
            await RisingEdge(dut.clk)
            if not dut.o__valid.value:
                assert waiting is None, "a sum that waited was withdrawn"
                continue
            payload = int(dut.o__payload.value)
            assert waiting is None or payload == waiting, "a sum that waited changed"
            waiting = None if ready else payload
            if ready:
                got.append(payload)
        last = cycle()
        dut.o__ready.value = 0
        return got, last


def cycle() -> int:
    """Clock edges since the start of the simulation."""
    return round(get_sim_time("ns") / CLOCK_NS)
