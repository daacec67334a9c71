"""The runtime on the tiny model: the same bits whoever else is there, and requests that come, go and fail."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from host.device import DeviceError
from host.link import LinkError
from host.model_file import ModelFileError
from host.routing_stats import BATCHES
from host.runtime import LayerPass, Request, RequestError, Runtime
from host.storage import StorageError, Store
from sim.golden.device import GoldenTransport

MODELS = Path(__file__).parents[2] / "models"
FILE = MODELS / "tiny-moe-q6k.gguf"
TASKS = json.loads((MODELS / "tiny-moe-suite.json").read_text(encoding="utf-8"))["tasks"]
CHOSEN = TASKS[4::5][:8]
PROMPTS = [task["prompt"] for task in CHOSEN]  # eight, of eight kinds
END = ord("\n")
CHUNK = 4
"""Smaller than the prompts, so that prompts and answers meet in one pass."""
WIDE = "golden:max_batch=64,tokens=16"
"""Takes every batch here at once."""


pytestmark = pytest.mark.usefixtures("one_thread")


def open_model(placement="selected", **options) -> Runtime:
    return Runtime.open(str(FILE), placement=placement, **{"chunk": CHUNK, **options})


class Log:
    """A runtime's steps, with the bits of every token's logits by request."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.bits: dict[Request, list[bytes]] = {}
        self.pieces: dict[Request, str] = {}

    def add(self, prompt, **options) -> Request:
        request = self.runtime.add(prompt, **{"max_tokens": 8, **options})
        self.bits[request], self.pieces[request] = [], ""
        return request

    def step(self) -> None:
        for event in self.runtime.step():
            self.pieces[event.request] += event.text
            if event.token is not None:
                assert event.request.logits is not None
                self.bits[event.request].append(event.request.logits.tobytes())
                assert event.token == event.request.tokens[-1]
            assert event.finished == event.request.done

    def finish(self) -> None:
        while self.runtime.live:
            self.step()


@pytest.fixture(scope="module")
def alone():
    """Each prompt's logits by itself: what must come out in any company."""
    found = []
    with open_model() as runtime:
        for prompt in PROMPTS:
            log = Log(runtime)
            request = log.add(prompt)
            log.finish()
            found.append(log.bits[request])
    return found


class Company(NamedTuple):
    """Eight together on a wide device: the runtime as it was at the end, its steps, and what the device ran."""

    runtime: Runtime
    log: Log
    passes: list[LayerPass]


@pytest.fixture(scope="module")
def company():
    with open_model(device=WIDE) as runtime:
        passes: list[LayerPass] = []
        runtime.watch = passes.append
        log = Log(runtime)
        together(log)
        return Company(runtime, log, passes)


def together(log: Log) -> list[list[bytes]]:
    requests = [log.add(prompt) for prompt in PROMPTS]
    log.finish()
    return [log.bits[request] for request in requests]


# The same bits.


@pytest.mark.parametrize(
    ("placement", "device"),
    [("selected", "golden:max_batch=3"), ("tape", "golden:max_batch=64,tokens=16,link_bytes=4")],
)
def test_eight_together_are_each_alone(alone, placement, device):
    with open_model(placement, device=device) as runtime:
        assert together(Log(runtime)) == alone


def test_eight_in_one_pass_are_each_alone(alone, company):
    assert list(company.log.bits.values()) == alone
    assert max(each.requests for each in company.passes) == 8


@pytest.mark.parametrize("seed", range(2))
def test_joining_and_leaving(alone, seed):
    """Requests join at random steps, among others that are cancelled at random steps."""
    rng = np.random.default_rng(seed)
    with open_model(device=WIDE) as runtime:
        log = Log(runtime)
        waiting, passing, kept = list(enumerate(PROMPTS)), [], {}
        while waiting or runtime.live:
            if waiting and rng.random() < 0.5:
                place, prompt = waiting.pop(0)
                kept[place] = log.add(prompt)
            if rng.random() < 0.3:
                passing.append(log.add(bytes(rng.integers(32, 127, 9)).decode()))
            if passing and rng.random() < 0.3:
                runtime.cancel(passing.pop())
            log.step()
        assert [log.bits[kept[place]] for place in range(len(PROMPTS))] == alone


