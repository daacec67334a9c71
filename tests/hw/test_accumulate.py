from typing import NamedTuple

import numpy as np
import pytest
from amaranth.hdl import Elaboratable, Module

from hw.accumulate import Accumulate
from hw.activations import Activations
from hw.formats.arithmetic import ERROR_OVERFLOW, ERROR_SCALE
from hw.formats.params import Params
from hw.layouts import Kind
from sim.golden import activations, matmul

from .blocks import load_words
from .streams import STALLS, run_streams

MIN, MAX = -(2**63), 2**63 - 1


class AccumulateAndStore(Elaboratable):
    """The accumulator with the memory that holds the exponents."""

    def __init__(self, params: Params) -> None:
        self.accumulate, self.store = Accumulate(params), Activations(params)

    def elaborate(self, platform):
        m = Module()
        m.submodules.accumulate, m.submodules.store = accumulate, store = self.accumulate, self.store
        m.d.comb += [
            store.e_token.eq(accumulate.e_token),
            store.e_column.eq(accumulate.e_column),
            accumulate.e.eq(store.e),
        ]
        return m


def run_rows(params, exponents, blocks, *, rng, p_in=1.0, p_out=1.0):
    """Add ``blocks``, dicts as the stream takes them, with ``exponents`` (tokens, columns)."""
    dut = AccumulateAndStore(params)
    x = activations.Activations(np.zeros((*exponents.shape, 256), np.int16), exponents.astype(np.int8))
    loads = [word for word in load_words(x) if word["word"] == 0]
    count = sum(bin(b["tag"]["lanes"]).count("1") for b in blocks if b["tag"]["last"])
    return run_streams(
        dut,
        [(dut.store.i, loads), (dut.accumulate.i, blocks)],
        [(dut.accumulate.o, count)],
        rng=rng,
        p_in=p_in,
        p_out=p_out,
        settle=40,
        in_turn=True,
    )


class Row(NamedTuple):
    token: int
    value: int
    error: int
    kind: Kind
    end: int


def golden_rows(params, exponents, blocks) -> list[Row]:
    """By Python's integers, one addition at a time."""
    rows, out = {}, []
    for b in blocks:
        tag = b["tag"]
        for lane in range(params.tokens):
            if not tag["lanes"] >> lane & 1:
                continue
            token = tag["group"] * params.tokens + lane
            value, error = (0, 0) if tag["first"] else rows[token]
            shift = tag["exponent"] + int(exponents[token, tag["column"]]) + 40
            value += matmul.contribution(b["sums"][lane], tag["mantissa"], shift)
            if not MIN <= value <= MAX:
                error |= ERROR_OVERFLOW
            value = min(max(value, MIN), MAX)
            error |= ERROR_SCALE if tag["bad"] else 0
            rows[token] = value, error
            if tag["last"]:
                end = int(tag["final"] and tag["lanes"] >> lane == 1)
                out.append(Row(token, value, error, tag["kind"], end))
    return out


def tag(mantissa, exponent, *, group=0, column=0, lanes=1, first=1, last=1, bad=0, kind=Kind.UP, final=1) -> dict:
    place = dict(group=group, column=column, lanes=lanes, first=first, last=last)
    return dict(mantissa=mantissa, exponent=exponent, bad=bad, kind=kind, final=final) | place


def results(run) -> list[Row]:
    return [Row(row.token, row.value, row.error, row.kind, row.end) for row in run.payloads[0]]


def test_accumulate_every_shift():
    """Every shift that exponents can ask for, with sums at the corners: exact, or clamped with its error."""
    params = Params(max_batch=1, max_width=16384)
    rng = np.random.default_rng(0)
    sums = [2**35 - 1, -(2**35), 1, -1, 0, 3, -3, *rng.integers(-(2**35), 2**35, 4).tolist()]
    mantissas = [2047, -2047, 1, -1, 1024, 0]
    blocks, exponents = [], np.zeros((1, 64), np.int64)
    per_column = {}
    # e + k + 40 runs from -128 - 24 + 40 to 127 + 5 + 40; 64 exponents at a time lie in the store's 64 columns.
    want_shifts = list(range(-112, 173))
    column = 0
    runs = []
    for shift in want_shifts:
        k = int(np.clip(shift - 40, -24, 5))
        e = shift - 40 - k
        if e not in per_column:
            if column == 64:
                runs.append((exponents, blocks))
                blocks, exponents, per_column, column = [], np.zeros((1, 64), np.int64), {}, 0
            per_column[e] = column
            exponents[0, column] = e
            column += 1
        for s in sums:
            m = mantissas[int(rng.integers(len(mantissas)))] if s not in (1, -1) else 1
            blocks.append({"sums": [s], "tag": tag(m, k, column=per_column[e])})
    runs.append((exponents, blocks))
    seen = 0
    for exponents, blocks in runs:
        got = run_rows(params, exponents, blocks, rng=rng)
        want = golden_rows(params, exponents, blocks)
        assert results(got) == want
        seen += sum(row.error for row in want)
    assert seen  # some of them overflow


