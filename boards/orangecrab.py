"""OrangeCrab r0.2 with the 85F part."""

from typing import ClassVar

from amaranth.build import Attrs
from amaranth_boards import orangecrab_r0_2
from amaranth_boards.resources import UARTResource

BAUD = 3_000_000
"""The most that usual 3.3 V adapters do (FT232R, FT231X data sheets)."""


class OrangeCrab85F(orangecrab_r0_2.OrangeCrabR0_2_85FPlatform):
    """Clock 48 MHz. It has no UART chip: header pin 0 (N17) receives and pin 1 (M18) sends, a 3.3 V adapter goes there.

    These are the Feather header's RX and TX. The pull-up keeps the line idle where no adapter is plugged in.
    """

    resources: ClassVar = [
        *orangecrab_r0_2.OrangeCrabR0_2_85FPlatform.resources,
        UARTResource(0, rx="0", tx="1", conn=("io", 0), attrs=Attrs(IO_TYPE="LVCMOS33", PULLMODE="UP")),
    ]
