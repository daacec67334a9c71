import numpy as np
import pytest

from hw.align import Align

from .streams import STALLS, run_streams

WORDS = 13


def wide_beats(data: bytes, missing: int = 0) -> list[dict]:
    count = -(-len(data) // 16)
    padded = data.ljust(16 * count, b"\0")
    return [
        {
            "data": list(padded[16 * i :][:16]),
            "last": i == count - 1,
            "missing": missing if i == count - 1 else 0,
        }
        for i in range(count)
    ]


@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize("seed", range(3))
def test_align(seed, p_in, p_out):
    rng = np.random.default_rng(seed)
    runs = [rng.bytes(210 * blocks) for blocks in [1, 8, 3, 16, 9, *rng.integers(1, 12, 4).tolist()]]
    dut = Align()
    items = [beat for run in runs for beat in wide_beats(run)]
    words = WORDS * sum(len(run) // 210 for run in runs)
    got = run_streams(dut, [(dut.i, items)], [(dut.o, words)], rng=rng, p_in=p_in, p_out=p_out, settle=8)
    words = iter(got.payloads[0])
    for run in runs:
        for block in range(len(run) // 210):
            at = 210 * block
            cut = [next(words) for _ in range(WORDS)]
            for index, word in enumerate(cut):
                assert bytes(list(word.data)) == run[at + 16 * index :][:16]
                assert word.index == index
                assert word.last == (at + 210 == len(run) and index == WORDS - 1)
                assert not word.error
            assert cut[-1].d.to_bytes(2, "little") == run[at + 208 :][:2]


def test_align_throughput_and_latency():
    dut = Align()
    items = wide_beats(bytes(210 * 64))
    got = run_streams(dut, [(dut.i, items)], [(dut.o, WORDS * 64)], rng=np.random.default_rng(0))
    (taken,), (given,) = got.in_cycles, got.out_cycles
    assert len(items) == 8 * Align.BEATS_PER_8_BLOCKS == 840
    assert taken == list(range(taken[0], taken[0] + 840))  # a beat every cycle: 13.125 cycles a block
    assert given[-1] == taken[-1] + Align.LATENCY


@pytest.mark.parametrize("link_bytes", [1, 4, 8, 16])
def test_align_tells_wrong_lengths(link_bytes):
    """Every length of a run near one and two blocks: right only where it ends with a block, padded to a beat."""
    for length in [*range(1, 40), *range(190, 240), *range(400, 440)]:
        if length % link_bytes:
            continue  # a link cannot send it
        run = bytes(length)
        dut = Align(link_bytes)
        items = wide_beats(run, (-length % 16) // link_bytes)
        blocks = length // 210
        padding = length - 210 * blocks
        right = blocks > 0 and padding < link_bytes
        count = max(1, len(items) - 1)  # the first beat of a run gives no word unless it is the last
        got = run_streams(dut, [(dut.i, items)], [(dut.o, count)], rng=np.random.default_rng(0), settle=4)
        final = got.payloads[0][-1]
        assert final.last == 1, length
        assert final.error == (not right), length
        assert [w.last for w in got.payloads[0][:-1]] == [0] * (count - 1)


def test_align_recovers_after_a_wrong_length():
    dut = Align()
    block = bytes(range(210))
    items = wide_beats(bytes(100)) + wide_beats(block)
    got = run_streams(dut, [(dut.i, items)], [(dut.o, 6 + WORDS)], rng=np.random.default_rng(0))
    assert got.payloads[0][5].error
    after = got.payloads[0][6:]
    assert b"".join(bytes(list(w.data)) for w in after) == block[:208]
    assert after[-1].d.to_bytes(2, "little") == block[208:]
    assert not any(w.error for w in after)


def test_align_rejects():
    with pytest.raises(ValueError, match="link_bytes must be one of"):
        Align(5)
