"""Radiona ULX3S with each of its ECP5 parts: the board's own pins, and the byte port on its headers."""

from amaranth.build import Attrs, Pins, Resource, Subsignal
from amaranth_boards import ulx3s


def byte_port_resource() -> Resource:
    """:class:`hw.byte_port.BytePort` on the GPIO headers, 3.3 V, named as printed on the board.

    ============= ============================ ==========================================
    signal        pins, bit 0 first            why there
    ============= ============================ ==========================================
    ``i_data``    GP18 to GP25                 one row of header J2
    ``i_last``    GP26                         next to it
    ``i_strobe``  GN18                         opposite row, first pin
    ``i_ack``     GN19
    ``o_data``    GP0 to GP7                   one row of header J1
    ``o_channel`` GP8, GP9                     next to it
    ``o_strobe``  GN0                          opposite row, first pin
    ``o_ack``     GN1
    ============= ============================ ==========================================

    GP/GN 11 to 17 stay free: the board shares them with the ESP32 and the analogue converter. The inputs have
    pull-downs, so an open port sends nothing.
    """

    def pins(names: str, direction: str) -> Pins:
        return Pins(names, dir=direction, conn=("gpio", 0))

    pulled = Attrs(PULLMODE="DOWN")
    return Resource(
        "byte_port",
        0,
        Subsignal("i_data", pins("18+ 19+ 20+ 21+ 22+ 23+ 24+ 25+", "i"), pulled),
        Subsignal("i_last", pins("26+", "i"), pulled),
        Subsignal("i_strobe", pins("18-", "i"), pulled),
        Subsignal("i_ack", pins("19-", "o")),
        Subsignal("o_data", pins("0+ 1+ 2+ 3+ 4+ 5+ 6+ 7+", "o")),
        Subsignal("o_channel", pins("8+ 9+", "o")),
        Subsignal("o_strobe", pins("0-", "o")),
        Subsignal("o_ack", pins("1-", "i"), pulled),
        Attrs(IO_TYPE="LVCMOS33"),
    )


class _Ulx3s:
    """Adds the byte port.

    Build with :mod:`boards.build`, which prepares the platform only: in amaranth-boards 0.0.21 ``platform.build`` wants
    the programming tool to be there even where nothing is programmed.
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.add_resources([byte_port_resource()])  # type: ignore[attr-defined]  # of the platform class beside


class Ulx3s12F(_Ulx3s, ulx3s.ULX3S_12F_Platform):
    """A 25F die with another IDCODE: the open flow gives it the 25F's full capacity."""


class Ulx3s25F(_Ulx3s, ulx3s.ULX3S_25F_Platform):
    pass


class Ulx3s45F(_Ulx3s, ulx3s.ULX3S_45F_Platform):
    pass


class Ulx3s85F(_Ulx3s, ulx3s.ULX3S_85F_Platform):
    pass
