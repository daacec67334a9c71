"""The thread that owns the runtime: jobs come in from other threads, pieces of their answers go out.

A step serves all live jobs; between steps jobs join and leave. Whoever waits for an answer is told by a callback, so
nobody's slowness holds up a step.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from host.device import DeviceError
from host.link import LinkError
from host.runtime import Event, Finish, Request, RequestError, Runtime
from host.storage import StorageError

ATTEMPTS = 2
"""A step that fails is taken again, with the same bits; then its jobs end."""
POLL_SECONDS = 1.0
"""How long an idle worker waits at a time."""
RECOVER_SECONDS = 5.0
"""Between attempts of an idle worker to reach a device that is gone."""
CLOSING = "the server is shutting down: send the request again, later or to another"


class BusyError(RuntimeError):
    """The queue is full."""


class ClosingError(RuntimeError):
    """No more jobs are taken."""


class Piece(NamedTuple):
    """What came out of a job: text, and the tokens so far. The last one has ``finish``, and may have ``error``."""

    text: str
    tokens: int
    finish: Finish | None = None
    error: str | None = None


@dataclass(eq=False)
class Job:
    """A request on its way through a :class:`Worker`.

    Attributes
    ----------
    tokens
        The prompt, as :meth:`host.runtime.Runtime.check` gave it.
    max_tokens, temperature, seed, stop
        As :meth:`host.runtime.Runtime.add` takes them.
    tell
        Called with each :class:`Piece`, once with ``finish``, on any thread; must neither wait nor fail.
    arrived, last
        Seconds on ``time.monotonic``: when it came, and when its newest token did.
    request
        None until it joins.
    """

    tokens: list[int]
    max_tokens: int
    temperature: float
    seed: int | None
    stop: Sequence[str]
    tell: Callable[[Piece], None]
    arrived: float = field(default_factory=time.monotonic)
    last: float | None = None
    request: Request | None = None
    done: bool = False
    _given: int = 0  # prompt tokens that the accounts have


class Accounts(Protocol):
    """Who counts what happens, on the worker's thread unless said otherwise."""

    def prompt(self, tokens: int) -> None:
        """So many prompt tokens were given to the model."""

    def token(self, seconds: float, first: bool) -> None:
        """A token came, so long after the one before, or after its job."""

    def ended(self, outcome: Finish) -> None:
        """A job ended; any thread."""

    def failed(self, error: Exception) -> None:
        """A step failed."""


class _Halted(BaseException):
    """The layer under way is not wanted any more."""


