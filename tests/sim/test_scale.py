"""The commands that measure at a model's size, on small cases; and that their committed results say what they claim."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hw.formats.messages import Mode
from models import synthetic
from sim import record, replay, sweep, whole_token
from sim.golden import layer as golden
from sim.golden.layer import Route

TRACE = Path(os.environ.get("EMUFPGA_ROUTES", record.RESULTS.parents[2] / "shared/data/routes/qwen.route.csv"))
TRACE_TEXT = """# route_trace v1
# model=some.gguf arch=x n_layer=2 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=1 dense_bytes=1
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,3,0.75,0,1
0,0,0,0,1,1,0.25,0,1
0,0,0,1,0,5,1.0,0,1
0,0,1,0,0,3,0.5,0,1
0,0,1,0,1,7,0.5,0,1
"""


@pytest.mark.cosim
def test_whole_token(tmp_path):
    """Two layers in sequence; the committed run is the same command on all 24."""
    path = tmp_path / "small.gguf"
    synthetic.write(path, synthetic.SHAPES["granite-1b"], 2, seed=1)
    figures = whole_token.run(path, board="ulx3s_25f")
    assert figures["bit_exact"] is True
    assert (figures["layers"], figures["outputs"]) == (2, 2 * 1024)
    assert figures["bytes_requested"] == 2 * 10_321_920
    assert figures["blocks"] == 2 * 49_152
    assert 16 <= figures["cycles_per_block"] <= 16.25


def test_committed_token():
    figures = json.loads((record.RESULTS / "token.json").read_text())
    assert figures["bit_exact"] is True
    assert (figures["layers"], figures["bytes_requested"], figures["blocks"]) == (24, 247_726_080, 1_179_648)
    assert figures["cycles_per_block"] == figures["cycles"] / figures["blocks"] <= 16.25


def test_committed_sweep():
    figures = json.loads((record.RESULTS / "sweep.json").read_text())
    assert figures["bit_exact"] is True
    rows = {(row["rate"], row["latency"], row["outstanding"]): row for row in figures["rows"]}
    assert len(rows) == len(sweep.RATES) * len(sweep.LATENCIES) * len(sweep.OUTSTANDING)
    for (rate, _, _), row in rows.items():
        assert sum(row[state] for state in sweep.STATES) <= row["cycles"]
        assert row["cycles_per_block"] >= max(16, 210 / rate) - 1e-9
    assert str(max(sweep.RATES)) in sweep.table(figures)


def test_the_bytes_of_a_granite_layer():
    """What the issue of bytes comes down to: the ledger's arithmetic for Granite 3.1 1B-A400M."""
    layer = golden.Layer(1024, 512, 32, (0, 32 * 430_080, 64 * 430_080))
    eight = [Route(0, expert, 8192) for expert in range(0, 32, 4)]
    assert sum(length for _, length in golden.requests(layer, eight)) == 10_321_920
    tape = replace(layer, mode=Mode.TAPE)
    assert sum(length for _, length in golden.requests(tape, eight)) == 41_287_680


def test_trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE_TEXT)
    trace = replay.read_trace(path, 0)
    assert trace == replay.Trace("some.gguf", 8, 0, [[(3, 0.75), (1, 0.25)], [(3, 0.5), (7, 0.5)]])
    with pytest.raises(ValueError, match=r"trace\.csv: no routes of layer 2"):
        replay.read_trace(path, 2)
    path.write_text("turn,phase\n")
    with pytest.raises(ValueError, match=r"trace\.csv: line 1 is 'turn,phase', not '# route_trace v1'"):
        replay.read_trace(path, 0)


@pytest.mark.cosim
@pytest.mark.skipif(not TRACE.exists(), reason=f"no route trace at {TRACE}; set EMUFPGA_ROUTES")
def test_replay():
    """A real model's routes: the engine fetches each batch's union, no more and no less."""
    figures = replay.replay(replay.read_trace(TRACE, 0), replay.BATCHES)
    assert figures["equal"] is True
    assert [row["union_engine"] for row in figures["rows"]] == [row["union_trace"] for row in figures["rows"]]
    committed = json.loads((record.RESULTS / "unions.json").read_text())
    assert committed["rows"] == figures["rows"]
