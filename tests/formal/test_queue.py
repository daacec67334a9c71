"""The queues lose, repeat and reorder nothing, whatever the two sides do."""

import pytest
from amaranth.hdl import Const, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.primitives import queue

from .prove import (
    Opened,
    Refuted,
    assume,
    broken,
    claim,
    credit_queue_is_sound,
    never_reset,
    prove,
    queue_is_sound,
    waiting_payload_holds,
)


class QueueProof(wiring.Component):
    """One item, any that ``pick`` chooses while none is watched, is followed from its way in to its way out."""

    pick: Signal
    i: stream.Interface
    o: stream.Interface

    def __init__(self, dut) -> None:
        self.dut = dut
        payload = stream.Signature(3)
        super().__init__({"pick": In(1), "i": In(payload), "o": Out(payload)})

    def elaborate(self, platform) -> Module:
        m = Module()
        dut, depth = self.dut, self.dut.depth
        m.submodules.dut = opened = Opened(dut)
        wiring.connect(m, wiring.flipped(self.i), dut.i)
        wiring.connect(m, dut.o, wiring.flipped(self.o))
        never_reset(m)
        waiting_payload_holds(m, dut.o)
        # What induction needs to know of a state; how many are held; one came just now, and is not offered yet.
        if hasattr(dut, "left"):
            held, came = credit_queue_is_sound(m, dut, opened), opened["came"]
            assume(m, ~dut.i.valid | (held < depth))  # the writer counts the places
        else:
            queue_is_sound(m, dut, opened)
            held, came = dut.level, Const(0)

        storage = opened.module.submodules.storage
        read = storage.read_ports[0].addr
        spy = storage.read_port(domain="comb")
        push, pop = dut.i.valid & dut.i.ready, dut.o.valid & dut.o.ready
        watched = Signal()
        item = Signal(3)
        ahead = Signal(range(depth + 1))  # items that leave before the watched one
        with m.If(pop & watched):
            m.d.sync += [ahead.eq(ahead - 1), watched.eq(ahead != 0)]
        with m.If(push & self.pick & ~watched):
            m.d.sync += [watched.eq(1), item.eq(dut.i.payload), ahead.eq(held - pop)]
        place = read + ahead
        m.d.comb += spy.addr.eq(place - depth * (place >= depth))
        # What is to be shown: the watched item leaves after exactly those that came before it, as it came.
        claim(
            m,
            ~(watched & (ahead == 0)) | (dut.o.valid & (dut.o.payload == item)) | (came & (held == 1)),
            ~watched | (held > ahead),
            ~watched | (spy.data == item),
        )
        return m


@pytest.mark.formal
@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("kind", ["Queue", "CreditQueue"])
def test_queue(kind, depth, tmp_path):
    prove(QueueProof(getattr(queue, kind)(3, depth)), tmp_path, depth=4)


BREAKS = [
    ("self.i.ready.eq(~held[self.depth])", "self.i.ready.eq(1)"),
    ("self.o.valid.eq(~held[0])", "self.o.valid.eq(~held[1])"),
    ("write.en.eq(push)", "write.en.eq(self.i.valid)"),
    ("Mux(push, held << 1, held >> 1)", "held << 1"),
    ("Mux(place == depth - 1, 0, place + 1)", "place + 1"),
]
BREAKS_OF_CREDIT = [
    ("(only_one & pop)", "0"),
    ("~came & Mux(self.left, held[1], held[0])", "held[0]"),
    ("Mux(came, held[0], held[2])", "held[0]"),
    ("came.eq(self.i.valid)", "came.eq(0)"),
    ("Mux(place == depth - 1, 0, place + 1)", "place + 1"),
]


@pytest.mark.broken
@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [("Queue", *each) for each in BREAKS] + [("CreditQueue", *each) for each in BREAKS_OF_CREDIT],
)
def test_the_proof_fails_on_a_broken_queue(kind, old, new, tmp_path):
    with pytest.raises(Refuted):
        prove(QueueProof(getattr(broken(queue, old, new), kind)(3, 3)), tmp_path, depth=12)
