"""The ECP5 instances of the primitives are equal to the plain hardware that every other test runs.

Both run side by side in Verilator, on the same random and corner values, against Python. Assumed: Lattice's cells do
what ``sim/models/ecp5_cells.v`` says, which is our reading of the vendor's guides and covers only our modes. Not
covered: timing, a ``BlockMemory``'s contents at power-up, and reads of a word being written, which its users avoid.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from amaranth.hdl import Fragment, Module, signed, unsigned
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.primitives.memory import BlockMemory, BlockRom
from hw.primitives.multiplier import Multiplier
from hw.swiglu import FACTORS
from sim import verilator

CELLS = verilator.ROOT / "sim" / "models" / "ecp5_cells.v"

pytestmark = pytest.mark.cosim


class Ecp5:
    """As much of a platform as the primitives look at."""

    device = "LFE5U-25F"


class Twins(wiring.Component):
    """Each of ``pairs``, name: (ECP5 part, plain part, output), with shared inputs and both outputs as its ports."""

    def __init__(self, pairs: dict[str, tuple[Any, Any, str]]) -> None:
        self.pairs = pairs
        ports = {}
        for name, (part, _, output) in pairs.items():
            for member_name, member in part.signature.members.items():
                if member_name == output:
                    ports |= {f"{name}_{twin}": Out(member.shape) for twin in ("vendor", "plain")}
                else:
                    ports[f"{name}_{member_name}"] = In(member.shape)
        super().__init__(ports)

    def elaborate(self, platform):
        m = Module()
        for name, (vendor, plain, output) in self.pairs.items():
            m.submodules[f"{name}_vendor_part"] = Fragment.get(vendor, Ecp5())
            m.submodules[f"{name}_plain_part"] = plain
            for twin, part in (("vendor", vendor), ("plain", plain)):
                m.d.comb += getattr(self, f"{name}_{twin}").eq(getattr(part, output))
                for member in part.signature.members:
                    if member != output:
                        m.d.comb += getattr(part, member).eq(getattr(self, f"{name}_{member}"))
        return m


MULTIPLIERS = [(signed(14), signed(16)), (unsigned(18), signed(15)), (signed(18), signed(18)), (signed(8), unsigned(3))]
MEMORIES = [(16, 512), (8, 96), (18, 1024), (36, 600), (16, 1500), (6, 4096), (3, 5000), (2, 16384), (3, 40000)]
"""(width, depth): one for every mode of the block, and some that need several blocks, or banks of them."""
ROMS = [FACTORS, [pow(3, n, 262147) & 262143 for n in range(BlockRom.DEPTH)]]


def design(multipliers, memories, roms) -> tuple[Twins, list[dict]]:
    pairs, settings = {}, []
    for n, (a, b) in enumerate(multipliers):
        pairs[f"multiplier{n}"] = Multiplier(a, b), Multiplier(a, b), "p"
        shapes = {"a": [a.width, a.signed], "b": [b.width, b.signed]}
        settings.append({"name": f"multiplier{n}", "kind": "multiplier", "latency": Multiplier.LATENCY, **shapes})
    for n, (width, depth) in enumerate(memories):
        pairs[f"memory{n}"] = BlockMemory(width, depth), BlockMemory(width, depth), "r_data"
        shapes = {"width": width, "depth": depth}
        settings.append({"name": f"memory{n}", "kind": "memory", "latency": BlockMemory.LATENCY, **shapes})
    for n, words in enumerate(roms):
        pairs[f"rom{n}"] = BlockRom(words), BlockRom(words), "data"
        settings.append({"name": f"rom{n}", "kind": "rom", "latency": BlockRom.LATENCY, "words": words})
    return Twins(pairs), settings


def run(cells: Path, build_dir: Path, *parts) -> None:
    twins, settings = design(*parts)
    runner = verilator.build(twins, "twins", build_dir, extra_sources=[cells])
    env = {"EMUFPGA_TWINS": json.dumps(settings)}
    verilator.run(runner, "twins", build_dir, "sim.bench.vendor_primitives", seed=1, env=env)


def test_ecp5_instances_equal_their_twins(tmp_path):
    run(CELLS, tmp_path, MULTIPLIERS, MEMORIES, ROMS)


def test_the_models_refuse_what_they_do_not_know(tmp_path):
    """A changed instance cannot pass unseen: here the model's idea of the settings is changed instead."""
    cells = tmp_path / "cells.v"
    cells.write_text(CELLS.read_text().replace('REGMODE_B != "OUTREG"', 'REGMODE_B != "NOREG"'))
    with pytest.raises((RuntimeError, SystemExit)):
        run(cells, tmp_path, [], MEMORIES[:1], [])
    assert "DP16KD: only the output register" in (tmp_path / "vendor_primitives.log").read_text()
