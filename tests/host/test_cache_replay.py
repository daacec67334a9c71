import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from host import cache_replay, routing
from host.cache_replay import Pass, lru, optimum, passes, replay, reuse
from host.cli import main
from host.routing import RouteTrace, TraceRow

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("EMUFPGA_ROUTES", ROOT.parent / "shared/data/routes/qwen.route.csv")).parent
# Published with the traces: no cache, MiB a token; then a global LRU of so many MiB, hit rate.
KNOWN = {
    "qwen.route.csv": (785, 4000, 0.749, 6 * 48),
    "gemma.route.csv": (676, 4000, 0.768, 6 * 30),
    "gptoss.route.csv": (908, 3000, 0.324, 2 * 36),
}
real = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not (FOLDER / name).exists(), reason=f"no route trace at {FOLDER / name}; set EMUFPGA_ROUTES"
            ),
        )
        for name in KNOWN
    ],
)


def trace_of(layers: list[list[list[int]]], size: int = 1) -> RouteTrace:
    """``layers[layer][token]``: experts of decoded tokens."""
    rows = [
        TraceRow(0, True, step, layer, expert, 1.0, None)
        for step in range(len(layers[0]))
        for layer in range(len(layers))
        for expert in layers[layer][step]
    ]
    return RouteTrace(Path("made.csv"), "made", 64, 2, dict.fromkeys(range(len(layers)), size), rows)


def random_trace(seed: int, *, layers: int = 3, tokens: int = 40, experts: int = 12, used: int = 3) -> RouteTrace:
    rng = np.random.default_rng(seed)
    favour = rng.dirichlet(np.full(experts, 0.4), layers) + 0.01
    favour /= favour.sum(axis=1, keepdims=True)
    choose = lambda layer: rng.choice(experts, used, replace=False, p=favour[layer]).tolist()  # noqa: E731
    return trace_of([[choose(layer) for _ in range(tokens)] for layer in range(layers)])


@real
def test_known_figures(name):
    no_cache, mib, rate, _ = KNOWN[name]
    report = replay(FOLDER / name, [mib], ["global"])
    (row,) = report["rows"]
    assert round(report["no_cache_mib"]) == no_cache
    assert round(row["hit_rate"], 3) == rate
    # The program that was traced had this cache, and wrote down what it found there: every one of them is the same.
    assert row["record_agrees"] == report["recorded_experts"] > 4000


@real
def test_less_than_a_token(name):
    """A layer's share less than a token's set: nothing is ever found; with it: something."""
    trace = routing.read(FOLDER / name)
    found = [each for each in passes(trace) if each.decoded]
    one = KNOWN[name][3] // trace.used
    equal = replace(trace, expert_bytes=dict.fromkeys(trace.expert_bytes, 1))
    for capacity in (1, one, trace.used * one - trace.used):
        assert lru(equal, found, "global", capacity).hits == [0, 0]
    assert lru(equal, found, "global", trace.used * one).hits[1] > 0


@real
def test_recorded(name):
    committed = json.loads(cache_replay.RECORDED.read_text())
    (trace,) = [each for each in committed["traces"] if each["source"].startswith(name)]
    again = replay(FOLDER / name, cache_replay.SIZES, cache_replay.POLICIES)
    assert again == trace | {"source": str(FOLDER / name)}


def test_recorded_says_what_it_claims():
    committed = json.loads(cache_replay.RECORDED.read_text())
    assert len(committed["traces"]) == len(KNOWN)
    for trace in committed["traces"]:
        assert routing.SOURCE in trace["source"]
        rows = {(row["mib"], row["policy"]): row for row in trace["rows"]}
        for (mib, policy), row in rows.items():
            assert row["hit_rate"] <= rows[mib, "optimum"]["hit_rate"], (mib, policy)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("capacity", [2, 5, 9, 14, 20])
def test_optimum_is_no_worse(seed, capacity):
    trace = random_trace(seed)
    found = passes(trace)
    best = optimum(trace, found, capacity)
    for policy in ("global", "layer"):
        some = lru(trace, found, policy, capacity)
        assert some.experts == best.experts
        assert some.hits[1] <= best.hits[1]
        assert some.missed_bytes[1] == some.experts[1] - some.hits[1]


@pytest.mark.parametrize("seed", range(30))
def test_optimum_is_the_best_there_is(seed):
    """Against every choice of what to keep after each pass."""
    trace = random_trace(seed, layers=1, tokens=6, experts=5, used=2)
    found = passes(trace)
    for capacity in (1, 2, 3):
        states = {frozenset[int](): 0}
        for each in found:
            wanted = frozenset(each.experts)
            after: dict[frozenset[int], int] = {}
            for kept, hits in states.items():
                for choice in subsets(kept | wanted, capacity):
                    after[choice] = max(after.get(choice, 0), hits + len(kept & wanted))
            states = after
        assert optimum(trace, found, capacity).hits[1] == max(states.values())


