"""``make traces``: how real decode routes are spread over a model's experts, layer by layer.

``python -m host.traces TRACE.csv ... [--record]`` counts, for every layer and expert, the decoded tokens that chose it,
and by layer what share of a token's experts the token before chose too. Traces are ``route_trace v1`` files; unions of
batches are :mod:`host.routing`'s.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from host.routing import ROOT, SOURCE, count_all, decoded, read

RECORDED = ROOT / "sim" / "results" / "traces.json"
PROVENANCE = {
    "counts": "counted: decoded tokens that chose an expert, by layer and expert",
    "reuse": "counted: share of a token's experts that the token before had in the same layer, by layer",
    "expert_bytes": "reported: the trace's own header, mean over layers, in the types of the traced file",
}


def count(path: Path) -> dict[str, Any]:
    """One trace; OSError, or ``ValueError`` for a file of another form or without decoded tokens."""
    trace = read(path)
    layers = decoded(trace)
    counts, reuse = [], []
    for _, tokens in sorted(layers.items()):
        one = [0] * trace.experts
        for chosen in tokens.values():
            for expert in chosen:
                one[expert] += 1
        counts.append(one)
        places = list(tokens)
        shared = [
            len(tokens[now] & tokens[before]) / len(tokens[now])
            for before, now in pairwise(places)
            if before[0] == now[0]
        ]
        reuse.append(round(fmean(shared), 6) if shared else None)
    return {
        "model": trace.model.removesuffix(".gguf"),
        "source": f"{path.name} of {SOURCE}",
        "layers": len(counts),
        "experts": trace.experts,
        "experts_used": trace.used,
        "tokens": max(map(len, layers.values())),
        "expert_bytes": fmean(trace.expert_bytes.values()) if trace.expert_bytes else None,
        "counts": counts,
        "reuse": reuse,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m host.traces", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE.csv")
    parser.add_argument("--record", action="store_true", help="write sim/results/traces.json")
    args = parser.parse_args(argv)
    traces = count_all("host.traces", args.traces, count)
    if traces is None:
        return 1
    for trace in traces:
        totals = [sum(one) for one in zip(*trace["counts"], strict=True)]
        known = [each for each in trace["reuse"] if each is not None]
        print(
            f"{trace['model']}: {trace['layers']} layers, {trace['experts_used']} of {trace['experts']} experts, "
            f"{trace['tokens']} tokens; an expert of all layers {min(totals)}-{max(totals)} times; "
            f"reuse {fmean(known):.1%}"
            if known
            else f"{trace['model']}: one token"
        )
    if args.record:
        names = " ".join(path.name for path in args.traces)
        report = {"command": f'make traces ROUTES="{names}" RECORD=1', "traces": traces, "provenance": PROVENANCE}
        RECORDED.write_text(_compact(report) + "\n")
        print(f"written to {RECORDED}")
    return 0


def _compact(report: dict[str, Any]) -> str:
    """JSON with a layer's counts in one line."""
    marks = {}
    for number, trace in enumerate(report["traces"]):
        for layer, one in enumerate(trace["counts"]):
            marks[f'"@{number}.{layer}"'] = json.dumps(one, separators=(",", ":"))
    slim = report | {
        "traces": [
            trace | {"counts": [f"@{number}.{layer}" for layer in range(len(trace["counts"]))]}
            for number, trace in enumerate(report["traces"])
        ]
    }
    text = json.dumps(slim, indent=1)
    for mark, numbers in marks.items():
        text = text.replace(mark, numbers)
    return text


if __name__ == "__main__":
    sys.exit(main())
