"""The CRC-32 of zlib and Ethernet, several bytes a cycle."""

import zlib
from collections.abc import Sequence

from amaranth.hdl import Cat, Module, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hw.formats.params import LINK_BYTES

CRC_BYTES = 4
RESIDUE = zlib.crc32(bytes(CRC_BYTES))
"""CRC of anything that ends with its own CRC."""
NEUTRAL = 0x6DD90A9D
"""Four bytes after which a CRC is as at its start, so that the 12 bytes of a header fill a word."""
assert zlib.crc32(NEUTRAL.to_bytes(CRC_BYTES, "little")) == zlib.crc32(b"")


def _times(columns: Sequence[int], vector: Value) -> Value:
    """The product of a matrix of bits and a vector."""
    rows = ([vector[n] for n, column in enumerate(columns) if column >> row & 1] for row in range(8 * CRC_BYTES))
    return Cat(Cat(terms).xor() for terms in rows)


class Crc32(wiring.Component):
    """``crc`` is ``zlib.crc32`` of all data since ``start``, ``LATENCY`` cycles after the last of them.

    The data's share and that of the CRC before are sums of their own, which ``amaranth.lib.crc`` makes in one cycle:
    with 16 bytes that is too deep.

    Parameters
    ----------
    width
        Bytes a cycle: 1, 4, 8 or 16.

    Members
    -------
    start : In, high for a cycle; data from the cycle before on are left out
    data, valid : In
    crc : Out
    """

    LATENCY = 2

    start: Signal
    data: Signal
    valid: Signal
    crc: Signal

    def __init__(self, width: int) -> None:
        if width not in LINK_BYTES:
            raise ValueError(f"width must be one of {LINK_BYTES}, not {width!r}")
        self.width = width
        bits = 8 * CRC_BYTES
        super().__init__({"start": In(1), "data": In(8 * width), "valid": In(1), "crc": Out(bits)})

    def elaborate(self, platform) -> Module:
        m = Module()
        # Both shares are linear, so that what zlib makes of single bits tells all.
        nothing = bytes(self.width)
        constant = zlib.crc32(nothing)
        of_data = [zlib.crc32((1 << n).to_bytes(self.width, "little")) ^ constant for n in range(8 * self.width)]
        of_crc = [zlib.crc32(nothing, 1 << n) ^ constant for n in range(8 * CRC_BYTES)]
        share = Signal.like(self.crc, reset_less=True)
        came = Signal()
        m.d.sync += [share.eq(_times(of_data, self.data) ^ constant), came.eq(self.valid)]
        with m.If(came):
            m.d.sync += self.crc.eq(_times(of_crc, self.crc) ^ share)
        with m.If(self.start):
            m.d.sync += [self.crc.eq(0), came.eq(0)]
        return m
