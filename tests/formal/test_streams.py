"""A payload that waits holds, at the outputs that are registers; the queues' own outputs are in ``test_queue``."""

from collections.abc import Callable, Sequence

import pytest
from amaranth.hdl import Module, Signal, Value
from amaranth.lib import wiring

from hw import decode, fetch, gather, receive, send
from hw.formats.params import Params

from .prove import (
    Opened,
    Refuted,
    assume,
    broken,
    claim,
    credit_queue_is_sound,
    never_reset,
    prove,
    waiting_payload_holds,
)


class HoldProof(wiring.Component):
    """The component behind free inputs, of which only the handshake of ``outputs`` is looked at.

    Payloads that wait at ``holding`` inputs hold; ``constant`` inputs never change.
    """

    def __init__(
        self,
        dut: wiring.Component,
        outputs: Sequence[str],
        *,
        holding: Sequence[str] = (),
        constant: Sequence[str] = (),
    ) -> None:
        self.dut, self.outputs, self.holding, self.constant = dut, outputs, holding, constant
        super().__init__(dut.signature)

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.dut = self.dut  # pyright: ignore[reportArgumentType] whatever component it is, it elaborates
        wiring.connect(m, wiring.flipped(self), self.dut)
        never_reset(m)
        for name in self.outputs:
            waiting_payload_holds(m, getattr(self.dut, name))
        later = Signal()
        m.d.sync += later.eq(1)
        for name in (*self.holding, *self.constant):
            port = getattr(self, name)
            stays = 1 if name in self.constant else port.valid & ~port.ready
            value = Value.cast(port if name in self.constant else port.payload)
            before, stayed = Signal.like(value, name=f"before_{name}"), Signal(name=f"stayed_{name}")
            m.d.sync += [before.eq(value), stayed.eq(stays)]
            assume(m, ~(later & stayed) | (value == before))
            if name in self.holding:
                assume(m, ~(later & stayed) | port.valid)
        return m


def gather_proof(source, link_bytes: int) -> HoldProof:
    return HoldProof(source.Gather(link_bytes), ["o"])


class DecodeProof(wiring.Component):
    """There is a place for every sub-block, and those that wait hold."""

    def __init__(self, source, params: Params) -> None:
        self.dut = source.Decode(params)
        super().__init__(self.dut.signature)

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.dut = opened = Opened(self.dut)
        wiring.connect(m, wiring.flipped(self), self.dut)
        never_reset(m)
        waiting_payload_holds(m, self.dut.o)
        queue = opened.module.submodules.leaving
        held = credit_queue_is_sound(m, queue, opened.open("leaving"))
        places, on_the_way = opened["places"], opened["s1_valid"] + queue.i.valid
        claim(
            m,
            places == queue.depth - held - on_the_way - queue.left,
            ~opened["step"] | (places != 0),
            ~queue.i.valid | (held < queue.depth),
        )
        return m


def fetch_proof(source) -> HoldProof:
    params = Params(max_batch=2, max_experts=4)
    return HoldProof(source.Fetch(params), ["o_request", "o_matrix", "o_expert"], constant=["config"])


def receive_proof(source, link_bytes: int) -> HoldProof:
    params = Params(link_bytes=link_bytes, max_batch=2, max_experts=4)
    return HoldProof(source.Receive(params), ["o_weights", "o_x", "o_route"], holding=["i"])


def send_proof(source, link_bytes: int) -> HoldProof:
    return HoldProof(source.Send(Params(link_bytes=link_bytes, max_batch=2)), ["o"])


def cut_proof(source, link_bytes: int) -> HoldProof:
    return HoldProof(source.Cut(link_bytes), ["o"])


@pytest.mark.formal
@pytest.mark.parametrize("link_bytes", [1, 4, 8])
def test_gather(link_bytes, tmp_path):
    prove(gather_proof(gather, link_bytes), tmp_path, depth=2)


@pytest.mark.formal
def test_decode(tmp_path):
    prove(DecodeProof(decode, Params(tokens=2, max_batch=4, max_width=512)), tmp_path, depth=2)


@pytest.mark.formal
def test_fetch(tmp_path):
    prove(fetch_proof(fetch), tmp_path, depth=2)


@pytest.mark.formal
@pytest.mark.parametrize("link_bytes", [4, 16])
@pytest.mark.parametrize(("proof", "source"), [(receive_proof, receive), (send_proof, send), (cut_proof, send)])
def test_messages(proof, source, link_bytes, tmp_path):
    prove(proof(source, link_bytes), tmp_path, depth=2)


@pytest.mark.broken
def test_the_proof_fails_on_a_broken_gather(tmp_path):
    bad = broken(gather, "else self.o.ready | ~self.o.valid", "else 1")
    with pytest.raises(Refuted):
        prove(gather_proof(bad, 4), tmp_path, depth=12)


@pytest.mark.broken
def test_the_proof_fails_on_a_broken_decode(tmp_path):
    bad = broken(decode, "step.eq(places >= 2)", "step.eq(places >= 1)")
    with pytest.raises((Refuted, RuntimeError)):
        prove(DecodeProof(bad, Params(max_batch=1)), tmp_path, depth=3)


BREAKS: list[tuple[Callable[..., HoldProof], object, str, str]] = [
    (fetch_proof, fetch, "with m.If(self.o_request.ready):", "with m.If(1):"),
    (receive_proof, receive, "gather.o.ready.eq(self.o_x.ready)", "gather.o.ready.eq(1)"),
    (send_proof, send, "free.eq(left == 0)", "free.eq(left <= 1)"),
    (
        cut_proof,
        send,
        "with m.If(self.o.valid):\n            m.d.sync += self.o.valid.eq(~self.o.ready)",
        "with m.If(0):\n            pass",
    ),
]


@pytest.mark.broken
@pytest.mark.parametrize(("proof", "source", "old", "new"), BREAKS)
def test_the_proof_fails_on_a_component_that_does_not_wait(proof, source, old, new, tmp_path):
    bad = broken(source, old, new)
    with pytest.raises(Refuted):
        prove(proof(bad) if proof is fetch_proof else proof(bad, 16), tmp_path, depth=14)
