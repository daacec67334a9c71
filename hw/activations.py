"""Where the batch's token vectors lie while the weights pass."""

from amaranth.hdl import Cat, Module, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.formats.arithmetic import ACTIVATION_BITS, EXPONENT_BITS
from hw.formats.params import Params
from hw.formats.q6_k import SUB_BLOCK_WEIGHTS, SUB_BLOCKS
from hw.layouts import LOAD_VALUES, activation_word, bits_for
from hw.primitives.memory import BlockMemory
from hw.primitives.replica import Replica


class Activations(wiring.Component):
    """Store ``max_batch`` vectors of ``store_columns`` blocks; read one sub-block of every lane a cycle.

    Token ``t`` lies in lane ``t % tokens`` and is read with group ``t // tokens``. Each multiplier has a memory of its
    own, so that both can sit side by side; the exponents, which one unit reads for all lanes in turn, lie together.
    Loading takes a word (eight values) a cycle, ``LOAD_LATENCY`` cycles late, and must be over before the values are
    needed; a read of what is being written is undefined.

    Members
    -------
    i : stream of :func:`hw.layouts.activation_word`, always ready
    x_group, x_column, x_index : In, which sub-block
    x : Out, 16 activations a lane, ``X_LATENCY`` cycles later
    e_token, e_column : In, which block
    e : Out, its exponent, ``E_LATENCY`` cycles later
    """

    X_LATENCY = Replica.LATENCY + BlockMemory.LATENCY
    E_LATENCY = BlockMemory.LATENCY
    LOAD_LATENCY = 2

    i: stream.Interface
    x_group: Signal
    x_column: Signal
    x_index: Signal
    x: data.View
    e_token: Signal
    e_column: Signal
    e: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        group, column, token = (bits_for(n) for n in (params.passes, params.store_columns, params.max_batch))
        values = data.ArrayLayout(signed(ACTIVATION_BITS), SUB_BLOCK_WEIGHTS)
        super().__init__(
            {
                "i": In(stream.Signature(activation_word(params))),
                "x_group": In(group),
                "x_column": In(column),
                "x_index": In(bits_for(SUB_BLOCKS)),
                "x": Out(data.ArrayLayout(values, params.tokens)),
                "e_token": In(token),
                "e_column": In(column),
                "e": Out(signed(EXPONENT_BITS)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params
        # Registers between the ports and the memories, which are spread over the chip: on the way in two, the second
        # with an enable for every lane and half of a sub-block, on the way to a read address one a lane.
        came = Signal(activation_word(params), reset_less=True)
        word = Signal(activation_word(params), reset_less=True)
        valid = Signal()
        write = Signal()
        m.d.comb += self.i.ready.eq(1)
        m.d.sync += [valid.eq(self.i.valid), came.eq(self.i.p), write.eq(valid), word.eq(came)]

        m.submodules.exponents = exponents = BlockMemory(EXPONENT_BITS, 1 << (len(self.e_column) + len(self.e_token)))
        m.d.comb += [
            exponents.w_addr.eq(Cat(word.column, word.token)),
            exponents.w_data.eq(word.exponent),
            exponents.w_en.eq(write),
            exponents.r_addr.eq(Cat(self.e_column, self.e_token)),
            self.e.eq(exponents.r_data),
        ]

        lanes = params.tokens.bit_length() - 1
        half_bits = (SUB_BLOCK_WEIGHTS // LOAD_VALUES - 1).bit_length()
        group_bits, column_bits = len(self.x_group), len(self.x_column)
        blocks = 1 << (group_bits + column_bits)
        w_block = Cat(word.column, (word.token[lanes:] | 0)[:group_bits])
        for t in range(params.tokens):
            half_write = Signal(1 << half_bits, name=f"write{t}")
            for half, enable in enumerate(half_write):
                m.d.sync += enable.eq(valid & (came.token[:lanes] == t) & (came.word[:half_bits] == half))
            m.submodules[f"address{t}"] = address = Replica(len(self.x_index) + column_bits + group_bits)
            m.d.comb += address.i.eq(Cat(self.x_index, self.x_column, self.x_group))
            for i in range(SUB_BLOCK_WEIGHTS):
                m.submodules[f"lane{t}_{i}"] = mem = BlockMemory(ACTIVATION_BITS, blocks * SUB_BLOCKS)
                m.d.comb += [
                    mem.w_addr.eq(Cat(word.word[half_bits:], w_block)),
                    mem.w_data.eq(word["values"][i % LOAD_VALUES]),
                    mem.w_en.eq(half_write[i // LOAD_VALUES]),
                    mem.r_addr.eq(address.o),
                    self.x[t][i].eq(mem.r_data),
                ]
        return m
