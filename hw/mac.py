"""Sub-blocks times activations to one integer a block and lane."""

from functools import partial

from amaranth.hdl import Array, Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.activations import Activations
from hw.delay import delay
from hw.formats.arithmetic import ACTIVATION_BITS, BLOCK_SUM_BITS, PRODUCT_BITS
from hw.formats.params import Params
from hw.formats.q6_k import SCALE_BITS, SUB_BLOCK_WEIGHTS, SUB_BLOCKS
from hw.layouts import block_sum, block_tag, sub_block
from hw.primitives.multiplier import Multiplier
from hw.primitives.queue import CreditQueue


class Mac(wiring.Component):
    """``S = sum_j scale[j] * sum_i weight[i] * activation[i]`` of each block, for every token lane.

    ``weight * scale`` is formed once and shared by the lanes. Nothing in the pipeline stalls: a block is taken only
    while there is room for its sums, so only the small queues at both ends see a handshake. One sub-block a cycle, so
    16 cycles a block; golden: :func:`sim.golden.matmul.block_sums`.

    Attributes
    ----------
    latency : int
        Cycles from a block's last sub-block to its sums: one more with several lanes, whose multipliers are spread so
        far over the chip that a register stands between them and the adders.

    Members
    -------
    i : stream of :func:`hw.layouts.sub_block`
    o : stream of :func:`hw.layouts.block_sum`
    x_group, x_column, x_index, x : the read port of :class:`hw.activations.Activations`
    held : Out, blocks inside
    """

    BLOCKS = 4
    """Blocks that may be under way or waiting."""

    i: stream.Interface
    o: stream.Interface
    x_group: Signal
    x_column: Signal
    x_index: Signal
    x: data.View
    held: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        self.apart = int(params.tokens > 1)
        self.latency = 15 + self.apart
        tag = block_tag(params)
        values = data.ArrayLayout(signed(ACTIVATION_BITS), SUB_BLOCK_WEIGHTS)
        super().__init__(
            {
                "i": In(stream.Signature(sub_block(params))),
                "o": Out(stream.Signature(block_sum(params))),
                "x_group": Out(tag["group"].shape),
                "x_column": Out(tag["column"].shape),
                "x_index": Out(sub_block(params)["index"].shape),
                "x": In(data.ArrayLayout(values, params.tokens)),
                "held": Out(range(self.BLOCKS + 1)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params
        m.submodules.leaving = leaving = CreditQueue(block_sum(params), self.BLOCKS)
        wiring.connect(m, leaving.o, wiring.flipped(self.o))

        # Blocks end 16 cycles apart. So whether there is room for the next may be known a few cycles late, and a tag is
        # there until its sums are.
        room = Signal()
        taken = Signal()
        block_end = Signal()
        tag = Signal(block_tag(params), reset_less=True)
        ended = Signal()  # a block, a cycle ago
        m.d.sync += [
            ended.eq(block_end),
            self.held.eq(self.held + ended - leaving.left),
            room.eq(self.held != self.BLOCKS),
        ]
        came = delay(m, self.i.p.tag, 1)
        with m.If(ended):
            m.d.sync += tag.eq(came)
        m.d.comb += [
            self.i.ready.eq(room),
            taken.eq(self.i.valid & self.i.ready),
            block_end.eq(taken & (self.i.p.index == SUB_BLOCKS - 1)),
            leaving.i.p.tag.eq(tag),
        ]

        delayed = partial(delay, m)

        # weight * scale from three two-bit digits of the weight (the highest signed), in four cycles.
        weights = delayed(self.i.p.weights.as_value(), 1)
        scale = delayed(self.i.p.scale, 1)
        multiples = {0: 0, 1: scale, 2: scale << 1, 3: (scale << 1) + scale, -1: -scale, -2: -(scale << 1)}
        multiple_shape = signed(SCALE_BITS + 2)
        registered = {}
        for factor, value in multiples.items():
            registered[factor] = Signal(multiple_shape, name=f"scale_x{factor}", reset_less=True)
            m.d.sync += registered[factor].eq(value)
        weights = delayed(weights, 1)
        products = []
        for i in range(SUB_BLOCK_WEIGHTS):
            digits = [weights[6 * i + 2 * k : 6 * i + 2 * k + 2] for k in range(3)]
            unsigned_digit = Array(registered[f] for f in (0, 1, 2, 3))
            signed_digit = Array(registered[f] for f in (0, 1, -2, -1))
            parts = [Signal(multiple_shape, name=f"part{i}_{k}", reset_less=True) for k in range(3)]
            low = Signal(signed(SCALE_BITS + 5), name=f"low{i}", reset_less=True)
            product = Signal(signed(PRODUCT_BITS), name=f"product{i}", reset_less=True)
            m.d.sync += [
                parts[0].eq(unsigned_digit[digits[0]]),
                parts[1].eq(unsigned_digit[digits[1]]),
                parts[2].eq(signed_digit[digits[2]]),
                low.eq(parts[0] + (parts[1] << 2)),
                product.eq(low + (delayed(parts[2], 1) << 4)),
            ]
            products.append(product)
        product_latency = 5

        # The activations arrive at the multipliers together with the products.
        wait = product_latency - Activations.X_LATENCY
        m.d.comb += [
            self.x_group.eq(delayed(self.i.p.tag.group, wait)),
            self.x_column.eq(delayed(self.i.p.tag.column, wait)),
            self.x_index.eq(delayed(self.i.p.index, wait)),
        ]

        tree_levels = SUB_BLOCK_WEIGHTS.bit_length() - 1
        latency = product_latency + Multiplier.LATENCY + self.apart + tree_levels
        valid = delayed(taken, latency, control=True)
        end = delayed(block_end, latency, control=True)
        first = delayed(self.i.p.index == 0, latency)
        assert latency + 1 <= SUB_BLOCKS
        m.d.sync += leaving.i.valid.eq(end)
        for t in range(params.tokens):
            terms = []
            for i, product in enumerate(products):
                m.submodules[f"multiplier{t}_{i}"] = dsp = Multiplier(signed(PRODUCT_BITS), signed(ACTIVATION_BITS))
                m.d.comb += [dsp.a.eq(product), dsp.b.eq(self.x[t][i])]
                # |weight * scale| <= 2**12 and |activation| <= 2**15, and only -2**27 reaches 2**27.
                terms.append(delayed(dsp.p[:28].as_signed(), self.apart))
            while len(terms) > 1:
                level = []
                for left, right in zip(terms[::2], terms[1::2], strict=True):
                    node = Signal(signed(len(left) + 1), name=f"tree{t}", reset_less=True)
                    m.d.sync += node.eq(left + right)
                    level.append(node)
                terms = level
            total = Signal(signed(BLOCK_SUM_BITS), name=f"total{t}", reset_less=True)
            with m.If(valid):
                m.d.sync += total.eq(Mux(first, 0, total) + terms[0])
            m.d.comb += leaving.i.p.sums[t].eq(total)
        return m
