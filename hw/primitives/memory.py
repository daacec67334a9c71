"""Block memory with its output register: one port to write and one to read, or constant words to read."""

from collections.abc import Sequence

from amaranth.hdl import Array, ClockSignal, Const, Instance, Module, Signal, ValueLike, unsigned
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from hw.delay import delay

from .platform import is_ecp5, is_xc7

_ECP5_MODES = ((1024, 18), (2048, 9), (4096, 4), (8192, 2), (16384, 1))
"""Depth and width of a ``DP16KD`` in each of its modes."""
MAX_DEPTH = 1 << 20
ECP5_LUT_DEPTH = 64
XC7_LUT_DEPTH = 256
"""Memories no deeper are made of LUTs on these families, where a block of 18 Kbit would be mostly empty."""


class BlockMemory(wiring.Component):
    """Memory whose read data follows its address by ``LATENCY`` cycles, one read and one write a cycle.

    Reading an address in the cycle in which it is written, or the one after, gives an undefined word: users must keep
    them apart. On ECP5 it is made of ``DP16KD`` with ``REGMODE_B="OUTREG"``, which inference never uses, but for one of
    ``ECP5_LUT_DEPTH`` words at most. That, and any elsewhere, is inferred: yosys leaves the second register in fabric,
    Vivado by its guide (UG901) takes it into the ``RAMB``.

    Parameters
    ----------
    width, depth
        Bits of a word, and words. Beyond 16384 words there is a bank for every 16384, and the choice between them
        follows the output registers.

    Members
    -------
    w_addr, w_data, w_en : In
    r_addr : In
    r_data : Out
    """

    LATENCY = 2

    w_addr: Signal
    w_data: Signal
    w_en: Signal
    r_addr: Signal
    r_data: Signal

    def __init__(self, width: int, depth: int) -> None:
        if width < 1:
            raise ValueError(f"width must be positive, not {width}")
        if not 2 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth must be in 2..{MAX_DEPTH}, not {depth}")
        self.width, self.depth = width, depth
        bits = (depth - 1).bit_length()
        super().__init__(
            {
                "w_addr": In(bits),
                "w_data": In(width),
                "w_en": In(1),
                "r_addr": In(bits),
                "r_data": Out(width),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        if is_ecp5(platform) and self.depth > ECP5_LUT_DEPTH:
            bank_depth = _ECP5_MODES[-1][0]
            bank_bits = (bank_depth - 1).bit_length()
            mode_width = next(width for depth, width in _ECP5_MODES if depth >= min(self.depth, bank_depth))
            words = []
            for bank in range(-(-self.depth // bank_depth)):
                word = Signal(self.width, name=f"word{bank}")
                words.append(word)
                for low in range(0, self.width, mode_width):
                    bits = slice(low, min(low + mode_width, self.width))
                    m.submodules[f"ebr{bank}_{low // mode_width}"] = write_and_read(
                        m,
                        mode_width,
                        w_addr=self.w_addr[:bank_bits],
                        w_data=self.w_data[bits],
                        w_en=self.w_en & (self.w_addr >> bank_bits == bank),
                        r_addr=self.r_addr[:bank_bits],
                        r_data=word[bits],
                    )
            chosen = words[0]
            if len(words) > 1:
                chosen = Array(words)[delay(m, self.r_addr[bank_bits:], self.LATENCY)]
            m.d.comb += self.r_data.eq(chosen)
            return m
        in_luts = is_xc7(platform) and self.depth <= XC7_LUT_DEPTH
        attributes = {"ram_style": "distributed"} if in_luts else {}
        m.submodules.mem = mem = memory.Memory(shape=unsigned(self.width), depth=self.depth, init=[], attrs=attributes)
        write, read = mem.write_port(), mem.read_port()
        m.d.comb += [
            write.addr.eq(self.w_addr),
            write.data.eq(self.w_data),
            write.en.eq(self.w_en),
            read.addr.eq(self.r_addr),
            read.en.eq(1),
        ]
        r_data = Signal(self.width, reset_less=True)
        m.d.sync += r_data.eq(read.data)
        m.d.comb += self.r_data.eq(r_data)
        return m


class BlockRom(wiring.Component):
    """Constant words whose data follows its address by ``LATENCY`` cycles: one block memory.

    Parameters
    ----------
    words
        Up to 1024 of at most 18 bits.

    Members
    -------
    addr : In
    data : Out
    """

    LATENCY = 2
    WIDTH = 18
    DEPTH = 1024

    addr: Signal
    data: Signal

    def __init__(self, words: Sequence[int]) -> None:
        if not 2 <= len(words) <= self.DEPTH:
            raise ValueError(f"a ROM holds 2..{self.DEPTH} words, not {len(words)}")
        if not all(0 <= word < 1 << self.WIDTH for word in words):
            raise ValueError(f"a ROM's words are unsigned of {self.WIDTH} bits")
        self.words = tuple(words)
        super().__init__({"addr": In((len(words) - 1).bit_length()), "data": Out(self.WIDTH)})

    def elaborate(self, platform) -> Module:
        m = Module()
        if is_ecp5(platform):
            # Sixteen words a parameter, 20 bits apart: as yosys maps a memory's initial contents.
            contents = {}
            for row in range(self.DEPTH // 16):
                part = self.words[16 * row :][:16]
                contents[f"p_INITVAL_{row:02X}"] = Const(sum(word << 20 * n for n, word in enumerate(part)), 320)
            m.submodules.ebr = write_and_read(
                m, self.WIDTH, w_addr=0, w_data=0, w_en=0, r_addr=self.addr, r_data=self.data, **contents
            )
            return m
        m.submodules.mem = mem = memory.Memory(shape=unsigned(self.WIDTH), depth=len(self.words), init=self.words)
        read = mem.read_port()
        m.d.comb += [read.addr.eq(self.addr), read.en.eq(1)]
        m.d.sync += self.data.eq(read.data)
        return m


def write_and_read(
    m: Module, mode_width: int, *, w_addr: ValueLike, w_data: ValueLike, w_en: ValueLike, r_addr, r_data, **parameters
) -> Instance:
    """A ``DP16KD`` whose port A writes and whose port B reads through the output register."""
    dia, dob = Signal(18), Signal(18)
    m.d.comb += [dia.eq(w_data), r_data.eq(dob)]
    # The lowest address bits select within the widest word; in the widest mode they are byte enables instead.
    mode_depth = next(depth for depth, width in _ECP5_MODES if width == mode_width)
    unused = 14 - (mode_depth - 1).bit_length()
    low = Const(0b11 if mode_width == 18 else 0, 4)[:unused]
    addresses = {}
    for port, address in (("A", w_addr), ("B", r_addr)):
        full = Signal(14)
        m.d.comb += [full[:unused].eq(low), full[unused:].eq(address)]
        addresses |= {f"i_AD{port}{bit}": full[bit] for bit in range(14)}
    return Instance(
        "DP16KD",
        p_DATA_WIDTH_A=mode_width,
        p_DATA_WIDTH_B=mode_width,
        p_REGMODE_A="NOREG",
        p_REGMODE_B="OUTREG",
        p_CSDECODE_A="0b000",
        p_CSDECODE_B="0b000",
        p_WRITEMODE_A="NORMAL",
        p_WRITEMODE_B="NORMAL",
        p_GSR="DISABLED",
        i_CLKA=ClockSignal(),
        i_CEA=Const(1),
        i_OCEA=Const(0),
        i_WEA=w_en,
        i_RSTA=Const(0),
        i_CLKB=ClockSignal(),
        i_CEB=Const(1),
        i_OCEB=Const(1),
        i_WEB=Const(0),
        i_RSTB=Const(0),
        **parameters,
        **{f"i_CS{port}{bit}": Const(0) for port in "AB" for bit in range(3)},
        **{f"i_DIA{bit}": dia[bit] for bit in range(18)},
        **{f"o_DOB{bit}": dob[bit] for bit in range(18)},
        **addresses,
    )
