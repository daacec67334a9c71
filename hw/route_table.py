"""Who wants which expert, and how much: the router's decision, held for a layer."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.delay import delay
from hw.formats.messages import WEIGHT_BITS
from hw.formats.params import Params
from hw.formats.sigmoid import SIGNIFICANT_BITS
from hw.layouts import ROUTE, ROUTER_WEIGHT, bits_for
from hw.primitives.memory import BlockMemory


class RouteTable(wiring.Component):
    """Routes in any order to a mask of tokens for every expert; router weights, ready for the multiplier.

    A route whose token is not below ``batch`` or whose expert is not below ``experts``, whose weight is above 1 or that
    is there already sets ``error``. A weight's highest bit is shifted to the top as the route comes in: up to 21 cycles
    a route. After a reset no route is taken until all masks are cleared, ``max_experts`` cycles.

    Members
    -------
    i : stream of ``ROUTE``
    batch, experts : In, limits
    error : Out, high for a cycle, a cycle after the route
    empty : Out, no route is on its way in
    mask_expert : In; mask : Out, the tokens that want the expert, two cycles later
    forget : In, clears that expert's mask; not while routes come in
    weight_token, weight_expert : In
    weight : Out, ``ROUTER_WEIGHT``, ``LATENCY`` cycles later
    """

    LATENCY = BlockMemory.LATENCY

    i: stream.Interface
    batch: Signal
    experts: Signal
    error: Signal
    empty: Signal
    mask_expert: Signal
    mask: Signal
    forget: Signal
    weight_token: Signal
    weight_expert: Signal
    weight: data.View

    def __init__(self, params: Params) -> None:
        self.params = params
        token, expert = bits_for(params.max_batch), bits_for(params.max_experts)
        super().__init__(
            {
                "i": In(stream.Signature(ROUTE)),
                "batch": In(bits_for(params.max_batch + 1)),
                "experts": In(bits_for(params.max_experts + 1)),
                "error": Out(1),
                "empty": Out(1),
                "mask_expert": In(expert),
                "mask": Out(params.max_batch),
                "forget": In(1),
                "weight_token": In(token),
                "weight_expert": In(expert),
                "weight": Out(ROUTER_WEIGHT),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params
        token_bits = len(self.weight_token)
        m.submodules.masks = masks = memory.Memory(shape=params.max_batch, depth=params.max_experts, init=[])
        depth = 1 << (token_bits + len(self.weight_expert))
        shape = ROUTER_WEIGHT
        m.submodules.weights = weights = BlockMemory(shape.size, depth)
        read, write = masks.read_port(domain="comb"), masks.write_port()

        entry = Signal(ROUTE, reset_less=True)
        token, expert = entry.token[:token_bits], entry.expert[: len(self.weight_expert)]
        clearing = Signal(init=1)  # after a reset, one mask a cycle
        clear_expert = Signal.like(self.mask_expert)
        with m.If(clearing):
            m.d.sync += [clear_expert.eq(clear_expert + 1), clearing.eq(clear_expert != params.max_experts - 1)]
        held = Signal()  # a route is at work
        looked = Signal()  # and its expert's mask has been asked for
        checked = Signal()
        fits = Signal(3, reset_less=True)
        zero = Signal(reset_less=True)
        good = Signal(reset_less=True)
        normal = Signal(reset_less=True)  # the weight's highest bit is at the top, or it is zero
        scaled = Signal(shape, reset_less=True)
        bit = Signal(params.max_batch, reset_less=True)
        before = Signal(params.max_batch, reset_less=True)
        done = Signal()
        failed = Signal()
        place = Signal.like(self.mask_expert)
        read_at = Signal.like(place)
        m.d.comb += read.addr.eq(read_at)
        m.d.sync += [
            read_at.eq(place),
            self.mask.eq(read.data),
            zero.eq(entry.weight == 0),
            fits.eq(
                Cat(
                    entry.token < delay(m, self.batch, 1),
                    entry.expert < delay(m, self.experts, 1),
                    entry.weight <= 1 << (WEIGHT_BITS - 1),
                )
            ),
        ]
        m.d.sync += failed.eq(done & (~good | (before & bit).any()))
        m.d.comb += [
            self.i.ready.eq(~held & ~clearing),
            self.empty.eq(~held & ~self.i.valid),
            place.eq(Mux(held, expert, self.mask_expert)),
            done.eq(held & checked & (~good | normal)),
            self.error.eq(failed),
        ]
        with m.If(~held):
            m.d.sync += [
                held.eq(self.i.valid & ~clearing),
                looked.eq(0),
                checked.eq(0),
                entry.eq(self.i.p),
                scaled.magnitude.eq(self.i.p.weight),
                scaled.exponent.eq(-16),
            ]
        with m.Elif(~looked):
            m.d.sync += looked.eq(1)
        with m.Elif(~checked):
            m.d.sync += [
                checked.eq(1),
                good.eq(fits.all()),
                bit.eq(Const(1, 1) << token),
                before.eq(read.data),
                normal.eq(zero),
            ]
        with m.Else():
            with m.If(done):
                m.d.sync += held.eq(0)
            m.d.sync += [
                scaled.magnitude.eq(scaled.magnitude << 1),
                scaled.exponent.eq(scaled.exponent - 1),
                normal.eq(scaled.magnitude[SIGNIFICANT_BITS - 2]),
            ]
        # Written a cycle later: nobody looks before.
        writing = Signal()
        written = Signal.like(self.mask_expert, reset_less=True)
        new_mask = Signal(params.max_batch, reset_less=True)
        m.d.comb += [write.addr.eq(written), write.data.eq(new_mask), write.en.eq(writing)]
        m.d.sync += [
            written.eq(Mux(clearing, clear_expert, place)),
            new_mask.eq(Mux(held, before | bit, 0)),
            writing.eq(clearing | Mux(held, done & good, self.forget)),
            weights.w_addr.eq(Cat(token, expert)),
            weights.w_data.eq(scaled),
            weights.w_en.eq(done & good),
        ]
        m.d.comb += [
            weights.r_addr.eq(Cat(self.weight_token, self.weight_expert)),
            self.weight.eq(weights.r_data),
        ]
        return m
