import numpy as np
import pytest

from hw.gather import Gather

from .streams import STALLS, run_streams


def beats(data: bytes, link_bytes: int) -> list[dict]:
    """A run of bytes as link beats, the last one padded with 0xEE to show that padding is kept out of nothing."""
    count = -(-len(data) // link_bytes)
    padded = data.ljust(count * link_bytes, b"\xee")
    return [{"data": list(padded[i * link_bytes :][:link_bytes]), "last": i == count - 1} for i in range(count)]


@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize("link_bytes", [1, 4, 8, 16])
@pytest.mark.parametrize("seed", range(2))
def test_gather(link_bytes, p_in, p_out, seed):
    rng = np.random.default_rng(seed)
    lengths = [16, 1, 31, 210, 64, 17, *rng.integers(1, 100, 5).tolist()]
    runs = [rng.bytes(length // link_bytes * link_bytes or link_bytes) for length in lengths]
    expected = []
    for run in runs:
        for low in range(0, len(run), 16):
            part = run[low : low + 16]
            last = low + 16 >= len(run)
            expected.append((part.ljust(16, b"\0"), last, (16 - len(part)) // link_bytes))
    dut = Gather(link_bytes)
    items = [beat for run in runs for beat in beats(run, link_bytes)]
    got = run_streams(dut, [(dut.i, items)], [(dut.o, len(expected))], rng=rng, p_in=p_in, p_out=p_out, settle=8)
    assert [(bytes(list(o.data)), o.last, o.missing) for o in got.payloads[0]] == expected
    if p_in == p_out == 1:
        (taken,), (given,) = got.in_cycles, got.out_cycles
        assert taken == list(range(taken[0], taken[0] + len(items)))  # a beat every cycle
        assert given[-1] == taken[-1] + dut.latency


@pytest.mark.parametrize("bad", [0, 2, 3, 32, "8"])
def test_gather_rejects(bad):
    with pytest.raises(ValueError, match=r"link_bytes must be one of \(1, 4, 8, 16\)"):
        Gather(bad)
