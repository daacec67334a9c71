"""``emufpga serve`` through the official client: the same text as the runtime alone, in any company, whatever fails."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from host import serve, serve_api
from host.cli import main
from host.device import DeviceError, Ledger
from host.link import LinkError
from host.runtime import Runtime
from host.serve import Server
from host.serve_worker import Piece
from host.storage import StorageError

from .test_runtime import FILE, PROMPTS, TASKS, WIDE

ROOT = Path(__file__).parents[2]
NAME = "tiny-moe-q6k"
TOKENS = 12
LIMIT = 300.0
"""Seconds that anything may take before it is called hanging; nothing is timed."""


pytestmark = pytest.mark.usefixtures("one_thread")


class Served:
    """A server in a thread of its own.

    Attributes
    ----------
    runtime, server
        What runs.
    port
        Where.
    said
        What it told.
    before_step
        Called by the runtime's thread before each step.
    companies
        Requests that shared a layer, of every layer that ran.
    """

    def __init__(self, **options) -> None:
        self.runtime = Runtime.open(str(FILE), device=WIDE, chunk=4)
        self.said: list[str] = []
        settings: dict[str, Any] = dict(name=NAME, max_requests=8, queue=8, grace=LIMIT, say=self.said.append)
        self.server = Server(self.runtime, **{**settings, **options})
        self.before_step: Callable[[], object] = lambda: None
        self.companies: list[int] = []
        step, watch = self.runtime.step, self.runtime.watch
        assert watch is not None

        def stepped():
            self.before_step()
            return step()

        def watched(done):
            self.companies.append(done.requests)
            watch(done)

        self.runtime.step, self.runtime.watch = stepped, watched
        self._listener = serve._bind("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.run(self._listener, signals=False)))
        self._thread.start()
        self.wait(lambda: any("serving on" in line for line in self.said))

    def stop(self) -> None:
        """As the first signal does, and the second if it is called again."""
        loop = self.server.loop
        assert loop is not None
        loop.call_soon_threadsafe(self.server.stop)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self.stop()
            self.stop()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        assert self.server.join()
        self.runtime.close()
        self._listener.close()

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end, "it hangs"
            time.sleep(0.005)

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=LIMIT)

    def get(self, path: str, body: object = None) -> tuple[int, dict[str, str], str]:
        """Status, headers and text of an answer, without the official client."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, data)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Sums of the metrics over all their labels but these: outcome, error."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")[2]):
            for sample in family.samples:
                label = sample.labels.get("outcome") or sample.labels.get("error")
                name = f"{sample.name}:{label}" if label else sample.name
                sums[name] = sums.get(name, 0) + sample.value
        return sums


@contextlib.contextmanager
def served(**options) -> Iterator[Served]:
    one = Served(**options)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture(scope="module")
def shared():
    with served() as one:
        yield one


@pytest.fixture
def endless(shared):
    """Nothing ends a text but its length."""
    ends, shared.runtime.tokenizer.ends = shared.runtime.tokenizer.ends, set()
    yield shared
    shared.wait(lambda: not shared.server.worker.live)
    shared.runtime.tokenizer.ends = ends
    shared.before_step = lambda: None


@pytest.fixture
def client(shared):
    with shared.client() as one:
        yield one


@pytest.fixture(scope="module")
def alone():
    """Each prompt's text by itself, from a runtime that nothing else uses; nothing ends it but its length."""
    texts = []
    with Runtime.open(str(FILE), device=WIDE, chunk=4) as runtime:
        runtime.tokenizer.ends = set()
        for prompt in PROMPTS:
            request = runtime.add(prompt, max_tokens=TOKENS)
            while runtime.live:
                runtime.step()
            texts.append(request.text)
    return texts


def completion(client, prompt=PROMPTS[0], **options) -> Any:
    return client.completions.create(**{"model": NAME, "prompt": prompt, "temperature": 0, **options})


