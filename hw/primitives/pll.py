"""The clock that a build runs on: ECP5's ``EHXPLLL``, Xilinx 7 series' ``PLLE2_BASE``, and how to set them."""

from dataclasses import dataclass
from fractions import Fraction

from amaranth.hdl import Const, Instance, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from .platform import is_ecp5, is_xc7

F_IN_HZ = (8_000_000, 400_000_000)
F_PFD_HZ = (10_000_000, 400_000_000)
F_VCO_HZ = (400_000_000, 800_000_000)
F_OUT_HZ = (3_125_000, 400_000_000)
"""Limits of input, phase detector, oscillator and output; ECP5 data sheet FPGA-DS-02012, sysCLOCK PLL timing."""
DIVIDER_MAX = 128
HALF = 2
"""The second output's divider is so many times the first's."""
F_VCO_BEST_HZ = 600_000_000
"""Where several settings give the clock, the oscillator runs nearest to here, the middle of its range."""


@dataclass(frozen=True)
class PllSettings:
    """Dividers of a PLL whose feedback is its output: ``f_out = f_in * feedback / input``, exact in Hz."""

    input: int
    feedback: int
    output: int
    """The oscillator runs at ``f_out * output``."""
    f_in: Fraction
    f_out: Fraction

    @property
    def f_pfd(self) -> Fraction:
        return self.f_in / self.input

    @property
    def f_vco(self) -> Fraction:
        return self.f_out * self.output


def _within(value: Fraction, limits: tuple[int, int]) -> bool:
    return limits[0] <= value <= limits[1]


