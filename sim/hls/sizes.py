"""What an expert with its weights on the chip needs, and what parts have: arithmetic, nothing measured.

hls4ml keeps every weight on the chip. With reuse factor RF a matrix of M x N has ceil(M N / RF) multipliers, and takes
a new vector every RF cycles at the earliest: ``block_factor`` and the reuse loop, II = 1, in its template
``nnet_dense_resource.h``, which also lays the weights out as RF words of ``block_factor`` (``ARRAY_RESHAPE``).
Pipeline stages before and after come on top; only the vendor's tool knows them.
"""

import math
from dataclasses import dataclass

Q6_K_BITS = 210 * 8 / 256
"""Bits a weight in a model file."""


@dataclass(frozen=True)
class Part:
    """What an FPGA has.

    Attributes
    ----------
    luts, multipliers
        LUTs of four inputs (ECP5) or six (7-series), and hard multipliers.
    ram_blocks, ram_block_bits
        Block RAMs and the bits of each, parity included.
    lut_ram_bits
        Most that LUTs can hold instead of logic.
    source
        Of these figures.
    """

    luts: int
    multipliers: int
    ram_blocks: int
    ram_block_bits: int
    lut_ram_bits: int
    source: str

    @property
    def ram_bits(self) -> int:
        """Of all block RAMs."""
        return self.ram_blocks * self.ram_block_bits


ECP5 = "datasheet: Lattice FPGA-DS-02012, family selection guide; LUTs as nextpnr counts them"
SERIES_7 = "datasheet: AMD DS180, Artix-7 feature summary"
_25F = Part(24_288, 28, 56, 18 << 10, 194 << 10, ECP5)
_45F = Part(43_848, 72, 108, 18 << 10, 351 << 10, ECP5)
_85F = Part(83_640, 156, 208, 18 << 10, 669 << 10, ECP5)
PARTS = {
    "LFE5U-12F": _25F,  # the same die, and open tools use all of it
    "LFE5U-25F": _25F,
    "LFE5U-45F": _45F,
    "LFE5UM-45F": _45F,
    "LFE5UM5G-45F": _45F,
    "LFE5U-85F": _85F,
    "LFE5UM5G-85F": _85F,
    "xc7a35ti": Part(20_800, 90, 50, 36 << 10, 400 << 10, SERIES_7),
    "xc7a100t": Part(63_400, 240, 135, 36 << 10, 1_188 << 10, SERIES_7),
    "xc7a200t": Part(134_600, 740, 365, 36 << 10, 2_888 << 10, SERIES_7),
}
"""By the name that the boards' platform classes use."""


def multipliers(rows: int, columns: int, reuse: int) -> int:
    """Of one matrix."""
    return math.ceil(rows * columns / reuse)


@dataclass(frozen=True)
class Need:
    """Of a whole expert, three matrices of ``rows`` x ``columns``.

    Attributes
    ----------
    multipliers
        Of the three matrices; two more a lane for the products between them are not counted.
    interval
        Cycles from a vector to the next: the three matrices work at the same time, on different vectors.
    cycles
        Least from a vector to its result: gate and up at the same time, then down.
    bits
        Of weights on the chip.
    """

    multipliers: int
    interval: int
    cycles: int
    bits: int


def need(width: int, expert_width: int, *, reuse: int, bits: int) -> Need:
    """What hls4ml's templates say of an expert."""
    each = multipliers(width, expert_width, reuse)
    return Need(3 * each, reuse, 2 * reuse, weights(width, expert_width) * bits)


def weights(width: int, expert_width: int) -> int:
    """Of an expert."""
    return 3 * width * expert_width


def largest_square(part: Part, bits: float) -> int:
    """Rows and columns of the largest square expert whose weights fit a part's block RAM, all of it used for them."""
    return math.isqrt(int(part.ram_bits / bits) // 3)


def least_reuse(width: int, expert_width: int, part: Part) -> int:
    """The smallest reuse factor at which an expert's multipliers fit the part's hard ones."""
    each = max(1, part.multipliers // 3)
    return math.ceil(width * expert_width / each)


def reload_seconds(width: int, expert_width: int, *, bits: float, bandwidth: float) -> float:
    """Of an expert's weights over a link: bytes / bandwidth, without framing."""
    return weights(width, expert_width) * bits / 8 / bandwidth
