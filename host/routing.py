"""How many experts a batch makes a layer fetch: real routes, and the formula for independent ones.

``python -m host.routing TRACE.csv ... [--record]`` counts the unions of real decode routes (``route_trace v1``, as the
public project Helldez/BigMoeOnEdge writes them): for every layer, its decoded tokens in batches of consecutive ones.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "sim" / "results" / "routing.json"
BATCHES = (1, 2, 4, 8, 16, 32)
FIRST_LINE = "# route_trace v1"
SOURCE = "Helldez/BigMoeOnEdge (Apache-2.0), commit 2d4f2b11db12"


class RoutingError(Exception):
    """A file of routes or unions cannot be used; the text names it."""


@dataclass(frozen=True)
class Unions:
    """Mean number of different experts that a layer's batch wants, by batch size, of a model's real routes."""

    name: str
    experts: int
    used: int
    means: Mapping[int, float]
    provenance: str


GRANITE = Unions(
    "granite-1b",
    32,
    8,
    {1: 8.0, 2: 13.51, 3: 16.79, 4: 18.31, 5: 20.70, 6: 21.00},
    "measured by sw-ml-study/emufpga: mean over layers, 23 prompt tokens of 5 prompts",
)


def independent(experts: int, used: int, batch: int) -> float:
    """E (1 - (1 - k / E)^B): the mean union if every token chose its k of E experts uniformly, by itself."""
    return experts * (1 - (1 - used / experts) ** batch)


def in_parts(chosen: NDArray[np.int64], experts: int, size: int) -> NDArray[np.intp]:
    """An order of tokens in which parts of ``size`` want few different experts each; never more than as they came.

    ``chosen`` is tokens × experts of a token. Greedy: a part begins with the first token left, and takes the one that
    adds the fewest experts until it is full.
    """
    if len(chosen) <= size:
        return np.arange(len(chosen))
    wants = np.zeros((len(chosen), experts), bool)
    np.put_along_axis(wants, chosen, True, axis=1)
    left = np.ones(len(chosen), bool)
    order = np.arange(len(chosen))
    found, have = np.empty_like(order), np.zeros(experts, bool)
    for place in range(len(chosen)):
        if place % size == 0:
            have[:] = False
        added = np.where(left, (wants & ~have).sum(axis=1), experts + 1)
        found[place] = np.argmax(left) if place % size == 0 else np.argmin(added)
        have |= wants[found[place]]
        left[found[place]] = False

    def fetched(tokens: NDArray[np.intp]) -> int:
        return sum(int(wants[tokens[first : first + size]].any(axis=0).sum()) for first in range(0, len(tokens), size))

    return found if fetched(found) < fetched(order) else order


def load(path: Path) -> Unions:
    """Unions of a ``route_trace v1`` file, or of what ``make replay`` wrote; :class:`RoutingError` for any other."""
    try:
        with path.open(newline="") as file:
            if file.readline().strip() == FIRST_LINE:
                return _means(count(path), str(path))
        return _replayed(json.loads(path.read_text()), str(path))
    except OSError as error:
        raise RoutingError(f"{path}: cannot read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise RoutingError(
            f"{path}: neither a route_trace v1 file nor unions of `make replay` ({type(error).__name__}: {error})"
        ) from error


def recorded(path: Path = RECORDED) -> dict[str, Unions]:
    """Unions of the traces counted and committed, by the name of the model in the trace."""
    report = json.loads(path.read_text())
    return {trace["model"]: _means(trace, trace["source"]) for trace in report["traces"]}


class TraceRow(NamedTuple):
    """One expert of one token in one layer.

    ``hit``: the traced program had it in its cache. None, a NaN ``weight``: the trace does not say.
    """

    turn: int
    decoded: bool
    """False: of the prompt, whose tokens pass a layer all at once, its last layer for one token only."""
    step: int
    layer: int
    expert: int
    weight: float
    hit: bool | None


@dataclass(frozen=True)
class RouteTrace:
    """A ``route_trace v1`` file: ``rows`` in its order, bytes of an expert by layer."""

    path: Path
    model: str
    experts: int
    used: int
    expert_bytes: Mapping[int, int]
    rows: Sequence[TraceRow]


def read(path: Path) -> RouteTrace:
    """Read a ``route_trace v1`` file; OSError, or ``ValueError`` naming the file and what is wrong with it."""
    sizes: dict[int, int] = {}
    facts: dict[str, str] = {}
    lines = []
    with path.open(newline="") as file:
        first = file.readline().strip()
        if first != FIRST_LINE:
            raise ValueError(f"{path}: line 1 is {first!r}, not {FIRST_LINE!r}")
        for line in file:
            if not line.startswith("#"):
                lines.append(line)
                continue
            words = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if "layer" in words:
                sizes[int(words["layer"])] = int(words["expert_bytes"])
            facts |= words
    try:
        rows = [
            TraceRow(
                int(row["turn"]),
                row["phase"] == "1",
                int(row["step"]),
                int(row["layer"]),
                int(row["expert"]),
                float(row.get("weight") or "nan"),
                None if row.get("residency") is None else row["residency"] == "1",
            )
            for row in csv.DictReader(lines)
        ]
        model, experts, used = facts["model"], int(facts["n_expert"]), int(facts["n_expert_used"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged route_trace v1 file: {type(error).__name__}: {error}") from error
    return RouteTrace(path, model, experts, used, sizes, rows)


def decoded(trace: RouteTrace) -> dict[int, dict[tuple[int, int], set[int]]]:
    """Experts of each decoded token, by layer and then by turn and step; ``ValueError`` if there is none."""
    layers: dict[int, dict[tuple[int, int], set[int]]] = {}
    for row in trace.rows:
        if row.decoded:
            layers.setdefault(row.layer, {}).setdefault((row.turn, row.step), set()).add(row.expert)
    if not layers:
        raise ValueError("no decoded tokens")
    return layers


def count(path: Path) -> dict[str, Any]:
    """Count a trace's unions over all layers; ``ValueError`` for a file of another form."""
    trace = read(path)
    layers = decoded(trace)
    rows = []
    for batch in BATCHES:
        sizes = [
            len(set().union(*tokens[start : start + batch]))
            for tokens in (list(layer.values()) for layer in layers.values())
            for start in range(0, len(tokens) - batch + 1, batch)
        ]
        if sizes:
            row = {"batch": batch, "batches": len(sizes), "mean": fmean(sizes), "min": min(sizes), "max": max(sizes)}
            rows.append(row)
    return {
        "model": trace.model.removesuffix(".gguf"),
        "experts": trace.experts,
        "experts_used": trace.used,
        "layers": len(layers),
        "source": f"{path.name} of {SOURCE}",
        "rows": rows,
    }


