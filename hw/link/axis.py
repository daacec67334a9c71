"""AXI-Stream in and out, as the stream channels of a PCIe bridge (XDMA) have it."""

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.layouts import link_beat

WIDTHS = (8, 16)


class AxisPort(wiring.Component):
    """Join AXI-Stream and the streams of the link, without a register.

    Frames are whole numbers of beats, so a beat in which ``tkeep`` is not all ones belongs to none and is dropped:
    what somebody writes in pieces of other lengths cannot put later frames out of step. Where a transfer begins and
    ends is not looked at. Going out, ``tlast`` marks the end of each frame, which ends the host's read.

    Ports have the flat names by which other tools find an AXI-Stream.

    Parameters
    ----------
    width
        Bytes a beat: 8 or 16.

    Members
    -------
    s_axis_* : to the device; m_axis_* : from the device
    o : stream of bytes, a beat's; i : stream of :func:`hw.layouts.link_beat`
    """

    s_axis_tdata: Signal
    s_axis_tkeep: Signal
    s_axis_tlast: Signal
    s_axis_tvalid: Signal
    s_axis_tready: Signal
    m_axis_tdata: Signal
    m_axis_tkeep: Signal
    m_axis_tlast: Signal
    m_axis_tvalid: Signal
    m_axis_tready: Signal
    o: stream.Interface
    i: stream.Interface

    def __init__(self, width: int) -> None:
        if width not in WIDTHS:
            raise ValueError(f"width must be one of {WIDTHS} bytes, not {width!r}")
        self.width = width
        super().__init__(
            axis_ports(width)
            | {
                "o": Out(stream.Signature(data.ArrayLayout(8, width))),
                "i": In(stream.Signature(link_beat(width))),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        m.d.comb += [
            self.o.payload.eq(self.s_axis_tdata),
            self.o.valid.eq(self.s_axis_tvalid & self.s_axis_tkeep.all()),
            self.s_axis_tready.eq(self.o.ready),
            Cat(self.m_axis_tdata, self.m_axis_tlast).eq(self.i.payload),
            self.m_axis_tkeep.eq((1 << self.width) - 1),
            self.m_axis_tvalid.eq(self.i.valid),
            self.i.ready.eq(self.m_axis_tready),
        ]
        return m


def axis_ports(width: int) -> dict:
    """The AXI-Stream members of :class:`AxisPort`."""
    ports = {}
    for prefix, to_device in (("s_axis", True), ("m_axis", False)):
        forward, back = (In, Out) if to_device else (Out, In)
        ports |= {
            f"{prefix}_tdata": forward(8 * width),
            f"{prefix}_tkeep": forward(width),
            f"{prefix}_tlast": forward(1),
            f"{prefix}_tvalid": forward(1),
            f"{prefix}_tready": back(1),
        }
    return ports
