"""What ``/metrics`` shows, in Prometheus' text format.

Counts of requests and tokens are kept here; bytes, passes and faults are read from the runtime's own accounts whenever
somebody asks, so both always agree. Times of requests are this machine's; the device's clock is a metric of its own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from host.device import Ledger
from host.link import LinkCounts
from host.runtime import Finish, LayerPass, Runtime
from host.serve_worker import Worker

CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Buckets of the histograms: from a small model in memory to a large one over a UART."""
OUTCOMES = ("stop", "length", "cancelled", "error", "refused")

LEDGER_HELP = {
    "requested": "that the device asked for",
    "useful": "of blocks that a token wanted",
    "drained": "of blocks that passed unused",
    "moved": "of answers over the link, with padding",
    "memory": "that came from the board's own memory",
    "answered": "that the driver gave",
    "stored": "of experts in the board's own memory that a pass wanted",
    "loaded": "sent to the board's own memory to be kept",
    "link_written": "written to the transport",
    "link_read": "read from the transport",
    "link_resent": "of frames that had to be sent again",
    "storage_requested": "wanted from the model file",
    "storage_read": "read from the model file",
    "storage_cached": "that an expert cache gave instead",
}


class Metrics(Collector):
    """All metrics of one server; the :class:`host.serve_worker.Accounts` of its worker.

    Parameters
    ----------
    runtime
        Its ``watch`` is used from now on.

    Attributes
    ----------
    worker
        Whose live and waiting requests are shown; to be set before anybody asks.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.worker: Worker | None = None
        self._runtime = runtime
        self._registry = prometheus.CollectorRegistry()
        self._passes: Counter[int] = Counter()
        self._tokens: Counter[int] = Counter()
        self._wanted: Counter[int] = Counter()
        runtime.watch = self._watch
        prometheus.disable_created_metrics()  # of the whole process; they double what is to be read
        prometheus.ProcessCollector(registry=self._registry)
        self._requests = self._counter("emufpga_requests", "Requests that ended, by how", ["outcome"])
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._prompt = self._counter("emufpga_prompt_tokens", "Prompt tokens given to the model")
        self._generated = self._counter("emufpga_generated_tokens", "Tokens that came out, those that end a text too")
        self._failures = self._counter("emufpga_step_failures", "Steps that failed, repeated ones too", ["error"])
        self._first = self._histogram("emufpga_time_to_first_token_seconds", "From arrival to the first token")
        self._next = self._histogram("emufpga_inter_token_seconds", "From a token to the next one of its request")
        self._registry.register(self)

    def text(self) -> bytes:
        """What ``/metrics`` answers."""
        return prometheus.generate_latest(self._registry)

    def refused(self) -> None:
        """A request was not taken: bad, unknown, or too many."""
        self._requests.labels("refused").inc()

    def prompt(self, tokens: int) -> None:
        self._prompt.inc(tokens)

    def token(self, seconds: float, first: bool) -> None:
        self._generated.inc()
        (self._first if first else self._next).observe(seconds)

    def ended(self, outcome: Finish) -> None:
        self._requests.labels(outcome).inc()

    def failed(self, error: Exception) -> None:
        self._failures.labels(type(error).__name__).inc()

    def collect(self) -> Iterator[Metric]:
        """What the runtime, its device and the worker have counted so far."""
        runtime, device = self._runtime, self._runtime.device
        info = GaugeMetricFamily("emufpga_info", "What runs", labels=["model", "placement", "device"])
        info.add_metric([runtime.model.path, runtime.placement, "none" if device is None else device.name], 1)
        yield info
        if self.worker:
            yield GaugeMetricFamily("emufpga_requests_live", "Requests that share the steps", self.worker.live)
            yield GaugeMetricFamily("emufpga_requests_queued", "Requests that wait for them", self.worker.queued)
        if device is None:
            return
        yield CounterMetricFamily(
            "emufpga_device_seconds",
            "Seconds of layers on the device's clock (golden: none)",
            runtime.device_seconds,
        )
        ledgers = dict(runtime.ledgers)  # in one go: the worker adds to it
        yield from _by_layer(ledgers)
        fetched = {
            layer.index: ledgers[layer.index].requested // layer.expert_bytes
            for layer in runtime.model.layers
            if layer.index in ledgers
        }
        for name, text, counts in (
            ("passes", "Layers that the device ran", self._passes),
            ("pass_tokens", "Tokens in those passes", self._tokens),
            ("experts_wanted", "Different experts that the tokens of a pass want, summed: the union", self._wanted),
            ("experts_fetched", "Experts that the device asked for, once for each part of a pass", fetched),
        ):
            yield _labelled(f"emufpga_{name}", text, dict(counts))
        for each in dataclasses.fields(LinkCounts):
            yield CounterMetricFamily(
                f"emufpga_link_{each.name}",
                f"{each.name.replace('_', ' ')}, all connections of the link",
                getattr(device.link.counts, each.name),
            )

    def _watch(self, done: LayerPass) -> None:
        self._passes[done.layer] += 1
        self._tokens[done.layer] += done.tokens
        self._wanted[done.layer] += done.experts

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> prometheus.Counter:
        return prometheus.Counter(name, text, labels or [], registry=self._registry)

    def _histogram(self, name: str, text: str) -> prometheus.Histogram:
        return prometheus.Histogram(name, f"{text}, this machine's time", buckets=SECONDS, registry=self._registry)


def _by_layer(ledgers: dict[int, Ledger]) -> Iterator[Metric]:
    """A metric for each count of the ledger; those that the system does not tell are left out."""
    for each in dataclasses.fields(Ledger):
        counts = {layer: getattr(ledger, each.name) for layer, ledger in ledgers.items()}
        if each.name == "os_is_storage" or None in counts.values():
            continue
        if each.name.startswith("cache_"):
            name, text = each.name, f"Experts that an expert cache {'had' if each.name == 'cache_hits' else 'had not'}"
        else:
            name = f"{each.name.removesuffix('_bytes')}_bytes"
            text = f"Bytes {LEDGER_HELP.get(each.name, f'({each.name} of host.device.Ledger)')}"
        yield _labelled(f"emufpga_{name}", text, counts)


def _labelled(name: str, text: str, counts: dict[int, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["layer"])
    for layer, count in sorted(counts.items()):
        family.add_metric([str(layer)], count)
    return family