@pytest.mark.parametrize(("p_in", "p_out"), [*STALLS, (1.0, 0.03)])
@pytest.mark.parametrize("params", [Params(), Params(tokens=2), Params(tokens=8, max_batch=16)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_accumulate(seed, params, p_in, p_out):
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-20, -8, (params.max_batch, params.max_columns))
    blocks = []
    for _ in range(6):
        columns = int(rng.integers(1, params.max_columns + 1))
        lanes = [int(rng.integers(1 << params.tokens)) for _ in range(params.passes)]
        kind = list(Kind)[rng.integers(len(Kind))]
        for column in range(columns):
            for group in range(params.passes):
                if lanes[group] == 0:
                    continue
                place = dict(group=group, column=column, lanes=lanes[group])
                place |= dict(final=int(not any(lanes[group + 1 :])))
                place |= dict(first=int(column == 0), last=int(column == columns - 1), bad=int(rng.random() < 0.05))
                m, k = int(rng.integers(-2047, 2048)), int(rng.integers(-24, 6))
                blocks.append(
                    {
                        "sums": rng.integers(-(2**35), 2**35, params.tokens).tolist(),
                        "tag": tag(m, k, kind=kind, **place),
                    }
                )
    got = run_rows(params, exponents, blocks, rng=rng, p_in=p_in, p_out=p_out)
    assert results(got) == golden_rows(params, exponents, blocks)


def test_accumulate_clamps_where_the_sum_leaves_the_range():
    """The largest and smallest sums that fit, one step beyond, and back again: the error stays with the row only."""
    params = Params(max_batch=1)
    exponents = np.array([[-40, 22, -40, -40]])
    largest, one = (2**34, tag(1, 0, column=1, last=0)), (1, tag(1, 0, first=0))  # 2**34 * 2**62 = 2**96: lost
    cases = [
        [(2**35 - 1, tag(1, 0))],
        [largest, one],
        [(-(2**34), tag(1, 0, column=1, last=0)), one],
        # 2**62 + 2**62 - 1 fits, one more does not
        [(1, tag(1, 0, column=1, last=0)), (1, tag(1, 0, column=1, first=0, last=0)), (-1, tag(1, 0, first=0))],
        [(-1, tag(1, 0, column=1, last=0)), (-1, tag(1, 0, column=1, first=0, last=0)), (-1, tag(1, 0, first=0))],
        [(-1, tag(1, 0, column=1, last=0)), (-1, tag(1, 0, column=1, first=0, last=1))],
        [(7, tag(1, 0))],
    ]
    blocks = [{"sums": [s], "tag": t} for case in cases for s, t in case]
    got = run_rows(params, exponents, blocks, rng=np.random.default_rng(0))
    want = golden_rows(params, exponents, blocks)
    assert results(got) == want
    assert [row.error for row in want] == [0, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
def test_accumulate_throughput_and_latency(tokens):
    """A block of all lanes within 16 cycles, as the multipliers deliver them."""
    params = Params(tokens=tokens, max_batch=tokens)
    rng = np.random.default_rng(0)
    exponents = np.full((params.max_batch, params.max_columns), -15)
    lanes = (1 << tokens) - 1
    blocks = [
        {"sums": [5] * tokens, "tag": tag(1, 0, lanes=lanes, last=int(n == 7), first=int(n == 0))} for n in range(8)
    ]
    got = run_rows(params, exponents, blocks, rng=rng)
    taken, (given,) = got.in_cycles[1], got.out_cycles
    per_block = max(tokens, 5)
    assert np.diff(taken).tolist() == [per_block] * 7
    assert per_block <= 16
    assert given[0] == taken[-1] + Accumulate.LATENCY
    assert len(given) == tokens
