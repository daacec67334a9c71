"""``emufpga serve``: an OpenAI-compatible endpoint for a model whose experts come through a device.

:mod:`host.serve_worker` runs the model in a thread of its own, :mod:`host.serve_api` speaks HTTP,
:mod:`host.serve_metrics` counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import signal
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

from host.run import Progress, add_model_arguments, number, open_model

if TYPE_CHECKING:
    from host.runtime import Runtime

MARGIN_SECONDS = 5
"""How long connections may take to close when their requests have ended."""
JOIN_SECONDS = 10.0
"""How long the end of the step under way is waited for, when nobody wants it any more."""
AT_ONCE_SECONDS = 5.0
"""How long anything may take once a second signal came."""


class ServeError(RuntimeError):
    """A server that cannot start, or had to end. One line, and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``emufpga serve`` takes."""
    add_model_arguments(parser)
    parser.add_argument("--name", help="of the model, for clients (default: the file's, without .gguf)")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="to listen on; 0: any (default: %(default)s)")
    for name, kind, default, text in (
        ("--max-requests", number(int, 1), 8, "requests that share the steps"),
        ("--queue", number(int, 0), 64, "requests that wait for them"),
        ("--grace", number(float, 0), 30.0, "seconds that running requests have when the server is stopped"),
    ):
        parser.add_argument(name, type=kind, default=default, metavar="N", help=f"{text} (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM (0) or Ctrl-C (130)."""
    _check_installed()
    progress = Progress()
    with contextlib.closing(_bind(args.host, args.port)) as listener, open_model(args, progress) as runtime:
        server = Server(
            runtime,
            name=args.name or Path(args.model).name.removesuffix(".gguf"),
            max_requests=args.max_requests,
            queue=args.queue,
            grace=args.grace,
            say=progress.say,
        )
        asyncio.run(server.run(listener, signals=True))
        if not server.join():
            progress.say("the step under way does not end: leaving it")
            os._exit(_status(server.signals))
        if server.worker.failure is not None:
            raise ServeError(f"the model's thread ended: {server.worker.failure!r}; start the server again")
        progress.say("stopped")
        return _status(server.signals)


class Server:
    """A model behind HTTP.

    Parameters
    ----------
    runtime
        The worker's own while the server runs.
    name
        Of the model, for clients.
    max_requests, queue
        Requests that share the steps, and that wait, at most.
    grace
        Seconds that running requests have when the server is stopped.
    say
        Told what happens.

    Attributes
    ----------
    worker, metrics
        What runs the model, and what counts.
    signals
        That came so far.
    loop
        Where ``run`` runs; None before.

    Raises
    ------
    ModelFileError
        The model's chat template cannot be read.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        name: str,
        max_requests: int,
        queue: int,
        grace: float,
        say: Callable[[str], None],
    ) -> None:
        import uvicorn

        from host.chat import Chat
        from host.serve_api import Api
        from host.serve_metrics import Metrics
        from host.serve_worker import Worker

        chat, self.metrics = Chat(runtime.model, runtime.tokenizer), Metrics(runtime)
        self.worker = Worker(runtime, max_requests=max_requests, queue=queue, accounts=self.metrics)
        self.metrics.worker = self.worker
        self.grace, self.say = grace, say
        self.signals: list[int] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        config = uvicorn.Config(
            Api(self.worker, chat, self.metrics, name).app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(grace) + MARGIN_SECONDS,
        )
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.capture_signals = _no_signals  # they come to ``stop``
        form = "no chat template: messages are joined" if chat.template is None else "with a chat template"
        say(f"model {name!r}, context {runtime.context:,} tokens, {form}")

    async def run(self, listener: socket.socket, *, signals: bool) -> None:
        """Answer who comes to ``listener``, a bound socket, until ``stop``; ``signals``: SIGINT and SIGTERM call it."""
        self.loop = asyncio.get_running_loop()
        self.worker.ended = self._worker_ended
        for each in (signal.SIGINT, signal.SIGTERM) if signals else ():
            self.loop.add_signal_handler(each, self.stop, each)
        listener.listen()
        host, port = listener.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        self.worker.start()
        self.say(f"serving on http://{address}:{port}/v1 (Ctrl-C stops it)")
        try:
            await self._uvicorn.serve(sockets=[listener])
        finally:
            self.worker.halt()

    def join(self) -> bool:
        """Wait, but not for long, until nobody uses the runtime any more; whether that is so."""
        return self.worker.join(AT_ONCE_SECONDS if len(self.signals) > 1 else JOIN_SECONDS)

    def stop(self, signal_number: int | None = None) -> None:
        """Take no more requests; those that run have the grace time, or none if this is the second call.

        For the loop's thread.
        """
        assert self.loop is not None
        if signal_number is not None:
            self.signals.append(signal_number)
        if not self._stopping:
            self._stopping = True
            self.say(f"stopping: {self.worker.live} running requests have {self.grace:g} s; Ctrl-C again: none")
            self.worker.drain()
            self.loop.call_later(self.grace, self.worker.halt)
        else:
            self.worker.halt()
            self.loop.call_later(AT_ONCE_SECONDS, setattr, self._uvicorn, "force_exit", True)
        self._uvicorn.should_exit = True

    def _worker_ended(self) -> None:
        assert self.loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(setattr, self._uvicorn, "should_exit", True)


@contextlib.contextmanager
def _no_signals() -> Generator[None, None, None]:
    yield


def _status(signals: list[int]) -> int:
    return 130 if signal.SIGINT in signals else 0


def _bind(host: str, port: int) -> socket.socket:
    """A socket that has the port, so that a taken one is told before a model is loaded; nobody can connect yet."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ServeError(f"--host {host} --port {port}: cannot listen: {error.strerror}; give others") from error
    return listener


def _port(text: str) -> int:
    port = number(int, 0)(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"must be in 0..65535, not {text!r}")
    return port


def _check_installed() -> None:
    try:
        import jinja2  # noqa: F401 all that the extra brings, so that the first error says all
        import prometheus_client  # noqa: F401
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ServeError(
            f"serving needs a web server, and {error.name} is not installed: pip install 'emufpga[serve]'"
        ) from error
