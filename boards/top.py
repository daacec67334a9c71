"""What every bitstream without PCIe is: a device on the board's UART, and the clock that it runs on."""

from typing import Any

from amaranth.hdl import ClockDomain, ClockSignal, Elaboratable, Module
from amaranth.lib import io

from hw.primitives.pll import Pll, PllSettings, Xc7PllSettings


class Top(Elaboratable):
    """``device``, with ``rx``, ``tx`` and ``restart``, clocked by the PLL, in reset until the PLL has locked.

    The domain ``link`` has half the clock of ``sync``.
    """

    def __init__(self, device: Any, pll: PllSettings | Xc7PllSettings) -> None:
        self.device, self.pll = device, pll

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.clock_pin = clock_pin = io.Buffer(
            io.Direction.Input, platform.request(platform.default_clk, dir="-")
        )
        m.submodules.pll = pll = Pll(self.pll)
        # The device spreads its resets in registers of its own.
        m.domains += [ClockDomain("sync", reset_less=True), ClockDomain("link", reset_less=True)]
        m.d.comb += [
            pll.clk_i.eq(clock_pin.i),
            ClockSignal("sync").eq(pll.clk_o),
            ClockSignal("link").eq(pll.half_o),
        ]
        m.submodules.device = device = self.device
        pins = platform.request("uart", dir="-")
        m.submodules.rx_pin = rx = io.Buffer(io.Direction.Input, pins.rx)
        m.submodules.tx_pin = tx = io.FFBuffer(io.Direction.Output, pins.tx, o_domain="link")
        m.d.comb += [device.rx.eq(rx.i), tx.o.eq(device.tx), device.restart.eq(~pll.lock)]
        return m
