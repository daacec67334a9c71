"""RHS NiteFury-II and SQRL Acorn CLE-215+: one M.2 card design, an XC7A200T with 1 GiB of DDR3 behind PCIe x4.

The block design makes all their ports, so of the platform classes only part, clock and pins are used. Where
amaranth-boards is wrong: PERST# is an input, the PCIe reference clock has no I/O standard, and the flash clock is not
on L16, which is the memory's WE#. The Acorn's pins in litex-boards are the same.
"""

from amaranth_boards import nitefury


class NiteFuryII(nitefury.NitefuryIIPlatform):
    """XC7A200TFBG484-2."""


class AcornCle215Plus(nitefury.NitefuryIIPlatform):
    """XC7A200TFBG484-3."""

    speed = "3"


MEMORY_SIGNALS = {
    "a": "ddr3_addr[{}]",
    "ba": "ddr3_ba[{}]",
    "ras": "ddr3_ras_n",
    "cas": "ddr3_cas_n",
    "we": "ddr3_we_n",
    "rst": "ddr3_reset_n",
    "clk": "ddr3_ck_{polarity}[{}]",
    "clk_en": "ddr3_cke[{}]",
    "dm": "ddr3_dm[{}]",
    "dq": "ddr3_dq[{}]",
    "dqs": "ddr3_dqs_{polarity}[{}]",
    "odt": "ddr3_odt[{}]",
}
"""The memory controller's names of a ``ddr3`` resource's signals."""


def memory_pins(platform) -> list[tuple[str, str, str]]:
    """Signal of the memory controller, pin and I/O standard, of each of the board's memory pins."""
    found = []
    for part in platform.lookup("ddr3").ios:
        name = MEMORY_SIGNALS[part.name]
        pins = part.ios[0]
        sides = [("p", pins.p), ("n", pins.n)] if hasattr(pins, "p") else [("", pins)]
        standard = "LVCMOS15" if part.name == "rst" else "DIFF_SSTL15" if len(sides) == 2 else "SSTL15"
        for polarity, side in sides:
            found += [(name.format(bit, polarity=polarity), pin, standard) for bit, pin in enumerate(side.names)]
    return found
