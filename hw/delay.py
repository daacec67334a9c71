"""Shift registers for values that wait for a pipeline beside them."""

from amaranth.hdl import Module, Signal


def delay(m: Module, value, cycles: int, *, control: bool = False) -> Signal:
    """``value`` as it was ``cycles`` ago; ``control`` registers are reset, the others carry data and need not be."""
    for _ in range(cycles):
        register = Signal.like(value, name="delayed", reset_less=not control)
        m.d.sync += register.eq(value)
        value = register
    return value
