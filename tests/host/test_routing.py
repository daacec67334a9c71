"""Tokens put in an order that fetches fewer experts."""

import numpy as np
import pytest

from host.routing import in_parts


def fetched(chosen: np.ndarray, size: int) -> int:
    return sum(len(np.unique(chosen[first : first + size])) for first in range(0, len(chosen), size))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tokens", [1, 8, 9, 90])
def test_in_parts(seed, tokens):
    """Every token once, and never more experts than in the order in which they came."""
    rng = np.random.default_rng(seed)
    chosen = np.array([rng.choice(8, 2, replace=False) for _ in range(tokens)])
    order = in_parts(chosen, 8, 8)
    assert sorted(order.tolist()) == list(range(tokens))
    assert fetched(chosen[order], 8) <= fetched(chosen, 8)
    if tokens == 90:
        assert fetched(chosen[order], 8) < 0.8 * fetched(chosen, 8)
    if tokens <= 8:  # one part: nothing to gain
        assert order.tolist() == list(range(tokens))


def test_in_parts_by_hand():
    """Two kinds of tokens in turn: each kind makes a part."""
    chosen = np.array([[0, 1], [2, 3]] * 3)
    assert in_parts(chosen, 4, 3).tolist() == [0, 2, 4, 1, 3, 5]


def test_in_parts_of_a_grouped_prompt():
    """Already in the best order: it stays."""
    chosen = np.repeat([[0, 1], [2, 3], [4, 5]], 4, axis=0)
    assert in_parts(chosen, 6, 4).tolist() == list(range(12))
