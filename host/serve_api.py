"""OpenAI's completions and chat completions over HTTP, answered by a :class:`host.serve_worker.Worker`.

A field that would change the answer and is not supported is refused, unless it has the value that changes nothing;
fields that change nothing are ignored. Errors are in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from host.chat import Chat
from host.runtime import RequestError
from host.serve_metrics import CONTENT_TYPE, Metrics
from host.serve_worker import BusyError, ClosingError, Job, Piece, Worker

BODY_BYTES = 16 << 20
BODY_SECONDS = 30.0
"""How long a request may take to arrive."""
KEEP_ALIVE_SECONDS = 15.0
"""A stream that has nothing to say says so as often: nobody in between shall take it for dead."""
WRITE_SECONDS = 60.0
"""A client that takes nothing for so long loses its request."""
RETRY_SECONDS = 1
COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions; a chat's is what the context holds."""
STOPS = 4

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (0, -1),
    "top_logprobs": (0,),
    "top_p": (1,),
}
"""Fields that are not supported, with the values that ask for nothing; null asks for nothing either."""


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        kind = {429: "rate_limit_error", 404: "not_found_error"}.get(
            status, "invalid_request_error" if status < 500 else "server_error"
        )
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = {"Retry-After": str(RETRY_SECONDS)} if retry else {}

    def response(self) -> Response:
        return JSONResponse(self.body, self.status, self.headers)


def _stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or len(stops) > STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"must be a text, or a list of {STOPS} at most, none of them empty")
    return stops


def _prompt(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise ValueError("must be one text, or one list of tokens; send several as requests of their own")


def _content(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in value
    ):
        return "".join(part["text"] for part in value)
    raise ValueError("must be a text, or a list of parts of type 'text'")


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)
    role: str
    content: Annotated[str, BeforeValidator(_content)]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class _Body(BaseModel):
    """What both kinds of requests have."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_stop)] = []
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @property
    def limit(self) -> int | None:
        """Tokens asked for."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class _Completion(_Body):
    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]


class _ChatCompletion(_Body):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class Api:
    """The endpoints; ``app`` is the ASGI application."""

    def __init__(self, worker: Worker, chat: Chat, metrics: Metrics, name: str) -> None:
        self.worker, self.chat, self.metrics, self.name = worker, chat, metrics, name
        self.created = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={
                ApiError: _api_error,
                ClientDisconnect: _gone,
                HTTPException: _http_error,
                Exception: _unexpected,
            },
        )

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def _model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._about())

    async def _health(self, _request: Request) -> Response:
        trouble = self.worker.trouble
        status = "ok" if trouble is None else trouble
        return JSONResponse(
            {"status": status, "live": self.worker.live, "queued": self.worker.queued}, 200 if trouble is None else 503
        )

    async def _metrics(self, _request: Request) -> Response:
        return Response(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, _Completion)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, _ChatCompletion)

    async def _answer(self, request: Request, kind: type[_Completion | _ChatCompletion]) -> Response:
        outlet = _Outlet()
        try:
            body = _parse(await _read(request), kind)
            self._check_name(body.model)
            job = await asyncio.to_thread(self._job, body, outlet.tell)
            try:
                self.worker.submit(job)
            except BusyError as error:
                raise ApiError(429, str(error), code="queue_full", retry=True) from error
            except ClosingError as error:
                raise ApiError(503, str(error), code="shutting_down", retry=True) from error
        except ApiError:
            self.metrics.refused()
            raise
        form = _Form(self.name, body, len(job.tokens))
        if body.stream:
            return _EventStream(form.events(outlet), lambda: self.worker.cancel(job))
        try:
            last = await _unless_gone(request.receive, outlet.all())
        finally:
            self.worker.cancel(job)
        if error := _failed(last):
            raise error
        return JSONResponse(form.whole(last))

    def _job(self, body: _Completion | _ChatCompletion, tell: Callable[[Piece], None]) -> Job:
        """A job that the runtime will take; tokenises, so not for the event loop's thread."""
        runtime, temperature = self.worker.runtime, 1.0 if body.temperature is None else body.temperature
        param = "prompt" if isinstance(body, _Completion) else "messages"
        try:
            prompt = body.prompt if isinstance(body, _Completion) else self.chat.tokens(_plain(body.messages))
            tokens = runtime.check(prompt, max_tokens=1, temperature=temperature)
        except RequestError as error:
            raise ApiError(400, str(error), param=param) from error
        room = runtime.context - len(tokens)
        limit = body.limit
        if limit is None:
            limit = min(COMPLETION_TOKENS, room) if isinstance(body, _Completion) else room
        elif limit > room:
            raise ApiError(
                400,
                f"the model's context holds {runtime.context} tokens: {len(tokens)} of the prompt leave {room}, "
                f"{limit} were asked for",
                param=param,
                code="context_length_exceeded",
            )
        seed = None if body.seed is None else body.seed % (1 << 64)
        return Job(tokens, limit, temperature, seed, body.stop, tell)

    def _check_name(self, name: str) -> None:
        if name != self.name:
            raise ApiError(404, f"model {name!r}: this server has {self.name!r}", param="model", code="model_not_found")

    def _about(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "emufpga"}


