import errno
import os
import select
import socket
import sys
import threading
import time
import tty
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import serial

from host import transports
from host.device import Device
from host.link import LinkError
from host.storage import Store
from host.transports import DmaTransport, SpecError, open_transport
from hw.formats import frames
from hw.formats.frames import Flag
from hw.formats.params import Params
from tests.host.devices import PARAMS, Peer, case

LIMIT = 10.0
"""Seconds that anything here may take; all of it takes far less."""


@pytest.fixture
def pty():
    """Both ends of a pseudo-terminal: ours, and the path of the one to open."""
    master, slave = os.openpty()
    tty.setraw(slave)
    ends = [master, slave]
    yield ends, os.ttyname(slave)
    for end in ends:
        os.close(end)


@pytest.fixture
def fifos(tmp_path):
    """What stands in for XDMA's character devices: the device's ends, and the path to open."""
    paths = [tmp_path / "xdma0_h2c_0", tmp_path / "xdma0_c2h_0"]
    for path in paths:
        os.mkfifo(path)
    ends = [os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in paths]
    yield ends, str(tmp_path / "xdma0")
    for end in ends:
        os.close(end)


@contextmanager
def echo(reader: int, writer: int):
    """Sends back what comes, in small pieces, until the block ends."""
    stop = threading.Event()

    def run() -> None:
        held = b""
        while not stop.is_set():
            readable, writable, _ = select.select([reader], [writer] if held else [], [], 0.02)
            if readable:
                held += os.read(reader, 3000)
            if writable:
                held = held[os.write(writer, held[:700]) :]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LIMIT)


def read_all(transport, count: int) -> bytes:
    data = b""
    end = time.monotonic() + LIMIT
    while len(data) < count and time.monotonic() < end:
        data += transport.read(0.1)
    return data


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reader of")]


# What may be asked for.


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("", ["unknown kind ''", "golden[:key=value,...]", "uart:/dev/ttyUSB0[:BAUD]", "pcie:/dev/xdma0"]),
        ("usb:/dev/ttyUSB0", ["unknown kind 'usb'"]),
        ("/dev/ttyUSB0", ["unknown kind '/dev/ttyUSB0'"]),
        ("uart", ["the path is missing", "uart:/dev/ttyUSB0[:BAUD]"]),
        ("pcie:", ["the path is missing", "pcie:/dev/xdma0"]),
        ("socket:", ["the path is missing", "socket:PATH"]),
        ("golden:lanes=4", ["unknown option 'lanes'", "link_bytes, tokens, max_batch", "memory_bits"]),
        ("golden:bit_clocks=4", ["unknown option 'bit_clocks'"]),
        ("golden:tokens", ["tokens must be a whole number, as in tokens=1, not ''"]),
        ("golden:tokens=-1", ["tokens must be a whole number", "'-1'"]),
        ("golden:tokens=two", ["tokens must be a whole number", "'two'"]),
        ("golden:tokens=3", ["tokens must be a power of two in 1..16, not 3"]),
        ("sim:link_bytes=5", ["link_bytes must be one of (1, 4, 8, 16), not 5"]),
        ("uart:/dev/ttyUSB0:fast", ["baud rate must be in 300..12000000, not 'fast'"]),
        ("uart:/dev/ttyUSB0:", ["baud rate must be in 300..12000000, not ''"]),
        ("uart:/dev/ttyUSB0:0", ["baud rate must be in 300..12000000, not '0'"]),
        ("uart:/dev/ttyUSB0:99999999", ["baud rate must be in 300..12000000"]),
    ],
)
def test_specs_that_cannot_be(spec, parts):
    with pytest.raises(SpecError) as caught:
        open_transport(spec)
    text = str(caught.value)
    assert text.startswith(f"device {spec!r}: ")
    assert "\n" not in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("spec", "params"),
    [
        ("golden", Params()),
        ("golden:", Params()),
        ("golden:tokens=2,link_bytes=8", Params(tokens=2, link_bytes=8)),
        ("golden:memory_bits=20", Params(memory_bits=20)),
    ],
)
def test_golden(spec, params):
    with Device.open(spec) as device:
        assert device.params == params


def test_sim_without_its_packages(monkeypatch):
    monkeypatch.setattr(transports.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LinkError, match=r"^sim: the package amaranth is not installed; pip install 'emufpga\[sim\]'"):
        open_transport("sim")


# A UART. A pseudo-terminal takes any baud rate and has no low-latency mode.


def test_uart_runs_a_layer(pty, tmp_path):
    (master, _), path = pty
    layer = case(tmp_path)
    with Peer(master, master), Device.open(f"uart:{path}") as device, Store(layer.path) as store:
        result = device.run_layer(layer.layer, layer.x, layer.routes, store)
    assert (result.sums == layer.sums).all()
    assert [each for each in result.ledger.check() if not each.holds] == []
    assert not result.ledger.os_is_storage
    assert readers() == []


