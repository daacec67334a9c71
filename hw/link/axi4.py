"""The board's memory behind AXI4: reads in long bursts, several on their way, and writes of whole bursts."""

from types import SimpleNamespace

from amaranth.hdl import Cat, Const, Module, Mux, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.fifo import SyncFIFOBuffered
from amaranth.lib.wiring import In, Member, Out

from hw.formats.messages import LENGTH_BITS, MAX_OUTSTANDING
from hw.formats.params import MEMORY_BITS
from hw.layouts import MEMORY_WORD_BITS, WORD_BYTES, bits_for, link_beat, memory_read, memory_write
from hw.primitives.queue import Queue

MAX_BURST_BEATS = 256
"""Of AXI4, and 4 KiB of 16-byte beats: a burst aligned to its length crosses no boundary of 4 KiB."""
SIZE = (WORD_BYTES - 1).bit_length()
INCR = 1


def axi_ports(memory_bits: int) -> dict[str, Member]:
    """The members ``m_axi_*`` of an AXI4 master of 16-byte beats, with the names by which other tools find them."""
    address = {"id": Out(1), "addr": Out(memory_bits), "len": Out(8), "size": Out(3), "burst": Out(2)}
    address |= {"valid": Out(1), "ready": In(1)}
    channels = {
        "aw": address,
        "w": {"data": Out(128), "strb": Out(16), "last": Out(1), "valid": Out(1), "ready": In(1)},
        "b": {"id": In(1), "resp": In(2), "valid": In(1), "ready": Out(1)},
        "ar": address,
        "r": {"id": In(1), "data": In(128), "resp": In(2), "last": In(1), "valid": In(1), "ready": Out(1)},
    }
    return {f"m_axi_{name}{field}": member for name, fields in channels.items() for field, member in fields.items()}


def channel(component, name: str) -> SimpleNamespace:
    """The ports of one AXI channel, ``ar`` say, of a component that has :func:`axi_ports`: ``addr``, ``valid``, ..."""
    start = f"m_axi_{name}"
    ports = (port for port in component.signature.members if port.startswith(start))
    return SimpleNamespace(**{port.removeprefix(start): getattr(component, port) for port in ports})


def burst(memory_bits: int, burst_beats: int) -> data.StructLayout:
    """A burst: its first ``word``, how many ``more`` beats follow that one, and whether it ends its request."""
    return data.StructLayout({"word": memory_bits - MEMORY_WORD_BITS, "more": bits_for(burst_beats), "last": 1})


