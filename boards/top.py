"""What every bitstream without PCIe is: a device on the board's UART, and the clock that it runs on."""

from typing import Any

from amaranth.hdl import ClockDomain, ClockSignal, Elaboratable, Module, Signal
from amaranth.lib import io
from amaranth.lib.cdc import FFSynchronizer

from hw.primitives.pll import Pll, PllSettings, Xc7PllSettings


class Top(Elaboratable):
    """``device``, with ``rx``, ``tx`` and ``restart``, clocked by the PLL, in reset until the PLL has locked."""

    def __init__(self, device: Any, pll: PllSettings | Xc7PllSettings) -> None:
        self.device, self.pll = device, pll

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.clock_pin = clock_pin = io.Buffer(
            io.Direction.Input, platform.request(platform.default_clk, dir="-")
        )
        m.submodules.pll = pll = Pll(self.pll)
        m.domains.sync = ClockDomain(reset_less=True)  # the device spreads its reset in registers of its own
        m.d.comb += [pll.clk_i.eq(clock_pin.i), ClockSignal().eq(pll.clk_o)]
        locked = Signal()
        m.submodules.locked = FFSynchronizer(pll.lock, locked)
        m.submodules.device = device = self.device
        pins = platform.request("uart", dir="-")
        m.submodules.rx_pin = rx = io.Buffer(io.Direction.Input, pins.rx)
        m.submodules.tx_pin = tx = io.FFBuffer(io.Direction.Output, pins.tx)
        m.d.comb += [device.rx.eq(rx.i), tx.o.eq(device.tx), device.restart.eq(~locked)]
        return m
