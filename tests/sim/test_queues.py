"""The engine's queues: what they held in simulation, and that deeper ones would save nothing."""

import dataclasses

import pytest
from amaranth.back import rtlil  # pyright: ignore[reportAttributeAccessIssue] the stubs lack it

from hw.engine import Engine
from hw.primitives.queue import Queue
from sim import queues
from sim.hls.expert import MODEL
from sim.queues import Mark
from tests import hls4ml

FEEDS = {name: feed for name, feed in queues.FEEDS.items() if feed.p_in == 1}
"""Not those that pause at random: a deep queue evens that out, and so does the store behind the link."""
SAVED = 0.001
"""Share of the cycles that deeper queues may save at most."""
LUT_MEMORY = 32
"""Payloads that a queue may hold for the price of the smallest: LUT memories are 16 deep on ECP5, 32 on 7-series."""


def test_parse():
    line = "TOP.engine.matrices.mac.tags$12.mark 4 2 0 17"
    assert queues.parse(line) == Mark("matrices.mac.tags", depth=4, most=2, full=0, refused=17)


@pytest.fixture(scope="module")
def figures():
    # Not optimised: the compiler takes most of the time.
    return queues.compare(MODEL, hls4ml.queue_params(1), b"e", feeds=FEEDS, optimise="-O0")


@pytest.fixture(scope="module")
def marks(figures):
    names = {field.name for field in dataclasses.fields(Mark)}
    return [Mark(**{name: mark[name] for name in names}) for mark in figures["marks"]]


def test_every_queue_has_its_mark(marks, monkeypatch):
    made = []
    elaborate = Queue.elaborate

    def noted(self: Queue, platform):
        made.append(self.depth)
        return elaborate(self, platform)

    monkeypatch.setattr(Queue, "elaborate", noted)
    rtlil.convert(Engine(hls4ml.queue_params(1)), name="engine")
    assert sorted(mark.depth for mark in marks) == sorted(made)
    assert len({mark.place for mark in marks}) == len(marks)


def test_marks_are_what_the_engine_counts(figures, marks):
    """Three queues by the monitors and by the engine's own counters."""
    held = {mark.place: mark.most for mark in marks}
    assert {place: held[place] for place in queues.COUNTED} == figures["counted"]


def test_no_queue_overflows_and_all_are_used(figures, marks):
    assert figures["bit_exact"]
    assert all(1 <= mark.most <= mark.depth for mark in marks)


def test_no_queue_is_deeper_than_it_needs(marks):
    """One that needs more than a LUT memory is filled at least by half."""
    assert not [mark for mark in marks if mark.depth > max(LUT_MEMORY, 2 * mark.most)]


def test_deeper_queues_save_nothing(figures):
    """With every queue at least twice as deep, the same layers take as long."""
    assert all(mark["deeper"] >= min(queues.DEEPEST, 2 * mark["depth"]) for mark in figures["marks"])
    for run in figures["runs"]:
        assert run["cycles"] - run["cycles_deeper"] <= SAVED * run["cycles"], run
