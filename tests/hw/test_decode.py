import numpy as np
import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring

from hw.align import Align
from hw.decode import ERROR_COMMAND, ERROR_LENGTH, Decode
from hw.formats.params import Params
from hw.layouts import Kind
from sim.golden import q6_k
from sim.workload import random_blocks

from .streams import STALLS, run_streams
from .test_align import wide_beats


def words(blocks: np.ndarray) -> list[dict]:
    """A run of blocks ``(n, 210)`` as aligned words."""
    return [
        {
            "data": block[16 * index :][:16].tolist(),
            "d": int.from_bytes(bytes(block[208:]), "little") if index == 12 else 0,
            "index": index,
            "last": block_index == len(blocks) - 1 and index == 12,
        }
        for block_index, block in enumerate(blocks)
        for index in range(13)
    ]


def expected(params: Params, matrices) -> list[dict]:
    out = []
    for blocks, mask, kind in matrices:
        groups = [mask >> (group * params.tokens) & (1 << params.tokens) - 1 for group in range(params.passes)]
        first_column = params.max_columns if kind == Kind.DOWN else 0
        decoded = q6_k.decode(blocks)
        mantissa, exponent, finite = q6_k.split_d(decoded.d)
        rows, columns = blocks.shape[:2]
        for row in range(rows):
            for column in range(columns):
                for group, lanes in enumerate(groups):
                    for index in range(16 if lanes else 0):
                        out.append(
                            {
                                "weights": decoded.weights[row, column, 16 * index :][:16].tolist(),
                                "scale": int(decoded.scales[row, column, index]),
                                "index": index,
                                "mantissa": int(mantissa[row, column]),
                                "exponent": int(exponent[row, column]) if finite[row, column] else None,
                                "bad": int(not finite[row, column]),
                                "group": group,
                                "column": first_column + column,
                                "kind": kind,
                                "lanes": lanes,
                                "final": int(not any(groups[group + 1 :])) if index == 15 else None,
                                "first": int(column == 0),
                                "last": int(column == columns - 1),
                            }
                        )
    return out


def as_dict(beat) -> dict:
    tag = {field: beat.tag[field] for field in ("mantissa", "exponent", "bad", "group", "column", "kind", "lanes")}
    tag |= {field: beat.tag[field] for field in ("final", "first", "last")}
    if beat.index != 15:
        tag["final"] = None  # nobody looks
    if tag["bad"]:
        tag["exponent"] = None  # void
    return {"weights": list(beat.weights), "scale": beat.scale, "index": beat.index} | tag


def commands(matrices) -> list[dict]:
    return [
        {"rows": blocks.shape[0], "columns": blocks.shape[1], "kind": kind, "mask": mask}
        for blocks, mask, kind in matrices
    ]


def flat_words(matrices) -> list[dict]:
    return [word for blocks, *_ in matrices for word in words(blocks.reshape(-1, 210))]