class _Outlet:
    """Pieces on their way from the worker's thread to one coroutine. It holds an answer's text at most."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._held = Piece("", 0)

    def tell(self, piece: Piece) -> None:
        """For the worker's thread; what nobody can hear any more is lost."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._put, piece)

    async def next(self) -> Piece:
        """All that came since the last time, in one; waits for the first."""
        await self._news.wait()
        self._news.clear()
        piece, self._held = self._held, Piece("", 0)
        return piece

    async def all(self) -> Piece:
        """The whole answer in one."""
        texts = []
        while (piece := await self.next()).finish is None:
            texts.append(piece.text)
        return piece._replace(text="".join([*texts, piece.text]))

    def _put(self, piece: Piece) -> None:
        self._held = piece._replace(text=self._held.text + piece.text)
        self._news.set()


class _Form:
    """How OpenAI writes an answer."""

    def __init__(self, model: str, body: _Body, prompt_tokens: int) -> None:
        self._chat = isinstance(body, _ChatCompletion)
        self._usage = body.include_usage
        self._prompt_tokens = prompt_tokens
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind + (".chunk" if self._chat and body.stream else ""),
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, piece: Piece) -> dict[str, Any]:
        """An answer in one."""
        text = {"message": {"role": "assistant", "content": piece.text}} if self._chat else {"text": piece.text}
        return {**self._head, "choices": [self._choice(text, piece.finish)], "usage": self._counts(piece.tokens)}

    async def events(self, outlet: _Outlet) -> AsyncIterator[bytes]:
        """An answer in parts."""
        if self._chat:
            yield self._chunk({"delta": {"role": "assistant", "content": ""}})
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    piece = await outlet.next()
            except TimeoutError:
                yield b": nothing yet\n\n"
                continue
            if error := _failed(piece):
                yield _event(error.body)
                return
            if piece.text:
                yield self._chunk({"delta": {"content": piece.text}} if self._chat else {"text": piece.text})
            if piece.finish:
                break
        yield self._chunk({"delta": {}} if self._chat else {"text": ""}, piece.finish)
        if self._usage:
            yield _event({**self._head, "choices": [], "usage": self._counts(piece.tokens)})
        yield b"data: [DONE]\n\n"

    def _chunk(self, text: dict[str, Any], finish: str | None = None) -> bytes:
        usage = {"usage": None} if self._usage else {}
        return _event({**self._head, "choices": [self._choice(text, finish)], **usage})

    @staticmethod
    def _choice(text: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": 0, **text, "logprobs": None, "finish_reason": finish}

    def _counts(self, tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._prompt_tokens + tokens,
        }


class _EventStream(Response):
    """Server-sent events. ``cancel`` is called at the end, however it comes: a client may go, or take nothing."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], cancel: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._cancel = events, cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect, TimeoutError):
                await _unless_gone(receive, self._write(send))
        finally:
            self._cancel()

    async def _write(self, send: Send) -> None:
        await _send(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await _send(send, {"type": "http.response.body", "body": event, "more_body": True})
        await _send(send, {"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, message: dict[str, Any]) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await send(message)


async def _unless_gone(receive: Receive, work: Any) -> Any:
    """What ``work`` gives; ``ClientDisconnect``, with the work cancelled, if the client goes first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES:
                    raise ApiError(413, f"the request is longer than {BODY_BYTES:,} bytes: send less")
    except TimeoutError as error:
        raise ApiError(408, f"the request did not arrive within {BODY_SECONDS:g} s: send it again") from error
    return bytes(body)


def _parse(body: bytes, kind: type[_Completion | _ChatCompletion]) -> _Completion | _ChatCompletion:
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = [str(part) for part in first["loc"]]
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{'.'.join(place) or 'the body'}: {message}", param=place[0] if place else None) from error
    for name, value in (parsed.model_extra or {}).items():
        if name in NEUTRAL and value is not None and not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            allowed = " or ".join(json.dumps(neutral) for neutral in NEUTRAL[name])
            raise ApiError(
                400,
                f"{name}: {json.dumps(value)[:100]} is not supported here: leave it out, or give {allowed}",
                param=name,
                code="unsupported_value",
            )
    if parsed.stream_options and not parsed.stream:
        raise ApiError(400, "stream_options: only with stream: true", param="stream_options")
    return parsed


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _plain(messages: list[_Message]) -> list[Mapping[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _failed(piece: Piece) -> ApiError | None:
    """The error that ended an answer, if one did."""
    if piece.finish == "cancelled":
        return ApiError(503, piece.error or "cancelled", code="shutting_down", retry=True)
    if piece.finish == "error":
        return ApiError(500, piece.error or "unknown error", code="generation_failed")
    return None


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _http_error(request: Request, error: Exception) -> Response:
    """A path or method that there is not."""
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()


async def _unexpected(_request: Request, error: Exception) -> Response:
    return ApiError(500, f"internal error: {type(error).__name__}; see the server's output").response()
