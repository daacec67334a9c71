"""A register that stays apart from others that hold the same, to be near those who read it."""

from amaranth.hdl import ClockSignal, Const, Instance, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from .platform import is_ecp5


class Replica(wiring.Component):
    """A register that synthesis keeps apart from others that hold the same.

    One register that thousands of others wait for is far from most of them. Copies of it would be merged into one
    again, but for an instance on ECP5 and ``keep`` elsewhere.

    Parameters
    ----------
    width
        In bits.

    Members
    -------
    i : In; o : Out, a cycle later; 0 at first
    """

    LATENCY = 1

    i: Signal
    o: Signal

    def __init__(self, width: int = 1) -> None:
        super().__init__({"i": In(width), "o": Out(width)})

    def elaborate(self, platform) -> Module:
        m = Module()
        if is_ecp5(platform):
            for bit, (i, o) in enumerate(zip(self.i, self.o, strict=True)):
                m.submodules[f"ff{bit}"] = Instance(
                    "TRELLIS_FF",
                    p_GSR="DISABLED",
                    p_CEMUX="1",
                    p_CLKMUX="CLK",
                    p_LSRMUX="LSR",
                    p_REGSET="RESET",
                    p_SRMODE="LSR_OVER_CE",
                    i_CLK=ClockSignal(),
                    i_LSR=Const(0),
                    i_DI=i,
                    o_Q=o,
                )
            return m
        copy = Signal.like(self.o, reset_less=True, attrs={"keep": "true"})
        m.d.sync += copy.eq(self.i)
        m.d.comb += self.o.eq(copy)
        return m
