"""Block memory with its output register: one write port, one read port."""

from amaranth.hdl import ClockSignal, Const, Instance, Module, Signal, unsigned
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from .platform import is_ecp5

_ECP5_MODES = ((1024, 18), (2048, 9), (4096, 4), (8192, 2), (16384, 1))
"""Depth and width of a ``DP16KD`` in each of its modes."""


class BlockMemory(wiring.Component):
    """Memory whose read data follows its address by ``LATENCY`` cycles, one read and one write a cycle.

    Reading an address in the cycle in which it is written, or the one after, gives an undefined word: users must keep
    them apart. On ECP5 it is made of ``DP16KD`` with ``REGMODE_B="OUTREG"``, which inference never uses.

    Parameters
    ----------
    width, depth
        Bits of a word, and words; depth up to 16384.

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
        if not 2 <= depth <= _ECP5_MODES[-1][0]:
            raise ValueError(f"depth must be in 2..{_ECP5_MODES[-1][0]}, not {depth}")
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
        if is_ecp5(platform):
            mode_depth, mode_width = next(mode for mode in _ECP5_MODES if mode[0] >= self.depth)
            for low in range(0, self.width, mode_width):
                bits = slice(low, min(low + mode_width, self.width))
                m.submodules[f"ebr{low // mode_width}"] = self._ecp5(m, bits, mode_depth, mode_width)
            return m
        m.submodules.mem = mem = memory.Memory(shape=unsigned(self.width), depth=self.depth, init=[])
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

    def _ecp5(self, m: Module, bits: slice, mode_depth: int, mode_width: int) -> Instance:
        w_data, r_data = Signal(18), Signal(18)
        m.d.comb += [w_data.eq(self.w_data[bits]), self.r_data[bits].eq(r_data)]
        # The lowest address bits select within the widest word; in the widest mode they are byte enables instead.
        unused = 14 - (mode_depth - 1).bit_length()
        low = Const(0b11 if mode_width == 18 else 0, 4)[:unused]
        addresses = {}
        for port, address in (("A", self.w_addr), ("B", self.r_addr)):
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
            i_WEA=self.w_en,
            i_RSTA=Const(0),
            i_CLKB=ClockSignal(),
            i_CEB=Const(1),
            i_OCEB=Const(1),
            i_WEB=Const(0),
            i_RSTB=Const(0),
            **{f"i_CS{port}{bit}": Const(0) for port in "AB" for bit in range(3)},
            **{f"i_DIA{bit}": w_data[bit] for bit in range(18)},
            **{f"o_DOB{bit}": r_data[bit] for bit in range(18)},
            **addresses,
        )
