"""A simulated board on a pseudo-terminal: the Verilated device with its UART, for a driver in another process.

``python -m sim.board`` prints the device to give to the driver, as ``uart:/dev/pts/3:115200``, and runs until it is
interrupted or its standard input is closed. A simulation is slower than a board, so the rate in it is one that the
simulation keeps up with, and the driver's patience follows from the rate.
"""

import argparse
import contextlib
import os
import select
import sys
import tty
from collections.abc import Callable

from hw.formats.params import Params
from sim.device_sim import CLOCK_HZ, SimTransport
from sim.shared_library import Say

SIZES = {"max_batch": 8, "max_width": 256, "max_expert_width": 256, "max_experts": 32}
"""Parameters of the hardware unless told otherwise: enough for the tiny model."""
BIT_CLOCKS = 4
IDLE_CYCLES, RESEND_CYCLES = 1_000_000, 2_000_000
"""In a simulation's seconds these are long, since a driver's pauses are seconds too."""
CHUNK_CYCLES = 20_000
"""Simulated between two looks at the terminal."""
QUIET_CHUNKS = 50
"""After so many in which nothing came or went, there is a pause after each."""
PAUSE_S = 0.01
NOMINAL_BAUD = 38_400
"""Less than the simulation does on a slow machine: 0.5 million cycles a second at 4 clocks a bit are 125 kbaud."""
BUFFER_BYTES = 1 << 20


def device(params: Params, *, say: Say = lambda text: None) -> SimTransport:
    """The simulated board's device."""
    return SimTransport(params, bit_clocks=BIT_CLOCKS, idle_cycles=IDLE_CYCLES, resend_cycles=RESEND_CYCLES, say=say)


def serve(transport: SimTransport, master: int, stop: Callable[[], bool]) -> None:
    """Carry bytes between a pseudo-terminal's master side and the device until ``stop()``."""
    os.set_blocking(master, False)
    pending = b""
    quiet = 0
    while not stop():
        with contextlib.suppress(BlockingIOError, OSError):  # OSError: nobody has the other side open
            if transport.unsent < BUFFER_BYTES and (data := os.read(master, 1 << 16)):
                transport.write(data)
                quiet = 0
        pending += (came := transport.read(CHUNK_CYCLES / CLOCK_HZ))
        quiet = 0 if came or transport.unsent else quiet + 1
        if pending:
            with contextlib.suppress(BlockingIOError, OSError):
                pending = pending[os.write(master, pending) :]
        if quiet > QUIET_CHUNKS:
            select.select([master], [], [], PAUSE_S)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.board", description=(__doc__ or "").splitlines()[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    params = Params(**vars(parser.parse_args(argv)))
    transport = device(params, say=lambda text: print(text, file=sys.stderr, flush=True))
    master, slave = os.openpty()
    tty.setraw(slave)
    print(f"uart:{os.ttyname(slave)}:{NOMINAL_BAUD}", flush=True)

    def stop() -> bool:
        readable, _, _ = select.select([sys.stdin], [], [], 0)
        return bool(readable) and not os.read(sys.stdin.fileno(), 1 << 10)

    with transport, contextlib.suppress(KeyboardInterrupt):
        serve(transport, master, stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