@pytest.mark.parametrize(("rate", "patience"), [("", 0.1275), (":115200", 0.8167), (":12000000", 0.1069)])
def test_uart_patience(pty, rate, patience):
    """Two frames of 4 KiB and their 64 bytes, 10 bits a byte, and 0.1 s."""
    with opened(f"uart:{pty[1]}{rate}") as transport:
        assert transport.patience == pytest.approx(patience, abs=1e-4)
        assert transport.name == f"uart:{pty[1]}{rate}"


@contextmanager
def opened(spec: str):
    transport = open_transport(spec)
    try:
        yield transport
    finally:
        transport.close()


@pytest.mark.parametrize("seed", range(2))
def test_uart_carries_all_bytes(pty, seed):
    """Far more than the 4 KiB that the kernel holds, both ways at once."""
    (master, _), path = pty
    data = np.random.default_rng(seed).bytes(300_000)
    with opened(f"uart:{path}") as transport, echo(master, master):
        transport.write(memoryview(data))
        assert read_all(transport, len(data)) == data
        assert transport.read(0) == b""
        assert transport.read(0.01) == b""


def test_uart_drops_what_came_before_it_was_opened(pty):
    (master, _), path = pty
    os.write(master, b"of an earlier program")
    with opened(f"uart:{path}") as transport:
        os.write(master, b"new")
        assert read_all(transport, 3) == b"new"


def test_wrong_baud_rate(pty):
    """At a wrong rate bytes come, but none of them as they were sent."""
    (master, _), path = pty
    rng = np.random.default_rng(1)
    stop = threading.Event()

    def talk() -> None:
        while not stop.is_set():
            if select.select([master], [], [], 0.02)[0]:
                os.read(master, 1 << 16)
                os.write(master, rng.bytes(50))

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    try:
        with pytest.raises(LinkError, match=r"bytes came but no frame among them; is the baud rate right\?") as caught:
            Device.open(f"uart:{path}")
    finally:
        stop.set()
        thread.join(LIMIT)
    assert str(caught.value).startswith(f"uart:{path}: ")
    assert "\n" not in str(caught.value)
    assert readers() == []


def test_silent_uart(pty):
    """Nothing behind the port, which still sends what it is given."""
    (master, _), path = pty
    stop = threading.Event()

    def drain() -> None:
        while not stop.is_set():
            if select.select([master], [], [], 0.02)[0]:
                os.read(master, 1 << 16)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        with pytest.raises(LinkError, match=r"nothing came within .* s; is it powered, is it the right port\?"):
            Device.open(f"uart:{path}")
    finally:
        stop.set()
        thread.join(LIMIT)


def test_absent_uart(monkeypatch):
    monkeypatch.setattr(transports, "serial_ports", lambda: [("/dev/ttyUSB7", ""), ("/dev/ttyUSB9", "")])
    with pytest.raises(LinkError) as caught:
        open_transport("uart:/dev/ttyUSB5:115200")
    assert str(caught.value) == (
        "uart:/dev/ttyUSB5:115200: there is no such port (those there are: /dev/ttyUSB7, /dev/ttyUSB9); "
        "is the board plugged in?"
    )
    monkeypatch.setattr(transports, "serial_ports", list)
    with pytest.raises(LinkError, match="those there are: none"):
        open_transport("uart:/dev/ttyUSB5")


def test_busy_uart(pty):
    spec = f"uart:{pty[1]}"
    with opened(spec):
        with pytest.raises(LinkError, match=f"^{spec}: in use by another program; end that first$"):
            open_transport(spec)
    with opened(spec):
        pass


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (serial.SerialException(errno.EACCES, "denied"), "no permission; join the group dialout"),
        (serial.SerialException(errno.EBUSY, "busy"), "in use by another program"),
        (serial.SerialException("Could not configure port"), "not a serial port; emufpga devices lists those"),
        (serial.SerialException(errno.EIO, "x"), r"cannot be opened \(Input/output error\); unplug it"),
        (ValueError("Failed to set custom baud rate"), r"cannot be set to 3000000 baud .*; give a rate that it can"),
    ],
)
def test_uart_that_does_not_open(monkeypatch, error, text):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(serial, "Serial", refuse)
    with pytest.raises(LinkError, match=f"^uart:/dev/ttyUSB0: {text}") as caught:
        open_transport("uart:/dev/ttyUSB0")
    assert "\n" not in str(caught.value)


def test_file_that_is_no_serial_port():
    with pytest.raises(LinkError, match="not a serial port"):
        open_transport("uart:/dev/null")


