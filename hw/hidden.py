"""What lies between an expert's matrices: up and gate sums in, int16 blocks of ``h`` out."""

from functools import partial

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.delay import delay
from hw.formats.params import Params
from hw.layouts import ROUTER_WEIGHT, SCALED, Kind, activation_word, bits_for, hidden_place, row_sum
from hw.normalise import ARGUMENT_BITS, Normalise
from hw.primitives.memory import BlockMemory
from hw.primitives.queue import Queue
from hw.requant import Requant
from hw.swiglu import Swiglu

GATES = 16
"""Gate sums that may be on their way to the ring."""


class Hidden(wiring.Component):
    """Keep the up sums; as the gate sums come, turn both into ``h``; round each block that is complete.

    One memory holds the up sum of each token and row until ``h`` takes its place, and ``h`` until its block is rounded.
    Every row sum of an expert's up matrix comes before the first of its gate matrix, and ``done`` before the next
    expert's.

    Members
    -------
    i : stream of :func:`hw.layouts.row_sum`, kinds up and gate
    rows : In, rows of these matrices, a multiple of 256; holds
    weight_token : Out; weight : In, the token's router weight for this expert, ``BlockMemory.LATENCY`` cycles later
    o : stream of :func:`hw.layouts.activation_word`, whose taker must be always ready
    done : Out, high for a cycle with the expert's last word
    """

    i: stream.Interface
    rows: Signal
    weight_token: Signal
    weight: data.View
    o: stream.Interface
    done: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        super().__init__(
            {
                "i": In(stream.Signature(row_sum(params))),
                "rows": In(bits_for(params.max_expert_width + 1)),
                "weight_token": Out(bits_for(params.max_batch)),
                "weight": In(ROUTER_WEIGHT),
                "o": Out(stream.Signature(activation_word(params))),
                "done": Out(1),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params
        delayed = partial(delay, m)
        place_shape = hidden_place(params)
        waiting_shape = data.StructLayout({"g": SCALED, "argument": ARGUMENT_BITS, "place": place_shape})
        m.submodules.normalise = normalise = Normalise()
        m.submodules.gates = gates = Queue(waiting_shape, GATES)
        m.submodules.swiglu = swiglu = Swiglu(params)
        m.submodules.requant = requant = Requant(params)
        row_bits = len(requant.r_row)
        m.submodules.memory = mem = BlockMemory(SCALED.size, 1 << (row_bits + bits_for(params.max_batch)))

        # A gate sum is taken only with a place in the queue for it, known three cycles late, hence the margin.
        places = Signal(range(GATES + 1), init=GATES)
        ready = Signal()
        taken = Signal()
        gate = Signal()
        row = Signal(row_bits)
        last_row = Signal()
        before_last = Signal.like(row, reset_less=True)
        leave = Signal()
        m.d.comb += [
            self.i.ready.eq(ready),
            taken.eq(self.i.valid & ready),
            gate.eq(self.i.p.kind == Kind.GATE),
        ]
        m.d.sync += [
            ready.eq(places >= 5),
            places.eq(places - delayed(taken & gate, 1, control=True) + leave),
            before_last.eq(self.rows - 2),
        ]
        with m.If(taken & self.i.p.end):
            m.d.sync += [row.eq(Mux(last_row, 0, row + 1)), last_row.eq(~last_row & (row == before_last))]

        # To 18 significant bits. An up sum goes to the memory, a gate sum into the queue.
        latency = Normalise.LATENCY
        place = Signal(place_shape)
        m.d.comb += [
            normalise.value.eq(self.i.p.value),
            place.token.eq(self.i.p.token),
            place.row.eq(row),
            place.end.eq(self.i.p.end),
        ]
        place_out = data.View(place_shape, delayed(place.as_value(), latency))
        m.d.comb += [
            gates.i.valid.eq(delayed(taken & gate, latency, control=True)),
            gates.i.p.g.eq(normalise.scaled),
            gates.i.p.argument.eq(normalise.argument),
            gates.i.p.place.eq(place_out),
        ]
        up_valid = delayed(taken & ~gate, latency, control=True)

        # The oldest gate sum's up sum and weight: the memory is asked, and three cycles later all goes to the ring.
        offered = data.View(swiglu.i.p.shape(), Signal(swiglu.i.p.shape().size, reset_less=True))
        asked = Signal()
        m.d.comb += [swiglu.i.payload.eq(offered), self.weight_token.eq(gates.o.p.place.token)]
        with m.FSM():
            with m.State("ASK"):
                m.d.comb += asked.eq(gates.o.valid)
                with m.If(gates.o.valid):
                    m.next = "WAIT"
            with m.State("WAIT"):
                m.next = "WAIT MORE"
            with m.State("WAIT MORE"):
                m.next = "TAKE"
            with m.State("TAKE"):
                m.d.comb += [leave.eq(1), gates.o.ready.eq(1)]
                m.d.sync += [
                    offered.g.eq(gates.o.p.g),
                    offered.argument.eq(gates.o.p.argument),
                    offered.place.eq(gates.o.p.place),
                    offered.u.eq(mem.r_data),
                    offered.p.eq(self.weight),
                ]
                m.next = "OFFER"
            with m.State("OFFER"):
                m.d.comb += swiglu.i.valid.eq(1)
                with m.If(swiglu.i.ready):
                    m.next = "REST"
            with m.State("REST"):  # elements are six cycles apart at least, as the rounding wants
                m.next = "ASK"

        # The memory's ports: h and up sums never come at the same time; rounding reads when nobody asks.
        write_place = Mux(up_valid, Cat(place_out.row, place_out.token), Cat(swiglu.o.place.row, swiglu.o.place.token))
        write_value = Mux(up_valid, normalise.scaled.as_value(), swiglu.o.h.as_value())
        m.d.sync += [
            mem.w_addr.eq(write_place),
            mem.w_data.eq(write_value),
            mem.w_en.eq(up_valid | swiglu.o_valid),
        ]
        head = gates.o.p.place
        m.d.sync += mem.r_addr.eq(Mux(asked, Cat(head.row, head.token), Cat(requant.r_row, requant.r_token)))
        m.d.comb += [
            requant.r_ready.eq(~asked),
            requant.r_data.eq(mem.r_data),
            requant.i.eq(swiglu.o),
            requant.i_valid.eq(swiglu.o_valid),
            requant.rows.eq(self.rows),
            self.done.eq(requant.done),
        ]
        wiring.connect(m, requant.o, wiring.flipped(self.o))
        return m
