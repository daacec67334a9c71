import numpy as np
import pytest
from amaranth.hdl import Elaboratable, Module
from amaranth.lib import stream

from hw.formats.params import Params
from hw.normalise import ARGUMENT_BITS
from hw.swiglu import Swiglu, swiglu_output
from sim.golden import swiglu

from .elements import real, router_weights, scaled
from .streams import run_streams

PARAMS = Params(max_batch=4)
ONE = 1 << 40


class SwigluStream(Elaboratable):
    """Its output as a stream whose taker must be always ready."""

    def __init__(self) -> None:
        self.swiglu = Swiglu(PARAMS)
        self.i, self.o = self.swiglu.i, stream.Signature(swiglu_output(PARAMS)).create()

    def elaborate(self, platform):
        m = Module()
        m.submodules.swiglu = swiglu = self.swiglu
        m.d.comb += [self.o.valid.eq(swiglu.o_valid), self.o.payload.eq(swiglu.o)]
        return m


def run(g, u, p, *, p_in=1.0, seed=0):
    """Elements with places that tell them apart; the run and the places."""
    rng = np.random.default_rng(seed)
    arguments = [min((abs(value) + (1 << 23)) >> 24, (1 << ARGUMENT_BITS) - 1) for value in g]
    places = [
        {"token": n % PARAMS.max_batch, "row": n % PARAMS.max_expert_width, "end": int(rng.integers(2))}
        for n in range(len(g))
    ]
    elements = [
        {"g": g, "argument": argument, "u": u, "p": p, "place": place}
        for g, argument, u, p, place in zip(scaled(g), arguments, scaled(u), router_weights(p), places, strict=True)
    ]
    dut = SwigluStream()
    limit = int(16 * len(g) + len(g) / p_in + 1000)
    got = run_streams(dut, [(dut.i, elements)], [(dut.o, len(g))], rng=rng, p_in=p_in, limit=limit, settle=130)
    return got, places


def check(g, u, p, **how):
    got, places = run(g, u, p, **how)
    want = swiglu.swiglu(g, u, p).tolist()
    values = [real(o.h) for o in got.payloads[0]]
    assert [case for case in zip(g, u, p, values, want, strict=True) if case[-2] != case[-1]] == []
    assert [{field: o.place[field] for field in ("token", "row", "end")} for o in got.payloads[0]] == places
    return got


def test_swiglu_corners():
    """Each factor at its corners, the others at one or at random."""
    rng = np.random.default_rng(0)
    edges = [0, 1, 2, 3, 2**18 - 1, 2**18, 2**18 + 1, 2**19 - 1, ONE - 1, ONE, ONE + 1, 2**62, 2**63 - 2, 2**63 - 1]
    edges = [sign * edge for edge in edges for sign in (1, -1)] + [-(2**63)]
    arguments = [(whole << 40) + d for whole in (63, 64, 65) for d in (0, -(2**23) - 1, -(2**23), 2**23 - 1, 2**23)]
    arguments += [(n << 32) + d for n in (1, 2, 255, 256, 257, 2000) for d in (0, -(2**24), 2**23, 2**24)]
    arguments += [n << 24 for n in (1, 2, 127, 128, 129, 255)] + [(40 + n) * ONE for n in range(0, 24, 5)]
    cases = [(g, ONE, 65536) for g in edges] + [(s * g, -3 * ONE, 65536) for g in arguments for s in (1, -1)]
    cases += [(3 * ONE, u, 65536) for u in edges] + [(-ONE, ONE, p) for p in (0, 1, 2, 3, 32768, 65535, 65536)]
    cases += [(s * ONE, 2**63 - 1, p) for s in (1, -1) for p in (0, 1, 65535)]
    cases += [[int(choice[rng.integers(len(choice))]) for choice in (edges, edges, (0, 1, 65535))] for _ in range(50)]
    check(*map(list, zip(*cases, strict=True)))


def test_swiglu_at_every_interval():
    """g where the tables' intervals of exp begin, or those of the reciprocal."""
    z = np.arange(0, 64 << 8, 37) / 256
    g = np.concatenate([-z, np.log(np.arange(1, 257) / 256)])
    g = np.rint(g * ONE).astype(np.int64)
    g[1::2] *= -1
    check(g.tolist(), [3 * ONE] * len(g), [65536] * len(g))


@pytest.mark.parametrize(("p_in", "size"), [(1.0, 3000), (0.3, 300), (0.05, 100)])
def test_swiglu_random(p_in, size):
    rng = np.random.default_rng(size)
    g, u = (np.exp2(rng.uniform(0, 63, size)) * rng.choice([-1, 1], size) for _ in range(2))
    g[: size // 2] = np.exp2(rng.uniform(30, 46, size // 2)) * rng.choice([-1, 1], size // 2)
    p = np.exp2(rng.uniform(0, 16, size)).astype(np.int64)
    check(g.astype(np.int64).tolist(), u.astype(np.int64).tolist(), p.tolist(), p_in=p_in)


def test_swiglu_throughput_and_latency():
    """One every eight cycles once all sixteen places are taken; each stays for ``LATENCY``, wherever the ring is."""
    got = check([ONE] * 64, [ONE] * 64, [65536] * 64)
    (taken,), (given,) = got.in_cycles, got.out_cycles
    assert taken == [taken[0] + 128 * (n // 16) + n % 16 for n in range(64)]
    assert given == [n + Swiglu.LATENCY for n in taken]
    got = check([ONE, -ONE] * 3, [ONE] * 6, [1] * 6, p_in=0.005)
    (taken,), (given,) = got.in_cycles, got.out_cycles
    assert given == [n + Swiglu.LATENCY for n in taken]
    assert len({n % 16 for n in taken}) > 3