@pytest.mark.parametrize(("actual", "fits"), [(115_200, True), (113_000, True), (9_600, False), (120_000, False)])
def test_driver_that_sets_another_rate(pty, monkeypatch, actual, fits):
    monkeypatch.setattr(transports, "_actual_baud", lambda descriptor: actual)
    spec = f"uart:{pty[1]}:115200"
    if fits:
        open_transport(spec).close()
    else:
        with pytest.raises(LinkError, match=f"cannot be set to 115200 baud, it runs at {actual}; give a rate"):
            open_transport(spec)
    monkeypatch.undo()
    open_transport(spec).close()  # and it was given back


@pytest.mark.skipif(sys.platform != "linux", reason="the rate is read back on Linux only")
def test_actual_rate_is_read_back(pty):
    with opened(f"uart:{pty[1]}:1234567"):
        assert transports._actual_baud(pty[0][1]) == 1_234_567


def test_uart_path_with_colons(pty, tmp_path):
    link = tmp_path / "pci-0000:00:14.0-usb-0:1:1.0-port0"
    link.symlink_to(pty[1])
    with opened(f"uart:{link}") as transport:
        assert transport.patience == pytest.approx(0.1275, abs=1e-4)


def test_uart_unplugged(pty):
    ends, path = pty
    with opened(f"uart:{path}") as transport:
        os.close(ends.pop(0))
        for _ in range(2):
            with pytest.raises(LinkError, match=r"the device vanished \(.*\); check cable and power, then connect"):
                transport.read(LIMIT)
        with pytest.raises(LinkError, match="the device vanished"):
            transport.write(b"x")


def test_peer_that_takes_nothing(pty, monkeypatch):
    """A terminal whose other end does not read, as a stopped simulator."""
    monkeypatch.setattr(transports, "STALL_SECONDS", 0.1)
    with opened(f"uart:{pty[1]}") as transport:
        with pytest.raises(LinkError, match=r"took no byte for 0.1 s; check that the other end runs"):
            transport.write(bytes(1 << 20))


def test_closed_transport(pty):
    transport = open_transport(f"uart:{pty[1]}")
    transport.close()
    transport.close()
    for use in (lambda: transport.read(LIMIT), lambda: transport.write(b"x")):
        with pytest.raises(LinkError, match="is closed; open it again"):
            use()
    assert readers() == []


def test_reader_waits_when_nobody_fetches(pty, monkeypatch):
    monkeypatch.setattr(transports, "HELD_BYTES", 10_000)
    (master, _), path = pty
    os.set_blocking(master, False)
    data = np.random.default_rng(1).bytes(60_000)
    with opened(f"uart:{path}") as transport:
        rest = memoryview(data)
        end = time.monotonic() + LIMIT
        while rest and select.select([], [master], [], 0.3)[1] and time.monotonic() < end:
            rest = rest[os.write(master, rest[:1000]) :]
        assert rest  # it did not take it all
        got = b""
        while len(got) < len(data) and time.monotonic() < end:
            if rest and select.select([], [master], [], 0)[1]:
                rest = rest[os.write(master, rest[:1000]) :]
            got += transport.read(0.01)
        assert got == data


# PCI Express.


def test_pcie_runs_a_layer(fifos, tmp_path):
    (h2c, c2h), path = fifos
    layer = case(tmp_path)
    with Peer(h2c, c2h), Device.open(f"pcie:{path}") as device, Store(layer.path) as store:
        result = device.run_layer(layer.layer, layer.x, layer.routes, store)
    assert (result.sums == layer.sums).all()
    assert [each for each in result.ledger.check() if not each.holds] == []
    assert readers() == []


def test_pcie_gathers_into_large_aligned_calls(fifos, monkeypatch):
    (h2c, c2h), path = fifos
    data = np.random.default_rng(1).bytes(5 * (1 << 19))
    calls: list[tuple[int, int]] = []
    write = os.write

    def watch(descriptor: int, part) -> int:
        if descriptor != transport._writer:
            return write(descriptor, part)
        calls.append((np.frombuffer(part, np.uint8).ctypes.data % 4096, len(part)))
        done = 0
        while done < len(part):  # XDMA takes all of it at once, a pipe in parts
            assert select.select([], [descriptor], [], LIMIT)[1]
            done += write(descriptor, part[done : done + 4096])
        return done

    transport = cast(DmaTransport, open_transport(f"pcie:{path}"))
    monkeypatch.setattr(transports.os, "write", watch)
    with echo(h2c, c2h):
        for start in range(0, len(data), 65_536 + 32):
            transport.write(data[start : start + 65_536 + 32])
        assert calls == [(0, 1 << 20)] * 2
        got = transport.read(0)
        assert calls[2:] == [(0, 1 << 19)]
        assert got + read_all(transport, len(data) - len(got)) == data
        monkeypatch.undo()
        transport.close()