def test_resident_is_near_and_says_the_same(alone):
    """int16 activations cost an expert 1.8e-4 relative RMS (docs/engine.md), and there are three layers of them."""
    with open_model("resident") as runtime:
        assert runtime.device is None
        assert runtime.store is None
        log = Log(runtime)
        others = together(log)
        assert {ended.finish_reason for ended in log.bits} == {"stop"}
        assert runtime.ledger.requested == runtime.passes == 0
    for mine, theirs in zip(others, alone, strict=True):
        a, b = (np.array([np.frombuffer(bits, np.float32) for bits in rows]) for rows in (mine, theirs))
        assert (a.argmax(-1) == b.argmax(-1)).all()
        assert 0 < np.sqrt(np.mean((a - b) ** 2)) < 3**0.5 * 1.8e-4 * np.sqrt(np.mean(b**2))


def test_other_chunks_are_near(alone):
    """Another chunk adds attention's float32 sums in another order, which may round an int16 activation otherwise."""
    with open_model(chunk=64, device=WIDE) as runtime:
        others = together(Log(runtime))
    a, b = (np.frombuffer(b"".join(bits for rows in log for bits in rows), np.float32) for log in (others, alone))
    assert 0 < np.sqrt(np.mean((a - b) ** 2)) < 3**0.5 * 1.8e-4 * np.sqrt(np.mean(b**2))


@pytest.mark.parametrize("placement", ["resident", "selected"])
def test_logits_of_whole_prompts(alone, placement):
    with open_model(placement) as runtime:
        every = runtime.logits([list(prompt.encode()) for prompt in PROMPTS])
        assert not runtime.live
        assert [len(rows) for rows in every] == [len(prompt) for prompt in PROMPTS]
        if placement != "resident":
            # The last chunk of a prompt asks for one row here and for all there; the row is multiplied by itself in
            # the first case, so its sum may be added in another order.
            for rows, bits in zip(every, alone, strict=True):
                np.testing.assert_allclose(rows[-1], np.frombuffer(bits[0], np.float32), rtol=1e-5, atol=1e-5)


# What comes out.


def test_suite_kinds(company):
    for request, task in zip(company.log.pieces, CHOSEN, strict=True):
        assert request.text == company.log.pieces[request] == task["answer"] == task["generated"]
        assert request.tokens == [*task["answer"].encode(), END]
        assert (request.done, request.finish_reason, request.error) == (True, "stop", None)


def test_stop_strings():
    with open_model("resident") as runtime:
        log = Log(runtime)
        cases = [
            (log.add("copy stfab=", stop=["fa"]), "st", "stop"),
            (log.add("copy stfab=", stop=["fx", "bz"]), "stfab", "stop"),  # b is withheld until the end
            (log.add("copy stfab=", stop=["", "f", "t"]), "s", "stop"),
            (log.add("copy stfab=", max_tokens=2, stop=["tx"]), "st", "length"),  # so is t
            (log.add("copy stfab=", max_tokens=1), "s", "length"),
        ]
        log.finish()
        for request, text, reason in cases:
            assert (request.text, log.pieces[request], request.finish_reason) == (text, text, reason)


def test_end_of_the_context():
    with open_model("resident") as runtime:
        assert runtime.context == 128
        request = runtime.add("a" * 125, max_tokens=50)
        runtime.tokenizer.ends = set()
        while runtime.live:
            runtime.step()
        assert (len(request.tokens), request.finish_reason) == (3, "length")


