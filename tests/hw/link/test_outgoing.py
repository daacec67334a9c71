"""Requests among messages: whole, in order, between messages only."""

import numpy as np
import pytest

from hw.formats import messages
from hw.link.outgoing import Outgoing

from ..streams import STALLS, run_streams
from ..test_gather import beats


def split(run, link_bytes: int) -> list[bytes]:
    """The messages in a run of beats."""
    found, message = [], b""
    for beat in run:
        message += bytes(list(beat.data))
        if beat.last:
            found.append(message)
            message = b""
    assert not message
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("p_in", "p_out"), STALLS)
@pytest.mark.parametrize("link_bytes", [1, 8, 16])
def test_outgoing(link_bytes, p_in, p_out, seed):
    rng = np.random.default_rng(seed)
    said = [rng.bytes(16 * int(n)) for n in rng.integers(1, 6, 8)]
    asked = [(int(rng.integers(0, 1 << 48)), int(rng.integers(0, 1 << 32))) for _ in range(8)]
    dut = Outgoing(link_bytes)
    items = [beat for message in said for beat in beats(message, link_bytes)]
    count = len(items) + len(asked) * 16 // link_bytes
    got = run_streams(
        dut,
        [(dut.i, items), (dut.i_request, [{"offset": offset, "length": length} for offset, length in asked])],
        [(dut.o, count)],
        rng=rng,
        p_in=p_in,
        p_out=p_out,
        settle=8,
    )
    heard = split(got.payloads[0], link_bytes)
    fetches = [messages.fetch(*request) for request in asked]
    assert [message for message in heard if message in fetches] == fetches
    assert [message for message in heard if message not in fetches] == said
