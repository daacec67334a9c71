"""Experts in the board's memory: the Verilated engine and AXI master against cocotbext-axi's memory."""

import json
from dataclasses import asdict

import pytest
from amaranth.hdl import Module, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.engine import Engine
from hw.formats.params import Params
from hw.layouts import REQUEST, link_beat
from hw.link.axi4 import AxiMemory, axi_ports
from sim import verilator


class Top(wiring.Component):
    """The engine and its memory's master; ``link_reset`` resets the engine alone, as a new connection does."""

    link_reset: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        beat = stream.Signature(link_beat(params.link_bytes))
        ports = {"i": In(beat), "o": Out(beat), "o_request": Out(stream.Signature(REQUEST)), "link_reset": In(1)}
        super().__init__(ports | axi_ports(params.memory_bits))

    def elaborate(self, platform) -> Module:
        m = Module()
        engine = Engine(self.params)
        m.submodules.engine = ResetInserter(self.link_reset)(engine)
        m.submodules.memory = memory = AxiMemory(self.params.memory_bits)
        for name in ("i", "o", "o_request"):
            wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(engine, name))
        wiring.connect(m, engine.o_read, memory.i_read)
        wiring.connect(m, memory.o_read, engine.i_read)
        wiring.connect(m, engine.o_write, memory.i_write)
        m.d.comb += [
            engine.write_busy.eq(memory.write_busy),
            engine.memory_error.eq(memory.error),
            memory.flush.eq(engine.flush | self.link_reset),
        ]
        for name, member in axi_ports(self.params.memory_bits).items():
            inside, outside = getattr(memory, name), getattr(self, name)
            m.d.comb += inside.eq(outside) if member.flow == In else outside.eq(inside)
        return m


@pytest.mark.cosim
def test_memory(tmp_path):
    params = Params(tokens=2, max_batch=2, max_width=256, max_expert_width=256, max_experts=4, memory_bits=20)
    runner = verilator.build(Top(params), "memory", tmp_path)
    env = {"EMUFPGA_PARAMS": json.dumps(asdict(params))}
    verilator.run(runner, "memory", tmp_path, "sim.bench.memory", seed=1, env=env)


def test_a_memory_needs_a_link_of_its_width():
    with pytest.raises(ValueError, match="memory_bits = 20 needs link_bytes = 16, not 8"):
        Engine(Params(link_bytes=8, memory_bits=20))