def chat(client, text=PROMPTS[0], **options) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(**{"model": NAME, "messages": messages, "temperature": 0, **options})


# What comes out.


def test_answers_are_the_tasks(client):
    for task in TASKS[4::15]:
        whole = completion(client, task["prompt"])
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (task["answer"], "stop")
        said = chat(client, task["prompt"])
        assert (said.choices[0].message.content, said.choices[0].message.role) == (task["answer"], "assistant")
        assert said.usage.prompt_tokens == len(task["prompt"])
        assert said.usage.completion_tokens == len(task["answer"]) + 1  # the end
        assert said.usage.total_tokens == said.usage.prompt_tokens + said.usage.completion_tokens


@pytest.mark.parametrize("usage", [False, True])
def test_streams(endless, client, alone, usage):
    """Token by token: as many parts as tokens, then the reason, then the counts."""
    options = {"stream": True, **({"stream_options": {"include_usage": True}} if usage else {})}
    parts = list(completion(client, max_tokens=TOKENS, **options))
    chats = list(chat(client, max_completion_tokens=TOKENS, **options))
    if usage:
        for last in (parts.pop(), chats.pop()):
            assert last.choices == []
            assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPTS[0]), TOKENS)
    assert "".join(part.choices[0].text for part in parts) == alone[0]
    assert chats[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in chats) == alone[0]
    for each in (parts, chats):
        assert [part.choices[0].finish_reason for part in each] == [None] * (len(each) - 1) + ["length"]
        assert len({part.id for part in each}) == 1
        assert all(part.usage is None for part in each)


def test_tokens_as_prompt(client):
    assert completion(client, list(b"add 47 38=")).choices[0].text == "85"
    assert completion(client, [list(b"add 47 38=")]).choices[0].text == "85"
    assert completion(client, ["add 47 38="]).choices[0].text == "85"


def test_messages_are_joined_without_a_template(client):
    parts = [{"type": "text", "text": "add 47"}, {"type": "text", "text": " 38="}]
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model=NAME, messages=messages, temperature=0)
    assert answer.usage.prompt_tokens == len("x\nadd 47 38=")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, stream):
    for stop, text in (("fa", "st"), (["fx", "bz"], "stfab"), (["f", "t"], "s")):
        answer = completion(client, "copy stfab=", stop=stop, stream=stream)
        parts = list(answer) if stream else [answer]
        assert "".join(part.choices[0].text for part in parts) == text
        assert parts[-1].choices[0].finish_reason == "stop"


def test_seeds(endless, client):
    """A seed fixes what is drawn at OpenAI's usual temperature, which is 1."""
    with Runtime.open(str(FILE), device=WIDE, chunk=4) as runtime:
        runtime.tokenizer.ends = set()
        request = runtime.add("a", max_tokens=TOKENS, temperature=1.0, seed=7)
        while runtime.live:
            runtime.step()
    texts = [completion(client, "a", temperature=None, seed=s, max_tokens=TOKENS).choices[0].text for s in (7, -1)]
    assert texts[0] == request.text
    assert texts[1] != texts[0]


def test_limits_by_default(endless, client):
    """Completions: 16 tokens, or what the context holds; chats: that."""
    assert completion(client, "a").usage.completion_tokens == 16
    assert completion(client, "a" * 120).usage.completion_tokens == 8
    assert chat(client, "a" * 120).usage.completion_tokens == 8


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


# Together.

KILLED = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
options = dict(max_tokens=100, temperature=0, stream=True)
for part in client.completions.create(model=sys.argv[2], prompt=sys.argv[3], **options):
    print(part.choices[0].text, flush=True)
