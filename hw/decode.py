"""Aligned words to sub-blocks: the only component that knows how Q6_K packs its weights."""

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, signed, unsigned
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.delay import delay
from hw.formats import q6_k as fmt
from hw.formats.arithmetic import D_EXPONENT_MIN, MANTISSA_BITS
from hw.formats.params import Params
from hw.layouts import BLOCK_WORDS, WORD, WORD_BYTES, Kind, block_tag, matrix_command, sub_block
from hw.primitives.queue import CreditQueue

QL_WORDS = fmt.QL_BYTES // WORD_BYTES
QH_WORDS = fmt.QH_BYTES // WORD_BYTES

ERROR_LENGTH = 1
"""Bit of ``error``: a run of bytes and the matrix that was announced for it differ in length."""
ERROR_COMMAND = 2
"""Bit of ``error``: a matrix of no rows, no columns or rows longer than its vectors may be was announced."""


LEAVING = 16
"""Sub-blocks on their way out; as many as keep one leaving every cycle."""

ACTIVITY = data.StructLayout(
    {
        "active": 1,  # a sub-block left
        "back_pressured": 1,  # one was there but was not taken
        "starved": 1,  # neither, for want of bytes: a matrix is under way
        "draining": 1,  # neither, because an unwanted matrix passes
        "useful_block": 1,  # a block has come that tokens want
        "drained_block": 1,  # one that none wants
        "matrix_end": 1,
    }
)
"""What a cycle was spent on; at most one of the first four, and events of the last three."""


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
    activity : Out, ``ACTIVITY``, a cycle late
    """

    LATENCY = 7
    """Cycles from a block's last word to its first sub-block, when the buffers were empty."""

    i: stream.Interface
    i_matrix: stream.Interface
    o: stream.Interface
    error: Signal
    activity: data.View

    def __init__(self, params: Params) -> None:
        self.params = params
        super().__init__(
            {
                "i": In(stream.Signature(WORD)),
                "i_matrix": In(stream.Signature(matrix_command(params))),
                "o": Out(stream.Signature(sub_block(params))),
                "error": Out(2),
                "activity": Out(ACTIVITY),
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

        emptied, emptied_slot = Signal(), Signal()  # from the next cycle on, this one is not full

        self._write(m, ql, qh, scales, slots, full, emptied, emptied_slot)
        self._read(m, ql, qh, scales, slots, full, emptied, emptied_slot)
        return m

    def _write(self, m: Module, ql, qh, scales, slots, full, emptied, emptied_slot) -> None:
        params = self.params
        word = self.i.p
        broken = Signal()

        # The command to come, fetched ahead and looked through, so that one matrix can follow another at once.
        command = self.i_matrix.p
        fetched = Signal()
        ahead = Signal(matrix_command(params), reset_less=True)
        ahead_bad = Signal(reset_less=True)
        ahead_groups = Signal(params.passes, reset_less=True)
        ahead_selected = Signal(reset_less=True)
        ahead_one_row, ahead_one_column = Signal(reset_less=True), Signal(reset_less=True)
        ahead_valid = Signal()  # fetched and looked through
        load = Signal()  # a register, for it moves many; ready waits for the command as long anyway
        m.d.comb += self.i_matrix.ready.eq(broken | ~fetched)
        m.d.sync += [
            ahead_valid.eq(fetched & ~load),
            ahead_groups.eq(Cat(ahead.mask.word_select(group, params.tokens).any() for group in range(params.passes))),
            ahead_selected.eq(ahead.mask.any()),
            ahead_one_row.eq(ahead.rows == 1),
            ahead_one_column.eq(ahead.columns == 1),
            ahead_bad.eq(
                (ahead.rows == 0)
                | (ahead.columns == 0)
                | (ahead.columns > Mux(ahead.kind == Kind.DOWN, params.max_hidden_columns, params.max_columns))
            ),
        ]
        with m.If(~fetched):
            m.d.sync += [fetched.eq(self.i_matrix.valid), ahead.eq(command)]
        with m.Elif(load):
            m.d.sync += fetched.eq(0)

        active = Signal()  # a command is loaded
        selected = Signal()
        mask = Signal(params.max_batch, reset_less=True)
        groups = Signal(params.passes, reset_less=True)
        columns = Signal.like(command.columns, reset_less=True)
        columns_left = Signal.like(command.columns, reset_less=True)
        rows_left = Signal.like(command.rows, reset_less=True)
        kind = Signal(Kind, reset_less=True)
        column = Signal(range(params.store_columns), reset_less=True)
        row_start = Signal(reset_less=True)
        one_column = Signal(reset_less=True)
        last_column = Signal(reset_less=True)
        last_row = Signal(reset_less=True)
        last_block = Signal(reset_less=True)  # of the matrix
        two_columns_left = Signal(reset_less=True)  # these two a cycle late: blocks end many cycles apart
        two_rows_left = Signal(reset_less=True)
        m.d.sync += [two_columns_left.eq(columns_left == 2), two_rows_left.eq(rows_left == 2)]
        slot = Signal()

        # What the next word is, kept as a flag so that decisions need not wait for a comparison.
        count = Signal(range(BLOCK_WORDS))
        last_word = Signal()
        final_word = Signal()  # of the matrix

        # Whether a word is taken is decided a cycle ahead. It depends on words only where a block ends: a selected
        # one costs two cycles (of the three that it has in hand), a drained one none, but at its matrix's end.
        ready = Signal()  # to take a word for its matrix
        take = Signal()
        block_end = Signal()
        matrix_end = Signal()
        ended = Signal()  # a cycle late: a block has, so that what follows waits for no word
        m.d.comb += [
            take.eq(self.i.valid & ready),
            block_end.eq(take & last_word),
            matrix_end.eq(take & final_word),
        ]
        m.d.sync += [ended.eq(block_end), load.eq(ahead_valid & ~active & ~load)]
        active_next = load | (active & ~matrix_end)
        selected_next = Mux(load, ahead_selected, selected)
        # With and without an end of a block, both a cycle late, so that only the choice waits for the word. The first
        # settles long before; the second does not know of an end in the cycle before, hence the pause.
        full_here = full.bit_select(slot, 1) & ~(emptied & (emptied_slot == slot))
        free_then, free_else, pause = Signal(), Signal(), Signal()
        m.d.sync += [
            free_then.eq(~selected & ~last_block),
            free_else.eq(Mux(active, ~(selected & full_here), ahead_valid & ~(ahead_selected & full_here))),
            pause.eq(block_end & ~free_then),
        ]
        free = Mux(block_end, free_then, free_else & ~pause)
        m.d.sync += [
            ready.eq(free & ~broken),
            self.i.ready.eq(free | broken),
            active.eq(active_next),
            selected.eq(selected_next),
        ]
        with m.If(take):
            last_word_next = (count == BLOCK_WORDS - 2) & ~word.last
            m.d.sync += [
                count.eq(Mux(last_word | word.last, 0, count + 1)),  # whatever follows a run begins a block
                last_word.eq(last_word_next),
                final_word.eq(last_word_next & last_block),
            ]
        with m.If(load):
            m.d.sync += [
                mask.eq(ahead.mask),
                groups.eq(ahead_groups),
                columns.eq(ahead.columns),
                columns_left.eq(ahead.columns),
                rows_left.eq(ahead.rows),
                kind.eq(ahead.kind),
                column.eq(Mux(ahead.kind == Kind.DOWN, params.max_columns, 0)),
                row_start.eq(1),
                one_column.eq(ahead_one_column),
                last_column.eq(ahead_one_column),
                last_row.eq(ahead_one_row),
                last_block.eq(ahead_one_column & ahead_one_row),
            ]
        with m.Elif(ended):
            with m.If(last_column):
                m.d.sync += [
                    columns_left.eq(columns),
                    rows_left.eq(rows_left - 1),
                    column.eq(Mux(kind == Kind.DOWN, params.max_columns, 0)),
                    row_start.eq(1),
                    last_column.eq(one_column),
                    last_row.eq(two_rows_left),
                    last_block.eq(one_column & two_rows_left),
                ]
            with m.Else():
                m.d.sync += [
                    columns_left.eq(columns_left - 1),
                    column.eq(column + 1),
                    row_start.eq(0),
                    last_column.eq(two_columns_left),
                    last_block.eq(last_row & two_columns_left),
                ]

        idle = ~self.o.valid & active
        activity = self.activity
        m.d.sync += [
            activity.active.eq(self.o.valid & self.o.ready),
            activity.back_pressured.eq(self.o.valid & ~self.o.ready),
            activity.starved.eq(idle & (selected | ~self.i.valid)),
            activity.draining.eq(idle & ~selected & self.i.valid),
            activity.useful_block.eq(block_end & selected),
            activity.drained_block.eq(block_end & ~selected),
            activity.matrix_end.eq(matrix_end),
        ]

        # What is wrong stops the component a cycle later, long before a wrong block could be complete.
        wrong_length = Signal()
        wrong_command = Signal()
        m.d.sync += [
            wrong_length.eq(take & (word.error | (word.last != matrix_end))),
            wrong_command.eq(load & ahead_bad),
        ]
        with m.If((wrong_length | wrong_command) & ~broken):
            m.d.sync += [broken.eq(1), self.error.eq(Mux(wrong_length, ERROR_LENGTH, ERROR_COMMAND))]

        # One cycle later: store the word.
        stored = Signal.like(word.data, reset_less=True)
        stored_d = Signal(16, reset_less=True)
        place = Signal.like(count, reset_less=True)
        stored_slot = Signal(reset_less=True)
        m.d.sync += [
            stored.eq(word.data),
            stored_d.eq(word.d),
            place.eq(count),
            stored_slot.eq(slot),
        ]

        # A block is called full while its last word is on its way to the memory: nobody looks before it is there.
        with m.If(block_end & selected):
            m.d.sync += slot.eq(~slot)
        filled = slots[stored_slot]
        completed = Signal()
        m.d.sync += completed.eq(block_end & selected)
        with m.If(completed):
            m.d.sync += [
                full.bit_select(stored_slot, 1).eq(1),
                filled.mask.eq(mask),
                filled.groups.eq(groups),
                filled.tag.column.eq(column),
                filled.tag.kind.eq(kind),
                filled.tag.first.eq(row_start),
                filled.tag.last.eq(last_column),
            ]

        for mem, first, rows in ((ql, 0, QL_WORDS), (qh, QL_WORDS, QH_WORDS), (scales, QL_WORDS + QH_WORDS, 1)):
            port = mem.write_port()
            enable = Signal()
            m.d.sync += enable.eq(take & selected & (count >= first) & (count < first + rows))
            m.d.comb += [
                port.addr.eq(Cat((place - first)[: (rows - 1).bit_length()], stored_slot)),
                port.data.eq(stored),
                port.en.eq(enable),
            ]
            if mem is scales:
                # d = mantissa * 2**exponent: a half's 1.f * 2**(biased - 15) is (1024 + f) * 2**(biased - 25).
                normal = delay(m, stored_d[10:15].any(), 1)
                stored_d = delay(m, stored_d, 1)
                fraction, biased, negative = stored_d[:10], stored_d[10:15], stored_d[15]
                magnitude = Cat(fraction, normal)
                mantissa = Signal(signed(MANTISSA_BITS), reset_less=True)
                exponent = Signal(signed(6), reset_less=True)
                bad = Signal(reset_less=True)
                m.d.sync += [
                    # Negated as "invert and add one" in a single adder; a bad d becomes 0 when it is read.
                    mantissa.eq((Cat(magnitude, 0) ^ negative.replicate(MANTISSA_BITS)) + negative),
                    exponent.eq(Mux(normal, biased - 25, D_EXPONENT_MIN)),
                    bad.eq(biased.all()),
                ]
                tag = slots[delay(m, stored_slot, 2)].tag
                with m.If(delay(m, enable, 2, control=True)):
                    m.d.sync += [tag.mantissa.eq(mantissa), tag.exponent.eq(exponent), tag.bad.eq(bad)]

    def _read(self, m: Module, ql, qh, scales, slots, full, emptied, emptied_slot) -> None:
        params = self.params
        # A sub-block sets out only with a place in this queue, known a cycle late, so that nothing on its way waits.
        m.submodules.leaving = leaving = CreditQueue(sub_block(params), LEAVING)
        wiring.connect(m, wiring.flipped(self.o), leaving.o)
        places = Signal(range(LEAVING + 1), init=LEAVING)
        step = Signal()

        # Stage 0: which sub-block of which slot, for which of the groups left.
        running = Signal()
        slot = Signal()
        index = Signal(range(fmt.SUB_BLOCKS))
        left = Signal(params.passes)  # groups still to serve, this one included
        rest = Signal(params.passes)  # without this one; this and `alone` settle long before they are needed
        alone = Signal()
        last_index = Signal()
        final = Signal()  # running, at the last sub-block for the last group
        upcoming = Signal()  # the slot to look at when this one is done
        m.d.sync += [
            step.eq(places >= 2),
            places.eq(places - (step & running) + leaving.left),
            rest.eq(left & (left - 1)),
            alone.eq(rest == 0),
        ]
        m.d.comb += upcoming.eq(slot ^ running)
        with m.If(step & running):
            m.d.sync += [
                index.eq(index + 1),
                last_index.eq(index == fmt.SUB_BLOCKS - 2),
                final.eq((index == fmt.SUB_BLOCKS - 2) & alone),
            ]
        with m.If(~running | (step & last_index)):
            m.d.sync += left.eq(Mux(running & ~final, rest, slots[upcoming].groups))
        with m.If(~running | (step & final)):
            m.d.sync += [running.eq(full.bit_select(upcoming, 1)), slot.eq(upcoming)]
        m.d.comb += [emptied.eq(step & final), emptied_slot.eq(slot)]
        with m.If(emptied):
            m.d.sync += full.bit_select(slot, 1).eq(0)

        # Sub-block 8h + 2g + s reads word (h, g[0], s) of ql and word (h, s) of qh.
        ql_port, qh_port, scale_port = (mem.read_port(domain="comb") for mem in (ql, qh, scales))
        m.d.comb += [
            ql_port.addr.eq(Cat(index[0], index[1], index[3], slot)),
            qh_port.addr.eq(Cat(index[0], index[3], slot)),
            scale_port.addr.eq(slot),
        ]

        # Stage 1: the words. Stage 2: their bits, and the lowest group's number.
        s1 = Signal(sub_block(params), reset_less=True)
        s1_valid = Signal()
        s1_slot = Signal(reset_less=True)
        s1_ql = Signal(8 * WORD_BYTES, reset_less=True)
        s1_qh = Signal(8 * WORD_BYTES, reset_less=True)
        s1_scales = Signal(64, reset_less=True)
        s1_lowest = Signal(params.passes, reset_less=True)  # one bit set
        s1_mask = Signal(params.max_batch, reset_less=True)
        s1_final = Signal(reset_less=True)
        m.d.sync += [
            s1_valid.eq(running & step),
            s1_ql.eq(ql_port.data),
            s1_qh.eq(qh_port.data),
            s1_scales.eq(scale_port.data.word_select(index[3], 64)),
            s1_lowest.eq(left & ~(left - 1)),
            s1_mask.eq(slots[slot].mask),
            s1_final.eq((left & (left - 1)) == 0),
            s1.index.eq(index),
            s1.tag.eq(slots[slot].tag),
            s1_slot.eq(slot),
        ]
        d = slots[s1_slot].tag  # just there when a block begins
        group, lanes = Const(0, len(s1.tag.group)), Const(0, params.tokens)
        for n in range(params.passes):
            chosen = s1_lowest[n]
            group |= Mux(chosen, n, 0)
            lanes |= s1_mask.word_select(n, params.tokens) & chosen.replicate(params.tokens)
        m.d.sync += [
            leaving.i.valid.eq(s1_valid),
            leaving.i.p.scale.eq(s1_scales.word_select(s1.index[:3], 8)),
            leaving.i.p.index.eq(s1.index),
            leaving.i.p.tag.eq(s1.tag),
            leaving.i.p.tag.mantissa.eq(Mux(d.bad, 0, d.mantissa)),
            leaving.i.p.tag.exponent.eq(d.exponent),
            leaving.i.p.tag.bad.eq(d.bad),
            leaving.i.p.tag.group.eq(group),
            leaving.i.p.tag.lanes.eq(lanes),
            leaving.i.p.tag.final.eq(s1_final),
        ]
        for i in range(fmt.SUB_BLOCK_WEIGHTS):
            low = s1_ql[8 * i :][:8].word_select(s1.index[2], 4)
            high = s1_qh[8 * i :][:8].word_select(s1.index[1:3], 2)
            # Subtracting the bias of 32 from six bits flips the highest.
            m.d.sync += leaving.i.p.weights[i].eq(Cat(low, high[0], ~high[1]).as_signed())
