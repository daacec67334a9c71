"""A payload that waits holds, at the outputs that are registers; the queues' own outputs are in ``test_queue``."""

import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw import decode, gather
from hw.formats.params import Params
from hw.layouts import WIDE_BEAT, WORD, link_beat, matrix_command, sub_block

from .prove import Refuted, broken, never_reset, prove, waiting_payload_holds


class HoldProof(wiring.Component):
    """The component behind free inputs, of which only the output's handshake is looked at."""

    def __init__(self, dut: wiring.Component, inputs: dict[str, object], output: object) -> None:
        self.dut, self.inputs = dut, inputs
        ports = {name: In(stream.Signature(shape)) for name, shape in inputs.items()}  # pyright: ignore[reportArgumentType] any shape
        super().__init__(ports | {"o": Out(stream.Signature(output))})  # pyright: ignore[reportArgumentType] any shape

    def elaborate(self, platform) -> Module:
        m = Module()
        m.submodules.dut = self.dut  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType] a component
        for name in self.inputs:
            wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(self.dut, name))
        wiring.connect(m, self.dut.o, wiring.flipped(self.o))  # pyright: ignore[reportAttributeAccessIssue] every dut has o
        never_reset(m)
        waiting_payload_holds(m, self.o)  # pyright: ignore[reportAttributeAccessIssue] made in __init__
        return m


def gather_proof(source, link_bytes: int) -> HoldProof:
    return HoldProof(source.Gather(link_bytes), {"i": link_beat(link_bytes)}, WIDE_BEAT)


def decode_proof(source, params: Params) -> HoldProof:
    return HoldProof(source.Decode(params), {"i": WORD, "i_matrix": matrix_command(params)}, sub_block(params))


@pytest.mark.formal
@pytest.mark.parametrize("link_bytes", [1, 4, 8])
def test_gather(link_bytes, tmp_path):
    prove(gather_proof(gather, link_bytes), tmp_path, depth=2)


@pytest.mark.formal
def test_decode(tmp_path):
    prove(decode_proof(decode, Params(tokens=2, max_batch=4, max_width=512)), tmp_path, depth=2)


@pytest.mark.formal
def test_the_proof_fails_on_a_broken_gather(tmp_path):
    bad = broken(gather, "self.i.ready.eq(self.o.ready | ~self.o.valid)", "self.i.ready.eq(1)")
    with pytest.raises(Refuted):
        prove(gather_proof(bad, 4), tmp_path, depth=12)


@pytest.mark.formal
def test_the_proof_fails_on_a_broken_decode(tmp_path):
    bad = broken(decode, "step.eq(self.o.ready | ~self.o.valid)", "step.eq(1)")
    with pytest.raises((Refuted, RuntimeError)):
        prove(decode_proof(bad, Params(max_batch=1)), tmp_path, depth=3)
