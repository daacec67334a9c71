"""The software control: the same sums from both schedules, and the medians of what a clock says."""

from pathlib import Path

import numpy as np
import pytest

from host.model_file import ModelFile
from host.storage import Store
from sim import host_layer
from sim.workload import float64_expert, route, token_vectors

TINY = str(Path(__file__).parents[2] / "models" / "tiny-moe-q6k.gguf")


@pytest.mark.parametrize("schedule", host_layer.SCHEDULES)
def test_a_layer_is_its_experts(schedule):
    with ModelFile.open(TINY) as model, Store(TINY, ahead=False) as store:
        layer = model.layers[1]
        x = token_vectors(model, layer, b"moe!")
        routes = route(model, layer, x)
        got = host_layer.run_layer(layer, store, x, routes, schedule)
        for token, (experts, weights) in enumerate(zip(routes.experts, routes.weights, strict=True)):
            want = sum(
                weight * float64_expert(model, layer, int(expert), x[token])
                for expert, weight in zip(experts, weights, strict=True)
            )
            np.testing.assert_allclose(got[token], want, rtol=1e-9, atol=1e-12)  # float64 sums in another order


def test_what_is_read(monkeypatch):
    """All: every matrix of every expert; the union: those of the experts that a token wants."""
    asked: list[tuple[int, int]] = []
    with ModelFile.open(TINY) as model, Store(TINY, ahead=False) as store:
        read = store.read
        monkeypatch.setattr(
            store, "read", lambda offset, length: (asked.append((offset, length)), read(offset, length))[1]
        )
        layer = model.layers[0]
        x = token_vectors(model, layer, b"mo")
        routes = route(model, layer, x)
        counts = {}
        for schedule in host_layer.SCHEDULES:
            asked.clear()
            host_layer.run_layer(layer, store, x, routes, schedule)
            counts[schedule] = sum(length for _, length in asked) // layer.expert_bytes
        assert counts == {"all": 8, "union": len(np.unique(routes.experts))}


def test_medians_of_the_runs():
    """A clock that adds 1 s more each time: three runs after one that does not count."""
    now, step = 0.0, 0.0

    def clock() -> float:
        nonlocal now, step
        step += 1
        now += step
        return now

    figures = host_layer.measure(TINY, (1, 2), 3, clock)
    assert [(row["schedule"], row["batch"]) for row in figures["rows"]] == [
        ("all", 1), ("union", 1), ("all", 2), ("union", 2),
    ]  # fmt: skip
    for row in figures["rows"]:
        seconds, speed = row["seconds"], row["layer_tokens_per_second"]
        assert seconds["n"] == 3
        assert seconds["min"] < seconds["median"] < seconds["max"]
        assert speed["max"] == row["batch"] / seconds["min"]
        assert row["cpu_seconds"]["min"] > 0
    assert figures["rows"][0]["experts_read"] == 8
    assert figures["rows"][1]["experts_read"] == 2
