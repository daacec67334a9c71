"""Messages from the host: what each says goes to whom it concerns."""

from amaranth.hdl import Cat, Const, Module, Mux, ResetInserter, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw.delay import delay
from hw.formats import q6_k as fmt
from hw.formats.messages import HEADER_BYTES, MAX_OUTSTANDING, OFFSET_BITS, Error, Message, Mode
from hw.formats.params import Params
from hw.gather import Gather
from hw.layouts import (
    LOAD_VALUES,
    MEMORY_WORD_BITS,
    ROUTE,
    activation_word,
    bits_for,
    check_memory,
    home,
    layer_config,
    link_beat,
    memory_write,
)

CONFIG_BYTES = 48
"""Of a ``CONFIG`` message's payload: three pairs of offset and length, 8 bytes each."""
X_WORDS = fmt.BLOCK_WEIGHTS // LOAD_VALUES

HEADERS = {
    Message.CONFIG: data.StructLayout(
        {"kind": 8, "mode": 8, "outstanding": 16, "experts": 16, "width": 16, "expert_width": 16}
    ),
    Message.LOAD_X: data.StructLayout({"kind": 8, "token": 8, "column": 8, "exponent": signed(8)}),
    Message.ROUTES: data.StructLayout({"kind": 8, "batch": 8, "count": 16}),
    Message.STORE: data.StructLayout({"kind": 8, "unused": 8, "address": OFFSET_BITS}),
}
"""Headers of those messages that say more than their kind; :mod:`hw.formats.messages` describes them."""


STATES = {
    Message.CONFIG: "CONFIG",
    Message.LOAD_X: "X",
    Message.ROUTES: "ROUTES",
    Message.WEIGHTS: "WEIGHTS",
}
"""Where the payload of a message is taken."""
MEMORY_STATES = {Message.HOMES: "ROUTES", Message.STORE: "STORE"}
"""The same where the board has a memory. Homes are taken apart like routes: as long, and counted in the same place."""
HOME = data.StructLayout({"address": OFFSET_BITS, "unused": 15, "here": 1})
"""An expert's entry in a ``HOMES`` message."""
BARE = (Message.RESET, Message.READ_COUNTERS)


