"""``emufpga replay``: recorded routes through an expert cache; hit rates by its size and policy.

A layer's pass in a trace is the decoded token's experts, or those of all tokens of the prompt at once: each counts once
a pass. The policies ``global`` and ``layer`` are :class:`host.expert_cache.Lru`'s; ``optimum`` knows the future: after
each pass the expert goes whose next use is furthest away (Belady's MIN with bypass, which no policy beats where all
experts have one size). Nothing is read and nothing is timed here. docs/capacity.md has the results.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from host import routing
from host.expert_cache import MIB, Key, pools
from host.routing import ROOT, SOURCE, RouteTrace, RoutingError

RECORDED = ROOT / "sim" / "results" / "cache.json"
SIZES = (500, 1000, 1500, 2000, 3000, 4000, 6000)
"""MiB."""
POLICIES = ("global", "layer", "optimum")
PROVENANCE = {
    "no_cache_mib": "derived: bytes of the experts of all decoded tokens, by the trace's bytes an expert, / tokens",
    "hit_rate": "counted in replay: hits / experts, once a pass; prompt and decoded tokens, from an empty cache",
    "decode_hit_rate": "the same of the decoded tokens alone; the prompt has filled the cache before",
    "decode_mib": "derived: bytes of the misses of decoded tokens / tokens",
    "optimum": "counted in replay with the future known; exact where all experts have one size, else close to it",
    "record_agrees": "counted: decoded experts for which replay and the traced program's own record say the same",
    "reuse": "counted: experts that the token before had used too, mean over layers and decoded tokens after the first",
}


@dataclass(frozen=True)
class Pass:
    """What a layer is asked for at once; ``experts`` in the trace's order, repeated where several tokens want one."""

    decoded: bool
    layer: int
    experts: tuple[int, ...]
    recorded: tuple[bool | None, ...]


@dataclass
class Hits:
    """What a replay counted: of the prompt, then of decoding."""

    experts: list[int]
    hits: list[int]
    missed_bytes: list[int]
    agrees: int = 0

    @property
    def rate(self) -> float:
        return sum(self.hits) / sum(self.experts)

    @property
    def decode_rate(self) -> float:
        return self.hits[1] / self.experts[1]


def passes(trace: RouteTrace) -> list[Pass]:
    """The trace's passes: of each turn the prompt, layer by layer, then its tokens; ValueError if none is decoded."""
    grouped: dict[tuple[int, bool, int, int], list[routing.TraceRow]] = {}
    for row in trace.rows:
        grouped.setdefault((row.turn, row.decoded, row.step if row.decoded else 0, row.layer), []).append(row)
        if row.layer not in trace.expert_bytes:
            raise ValueError(f"{trace.path}: no bytes of an expert of layer {row.layer}")
    found = []
    for (_, decoded, _, layer), rows in sorted(grouped.items()):
        rows = rows if decoded else sorted(rows, key=lambda row: row.step)
        found.append(Pass(decoded, layer, tuple(row.expert for row in rows), tuple(row.hit for row in rows)))
    if not any(each.decoded for each in found):
        raise ValueError(f"{trace.path}: no decoded tokens")
    return found


def lru(trace: RouteTrace, found: Sequence[Pass], policy: str, capacity: int) -> Hits:
    """Replay through :class:`host.expert_cache.Lru`; ``capacity`` in bytes."""
    kept = pools(policy, capacity, sorted(trace.expert_bytes))
    counts = Hits([0, 0], [0, 0], [0, 0])
    for each in found:
        pool, size = kept[each.layer], trace.expert_bytes[each.layer]
        pool.begin((each.layer, expert) for expert in each.experts)
        seen = set()
        for expert, recorded in zip(each.experts, each.recorded, strict=True):
            hit, _ = pool.touch((each.layer, expert), size)
            if expert not in seen:
                seen.add(expert)
                _count(counts, each, hit, size)
                counts.agrees += each.decoded and recorded is not None and hit == recorded
    return counts


def optimum(trace: RouteTrace, found: Sequence[Pass], capacity: int) -> Hits:
    """Replay with the future known; ``capacity`` in bytes."""
    uses: dict[Key, list[int]] = {}
    for number, each in reversed(list(enumerate(found))):
        for expert in set(each.experts):
            uses.setdefault((each.layer, expert), []).append(number)
    counts = Hits([0, 0], [0, 0], [0, 0])
    kept: dict[Key, float] = {}  # and when it is used next
    queue: list[tuple[float, Key]] = []  # the same, negative, also of what is not kept any more
    used = 0
    for each in found:
        size = trace.expert_bytes[each.layer]
        for expert in sorted(set(each.experts)):
            key = (each.layer, expert)
            _count(counts, each, key in kept, size)
            used += 0 if key in kept else size
            uses[key].pop()
            kept[key] = uses[key][-1] if uses[key] else math.inf
            heapq.heappush(queue, (-kept[key], key))
        while used > capacity:
            after, key = heapq.heappop(queue)
            if kept.get(key) == -after:
                del kept[key]
                used -= trace.expert_bytes[key[0]]
    return counts


def _count(counts: Hits, each: Pass, hit: bool, size: int) -> None:
    counts.experts[each.decoded] += 1
    counts.hits[each.decoded] += hit
    counts.missed_bytes[each.decoded] += 0 if hit else size


