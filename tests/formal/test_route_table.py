"""A mask has a token's bit exactly if a good route for that token and expert came since the mask was last cleared."""

import pytest
from amaranth.hdl import Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hw import route_table
from hw.formats.messages import WEIGHT_BITS
from hw.formats.params import Params
from hw.layouts import ROUTE, bits_for

from .prove import Opened, Refuted, assume, broken, claim, never_reset, prove

PARAMS = Params(max_batch=2, max_experts=3)


class RouteTableProof(wiring.Component):
    """One token and one expert, any, are followed through routes, forgetting and resets, which may come at any time.

    ``batch`` and ``experts`` hold while a route is on its way; nothing is forgotten while routes come in.
    """

    i: stream.Interface
    reset: Signal
    token: Signal
    expert: Signal
    batch: Signal
    experts: Signal
    mask_expert: Signal
    forget: Signal
    mask: Signal

    def __init__(self, source) -> None:
        self.source = source
        dut = source.RouteTable(PARAMS)
        names = ("batch", "experts", "mask_expert", "forget")
        ports = {name: In(len(getattr(dut, name))) for name in names}
        super().__init__(
            ports
            | {
                "i": In(stream.Signature(ROUTE)),
                "reset": In(1),
                "token": In(bits_for(PARAMS.max_batch)),
                "expert": In(bits_for(PARAMS.max_experts)),
                "mask": Out(PARAMS.max_batch),
            }
        )

    def elaborate(self, platform) -> Module:
        m = Module()
        dut = self.source.RouteTable(PARAMS)
        opened = Opened(dut)
        m.submodules.dut = ResetInserter(self.reset)(opened)
        wiring.connect(m, wiring.flipped(self.i), dut.i)
        m.d.comb += [
            *(getattr(dut, name).eq(getattr(self, name)) for name in ("batch", "experts", "mask_expert", "forget")),
            self.mask.eq(dut.mask),
        ]
        never_reset(m)
        held, clearing = opened["held"], opened["clearing"]

        # The surroundings.
        later = Signal()
        token, expert = Signal.like(self.token), Signal.like(self.expert)
        batch, experts = Signal.like(self.batch), Signal.like(self.experts)
        m.d.sync += [later.eq(1), token.eq(self.token), expert.eq(self.expert)]
        m.d.sync += [batch.eq(self.batch), experts.eq(self.experts)]
        assume(m, self.token < PARAMS.max_batch, self.expert < PARAMS.max_experts)
        assume(m, ~later | ((self.token == token) & (self.expert == expert)))
        assume(m, ~held | ((self.batch == batch) & (self.experts == experts)))
        assume(m, self.batch <= PARAMS.max_batch, self.experts <= PARAMS.max_experts)
        assume(m, ~self.forget | dut.empty)

        # The reference: `bit` is the one that is followed, `mine` whether the route at work is for it.
        taken = self.i.valid & dut.i.ready
        route = self.i.p
        bit, mine, good = Signal(), Signal(), Signal()
        with m.If(taken):
            m.d.sync += [
                mine.eq((route.token == self.token) & (route.expert == self.expert)),
                good.eq(allowed(route, self.batch, self.experts)),
            ]
        leaves = held & opened["done"]
        with m.If(leaves):
            m.d.sync += bit.eq(bit | (mine & good))
        with m.If((self.forget & (self.mask_expert == self.expert)) | self.reset):
            m.d.sync += bit.eq(0)
        ready = ~held & ~clearing
        claim(m, dut.i.ready == ready, dut.empty == (~held & ~self.i.valid))
        # The mask and the error come a cycle later; the mask without what is being written meanwhile.
        writing_mine = opened["writing"] & (opened["written"] == self.expert)
        asked, bit_then, told, wrong_then, left = Signal(), Signal(), Signal(), Signal(), Signal()
        m.d.sync += [
            asked.eq(ready & (self.mask_expert == self.expert) & ~writing_mine & ~self.reset),
            bit_then.eq(bit),
            told.eq(leaves & (mine | ~good) & ~self.reset),
            wrong_then.eq(~good | bit),
            left.eq(leaves & ~self.reset),
        ]
        with m.If(asked):
            claim(m, self.mask.bit_select(self.token, 1) == bit_then)
        with m.If(told):
            claim(m, dut.error == wrong_then)
        with m.If(~left):
            claim(m, ~dut.error)

        # What induction needs to know of a state.
        spy = opened.module.submodules.masks.read_port(domain="comb")
        clear_expert = opened["clear_expert"]
        m.d.comb += spy.addr.eq(self.expert)
        known = Signal(PARAMS.max_batch)  # the mask, with what is being written
        m.d.comb += known.eq(Mux(writing_mine, opened["new_mask"], spy.data))
        claim(m, ~held | ~opened["writing"])
        claim(m, ~clearing | ((clear_expert < PARAMS.max_experts) & ~held & ~bit))
        with m.If(~clearing | (clear_expert > self.expert)):
            claim(m, known.bit_select(self.token, 1) == bit)
        entry = data.View(ROUTE, opened["entry"])
        with m.If(held):
            claim(
                m,
                good == allowed(entry, self.batch, self.experts),
                mine == ((entry.token == self.token) & (entry.expert == self.expert)),
            )
        with m.If(held & opened["checked"]):
            claim(m, opened["good"] == good, opened["bit"] == (1 << entry.token[:1])[: PARAMS.max_batch])
            with m.If(entry.expert == self.expert):
                claim(m, opened["before"] == spy.data)
        return m


def allowed(route, batch: Signal, experts: Signal) -> Value:
    return (route.token < batch) & (route.expert < experts) & (route.weight <= 1 << (WEIGHT_BITS - 1))


@pytest.mark.formal
def test_route_table(tmp_path):
    prove(RouteTableProof(route_table), tmp_path, depth=2)


BREAKS = [
    ("Mux(held, before | bit, 0)", "Mux(held, bit, 0)"),
    ("clearing.eq(clear_expert != params.max_experts - 1)", "clearing.eq(0)"),
    ("Mux(held, done & good, self.forget)", "Mux(held, done, self.forget)"),
    ("(entry.weight <= 1 <<", "(entry.weight < 1 <<"),
    ("(before & bit).any()", "before.any()"),
]


@pytest.mark.broken
@pytest.mark.parametrize(("old", "new"), BREAKS)
def test_the_proof_fails_on_a_broken_route_table(old, new, tmp_path):
    with pytest.raises(Refuted):
        prove(RouteTableProof(broken(route_table, old, new)), tmp_path, depth=14)
