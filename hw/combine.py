"""The layer's outputs: each expert's rows, added up for every token."""

from functools import partial

from amaranth.hdl import Array, Cat, Module, Mux, Signal, signed
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.delay import delay
from hw.formats.arithmetic import ACCUMULATOR_BITS
from hw.formats.params import Params
from hw.layouts import bits_for, row_sum
from hw.primitives.memory import BlockMemory


class Combine(wiring.Component):
    """``y[token][row] += sum`` in Q24.40; an addition that leaves 64 bits is clamped and told.

    The first expert that a token has writes its row, later ones add to it, so nothing needs to be cleared: a token that
    has had none since ``start`` reads as zero. Golden: :func:`sim.golden.layer.run`.

    Members
    -------
    i : stream of :func:`hw.layouts.row_sum`, always ready; one expert's rows in order, tokens within a row in order
    rows : In, rows of the down matrix; holds
    start : In, forgets all sums
    finished : Out, high for a cycle when an expert's last sum has been added
    overflow : Out, high for a cycle
    r_token, r_row : In; r_data : Out, ``LATENCY`` cycles later; not within ``LATENCY`` cycles of ``finished``
    """

    LATENCY = BlockMemory.LATENCY + 3
    ADD_LATENCY = BlockMemory.LATENCY + 8
    """Cycles from a sum to its place in the memory."""

    i: stream.Interface
    rows: Signal
    start: Signal
    finished: Signal
    overflow: Signal
    r_token: Signal
    r_row: Signal
    r_data: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        super().__init__(
            {
                "i": In(stream.Signature(row_sum(params))),
                "rows": In(bits_for(params.max_width + 1)),
                "start": In(1),
                "finished": Out(1),
                "overflow": Out(1),
                "r_token": In(bits_for(params.max_batch)),
                "r_row": In(bits_for(params.max_width)),
                "r_data": Out(signed(ACCUMULATOR_BITS)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        delayed = partial(delay, m)
        row_bits, token_bits = len(self.r_row), len(self.r_token)
        m.submodules.memory = mem = BlockMemory(ACCUMULATOR_BITS, 1 << (row_bits + token_bits))
        fresh = Signal(self.params.max_batch)  # tokens that no expert has finished
        item = Signal(row_sum(self.params), reset_less=True)
        valid = Signal()
        m.d.sync += [item.eq(self.i.p), valid.eq(self.i.valid)]
        token = item.token
        row = Signal(row_bits)
        last_row = Signal()
        m.d.comb += self.i.ready.eq(1)
        before_last = Signal.like(row, reset_less=True)
        m.d.sync += before_last.eq(delayed(self.rows, 1) - 2)
        with m.If(valid & item.end):
            m.d.sync += [row.eq(Mux(last_row, 0, row + 1)), last_row.eq(~last_row & (row == before_last))]
        is_fresh = Array(fresh)[token]
        with m.If(self.start):
            m.d.sync += fresh.eq(-1)
        with m.Elif(valid & last_row):
            m.d.sync += Array(fresh)[token].eq(0)

        # Stage 1: the sum that comes. Stages 2 to 6: its place, the sum so far, through registers that reach all of a
        # large memory. Stages 7, 8: add in two halves. Stage 9: clamp. Stage 10: write.
        adding = delayed(valid, 5, control=True)
        stored = delayed(mem.r_data, 1)
        place = Cat(row, token)
        reading = Cat(self.r_row, self.r_token)
        m.d.comb += mem.r_addr.eq(delayed(Mux(valid, place, reading), 1))
        before = delayed(Mux(delayed(is_fresh, 4), 0, stored), 1)
        value = delayed(item.value, 5)
        half = ACCUMULATOR_BITS // 2
        low = Signal(half + 1, reset_less=True)
        m.d.sync += low.eq(before[:half] + value[:half])
        high = Signal(signed(half + 1), reset_less=True)
        m.d.sync += high.eq(delayed(before[half:], 1).as_signed() + delayed(value[half:], 1).as_signed() + low[half])
        outside = high[-1] != high[-2]
        total = Signal(ACCUMULATOR_BITS, reset_less=True)
        clamped = Cat((~high[-1]).replicate(ACCUMULATOR_BITS - 1), high[-1])
        m.d.sync += total.eq(Mux(outside, clamped, Cat(delayed(low[:half], 1), high[:half])))
        m.d.comb += [
            mem.w_addr.eq(delayed(place, 8)),
            mem.w_data.eq(total),
            mem.w_en.eq(delayed(adding, 3, control=True)),
        ]
        m.d.sync += [
            self.overflow.eq(delayed(adding, 2, control=True) & outside),
            self.finished.eq(delayed(valid & item.end & last_row, 9, control=True)),
            self.r_data.eq(Mux(delayed(Array(fresh)[self.r_token], 4), 0, stored)),
        ]
        return m