class Receive(wiring.Component):
    """Take messages apart. Beats of ``WEIGHTS`` and of ``STORE`` pass through untouched.

    A message that is unknown, of a wrong length or out of order sets ``error`` for a cycle and is discarded, as is
    every message but ``RESET`` while ``halted``. A header costs five cycles beside its beats, the end
    of any payload but routes one.

    Members
    -------
    i : stream of :func:`hw.layouts.link_beat`
    o_weights : stream of :func:`hw.layouts.link_beat`, a run for each ``WEIGHTS`` message
    o_x : stream of :func:`hw.layouts.activation_word`
    o_route : stream of ``ROUTE``
    o_home : stream of :func:`hw.layouts.home`, in the order of experts; o_store : stream of
        :func:`hw.layouts.memory_write`, ``last`` ends a message; both only with ``memory_bits``, and so is
    forget : Out, high for a cycle: no expert has a home any more
    config : Out, :func:`hw.layouts.layer_config`, checked against the parameters
    batch : Out, tokens of the layer
    start : Out, high for a cycle when all routes are in their table
    routes_held : In, high while the table still works on a route, or a start has to wait for something else
    reset, read_counters : Out, high for a cycle
    running : In, a layer is under way
    waiting : In, a request to the host is unanswered
    answered : Out, high for a cycle with the last beat of an answer
    moved : Out, high for a cycle with each beat of an answer; idle : Out, an answer is due but no beat comes
    halted : In
    error : Out, :class:`hw.formats.messages.Error` bits
    """

    i: stream.Interface
    o_weights: stream.Interface
    o_x: stream.Interface
    o_route: stream.Interface
    o_home: stream.Interface
    o_store: stream.Interface
    forget: Signal
    config: data.View
    batch: Signal
    start: Signal
    routes_held: Signal
    reset: Signal
    read_counters: Signal
    running: Signal
    waiting: Signal
    answered: Signal
    moved: Signal
    idle: Signal
    halted: Signal
    error: Signal

    def __init__(self, params: Params) -> None:
        check_memory(params)
        self.params = params
        beat = link_beat(params.link_bytes)
        memory = {}
        if params.memory_bits:
            memory = {
                "o_home": Out(stream.Signature(home(params))),
                "o_store": Out(stream.Signature(memory_write(params.memory_bits))),
                "forget": Out(1),
            }
        super().__init__(
            memory
            | {
                "i": In(stream.Signature(beat)),
                "o_weights": Out(stream.Signature(beat)),
                "o_x": Out(stream.Signature(activation_word(params))),
                "o_route": Out(stream.Signature(ROUTE)),
                "config": Out(layer_config(params)),
                "batch": Out(bits_for(params.max_batch + 1)),
                "start": Out(1),
                "routes_held": In(1),
                "reset": Out(1),
                "read_counters": Out(1),
                "running": In(1),
                "waiting": In(1),
                "answered": Out(1),
                "moved": Out(1),
                "idle": Out(1),
                "halted": In(1),
                "error": Out(8),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        params = self.params
        beat = self.i.p
        gather = Gather(params.link_bytes, apart=True)
        fresh = Signal()  # a message begins: nothing of one before it is left in the gatherer
        m.submodules.gather = ResetInserter(fresh)(gather)
        word = gather.o.p
        # Whether a beat is taken, without asking what other states would say.
        gathered = gather.i.valid & gather.i.ready
        over = Signal()  # a payload ended in the cycle before: nothing is taken, and the state is left
        passed = self.i.valid & self.o_weights.ready & ~over

        # Headers and configurations move through registers as they come, a beat at a time, the oldest lowest.
        header = Signal(8 * HEADER_BYTES, reset_less=True)
        places = Signal(8 * CONFIG_BYTES, reset_less=True)
        header_beats, config_beats = HEADER_BYTES // params.link_bytes, CONFIG_BYTES // params.link_bytes
        count = Signal(range(max(header_beats, config_beats)))
        last = Signal()

        def view(kind: Message):
            return data.View(HEADERS[kind], header[: HEADERS[kind].size])

        def shifted(register, data):
            return Cat(register, data)[8 * params.link_bytes :]

        configured = Signal()
        # The message is discarded, by state.
        wrong = {
            state: Signal(name=f"wrong_{state}")
            for state in ("header", "act", "config", "x", "routes", "entry", "store")
        }
        said = view(Message.CONFIG)
        # A configuration's values are far from their limits, and looked at only when all of it has come.
        checked = data.View(said.shape(), delay(m, said.as_value(), 1))
        tape = Signal()
        outstanding = Signal.like(self.config.outstanding)
        experts = Signal.like(self.config.experts)
        width = Signal.like(self.config.width)
        expert_width = Signal.like(self.config.expert_width)
        m.d.comb += [
            self.config.tape.eq(tape),
            self.config.outstanding.eq(outstanding),
            self.config.experts.eq(experts),
            self.config.width.eq(width),
            self.config.expert_width.eq(expert_width),
            self.config.columns.eq(width >> 8),
            self.config.hidden_columns.eq(expert_width >> 8),
        ]
        for n in range(len(self.config.offsets)):
            pair = places[128 * n :][:128]
            m.d.comb += [self.config.offsets[n].eq(pair[:64]), self.config.lengths[n].eq(pair[64:])]

        # What a header says is in its registers a cycle after it came, looked at in the next, then judged, and acted
        # upon in the fifth.
        kind = header[:8]
        x, routes = view(Message.LOAD_X), view(Message.ROUTES)
        config_checks = Signal(7)
        config_fits = Signal()
        x_fits = Signal()
        routes_fit = Signal()
        blocks = (1 << 8) - 1

        def in_range(value, most: int):
            """Whether it is 1 to ``most``; a cycle later, lest it be deep."""
            above, equal, below_above, some = delay(
                m,
                Cat(value[8:] > most >> 8, value[8:] == most >> 8, value[:8] > (most & 0xFF), value.any()),
                1,
            )
            return some & ~(above | (equal & below_above))

        m.d.sync += [
            config_checks.eq(
                Cat(
                    checked.mode <= max(Mode),
                    in_range(checked.outstanding, MAX_OUTSTANDING),
                    in_range(checked.experts, params.max_experts),
                    in_range(checked.width, params.max_width),
                    (checked.width & blocks) == 0,
                    in_range(checked.expert_width, params.max_expert_width),
                    (checked.expert_width & blocks) == 0,
                )
            ),
            config_fits.eq(config_checks.all()),
            x_fits.eq((x.token < params.max_batch) & (x.column < params.max_columns)),
            routes_fit.eq(
                (routes.batch != 0) & (routes.batch <= params.max_batch) & (last == (routes.count == 0)),
            ),
        ]

        states = STATES | (MEMORY_STATES if params.memory_bits else {})
        said_to_be = {message: Signal(name=f"is_{message.name.lower()}") for message in (*states, *BARE)}
        accepted = {message: Signal(name=f"accepted_{message.name.lower()}") for message in (*states, *BARE)}
        refused = Signal()
        returns = Signal()  # nothing more of the message is to come
        m.d.sync += [is_it.eq(kind == message) for message, is_it in said_to_be.items()]
        one_route = Signal()
        m.d.sync += [refused.eq(~Cat(accepted.values()).any()), one_route.eq(routes.count == 1)]
        x_word = Signal(range(X_WORDS))
        last_x_word = Signal()
        route_pair = Signal(2 * ROUTE.size)
        routes_left = Signal(16)
        last_route, no_route_left = Signal(), Signal()
        second = Signal()
        ended = Signal()  # the message's last word has been looked at
        filled = Signal()  # that word had as many bytes as the count of routes says
        route_beats = ROUTE.size // 8 // params.link_bytes  # none where a beat holds two
        tail = Signal()  # its last beat has been taken, so that the next is another message's
        heading = Signal()  # the state is that of a header
        configuring = Signal()  # or of a configuration
        complete = Signal()  # a configuration that is over
        misfit = Signal()  # its, with the parameters
        all_places = count == config_beats - 1
        # Errors go through a register, and so do what headers and configurations say, for they are many.
        m.d.sync += self.error.eq(
            Mux(delay(m, misfit, 1, control=True), Error.CONFIG, 0)
            | Mux(
                delay(m, delay(m, Cat(wrong.values()), 1, control=True).any() & ~self.halted, 1, control=True),
                Error.MESSAGE,
                0,
            )
        )
        part = delay(m, beat.data.as_value(), 1)
        with m.If(delay(m, heading & self.i.valid, 1, control=True)):
            m.d.sync += header.eq(shifted(header, part))
        with m.If(delay(m, configuring & self.i.valid & ~over, 1, control=True)):
            m.d.sync += places.eq(shifted(places, part))
        with m.If(configuring):
            m.d.sync += [
                tape.eq(said.mode == Mode.TAPE),
                outstanding.eq(said.outstanding),
                experts.eq(said.experts),
                width.eq(said.width),
                expert_width.eq(said.expert_width),
            ]
        m.d.comb += [
            self.o_weights.payload.eq(beat),
            gather.i.payload.eq(beat),
            self.o_x.p["values"].eq(word.data),
            self.o_x.p.exponent.eq(x.exponent),
            self.o_x.p.word.eq(x_word),
            self.o_x.p.column.eq(x.column),
            self.o_x.p.token.eq(x.token),
        ]

        # What the state says of beats: any is welcome, it goes to the gatherer, or it passes.
        welcome, gathering, passing, storing = Signal(), Signal(), Signal(), Signal()
        store_ready = Signal()
        m.d.comb += [
            gather.i.valid.eq(self.i.valid & gathering & ~tail & ~over),
            self.o_weights.valid.eq(self.i.valid & passing & ~over),
            self.i.ready.eq(
                ((gathering & gather.i.ready & ~tail) | welcome | (passing & self.o_weights.ready) | store_ready)
                & ~over,
            ),
        ]
        entry = Signal(ROUTE.size)
        entry_taken = Signal()
        entry_wrong = Signal()
        homes_come = Signal()  # entries are homes, not routes
        m.d.comb += [
            entry.eq(Mux(second, route_pair[ROUTE.size :], route_pair[: ROUTE.size])),
            self.o_route.payload.eq(entry),
            entry_taken.eq(self.o_route.ready),
        ]
        said_home, said_store = data.View(HOME, entry), view(Message.STORE)
        homes_fit, store_fits = Signal(), Signal()
        store_word = Signal(max(params.memory_bits - MEMORY_WORD_BITS, 0) + 1)
        beyond = Signal()  # the next word of a store would lie behind the memory's end
        if params.memory_bits:

            def outside(address, *more):  # no word's address, or none in this memory
                return Cat(address[:MEMORY_WORD_BITS], address[params.memory_bits :], *more).any()

            m.d.sync += [
                homes_fit.eq((routes.count <= experts) & (last == (routes.count == 0))),
                store_fits.eq(~outside(said_store.address)),
            ]
            m.d.comb += [
                homes_come.eq(accepted[Message.HOMES]),
                entry_taken.eq(Mux(homes_come, self.o_home.ready, self.o_route.ready)),
                entry_wrong.eq(homes_come & said_home.here & outside(said_home.address, said_home.unused)),
                self.o_home.p.word.eq(said_home.address[MEMORY_WORD_BITS:]),
                self.o_home.p.here.eq(said_home.here),
                beyond.eq(store_word[-1]),
                store_ready.eq(storing & self.o_store.ready & ~beyond),
                self.o_store.valid.eq(self.i.valid & storing & ~beyond & ~over),
                self.o_store.p.address.eq(Cat(Const(0, MEMORY_WORD_BITS), store_word)),
                self.o_store.p.data.eq(beat.data),
                self.o_store.p.last.eq(beat.last),
            ]

        m.d.sync += [self.start.eq(0), over.eq(0)]
        with m.FSM(init="HEADER") as fsm:
            m.d.comb += [
                welcome.eq(fsm.ongoing("HEADER") | fsm.ongoing("DISCARD") | fsm.ongoing("CONFIG")),
                gathering.eq(fsm.ongoing("X") | fsm.ongoing("ROUTES")),
                passing.eq(fsm.ongoing("WEIGHTS")),
                heading.eq(fsm.ongoing("HEADER")),
                configuring.eq(fsm.ongoing("CONFIG")),
            ]
            if params.memory_bits:
                m.d.comb += storing.eq(fsm.ongoing("STORE"))
            with m.State("HEADER"):
                with m.If(self.i.valid):
                    m.d.sync += [last.eq(beat.last), count.eq(count + 1)]
                    with m.If(count == header_beats - 1):
                        m.d.sync += count.eq(0)
                        m.next = "ARRIVED"
                    with m.Elif(beat.last):
                        m.d.sync += count.eq(0)
                        m.d.comb += wrong["header"].eq(1)
            with m.State("ARRIVED"):
                m.next = "LOOK"
            with m.State("LOOK"):
                m.next = "JUDGE"
            with m.State("JUDGE"):
                idle = ~self.halted & ~self.running
                conditions = {
                    Message.RESET: last,
                    Message.CONFIG: idle & ~last,
                    Message.LOAD_X: idle & ~last & x_fits,
                    Message.ROUTES: idle & configured & routes_fit,
                    Message.WEIGHTS: ~self.halted & ~last & self.waiting,
                    Message.READ_COUNTERS: idle & last,
                    Message.HOMES: idle & configured & homes_fit,
                    Message.STORE: idle & ~last & store_fits,
                }
                m.d.sync += [accepted[message].eq(said_to_be[message] & conditions[message]) for message in accepted]
                m.next = "JUDGED"
            with m.State("JUDGED"):
                m.d.sync += returns.eq(last & ~Cat(accepted[message] for message in states).any())
                m.next = "ACT"
            with m.State("ACT"):
                m.d.comb += [
                    fresh.eq(1),
                    wrong["act"].eq(refused),
                    self.reset.eq(accepted[Message.RESET]),
                    self.read_counters.eq(accepted[Message.READ_COUNTERS]),
                ]
                m.d.sync += [tail.eq(last), x_word.eq(0), last_x_word.eq(0), routes_left.eq(routes.count), second.eq(0)]
                m.d.sync += [ended.eq(last), filled.eq(1), no_route_left.eq(last)]  # a good message without payload
                m.d.sync += last_route.eq(one_route)
                m.next = "DISCARD"
                for message, state in states.items():
                    with m.If(accepted[message]):
                        m.next = state
                with m.If(returns):
                    m.next = "HEADER"
                with m.If(accepted[Message.ROUTES]):
                    m.d.sync += self.batch.eq(routes.batch)
                with m.If(accepted[Message.CONFIG] | accepted[Message.RESET]):
                    m.d.sync += configured.eq(0)
                if params.memory_bits:
                    m.d.comb += self.forget.eq(accepted[Message.CONFIG] | accepted[Message.HOMES])
                    m.d.sync += [
                        self.o_home.p.expert.eq(0),
                        store_word.eq(said_store.address[MEMORY_WORD_BITS : params.memory_bits]),
                    ]
            with m.State("DISCARD"):
                m.d.sync += over.eq(self.i.valid & beat.last & ~over)
                with m.If(over):
                    m.next = "HEADER"
            with m.State("CONFIG"):
                with m.If(self.i.valid & ~over):
                    m.d.sync += count.eq(count + 1)
                    with m.If(all_places | beat.last):
                        m.d.sync += [count.eq(0), over.eq(1), complete.eq(all_places & beat.last), last.eq(beat.last)]
                with m.If(over):
                    m.next = "HEADER"
                    with m.If(complete):
                        m.d.sync += configured.eq(config_fits)
                        m.d.comb += misfit.eq(~config_fits)
                    with m.Else():
                        m.d.comb += wrong["config"].eq(1)
                        with m.If(~last):
                            m.next = "DISCARD"
            with m.State("X"):
                m.d.comb += [self.o_x.valid.eq(gather.o.valid), gather.o.ready.eq(self.o_x.ready)]
                with m.If(gather.o.valid & gather.o.ready):
                    m.d.sync += [x_word.eq(x_word + 1), last_x_word.eq(x_word == X_WORDS - 2)]
                    with m.If(word.last | last_x_word):
                        m.d.sync += over.eq(1)
                        with m.If(~(word.last & last_x_word & (word.missing == 0))):
                            m.d.comb += wrong["x"].eq(1)
                with m.If(over):
                    m.next = "HEADER"
                    with m.If(~tail):
                        m.next = "DISCARD"
                with m.If(gathered & beat.last):
                    m.d.sync += tail.eq(1)
            with m.State("ROUTES"):
                m.d.sync += route_pair.eq(word.data)  # of no effect until there is one
                with m.If(gathered & beat.last):
                    m.d.sync += tail.eq(1)
                with m.If(ended & no_route_left & filled):
                    m.next = "START"
                    with m.If(homes_come):
                        m.next = "HEADER"
                with m.Elif(ended | no_route_left):
                    m.d.comb += wrong["routes"].eq(1)
                    m.next = "WRONG ROUTES"
                with m.Else():
                    m.d.comb += gather.o.ready.eq(1)
                    with m.If(gather.o.valid):
                        m.d.sync += [
                            ended.eq(word.last),
                            filled.eq(word.missing == Mux(routes.count[0], route_beats, 0)),
                            second.eq(0),
                        ]
                        m.next = "ROUTE"
            with m.State("WRONG ROUTES"):
                m.next = "DISCARD"
                with m.If(ended | tail):
                    m.next = "HEADER"
            with m.State("ROUTE"):
                m.d.comb += self.o_route.valid.eq(~homes_come)
                if params.memory_bits:
                    m.d.comb += self.o_home.valid.eq(homes_come & ~entry_wrong)
                    with m.If(entry_taken):
                        m.d.sync += self.o_home.p.expert.eq(self.o_home.p.expert + 1)
                with m.If(entry_wrong):
                    m.d.comb += wrong["entry"].eq(1)
                    m.next = "HEADER"
                    with m.If(~ended):
                        m.next = "DISCARD"
                with m.Elif(entry_taken):
                    m.d.sync += [routes_left.eq(routes_left - 1), second.eq(1)]
                    m.d.sync += [last_route.eq(routes_left == 2), no_route_left.eq(last_route)]
                    with m.If(second | last_route):
                        m.next = "ROUTES"
            with m.State("START"):
                with m.If(~self.routes_held):
                    m.next = "STARTED"
            with m.State("STARTED"):  # a wrong last route has halted the engine by now
                m.d.sync += self.start.eq(~self.halted)
                m.next = "HEADER"
            with m.State("WEIGHTS"):
                m.d.comb += [self.moved.eq(passed), self.answered.eq(passed & beat.last)]
                m.d.sync += over.eq(passed & beat.last)
                with m.If(over):
                    m.next = "HEADER"
            if params.memory_bits:
                with m.State("STORE"):
                    with m.If(over):
                        m.next = "HEADER"
                    with m.Elif(beyond):
                        m.d.comb += wrong["store"].eq(1)
                        m.next = "DISCARD"
                    with m.Elif(self.o_store.valid & self.o_store.ready):
                        m.d.sync += [store_word.eq(store_word + 1), over.eq(beat.last)]
        m.d.comb += self.idle.eq(self.waiting & self.i.ready & ~self.i.valid)
        return m
