"""The device between a PCIe bridge (XDMA) and a memory controller (MIG), as a module for Vivado's block design."""

from amaranth.hdl import ClockDomain, ClockSignal, Module, ResetSignal, Signal
from amaranth.lib import wiring
from amaranth.lib.cdc import ResetSynchronizer
from amaranth.lib.wiring import In, Out

from hw.device import AxisDevice, join, memory_ports
from hw.formats.params import Params
from hw.link.axis import axis_ports
from hw.primitives.pll import Pll, Xc7PllSettings

BRIDGE_HZ = 125_000_000
"""``axi_aclk`` of the bridge at four lanes of 5 GT/s and 16 bytes a beat."""


class PcieDevice(wiring.Component):
    """:class:`hw.device.AxisDevice` with its clock and resets; ports carry the attributes by which Vivado joins them.

    The link works on the bridge's clock, the engine on the PLL's; both are in reset until the PLL has locked and while
    the bridge is in reset.

    Members
    -------
    clk_in : In, ``pll.f_in``, of a global clock buffer; axi_aclk, axi_aresetn : In, of the bridge
    clk : Out, the clock of ``m_axi_*``; resetn : Out, its reset, active low
    s_axis_*, m_axis_* : see :class:`hw.device.AxisDevice`, in the bridge's clock; m_axi_* : in ``clk``
    """

    clk_in: Signal
    axi_aclk: Signal
    axi_aresetn: Signal
    clk: Signal
    resetn: Signal

    def __init__(self, params: Params, pll: Xc7PllSettings, design_id: int = 0) -> None:
        hz = round(pll.f_out)
        self.pll = pll
        settings = {"idle_cycles": BRIDGE_HZ // 100, "resend_cycles": BRIDGE_HZ // 10}
        self.device = AxisDevice(params, **settings, design_id=design_id)
        self.ports = axis_ports(params.link_bytes) | memory_ports(params)
        clocks = {"clk_in": In(1), "axi_aclk": In(1), "axi_aresetn": In(1), "clk": Out(1), "resetn": Out(1)}
        super().__init__(clocks | self.ports)
        bus = "xilinx.com:signal:{0}:1.0 {1} {2}"
        for port, kind, pin, parameter in (
            ("clk_in", "clock", "CLK", f"FREQ_HZ {round(pll.f_in)}"),
            ("axi_aclk", "clock", "CLK", "ASSOCIATED_BUSIF s_axis:m_axis, ASSOCIATED_RESET axi_aresetn"),
            ("axi_aresetn", "reset", "RST", "POLARITY ACTIVE_LOW"),
            ("clk", "clock", "CLK", f"ASSOCIATED_BUSIF m_axi, ASSOCIATED_RESET resetn, FREQ_HZ {hz}"),
            ("resetn", "reset", "RST", "POLARITY ACTIVE_LOW"),
        ):
            getattr(self, port).attrs.update(
                X_INTERFACE_INFO=bus.format(kind, port, pin), X_INTERFACE_PARAMETER=parameter
            )

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.pll = pll = Pll(self.pll)
        m.domains.sync = ClockDomain()
        m.domains.link = ClockDomain()
        stop = Signal()
        m.d.comb += [
            pll.clk_i.eq(self.clk_in),
            ClockSignal("sync").eq(pll.clk_o),
            ClockSignal("link").eq(self.axi_aclk),
            stop.eq(~pll.lock | ~self.axi_aresetn),
            self.clk.eq(pll.clk_o),
            self.resetn.eq(~ResetSignal("sync")),
        ]
        m.submodules.reset_sync = ResetSynchronizer(stop, domain="sync")
        m.submodules.reset_link = ResetSynchronizer(stop, domain="link")
        m.submodules.device = device = self.device
        join(m, device, self, self.ports)
        return m
