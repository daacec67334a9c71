"""A whole model whose experts live elsewhere: attention, KV cache and router in PyTorch, experts through a device.

Each request's tokens go through transformers' unmodified forward pass in a greenlet of its own. Where the pass calls
its experts it stops, until all requests of the step have come to the same layer; then one ``Device.run_layer`` serves
them all, so that each expert is fetched once. What is not exact, attention in floating point, is thus evaluated for
each request by itself, in shapes that depend on that request alone; what is shared is exact. So a request's logits are
the same bits whoever else is there, whichever device computes the experts, and in whichever order they pass.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from host import architectures
from host.architectures import Progress
from host.device import Device, LayerResult, Ledger
from host.link import Transport
from host.model_file import ModelFile, MoeLayer
from host.routing import in_parts
from host.routing_stats import RoutingStats
from host.storage import Store
from host.tokenizer import TextStream, Tokenizer
from hw.formats.messages import Mode
from sim.golden.activations import Activations, quantize
from sim.workload import Routes, engine_layer, engine_routes

if TYPE_CHECKING:
    import greenlet
    import torch

PLACEMENTS = ("resident", "selected", "tape")
SEAM = "emufpga"
"""Name of our experts implementation within transformers."""
CHUNK = 64
"""Prompt tokens of a request in one pass."""

Finish = Literal["stop", "length", "cancelled", "error"]
Watch = Callable[["LayerPass"], None]


class RequestError(ValueError):
    """A request that cannot be served: which number is wrong, and what is allowed."""


@dataclass(eq=False)
class Request:
    """A prompt and what comes of it.

    Attributes
    ----------
    id
        Ascending from 0.
    prompt, tokens
        Token ids given and generated; a token that ends the text is among them, but not in ``text``.
    text
        What was generated, as far as it is certain.
    finish_reason
        None while the request lives. "error" comes with ``error``.
    logits
        Of the newest token, float32; None before the first.
    """

    id: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: Finish | None = None
    error: str | None = None
    logits: NDArray[np.float32] | None = None
    _seen: int = 0  # tokens in the cache
    _cache: Any = None
    _random: np.random.Generator = field(default_factory=np.random.default_rng)
    _stream: TextStream | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def prefilling(self) -> bool:
        """Some of the prompt has not been given yet."""
        return self._seen < len(self.prompt)

    @property
    def prompt_done(self) -> int:
        """Tokens of the prompt that have been given."""
        return min(self._seen, len(self.prompt))


class Event(NamedTuple):
    """A token that came out. ``text`` may be empty, or hold what was withheld before; ``finished``: it is the last.

    ``token`` is None where a request ended without one: with "error".
    """

    request: Request
    token: int | None
    text: str
    finished: bool


class LayerPass(NamedTuple):
    """One call of the device, for who keeps other accounts: one layer, for ``requests`` requests.

    ``chosen``: each token's experts, request after request, tokens × experts of a token. ``order``: the device's order
    of those tokens, in which the rows of ``result`` are.
    """

    layer: int
    requests: int
    chosen: NDArray[np.int64]
    order: NDArray[np.int64]
    result: LayerResult

    @property
    def tokens(self) -> int:
        return len(self.chosen)

    @property
    def experts(self) -> int:
        """Different experts that the tokens want."""
        return len(np.unique(self.chosen))


class _Call(NamedTuple):
    """A request's wish: experts of a layer on its tokens."""

    layer: MoeLayer
    x: Activations
    routes: Routes