def _means(trace: Mapping[str, Any], source: str) -> Unions:
    means = {int(row["batch"]): float(row["mean"]) for row in trace["rows"]}
    text = f"counted: mean over {trace['layers']} layers of consecutive decoded tokens, {source}"
    return Unions(trace["model"], trace["experts"], trace["experts_used"], means, text)


def _replayed(report: Mapping[str, Any], path: str) -> Unions:
    means = {int(row["batch"]): float(row["union_engine"]) for row in report["rows"]}
    text = f"counted by the engine: layer {report['layer']}, first tokens, {report['source']} ({path})"
    if 1 not in means:
        raise ValueError("no batch of 1, which tells how many experts a token has")
    return Unions(report["model"], int(report["experts"]), round(means[1]), means, text)


def count_all(
    program: str, paths: Iterable[Path], count: Callable[[Path], dict[str, Any]]
) -> list[dict[str, Any]] | None:
    """``count`` of each trace; None, said on stderr, where one cannot be used."""
    traces = []
    for path in paths:
        try:
            traces.append(count(path))
        except (OSError, KeyError, ValueError) as error:
            print(f"{program}: error: {path}: {error}", file=sys.stderr)
            return None
    return traces


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m host.routing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE.csv")
    parser.add_argument("--record", action="store_true", help="write sim/results/routing.json")
    args = parser.parse_args(argv)
    traces = count_all("host.routing", args.traces, count)
    if traces is None:
        return 1
    report = {
        "command": f"python -m host.routing {' '.join(path.name for path in args.traces)} --record",
        "traces": traces,
        "provenance": "counted: different experts among the routes of a layer's batch of consecutive decoded tokens",
    }
    if args.record:
        RECORDED.write_text(json.dumps(report, indent=2) + "\n")
        print(f"written to {RECORDED}")
    for trace in traces:
        print(f"{trace['model']}: {trace['experts']} experts, {trace['experts_used']} a token")
        for row in trace["rows"]:
            formula = independent(trace["experts"], trace["experts_used"], row["batch"])
            print(f"{row['batch']:>5}{row['mean']:>8.2f} ({row['min']}-{row['max']})   if independent {formula:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
