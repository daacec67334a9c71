from itertools import pairwise

import numpy as np
import pytest

from hw.link.narrow import Narrow

from ..streams import STALLS, run_streams
from ..test_gather import beats


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
def test_narrow(p_in, p_out, seed):
    rng = np.random.default_rng(seed)
    runs = [rng.bytes(16 * int(n)) for n in rng.integers(1, 4, 5)]
    dut = Narrow(16)
    items = [beat for run in runs for beat in beats(run, 16)]
    expected = [(byte, index == len(run) - 1) for run in runs for index, byte in enumerate(run)]
    got = run_streams(dut, [(dut.i, items)], [(dut.o, len(expected))], rng=rng, p_in=p_in, p_out=p_out, settle=8)
    assert [(beat.data[0], beat.last) for beat in got.payloads[0]] == expected
    if p_in == p_out == 1:
        taken = got.in_cycles[0]
        assert all(after - before == 17 for before, after in pairwise(taken))
