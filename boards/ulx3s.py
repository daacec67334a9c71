"""Radiona ULX3S with each of its ECP5 parts."""

from amaranth_boards import ulx3s

BAUD = 3_000_000
"""The most that the board's FT231X does, by its data sheet."""


class Ulx3s12F(ulx3s.ULX3S_12F_Platform):
    """A 25F die with another IDCODE: the open flow gives it the 25F's full capacity."""


class Ulx3s25F(ulx3s.ULX3S_25F_Platform):
    pass


class Ulx3s45F(ulx3s.ULX3S_45F_Platform):
    pass


class Ulx3s85F(ulx3s.ULX3S_85F_Platform):
    pass
