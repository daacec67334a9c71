"""Lattice ECP5 Versa (the board of the LFE5UM, not the 5G one)."""

from amaranth_boards import versa_ecp5

BAUD = 3_000_000
"""An FT2232H, which could do more; beyond 3 Mbaud hosts are reported to lose bytes (pyftdi issues 153 and 186)."""


class VersaEcp5(versa_ecp5.VersaECP5Platform):
    """Clock 100 MHz, differential; the UART is channel B of the board's FT2232H."""
