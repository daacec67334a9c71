"""Colorlight i9 v7.2 on Muse Lab's extension board; amaranth-boards lacks it."""

from typing import ClassVar

from amaranth.build import Attrs, Clock, Pins, Resource
from amaranth.vendor import LatticePlatform
from amaranth_boards.resources import UARTResource

BAUD = 1_000_000
"""What a microcontroller's CMSIS-DAP bridge may be expected to do; no data sheet says."""


class ColorlightI9(LatticePlatform):
    """Clock 25 MHz; the UART is the extension board's CMSIS-DAP bridge, a microcontroller, which programs it too.

    Pins as LiteX knows them for the i5, whose module is pin-compatible (litex-boards, ``colorlight_i5.py``).
    """

    device = "LFE5U-45F"
    package = "BG381"
    speed = "6"
    default_clk = "clk25"
    resources: ClassVar = [
        Resource("clk25", 0, Pins("P3", dir="i"), Clock(25e6), Attrs(IO_TYPE="LVCMOS33")),
        UARTResource(0, rx="H18", tx="J17", attrs=Attrs(IO_TYPE="LVCMOS33", PULLMODE="UP")),
    ]
    connectors: ClassVar = []
