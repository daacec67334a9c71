"""Bytes over two wires: 8 data bits, no parity, one stop bit, no flow control."""

from fractions import Fraction

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.cdc import FFSynchronizer
from amaranth.lib.wiring import In, Out

MIN_CLOCKS = 4
BITS = 10
"""Of a byte on the line: start, eight of data, stop."""


class Uart(wiring.Component):
    """Send and receive bytes at ``baud`` bits a second, exactly.

    Where the clock is no multiple of the rate, a bit lasts a clock more or less than the next, and the sum over any
    number of bits is right within a clock: no error accumulates. With ``n`` clocks a bit the receiver samples within
    ``1.5 / n`` of a bit of its middle: a clock for finding the edge, half for rounding. From the edge to the stop bit's
    middle are 9.5 bits, so the ends' clocks may differ by ``(0.5 - 1.5 / n) / 9.5``: 4.8 % at 33 clocks, 3.3 % at 8.

    A byte that comes while the one before still waits at ``o`` is lost, and so is one without a stop bit.

    Parameters
    ----------
    clock_hz, baud
        At least 4 clocks a bit; on a board take 8 or more.

    Members
    -------
    rx : In, from outside, asynchronous; tx : Out, idle high
    i, o : streams of one byte
    """

    rx: Signal
    tx: Signal
    i: stream.Interface
    o: stream.Interface

    def __init__(self, clock_hz: int, baud: int) -> None:
        if baud < 1:
            raise ValueError(f"baud must be positive, not {baud!r}")
        self.period = Fraction(clock_hz, baud)
        if self.period < MIN_CLOCKS:
            raise ValueError(
                f"{baud} baud wants a clock of at least {MIN_CLOCKS * baud} Hz, {MIN_CLOCKS} times the rate, "
                f"not {clock_hz}"
            )
        self.clock_hz, self.baud = clock_hz, baud
        byte = data.ArrayLayout(8, 1)
        idle = {"init": 1}  # the stubs know no such parameter
        super().__init__(
            {
                "rx": In(1, **idle),
                "tx": Out(1, **idle),
                "i": In(stream.Signature(byte)),
                "o": Out(stream.Signature(byte)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        # Time is counted in fractions of a clock, so that a bit is a whole number of them.
        bit, clock = self.period.numerator, self.period.denominator
        self._send(m, bit, clock)
        self._receive(m, bit, clock)
        return m

    def _send(self, m: Module, bit: int, clock: int) -> None:
        left = Signal(range(bit + clock))  # of the present bit, beyond this clock
        bits = Signal(BITS, init=1)  # the present one lowest
        count = Signal(range(BITS + 1))
        # The next byte waits here, so that nobody waits for the line's time.
        waiting = Signal()
        byte = Signal(8, reset_less=True)
        m.d.comb += self.i.ready.eq(~waiting)
        with m.If(~waiting):
            m.d.sync += [waiting.eq(self.i.valid), byte.eq(self.i.payload)]
        m.d.sync += self.tx.eq(bits[0])
        with m.If(count == 0):
            m.d.sync += left.eq(bit - clock)
            with m.If(waiting):
                m.d.sync += [bits.eq(Cat(Const(0, 1), byte, Const(1, 1))), count.eq(BITS), waiting.eq(0)]
        with m.Elif(left >= clock):
            m.d.sync += left.eq(left - clock)
        with m.Else():
            m.d.sync += [left.eq(left + bit - clock), bits.eq(Cat(bits[1:], Const(1, 1))), count.eq(count - 1)]
            with m.If((count == 1) & waiting):
                m.d.sync += [bits.eq(Cat(Const(0, 1), byte, Const(1, 1))), count.eq(BITS), waiting.eq(0)]

    def _receive(self, m: Module, bit: int, clock: int) -> None:
        line = Signal(init=1)
        m.submodules.rx_sync = FFSynchronizer(self.rx, line, init=1)
        left = Signal(range(bit + bit // 2 + clock))
        bits = Signal(8, reset_less=True)
        count = Signal(range(BITS))
        sample = Signal()
        m.d.comb += sample.eq(left < clock)
        m.d.sync += left.eq(Mux(sample, left + bit - clock, left - clock))
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [left.eq(bit + bit // 2 - clock), count.eq(0)]
                with m.If(~line):
                    m.next = "DATA"
            with m.State("DATA"):
                with m.If(sample):
                    m.d.sync += [bits.eq(Cat(bits[1:], line)), count.eq(count + 1)]
                    with m.If(count == 7):
                        m.next = "STOP"
            with m.State("STOP"):
                with m.If(sample):
                    m.next = "BREAK"
                    with m.If(line):
                        m.next = "IDLE"
                        with m.If(self.o.ready | ~self.o.valid):
                            m.d.sync += [self.o.valid.eq(1), self.o.payload.eq(bits)]
            with m.State("BREAK"):
                with m.If(line):
                    m.next = "IDLE"
