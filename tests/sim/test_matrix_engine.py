"""The Verilated engine against the golden model, for every link width and number of lanes."""

import json
from dataclasses import asdict

import pytest

from hw.formats.params import Params
from hw.matrix_engine import MatrixEngine
from sim import verilator

BUILDS = [
    Params(link_bytes=16, tokens=1),
    Params(link_bytes=16, tokens=2),
    Params(link_bytes=16, tokens=4),
    Params(link_bytes=8, tokens=1, max_batch=1, max_width=256),
    Params(link_bytes=4, tokens=2, max_batch=2, max_width=768),
    Params(link_bytes=1, tokens=1, max_batch=2, max_width=512),
]


@pytest.mark.cosim
@pytest.mark.parametrize("params", BUILDS, ids=str)
def test_matrix_engine(params, tmp_path):
    runner = verilator.build(MatrixEngine(params), "matrix_engine", tmp_path)
    env = {"EMUFPGA_PARAMS": json.dumps(asdict(params))}
    verilator.run(runner, "matrix_engine", tmp_path, "sim.bench.matrix_engine", seed=1, env=env)
