"""LambdaConcept ECPIX-5 with each of its ECP5-5G parts."""

from amaranth_boards import ecpix5

BAUD = 3_000_000
"""An FT2232H, which could do more; beyond 3 Mbaud hosts are reported to lose bytes (pyftdi issues 153 and 186)."""


class Ecpix5With45F(ecpix5.ECPIX545Platform):
    """Clock 100 MHz; the UART is channel B of the debug connector's FT2232H."""


class Ecpix5With85F(ecpix5.ECPIX585Platform):
    """As the 45F's."""
