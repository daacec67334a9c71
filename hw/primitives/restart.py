"""Resets that do not hold up the clock: every part has a register of its own near it."""

from amaranth.hdl import Elaboratable, Module, ResetInserter, Signal, ValueLike

from .replica import Replica


def add_parts(m: Module, parts: dict[str, Elaboratable], reset: ValueLike) -> dict[str, Signal]:
    """Make ``parts`` submodules, each reset from the cycle after ``reset`` on, by its own register; these by name."""
    resets = {}
    for name, part in parts.items():
        m.submodules[f"{name}_reset"] = copy = Replica()
        m.d.comb += copy.i.eq(reset)
        m.submodules[name] = ResetInserter(copy.o)(part)
        resets[name] = copy.o
    return resets
