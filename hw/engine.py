"""The expert engine: the router's decision in, the layer's output out."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.combine import Combine
from hw.counters import Counters
from hw.decode import ERROR_COMMAND, ERROR_LENGTH
from hw.fetch import Fetch
from hw.formats.arithmetic import ERROR_OVERFLOW, ERROR_SCALE
from hw.formats.messages import MAX_OUTSTANDING, Error
from hw.formats.params import Params
from hw.hidden import Hidden
from hw.homes import Homes
from hw.layouts import (
    REQUEST,
    Kind,
    bits_for,
    check_memory,
    link_beat,
    matrix_command,
    memory_read,
    memory_write,
)
from hw.matrix_engine import MatrixEngine
from hw.primitives.queue import Queue
from hw.primitives.restart import add_parts
from hw.receive import Receive
from hw.route_table import RouteTable
from hw.send import Cut, Send

EXPERTS_WAITING = 4


class Engine(wiring.Component):
    """Run a layer's experts for a batch of tokens: ``y = sum of down(silu(gate(x)) * up(x) * weight)``.

    Two streams of bytes carry the messages of :mod:`hw.formats.messages`: ``CONFIG``, then for each layer run
    ``LOAD_X`` for every block of every token and ``ROUTES``, which starts it. The engine then asks on ``o_request`` for
    the bytes that it needs; each request, in order, is answered by one ``WEIGHTS`` message. Experts pass in ascending
    order, each once, for all tokens that want it. ``OUTPUT`` of every token and ``DONE`` end the layer.

    The output does not depend on the order of routes, the mode, the number of lanes, on stalls or on what else is in
    the batch. Golden: :func:`sim.golden.layer.run`.

    Parameters
    ----------
    params
        See :class:`hw.formats.params.Params`.
    design_id
        What ``HELLO`` says of the sources that this was made of: 32 bits.

    Members
    -------
    i, o : streams of :func:`hw.layouts.link_beat`
    o_request : stream of ``REQUEST``
    restart : In, starts all over, after a few cycles of it, without ending a message that it was in

    With ``memory_bits`` there are also these, for a memory such as :class:`hw.link.axi4.AxiMemory`:

    o_read : stream of :func:`hw.layouts.memory_read`
    i_read : stream of :func:`hw.layouts.link_beat`, the bytes read, ``last`` with the last ones of each read
    o_write : stream of :func:`hw.layouts.memory_write`; write_busy : In, high from the cycle after one is taken until
        it can be read
    memory_error : In, there is no relying on the memory; not later than what it is about, until ``flush``
    flush : Out, nobody waits for an answer to the reads asked for
    """

    i: stream.Interface
    o: stream.Interface
    o_request: stream.Interface
    restart: Signal
    o_read: stream.Interface
    i_read: stream.Interface
    o_write: stream.Interface
    write_busy: Signal
    memory_error: Signal
    flush: Signal

    def __init__(self, params: Params, design_id: int = 0) -> None:
        check_memory(params)
        self.params, self.design_id = params, design_id
        beat = link_beat(params.link_bytes)
        memory = {}
        if params.memory_bits:
            memory = {
                "o_read": Out(stream.Signature(memory_read(params.memory_bits))),
                "i_read": In(stream.Signature(beat)),
                "o_write": Out(stream.Signature(memory_write(params.memory_bits))),
                "write_busy": In(1),
                "memory_error": In(1),
                "flush": Out(1),
            }
        super().__init__(
            memory
            | {
                "i": In(stream.Signature(beat)),
                "o": Out(stream.Signature(beat)),
                "o_request": Out(stream.Signature(REQUEST)),
                "restart": In(1),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params
        receive, cut = Receive(params), Cut(params.link_bytes)
        add_parts(m, {"receive": receive, "cut": cut}, self.restart)
        reset = Signal()  # the next message cannot take effect before it does
        m.d.sync += reset.eq(receive.reset | self.restart)

        routes, fetch, hidden = RouteTable(params), Fetch(params), Hidden(params)
        matrices, combine, counters = MatrixEngine(params), Combine(params), Counters(params)
        announced = Queue(matrix_command(params), MAX_OUTSTANDING)
        experts = Queue(bits_for(params.max_experts), EXPERTS_WAITING)
        requests = Queue(REQUEST, 2)
        weights = Queue(link_beat(params.link_bytes), 2)  # whoever sends them must not wait for the aligner's logic
        send = Send(params, self.design_id)
        status = Module()
        parts = {
            "routes": routes,
            "fetch": fetch,
            "hidden": hidden,
            "matrices": matrices,
            "combine": combine,
            "counters": counters,
            "announced": announced,
            "experts": experts,
            "requests": requests,
            "weights": weights,
            "send": send,
            "status": status,
        }
        homes = Homes(params) if params.memory_bits else None
        if homes:
            parts["homes"] = homes
        resets = add_parts(m, parts, reset)
        m.d.comb += cut.cut.eq(resets["send"])

        wiring.connect(m, wiring.flipped(self.i), receive.i)
        wiring.connect(m, send.o, cut.i)
        wiring.connect(m, cut.o, wiring.flipped(self.o))
        wiring.connect(m, receive.o_route, routes.i)
        wiring.connect(m, requests.o, wiring.flipped(self.o_request))
        wiring.connect(m, fetch.o_matrix, announced.i)
        wiring.connect(m, fetch.o_expert, experts.i)

        # Requests to the host and their answers; with a second home of experts that takes its place between them.
        waiting, end_of_answer, write_busy, memory_error = fetch.waiting != 0, receive.answered, Const(0), Const(0)
        if homes:
            wiring.connect(m, receive.o_home, homes.i_home)
            wiring.connect(m, fetch.o_request, homes.i_request)
            wiring.connect(m, homes.o_request, requests.i)
            wiring.connect(m, receive.o_weights, homes.i_weights)
            wiring.connect(m, homes.o_read, wiring.flipped(self.o_read))
            wiring.connect(m, wiring.flipped(self.i_read), homes.i_read)
            wiring.connect(m, homes.o_weights, weights.i)
            wiring.connect(m, receive.o_store, wiring.flipped(self.o_write))
            waiting, end_of_answer = homes.waiting, homes.answered
            write_busy, memory_error = self.write_busy, self.memory_error | homes.error
            m.d.comb += [
                homes.forget.eq(receive.forget),
                homes.halted.eq(receive.halted),
                counters.memory_moved.eq(homes.moved),
                counters.memory_idle.eq(homes.idle),
                self.flush.eq(resets["homes"]),
            ]
        else:
            wiring.connect(m, receive.o_weights, weights.i)
            m.d.comb += [
                requests.i.p.offset.eq(fetch.o_request.p.offset),
                requests.i.p.length.eq(fetch.o_request.p.length),
                requests.i.valid.eq(fetch.o_request.valid),
                fetch.o_request.ready.eq(requests.i.ready),
            ]

        wiring.connect(m, weights.o, matrices.i)

        # Errors and the layer's end.
        running = Signal()
        fatal = Signal(8)
        layer_error = Signal(8)
        experts_left = Signal(range(params.max_experts + 1))
        matrices_left = Signal(range(2 * MAX_OUTSTANDING + 1))
        none_left = Signal(2)
        layer_done = Signal()
        # Events in registers: that they count a cycle late matters to none of the sums below.
        row_error = Signal(2)
        expert_named, expert_finished, matrix_named, answered = Signal(), Signal(), Signal(), Signal()
        status.d.sync += [
            row_error.eq(Mux(matrices.o.valid, matrices.o.p.error, 0)),
            expert_named.eq(fetch.o_expert.valid & fetch.o_expert.ready),
            expert_finished.eq(combine.finished),
            matrix_named.eq(fetch.o_matrix.valid & fetch.o_matrix.ready),
            answered.eq(end_of_answer),
        ]
        matrix_errors = {ERROR_LENGTH: Error.LENGTH, ERROR_COMMAND: Error.COMMAND}
        row_errors = {ERROR_OVERFLOW: Error.OVERFLOW, ERROR_SCALE: Error.SCALE}

        def translated(bits, names):
            return sum((Mux((bits & bit) != 0, error, 0) for bit, error in names.items()), start=Mux(0, 0, 0))

        new = Signal.like(fatal)
        halted = Signal()  # an error is fatal; kept apart, so that nobody has to look at all its bits
        m.d.comb += new.eq(
            receive.error
            | translated(matrices.error, matrix_errors)
            | Mux(routes.error, Error.ROUTE, 0)
            | Mux(memory_error, Error.MEMORY, 0)
        )
        status.d.sync += [
            fatal.eq(fatal | new),
            halted.eq(halted | new.any()),
            layer_error.eq(
                Mux(
                    receive.start,
                    0,
                    layer_error | translated(row_error, row_errors) | Mux(combine.overflow, Error.OVERFLOW, 0),
                )
            ),
            running.eq((running | receive.start) & ~send.done),
            experts_left.eq(experts_left + expert_named - expert_finished),
            matrices_left.eq(matrices_left + matrix_named - matrices.activity.matrix_end),
            none_left.eq(Cat(experts_left == 0, matrices_left == 0)),
            layer_done.eq(running & ~fetch.start & ~fetch.busy & none_left.all() & ~send.done),
        ]
        begin = Signal()  # a cycle after all counters were cleared
        status.d.sync += begin.eq(receive.start)

        # The next command, in a register; a down matrix waits there until its input is in the activation memory.
        hidden_ready = Signal()
        command = Signal(matrix_command(params))
        command_valid = Signal()
        looked_at = Signal()  # a cycle after it came
        waits = Signal()  # the command is such a down matrix
        leaves = Signal()
        m.d.comb += [
            matrices.i_matrix.payload.eq(command),
            matrices.i_matrix.valid.eq(looked_at & (~waits | hidden_ready)),
            leaves.eq(matrices.i_matrix.valid & matrices.i_matrix.ready),
            announced.o.ready.eq(~command_valid),
        ]
        with status.If(~command_valid):
            status.d.sync += [command_valid.eq(announced.o.valid), command.eq(announced.o.p)]
        with status.Elif(leaves):
            status.d.sync += command_valid.eq(0)
        status.d.sync += [
            looked_at.eq(command_valid & ~leaves),
            waits.eq((command.kind == Kind.DOWN) & command.mask.any()),
        ]
        with status.If(hidden.done):
            status.d.sync += hidden_ready.eq(1)
        with status.Elif(leaves & waits):
            status.d.sync += hidden_ready.eq(0)

        # Token vectors while no layer runs, the vectors between the matrices while one does.
        m.d.comb += [
            matrices.i_x.valid.eq(receive.o_x.valid | hidden.o.valid),
            matrices.i_x.payload.eq(Mux(hidden.o.valid, hidden.o.payload, receive.o_x.payload)),
            receive.o_x.ready.eq(1),
            hidden.o.ready.eq(1),
        ]

        # Row sums, to one of two.
        down = matrices.o.p.kind == Kind.DOWN
        m.d.comb += [
            matrices.o.ready.eq(Mux(down, combine.i.ready, hidden.i.ready)),
            hidden.i.payload.eq(matrices.o.payload),
            hidden.i.valid.eq(matrices.o.valid & ~down),
            combine.i.payload.eq(matrices.o.payload),
            combine.i.valid.eq(matrices.o.valid & down),
        ]

        m.d.comb += [
            receive.routes_held.eq(~routes.empty | write_busy),
            receive.running.eq(running),
            receive.waiting.eq(waiting),
            receive.halted.eq(halted),
            routes.batch.eq(receive.batch),
            routes.experts.eq(receive.config.experts),
            routes.mask_expert.eq(fetch.mask_expert),
            routes.forget.eq(fetch.forget),
            routes.weight_token.eq(hidden.weight_token),
            routes.weight_expert.eq(experts.o.payload),
            experts.o.ready.eq(hidden.done),
            fetch.start.eq(begin),
            fetch.config.eq(receive.config),
            fetch.mask.eq(routes.mask),
            fetch.answered.eq(answered),
            hidden.rows.eq(receive.config.expert_width),
            hidden.weight.eq(routes.weight),
            combine.rows.eq(receive.config.width),
            combine.start.eq(receive.start),
            combine.r_token.eq(send.y_token),
            combine.r_row.eq(send.y_row),
            send.fatal.eq(fatal),
            send.halted.eq(halted),
            send.layer_done.eq(layer_done),
            send.layer_error.eq(layer_error),
            send.batch.eq(receive.batch),
            send.width.eq(receive.config.width),
            send.y.eq(combine.r_data),
            send.read_counters.eq(receive.read_counters),
            send.value.eq(counters.value),
            counters.start.eq(receive.start),
            counters.running.eq(running),
            counters.activity.eq(matrices.activity),
            counters.waiting.eq(looked_at & waits & ~hidden_ready),
            counters.moved.eq(receive.moved),
            counters.idle.eq(receive.idle),
            counters.requested.eq(fetch.o_request.valid & fetch.o_request.ready),
            counters.length.eq(fetch.o_request.p.length),
            counters.levels[0].eq(announced.level),
            counters.levels[1].eq(matrices.blocks_held),
            counters.levels[2].eq(matrices.rows_held),
            counters.counter.eq(send.counter),
        ]
        return m