"""


def test_eight_clients_one_killed(endless, alone):
    """The client is a process, killed when all eight are in the middle of their answers."""
    before, worker, started = endless.metrics(), endless.server.worker, set()

    def hold():
        killed = next((each for each in endless.runtime.live if each.max_tokens > TOKENS), None)
        if killed is None:
            return
        if len(killed.tokens) == 2:
            endless.wait(lambda: worker.live + worker.queued == 8)
        if len(killed.tokens) == TOKENS:  # the others, who came later, have not ended yet
            endless.wait(lambda: bool(worker._leaving))

    async def one(client, number):
        stream = await completion(client, PROMPTS[number], max_tokens=TOKENS, stream=True)
        text = ""
        async for part in stream:
            text += part.choices[0].text
            started.add(number)
        return text

    async def seven(url, victim):
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=LIMIT) as client:
            tasks = [asyncio.create_task(one(client, number)) for number in range(1, 8)]
            while len(started) < 7 and not any(task.done() for task in tasks):
                await asyncio.sleep(0.001)
            assert not any(task.done() for task in tasks)
            victim.kill()
            return await asyncio.gather(*tasks)

    endless.before_step = hold
    url = f"http://127.0.0.1:{endless.port}/v1"
    command = [sys.executable, "-c", KILLED, url, NAME, PROMPTS[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline(), "no first token"
        texts = asyncio.run(seven(url, victim))
    assert victim.returncode == -signal.SIGKILL
    assert texts == alone[1:]
    endless.wait(lambda: not worker.live)
    after = endless.metrics()
    assert after["emufpga_requests_total:cancelled"] - before["emufpga_requests_total:cancelled"] == 1
    assert after["emufpga_requests_total:length"] - before["emufpga_requests_total:length"] == 7
    assert max(endless.companies) == 8
    generated = after["emufpga_generated_tokens_total"] - before["emufpga_generated_tokens_total"]
    assert 7 * TOKENS < generated <= 8 * TOKENS + 1  # it left before the step after next


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token(endless, stream):
    """A closed connection is noticed while there is nothing to write."""
    before, reached, go_on = endless.metrics(), threading.Event(), threading.Event()

    def hold():
        reached.set()
        assert go_on.wait(LIMIT)

    endless.before_step = hold
    connection = http.client.HTTPConnection("127.0.0.1", endless.port, timeout=LIMIT)
    body = {"model": NAME, "prompt": "a" * 20, "max_tokens": 90, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body))
    assert reached.wait(LIMIT)
    connection.close()
    endless.wait(lambda: bool(endless.server.worker._leaving))
    go_on.set()
    endless.wait(lambda: not endless.server.worker.live)
    after = endless.metrics()
    assert after["emufpga_requests_total:cancelled"] - before["emufpga_requests_total:cancelled"] == 1
    assert after["emufpga_generated_tokens_total"] == before["emufpga_generated_tokens_total"]


def test_queue():
    """One runs, one waits, the third is told to come again; one that waits may go."""
    go_on = threading.Event()
    with served(max_requests=1, queue=1) as one, one.client() as client:
        one.before_step = lambda: go_on.wait(LIMIT)
        worker, answers = one.server.worker, []

        def ask():
            answers.append(completion(client).choices[0].text)

        first = threading.Thread(target=ask)
        first.start()
        one.wait(lambda: worker.live == 1)
        leaving = http.client.HTTPConnection("127.0.0.1", one.port, timeout=LIMIT)
        leaving.request("POST", "/v1/completions", json.dumps({"model": NAME, "prompt": "a"}))
        one.wait(lambda: worker.queued == 1)
        with pytest.raises(openai.RateLimitError, match="1 requests are running and 1 waiting") as caught:
            completion(client)
        assert caught.value.response.headers["retry-after"] == "1"
        leaving.close()
        one.wait(lambda: worker.queued == 0)
        second = threading.Thread(target=ask)
        second.start()
        one.wait(lambda: worker.queued == 1)
        go_on.set()
        for thread in (first, second):
            thread.join(LIMIT)
        assert answers == [TASKS[4]["answer"]] * 2
        assert max(one.companies) == 1
        counts = one.metrics()
        assert [counts[f"emufpga_requests_total:{name}"] for name in ("stop", "cancelled", "refused")] == [2, 1, 1]


def test_text_waits_for_a_slow_client():
    async def slow():
        outlet = serve_api._Outlet()
        for number, text in enumerate("abc", 1):
            outlet.tell(Piece(text, number, "stop" if number == 3 else None))
        await asyncio.sleep(0)
        return await outlet.next()

    assert asyncio.run(slow()) == Piece("abc", 3, "stop")


def test_client_that_takes_nothing(monkeypatch):
    """It loses its request; nobody waits for it."""
    monkeypatch.setattr(serve_api, "WRITE_SECONDS", 0.01)
    cancelled, taken = [], []

    async def events():
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    async def receive() -> Any:
        return await asyncio.Event().wait()

    async def send(message):
        taken.append(message)
        if len(taken) == 2:
            await asyncio.Event().wait()

    stream = serve_api._EventStream(events(), lambda: cancelled.append(True))
    asyncio.run(asyncio.wait_for(stream({}, receive, send), LIMIT))
    assert (len(taken), cancelled) == (2, [True])


def test_keeps_a_silent_stream_alive(endless, monkeypatch):
    monkeypatch.setattr(serve_api, "KEEP_ALIVE_SECONDS", 0.01)
    endless.before_step = lambda: time.sleep(0.05)
    body = {"model": NAME, "prompt": "a", "max_tokens": 1, "stream": True, "temperature": 0}
    text = endless.get("/v1/completions", body)[2]
    assert text.startswith(": nothing yet\n\n")
    assert text.endswith("data: [DONE]\n\n")


# What is refused.


@pytest.mark.parametrize(
    ("change", "param", "part"),
    [
        ({"prompt": None}, "prompt", "prompt: must be one text, or one list of tokens"),
        ({"prompt": ["a", "b"]}, "prompt", "send several as requests of their own"),
        ({"prompt": ""}, "prompt", "the prompt has no tokens"),
        ({"prompt": [300]}, "prompt", "token 300 of the prompt is not in 0..255"),
        ({"prompt": "a" * 128}, "prompt", "the prompt has 128 tokens, the model's context holds 128"),
        ({"prompt": "a" * 100, "max_tokens": 29}, "prompt", "100 of the prompt leave 28, 29 were asked for"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: Input should be greater than or equal to 1"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens: Input should be a valid integer"),
        ({"temperature": -1}, "temperature", "temperature: Input should be greater than or equal to 0"),
        ({"seed": 1.5}, "seed", "seed: Input should be a valid integer"),
        ({"stop": [""]}, "stop", "stop: must be a text, or a list of 4 at most"),
        ({"stop": list("abcde")}, "stop", "stop: must be a text, or a list of 4 at most"),
        ({"n": 2}, "n", "n: 2 is not supported here: leave it out, or give 1"),
        ({"n": True}, "n", "n: true is not supported"),
        ({"top_p": 0.9}, "top_p", "top_p: 0.9 is not supported here: leave it out, or give 1"),
        ({"logprobs": 0}, "logprobs", "logprobs: 0 is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", 'logit_bias: {"5": 1} is not supported'),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream: true"),
        ({"model": 1}, "model", "model: Input should be a valid string"),
    ],
)
def test_bad_completions(shared, change, param, part):
    status, _, text = shared.get("/v1/completions", {"model": NAME, "prompt": "a", **change})
    error = json.loads(text)["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert part in error["message"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a list of parts of type 'text'"),
        ({"tools": [{"type": "function"}]}, "tools: "),
        ({"response_format": {"type": "json_object"}}, 'or give {"type": "text"}'),
        ({"max_completion_tokens": 200}, "leave 127, 200 were asked for"),
    ],
)
def test_bad_chats(shared, change, part):
    body = {"model": NAME, "messages": [{"role": "user", "content": "a"}], **change}
    status, _, text = shared.get("/v1/chat/completions", body)
    assert status == 400
    assert part in json.loads(text)["error"]["message"]


def test_fields_that_ask_for_nothing(client):
    """Those of the list with the values that change nothing, and any that nobody knows."""
    extra = {name: values[-1] for name, values in serve_api.NEUTRAL.items()} | {"user": "me", "unheard_of": [1]}
    assert completion(client, "add 47 38=", extra_body=extra).choices[0].text == "85"
    nulls = dict.fromkeys([*serve_api.NEUTRAL, "max_tokens", "stop", "seed", "stream", "stream_options"])
    assert completion(client, "add 47 38=", extra_body=nulls).choices[0].text == "85"


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("/v1/completions", b"{", 400, "the body: Invalid JSON"),
        ("/v1/completions", {"model": "gpt", "prompt": "a"}, 404, "model 'gpt': this server has 'tiny-moe-q6k'"),
        ("/v1/completions", None, 405, "GET /v1/completions: Method Not Allowed"),
        ("/v1/embeddings", {}, 404, "POST /v1/embeddings: Not Found"),
        ("/v1/completions", b" " * 2000, 413, "longer than 1,000 bytes"),
    ],
)
def test_bad_requests(shared, monkeypatch, path, body, status, part):
    monkeypatch.setattr(serve_api, "BODY_BYTES", 1000)
    before = shared.metrics()
    got, _, text = shared.get(path, body)
    assert got == status
    assert part in json.loads(text)["error"]["message"]
    refused = shared.metrics()["emufpga_requests_total:refused"] - before["emufpga_requests_total:refused"]
    assert refused == (status in (400, 413) or "gpt" in part)


def test_body_that_does_not_come(shared, monkeypatch):
    monkeypatch.setattr(serve_api, "BODY_SECONDS", 0.05)
    with socket.create_connection(("127.0.0.1", shared.port), LIMIT) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b"HTTP/1.1 408" in connection.recv(4096)


# What fails.


@pytest.mark.parametrize("kind", [DeviceError, LinkError, StorageError])
def test_step_that_fails_once(shared, client, monkeypatch, kind):
    """Nobody notices, but the metrics."""
    before, device, calls = shared.metrics(), shared.runtime.device, []
    real = device.run_layer

    def fail_once(*given, **options):
        calls.append(1)
        if len(calls) == 8:  # the second layer of the third step
            raise kind("a bird sat on it")
        return real(*given, **options)

    monkeypatch.setattr(device, "run_layer", fail_once)
    assert completion(client, "add 47 38=").choices[0].text == "85"
    name = f"emufpga_step_failures_total:{kind.__name__}"
    assert shared.metrics()[name] - before.get(name, 0) == 1
    assert shared.get("/health")[0] == 200


def test_step_that_fails_for_good(shared, client, monkeypatch):
    """Its requests end with what the device said; the next ones are served as soon as it answers again."""
    device, before = shared.runtime.device, shared.metrics()
    with monkeypatch.context() as broken:
        broken.setattr(device, "run_layer", _raise(LinkError("golden: silent; power it off and on")))
        broken.setattr(device, "reset", _raise(LinkError("golden: still silent")))
        with pytest.raises(openai.InternalServerError, match="golden: silent; power it off and on"):
            completion(client)
        with pytest.raises(openai.APIError, match="golden: silent; power it off and on"):
            list(completion(client, stream=True))
        shared.wait(lambda: "still silent" in shared.get("/health")[2])  # the reset was tried
        status, _, text = shared.get("/health")
        assert (status, json.loads(text)["status"]) == (503, "golden: still silent")
    monkeypatch.setattr("host.serve_worker.RECOVER_SECONDS", 0.0)
    shared.wait(lambda: shared.get("/health")[0] == 200)
    assert completion(client, "add 47 38=").choices[0].text == "85"
    after = shared.metrics()
    assert after["emufpga_requests_total:error"] - before["emufpga_requests_total:error"] == 2
    assert after["emufpga_step_failures_total:LinkError"] - before.get("emufpga_step_failures_total:LinkError", 0) == 4


def test_fault_of_our_own(shared, client, monkeypatch, capfd):
    with monkeypatch.context() as broken:
        broken.setattr(shared.runtime.device, "run_layer", _raise(ZeroDivisionError("oh")))
        with pytest.raises(openai.InternalServerError, match="internal error: ZeroDivisionError: oh"):
            completion(client)
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert completion(client, "add 47 38=").choices[0].text == "85"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_worker_that_dies(monkeypatch, capfd):
    """Everybody is told, and the server ends."""
    with served() as one, one.client() as client:
        monkeypatch.setattr(one.runtime, "cancel", lambda request: None)
        monkeypatch.setattr(one.server.worker, "_step", _raise(MemoryError("gone")))
        with pytest.raises(openai.InternalServerError, match="start the server again"):
            completion(client)
        one._thread.join(LIMIT)
        assert isinstance(one.server.worker.failure, MemoryError)


def _raise(error):
    def raising(*_given, **_options):
        raise error

    return raising


# Accounts.


def test_metrics_are_the_runtimes_accounts(shared, client):
    """After all that came before: every count of the ledger, the passes, tokens and requests."""
    usage = completion(client).usage
    before = shared.metrics()
    usage = completion(client, PROMPTS[3], max_tokens=4).usage
    after = shared.metrics()

    def grown(name):
        return after[name] - before[name]

    assert grown("emufpga_prompt_tokens_total") == usage.prompt_tokens
    assert grown("emufpga_generated_tokens_total") == usage.completion_tokens
    assert grown("emufpga_time_to_first_token_seconds_count") == 1
    assert grown("emufpga_inter_token_seconds_count") == usage.completion_tokens - 1
    assert grown("emufpga_pass_tokens_total") == 3 * (usage.prompt_tokens + usage.completion_tokens - 1)

    runtime, ledger = shared.runtime, shared.runtime.ledger
    counts = {each.name: getattr(ledger, each.name) for each in dataclasses.fields(Ledger)}
    del counts["os_is_storage"]
    for name, count in counts.items():
        unit = "" if name.startswith("cache_") else "_bytes"
        metric = f"emufpga_{name.removesuffix('_bytes')}{unit}_total"
        if count is None:
            assert metric not in after
        else:
            assert after[metric] == count, name
    assert after["emufpga_passes_total"] == runtime.passes == len(shared.companies)
    assert after["emufpga_experts_fetched_total"] * 161_280 == ledger.requested
    assert after["emufpga_experts_wanted_total"] <= after["emufpga_experts_fetched_total"]
    assert after["emufpga_device_seconds_total"] == runtime.device_seconds
    for each in dataclasses.fields(runtime.device.link.counts):
        assert after[f"emufpga_link_{each.name}_total"] == getattr(runtime.device.link.counts, each.name)
    text = shared.get("/metrics")[2]
    by_layer = [line for line in text.splitlines() if line.startswith('emufpga_requested_bytes_total{layer="')]
    assert len(by_layer) == 3


# The end.


def test_stopping_lets_streams_finish(alone):
    go_on = threading.Event()
    with served() as one, one.client() as client:
        one.runtime.tokenizer.ends = set()
        one.before_step = lambda: None if not one.runtime.live[0].tokens else go_on.wait(LIMIT)
        stream = completion(client, max_tokens=TOKENS, stream=True)
        text = next(stream).choices[0].text
        one.stop()
        one.wait(lambda: any(line.startswith("stopping: 1 running requests have 300 s") for line in one.said))
        with pytest.raises(openai.APIError), one.client() as another:  # refused, or told that it is over
            completion(another)
        go_on.set()
        assert text + "".join(part.choices[0].text for part in stream) == alone[0]
        one._thread.join(LIMIT)
        assert not one._thread.is_alive()


def test_stopping_at_once():
    """The grace time is over in the middle of a layer: the stream ends with an error, and so do those that wait."""
    go_on, reached = threading.Event(), threading.Event()
    with served(grace=0.0, max_requests=1) as one, one.client() as client:
        worker = one.server.worker
        real = one.runtime.layer_progress
        assert real is not None

        def hold(*given):
            if len(one.companies) > 20:
                reached.set()
                assert go_on.wait(LIMIT)
            real(*given)

        one.runtime.layer_progress = hold
        one.runtime.tokenizer.ends = set()
        stream = completion(client, max_tokens=100, stream=True)
        next(stream)
        waiting = completion(client, stream=True)
        one.wait(lambda: worker.queued == 1)
        assert reached.wait(LIMIT)
        done = len(one.companies)
        one.stop()
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(waiting)
        one.wait(lambda: worker._halted)
        go_on.set()
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        one._thread.join(LIMIT)
        assert one.server.worker.failure is None
        assert len(one.companies) == done


@contextlib.contextmanager
def command(*options: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """``emufpga serve`` as a user types it, and its address."""
    arguments = [sys.executable, "-m", "host.cli", "serve", "--model", str(FILE), "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            lines = []
            while "serving on " not in (line := process.stderr.readline()):
                assert line, "".join(lines)
                lines.append(line)
            assert lines[0].endswith(f"opening {FILE}, selected, golden\n")
            yield process, line.split("serving on ")[1].split("/v1")[0]
        finally:
            process.kill()


@pytest.mark.parametrize(("signals", "status"), [([signal.SIGTERM], 0), ([signal.SIGINT, signal.SIGINT], 130)])
def test_signals(signals, status):
    """SIGTERM lets the stream finish; a second Ctrl-C does not."""
    with command("--chunk", "1", "--grace", f"{LIMIT:g}") as (process, url):
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT) as client:
            stream = chat(client, "compare " + "1" * 100, stream=True, max_tokens=10)
            next(stream)  # the role, before any token; and before the model's thread has taken the request
            until = time.monotonic() + LIMIT
            while b"emufpga_requests_live 1.0" not in urllib.request.urlopen(f"{url}/metrics", timeout=LIMIT).read():
                assert time.monotonic() < until
            assert process.stderr is not None
            first, *more = signals
            process.send_signal(first)
            assert "stopping: 1 running requests have 300 s" in process.stderr.readline()
            for each in more:
                process.send_signal(each)
            if status == 0:
                assert list(stream)[-1].choices[0].finish_reason in ("stop", "length")
            else:
                with pytest.raises(openai.APIError, match="the server is shutting down"):
                    list(stream)
        err = process.stderr.read()
        assert process.wait(LIMIT) == status
        assert err.splitlines()[-1].endswith("stopped")
        assert "Traceback" not in err


def test_refused_command_lines(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, status, part in (
            (["--port", port], 1, f"--host 127.0.0.1 --port {port}: cannot listen: Address already in use"),
            (["--port", "70000"], 2, "must be in 0..65535, not '70000'"),
            (["--port", "0", "--max-requests", "0"], 2, "must be a number of 1 or more, not '0'"),
            (["--port", "0", "--host", "256.0.0.1"], 1, "--host 256.0.0.1 --port 0: cannot listen"),
            (["--port", "0", "--device", "gold"], 2, "device 'gold': unknown kind 'gold'"),
        ):
            assert main(["serve", "--model", str(FILE), *options]) == status
            assert part in capsys.readouterr().err.splitlines()[-1]


def test_without_the_extra():
    blocked = "import sys; sys.modules['uvicorn'] = None; from host.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", blocked, "serve", "--model", str(FILE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("uvicorn is not installed: pip install 'emufpga[serve]'\n")
