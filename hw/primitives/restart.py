"""Resets that do not hold up the clock: every part has a register of its own near it."""

from amaranth.hdl import ClockSignal, Const, Elaboratable, Instance, Module, ResetInserter, Signal, ValueLike
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from .platform import is_ecp5


class Replica(wiring.Component):
    """A register that synthesis keeps apart from others that hold the same.

    One register that resets thousands of others is far from most of them. Copies of it would be merged into one again,
    but for an instance on ECP5 and ``keep`` elsewhere.

    Members
    -------
    i : In; o : Out, a cycle later; 0 at first
    """

    i: Signal
    o: Signal

    def __init__(self) -> None:
        super().__init__({"i": In(1), "o": Out(1)})

    def elaborate(self, platform) -> Module:
        m = Module()
        if is_ecp5(platform):
            m.submodules.ff = Instance(
                "TRELLIS_FF",
                p_GSR="DISABLED",
                p_CEMUX="1",
                p_CLKMUX="CLK",
                p_LSRMUX="LSR",
                p_REGSET="RESET",
                p_SRMODE="LSR_OVER_CE",
                i_CLK=ClockSignal(),
                i_LSR=Const(0),
                i_DI=self.i,
                o_Q=self.o,
            )
            return m
        copy = Signal(reset_less=True, attrs={"keep": "true"})
        m.d.sync += copy.eq(self.i)
        m.d.comb += self.o.eq(copy)
        return m


def add_parts(m: Module, parts: dict[str, Elaboratable], reset: ValueLike) -> dict[str, Signal]:
    """Make ``parts`` submodules, each reset from the cycle after ``reset`` on, by its own register; these by name."""
    resets = {}
    for name, part in parts.items():
        m.submodules[f"{name}_reset"] = copy = Replica()
        m.d.comb += copy.i.eq(reset)
        m.submodules[name] = ResetInserter(copy.o)(part)
        resets[name] = copy.o
    return resets
