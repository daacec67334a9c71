import numpy as np
import pytest
from amaranth.hdl import Elaboratable, Module

from hw.activations import Activations
from hw.formats.params import Params
from hw.mac import Mac
from sim.golden import activations, matmul, q6_k
from sim.workload import random_blocks

from .blocks import block, heavy_tailed, load_words
from .streams import STALLS, run_streams


class MacAndStore(Elaboratable):
    """The multipliers with the memory they read from."""

    def __init__(self, params: Params) -> None:
        self.mac, self.store = Mac(params), Activations(params)

    def elaborate(self, platform):
        m = Module()
        m.submodules.mac, m.submodules.store = mac, store = self.mac, self.store
        m.d.comb += [
            store.x_group.eq(mac.x_group),
            store.x_column.eq(mac.x_column),
            store.x_index.eq(mac.x_index),
            mac.x.eq(store.x),
        ]
        return m


def beats(blocks: np.ndarray, group: int, column: int, lanes: int) -> list[dict]:
    decoded = q6_k.decode(blocks)
    return [
        {
            "weights": decoded.weights[16 * index :][:16].tolist(),
            "scale": int(decoded.scales[index]),
            "index": index,
            "tag": {"group": group, "column": column, "lanes": lanes, "mantissa": -column - 1, "exponent": -group},
        }
        for index in range(16)
    ]


def run_mac(params, x: activations.Activations, blocks, places, *, rng, p_in=1.0, p_out=1.0):
    """Load ``x``, then multiply ``blocks[n]`` for ``places[n]`` = (group, column)."""
    dut = MacAndStore(params)
    items = [beat for b, (g, c) in zip(blocks, places, strict=True) for beat in beats(b, g, c, 1)]
    loads = load_words(x)

    return run_streams(
        dut,
        [(dut.store.i, loads), (dut.mac.i, items)],
        [(dut.mac.o, len(blocks))],
        rng=rng,
        p_in=p_in,
        p_out=p_out,
        settle=30,
        in_turn=True,
    )


CORNERS = [
    (block(-32, -128, 1.0), -32768),  # the one product of 2**27 in magnitude, 256 times: -2**35
    (block(-32, -128, 1.0), 32767),
    (block(31, 127, 1.0), 32767),
    (block(31, -128, 1.0), -32768),
    (block(0, 127, 1.0), 32767),
    (block(-1, 1, 1.0), 1),
]


@pytest.mark.parametrize(("block_", "value"), CORNERS)
def test_mac_corners(block_, value):
    x = activations.Activations(np.full((1, 1, 256), value, np.int16), np.zeros((1, 1), np.int8))
    got = run_mac(Params(max_batch=1), x, [block_], [(0, 0)], rng=np.random.default_rng(0))
    decoded = q6_k.decode(block_)
    want = 256 * int(decoded.weights[0]) * int(decoded.scales[0]) * value
    assert list(got.payloads[0][0].sums) == [want]
    assert want == matmul.block_sums(block_[None, None], x.mantissas)[0, 0, 0]


@pytest.mark.parametrize(("p_in", "p_out"), [*STALLS, (1.0, 0.02)])
@pytest.mark.parametrize("params", [Params(max_batch=2), Params(tokens=4, max_batch=8, max_width=512)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_mac(seed, params, p_in, p_out):
    rng = np.random.default_rng(seed)
    x = activations.quantize(heavy_tailed(rng, params.max_batch, params.max_width))
    places = [(int(rng.integers(params.passes)), int(rng.integers(params.max_columns))) for _ in range(8)]
    blocks = random_blocks(rng, len(places))
    got = run_mac(params, x, blocks, places, rng=rng, p_in=p_in, p_out=p_out)
    for b, (group, column), out in zip(blocks, places, got.payloads[0], strict=True):
        lanes = slice(group * params.tokens, (group + 1) * params.tokens)
        want = matmul.block_sums(b[None, None], x.mantissas[lanes, column : column + 1])[:, 0, 0]
        assert list(out.sums) == want.tolist()
        assert (out.tag.group, out.tag.column, out.tag.lanes) == (group, column, 1)
        assert (out.tag.mantissa, out.tag.exponent) == (-column - 1, -group)


@pytest.mark.parametrize("params", [Params(max_batch=1), Params(tokens=2, max_batch=2)], ids=str)
def test_mac_throughput_and_latency(params):
    rng = np.random.default_rng(0)
    x = activations.quantize(heavy_tailed(rng, params.max_batch, 1024))
    got = run_mac(params, x, random_blocks(rng, 8), [(0, n % 4) for n in range(8)], rng=rng)
    taken, (given,) = got.in_cycles[1], got.out_cycles
    assert taken == list(range(taken[0], taken[0] + 128))  # a sub-block every cycle
    assert given == [last + Mac(params).latency for last in taken[15::16]]