class Bursts(wiring.Component):
    """Cut reads into bursts that end where a multiple of ``burst_beats`` words is; one every two cycles.

    Parameters
    ----------
    memory_bits, burst_beats
        See :class:`AxiMemory`.

    Members
    -------
    i : stream of :func:`hw.layouts.memory_read`
    o : stream of :func:`burst`
    """

    i: stream.Interface
    o: stream.Interface

    def __init__(self, memory_bits: int, burst_beats: int) -> None:
        self.memory_bits, self.burst_beats = memory_bits, burst_beats
        super().__init__(
            {
                "i": In(stream.Signature(memory_read(memory_bits))),
                "o": Out(stream.Signature(burst(memory_bits, burst_beats))),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        word = Signal(self.memory_bits - MEMORY_WORD_BITS)
        left = Signal(LENGTH_BITS - MEMORY_WORD_BITS)
        more = Signal.like(self.o.p.more)
        last = Signal()
        within = bits_for(self.burst_beats)
        to_boundary = Signal(within)  # beats beside one
        m.d.comb += [
            to_boundary.eq(~word[:within]),
            self.o.p.word.eq(word),
            self.o.p.more.eq(more),
            self.o.p.last.eq(last),
        ]
        with m.FSM():
            with m.State("TAKE"):
                m.d.comb += self.i.ready.eq(1)
                m.d.sync += [word.eq(self.i.p.address[MEMORY_WORD_BITS:]), left.eq(self.i.p.length[MEMORY_WORD_BITS:])]
                with m.If(self.i.valid):
                    m.next = "MEASURE"
            with m.State("MEASURE"):
                m.d.sync += [
                    last.eq(left <= to_boundary + 1),
                    more.eq(Mux(left <= to_boundary, left - 1, to_boundary)),
                ]
                m.next = "GIVE"
            with m.State("GIVE"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.d.sync += [word.eq(word + more + 1), left.eq(left - more - 1)]
                    m.next = "MEASURE"
                    with m.If(last):
                        m.next = "TAKE"
        return m


class AxiMemory(wiring.Component):
    """Read and write the board's memory: an AXI4 master of aligned 16-byte beats, identifier 0, incrementing bursts.

    A burst of a read is asked for when there is room for all of it, so data is never kept waiting on the bus, and
    several are on their way at a time, which hides what the memory takes for the first beat. Writes are collected, and
    a burst begins when all of it is here; one is on its way at a time, the next collected meanwhile.

    ``flush`` forgets all reads. The bus is not broken off: bursts asked for come to their end and are dropped, and only
    then is the next read begun. A burst that was being collected is written as far as it came.

    Parameters
    ----------
    memory_bits
        Addresses have so many bits, 20..40.
    burst_beats
        Most beats of a burst: a power of two, 2..256.
    outstanding
        Bursts of reads on their way or waiting to be taken, 2..16.

    Members
    -------
    i_read : stream of :func:`hw.layouts.memory_read`
    o_read : stream of :func:`hw.layouts.link_beat`, the bytes; ``last`` ends each read
    i_write : stream of :func:`hw.layouts.memory_write`
    write_busy : Out, high from the cycle after a word was taken until the memory has confirmed it
    error : Out, until ``flush``: an answer other than OKAY came, for a read not later than its beat at ``o_read``, for
        a write when ``write_busy`` falls
    flush : In
    m_axi_* : see :func:`axi_ports`
    """

    i_read: stream.Interface
    o_read: stream.Interface
    i_write: stream.Interface
    write_busy: Signal
    error: Signal
    flush: Signal

    def __init__(self, memory_bits: int, *, burst_beats: int = 64, outstanding: int = 4) -> None:
        if memory_bits not in MEMORY_BITS:
            raise ValueError(f"memory_bits must be in 20..40, not {memory_bits!r}")
        if not 2 <= burst_beats <= MAX_BURST_BEATS or burst_beats & (burst_beats - 1):
            raise ValueError(f"burst_beats must be a power of two in 2..{MAX_BURST_BEATS}, not {burst_beats!r}")
        if not 2 <= outstanding <= 16:
            raise ValueError(f"outstanding must be in 2..16, not {outstanding!r}")
        self.memory_bits, self.burst_beats, self.outstanding = memory_bits, burst_beats, outstanding
        super().__init__(
            axi_ports(memory_bits)
            | {
                "i_read": In(stream.Signature(memory_read(memory_bits))),
                "o_read": Out(stream.Signature(link_beat(WORD_BYTES))),
                "i_write": In(stream.Signature(memory_write(memory_bits))),
                "write_busy": Out(1),
                "error": Out(1),
                "flush": In(1),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        bad_read, bad_write = self._read(m), self._write(m)
        m.d.sync += self.error.eq((self.error & ~self.flush) | bad_read | bad_write)
        return m

    def _read(self, m: Module) -> Signal:
        """Returns whether a read's answer is bad."""
        requests = Queue(memory_read(self.memory_bits), MAX_OUTSTANDING)  # so that none waits where it came from
        bursts = Bursts(self.memory_bits, self.burst_beats)
        capacity = self.outstanding * self.burst_beats
        beats = SyncFIFOBuffered(width=8 * WORD_BYTES + 1, depth=capacity + 1)
        for name, part in {"requests": requests, "bursts": bursts, "beats": beats}.items():
            m.submodules[name] = ResetInserter(self.flush)(part)
        m.submodules.on_their_way = on_their_way = Queue(1, self.outstanding)  # bursts; 1: ends its read
        wiring.connect(m, wiring.flipped(self.i_read), requests.i)
        wiring.connect(m, requests.o, bursts.i)

        ar, r = channel(self, "ar"), channel(self, "r")
        dropping = Signal()
        kept = Signal()  # beats that come now are wanted
        reserved = Signal(range(capacity + 1))  # places in `beats` for what was asked for
        go = Signal()
        m.d.comb += [
            kept.eq(~dropping & ~self.flush),
            bursts.o.ready.eq(
                kept & (reserved <= capacity - self.burst_beats) & on_their_way.i.ready & (~ar.valid | ar.ready)
            ),
            go.eq(bursts.o.valid & bursts.o.ready),
            on_their_way.i.valid.eq(go),
            on_their_way.i.payload.eq(bursts.o.p.last),
            ar.size.eq(SIZE),
            ar.burst.eq(INCR),
        ]
        with m.If(go):
            m.d.sync += [
                ar.valid.eq(1),
                ar.addr.eq(Cat(Const(0, MEMORY_WORD_BITS), bursts.o.p.word)),
                ar.len.eq(bursts.o.p.more),
            ]
        with m.Elif(ar.ready):
            m.d.sync += ar.valid.eq(0)

        taken = Signal()
        given = Signal()
        m.d.comb += [
            r.ready.eq(beats.w_rdy | ~kept),
            taken.eq(r.valid & r.ready),
            on_their_way.o.ready.eq(taken & r.last),
            beats.w_en.eq(taken & kept),
            beats.w_data.eq(Cat(r.data, r.last & on_their_way.o.payload)),
            self.o_read.valid.eq(beats.r_rdy),
            self.o_read.payload.eq(beats.r_data),
            beats.r_en.eq(self.o_read.ready),
            given.eq(self.o_read.valid & self.o_read.ready),
        ]
        m.d.sync += reserved.eq(Mux(kept, reserved + Mux(go, bursts.o.p.more + 1, 0) - given, 0))
        with m.If(self.flush):
            m.d.sync += dropping.eq(1)
        with m.Elif(~on_their_way.o.valid):
            m.d.sync += dropping.eq(0)
        bad = Signal()
        m.d.comb += bad.eq(taken & kept & (r.resp != 0))
        return bad

    def _write(self, m: Module) -> Signal:
        """Returns whether a write's answer is bad."""
        place_bits = bits_for(self.burst_beats)
        m.submodules.words = words = SyncFIFOBuffered(width=8 * WORD_BYTES, depth=2 * self.burst_beats + 1)
        m.submodules.collected = collected = Queue(burst(self.memory_bits, self.burst_beats), 2)

        # A burst is collected up to the next multiple of `burst_beats` words, or to the last word there is.
        word = Signal(self.memory_bits - MEMORY_WORD_BITS)  # its first
        count = Signal(range(self.burst_beats + 1))
        closed = Signal()  # all of it is there
        taken = Signal()
        here = self.i_write.p.address[MEMORY_WORD_BITS:]
        m.d.comb += [
            self.i_write.ready.eq(words.w_rdy & ~closed & ~self.flush),
            taken.eq(self.i_write.valid & self.i_write.ready),
            words.w_en.eq(taken),
            words.w_data.eq(self.i_write.p.data),
            collected.i.valid.eq(closed),
            collected.i.p.word.eq(word),
            collected.i.p.more.eq(count - 1),
        ]
        with m.If(taken):
            m.d.sync += [count.eq(count + 1), closed.eq(self.i_write.p.last | here[:place_bits].all())]
            with m.If(count == 0):
                m.d.sync += word.eq(here)
        with m.Elif(closed & collected.i.ready):
            m.d.sync += [count.eq(0), closed.eq(0)]
        with m.Elif(self.flush):
            m.d.sync += closed.eq(count != 0)

        aw, w, b = (channel(self, name) for name in ("aw", "w", "b"))
        left = Signal(place_bits)
        sending, confirming = Signal(), Signal()
        bad = Signal()
        m.d.comb += [
            aw.size.eq(SIZE),
            aw.burst.eq(INCR),
            w.data.eq(words.r_data),
            w.strb.eq((1 << WORD_BYTES) - 1),
            w.last.eq(left == 0),
            self.write_busy.eq((count != 0) | collected.o.valid | sending | confirming),
        ]
        with m.If(aw.ready):
            m.d.sync += aw.valid.eq(0)
        with m.FSM():
            with m.State("WAIT"):
                m.d.comb += collected.o.ready.eq(1)
                with m.If(collected.o.valid):
                    m.d.sync += [
                        aw.valid.eq(1),  # and the data with it: who answers may wait for either
                        aw.addr.eq(Cat(Const(0, MEMORY_WORD_BITS), collected.o.p.word)),
                        aw.len.eq(collected.o.p.more),
                        left.eq(collected.o.p.more),
                    ]
                    m.next = "SEND"
            with m.State("SEND"):
                m.d.comb += [sending.eq(1), w.valid.eq(words.r_rdy), words.r_en.eq(w.ready)]
                with m.If(w.valid & w.ready):
                    m.d.sync += left.eq(left - 1)
                    with m.If(w.last):
                        m.next = "CONFIRM"
            with m.State("CONFIRM"):
                m.d.comb += [confirming.eq(1), b.ready.eq(1), bad.eq(b.valid & (b.resp != 0))]
                with m.If(b.valid):
                    m.next = "WAIT"
        return bad
