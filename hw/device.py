"""The whole device: the engine behind a link that loses nothing, ready for a board's pins or a bridge's bus."""

from amaranth.hdl import DomainRenamer, Elaboratable, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.cdc import FFSynchronizer
from amaranth.lib.wiring import In, Out

from hw.engine import Engine
from hw.formats.frames import WORD_BYTES
from hw.formats.params import Params
from hw.gather import Gather
from hw.layouts import link_beat
from hw.link.axi4 import AxiMemory, axi_ports
from hw.link.axis import AxisPort, axis_ports
from hw.link.crossing import Crossing
from hw.link.link import Link
from hw.link.narrow import Narrow
from hw.link.outgoing import Outgoing
from hw.link.uart import Uart
from hw.primitives.queue import Place
from hw.primitives.restart import add_parts

SEND_FRAME_BYTES = 1024
"""Most payload of a frame to the host; less than a kernel's terminal buffer of 4 KiB, which nothing guards."""
SEND_BUFFER_BYTES = 4096


def memory_ports(params: Params) -> dict:
    """The ports ``m_axi_*`` of a device whose board has memory; none where it has not."""
    return axi_ports(params.memory_bits) if params.memory_bits else {}


def join(m: Module, inner: wiring.Component, outer: wiring.Component, ports: dict) -> None:
    """Make ports of ``inner`` those of ``outer``, by their names."""
    for name, member in ports.items():
        inside, outside = getattr(inner, name), getattr(outer, name)
        m.d.comb += inside.eq(outside) if member.flow == In else outside.eq(inside)


