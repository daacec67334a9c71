"""What the router of a running model chose: load of the experts, unions of independent requests, reuse between tokens.

Everything is counted from the routes themselves, while a model runs, whatever computes its experts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BATCHES = (1, 2, 4, 8)
PROVENANCE = "counted from the routes of this run"


class RoutingStats:
    """Counts of one run.

    ``add`` takes what one request chose in one layer of a step, ``end_step`` closes the step.

    Parameters
    ----------
    experts
        Experts of a layer.
    used
        Experts of a token.
    """

    def __init__(self, experts: int, used: int) -> None:
        self.experts, self.used = experts, used
        self._counts: dict[int, NDArray[np.int64]] = {}
        self._step: dict[int, list[tuple[int, bool, NDArray[np.int64]]]] = defaultdict(list)
        self._unions: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)  # layer, batch: size to how often
        self._last: dict[tuple[int, int], set[int]] = {}  # request, layer
        self._reuse: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])  # shared, all
        self.tokens = {"prefill": 0, "decode": 0}

    def add(self, layer: int, request: int, decode: bool, chosen: NDArray[np.int64]) -> None:
        """``chosen`` is tokens × experts of a token, in the order of the text."""
        self._step[layer].append((request, decode, chosen))

    def drop_step(self) -> None:
        """Forget what was added since the last ``end_step``: the step failed and will be done again."""
        self._step.clear()

    def end_step(self) -> None:
        """Count what was added since the last time."""
        for number, (layer, parts) in enumerate(sorted(self._step.items())):
            counts = self._counts.setdefault(layer, np.zeros(self.experts, np.int64))
            decoding = []
            for request, decode, chosen in parts:
                counts += np.bincount(chosen.ravel(), minlength=self.experts)
                phase = "decode" if decode else "prefill"
                self.tokens[phase] += len(chosen) if number == 0 else 0
                if decode:
                    decoding.append(set(chosen[0].tolist()))
                self._count_reuse(layer, request, phase, chosen)
            for batch in BATCHES:
                for start in range(0, len(decoding) - batch + 1, batch):
                    self._unions[layer, batch][len(set().union(*decoding[start : start + batch]))] += 1
        self._step.clear()

    def forget(self, request: int) -> None:
        """The request has ended."""
        for key in [key for key in self._last if key[0] == request]:
            del self._last[key]

    def report(self) -> dict[str, Any]:
        """All of it, as JSON takes it; means of nothing are None."""
        layers = sorted(self._counts)
        return {
            "experts": self.experts,
            "experts_used": self.used,
            "tokens": dict(self.tokens),
            "layers": layers,
            "counts": [self._counts[layer].tolist() for layer in layers],
            "unions": [self._union(batch, layers) for batch in BATCHES],
            "reuse": {phase: self._shares(phase, layers) for phase in ("prefill", "decode")},
            "provenance": {
                "counts": f"{PROVENANCE}: tokens that chose the expert, by layer and expert",
                "unions": f"{PROVENANCE}: different experts of so many independent requests that decoded together",
                "reuse": f"{PROVENANCE}: share of a token's experts that the request's token before chose too",
            },
        }

    def _count_reuse(self, layer: int, request: int, phase: str, chosen: NDArray[np.int64]) -> None:
        before = self._last.get((request, layer))
        shared_all = self._reuse[phase, layer]
        for row in chosen:
            now = set(row.tolist())
            if before is not None:
                shared_all[0] += len(now & before)
                shared_all[1] += len(now)
            before = now
        if before is not None:
            self._last[request, layer] = before

    def _union(self, batch: int, layers: Sequence[int]) -> dict[str, Any]:
        by_layer = [_spread(self._unions[layer, batch]) for layer in layers]
        every = sum((self._unions[layer, batch] for layer in layers), start=Counter())
        return {"batch": batch, "all": _spread(every), "by_layer": by_layer}

    def _shares(self, phase: str, layers: Sequence[int]) -> dict[str, Any]:
        pairs = [self._reuse[phase, layer] for layer in layers]
        return {
            "share": _share(sum(shared for shared, _ in pairs), sum(count for _, count in pairs)),
            "tokens": sum(count for _, count in pairs) // max(self.used * len(layers), 1),
            "by_layer": [_share(*pair) for pair in pairs],
        }


def _spread(sizes: Counter[int]) -> dict[str, Any]:
    n = sizes.total()
    if not n:
        return {"n": 0, "mean": None, "min": None, "max": None}
    mean = sum(size * often for size, often in sizes.items()) / n
    return {"n": n, "mean": mean, "min": min(sizes), "max": max(sizes)}


def _share(shared: int, count: int) -> float | None:
    return shared / count if count else None
