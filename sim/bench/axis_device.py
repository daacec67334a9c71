"""The AXI-Stream device under cocotb, with random pauses both ways, behind a socket for a driver in another process."""

import itertools
import os
import random
import socket
import time

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles
from cocotbext.axi import AxiStreamBus, AxiStreamFrame, AxiStreamSink, AxiStreamSource

SOCKET = os.environ["EMUFPGA_SOCKET"]
PAUSE = float(os.environ.get("EMUFPGA_PAUSE", "0.3"))
"""Chance of a pause in each cycle, on either side."""
CLOCK_NS, LINK_CLOCK_NS = 10, 7
LOOK_CYCLES = 50
SILENCE_S = 120
"""The driver may be silent for so long."""
WORD_BYTES = 16


def pauses():
    """Whether to pause, cycle by cycle."""
    return (random.random() < PAUSE for _ in itertools.count())


@cocotb.test()
async def serve(dut) -> None:
    """Serve one connection until the driver closes it."""
    Clock(dut.clk, CLOCK_NS, unit="ns").start()
    Clock(dut.link_clk, LINK_CLOCK_NS, unit="ns").start()
    dut.rst.value = dut.link_rst.value = 1
    source = AxiStreamSource(AxiStreamBus.from_prefix(dut, "s_axis"), dut.link_clk, dut.link_rst)
    sink = AxiStreamSink(AxiStreamBus.from_prefix(dut, "m_axis"), dut.link_clk, dut.link_rst)
    source.set_pause_generator(pauses())
    sink.set_pause_generator(pauses())
    await ClockCycles(dut.clk, 5)
    dut.rst.value = dut.link_rst.value = 0
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(SILENCE_S)
        listener.bind(SOCKET)
        listener.listen(1)
        connection, _ = listener.accept()
    with connection:
        connection.setblocking(False)
        pending = b""
        heard = time.monotonic()
        while time.monotonic() < heard + SILENCE_S:
            try:
                data = connection.recv(1 << 16)
                if not data:
                    return
                pending += data
                heard = time.monotonic()
            except BlockingIOError:
                pass
            # A socket cuts where it likes; a bus carries whole beats.
            whole = len(pending) // WORD_BYTES * WORD_BYTES
            if whole:
                await source.send(AxiStreamFrame(pending[:whole]))
                pending = pending[whole:]
            while not sink.empty():
                frame = sink.recv_nowait()
                connection.setblocking(True)
                connection.sendall(bytes(frame.tdata))
                connection.setblocking(False)
            await ClockCycles(dut.link_clk, LOOK_CYCLES)
    raise TimeoutError(f"the driver was silent for {SILENCE_S} s")
