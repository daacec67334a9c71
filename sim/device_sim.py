"""The Verilated device, link and all, in this process: what a board is to the driver, on a simulated clock."""

import ctypes
import math
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from hw.formats.params import Params
from sim import shared_library
from sim.shared_library import Say

SHIM = Path(__file__).with_suffix(".cpp")
CLOCK_HZ = 100_000_000
"""What a cycle is taken for where seconds are asked."""
CERTAIN = (1 << 32) - 1


class SimError(RuntimeError):
    """The hardware broke the rules of its own port."""


class SimTransport:
    """A transport (:class:`host.link.Transport`) to a device in this process; not for use by several threads.

    Simulated time passes in ``read`` only. What is written waits outside the device until then.

    Parameters
    ----------
    params
        See :class:`hw.formats.params.Params`.
    bit_clocks
        None: AXI-Stream, both clocks the same. Else a UART with so many clocks a bit.
    idle_cycles, resend_cycles
        See :class:`hw.device.LinkedEngine`.
    p_in, p_out, seed
        Chances, in every cycle in which the link could carry something, that it does.
    design_id
        For ``HELLO``.
    library
        A device that was compiled elsewhere, with the same settings, instead of one that is built here.
    say
        Told each step of a build.
    """

    def __init__(
        self,
        params: Params,
        *,
        bit_clocks: int | None = None,
        idle_cycles: int = 20_000,
        resend_cycles: int = 200_000,
        p_in: float = 1.0,
        p_out: float = 1.0,
        seed: int = 1,
        design_id: int = 0,
        library: Path | None = None,
        say: Say = lambda text: None,
    ) -> None:
        self.name = "sim" if bit_clocks is None else "sim:uart"
        self.params = params
        settings = {"idle_cycles": idle_cycles, "resend_cycles": resend_cycles, "design_id": design_id}

        def make():
            from hw.device import AxisDevice, UartDevice

            if bit_clocks is None:
                return AxisDevice(params, **settings)
            return UartDevice(params, clock_hz=CLOCK_HZ, baud=CLOCK_HZ // bit_clocks, **settings)

        if bit_clocks is not None and CLOCK_HZ % bit_clocks:
            raise ValueError(f"bit_clocks must divide {CLOCK_HZ}, not {bit_clocks}")
        library = library or shared_library.build(
            "device",
            make,
            SHIM,
            key=[asdict(params), bit_clocks, settings],
            defines={
                "LINK_BYTES": params.link_bytes,
                "BIT_CLOCKS": bit_clocks or 0,
                "MEMORY": int(params.memory_bits > 0),
            },
            say=say,
        )
        self._library = _load(library)
        self._sim = self._library.sim_new()
        self._library.sim_stalls(self._sim, *(min(round(p * (1 << 32)), CERTAIN) for p in (p_in, p_out)), seed)
        # Two full frames on their way, twice over: the answer comes only behind the first.
        cycles_a_byte = 1 / params.link_bytes if bit_clocks is None else 10 * bit_clocks
        self.patience = (4 * params.frame_bytes * cycles_a_byte / p_in + 2 * idle_cycles) / CLOCK_HZ

    def __enter__(self) -> "SimTransport":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def cycle(self) -> int:
        """Cycles since reset."""
        return self._library.sim_cycle(self._sim)

    def now(self) -> float:
        """Simulated seconds since reset."""
        return self.cycle / CLOCK_HZ

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue bytes, as one transfer; takes no time."""
        self._library.sim_write(self._sim, bytes(data), len(data))

    def read(self, timeout: float) -> bytes:
        """What has come; lets at most ``timeout`` simulated seconds pass until something has."""
        size = self._library.sim_read(self._sim, None)
        if not size:
            if self._library.sim_run(self._sim, max(math.ceil(timeout * CLOCK_HZ), 0)) == 3:
                raise SimError(f"cycle {self.cycle}: the device withdrew or changed what waited at its output")
            size = self._library.sim_read(self._sim, None)
        data = ctypes.create_string_buffer(size)
        self._library.sim_read(self._sim, data)
        return data.raw

    def spin(self, cycles: int) -> None:
        """Let cycles pass, whatever comes."""
        self._library.sim_spin(self._sim, cycles)

    @property
    def unsent(self) -> int:
        """Bytes written that have not entered the device."""
        return self._library.sim_unsent(self._sim)

    def close(self) -> None:
        """Free the device."""
        if self._sim is not None:
            self._library.sim_free(self._sim)
            self._sim = None


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    sim, size, u64, u32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint32
    signatures = {
        "sim_new": (sim, []),
        "sim_free": (None, [sim]),
        "sim_stalls": (None, [sim, u32, u32, u64]),
        "sim_write": (None, [sim, ctypes.c_char_p, size]),
        "sim_unsent": (size, [sim]),
        "sim_run": (ctypes.c_int, [sim, u64]),
        "sim_spin": (ctypes.c_int, [sim, u64]),
        "sim_cycle": (u64, [sim]),
        "sim_read": (size, [sim, ctypes.c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