def test_temperature():
    """A seed fixes what is drawn, in any company; the frequencies are those of the softmax."""
    with open_model("resident", chunk=64) as runtime:
        first = [runtime.add("compare 45 54=", max_tokens=1, temperature=50.0, seed=seed) for seed in range(150)]
        while runtime.live:
            runtime.step()
        again = runtime.add("compare 45 54=", max_tokens=1, temperature=50.0, seed=17)
        runtime.step()
        assert again.tokens == first[17].tokens
        assert again.logits is not None
        logits = again.logits.astype(np.float64) / 50
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        drawn = np.bincount([request.tokens[0] for request in first], minlength=256) / len(first)
        # Of 150 draws a share p is off by sqrt(p (1 - p) / 150) on average, 5 sigma at most.
        assert (np.abs(drawn - chances) <= 5 * np.sqrt(chances * (1 - chances) / 150) + 1 / 150).all()
        cold = runtime.add("compare 45 54=", max_tokens=1, temperature=1e-3, seed=1)
        runtime.step()
        assert cold.text == "<"


# The account.


def test_ledger(company):
    """Bytes requested are those of the experts that the routers chose, each once a pass."""
    runtime, passes = company.runtime, company.passes
    expert = runtime.model.layers[0].expert_bytes
    assert len(passes) == runtime.passes
    assert sum(each.experts for each in passes) * expert == runtime.ledger.requested
    assert [each for each in runtime.ledger.check() if not each.holds] == []
    assert sorted(runtime.ledgers) == [0, 1, 2]
    assert sum(each.requested for each in runtime.ledgers.values()) == runtime.ledger.requested
    assert sum(each.tokens for each in passes) == 3 * sum(runtime.routing.tokens.values())


def test_tape_requests_everything():
    with open_model("tape", device=WIDE) as runtime:
        runtime.add("copy ab=", max_tokens=1)
        while runtime.live:
            runtime.step()
        assert runtime.ledger.requested == 2 * runtime.model.experts_bytes  # eight tokens in two chunks
        assert runtime.ledger.drained > 0


def test_progress_of_a_layer():
    with open_model() as runtime:
        seen = []
        runtime.layer_progress = lambda *each: seen.append(each)
        runtime.add("copy ab=", max_tokens=1)
        runtime.step()
        assert {layer for layer, _, _ in seen} == {0, 1, 2}
        assert all(0 < done <= total for _, done, total in seen)


def test_routing(company):
    """Counted from the same routes as the ledger, with unions of requests that decoded together."""
    report = company.runtime.routing.report()
    json.dumps(report)
    assert report["layers"] == [0, 1, 2]
    tokens = report["tokens"]
    assert tokens["prefill"] == sum(len(prompt) for prompt in PROMPTS)
    every = np.zeros((3, 8), int)
    for each in company.passes:
        every[each.layer] += np.bincount(each.chosen.ravel(), minlength=8)
    assert report["counts"] == every.tolist()
    one = report["unions"][BATCHES.index(1)]["all"]
    assert (one["n"], one["mean"], one["min"], one["max"]) == (3 * tokens["decode"], 2.0, 2, 2)


def test_cache_in_front_of_the_file():
    """Whatever reads as a store does may stand before the file."""
    made = []

    class Counting(Store):
        def submit(self, offset, length):
            made.append(length)
            super().submit(offset, length)

    def cache(store, model):
        store.close()
        return Counting(FILE)

    with open_model(cache=cache) as runtime:
        runtime.add("copy ab=", max_tokens=1)
        while runtime.live:
            runtime.step()
        assert sum(made) == runtime.ledger.requested


# What goes wrong.


