"""Aligned words to sub-blocks: the only component that knows how Q6_K packs its weights."""

from amaranth.hdl import Array, Cat, Module, Mux, Signal, unsigned
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.formats import q6_k as fmt
from hw.formats.arithmetic import D_EXPONENT_MIN
from hw.formats.params import Params
from hw.layouts import BLOCK_WORDS, WORD, WORD_BYTES, block_tag, matrix_command, sub_block

QL_WORDS = fmt.QL_BYTES // WORD_BYTES
QH_WORDS = fmt.QH_BYTES // WORD_BYTES

ERROR_LENGTH = 1
"""Bit of ``error``: a run of bytes and the matrix that was announced for it differ in length."""
ERROR_COMMAND = 2
"""Bit of ``error``: a matrix of no rows, no columns or rows longer than ``max_width`` was announced."""


class Decode(wiring.Component):
    """Buffer two blocks; replay each as 16 sub-blocks for every group of tokens that wants it.

    Every run of words belongs to one matrix command, in order. Blocks of a matrix with an empty mask are dropped as
    they arrive. A selected block leaves when complete: 16 sub-blocks, once for each group of ``tokens`` tokens with
    a bit in the mask, lowest group first, while the next block fills the other buffer.

    After an error the component discards all that arrives until reset, so that nothing upstream waits forever.

    Members
    -------
    i : stream of ``WORD``
    i_matrix : stream of :func:`hw.layouts.matrix_command`
    o : stream of :func:`hw.layouts.sub_block`
    error : Out, sticky ``ERROR_LENGTH | ERROR_COMMAND``
    """

    LATENCY = 4
    """Cycles from a block's last word to its first sub-block, when the buffers were empty."""

    i: stream.Interface
    i_matrix: stream.Interface
    o: stream.Interface

    def __init__(self, params: Params) -> None:
        self.params = params
        super().__init__(
            {
                "i": In(stream.Signature(WORD)),
                "i_matrix": In(stream.Signature(matrix_command(params))),
                "o": Out(stream.Signature(sub_block(params))),
                "error": Out(2),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params
        slot_shape = data.StructLayout({"tag": block_tag(params), "mask": params.max_batch, "groups": params.passes})

        def slot_memory(rows: int) -> memory.Memory:
            return memory.Memory(shape=unsigned(8 * WORD_BYTES), depth=2 * rows, init=[])

        m.submodules.ql = ql = slot_memory(QL_WORDS)
        m.submodules.qh = qh = slot_memory(QH_WORDS)
        m.submodules.scales = scales = slot_memory(1)
        slots = Array(Signal(slot_shape, name=f"slot{n}", reset_less=True) for n in range(2))
        full = Signal(2)

        self._write(m, ql, qh, scales, slots, full)
        self._read(m, ql, qh, scales, slots, full)
        return m

    def _write(self, m: Module, ql, qh, scales, slots, full) -> None:
        params = self.params
        word, command = self.i.p, self.i_matrix.p
        active = Signal()  # a command is loaded
        broken = Signal()
        rows_left = Signal.like(command.rows)
        columns_left = Signal.like(command.columns)
        columns = Signal.like(command.columns)
        column = Signal(range(params.max_columns))
        mask = Signal(params.max_batch)
        groups = Signal(params.passes)
        selected = Signal()
        slot = Signal()

        take = Signal()
        block_end = Signal()
        matrix_end = Signal()
        m.d.comb += [
            self.i.ready.eq(broken | (active & ~(selected & full.bit_select(slot, 1)))),
            take.eq(self.i.valid & active & ~broken & ~(selected & full.bit_select(slot, 1))),
            block_end.eq(take & (word.index == BLOCK_WORDS - 1)),
            matrix_end.eq(block_end & (columns_left == 1) & (rows_left == 1)),
            self.i_matrix.ready.eq(broken | ~active | matrix_end),
        ]
        with m.If(self.i_matrix.ready):
            bad = (command.rows == 0) | (command.columns == 0) | (command.columns > params.max_columns)
            m.d.sync += [
                active.eq(self.i_matrix.valid),
                rows_left.eq(command.rows),
                columns_left.eq(command.columns),
                columns.eq(command.columns),
                column.eq(0),
                mask.eq(command.mask),
                selected.eq(command.mask.any()),
            ]
            for group in range(params.passes):
                m.d.sync += groups[group].eq(command.mask[group * params.tokens :][: params.tokens].any())
            with m.If(self.i_matrix.valid & bad & ~broken):
                m.d.sync += [broken.eq(1), self.error.eq(ERROR_COMMAND)]
        with m.Elif(block_end):
            with m.If(columns_left == 1):
                m.d.sync += [columns_left.eq(columns), column.eq(0), rows_left.eq(rows_left - 1)]
            with m.Else():
                m.d.sync += [columns_left.eq(columns_left - 1), column.eq(column + 1)]
        with m.If(take & (word.error | (word.last != matrix_end))):
            m.d.sync += [broken.eq(1), self.error.eq(ERROR_LENGTH)]

        for mem, first, count in ((ql, 0, QL_WORDS), (qh, QL_WORDS, QH_WORDS), (scales, QL_WORDS + QH_WORDS, 1)):
            port = mem.write_port()
            m.d.comb += [
                port.addr.eq(slot * count + (word.index - first)[: (count - 1).bit_length()] if count > 1 else slot),
                port.data.eq(word.data),
                port.en.eq(take & selected & (word.index >= first) & (word.index < first + count)),
            ]

        # d = mantissa * 2**exponent: a half's 1.f * 2**(biased - 15) is (1024 + f) * 2**(biased - 25).
        fraction, biased, negative = word.d[:10], word.d[10:15], word.d[15]
        magnitude = Cat(fraction, biased.any())
        bad_d = biased.all()
        tag = slots[slot].tag
        with m.If(block_end & selected):
            m.d.sync += [
                slot.eq(~slot),
                slots[slot].mask.eq(mask),
                slots[slot].groups.eq(groups),
                tag.mantissa.eq(Mux(bad_d, 0, Mux(negative, -magnitude, magnitude))),
                tag.exponent.eq(Mux(biased.any(), biased - 25, D_EXPONENT_MIN)),
                tag.bad.eq(bad_d),
                tag.column.eq(column),
                tag.first.eq(column == 0),
                tag.last.eq(columns_left == 1),
            ]
            m.d.sync += full.bit_select(slot, 1).eq(1)

    def _read(self, m: Module, ql, qh, scales, slots, full) -> None:
        params = self.params
        step = Signal()  # low only while a finished sub-block waits
        m.d.comb += step.eq(self.o.ready | ~self.o.valid)

        # Stage 0: which sub-block of which slot, for which of the groups left.
        running = Signal()
        slot = Signal()
        index = Signal(range(fmt.SUB_BLOCKS))
        left = Signal(params.passes)  # groups still to serve, this one included
        rest = Signal(params.passes)
        m.d.comb += rest.eq(left & (left - 1))
        block_end = index == fmt.SUB_BLOCKS - 1
        done = Signal()
        m.d.comb += done.eq(step & running & block_end & (rest == 0))
        with m.If(step & running):
            m.d.sync += index.eq(index + 1)
            with m.If(block_end):
                m.d.sync += left.eq(rest)
        with m.If(done | ~running):
            upcoming = slot ^ done
            m.d.sync += [
                running.eq(full.bit_select(upcoming, 1)),
                slot.eq(upcoming),
                left.eq(slots[upcoming].groups),
            ]
        with m.If(done):
            m.d.sync += full.bit_select(slot, 1).eq(0)

        # Sub-block 8h + 2g + s reads word (h, g[0], s) of ql and word (h, s) of qh.
        ql_port, qh_port, scale_port = (mem.read_port(domain="comb") for mem in (ql, qh, scales))
        m.d.comb += [
            ql_port.addr.eq(Cat(index[0], index[1], index[3], slot)),
            qh_port.addr.eq(Cat(index[0], index[3], slot)),
            scale_port.addr.eq(slot),
        ]

        # Stage 1: the words. Stage 2: their bits.
        s1 = Signal(sub_block(params), reset_less=True)
        s1_valid = Signal()
        s1_ql = Signal(8 * WORD_BYTES, reset_less=True)
        s1_qh = Signal(8 * WORD_BYTES, reset_less=True)
        s1_scales = Signal(32, reset_less=True)
        group = Signal.like(s1.tag.group)
        for candidate in reversed(range(params.passes)):
            with m.If(left[candidate]):
                m.d.comb += group.eq(candidate)
        # The `If`s above must let the lowest group win; they run from the highest down and the last one holds.
        with m.If(step):
            m.d.sync += [
                s1_valid.eq(running),
                s1_ql.eq(ql_port.data),
                s1_qh.eq(qh_port.data),
                s1_scales.eq(scale_port.data.word_select(index[2:], 32)),
                s1.index.eq(index),
                s1.tag.eq(slots[slot].tag),
                s1.tag.group.eq(group),
                s1.tag.lanes.eq(slots[slot].mask.word_select(group, params.tokens)),
            ]
            m.d.sync += [
                self.o.valid.eq(s1_valid),
                self.o.p.scale.eq(s1_scales.word_select(s1.index[:2], 8)),
                self.o.p.index.eq(s1.index),
                self.o.p.tag.eq(s1.tag),
            ]
            for i in range(fmt.SUB_BLOCK_WEIGHTS):
                low = s1_ql[8 * i :][:8].word_select(s1.index[2], 4)
                high = s1_qh[8 * i :][:8].word_select(s1.index[1:3], 2)
                # Subtracting the bias of 32 from six bits flips the highest.
                m.d.sync += self.o.p.weights[i].eq(Cat(low, high[0], ~high[1]).as_signed())
        return