class LinkedEngine(wiring.Component):
    """:class:`hw.engine.Engine` behind :class:`hw.link.link.Link`; a new connection resets it.

    The link and the streams work in the clock domain ``link``, the engine and its memory in ``sync``.

    Parameters
    ----------
    params
        See :class:`hw.formats.params.Params`.
    width
        Bytes that the link carries a cycle: ``params.link_bytes``, or 1 before an engine of 16.
    idle_cycles
        A frame that stops coming for so long, in cycles of ``link``, is given up.
    resend_cycles
        After so long without an acknowledgment frames are sent again.
    design_id
        For ``HELLO``.

    Members
    -------
    i : stream of bytes, ``width`` a beat; o : stream of :func:`hw.layouts.link_beat`, ``last`` ends a frame
    restart : In, asynchronous, asserted until the clocks are good: all starts over
    m_axi_* : see :class:`hw.link.axi4.AxiMemory`; only with ``memory_bits``
    """

    i: stream.Interface
    o: stream.Interface
    restart: Signal

    def __init__(self, params: Params, *, width: int, idle_cycles: int, resend_cycles: int, design_id: int = 0) -> None:
        if width != params.link_bytes and (width, params.link_bytes) != (1, WORD_BYTES):
            raise ValueError(f"width must be link_bytes ({params.link_bytes}), or 1 where that is 16, not {width!r}")
        self.params, self.width, self.design_id = params, width, design_id
        self.idle_cycles, self.resend_cycles = idle_cycles, resend_cycles
        super().__init__(
            memory_ports(params)
            | {
                "i": In(stream.Signature(data.ArrayLayout(8, width))),
                "o": Out(stream.Signature(link_beat(width))),
                "restart": In(1),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params, width = self.params, self.width
        link = Link(
            width,
            frame_words=params.frame_bytes // WORD_BYTES,
            buffer_words=2 * params.frame_bytes // WORD_BYTES,
            idle_cycles=self.idle_cycles,
            send_frame_words=SEND_FRAME_BYTES // WORD_BYTES,
            send_buffer_words=SEND_BUFFER_BYTES // WORD_BYTES,
            resend_cycles=self.resend_cycles,
        )
        m.submodules.link = DomainRenamer("link")(link)
        m.submodules.crossing = crossing = Crossing(width)
        m.submodules.restarting = FFSynchronizer(self.restart, link.restart, o_domain="link", init=1)
        m.d.comb += crossing.begin.eq(link.reset | link.restart)
        wiring.connect(m, wiring.flipped(self.i), link.i)
        wiring.connect(m, link.o, wiring.flipped(self.o))
        wiring.connect(m, link.o_message, crossing.i_link)
        wiring.connect(m, crossing.o_link, link.i_message)

        reset = crossing.reset
        engine, outgoing = Engine(params, self.design_id), Outgoing(params.link_bytes)
        m.submodules.engine = engine
        m.d.comb += engine.restart.eq(reset)
        parts: dict[str, Elaboratable] = {"outgoing": outgoing}
        wiring.connect(m, engine.o, outgoing.i)
        wiring.connect(m, engine.o_request, outgoing.i_request)
        if width == params.link_bytes:
            wiring.connect(m, crossing.o, engine.i)
            wiring.connect(m, outgoing.o, crossing.i)
        else:
            # Bytes come far apart, so places more on their way to the engine cost nothing.
            crossed, arrived = Place(link_beat(width)), Place(link_beat(params.link_bytes))
            gather = Gather(width, apart=True)
            narrow = Narrow(params.link_bytes)
            parts |= {"crossed": crossed, "gather": gather, "arrived": arrived, "narrow": narrow}
            wiring.connect(m, crossing.o, crossed.i)
            wiring.connect(m, crossed.o, gather.i)
            m.d.comb += [
                arrived.i.p.data.eq(gather.o.p.data),
                arrived.i.p.last.eq(gather.o.p.last),
                arrived.i.valid.eq(gather.o.valid),
                gather.o.ready.eq(arrived.i.ready),
            ]
            wiring.connect(m, arrived.o, engine.i)
            wiring.connect(m, outgoing.o, narrow.i)
            wiring.connect(m, narrow.o, crossing.i)
        add_parts(m, parts, reset)
        if params.memory_bits:
            memory = AxiMemory(params.memory_bits)
            restart = Signal()
            m.submodules.memory_restarting = FFSynchronizer(self.restart, restart, init=1)
            add_parts(m, {"memory": memory}, restart)
            join(m, memory, self, memory_ports(params))
            wiring.connect(m, engine.o_read, memory.i_read)
            wiring.connect(m, memory.o_read, engine.i_read)
            wiring.connect(m, engine.o_write, memory.i_write)
            m.d.comb += [
                engine.write_busy.eq(memory.write_busy),
                engine.memory_error.eq(memory.error),
                memory.flush.eq(engine.flush | reset),
            ]
        return m


class UartDevice(wiring.Component):
    """The device on two wires.

    Parameters
    ----------
    params
        ``link_bytes`` is 1 or 16.
    clock_hz, baud
        See :class:`hw.link.uart.Uart`; the clock is ``link``'s.
    idle_cycles, resend_cycles
        See :class:`LinkedEngine`; by default 10 ms and 100 ms, several times what a USB bridge keeps bytes waiting.
    design_id
        For ``HELLO``.

    Members
    -------
    rx : In, asynchronous; tx : Out
    restart : see :class:`LinkedEngine`
    m_axi_* : see :class:`LinkedEngine`
    """

    rx: Signal
    tx: Signal
    restart: Signal

    def __init__(
        self,
        params: Params,
        *,
        clock_hz: int,
        baud: int,
        idle_cycles: int | None = None,
        resend_cycles: int | None = None,
        design_id: int = 0,
    ) -> None:
        self.uart = Uart(clock_hz, baud)
        self.engine = LinkedEngine(
            params,
            width=1,
            idle_cycles=clock_hz // 100 if idle_cycles is None else idle_cycles,
            resend_cycles=clock_hz // 10 if resend_cycles is None else resend_cycles,
            design_id=design_id,
        )
        idle = {"init": 1}  # the stubs know no such parameter
        super().__init__(memory_ports(params) | {"rx": In(1, **idle), "tx": Out(1, **idle), "restart": In(1)})

    def elaborate(self, platform) -> Module:
        m = Module()
        uart = self.uart
        restart = Signal()
        m.submodules.restarting = FFSynchronizer(self.restart, restart, o_domain="link", init=1)
        line = Module()
        add_parts(line, {"uart": uart}, restart)
        m.submodules.line = DomainRenamer("link")(line)
        m.submodules.engine = engine = self.engine
        join(m, engine, self, memory_ports(engine.params))
        wiring.connect(m, uart.o, engine.i)
        m.d.comb += [
            engine.restart.eq(self.restart),
            uart.rx.eq(self.rx),
            self.tx.eq(uart.tx),
            uart.i.payload.eq(engine.o.p.data),
            uart.i.valid.eq(engine.o.valid),
            engine.o.ready.eq(uart.i.ready),
        ]
        return m


class AxisDevice(wiring.Component):
    """The device on AXI-Stream of ``params.link_bytes`` bytes, 8 or 16, whose clock is that of the domain ``link``.

    Parameters
    ----------
    params
        ``link_bytes`` is 8 or 16.
    idle_cycles, resend_cycles
        See :class:`LinkedEngine`.
    design_id
        For ``HELLO``.

    Members
    -------
    s_axis_*, m_axis_* : see :class:`hw.link.axis.AxisPort`
    restart : see :class:`LinkedEngine`
    m_axi_* : see :class:`LinkedEngine`; in the clock domain ``sync``
    """

    restart: Signal

    def __init__(self, params: Params, *, idle_cycles: int, resend_cycles: int, design_id: int = 0) -> None:
        self.port = AxisPort(params.link_bytes)
        self.engine = LinkedEngine(
            params,
            width=params.link_bytes,
            idle_cycles=idle_cycles,
            resend_cycles=resend_cycles,
            design_id=design_id,
        )
        super().__init__(axis_ports(params.link_bytes) | memory_ports(params) | {"restart": In(1)})

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.port = port = self.port
        m.submodules.engine = engine = self.engine
        m.d.comb += engine.restart.eq(self.restart)
        wiring.connect(m, port.o, engine.i)
        wiring.connect(m, engine.o, port.i)
        join(m, port, self, axis_ports(port.width))
        join(m, engine, self, memory_ports(engine.params))
        return m
