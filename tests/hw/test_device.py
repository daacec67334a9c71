"""What a device can be made of; how it works is tested Verilated, through the driver."""

import pytest

from hw.device import AxisDevice, LinkedEngine, UartDevice
from hw.formats.params import Params

CYCLES = {"idle_cycles": 100, "resend_cycles": 100}


def test_ports():
    uart = UartDevice(Params(), clock_hz=100_000_000, baud=3_000_000)
    assert set(uart.signature.members) == {"rx", "tx", "restart"}
    assert (uart.engine.idle_cycles, uart.engine.resend_cycles) == (1_000_000, 10_000_000)
    axis = AxisDevice(Params(memory_bits=30), **CYCLES)
    names = set(axis.signature.members)
    assert {"s_axis_tdata", "m_axis_tlast", "m_axi_araddr", "m_axi_wdata"} <= names
    assert axis.signature.members["m_axi_araddr"].shape == 30


def test_rejects():
    with pytest.raises(ValueError, match=r"width must be link_bytes \(8\), or 1 where that is 16, not 1"):
        LinkedEngine(Params(link_bytes=8), width=1, **CYCLES)
    with pytest.raises(ValueError, match=r"width must be one of \(8, 16\) bytes, not 4"):
        AxisDevice(Params(link_bytes=4), **CYCLES)
    with pytest.raises(ValueError, match="memory_bits = 30 needs link_bytes = 16, not 8"):
        AxisDevice(Params(link_bytes=8, memory_bits=30), **CYCLES).engine.elaborate(None)
    with pytest.raises(ValueError, match="3000000 baud wants a clock of at least 12000000 Hz"):
        UartDevice(Params(), clock_hz=10_000_000, baud=3_000_000)