class Runtime:
    """A model that serves requests; a context manager that closes it. Not for use by several threads.

    Attributes
    ----------
    model, tokenizer
        The file, and its tokenizer.
    device, store
        What computes the experts and what reads them; None where they are resident.
    network
        The transformers model; its experts have no storage unless they are resident.
    ledgers
        By layer, the sums of :class:`host.device.Ledger`; ``ledger`` is their sum.
    passes, device_seconds
        Layers that the device ran, and seconds that they took on its clock.
    routing
        Statistics of :class:`host.routing_stats.RoutingStats`.
    live
        Requests that have not ended, in the order of joining.
    watch
        Called after each layer that the device ran; None: nobody.
    layer_progress
        Called while the device runs a layer, with its index, bytes answered and bytes in all; None: nobody.
    """

    def __init__(
        self,
        model: ModelFile,
        network: Any,
        *,
        placement: str,
        device: Device | None,
        store: Store | None,
        torch_device: str,
        chunk: int,
    ) -> None:
        self.model, self.network = model, network
        self.placement, self.device, self.store = placement, device, store
        self.torch_device, self.chunk = torch_device, chunk
        self.tokenizer = Tokenizer(model)
        self.ledgers: dict[int, Ledger] = {}
        self.passes, self.device_seconds = 0, 0.0
        self.routing = RoutingStats(model.expert_count, model.experts_used)
        self.live: list[Request] = []
        self.watch: Watch | None = None
        self.layer_progress: Callable[[int, int, int], None] | None = None
        self._ids = count()
        self._mode = Mode.TAPE if placement == "tape" else Mode.SELECTED
        self.vocabulary = network.config.vocab_size
        self.context = model.context_length or network.config.max_position_embeddings
        for layer in model.layers:
            module: Any = architectures.expert_module(network, model, layer)
            module.emufpga = (self, layer)
        _register()
        network.set_experts_implementation(SEAM)

    @classmethod
    def open(
        cls,
        path: str,
        *,
        placement: str = "selected",
        device: str | Transport = "golden",
        torch_device: str = "cpu",
        dtype: str = "float32",
        chunk: int = CHUNK,
        cache: Callable[[Store, ModelFile], Store] | None = None,
        progress: Progress = lambda what, done, total: None,
    ) -> Runtime:
        """Load a model.

        Parameters
        ----------
        path
            A GGUF file of an architecture of :data:`host.architectures.ARCHITECTURES`.
        placement
            "selected": the experts that a step needs pass through the device; "tape": all do; "resident": transformers
            alone, with the experts decoded into its own memory, and no device.
        device
            As :meth:`host.device.Device.open` takes it.
        torch_device, dtype
            Where all but the experts is computed, and in which type: "float32", "float16" or "bfloat16".
        chunk
            Prompt tokens of a request in one pass.
        cache
            Puts something that reads as a :class:`host.storage.Store` does in front of the file.
        progress
            Told what happens, with bytes done and bytes in all.

        Raises
        ------
        ValueError
            For a placement, type or chunk that is none.
        TorchMissingError, ModelFileError, SpecError, DeviceError, LinkError, StorageError
            As they come.
        """
        if placement not in PLACEMENTS:
            raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}, not {placement!r}")
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"dtype must be float32, float16 or bfloat16, not {dtype!r}")
        if chunk < 1:
            raise ValueError(f"chunk must be 1 or more, not {chunk}")
        opened: list[Any] = []
        try:
            model = ModelFile.open(path)
            opened.append(model)
            resident = placement == "resident"
            connected, store = None, None
            if not resident:
                connected = Device.open(device)
                opened.append(connected)
                connected.check_fits(engine_layer(model, model.layers[0]))
                store = Store(path)
                opened.append(store)
                if cache is not None:
                    store = cache(store, model)
                    opened.append(store)
            network = architectures.build(model, experts=resident, device=torch_device, dtype=dtype, progress=progress)
            return cls(
                model,
                network,
                placement=placement,
                device=connected,
                store=store,
                torch_device=torch_device,
                chunk=chunk,
            )
        except BaseException:
            for each in reversed(opened):
                each.close()
            raise

    def close(self) -> None:
        """Close file, store and device."""
        for each in (self.device, self.store, self.model):
            if each is not None:
                each.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def ledger(self) -> Ledger:
        """Bytes of all layers so far."""
        return functools.reduce(operator.add, self.ledgers.values(), Ledger())

    def add(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> Request:
        """A request that joins at the next step.

        ``prompt`` is text or token ids; ``temperature`` 0 takes the likeliest token, otherwise ``seed`` fixes what is
        drawn; a ``stop`` string ends the text and is left out. The end of the context ends it too ("length").
        ``RequestError`` for what cannot be.
        """
        tokens = self.check(prompt, max_tokens=max_tokens, temperature=temperature)
        from transformers import DynamicCache

        request = Request(next(self._ids), tokens, max_tokens, temperature)
        request._random = np.random.default_rng(seed)
        request._stream = TextStream(self.tokenizer, stop)
        request._cache = DynamicCache(config=self.network.config)
        self.live.append(request)
        return request

    def check(self, prompt: str | Sequence[int], *, max_tokens: int, temperature: float = 0.0) -> list[int]:
        """The prompt's tokens; ``RequestError`` for what ``add`` refuses. Any thread may ask, at any time."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [operator.index(t) for t in prompt]
        if not tokens:
            raise RequestError("the prompt has no tokens; give at least one")
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise RequestError(f"token {token} of the prompt is not in 0..{self.vocabulary - 1}")
        if len(tokens) >= self.context:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, the model's context holds {self.context} with the answer: "
                "give a shorter one"
            )
        if max_tokens < 1:
            raise RequestError(f"max_tokens must be 1 or more, not {max_tokens}")
        if not 0 <= temperature < float("inf"):
            raise RequestError(f"temperature must be 0 or more, not {temperature}")
        return tokens

    def cancel(self, request: Request) -> None:
        """Let a request leave; nothing happens to one that has ended."""
        if not request.done:
            self._end(request, "cancelled")

    def step(self) -> list[Event]:
        """One pass: each live request gives a chunk of its prompt, or its newest token. The tokens that came out.

        A request whose numbers are no numbers ends with "error". If the device, the link or the storage fails, or on
        Ctrl-C, the error comes out and the requests are as they were before: ``step`` may be called again.
        """
        work = [(request, self._next(request)) for request in self.live]
        events = []
        for (request, given), logits in zip(work, self._forward(work), strict=True):
            if isinstance(logits, Exception):
                request.error = str(logits)
                events.append(Event(request, None, self._end(request, "error"), True))
                continue
            request._seen += len(given)
            if not request.prefilling:
                events.append(self._emit(request, logits[-1]))
        return events

    def logits(self, prompts: Iterable[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Logits of every token of each prompt, tokens × vocabulary, all prompts together, in chunks as ``step``."""
        requests = [self.add(prompt, max_tokens=1) for prompt in prompts]
        found: list[list[NDArray[np.float32]]] = [[] for _ in requests]
        try:
            while waiting := [request for request in requests if request.prefilling]:
                work = [(request, self._next(request)) for request in waiting]
                for (request, given), logits in zip(work, self._forward(work, keep_all=True), strict=True):
                    if isinstance(logits, Exception):
                        raise logits
                    request._seen += len(given)
                    found[requests.index(request)].append(logits)
        finally:
            for request in requests:
                self.cancel(request)
        return [np.concatenate(parts) for parts in found]

    def _next(self, request: Request) -> list[int]:
        """The tokens that a request gives to the next pass."""
        if request.prefilling:
            return request.prompt[request._seen : request._seen + self.chunk]
        return request.tokens[-1:]

    def _emit(self, request: Request, logits: NDArray[np.float32]) -> Event:
        token = _choose(logits, request)
        request.logits = logits
        request.tokens.append(token)
        stream = request._stream
        assert stream is not None
        ended = token in self.tokenizer.ends
        text = "" if ended else stream.put(token)
        request.text += text
        finish: Finish | None = None
        if ended or stream.stopped:
            finish = "stop"
        elif len(request.tokens) == request.max_tokens or request._seen + 1 >= self.context:
            finish = "length"
        if finish:
            text += self._end(request, finish)
        return Event(request, token, text, request.done)

    def _end(self, request: Request, reason: Finish) -> str:
        """The request leaves; returns the text that was held back."""
        assert request._stream is not None
        held = request._stream.finish()
        request.text += held
        request.finish_reason = reason
        request._cache = None
        self.live.remove(request)
        self.routing.forget(request.id)
        return held

    def _forward(
        self, work: list[tuple[Request, list[int]]], *, keep_all: bool = False
    ) -> list[NDArray[np.float32] | Exception]:
        """Logits of each request's tokens, or of its last one only; or why it has none."""
        import greenlet
        import torch

        before = [request._seen for request, _ in work]
        results: list[Any] = [None] * len(work)
        passes = [greenlet.greenlet(functools.partial(self._pass, *each, keep_all)) for each in work]
        try:
            with torch.inference_mode():
                waiting = {}
                for place, one in enumerate(passes):
                    waiting[place] = self._go_on(one, results, place)
                while waiting := {place: call for place, call in waiting.items() if call is not None}:
                    outputs = self._run_experts(list(waiting.values()))
                    waiting = {
                        place: self._go_on(passes[place], results, place, output)
                        for place, output in zip(waiting, outputs, strict=True)
                    }
        except BaseException:
            for one in passes:
                if one:  # begun and not ended
                    one.throw()
            for (request, _), seen in zip(work, before, strict=True):
                _crop(request._cache, seen)
            self.routing.drop_step()
            raise
        self.routing.end_step()
        return results

    @staticmethod
    def _go_on(one: greenlet.greenlet, results: list[Any], place: int, *output: Any) -> _Call | None:
        """Run a pass until its next wish for experts; None: it has ended, with ``results[place]``."""
        answer = one.switch(*output)
        if isinstance(answer, _Call):
            return answer
        results[place] = answer
        return None

    def _pass(self, request: Request, given: list[int], keep_all: bool) -> NDArray[np.float32] | Exception:
        """One request's forward pass; for a greenlet of its own."""
        import greenlet
        import torch

        here: Any = greenlet.getcurrent()
        here.request = request  # for the seam
        ids = torch.tensor([given], device=self.torch_device)
        try:
            out = self.network(ids, cache=request._cache, use_cache=True, logits_to_keep=0 if keep_all else 1)
            logits = out.logits[0].float().cpu().numpy()
            if not np.isfinite(logits[-1]).all():
                raise FloatingPointError("the logits are not finite; give another prompt, or a wider --dtype")
        except (FloatingPointError, _NotNumbers) as error:
            return error
        return logits

    def _seam(self, module: Any, layer: MoeLayer, hidden: Any, index: Any, weights: Any) -> Any:
        """What transformers calls for a layer's experts: tokens × width in, the same out."""
        import greenlet

        here: Any = greenlet.getcurrent()
        request: Request = here.request
        experts = index.cpu().numpy().astype(np.int64)
        self.routing.add(layer.index, request.id, not request.prefilling, experts)
        if self.placement == "resident":
            return type(module).forward.__wrapped__(module, hidden, index, weights)
        # A sum of weights that is 1 may round to a little more.
        routes = Routes(experts, np.minimum(weights.double().cpu().numpy(), 1.0))
        try:
            x = quantize(hidden.float().cpu().numpy())
        except ValueError as error:
            raise _NotNumbers(f"layer {layer.index}: the experts' input: {error}") from error
        y = here.parent.switch(_Call(layer, x, routes))
        return _tensor(y).to(hidden.device, hidden.dtype)

    def _run_experts(self, calls: list[_Call]) -> list[NDArray[np.float32]]:
        """One layer for all requests of the step."""
        assert self.device is not None
        assert self.store is not None
        layer = calls[0].layer
        assert all(call.layer is layer for call in calls), "every pass takes the layers in the same order"
        x = Activations(*(np.concatenate(parts) for parts in zip(*(call.x for call in calls), strict=True)))
        joined = Routes(*(np.concatenate(parts) for parts in zip(*(call.routes for call in calls), strict=True)))
        # A device that holds fewer tokens takes them in parts, and each part fetches its experts.
        order = in_parts(joined.experts, layer.experts, self.device.params.max_batch)
        progress = self.layer_progress and functools.partial(self.layer_progress, layer.index)
        result = self.device.run_layer(
            engine_layer(self.model, layer, self._mode),
            Activations(x.mantissas[order], x.exponents[order]),
            engine_routes(Routes(joined.experts[order], joined.weights[order])),
            self.store,
            progress=progress,
        )
        y = np.empty_like(result.y)
        y[order] = result.y
        self.ledgers[layer.index] = self.ledgers.get(layer.index, Ledger()) + result.ledger
        self.passes += 1
        self.device_seconds += result.seconds
        if self.watch:
            self.watch(LayerPass(layer.index, len(calls), joined.experts, order, result))
        ends = np.cumsum([len(call.routes.experts) for call in calls])
        return np.split(y, ends[:-1])


class _NotNumbers(ArithmeticError):
    """A request's hidden states overflowed."""


def _register() -> None:
    """Make the seam known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def experts(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        runtime, layer = module.emufpga
        return runtime._seam(module, layer, hidden, index, weights)

    ALL_EXPERTS_FUNCTIONS.register(SEAM, experts)


def _tensor(values: NDArray[np.float32]) -> torch.Tensor:
    """A copy at an address of PyTorch's own choice: kernels may add in an order that depends on the alignment."""
    import torch

    return torch.from_numpy(values).clone()


def _crop(cache: Any, tokens: int) -> None:
    """Take back what a failed pass put into a cache: some layers have it, others not."""
    for layer in cache.layers:
        extra = layer.get_seq_length() - tokens
        if extra > 0:
            layer.crop(-extra)


def _choose(logits: NDArray[np.float32], request: Request) -> int:
    if request.temperature == 0:
        return int(np.argmax(logits))  # the first of equals
    scaled = logits.astype(np.float64) / request.temperature
    weights = np.exp(scaled - scaled.max())
    return int(np.searchsorted(np.cumsum(weights), request._random.random() * weights.sum(), side="right"))
