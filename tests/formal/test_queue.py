"""The queue loses, repeats and reorders nothing, whatever the two sides do."""

import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hw.primitives import queue

from .prove import Opened, Refuted, broken, claim, never_reset, prove, waiting_payload_holds


class QueueProof(wiring.Component):
    """One item, any that ``pick`` chooses while none is watched, is followed from its way in to its way out."""

    pick: Signal
    i: stream.Interface
    o: stream.Interface

    def __init__(self, source, depth: int) -> None:
        self.source, self.depth = source, depth
        payload = stream.Signature(3)
        super().__init__({"pick": In(1), "i": In(payload), "o": Out(payload)})

    def elaborate(self, platform) -> Module:
        m = Module()
        depth = self.depth
        dut = self.source.Queue(3, depth)
        m.submodules.dut = opened = Opened(dut)
        wiring.connect(m, wiring.flipped(self.i), dut.i)
        wiring.connect(m, dut.o, wiring.flipped(self.o))
        never_reset(m)
        waiting_payload_holds(m, dut.o)

        storage = opened.module.submodules.storage
        read, write = storage.read_ports[0].addr, storage.write_ports[0].addr
        spy = storage.read_port(domain="comb")
        push, pop = dut.i.valid & dut.i.ready, dut.o.valid & dut.o.ready
        watched = Signal()
        item = Signal(3)
        ahead = Signal(range(depth + 1))  # items that leave before the watched one
        with m.If(pop & watched):
            m.d.sync += [ahead.eq(ahead - 1), watched.eq(ahead != 0)]
        with m.If(push & self.pick & ~watched):
            m.d.sync += [watched.eq(1), item.eq(dut.i.payload), ahead.eq(dut.level - pop)]
        place = read + ahead
        m.d.comb += spy.addr.eq(place - depth * (place >= depth))
        # What is to be shown: the watched item leaves after exactly those that came before it, as it came.
        claim(
            m,
            ~(watched & (ahead == 0)) | (dut.o.valid & (dut.o.payload == item)),
            ~watched | (dut.level > ahead),
        )
        # What induction needs to know of a state.
        claim(
            m,
            dut.level <= depth,
            (read < depth) & (write < depth),
            (read + dut.level == write) | (read + dut.level == write + depth),
            opened["held"] == 1 << dut.level,
            dut.o.valid == (dut.level != 0),
            dut.i.ready == (dut.level != depth),
            ~watched | (spy.data == item),
        )
        return m


@pytest.mark.formal
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_queue(depth, tmp_path):
    prove(QueueProof(queue, depth), tmp_path, depth=4)


BREAKS = [
    ("self.i.ready.eq(~held[self.depth])", "self.i.ready.eq(1)"),
    ("self.o.valid.eq(~held[0])", "self.o.valid.eq(~held[1])"),
    ("write.en.eq(push)", "write.en.eq(self.i.valid)"),
    ("Mux(push, held << 1, held >> 1)", "held << 1"),
    ("Mux(place == self.depth - 1, 0, place + 1)", "place + 1"),
]


@pytest.mark.broken
@pytest.mark.parametrize(("old", "new"), BREAKS)
def test_the_proof_fails_on_a_broken_queue(old, new, tmp_path):
    with pytest.raises(Refuted):
        prove(QueueProof(broken(queue, old, new), 3), tmp_path, depth=12)