@pytest.mark.parametrize(("p_in", "p_out"), [*STALLS, (1.0, 0.05)])
@pytest.mark.parametrize("params", [Params(max_batch=4), Params(tokens=2, max_batch=4), Params(max_batch=1)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_decode(seed, params, p_in, p_out):
    rng = np.random.default_rng(seed)
    up, gate, down = Kind
    shapes = [(3, 1, 1, up), (1, 4, 0b1010, gate), (2, 2, 0, down), (1, 1, 0, up)]
    shapes += [(2, 2, 0b0101, down), (2, 1, 0b1111, gate)]
    matrices = [
        (random_blocks(rng, rows, columns), mask & (1 << params.max_batch) - 1, kind)
        for rows, columns, mask, kind in shapes
    ]
    halves = (0x0000, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01)  # all kinds of d
    for half, kind in zip(halves, [*Kind] * 3, strict=True):
        blocks = random_blocks(rng, 1, 1)
        blocks[..., 208:] = [half & 0xFF, half >> 8]
        matrices.append((blocks, 1, kind))
    want = expected(params, matrices)
    dut = Decode(params)
    errors = []
    got = run_streams(
        dut,
        [(dut.i, flat_words(matrices)), (dut.i_matrix, commands(matrices))],
        [(dut.o, len(want))],
        rng=rng,
        p_in=p_in,
        p_out=p_out,
        settle=20,
        finish=lambda ctx: errors.append(ctx.get(dut.error)),
    )
    assert [as_dict(beat) for beat in got.payloads[0]] == want
    assert errors == [0]


def test_decode_throughput_and_latency():
    """16 cycles a selected block, 13 a drained one (as many as there are words), two more at a drained matrix's end."""
    rng = np.random.default_rng(0)
    params = Params(max_batch=1)
    matrices = [(random_blocks(rng, 4, 2), 1, Kind.UP), (random_blocks(rng, 4, 2), 1, Kind.DOWN)]
    dut = Decode(params)
    got = run_streams(dut, [(dut.i, flat_words(matrices)), (dut.i_matrix, commands(matrices))], [(dut.o, 256)], rng=rng)
    (given,) = got.out_cycles
    assert given == list(range(given[0], given[0] + 256))
    assert given[0] == got.in_cycles[0][12] + Decode.LATENCY

    shapes = [(4, 2, 0), (4, 2, 0), (1, 1, 1)]
    drained = [(random_blocks(rng, rows, columns), mask, Kind.UP) for rows, columns, mask in shapes]
    dut = Decode(params)
    got = run_streams(dut, [(dut.i, flat_words(drained)), (dut.i_matrix, commands(drained))], [(dut.o, 16)], rng=rng)
    taken = got.in_cycles[0]
    ends = 8 * 13, 16 * 13
    assert [at - taken[0] for at in taken] == [n + 2 * sum(n >= end for end in ends) for n in range(17 * 13)]


class Aligned(wiring.Component):
    """The decoder behind the aligner, as in the engine."""

    i: stream.Interface
    i_matrix: stream.Interface
    o: stream.Interface

    def __init__(self, params: Params) -> None:
        self.align, self.decode = Align(), Decode(params)
        inside = self.decode.signature.members
        super().__init__({"i": self.align.signature.members["i"], "i_matrix": inside["i_matrix"], "o": inside["o"]})

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.align, m.submodules.decode = align, decode = self.align, self.decode
        wiring.connect(m, wiring.flipped(self.i), align.i)
        wiring.connect(m, align.o, decode.i)
        wiring.connect(m, wiring.flipped(self.i_matrix), decode.i_matrix)
        wiring.connect(m, decode.o, wiring.flipped(self.o))
        return m


def test_decode_behind_align():
    """16 cycles a block even though the decoder pauses after each: the aligner has words ready when it goes on."""
    rng = np.random.default_rng(0)
    blocks = random_blocks(rng, 20, 2)
    dut = Aligned(Params(max_batch=1))
    items = wide_beats(blocks.tobytes())
    got = run_streams(dut, [(dut.i, items), (dut.i_matrix, commands([(blocks, 1, Kind.UP)]))], [(dut.o, 640)], rng=rng)
    (given,) = got.out_cycles
    assert given == list(range(given[0], given[0] + 640))


@pytest.mark.parametrize(
    ("rows", "columns", "kind", "blocks", "error"),
    [
        (2, 2, Kind.UP, 3, ERROR_LENGTH),
        (2, 2, Kind.DOWN, 5, ERROR_LENGTH),
        (0, 1, Kind.UP, 1, ERROR_COMMAND),
        (1, 0, Kind.GATE, 1, ERROR_COMMAND),
        (1, 5, Kind.UP, 5, ERROR_COMMAND),
        (1, 5, Kind.GATE, 5, ERROR_COMMAND),
        (1, 3, Kind.DOWN, 3, ERROR_COMMAND),
    ],
)
@pytest.mark.parametrize("mask", [0, 1])
def test_decode_reports_and_discards(rows, columns, kind, blocks, error, mask):
    """A matrix that is no matrix, or whose run has another length: an error is set and nothing upstream hangs."""
    rng = np.random.default_rng(0)
    dut = Decode(Params(max_width=1024, max_expert_width=512))
    errors = []
    run = words(random_blocks(rng, blocks)) * 3
    run_streams(
        dut,
        [(dut.i, run), (dut.i_matrix, [{"rows": rows, "columns": columns, "kind": kind, "mask": mask}] * 8)],
        [(dut.o, 0)] if mask == 0 else [],
        rng=rng,
        settle=200,
        setup=[(dut.o.ready, 1)],
        finish=lambda ctx: errors.append(ctx.get(dut.error)),
    )
    assert errors == [error]


def test_decode_reports_an_unaligned_end():
    rng = np.random.default_rng(0)
    dut = Decode(Params())
    run = words(random_blocks(rng, 1))
    run[-1]["error"] = 1
    errors = []
    run_streams(
        dut,
        [(dut.i, run), (dut.i_matrix, [{"rows": 1, "columns": 1, "mask": 0}])],
        [],
        rng=rng,
        settle=5,
        finish=lambda ctx: errors.append(ctx.get(dut.error)),
    )
    assert errors == [ERROR_LENGTH]


@pytest.mark.parametrize("cut", range(1, 13))
def test_decode_gives_nothing_of_a_cut_block(cut):
    """A run that breaks off within a block: what follows does not complete that block, and nothing comes out."""
    rng = np.random.default_rng(cut)
    dut = Decode(Params())
    run = words(random_blocks(rng, 2))
    run = run[:cut] + run[13:] * 3
    run[cut - 1] |= {"last": 1, "error": 1}
    errors = []
    run_streams(
        dut,
        [(dut.i, run), (dut.i_matrix, [{"rows": 4, "columns": 1, "mask": 1}])],
        [(dut.o, 0)],
        rng=rng,
        settle=100,
        finish=lambda ctx: errors.append(ctx.get(dut.error)),
    )
    assert errors == [ERROR_LENGTH]
