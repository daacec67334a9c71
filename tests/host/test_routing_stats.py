"""Statistics of routes against a count made by hand, and against sets from all routes of a random run."""

import json

import numpy as np
import pytest

from host.routing_stats import BATCHES, RoutingStats


def chosen(*rows) -> np.ndarray:
    return np.array(rows, np.int64)


def test_by_hand():
    stats = RoutingStats(experts=4, used=2)
    stats.add(5, 0, False, chosen([0, 1], [1, 2], [1, 2]))  # shares 1, then 2, of 4
    stats.add(5, 1, False, chosen([3, 0]))
    stats.end_step()
    stats.add(5, 0, True, chosen([2, 3]))  # shares 1 with the prompt's last token
    stats.add(5, 1, True, chosen([3, 0]))  # shares 2
    stats.end_step()
    stats.forget(0)
    stats.add(5, 0, True, chosen([2, 3]))  # another request of that name
    stats.end_step()
    report = stats.report()
    json.dumps(report)
    assert report["layers"] == [5]
    assert report["tokens"] == {"prefill": 4, "decode": 3}
    assert report["counts"] == [[3, 3, 4, 4]]
    unions = {row["batch"]: row for row in report["unions"]}
    assert unions[1]["all"] == unions[1]["by_layer"][0] == {"n": 3, "mean": 2.0, "min": 2, "max": 2}
    assert unions[2]["all"] == {"n": 1, "mean": 3.0, "min": 3, "max": 3}
    assert unions[4]["all"] == {"n": 0, "mean": None, "min": None, "max": None}
    assert report["reuse"]["prefill"] == {"share": 0.75, "tokens": 2, "by_layer": [0.75]}
    assert report["reuse"]["decode"] == {"share": 0.75, "tokens": 2, "by_layer": [0.75]}


def test_nothing():
    report = RoutingStats(experts=4, used=2).report()
    assert report["reuse"]["decode"] == {"share": None, "tokens": 0, "by_layer": []}
    assert [row["all"]["n"] for row in report["unions"]] == [0] * len(BATCHES)


def test_dropped_step():
    stats = RoutingStats(experts=4, used=2)
    stats.add(0, 0, True, chosen([0, 1]))
    stats.drop_step()
    stats.end_step()
    assert stats.report()["counts"] == []


@pytest.mark.parametrize("seed", range(2))
def test_unions_of_disjoint_groups(seed):
    """Of eleven requests that decode: one group of eight, two of four, five of two."""
    rng = np.random.default_rng(seed)
    stats = RoutingStats(experts=16, used=3)
    sizes = {batch: [] for batch in BATCHES}
    for _ in range(5):
        rows = [rng.choice(16, 3, replace=False) for _ in range(11)]
        for request, row in enumerate(rows):
            stats.add(0, request, True, row[None])
        stats.end_step()
        for batch in BATCHES:
            groups = [rows[first : first + batch] for first in range(0, 11 - 11 % batch, batch)]
            sizes[batch] += [len(np.unique(group)) for group in groups]
    for row in stats.report()["unions"]:
        given = sizes[row["batch"]]
        expected = {"n": len(given), "mean": pytest.approx(np.mean(given)), "min": min(given), "max": max(given)}
        assert row["all"] == expected