def reuse(found: Sequence[Pass]) -> float:
    """Share of a decoded token's experts that the token before, in the same layer, used too."""
    layers: dict[int, list[set[int]]] = {}
    for each in found:
        if each.decoded:
            layers.setdefault(each.layer, []).append(set(each.experts))
    shared = [len(now & before) / len(now) for tokens in layers.values() for before, now in pairwise(tokens)]
    return sum(shared) / len(shared) if shared else math.nan


def replay(path: Path, sizes: Sequence[int], policies: Sequence[str]) -> dict[str, Any]:
    """The report of one trace; :class:`RoutingError` for a file that is none."""
    try:
        trace = routing.read(path)
        found = passes(trace)
    except OSError as error:
        raise RoutingError(f"{path}: cannot read: {error.strerror or error}") from error
    except ValueError as error:
        raise RoutingError(f"{error}; give a route_trace v1 file") from error
    decoded = [each for each in found if each.decoded]
    layers = {each.layer for each in found}
    tokens = len(decoded) / len({each.layer for each in decoded})
    recorded = [hit for each in decoded for hit in each.recorded if hit is not None]
    rows = []
    for mib in sizes:
        for policy in policies:
            _say(f"{path.name}: {mib:,} MiB, {policy}")
            capacity = mib * MIB
            counts = optimum(trace, found, capacity) if policy == "optimum" else lru(trace, found, policy, capacity)
            row = {"mib": mib, "policy": policy, "hit_rate": counts.rate, "decode_hit_rate": counts.decode_rate}
            rows.append(row | {"decode_mib": counts.missed_bytes[1] / tokens / MIB})
            if recorded and policy != "optimum":
                rows[-1]["record_agrees"] = counts.agrees
    return {
        "model": trace.model.removesuffix(".gguf"),
        "source": str(path),
        "layers": len(layers),
        "experts": trace.experts,
        "experts_used": trace.used,
        "decoded_tokens": round(tokens),
        "no_cache_mib": sum(len(set(p.experts)) * trace.expert_bytes[p.layer] for p in decoded) / tokens / MIB,
        "token_set_mib": trace.used * sum(trace.expert_bytes[layer] for layer in layers) / MIB,
        "all_experts_mib": trace.experts * sum(trace.expert_bytes[layer] for layer in layers) / MIB,
        "reuse": reuse(found),
        "recorded_experts": len(recorded),
        "recorded_hits": sum(recorded),
        "rows": rows,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``emufpga replay`` takes."""
    parser.add_argument("routes", nargs="+", type=Path, metavar="ROUTES.csv", help="route_trace v1 files")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--cache-mib", type=mebibytes, nargs="+", default=SIZES, metavar="N", help="sizes of the cache")
    size.add_argument("--no-cache", action="store_true", help="only what a token moves without one")
    parser.add_argument("--policy", choices=(*POLICIES, "all"), default="all", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--record", action="store_true", help="write sim/results/cache.json")


def run(args: argparse.Namespace) -> None:
    """Replay each trace; :class:`RoutingError` for one that cannot be used."""
    sizes = () if args.no_cache else args.cache_mib
    policies = POLICIES if args.policy == "all" else (args.policy,)
    options = ["--no-cache"] if args.no_cache else [] if sizes == SIZES else ["--cache-mib", *map(str, sizes)]
    options += [] if args.policy == "all" else ["--policy", args.policy]
    report = {
        "command": " ".join(["emufpga replay", *(path.name for path in args.routes), *options]),
        "traces": [replay(path, sizes, policies) for path in args.routes],
        "provenance": PROVENANCE,
    }
    if args.record:
        for trace, path in zip(report["traces"], args.routes, strict=True):
            trace["source"] = f"{path.name} of {SOURCE}"
        RECORDED.write_text(json.dumps(report, indent=2) + "\n")
        _say(f"written to {RECORDED}")
    print(json.dumps(report, indent=2) if args.json else table(report))


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    return "\n\n".join("\n".join(_lines(trace)) for trace in report["traces"])


def _lines(trace: dict[str, Any]) -> Iterator[str]:
    tokens, recorded = trace["decoded_tokens"], trace["recorded_experts"]
    yield (
        f"{trace['model']}: {trace['layers']} layers, {trace['experts_used']} of {trace['experts']} experts, "
        f"{tokens} decoded tokens"
    )
    yield f"source: {trace['source']}"
    yield f"no cache: {trace['no_cache_mib']:,.0f} MiB a token (derived); reuse of the token before's experts: " + (
        f"{trace['reuse']:.1%} (counted)" if tokens > 1 else "unknown, one token"
    )
    if not trace["rows"]:
        return
    head = f"{'MiB':>7} {'policy':<8}{'hit rate':>10}{'decoding':>10}{'MiB/token':>11}"
    yield ""
    yield head + (f"   as the traced program recorded, of {recorded:,}" if recorded else "")
    for row in trace["rows"]:
        line = f"{row['mib']:>7,} {row['policy']:<8}{row['hit_rate']:>10.1%}{row['decode_hit_rate']:>10.1%}"
        line += f"{row['decode_mib']:>11,.0f}"
        yield line + (f"{row['record_agrees']:>12,}" if "record_agrees" in row else "")
    yield "hit rate: prompt, as one pass, and decoded tokens, from an empty cache; decoding: those tokens alone"
    sets = f"One token's experts: {trace['token_set_mib']:,.0f} MiB; all: {trace['all_experts_mib']:,.0f} MiB."
    yield f"(counted in replay). {sets} The optimum knows the future."


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def mebibytes(text: str) -> int:
    """A size on the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} MiB is no size; give 1 or more")
    return value
