"""The fetch controller: asks for the bytes of the experts that the batch needs, and for no others."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.formats.messages import LENGTH_BITS, MAX_OUTSTANDING, OFFSET_BITS
from hw.formats.params import Params
from hw.layouts import MATRICES, Kind, bits_for, layer_config, matrix_command, wanted_matrix


class Fetch(wiring.Component):
    """Walk the experts in ascending order; ask for up, gate and down of each that a token wants (in tape mode, of all).

    Each request goes out together with the command that tells the decoder what will come. At most
    ``config.outstanding`` requests are unanswered at a time. An expert that is passed over takes twelve cycles, a
    request two and more.

    Members
    -------
    start : In, begins a layer; the mask memory holds its routes then
    config : In, :func:`hw.layouts.layer_config`; holds while ``busy``
    busy : Out, from the cycle after ``start`` until every request is answered
    mask_expert : Out; mask : In, comes two cycles later; forget : Out, the mask has been used
    o_request : stream of :func:`hw.layouts.wanted_matrix`
    o_matrix : stream of :func:`hw.layouts.matrix_command`
    o_expert : stream, number of each expert that a token wants, in the order of the walk
    answered : In, high for a cycle when the oldest request's last beat has come
    waiting : Out, requests unanswered
    """

    start: Signal
    config: data.View
    busy: Signal
    mask_expert: Signal
    mask: Signal
    forget: Signal
    o_request: stream.Interface
    o_matrix: stream.Interface
    o_expert: stream.Interface
    answered: Signal
    waiting: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        expert = bits_for(params.max_experts)
        super().__init__(
            {
                "start": In(1),
                "config": In(layer_config(params)),
                "busy": Out(1),
                "mask_expert": Out(expert),
                "mask": In(params.max_batch),
                "forget": Out(1),
                "o_request": Out(stream.Signature(wanted_matrix(params))),
                "o_matrix": Out(stream.Signature(matrix_command(params))),
                "o_expert": Out(stream.Signature(expert)),
                "answered": In(1),
                "waiting": Out(bits_for(MAX_OUTSTANDING + 1)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        config = self.config
        expert = Signal.like(self.mask_expert)
        mask = Signal.like(self.mask)
        wanted = Signal()
        matrix = Signal(range(MATRICES))
        # The three matrices take turns at place 0; each moves on to the next expert's as its turn ends.
        offsets = Signal(data.ArrayLayout(OFFSET_BITS, MATRICES), reset_less=True)
        lengths = Signal(data.ArrayLayout(LENGTH_BITS, MATRICES), reset_less=True)
        requested = Signal()
        final_expert = Signal.like(expert, reset_less=True)
        last_expert = Signal()
        room = Signal()
        m.d.sync += [
            final_expert.eq(config.experts - 1),
            last_expert.eq(expert == final_expert),
            room.eq(self.waiting < config.outstanding),
        ]

        down = matrix == Kind.DOWN.value
        m.d.comb += [
            self.mask_expert.eq(expert),
            self.o_request.p.offset.eq(offsets[0]),
            self.o_request.p.length.eq(lengths[0]),
            self.o_request.p.expert.eq(expert),
            self.o_request.p.kind.eq(matrix),
            self.o_matrix.p.kind.eq(matrix),
            self.o_matrix.p.mask.eq(mask),
            self.o_matrix.p.rows.eq(Mux(down, config.width, config.expert_width)),
            self.o_matrix.p.columns.eq(Mux(down, config.hidden_columns, config.columns)),
            self.o_expert.payload.eq(expert),
            requested.eq(self.o_request.valid & self.o_request.ready),
        ]
        with m.If(requested != self.answered):
            m.d.sync += self.waiting.eq(self.waiting + Mux(requested, 1, -1))

        turn = Signal()  # a register, for it moves many: it ends the turn of the matrix at place 0
        idle = Signal()  # so is this
        after = Signal(OFFSET_BITS, reset_less=True)  # the matrix at place 0, for the next expert
        m.d.sync += [turn.eq(0), after.eq(offsets[0] + lengths[0])]
        with m.If(idle):
            m.d.sync += [offsets.eq(config.offsets), lengths.eq(config.lengths)]
        with m.Elif(turn):
            m.d.sync += [
                offsets[0].eq(offsets[1]),
                offsets[1].eq(offsets[2]),
                offsets[2].eq(after),
                lengths[0].eq(lengths[1]),
                lengths[1].eq(lengths[2]),
                lengths[2].eq(lengths[0]),
                matrix.eq(Mux(down, 0, matrix + 1)),
            ]

        with m.FSM() as fsm:
            m.d.sync += idle.eq(fsm.ongoing("IDLE"))
            with m.State("IDLE"):
                m.d.sync += [expert.eq(0), matrix.eq(0)]
                with m.If(self.start):
                    m.d.sync += self.busy.eq(1)
                    m.next = "LOOK"
            with m.State("LOOK"):
                m.next = "LOOK ON"
            with m.State("LOOK ON"):
                m.next = "TAKE"
            with m.State("TAKE"):
                m.d.sync += mask.eq(self.mask)
                m.d.comb += self.forget.eq(1)
                m.next = "SEE"
            with m.State("SEE"):
                m.d.sync += wanted.eq(mask.any())
                m.next = "NAME"
            with m.State("NAME"):
                m.d.comb += self.o_expert.valid.eq(wanted)
                with m.If(~wanted | self.o_expert.ready):
                    m.next = "TURN"
            with m.State("TURN"):
                with m.If(~(wanted | config.tape)):
                    m.d.sync += turn.eq(1)
                    m.next = "TURNED"
                with m.Elif(room):
                    m.next = "REQUEST"
            with m.State("REQUEST"):
                m.d.comb += self.o_request.valid.eq(1)
                with m.If(self.o_request.ready):
                    m.next = "ANNOUNCE"
            with m.State("ANNOUNCE"):
                m.d.comb += self.o_matrix.valid.eq(1)
                with m.If(self.o_matrix.ready):
                    m.d.sync += turn.eq(1)
                    m.next = "TURNED"
            with m.State("TURNED"):
                m.next = "TURN"
                with m.If(down):
                    m.next = "NEXT"
            with m.State("NEXT"):
                m.d.sync += expert.eq(expert + 1)
                m.next = "LOOK"
                with m.If(last_expert):
                    m.next = "DRAIN"
            with m.State("DRAIN"):
                with m.If(self.waiting == 0):
                    m.d.sync += self.busy.eq(0)
                    m.next = "IDLE"
        return m
