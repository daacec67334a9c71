"""Block sums times ``d`` and the activations' exponent, added into Q24.40 rows."""

from functools import partial

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.activations import Activations
from hw.delay import delay
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
from hw.primitives.queue import CreditQueue, Place


def rows_waiting(params: Params) -> int:
    """Row sums that the accumulator's queue holds: a block's, and one more block's while those leave."""
    return max(16, 2 * params.tokens + 4)


class Accumulate(wiring.Component):
    """Add ``floor(S * m * 2**(k + e + 40) + 1/2)`` into each token's row; hand a row over when its last block is in.

    One unit serves the lanes in turn, a lane a cycle; golden: :func:`sim.golden.matmul.matmul`. An addition that
    leaves 64 bits is clamped and marks its row ``ERROR_OVERFLOW``; a block with a bad ``d`` marks it ``ERROR_SCALE``.
    Rows leave in the order of blocks, within a block lowest lane first, one every other cycle at most.

    The shift goes through three places: two bits in the multiplier's factor, three (multiples of 4) to the left, two
    (multiples of 32) either way. Rounding takes the bit below the result as the carry of the addition.

    Members
    -------
    i : stream of :func:`hw.layouts.block_sum`
    o : stream of :func:`hw.layouts.row_sum`
    e_token, e_column, e : the exponent port of :class:`hw.activations.Activations`
    held : Out, row sums that wait
    """

    LATENCY = 19
    """Cycles from a row's last block to the sum of the row in lane 0."""

    i: stream.Interface
    o: stream.Interface
    e_token: Signal
    e_column: Signal
    e: Signal
    held: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        self.cycles_per_block = max(params.tokens, 5)  # between an addition's read of a row and the next
        self.rows_waiting = rows_waiting(params)
        tag = block_tag(params)
        super().__init__(
            {
                "i": In(stream.Signature(block_sum(params))),
                "o": Out(stream.Signature(row_sum(params))),
                "e_token": Out(bits_for(params.max_batch)),
                "e_column": Out(tag["column"].shape),
                "e": In(signed(EXPONENT_BITS)),
                "held": Out(range(self.rows_waiting + 1)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params
        m.submodules.rows = rows = CreditQueue(row_sum(params), self.rows_waiting)
        m.submodules.place = place = Place(row_sum(params))
        m.d.comb += self.held.eq(rows.level)
        wiring.connect(m, rows.o, place.i)
        wiring.connect(m, place.o, wiring.flipped(self.o))

        delayed = partial(delay, m)

        # The block at work, in a register; whether the next may come is a register, too, so that no queue waits for
        # what follows here.
        block = Signal(block_sum(params), reset_less=True)
        tag = block.tag
        held = Signal()
        ready = Signal(init=1)
        with m.If(ready):
            m.d.sync += [held.eq(self.i.valid), block.eq(self.i.p)]

        # Issue: lanes in turn. A block that ends a row begins only with a place in the queue for each lane, and then
        # goes through. Places are counted two cycles late, in which up to two may have been taken, hence the margin.
        lane = Signal(range(self.cycles_per_block))
        token = Signal(bits_for(params.max_batch))
        begun = Signal()
        last_lane = Signal()
        places = Signal(range(self.rows_waiting + 1), init=self.rows_waiting)
        room = Signal()
        step = Signal()
        issue = Signal()
        reserve = Signal()
        m.d.comb += [
            token.eq(Cat(lane[: params.tokens.bit_length() - 1], tag.group)),
            step.eq(held & (begun | room | ~tag.last)),
            issue.eq(step & (tag.lanes >> lane)[0]),
            self.i.ready.eq(ready),
            self.e_token.eq(token),
            self.e_column.eq(tag.column),
        ]
        with m.If(step):
            m.d.sync += [
                lane.eq(Mux(last_lane, 0, lane + 1)),
                begun.eq(~last_lane),
                last_lane.eq(lane == self.cycles_per_block - 2),
            ]
        m.d.sync += [
            ready.eq(Mux(ready, ~self.i.valid, step & (lane == self.cycles_per_block - 2))),
            reserve.eq(issue & tag.last),
            places.eq(places - reserve + rows.left),
            room.eq(places >= params.tokens + 3),
        ]

        # Stages 1 and 2: wait for the exponent.
        assert Activations.E_LATENCY == 2
        lane_bits = bits_for(params.tokens)  # an index past the end of a lone lane's array means its last
        lanes = range(params.tokens)
        total = delayed(Value.cast(Array(block.sums[t] for t in lanes)[lane[:lane_bits]]), 3)
        mantissa = delayed(tag.mantissa, 3)

        # Stage 3: how far to shift.
        shift = Signal(signed(10), reset_less=True)
        m.d.sync += shift.eq(delayed(delayed(tag.exponent, 1) + FRACTION_BITS, 1) + self.e)

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
        coarse = delayed(shift[2:].as_signed(), 4)  # multiples of four bits, -28..43
        tiny = delayed(coarse < -16, 1)
        huge = delayed(coarse > 15, 1)
        coarse = delayed(coarse, 1)

        # Stages 9 and 10: twice the product (the extra bit rounds), left by 0..7 multiples. Below -16 of them only the
        # sign would be left, as it is at -16. Above 15 any product but 0 leaves the range.
        narrow = delayed(Mux(tiny, -16, coarse)[:5], 1)
        left_1 = Signal(signed(len(product) + 1 + 24), reset_less=True)
        m.d.sync += left_1.eq((product << 1) << Cat(Const(0, 3), coarse[1:3] & ~tiny.replicate(2)))
        left_2 = Signal(signed(len(left_1) + 4), reset_less=True)
        m.d.sync += left_2.eq(Mux(narrow[0], left_1 << 4, left_1))
        far = delayed(narrow[3:], 1)
        parts_set = delayed(Cat(product[low : low + 8].any() for low in range(0, len(product), 8)), 1)
        beyond = delayed(delayed(huge, 1) & parts_set.any(), 1)

        # Stage 11: by -64, -32, 0 or 32 bits, with what falls off on the left noted.
        doubled_bits = ACCUMULATOR_BITS + 2
        doubled = Signal(signed(doubled_bits), reset_less=True)
        split = doubled_bits - 1 - 32
        sign = left_2[-1]
        top = left_2[doubled_bits - 1 :]
        middle = left_2[split : doubled_bits - 1]
        m.d.sync += doubled.eq(Array([left_2, left_2 << 32, left_2 >> 64, left_2 >> 32])[far])

        def differs(bits):  # from the sign; four bits a register, to be joined in the next stage
            parts = [bits[low : low + 4] for low in range(0, len(bits), 4)]
            return delayed(Cat(part != sign.replicate(len(part)) for part in parts), 1)

        top_differs = delayed(differs(top).any(), 1)
        middle_differs = delayed(differs(middle).any(), 1)
        far_12 = delayed(far, 2)
        beyond = delayed(beyond, 2)
        lost = beyond | ((far_12 == 0) & top_differs) | ((far_12 == 1) & (top_differs | middle_differs))

        # Stages 11 to 15: read the row so far, add in two halves, clamp and write. The same row is issued again five
        # cycles later at the earliest, which is when the written row can be read.
        at_10 = 10
        valid = delayed(issue, at_10 + 1, control=True)
        token_10, first, last, bad = (delayed(v, at_10) for v in (token, tag.first, tag.last, tag.bad))
        row_shape = data.StructLayout({"value": signed(ACCUMULATOR_BITS), "error": 2})
        m.submodules.rows_so_far = so_far = memory.Memory(shape=row_shape, depth=params.max_batch, init=[])
        read, write = so_far.read_port(domain="comb"), so_far.write_port()
        m.d.comb += read.addr.eq(token_10)
        before = Signal(row_shape, reset_less=True)
        m.d.sync += before.eq(Mux(first, 0, read.data))

        low_bits = ACCUMULATOR_BITS // 2
        term = doubled[1:].as_signed()
        sum_low = Signal(low_bits + 1, reset_less=True)
        before_high = Signal(signed(ACCUMULATOR_BITS - low_bits), reset_less=True)
        term_high = Signal(signed(len(term) - low_bits), reset_less=True)
        m.d.sync += [
            sum_low.eq(before.value[:low_bits] + term[:low_bits] + doubled[0]),
            before_high.eq(before.value[low_bits:].as_signed()),
            term_high.eq(term[low_bits:].as_signed()),
        ]
        sum_high = Signal(signed(ACCUMULATOR_BITS - low_bits + 2), reset_less=True)
        m.d.sync += sum_high.eq(before_high + term_high + sum_low[low_bits])

        # Beside the row, for whoever takes it: its kind, and whether a later lane or group has a sum for it, too.
        kind = delayed(tag.kind.as_value(), 14)
        end = delayed(delayed(tag.final, 1) & (delayed(tag.lanes >> lane, 1) == 1), 13)

        lost_13 = delayed(lost, 1)
        keep = ACCUMULATOR_BITS - low_bits
        outside = delayed(lost_13 | (sum_high[keep - 1 :] != sum_high[-1].replicate(len(sum_high) - keep + 1)), 1)
        clamp_negative = delayed(Mux(lost_13, delayed(sign, 3), sum_high[-1]), 1)
        row = delayed(Cat(delayed(sum_low[:low_bits], 1), sum_high[:keep]), 1)
        result = Signal(row_shape)
        m.d.comb += [
            result.value.eq(Mux(outside, Cat(~clamp_negative.replicate(ACCUMULATOR_BITS - 1), clamp_negative), row)),
            result.error.eq(
                delayed(before.error, 3) | Mux(outside, ERROR_OVERFLOW, 0) | Mux(delayed(bad, 4), ERROR_SCALE, 0)
            ),
            write.addr.eq(delayed(token_10, 4)),
            write.data.eq(result),
            write.en.eq(delayed(valid, 3, control=True)),
        ]
        m.d.sync += [
            rows.i.valid.eq(write.en & delayed(last, 4)),
            rows.i.p.value.eq(result.value),
            rows.i.p.error.eq(result.error),
            rows.i.p.token.eq(write.addr),
            rows.i.p.kind.eq(kind),
            rows.i.p.end.eq(end),
        ]
        return m
