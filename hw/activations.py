"""Where the batch's token vectors lie while the weights pass."""

from amaranth.hdl import Cat, Module, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.formats.arithmetic import ACTIVATION_BITS, EXPONENT_BITS
from hw.formats.params import Params
from hw.formats.q6_k import SUB_BLOCK_WEIGHTS, SUB_BLOCKS
from hw.layouts import LOAD_VALUES, activation_word, bits_for
from hw.primitives.memory import BlockMemory


class Activations(wiring.Component):
    """Store ``max_batch`` vectors of ``store_columns`` blocks; read one sub-block of every lane a cycle.

    Token ``t`` lies in lane ``t % tokens`` and is read with group ``t // tokens``. Each multiplier has a memory of its
    own, so that both can sit side by side. Loading takes a word (eight values) a cycle and must be over before the
    values are needed; a read of what is being written is undefined.

    Members
    -------
    i : stream of :func:`hw.layouts.activation_word`, always ready
    x_group, x_column, x_index : In, which sub-block
    x : Out, 16 activations a lane, ``LATENCY`` cycles later
    e_group, e_column : In, which block
    e : Out, the exponent of each lane's block, ``LATENCY`` cycles later
    """

    LATENCY = BlockMemory.LATENCY

    i: stream.Interface
    x_group: Signal
    x_column: Signal
    x_index: Signal
    x: data.View
    e_group: Signal
    e_column: Signal
    e: data.View

    def __init__(self, params: Params) -> None:
        self.params = params
        group, column = bits_for(params.passes), bits_for(params.store_columns)
        values = data.ArrayLayout(signed(ACTIVATION_BITS), SUB_BLOCK_WEIGHTS)
        super().__init__(
            {
                "i": In(stream.Signature(activation_word(params))),
                "x_group": In(group),
                "x_column": In(column),
                "x_index": In(bits_for(SUB_BLOCKS)),
                "x": Out(data.ArrayLayout(values, params.tokens)),
                "e_group": In(group),
                "e_column": In(column),
                "e": Out(data.ArrayLayout(signed(EXPONENT_BITS), params.tokens)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params
        # A register between the port and the memories, which are spread over the chip.
        word = Signal(activation_word(params), reset_less=True)
        valid = Signal()
        m.d.comb += self.i.ready.eq(1)
        m.d.sync += [valid.eq(self.i.valid), word.eq(self.i.p)]

        lanes = params.tokens.bit_length() - 1
        lane, group = word.token[:lanes], word.token[lanes:]
        halves = SUB_BLOCK_WEIGHTS // LOAD_VALUES
        group_bits, column_bits = len(self.x_group), len(self.x_column)
        blocks = 1 << (group_bits + column_bits)
        w_block = Cat(word.column, (group | 0)[:group_bits])
        for t in range(params.tokens):
            write = valid & (lane == t)
            m.submodules[f"exponent{t}"] = exponent = BlockMemory(EXPONENT_BITS, blocks)
            m.d.comb += [
                exponent.w_addr.eq(w_block),
                exponent.w_data.eq(word.exponent),
                exponent.w_en.eq(write),
                exponent.r_addr.eq(Cat(self.e_column, self.e_group)),
                self.e[t].eq(exponent.r_data),
            ]
            for i in range(SUB_BLOCK_WEIGHTS):
                m.submodules[f"lane{t}_{i}"] = mem = BlockMemory(ACTIVATION_BITS, blocks * SUB_BLOCKS)
                m.d.comb += [
                    mem.w_addr.eq(Cat(word.word[(halves - 1).bit_length() :], w_block)),
                    mem.w_data.eq(word["values"][i % LOAD_VALUES]),
                    mem.w_en.eq(write & (word.word[: (halves - 1).bit_length()] == i // LOAD_VALUES)),
                    mem.r_addr.eq(Cat(self.x_index, self.x_column, self.x_group)),
                    self.x[t][i].eq(mem.r_data),
                ]
        return m