class Worker:
    """A thread that runs from ``start`` to ``halt``, or ``drain`` and the last job. All methods are for any thread.

    Parameters
    ----------
    runtime
        This thread's own from now on; its ``layer_progress`` is used.
    max_requests, queue
        Jobs that are live, and that wait, at most.
    accounts
        See :class:`Accounts`.
    ended
        Called when the thread ends, whatever the reason.

    Attributes
    ----------
    trouble
        Why device, link or storage failed; None once a step does not, or the device answers again.
    failure
        What ended the thread that should not have; None: nothing.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        max_requests: int,
        queue: int,
        accounts: Accounts,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.runtime, self.accounts = runtime, accounts
        self.max_requests, self.queue = max_requests, queue
        self.ended = ended
        self.trouble: str | None = None
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._live: dict[Request, Job] = {}
        self._leaving: list[Job] = []
        self._closing = self._halted = False
        self._lost, self._tried = False, 0.0  # the device, and when it was looked for
        # Nobody joins it at the end of the process if it should hang in a driver.
        self._thread = threading.Thread(target=self._run, name="runtime", daemon=True)
        runtime.layer_progress = self._look_up

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def live(self) -> int:
        """Jobs that share the steps."""
        return len(self._live)

    @property
    def queued(self) -> int:
        """Jobs that wait for others to end."""
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Queue a job. ``BusyError``, ``ClosingError``: it is not taken."""
        with self._changed:
            if self._closing:
                raise ClosingError(CLOSING)
            if len(self._waiting) + len(self._live) >= self.max_requests + self.queue:
                raise BusyError(f"{self.max_requests} requests are running and {self.queue} waiting: try again later")
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Let a job leave before the next step; nothing happens to one that has ended."""
        with self._changed:
            if job.done:
                return
            if job in self._waiting:
                self._waiting.remove(job)
                self._end(job, Piece("", 0, "cancelled"))
            else:
                self._leaving.append(job)
                self._changed.notify()

    def drain(self) -> None:
        """Take no more jobs, and end those that have not joined; the thread ends when the live ones have."""
        with self._changed:
            self._closing = True
            while self._waiting:
                self._end(self._waiting.popleft(), Piece("", 0, "cancelled", CLOSING))
            self._changed.notify()

    def halt(self) -> None:
        """End all jobs now, in the middle of a layer if need be."""
        self._halted = True
        self.drain()

    def join(self, seconds: float) -> bool:
        """Wait for the thread; whether it ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._take_work():
                if self._live:
                    self._step()
                elif self._lost and time.monotonic() - self._tried > RECOVER_SECONDS:
                    self._recover()
        except BaseException as error:
            self.failure = error
            traceback.print_exc()
        finally:
            self.drain()
            error = f"internal error: {self.failure!r}; start the server again" if self.failure else CLOSING
            for job in list(self._live.values()):
                self._leave(job, "cancelled" if self.failure is None else "error", error)
            self.ended()

    def _take_work(self) -> bool:
        """Jobs leave and join; False: there will be none any more."""
        with self._changed:
            if not self._live:
                self._changed.wait_for(lambda: self._waiting or self._leaving or self._closing, POLL_SECONDS)
            leaving, self._leaving = self._leaving, []
            for job in leaving:
                self._leave(job, "cancelled")
            while self._waiting and len(self._live) < self.max_requests:
                self._join(self._waiting.popleft())
            return not self._halted and (bool(self._live) or not self._closing)

    def _join(self, job: Job) -> None:
        try:
            request = self.runtime.add(
                job.tokens, max_tokens=job.max_tokens, temperature=job.temperature, seed=job.seed, stop=job.stop
            )
        except RequestError as error:
            self._end(job, Piece("", 0, "error", str(error)))
            return
        job.request = request
        self._live[request] = job

    def _step(self) -> None:
        try:
            events = self._attempt()
        except _Halted:
            return
        except (DeviceError, LinkError, StorageError) as error:
            self._give_up(f"the experts could not be computed: {error}")
            if not isinstance(error, StorageError):
                self._recover()
            return
        except Exception as error:  # ours or PyTorch's: those concerned are told, and others may come
            traceback.print_exc()
            self.accounts.failed(error)
            self._give_up(f"internal error: {type(error).__name__}: {error}")
            return
        self.trouble, self._lost = None, False
        for request, job in self._live.items():
            self.accounts.prompt(request.prompt_done - job._given)
            job._given = request.prompt_done
        for event in events:
            self._pass_on(event)

    def _attempt(self) -> list[Event]:
        for left in reversed(range(ATTEMPTS)):
            try:
                return self.runtime.step()
            except (DeviceError, LinkError, StorageError) as error:
                self.accounts.failed(error)
                self.trouble = str(error)
                print(f"step failed, {left} more attempts: {error}", file=sys.stderr, flush=True)
                if not left:
                    raise
        raise AssertionError("unreachable")

    def _pass_on(self, event: Event) -> None:
        job, request, now = self._live[event.request], event.request, time.monotonic()
        if event.token is not None:
            self.accounts.token(now - (job.last or job.arrived), job.last is None)
            job.last = now
        piece = Piece(event.text, len(request.tokens), request.finish_reason, request.error)
        if event.finished:
            del self._live[request]
            self._end(job, piece)
        else:
            job.tell(piece)

    def _give_up(self, error: str) -> None:
        for job in list(self._live.values()):
            self._leave(job, "error", error)

    def _recover(self) -> None:
        """Reset the device: its trouble is over if it answers."""
        assert self.runtime.device is not None
        try:
            self.runtime.device.reset()
            self.trouble, self._lost = None, False
        except LinkError as error:
            self.trouble, self._lost = str(error), True
        self._tried = time.monotonic()

    def _leave(self, job: Job, reason: Finish, error: str | None = None) -> None:
        request = job.request
        if request is None or self._live.pop(request, None) is None:
            return
        self.runtime.cancel(request)
        self._end(job, Piece("", len(request.tokens), reason, error))

    def _end(self, job: Job, piece: Piece) -> None:
        assert piece.finish is not None
        job.done = True
        self.accounts.ended(piece.finish)
        job.tell(piece)

    def _look_up(self, _layer: int, _done: int, _total: int) -> None:
        if self._halted:
            raise _Halted