@pytest.mark.parametrize("code", [errno.ETIMEDOUT, transports.ERESTARTSYS])
def test_pcie_driver_times_out(fifos, monkeypatch, code):
    """Nothing came in ten seconds, or nothing was taken: no reason to give up."""
    (h2c, c2h), path = fifos
    with opened(f"pcie:{path}") as transport:
        transport = cast(Any, transport)
        fail = [True, True]
        readinto = transport._file.readinto

        class File:
            def readinto(self, buffer):
                if fail and fail.pop():
                    raise OSError(code, "timed out")
                return readinto(buffer)

        transport._file = File()
        os.write(c2h, b"answer")
        assert read_all(transport, 6) == b"answer"
        assert fail == []

        def refuse(descriptor: int, data) -> int:
            raise OSError(code, "timed out")

        write = os.write
        monkeypatch.setattr(transports.os, "write", refuse)
        transport.write(b"lost")
        assert transport.read(0) == b""
        monkeypatch.setattr(transports.os, "write", write)
        transport.write(b"kept")
        transport.read(0)
        assert os.read(h2c, 100) == b"kept"


def test_closing_pcie_asks_for_a_frame(fifos):
    """A read waits in the driver for a frame, and nobody else may open the channel meanwhile."""
    (h2c, _), path = fifos
    open_transport(f"pcie:{path}").close()
    header = frames.unpack_header(os.read(h2c, 100))
    assert header is not None
    assert header.flags == Flag.POLL


def test_absent_pcie(tmp_path):
    for name in ("xdma1_h2c_0", "xdma1_c2h_0", "xdma2_h2c_0"):
        (tmp_path / name).touch()
    assert transports.xdma_devices(str(tmp_path)) == [str(tmp_path / "xdma1")]
    path = tmp_path / "xdma0"
    with pytest.raises(LinkError) as caught:
        open_transport(f"pcie:{path}")
    assert str(caught.value) == (
        f"pcie:{path}: there is no {path}_c2h_0 (devices there are: {tmp_path / 'xdma1'}); "
        "load the driver once the board is configured (modprobe xdma, from dma_ip_drivers)"
    )


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.EACCES, "no permission for {node}; give it to your group with a udev rule, or run as root"),
        (errno.EBUSY, "{node} is in use by another program; end that first"),
        (errno.EIO, "cannot open {node} (Input/output error); reload the driver"),
    ],
)
@pytest.mark.parametrize("suffix", ["c2h_0", "h2c_0"])
def test_pcie_that_does_not_open(fifos, monkeypatch, code, text, suffix):
    path = fifos[1]
    real = os.open

    def refuse(name, flags, *rest):
        if str(name).endswith(suffix):
            raise OSError(code, os.strerror(code))
        return real(name, flags, *rest)

    monkeypatch.setattr(transports.os, "open", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LinkError) as caught:
        open_transport(f"pcie:{path}")
    assert str(caught.value) == f"pcie:{path}: {text.format(node=f'{path}_{suffix}')}"
    assert len(os.listdir("/proc/self/fd")) == before


def test_pcie_vanishes(fifos):
    ends, path = fifos
    with opened(f"pcie:{path}") as transport:
        while ends:
            os.close(ends.pop())
        with pytest.raises(LinkError, match="the device vanished"):
            transport.read(LIMIT)


# Sockets.


@contextmanager
def server(path: Path):
    """A listening socket with the golden device behind the first connection."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        yield listener


def test_socket_runs_a_layer(tmp_path):
    layer = case(tmp_path)
    path = tmp_path / "sim"
    with server(path) as listener:
        transport = open_transport(f"socket:{path}")
        connection, _ = listener.accept()
        with connection, Peer(connection.fileno(), connection.fileno(), PARAMS):
            with Device.open(transport) as device, Store(layer.path) as store:
                result = device.run_layer(layer.layer, layer.x, layer.routes, store)
    assert (result.sums == layer.sums).all()
    assert [each for each in result.ledger.check() if not each.holds] == []
    assert readers() == []


def test_absent_socket(tmp_path):
    with pytest.raises(LinkError, match=r"cannot connect \(No such file or directory\); start the simulator first"):
        open_transport(f"socket:{tmp_path / 'none'}")


def test_socket_vanishes(tmp_path):
    path = tmp_path / "sim"
    with server(path) as listener:
        transport = open_transport(f"socket:{path}")
        connection, _ = listener.accept()
        connection.send(b"bye")
        connection.close()
        assert read_all(transport, 3) == b"bye"  # what came before is not lost
        with pytest.raises(LinkError, match="the device vanished"):
            transport.read(LIMIT)
        transport.close()
