"""Digilent Arty A7 with each of its Artix-7 parts, its UART on channel B of an FT2232H."""

from amaranth_boards import arty_a7

BAUD = 3_000_000
"""Of the 12 Mbaud of an FT2232H, what every other board here does too."""


class ArtyA7_35(arty_a7.ArtyA7_35Platform):
    """XC7A35TICSG324-1L."""


class ArtyA7_100(arty_a7.ArtyA7_100Platform):
    """XC7A100TCSG324-1; amaranth-boards gives it the small board's low-voltage part."""

    device = "xc7a100t"
    speed = "1"
