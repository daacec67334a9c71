"""The fetch controller asks for every needed expert exactly once, in order, and never for another."""

import pytest
from amaranth.hdl import Array, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw import fetch
from hw.formats.messages import LENGTH_BITS, MAX_OUTSTANDING, OFFSET_BITS
from hw.formats.params import Params
from hw.layouts import MATRICES, Kind, bits_for, layer_config, matrix_command, wanted_matrix

from .prove import Opened, Refuted, assume, broken, claim, never_reset, prove, waiting_payload_holds

PARAMS = Params(max_batch=2, max_experts=4)


def first(m: Module, chosen: list[Value], start: Value, name: str) -> tuple[Signal, Signal]:
    """Whether there is one among ``chosen`` from ``start`` on, and the first of them."""
    there, index = Signal(name=f"{name}_there"), Signal(range(len(chosen) + 1), name=name)
    for n, one in reversed(list(enumerate(chosen))):
        with m.If(one & (start <= n)):
            m.d.comb += [there.eq(1), index.eq(n)]
    return there, index


class FetchProof(wiring.Component):
    """Layer after layer of one configuration and one set of masks, any; a reference walk tells what has to come next.

    ``starts`` says where the experts' matrices lie: the first at its offset, each of the others a length after the one
    before. A mask comes a cycle after its expert is named; it reads as zero once it was told to be forgotten. An answer
    comes at any time after its request.

    Parameters
    ----------
    refute
        For broken copies: offsets and lengths of 0 and 1 will do, and what only induction needs is left out.
    """

    start: Signal
    masks: data.View
    config: data.View
    starts: data.View
    answered: Signal
    o_request: stream.Interface
    o_matrix: stream.Interface
    o_expert: stream.Interface

    def __init__(self, source, *, refute: bool = False) -> None:
        self.source, self.refute = source, refute
        super().__init__(
            {
                "start": In(1),
                "masks": In(data.ArrayLayout(PARAMS.max_batch, PARAMS.max_experts)),
                "config": In(layer_config(PARAMS)),
                "starts": In(data.ArrayLayout(data.ArrayLayout(OFFSET_BITS, PARAMS.max_experts + 1), MATRICES)),
                "answered": In(1),
                "o_request": Out(stream.Signature(wanted_matrix(PARAMS))),
                "o_matrix": Out(stream.Signature(matrix_command(PARAMS))),
                "o_expert": Out(stream.Signature(bits_for(PARAMS.max_experts))),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        dut = self.source.Fetch(PARAMS)
        m.submodules.dut = opened = Opened(dut)
        config = self.config
        masks = [self.masks[n] for n in range(PARAMS.max_experts)]
        lengths = Array(config.lengths[n] for n in range(MATRICES))
        for name in ("o_request", "o_matrix", "o_expert"):
            wiring.connect(m, getattr(dut, name), wiring.flipped(getattr(self, name)))
            waiting_payload_holds(m, getattr(dut, name))
        never_reset(m)

        # The surroundings.
        for n, value in enumerate(Value.cast(port) for port in (self.masks, config, self.starts)):
            before = Signal.like(value, name=f"before_{n}")
            later = Signal(name=f"later_{n}")
            m.d.sync += [before.eq(value), later.eq(1)]
            assume(m, ~later | (value == before))
        assume(m, config.experts != 0, config.experts <= PARAMS.max_experts)
        assume(m, config.outstanding != 0, config.outstanding <= MAX_OUTSTANDING)
        for kind in range(MATRICES):
            starts, offset, length = self.starts[kind], config.offsets[kind], config.lengths[kind]
            assume(m, starts[0] == offset)
            for n in range(PARAMS.max_experts):
                assume(m, starts[n + 1] == (starts[n] + length)[:OFFSET_BITS])
            if self.refute:
                assume(m, offset <= 1, length <= 1)
        forgotten = Signal(PARAMS.max_experts)
        gone = forgotten.bit_select(dut.mask_expert, 1)
        read = Signal(PARAMS.max_batch)
        m.d.sync += read.eq(Mux(gone, 0, Array(masks)[dut.mask_expert]))
        unanswered = Signal(range(MAX_OUTSTANDING + 1))
        begin = self.start & ~dut.busy
        requested = dut.o_request.valid & dut.o_request.ready
        m.d.comb += [
            dut.start.eq(self.start),
            dut.config.eq(config),
            dut.mask.eq(read),
            dut.answered.eq(self.answered),
        ]
        m.d.sync += unanswered.eq(unanswered + requested - self.answered)
        assume(m, ~self.answered | (unanswered != 0))
        with m.If(dut.forget):
            m.d.sync += forgotten.eq(forgotten | (1 << dut.mask_expert))
            claim(m, ~gone)
        claim(m, dut.waiting == unanswered, unanswered <= config.outstanding)

        # The reference: experts below `place` are done with, as are the first `matrix` matrices of the next needed one;
        # `owed`: the next matrix was requested but not announced; wanted experts below `named` were named.
        wanted = [(n < config.experts) & masks[n].any() for n in range(PARAMS.max_experts)]
        needed = [(n < config.experts) & (config.tape | masks[n].any()) for n in range(PARAMS.max_experts)]
        place, named = (Signal(range(PARAMS.max_experts + 1), name=name) for name in ("place", "named"))
        matrix = Signal(range(MATRICES))
        owed = Signal()
        to_request, expert = first(m, needed, place, "next_needed")
        to_name, next_name = first(m, wanted, named, "next_wanted")
        walking = Signal()

        def starts_at(matrix, expert):
            places = [Array(self.starts[kind][n] for n in range(PARAMS.max_experts + 1)) for kind in range(MATRICES)]
            return Array(places)[matrix][expert]

        down = matrix == Kind.DOWN.value
        with m.If(dut.o_request.valid):
            request = dut.o_request.p
            claim(
                m,
                walking & to_request & ~owed,
                request.offset == starts_at(matrix, expert),
                request.length == lengths[matrix],
                request.expert == expert,
                request.kind.as_value() == matrix,
                ~to_name | (next_name > expert),
            )
            with m.If(dut.o_request.ready):
                m.d.sync += owed.eq(1)
        with m.If(dut.o_matrix.valid):
            command = dut.o_matrix.p
            claim(
                m,
                walking & to_request & owed,
                command.kind.as_value() == matrix,
                command.mask == Array(masks)[expert],
                command.rows == Mux(down, config.width, config.expert_width),
                command.columns == Mux(down, config.hidden_columns, config.columns),
            )
            with m.If(dut.o_matrix.ready):
                m.d.sync += [owed.eq(0), matrix.eq(matrix + 1)]
                with m.If(down):
                    m.d.sync += [matrix.eq(0), place.eq(expert + 1)]
        with m.If(dut.o_expert.valid):
            claim(m, walking & to_name, dut.o_expert.payload == next_name)
            with m.If(dut.o_expert.ready):
                m.d.sync += named.eq(next_name + 1)
        all_experts = (1 << config.experts) - 1
        with m.If(walking & ~dut.busy):
            claim(m, ~to_request & ~to_name & ~owed, matrix == 0, unanswered == 0, forgotten == all_experts)
            m.d.sync += walking.eq(0)
        with m.If(begin):
            m.d.sync += [walking.eq(1), place.eq(0), named.eq(0), matrix.eq(0), owed.eq(0), forgotten.eq(0)]

        if self.refute:
            return m
        # What induction needs to know of a state.
        fsm = opened.module._generated["fsm"]  # Amaranth has no public way to it; the release is pinned

        def state(*names: str) -> Value:
            return sum((fsm.state == fsm.encoding[name] for name in names), start=Mux(0, 0, 0)) != 0

        here = Signal(range(PARAMS.max_experts + 1))  # at work
        turn = opened["matrix"]
        m.d.comb += here.eq(opened["expert"])
        claim(m, dut.busy == ~state("IDLE"), ~dut.busy | walking, matrix < MATRICES, turn < MATRICES)
        loading = opened["idle"]
        claim(m, opened["turn"] == state("TURNED"), ~loading | state("IDLE") | (state("LOOK") & (here == 0)))
        claim(m, ~state("LOOK") | (here != 0) | loading)
        looking = state("LOOK", "TAKE", "SEE", "NAME")
        with m.If(dut.busy & ~state("DRAIN")):
            claim(m, here < config.experts, place <= here + state("TURNED", "NEXT"), named <= here + ~looking)
        with m.If(dut.busy & ~state("DRAIN") & ~loading):
            for n in range(MATRICES):
                index = Signal(range(MATRICES), name=f"matrix_at_{n}")
                m.d.comb += index.eq(Mux(turn + n < MATRICES, turn + n, turn + n - MATRICES))
                moved = state("NEXT") | (index < turn)  # on to the next expert's
                claim(
                    m,
                    opened["offsets"].word_select(n, OFFSET_BITS) == starts_at(index, (here + moved)[: len(here)]),
                    opened["lengths"].word_select(n, LENGTH_BITS) == lengths[index],
                )
        with m.If(looking):
            claim(m, turn == 0, matrix == 0, ~owed, ~to_request | (expert >= here), ~to_name | (next_name >= here))
        with m.If(state("LOOK", "TAKE")):
            claim(m, forgotten == (1 << here) - 1)
        with m.If(state("TAKE")):
            claim(m, read == Array(masks)[here])
        with m.If(state("SEE", "NAME", "TURN", "REQUEST", "ANNOUNCE", "TURNED", "NEXT")):
            claim(
                m,
                forgotten == (2 << here) - 1,
                opened["mask"] == Array(masks)[here],
                opened["last_expert"] == (here + 1 == config.experts),
            )
        with m.If(state("NAME", "TURN", "REQUEST", "ANNOUNCE", "TURNED", "NEXT")):
            claim(m, opened["wanted"] == opened["mask"].any())
        with m.If(state("TURN", "REQUEST", "ANNOUNCE", "TURNED", "NEXT")):
            claim(m, ~to_name | (next_name > here))
        with m.If(state("TURN", "REQUEST", "ANNOUNCE")):
            with m.If(opened["wanted"] | config.tape):
                claim(m, to_request, expert == here, matrix == turn)
            with m.Else():
                claim(m, state("TURN"), matrix == 0, ~to_request | (expert > here))
            claim(m, owed == state("ANNOUNCE"))
        with m.If(state("TURNED")):  # the reference is a step ahead
            claim(m, ~owed)
            with m.If((opened["wanted"] | config.tape) & (turn != Kind.DOWN.value)):
                claim(m, to_request, expert == here, matrix == turn + 1)
            with m.Else():
                claim(m, matrix == 0, ~to_request | (expert > here))
        with m.If(state("NEXT")):
            claim(m, turn == 0, matrix == 0, ~owed, ~to_request | (expert > here))
        with m.If(state("DRAIN")):
            claim(m, ~to_request & ~to_name & ~owed, matrix == 0, forgotten == all_experts)
        with m.If(state("REQUEST") | (state("TURN") & opened["room"])):
            claim(m, unanswered < config.outstanding)
        return m


@pytest.mark.formal
def test_fetch(tmp_path):
    prove(FetchProof(fetch), tmp_path, depth=2)


PASSED_OVER = "with m.If(~(wanted | config.tape)):"
BREAKS = [
    (
        f"{PASSED_OVER}\n                    m.d.sync += turn.eq(1)",
        f"{PASSED_OVER}\n                    m.d.sync += turn.eq(~down)",
    ),
    (PASSED_OVER, "with m.If(0):"),
    (PASSED_OVER, "with m.If(~wanted):"),
    ("with m.Elif(room):", "with m.Else():"),
    ("self.waiting < config.outstanding", "self.waiting <= config.outstanding"),
    ("expert.eq(expert + 1)", "expert.eq(expert)"),
    ("with m.If(last_expert):", "with m.If(1):"),
    ("last_expert.eq(expert + 1 == config.experts)", "last_expert.eq(expert == config.experts)"),
    ("wanted.eq(mask.any())", "wanted.eq(mask.all())"),
    ("self.o_expert.valid.eq(wanted)", "self.o_expert.valid.eq(1)"),
    ("self.o_matrix.p.kind.eq(matrix)", "self.o_matrix.p.kind.eq(2 - matrix)"),
    ("self.o_request.p.kind.eq(matrix)", "self.o_request.p.kind.eq(2 - matrix)"),
    ("self.o_request.p.expert.eq(expert)", "self.o_request.p.expert.eq(0)"),
    ("offsets[2].eq(offsets[0] + lengths[0])", "offsets[2].eq(offsets[0])"),
]


@pytest.mark.broken
@pytest.mark.parametrize(("old", "new"), BREAKS)
def test_the_proof_fails_on_a_broken_fetch(old, new, tmp_path):
    with pytest.raises(Refuted):
        prove(FetchProof(broken(fetch, old, new), refute=True), tmp_path, depth=28)