def subsets(items: frozenset[int], most: int) -> list[frozenset[int]]:
    found = [frozenset[int]()]
    for item in items:
        found += [each | {item} for each in found if len(each) < most]
    return found


def test_by_hand():
    """Two layers, two experts a token, room for five, so that one of the second token's finds no room to stay."""
    trace = trace_of([[[0, 1], [1, 2], [0, 2]], [[4, 5], [4, 5], [6, 4]]])
    # Layer 0 misses 0, 1; layer 1 misses 4, 5; then 1 hits, 2 takes the fifth place; 4, 5 hit; 0 hits, 2 hits;
    # 6 throws out 1, the oldest; 4 hits.
    counts = lru(trace, passes(trace), "global", 5)
    assert (counts.experts[1], counts.hits[1]) == (12, 6)
    # Two places each: layer 0: 1 hits and 2 throws out 0; 0 throws out 1, 2 hits. Layer 1: 4, 5 hit; 6 for 5, 4 hits.
    counts = lru(trace, passes(trace), "layer", 4)
    assert counts.hits[1] == 5
    assert reuse(passes(trace)) == (1 / 2 + 1 / 2 + 1 + 1 / 2) / 4


def test_prompt_is_one_pass():
    rows = [TraceRow(0, False, step, 0, expert, 1.0, None) for step, expert in enumerate([3, 1, 3, 2])]
    rows += [TraceRow(0, True, 4, 0, expert, 1.0, True) for expert in (3, 2)]
    trace = RouteTrace(Path("made.csv"), "made", 8, 2, {0: 1}, rows)
    found = passes(trace)
    assert found[0] == Pass(False, 0, (3, 1, 3, 2), (None,) * 4)
    counts = lru(trace, found, "global", 3)
    assert (counts.experts, counts.hits, counts.agrees) == ([3, 2], [0, 2], 2)
    assert lru(trace, found, "global", 2).hits == [0, 1]


@pytest.fixture
def path(tmp_path):
    lines = ["# route_trace v1", "# model=m.gguf arch=x n_layer=1 n_expert=8 n_expert_used=2"]
    lines += ["# layer=0 expert_bytes=1048576 dense_bytes=0", "turn,phase,step,layer,slot,expert,weight"]
    lines += [
        f"0,1,{step},0,{slot},{e},0.5" for step, pair in enumerate([(0, 1), (1, 2)]) for slot, e in enumerate(pair)
    ]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_command(capsys, path):
    assert main(["replay", str(path), "--cache-mib", "2", "3", "--policy", "global"]) == 0
    out, err = capsys.readouterr()
    assert "no cache: 2 MiB a token (derived); reuse of the token before's experts: 50.0% (counted)" in out
    assert "      2 global       25.0%     25.0%          2" in out
    assert "2 MiB, global" in err
    assert main(["replay", str(path), "--no-cache", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["traces"][0]["rows"] == []
    assert report["traces"][0]["no_cache_mib"] == 2
    assert report["command"] == "emufpga replay t.csv --no-cache"
    assert set(report["provenance"]) >= {"no_cache_mib", "hit_rate", "reuse"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cache-mib", "0"], "0 MiB is no size; give 1 or more"),
        (["--cache-mib", "many"], "invalid mebibytes value: 'many'"),
        (["--cache-mib", "4", "--no-cache"], "not allowed with argument --cache-mib"),
        (["--policy", "fifo"], "invalid choice: 'fifo'"),
    ],
)
def test_usage(capsys, path, arguments, text):
    assert main(["replay", str(path), *arguments]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("# route_trace v1", "# other", "line 1 is '# other', not '# route_trace v1'; give a route_trace v1 file"),
        ("0,1,1,0,1,2", "0,1,1,0,1,two", "damaged route_trace v1 file: ValueError: invalid literal for int"),
        ("# layer=0 ", "# layer=1 ", "no bytes of an expert of layer 0"),
        ("n_expert_used=2", "", "damaged route_trace v1 file: KeyError: 'n_expert_used'"),
        ("\n0,1,", "\n0,0,", "no decoded tokens"),
    ],
)
def test_damaged_traces(capsys, path, old, new, text):
    path.write_text(path.read_text().replace(old, new))
    assert main(["replay", str(path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"emufpga: error: {path}: ")
    assert text in err
    assert err.count("\n") == 1


def test_no_trace(capsys, tmp_path):
    assert main(["replay", str(tmp_path / "none.csv")]) == 1
    assert "none.csv: cannot read: No such file or directory" in capsys.readouterr().err
