"""Block sums times ``d`` and the activations' exponent, added into Q24.40 rows."""

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, signed, unsigned
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.activations import Activations
from hw.formats.arithmetic import (
    ACCUMULATOR_BITS,
    BLOCK_SUM_BITS,
    ERROR_OVERFLOW,
    ERROR_SCALE,
    EXPONENT_BITS,
    FRACTION_BITS,
    MANTISSA_BITS,
)
from hw.formats.params import Params
from hw.layouts import bits_for, block_sum, block_tag, row_sum
from hw.primitives.multiplier import Multiplier
from hw.primitives.queue import Queue


class Accumulate(wiring.Component):
    """Add ``floor(S * m * 2**(k + e + 40) + 1/2)`` into each token's row; hand a row over when its last block is in.

    One unit serves the lanes in turn, a lane a cycle; golden: :func:`sim.golden.matmul.matmul`. An addition that
    leaves 64 bits is clamped and marks its row ``ERROR_OVERFLOW``; a block with a bad ``d`` marks it ``ERROR_SCALE``.
    Rows leave in the order of blocks, within a block lowest lane first.

    The shift goes through three places: two bits in the multiplier's factor, three (multiples of 4) to the left, two
    (multiples of 32) either way. Rounding takes the bit below the result as the carry of the addition.

    Members
    -------
    i : stream of :func:`hw.layouts.block_sum`
    o : stream of :func:`hw.layouts.row_sum`
    e_group, e_column, e : the exponent port of :class:`hw.activations.Activations`
    """

    LATENCY = 15
    """Cycles from a row's last block (lane 0) to the row's sum."""
    ROWS_WAITING = 16

    i: stream.Interface
    o: stream.Interface

    def __init__(self, params: Params) -> None:
        self.params = params
        self.cycles_per_block = max(params.tokens, 4)  # an addition is complete three cycles after it began
        tag = block_tag(params)
        super().__init__(
            {
                "i": In(stream.Signature(block_sum(params))),
                "o": Out(stream.Signature(row_sum(params))),
                "e_group": Out(tag["group"].shape),
                "e_column": Out(tag["column"].shape),
                "e": In(data.ArrayLayout(signed(EXPONENT_BITS), params.tokens)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params
        block = self.i.p
        tag = block.tag
        m.submodules.rows = rows = Queue(row_sum(params), self.ROWS_WAITING)
        wiring.connect(m, wiring.flipped(self.o), rows.o)

        def delayed(value, cycles: int, *, control: bool = False):
            for _ in range(cycles):
                register = Signal.like(value, name="delayed", reset_less=not control)
                m.d.sync += register.eq(value)
                value = register
            return value

        # Issue: lanes in turn, each row end only with a place reserved for it in the queue.
        lane = Signal(range(self.cycles_per_block))
        places = Signal(range(self.ROWS_WAITING + 1), init=self.ROWS_WAITING)
        step = Signal()
        issue = Signal()
        reserve = Signal()
        release = Signal()
        lane_on = Signal()
        m.d.comb += [
            lane_on.eq((tag.lanes >> lane)[0]),
            step.eq(self.i.valid & ((places != 0) | ~tag.last)),
            issue.eq(step & lane_on),
            reserve.eq(issue & tag.last),
            release.eq(self.o.valid & self.o.ready),
            self.i.ready.eq(step & (lane == self.cycles_per_block - 1)),
            self.e_group.eq(tag.group),
            self.e_column.eq(tag.column),
        ]
        with m.If(step):
            m.d.sync += lane.eq(Mux(self.i.ready, 0, lane + 1))
        m.d.sync += places.eq(places - reserve + release)

        token = Signal(bits_for(params.max_batch))
        m.d.comb += token.eq(Cat(lane[: params.tokens.bit_length() - 1], tag.group))

        # Stages 1 and 2: wait for the exponents.
        assert Activations.LATENCY == 2
        total = delayed(Array(block.sums)[lane[: bits_for(params.tokens)]] if params.tokens > 1 else block.sums[0], 3)
        mantissa = delayed(tag.mantissa, 3)
        lane_2 = delayed(lane, 2)
        exponent = self.e[0] if params.tokens == 1 else Array(self.e)[lane_2[: bits_for(params.tokens)]]

        # Stage 3: how far to shift.
        shift = Signal(signed(10), reset_less=True)
        m.d.sync += shift.eq(delayed(tag.exponent, 2) + exponent + FRACTION_BITS)

        # Stage 4: two bits of it into the factor. Stages 5 to 7: the product, in two halves of the sum. Stage 8: both.
        half = BLOCK_SUM_BITS // 2
        factor = Signal(signed(MANTISSA_BITS + 3), reset_less=True)
        m.d.sync += factor.eq(mantissa << shift[:2])
        total = delayed(total, 1)
        m.submodules.low = low = Multiplier(unsigned(half), factor.shape())
        m.submodules.high = high = Multiplier(signed(half), factor.shape())
        product = Signal(signed(BLOCK_SUM_BITS + len(factor) - 1), reset_less=True)
        m.d.comb += [
            low.a.eq(total[:half]),
            high.a.eq(total[half:].as_signed()),
            low.b.eq(factor),
            high.b.eq(factor),
        ]
        m.d.sync += product.eq((high.p << half) + low.p)
        coarse = delayed(shift[2:].as_signed(), 5)  # multiples of four bits, -28..43

        # Stages 9 and 10: twice the product (the extra bit rounds), left by 0..7 multiples. Below -16 of them only the
        # sign would be left, as it is at -16. Above 15 any product but 0 leaves the range.
        narrow = Signal(signed(5), reset_less=True)
        beyond = Signal(reset_less=True)
        m.d.sync += [
            narrow.eq(Mux(coarse < -16, -16, coarse)),
            beyond.eq((coarse > 15) & (product != 0)),
        ]
        left_1 = Signal(signed(len(product) + 1 + 24), reset_less=True)
        m.d.sync += left_1.eq((product << 1) << Cat(Const(0, 3), coarse[1:3] & ~(coarse < -16).replicate(2)))
        left_2 = Signal(signed(len(left_1) + 4), reset_less=True)
        m.d.sync += left_2.eq(Mux(narrow[0], left_1 << 4, left_1))
        far = delayed(narrow[3:], 1)
        beyond = delayed(beyond, 1)

        # Stage 11: by -64, -32, 0 or 32 bits, with what falls off on the left noted.
        doubled_bits = ACCUMULATOR_BITS + 2
        doubled = Signal(signed(doubled_bits), reset_less=True)
        split = doubled_bits - 1 - 32
        sign = left_2[-1]
        top = left_2[doubled_bits - 1 :]
        middle = left_2[split : doubled_bits - 1]
        top_differs = Signal(reset_less=True)
        middle_differs = Signal(reset_less=True)
        far_11 = Signal(2, reset_less=True)
        m.d.sync += [
            doubled.eq(Array([left_2, left_2 << 32, left_2 >> 64, left_2 >> 32])[far]),
            top_differs.eq(top != sign.replicate(len(top))),
            middle_differs.eq(middle != sign.replicate(len(middle))),
            far_11.eq(far),
        ]
        negative = delayed(sign, 1)
        beyond = delayed(beyond, 1)

        # Stages 12 to 14: add, in two halves, and clamp. The row so far is read in 12 and written in 14; the same row
        # is not issued again in between.
        at_11 = 11
        valid = delayed(issue, at_11, control=True)
        token_11, first, last, bad = (delayed(v, at_11) for v in (token, tag.first, tag.last, tag.bad))
        row_shape = data.StructLayout({"value": signed(ACCUMULATOR_BITS), "error": 2})
        m.submodules.rows_so_far = so_far = memory.Memory(shape=row_shape, depth=params.max_batch, init=[])
        read, write = so_far.read_port(domain="comb"), so_far.write_port()
        m.d.comb += read.addr.eq(token_11)
        before = Signal(row_shape)
        with m.If(~first):
            m.d.comb += before.eq(read.data)

        low_bits = ACCUMULATOR_BITS // 2
        term = doubled[1:].as_signed()
        sum_low = Signal(low_bits + 1, reset_less=True)
        before_high = Signal(signed(ACCUMULATOR_BITS - low_bits), reset_less=True)
        term_high = Signal(signed(len(term) - low_bits), reset_less=True)
        lost = Signal(reset_less=True)
        m.d.sync += [
            sum_low.eq(before.value[:low_bits] + term[:low_bits] + doubled[0]),
            before_high.eq(before.value[low_bits:].as_signed()),
            term_high.eq(term[low_bits:].as_signed()),
            lost.eq(beyond | ((far_11 == 0) & top_differs) | ((far_11 == 1) & (top_differs | middle_differs))),
        ]
        sum_high = Signal(signed(ACCUMULATOR_BITS - low_bits + 2), reset_less=True)
        m.d.sync += sum_high.eq(before_high + term_high + sum_low[low_bits])

        result = Signal(row_shape)
        outside = Signal()
        lost = delayed(lost, 1)
        clamp_negative = Mux(lost, delayed(negative, 2), sum_high[-1])
        keep = ACCUMULATOR_BITS - low_bits
        m.d.comb += [
            outside.eq(lost | (sum_high[keep - 1 :] != sum_high[-1].replicate(len(sum_high) - keep + 1))),
            result.value.eq(
                Mux(
                    outside,
                    Cat(~clamp_negative.replicate(ACCUMULATOR_BITS - 1), clamp_negative),
                    Cat(delayed(sum_low[:low_bits], 1), sum_high[:keep]),
                )
            ),
            result.error.eq(
                delayed(before.error, 2)
                | Mux(outside, ERROR_OVERFLOW, 0)
                | Mux(delayed(bad, 2), ERROR_SCALE, 0)
            ),
            write.addr.eq(delayed(token_11, 2)),
            write.data.eq(result),
            write.en.eq(delayed(valid, 2, control=True)),
        ]
        m.d.sync += [
            rows.i.valid.eq(write.en & delayed(last, 2)),
            rows.i.p.value.eq(result.value),
            rows.i.p.error.eq(result.error),
            rows.i.p.token.eq(write.addr),
        ]
        return m
