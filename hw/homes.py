"""Where each expert lies, and its bytes from there: a table, and one stream of weights made of two."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.formats.messages import LENGTH_BITS, MAX_OUTSTANDING
from hw.formats.params import Params
from hw.layouts import MEMORY_WORD_BITS, REQUEST, Kind, home, link_beat, memory_read, wanted_matrix
from hw.primitives.memory import BlockMemory
from hw.primitives.queue import Queue


class Homes(wiring.Component):
    """Send each request to the host or to the board's memory, and bring the answers into the order of requests.

    In the memory an expert's matrices lie one after another, each as long as its request says. One that would pass the
    memory's end, or is not whole words of 16 bytes, is an error; no request is taken after it. A request takes five
    cycles and more. Beats of an answer pass through in the cycle in which they come.

    Parameters
    ----------
    params
        See :class:`hw.formats.params.Params`; ``memory_bits`` is not 0.

    Members
    -------
    i_home : stream of :func:`hw.layouts.home`, experts 0, 1, ...; those not named lie with the host
    forget : In, all experts lie with the host
    i_request : stream of :func:`hw.layouts.wanted_matrix`: up, gate, down of an expert; no more than MAX_OUTSTANDING
        may be unanswered
    o_request : stream of ``REQUEST``, to the host; i_weights : its answers
    o_read : stream of :func:`hw.layouts.memory_read`; i_read : its answers
    o_weights : all answers; like the other two a stream of :func:`hw.layouts.link_beat`, ``last`` ends an answer
    waiting : Out, a request to the host is unanswered
    answered : Out, high for a cycle with the last beat of any answer
    moved : Out, high for a cycle with each beat from the memory; idle : Out, the oldest answer is due from there, but
        no beat comes
    halted : In, what the host still sends is dropped where it is not the oldest answer that is due
    error : Out, high for a cycle
    """

    i_home: stream.Interface
    forget: Signal
    i_request: stream.Interface
    o_request: stream.Interface
    i_weights: stream.Interface
    o_read: stream.Interface
    i_read: stream.Interface
    o_weights: stream.Interface
    waiting: Signal
    answered: Signal
    moved: Signal
    idle: Signal
    halted: Signal
    error: Signal

    def __init__(self, params: Params) -> None:
        if not params.memory_bits:
            raise ValueError("memory_bits must not be 0 where experts may lie in the board's memory")
        self.params = params
        beat = stream.Signature(link_beat(params.link_bytes))
        super().__init__(
            {
                "i_home": In(stream.Signature(home(params))),
                "forget": In(1),
                "i_request": In(stream.Signature(wanted_matrix(params))),
                "o_request": Out(stream.Signature(REQUEST)),
                "i_weights": In(beat),
                "o_read": Out(stream.Signature(memory_read(params.memory_bits))),
                "i_read": In(beat),
                "o_weights": Out(beat),
                "waiting": Out(1),
                "answered": Out(1),
                "moved": Out(1),
                "idle": Out(1),
                "halted": In(1),
                "error": Out(1),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params
        request = self.i_request.p
        word_bits = params.memory_bits - MEMORY_WORD_BITS

        # The table. Experts beyond those told are not looked up, so that nothing has to be cleared.
        m.submodules.table = table = BlockMemory(word_bits + 1, max(params.max_experts, 2))
        told = Signal(range(params.max_experts + 1))
        m.d.comb += [
            self.i_home.ready.eq(1),
            table.w_addr.eq(self.i_home.p.expert),
            table.w_data.eq(Cat(self.i_home.p.here, self.i_home.p.word)),
            table.w_en.eq(self.i_home.valid),
            table.r_addr.eq(request.expert),
        ]
        with m.If(self.forget):
            m.d.sync += told.eq(0)
        with m.Elif(self.i_home.valid):
            m.d.sync += told.eq(self.i_home.p.expert + 1)

        # Requests, one at a time; whose turn it is to answer waits in `order`: 1 is the memory.
        m.submodules.order = order = Queue(1, MAX_OUTSTANDING)
        length = request.length[MEMORY_WORD_BITS:]
        sum_bits = max(word_bits + 1, LENGTH_BITS - MEMORY_WORD_BITS) + 1
        word = Signal(word_bits + 1)  # a matrix may begin behind the memory's end, and must not wrap to its start
        after = Signal(sum_bits)  # where the expert's next matrix begins
        here = Signal()
        bad = Signal()
        unanswered = Signal(range(MAX_OUTSTANDING + 1))
        asked = Signal()
        m.d.comb += [
            self.o_request.p.offset.eq(request.offset),
            self.o_request.p.length.eq(request.length),
            self.o_read.p.address.eq(Cat(Const(0, MEMORY_WORD_BITS), word)),
            self.o_read.p.length.eq(request.length),
            order.i.payload.eq(here),
        ]
        with m.FSM():
            with m.State("LOOK"):
                with m.If(self.i_request.valid):
                    m.next = "SEE"
            with m.State("SEE"):  # the table's answer comes in the next cycle
                m.next = "PLACE"
            with m.State("PLACE"):
                m.d.sync += [
                    here.eq(table.r_data[0] & (request.expert < told)),
                    word.eq(Mux(request.kind == Kind.UP, table.r_data[1:], after)),
                ]
                m.next = "MEASURE"
            with m.State("MEASURE"):
                m.d.sync += [
                    after.eq(word + length),
                    bad.eq(request.length[:MEMORY_WORD_BITS].any() | (length == 0)),
                ]
                m.next = "ASK"
            with m.State("ASK"):
                with m.If(~here):
                    m.d.comb += [self.o_request.valid.eq(1), asked.eq(self.o_request.ready)]
                with m.Elif(bad | (after > 1 << word_bits)):
                    m.d.comb += self.error.eq(1)
                    m.next = "FAILED"
                with m.Else():
                    m.d.comb += [self.o_read.valid.eq(1), asked.eq(self.o_read.ready)]
                m.d.comb += [self.i_request.ready.eq(asked), order.i.valid.eq(asked)]
                with m.If(asked):
                    m.next = "LOOK"
            with m.State("FAILED"):
                pass

        # Answers.
        due, from_memory = order.o.valid, order.o.payload
        m.d.comb += [
            self.o_weights.valid.eq(due & Mux(from_memory, self.i_read.valid, self.i_weights.valid)),
            self.o_weights.payload.eq(Mux(from_memory, self.i_read.payload, self.i_weights.payload)),
            self.i_read.ready.eq(due & from_memory & self.o_weights.ready),
            self.i_weights.ready.eq(Mux(due & ~from_memory, self.o_weights.ready, self.halted)),
            self.answered.eq(self.o_weights.valid & self.o_weights.ready & self.o_weights.p.last),
            order.o.ready.eq(self.answered),
            self.moved.eq(self.i_read.valid & self.i_read.ready),
            self.idle.eq(self.i_read.ready & ~self.i_read.valid),
            self.waiting.eq(unanswered != 0),
        ]
        m.d.sync += unanswered.eq(unanswered + (asked & ~here) - (self.answered & ~from_memory))
        return m