def _settings(f_in: Fraction, divide: int, feedback: int) -> PllSettings | None:
    """The best output divider for these two, or None where they or all output dividers are out of limits."""
    f_out = f_in * feedback / divide
    if not (feedback <= DIVIDER_MAX and _within(f_in / divide, F_PFD_HZ) and _within(f_out, F_OUT_HZ)):
        return None
    lowest, highest = -(-F_VCO_HZ[0] // f_out), min(F_VCO_HZ[1] // f_out, DIVIDER_MAX // HALF)
    if lowest > highest:
        return None
    output = min(max(round(F_VCO_BEST_HZ / f_out), lowest), highest)
    return PllSettings(divide, feedback, output, f_in, f_out)


def pll_settings(f_in: Fraction | int, f_out: Fraction | int) -> PllSettings:
    """Dividers that make exactly ``f_out`` Hz of ``f_in`` Hz within the data sheet's limits, the smallest that do.

    Raises
    ------
    ValueError
        Naming the frequencies; where only their ratio is at fault, with the nearest that can be made.
    """
    f_in, f_out = Fraction(f_in), Fraction(f_out)
    for name, value, limits in (("f_in", f_in, F_IN_HZ), ("f_out", f_out, F_OUT_HZ)):
        if not _within(value, limits):
            raise ValueError(f"{name} must be in {limits[0]}..{limits[1]} Hz, not {float(value):.12g}")
    ratio = f_out / f_in
    divide, feedback = ratio.denominator, ratio.numerator
    for factor in range(1, DIVIDER_MAX // divide + 1):
        if settings := _settings(f_in, divide * factor, feedback * factor):
            return settings
    dividers = range(1, DIVIDER_MAX + 1)
    made = {s.f_out for divide in dividers for feedback in dividers if (s := _settings(f_in, divide, feedback))}
    near = [max((f for f in made if f < f_out), default=None), min((f for f in made if f > f_out), default=None)]
    raise ValueError(
        f"{float(f_out):.12g} Hz cannot be made of {float(f_in):.12g} Hz; nearest: "
        + (", ".join(f"{float(f):.12g} Hz" for f in near if f is not None) or "none")
    )


XC7_F_IN_HZ = (19_000_000, 800_000_000)
XC7_F_PFD_HZ = (19_000_000, 450_000_000)
XC7_F_VCO_HZ = {"1": (800_000_000, 1_600_000_000), "2": (800_000_000, 1_866_000_000), "3": (800_000_000, 2_133_000_000)}
XC7_F_OUT_HZ = (6_250_000, 464_000_000)
"""Limits of Artix-7 by DS181's PLL and clock buffer tables: by speed grade where only the oscillator's matters, else
those of the slowest, -1."""
XC7_INPUT_MAX, XC7_FEEDBACK, XC7_OUTPUT_MAX = 56, (2, 64), 128


@dataclass(frozen=True)
class Xc7PllSettings:
    """Dividers of a ``PLLE2_BASE``: ``f_out = f_in * feedback / input / output``, exact in Hz."""

    input: int
    feedback: int
    output: int
    f_in: Fraction
    f_out: Fraction

    @property
    def f_pfd(self) -> Fraction:
        return self.f_in / self.input

    @property
    def f_vco(self) -> Fraction:
        return self.f_pfd * self.feedback


def xc7_pll_settings(f_in: Fraction | int, f_out: Fraction | int, speed: str = "1") -> Xc7PllSettings:
    """Dividers that make exactly ``f_out`` Hz of ``f_in`` Hz on a 7-series part of grade ``speed``.

    Of all that do, those with the least input divider, then the fastest oscillator: both lower the jitter.

    Raises
    ------
    ValueError
        Naming the frequencies; where only their ratio is at fault, with the nearest that can be made.
    """
    f_in, f_out = Fraction(f_in), Fraction(f_out)
    grade = speed[:1]
    if grade not in XC7_F_VCO_HZ:
        raise ValueError(f"speed must be one of {', '.join(XC7_F_VCO_HZ)}, not {speed!r}")
    for name, value, limits in (("f_in", f_in, XC7_F_IN_HZ), ("f_out", f_out, XC7_F_OUT_HZ)):
        if not _within(value, limits):
            raise ValueError(f"{name} must be in {limits[0]}..{limits[1]} Hz, not {float(value):.12g}")
    oscillators = [
        (divide, feedback)
        for divide in range(1, XC7_INPUT_MAX + 1)
        for feedback in range(XC7_FEEDBACK[1], XC7_FEEDBACK[0] - 1, -1)
        if _within(f_in / divide, XC7_F_PFD_HZ) and _within(f_in * feedback / divide, XC7_F_VCO_HZ[grade])
    ]
    for divide, feedback in oscillators:
        output = f_in * feedback / divide / f_out
        if output.denominator == 1 and 1 <= output <= XC7_OUTPUT_MAX // HALF:
            return Xc7PllSettings(divide, feedback, int(output), f_in, f_out)
    made = {
        f_in * feedback / divide / output
        for divide, feedback in oscillators
        for output in range(1, XC7_OUTPUT_MAX // HALF + 1)
        if _within(f_in * feedback / divide / output, XC7_F_OUT_HZ)
    }
    near = [max((f for f in made if f < f_out), default=None), min((f for f in made if f > f_out), default=None)]
    raise ValueError(
        f"{float(f_out):.12g} Hz cannot be made of {float(f_in):.12g} Hz; nearest: "
        + (", ".join(f"{float(f):.12g} Hz" for f in near if f is not None) or "none")
    )


class Pll(wiring.Component):
    """One clock made of another, on ECP5 by :class:`PllSettings`, on 7 series by :class:`Xc7PllSettings`.

    Members
    -------
    clk_i : In, ``settings.f_in``
    clk_o : Out, ``settings.f_out``; half_o : Out, half of that, at no phase to rely on
    lock : Out, asynchronous; the clocks are not to be used before it is high
    """

    clk_i: Signal
    clk_o: Signal
    half_o: Signal
    lock: Signal

    def __init__(self, settings: PllSettings | Xc7PllSettings) -> None:
        self.settings = settings
        super().__init__({"clk_i": In(1), "clk_o": Out(1), "half_o": Out(1), "lock": Out(1)})

    def elaborate(self, platform) -> Module:
        fits = is_xc7(platform) if isinstance(self.settings, Xc7PllSettings) else is_ecp5(platform)
        if not fits:
            raise NotImplementedError(
                f"a Pll with {type(self.settings).__name__} is not for {getattr(platform, 'device', platform)}"
            )
        m = Module()
        if isinstance(self.settings, Xc7PllSettings):
            self._xc7(m, self.settings)
            return m
        clock = Signal()
        m.d.comb += self.clk_o.eq(clock)
        m.submodules.pll = Instance(
            "EHXPLLL",
            # Loop filter: the values that Project Trellis' ecppll gives, as nextpnr does not choose them.
            a_ICP_CURRENT="12",
            a_LPF_RESISTOR="8",
            a_MFG_ENABLE_FILTEROPAMP="1",
            a_MFG_GMCREF_SEL="2",
            p_PLLRST_ENA="DISABLED",
            p_INTFB_WAKE="DISABLED",
            p_STDBY_ENABLE="DISABLED",
            p_DPHASE_SOURCE="DISABLED",
            p_FEEDBK_PATH="CLKOP",
            p_CLKI_DIV=self.settings.input,
            p_CLKFB_DIV=self.settings.feedback,
            p_CLKOP_ENABLE="ENABLED",
            p_CLKOP_DIV=self.settings.output,
            p_CLKOP_CPHASE=self.settings.output // 2,  # as ecppll; nothing relies on a phase
            p_CLKOP_FPHASE=0,
            p_OUTDIVIDER_MUXA="DIVA",
            i_CLKI=self.clk_i,
            i_CLKFB=clock,
            i_RST=Const(0),
            i_STDBY=Const(0),
            i_PHASESEL0=Const(0),
            i_PHASESEL1=Const(0),
            i_PHASEDIR=Const(1),
            i_PHASESTEP=Const(1),
            i_PHASELOADREG=Const(1),
            i_PLLWAKESYNC=Const(0),
            i_ENCLKOP=Const(0),
            p_CLKOS_ENABLE="ENABLED",
            p_CLKOS_DIV=HALF * self.settings.output,
            p_CLKOS_CPHASE=self.settings.output // 2,
            p_CLKOS_FPHASE=0,
            p_OUTDIVIDER_MUXB="DIVB",
            i_ENCLKOS=Const(0),
            o_CLKOP=clock,
            o_CLKOS=self.half_o,
            o_LOCK=self.lock,
        )
        return m

    def _xc7(self, m: Module, settings: Xc7PllSettings) -> None:
        feedback, clock, half = Signal(), Signal(), Signal()
        m.submodules.pll = Instance(
            "PLLE2_BASE",
            p_BANDWIDTH="OPTIMIZED",
            p_CLKIN1_PERIOD=float(1_000_000_000 / settings.f_in),
            p_DIVCLK_DIVIDE=settings.input,
            p_CLKFBOUT_MULT=settings.feedback,
            p_CLKOUT0_DIVIDE=settings.output,
            p_CLKOUT1_DIVIDE=HALF * settings.output,
            p_STARTUP_WAIT="FALSE",
            i_CLKIN1=self.clk_i,
            i_CLKFBIN=feedback,
            i_RST=Const(0),
            i_PWRDWN=Const(0),
            o_CLKFBOUT=feedback,  # internal: the phase to the input does not matter
            o_CLKOUT0=clock,
            o_CLKOUT1=half,
            o_LOCKED=self.lock,
        )
        m.submodules.buffer = Instance("BUFG", i_I=clock, o_O=self.clk_o)
        m.submodules.half_buffer = Instance("BUFG", i_I=half, o_O=self.half_o)
