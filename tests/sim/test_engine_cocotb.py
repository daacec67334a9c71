"""The Verilated engine under cocotb, seen from outside: stalls on every stream, payloads that must hold."""

import json
from dataclasses import asdict

import pytest

from hw.engine import Engine
from hw.formats.params import Params
from sim import verilator


@pytest.mark.cosim
def test_engine(tmp_path):
    params = Params(link_bytes=8, tokens=2, max_batch=4, max_width=256, max_expert_width=256, max_experts=4)
    runner = verilator.build(Engine(params), "engine", tmp_path)
    env = {"EMUFPGA_PARAMS": json.dumps(asdict(params))}
    verilator.run(runner, "engine", tmp_path, "sim.bench.engine", seed=1, env=env)
