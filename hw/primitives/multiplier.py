"""One hardware multiplier with every register on."""

from amaranth.hdl import ClockSignal, Const, Instance, Module, Mux, Shape, Signal, signed, unsigned
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from .platform import is_ecp5, is_xc7

A_BITS = B_BITS = 18


class Multiplier(wiring.Component):
    """``p = a * b``, ``LATENCY`` cycles later, a new product every cycle.

    On ECP5 it is one ``MULT18X18D`` with its input, pipeline and output registers in use, because yosys leaves all of
    them in fabric; elsewhere three register stages that synthesis packs into the DSP block. The ``DSP48E1`` of Xilinx'
    7 series multiplies signed 25 x 18 bits, so there its adder adds what the highest bit of an unsigned ``b`` of 18
    bits brings.

    Parameters
    ----------
    a_shape, b_shape
        Shapes of the factors, at most 18 bits each.

    Members
    -------
    a, b : In
    p : Out, wide enough for every product
    """

    LATENCY = 3

    a: Signal
    b: Signal
    p: Signal

    def __init__(self, a_shape: Shape, b_shape: Shape) -> None:
        for name, shape in (("a_shape", a_shape), ("b_shape", b_shape)):
            if not isinstance(shape, Shape):
                raise TypeError(f"{name} must be a Shape, not {shape!r}")
            if not 1 <= shape.width <= A_BITS:
                raise ValueError(f"{name} must be 1..{A_BITS} bits wide, not {shape.width}")
        self.a_shape, self.b_shape = a_shape, b_shape
        width = a_shape.width + b_shape.width
        self.p_shape = signed(width) if a_shape.signed or b_shape.signed else unsigned(width)
        super().__init__({"a": In(a_shape), "b": In(b_shape), "p": Out(self.p_shape)})

    def elaborate(self, platform) -> Module:
        m = Module()
        if is_ecp5(platform):
            m.submodules.dsp = self._ecp5(m)
            return m
        a = Signal(self.a_shape, reset_less=True)
        b = Signal(self.b_shape, reset_less=True)
        product = Signal(self.p_shape, reset_less=True)
        m.d.sync += [a.eq(self.a), b.eq(self.b)]
        if is_xc7(platform) and not (self.a_shape.signed or self.b_shape.signed) and self.b_shape.width == B_BITS:
            rest = Signal(self.p_shape, reset_less=True)
            m.d.sync += [
                product.eq(a * b[:-1]),
                rest.eq(Mux(b[-1], a << (B_BITS - 1), 0)),
                self.p.eq(product + rest),
            ]
        else:
            m.d.sync += [product.eq(a * b), self.p.eq(product)]
        return m

    def _ecp5(self, m: Module) -> Instance:
        a = Signal(A_BITS)
        b = Signal(B_BITS)
        p = Signal(A_BITS + B_BITS)
        m.d.comb += [a.eq(self.a), b.eq(self.b), self.p.eq(p)]  # assignment extends by the sign of the source
        ports = {
            "i_CLK0": ClockSignal(),
            "i_CE0": Const(1),
            "i_RST0": Const(0),
            "i_SIGNEDA": Const(int(self.a_shape.signed)),
            "i_SIGNEDB": Const(int(self.b_shape.signed)),
            "i_SOURCEA": Const(0),  # the A port, not the shift chain
            "i_SOURCEB": Const(0),
        }
        ports |= {f"i_A{bit}": a[bit] for bit in range(A_BITS)}
        ports |= {f"i_B{bit}": b[bit] for bit in range(B_BITS)}
        ports |= {f"o_P{bit}": p[bit] for bit in range(A_BITS + B_BITS)}
        return Instance(
            "MULT18X18D",
            p_REG_INPUTA_CLK="CLK0",
            p_REG_INPUTB_CLK="CLK0",
            p_REG_PIPELINE_CLK="CLK0",
            p_REG_OUTPUT_CLK="CLK0",
            p_GSR="DISABLED",
            **ports,
        )
