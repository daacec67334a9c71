"""The whole datapath: raw expert bytes in, exact row sums out."""

from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.accumulate import Accumulate, rows_waiting
from hw.activations import Activations
from hw.align import Align
from hw.decode import ACTIVITY, Decode
from hw.formats.params import Params
from hw.gather import Gather
from hw.layouts import activation_word, link_beat, matrix_command, row_sum
from hw.mac import Mac
from hw.primitives.queue import Queue


class MatrixEngine(wiring.Component):
    """Stream matrices of raw Q6_K blocks past a batch of token vectors.

    Load the vectors through ``i_x``, announce each matrix on ``i_matrix`` and send its bytes, rows in order, as one
    run on ``i``. For every row, the tokens of the matrix's mask get their sum on ``o``: rows in order, tokens in
    ascending order within a row. A matrix with an empty mask is drained and gives nothing.

    At 16 bytes a cycle a selected block takes 16 cycles for each group of ``tokens`` tokens, a drained block 13.125.
    Golden: :func:`sim.golden.matmul.matmul`.

    Parameters
    ----------
    params
        See :class:`hw.formats.params.Params`.

    Members
    -------
    i : stream of :func:`hw.layouts.link_beat`
    i_matrix : stream of :func:`hw.layouts.matrix_command`
    i_x : stream of :func:`hw.layouts.activation_word`; not while a matrix that needs the old values is under way
    o : stream of :func:`hw.layouts.row_sum`
    error : Out, see :class:`hw.decode.Decode`; after an error the engine discards its input until reset
    activity : Out, see :class:`hw.decode.Decode`
    blocks_held, rows_held : Out, levels of the queues
    """

    MATRICES_WAITING = 4

    i: stream.Interface
    i_matrix: stream.Interface
    i_x: stream.Interface
    o: stream.Interface
    error: Signal
    activity: data.View
    blocks_held: Signal
    rows_held: Signal

    def __init__(self, params: Params) -> None:
        self.params = params
        super().__init__(
            {
                "i": In(stream.Signature(link_beat(params.link_bytes))),
                "i_matrix": In(stream.Signature(matrix_command(params))),
                "i_x": In(stream.Signature(activation_word(params))),
                "o": Out(stream.Signature(row_sum(params))),
                "error": Out(2),
                "activity": Out(ACTIVITY),
                "blocks_held": Out(range(Mac.BLOCKS + 1)),
                "rows_held": Out(range(rows_waiting(params) + 1)),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params
        m.submodules.gather = gather = Gather(params.link_bytes)
        m.submodules.align = align = Align(params.link_bytes)
        m.submodules.matrices = matrices = Queue(matrix_command(params), self.MATRICES_WAITING)
        m.submodules.decode = decode = Decode(params)
        m.submodules.activations = activations = Activations(params)
        m.submodules.mac = mac = Mac(params)
        m.submodules.accumulate = accumulate = Accumulate(params)

        wiring.connect(m, wiring.flipped(self.i), gather.i)
        wiring.connect(m, gather.o, align.i)
        wiring.connect(m, align.o, decode.i)
        wiring.connect(m, wiring.flipped(self.i_matrix), matrices.i)
        wiring.connect(m, matrices.o, decode.i_matrix)
        wiring.connect(m, wiring.flipped(self.i_x), activations.i)
        wiring.connect(m, decode.o, mac.i)
        wiring.connect(m, mac.o, accumulate.i)
        wiring.connect(m, accumulate.o, wiring.flipped(self.o))
        m.d.comb += [
            activations.x_group.eq(mac.x_group),
            activations.x_column.eq(mac.x_column),
            activations.x_index.eq(mac.x_index),
            mac.x.eq(activations.x),
            activations.e_token.eq(accumulate.e_token),
            activations.e_column.eq(accumulate.e_column),
            accumulate.e.eq(activations.e),
            self.error.eq(decode.error),
            self.activity.eq(decode.activity),
            self.blocks_held.eq(mac.held),
            self.rows_held.eq(accumulate.held),
        ]
        return m
