"""Bench of primitives' vendor instances beside their plain twins; see ``tests/hw/test_vendor_primitives.py``.

``EMUFPGA_TWINS`` tells the pairs in the design: a JSON list of objects with ``name`` (prefix of its ports), ``kind``,
``latency`` and the shapes or words.
"""

import json
import os

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import RisingEdge

PAIRS = json.loads(os.environ["EMUFPGA_TWINS"])
BANK = 16384
"""Words of a bank in memories that have several."""


def port(dut, pair: dict, name: str):
    return getattr(dut, f"{pair['name']}_{name}")


def expect(dut, pair: dict, want: int) -> None:
    for twin in ("vendor", "plain"):
        got = int(port(dut, pair, twin).value)
        assert got == want, f"{pair['name']}: {twin} gives {got:#x}, not {want:#x}"


def corners(rng: np.random.Generator, width: int, is_signed: bool) -> list[int]:
    low = -(1 << width - 1) if is_signed else 0
    high = (1 << width - is_signed) - 1
    return [low, low + 1, high, high - 1, 0, 1, *rng.integers(low, high + 1, 30).tolist()]


@cocotb.test(timeout_time=1, timeout_unit="ms")
async def multipliers(dut):
    """Every pair of corners and random factors, a new one every cycle: both products are Python's, at the same time."""
    rng = np.random.default_rng(cocotb.RANDOM_SEED)
    Clock(dut.clk, 10, unit="ns").start()
    dut.rst.value = 0
    for pair in PAIRS:
        if pair["kind"] != "multiplier":
            continue
        (a_width, a_signed), (b_width, b_signed) = pair["a"], pair["b"]
        mask = (1 << a_width + b_width) - 1
        due = []
        for a in corners(rng, a_width, a_signed):
            for b in corners(rng, b_width, b_signed):
                port(dut, pair, "a").value = a & ((1 << a_width) - 1)
                port(dut, pair, "b").value = b & ((1 << b_width) - 1)
                due.append(a * b & mask)
                await RisingEdge(dut.clk)  # what we read now is from before the edge
                if len(due) > pair["latency"]:
                    expect(dut, pair, due.pop(0))


@cocotb.test(timeout_time=10, timeout_unit="ms")
async def memories(dut):
    """Fill, then write and read anywhere but where it was just written: both give the last value, on time."""
    rng = np.random.default_rng(cocotb.RANDOM_SEED)
    Clock(dut.clk, 10, unit="ns").start()
    dut.rst.value = 0
    for pair in PAIRS:
        if pair["kind"] != "memory":
            continue
        width, depth = pair["width"], pair["depth"]
        content, just_written, due = {}, [], []
        places = rng.permutation(depth)[:BANK].tolist()
        if depth > BANK:  # not all of it, but where banks meet
            places = [*places[:3000], *range(BANK - 1, depth, BANK), *range(0, depth, BANK), depth - 1]
        writes = [(address, True) for address in places]
        writes += [(places[int(rng.integers(len(places)))], bool(rng.random() < 0.5)) for _ in range(1000)]
        for address, enable in writes:
            value = int.from_bytes(rng.bytes(-(-width // 8)), "little") & ((1 << width) - 1)
            for name, driven in (("w_addr", address), ("w_data", value), ("w_en", enable)):
                port(dut, pair, name).value = driven
            read = places[int(rng.integers(len(places)))]
            port(dut, pair, "r_addr").value = read
            due.append(None if read in (address, *just_written) else content.get(read))
            just_written = [address]
            if enable:
                content[address] = value
            await RisingEdge(dut.clk)
            if len(due) > pair["latency"] and (want := due.pop(0)) is not None:
                expect(dut, pair, want)


@cocotb.test(timeout_time=1, timeout_unit="ms")
async def roms(dut):
    """Every word, in any order, a new place every cycle."""
    rng = np.random.default_rng(cocotb.RANDOM_SEED)
    Clock(dut.clk, 10, unit="ns").start()
    dut.rst.value = 0
    for pair in PAIRS:
        if pair["kind"] != "rom":
            continue
        words, due = pair["words"], []
        for address in [*rng.permutation(len(words)).tolist(), *[0] * pair["latency"]]:
            port(dut, pair, "addr").value = address
            due.append(words[address])
            await RisingEdge(dut.clk)
            if len(due) > pair["latency"]:
                expect(dut, pair, due.pop(0))