@pytest.mark.parametrize(
    ("prompt", "options", "part"),
    [
        ("", {}, "the prompt has no tokens"),
        ([3, 256], {}, "token 256 of the prompt is not in 0..255"),
        ([-1], {}, "token -1 of the prompt is not in 0..255"),
        ("a" * 128, {}, "the prompt has 128 tokens, the model's context holds 128 with the answer"),
        ("a", {"max_tokens": 0}, "max_tokens must be 1 or more, not 0"),
        ("a", {"temperature": -1.0}, "temperature must be 0 or more, not -1.0"),
        ("a", {"temperature": float("nan")}, "temperature must be 0 or more, not nan"),
    ],
)
def test_refused_requests(prompt, options, part):
    with open_model("resident") as runtime:
        with pytest.raises(RequestError, match=part.replace("(", r"\(")):
            runtime.add(prompt, **{"max_tokens": 1, **options})
        assert runtime.live == []


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"placement": "fast"}, "placement must be one of resident, selected, tape, not 'fast'"),
        ({"dtype": "int8"}, "dtype must be float32, float16 or bfloat16, not 'int8'"),
        ({"chunk": 0}, "chunk must be 1 or more, not 0"),
    ],
)
def test_refused_options(options, part):
    with pytest.raises(ValueError, match=part):
        open_model(**options)


def test_what_cannot_be_opened(tmp_path):
    with pytest.raises(DeviceError, match="needs 8: load one built with max_experts=8"):
        open_model(device="golden:max_experts=4")
    with pytest.raises(ModelFileError, match="No such file"):
        Runtime.open(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize(
    ("error", "call"), [(DeviceError, 1), (LinkError, 3), (StorageError, 5), (KeyboardInterrupt, 8)]
)
def test_failed_step_can_be_taken_again(alone, error, call):
    """The third call is the last layer of the first step, the fifth the middle of the second."""
    with open_model(device=WIDE) as runtime:
        assert runtime.device is not None
        log = Log(runtime)
        requests = [log.add(prompt) for prompt in PROMPTS[:3]]
        run, calls = runtime.device.run_layer, []

        def fail(*args, **options):
            calls.append(1)
            if len(calls) == call:
                raise error("on purpose")
            return run(*args, **options)

        runtime.device.run_layer = fail
        with pytest.raises(error, match="on purpose"):
            log.finish()
        assert runtime.live == requests
        log.finish()
        assert [log.bits[request] for request in requests] == alone[:3]
        prompts, answers = (
            sum(map(len, tokens)) for tokens in zip(*((r.prompt, r.tokens) for r in requests), strict=True)
        )
        assert runtime.routing.tokens == {"prefill": prompts, "decode": answers - len(requests)}


def test_damaged_link(alone):
    """Bytes that are lost on the way are sent again, and the same bits come out."""

    class Lossy(GoldenTransport):
        count = 0

        def write(self, data):
            self.count += 1
            super().write(bytes(len(data)) if self.count % 50 == 0 else data)

    with open_model() as runtime:
        params = runtime.device.params if runtime.device else None
        assert params is not None
    with open_model(device=Lossy(params)) as runtime:
        log = Log(runtime)
        request = log.add(PROMPTS[0])
        log.finish()
        assert log.bits[request] == alone[0]
        assert runtime.ledger.link_resent > 0


@pytest.mark.parametrize("placement", ["resident", "selected"])
def test_numbers_that_are_none_end_one_request(alone, placement):
    with open_model(placement) as runtime:
        poison = torch.tensor(float("inf"))
        runtime.network.model.embed_tokens.register_forward_hook(
            lambda _, given, out: torch.where((given[0] == ord("~"))[..., None], poison, out)
        )
        log = Log(runtime)
        requests = [log.add(prompt) for prompt in PROMPTS[:3]]
        bad = log.add("copy a~b=")
        log.finish()
        assert bad.finish_reason == "error"
        assert "finite" in (bad.error or "")
        if placement == "selected":
            assert [log.bits[request] for request in requests] == alone[:3]


def test_cancel():
    with open_model("resident") as runtime:
        one, two = (runtime.add("copy stf=", max_tokens=8) for _ in range(2))
        while not one.tokens:
            runtime.step()
        for _ in range(2):
            runtime.cancel(one)
        assert (one.finish_reason, one.text, runtime.live) == ("cancelled", "s", [two])
        while runtime.live:
            runtime.step()
        assert (one.text, two.text, two.finish_reason) == ("s", "stf", "stop")
        runtime.cancel(two)
        assert two.finish_reason == "stop"
        assert runtime.step() == []
