"""Whole answers through the Verilated device: the bits of every logit are golden's, in tape and selected mode."""

import json
from pathlib import Path

import pytest
import torch

from host.runtime import Runtime
from sim.golden.device import GoldenTransport
from tests.sim.test_device import PARAMS, sim

MODELS = Path(__file__).parents[2] / "models"
TASKS = {task["kind"]: task for task in json.loads((MODELS / "tiny-moe-suite.json").read_text())["tasks"]}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The machine's other cores have other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def answers(transport, placement: str, kinds: list[str]) -> tuple[list[str], list[bytes]]:
    """Tasks side by side, which the device takes two tokens at a time, and their logits in order."""
    bits = []
    with Runtime.open(str(MODELS / "tiny-moe-q6k.gguf"), placement=placement, device=transport) as runtime:
        requests = [runtime.add(TASKS[kind]["prompt"], max_tokens=8) for kind in kinds]
        while runtime.live:
            for event in runtime.step():
                assert event.request.logits is not None
                bits.append(event.request.logits.tobytes())
        assert [each.text for each in runtime.ledger.check() if not each.holds] == []
        return [request.text for request in requests], bits


@pytest.mark.parametrize(("placement", "kinds"), [("selected", ["compare", "count"]), ("tape", ["compare"])])
def test_answers(placement, kinds):
    texts, bits = answers(sim(PARAMS), placement, kinds)
    assert texts == [TASKS[kind]["answer"] for kind in kinds]
    assert bits == answers(GoldenTransport(PARAMS), "selected", kinds)[1]
