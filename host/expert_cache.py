"""Experts kept nearer than storage: in the host's RAM (``ExpertCache``) or in the board's memory (``BoardCache``).

Both keep whole experts, all three matrices, and let the least recently used go. A *pass* is one run of a layer on a
batch: every expert that the batch wants is asked for once. What a pass wants is never thrown out for it; what finds no
room beside that is passed on without being kept, so the bytes held never exceed the capacity. ``host.cache_replay``
replays recorded routes through the same :class:`Lru`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import ArrayLike

from host.device import MATRICES, Device, LayerResult, Ledger
from host.model_file import ModelFile
from host.storage import CLOSE_TIMEOUT, TIMEOUT, ReadCounts, Store
from hw.formats.messages import MAX_OUTSTANDING, Layer, Mode
from sim.golden.activations import Activations
from sim.workload import engine_layer

POLICIES = ("layer", "global")
"""An equal share of the capacity for each layer, or one for all."""
MIB = 1 << 20

Key = tuple[int, int]
"""(layer, expert)."""


class CacheError(ValueError):
    """A cache that cannot help. One line: what is too small, and the least that is not."""


class Lru:
    """Which experts ``capacity`` bytes hold: bookkeeping only. The least recently used go first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._sizes: OrderedDict[Key, int] = OrderedDict()
        self._wanted: Collection[Key] = ()

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def begin(self, wanted: Iterable[Key]) -> None:
        """A pass begins: until the next one these stay, whatever else comes."""
        self._wanted = frozenset(wanted)

    def touch(self, key: Key, size: int) -> tuple[bool, list[Key]]:
        """The expert is used: whether it was there, and who had to go for it. It is kept (``in``) if there is room."""
        if key in self._sizes:
            self._sizes.move_to_end(key)
            return True, []
        short = self.used + size - self.capacity
        gone = []
        if short > 0:
            for other, bytes_ in self._sizes.items():
                if other not in self._wanted:
                    gone.append(other)
                    short -= bytes_
                    if short <= 0:
                        break
            if short > 0:
                return False, []
        for other in gone:
            self.drop(other)
        self._sizes[key] = size
        self.used += size
        return False, gone

    def drop(self, key: Key) -> None:
        """Forget an expert, where it is there."""
        self.used -= self._sizes.pop(key, 0)


def pools(policy: str, capacity: int, layers: Iterable[int]) -> dict[int, Lru]:
    """Who keeps each layer's experts; ``CacheError`` for a policy that there is not."""
    layers = list(layers)
    if policy == "global":
        return dict.fromkeys(layers, Lru(capacity))
    if policy == "layer":
        return {layer: Lru(capacity // len(layers)) for layer in layers}
    raise CacheError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")


def check(policy: str, capacity: int, sizes: Mapping[int, int], used: int, union: float | None = None) -> str | None:
    """Refuse what holds less than one token's experts; a warning for what holds less than a batch's.

    Parameters
    ----------
    sizes
        Bytes of an expert, by layer.
    used
        Experts a token, in each layer.
    union
        Experts that a batch wants of a layer (mean or most); None: not known.

    Returns
    -------
    The warning, one line; None where there is nothing to warn of.

    Raises
    ------
    CacheError
        Below ``used`` experts a layer no token finds all its experts; and a global LRU, whose least recently used
        layer is the one that comes next, then finds none of them.
    """
    count = len(sizes)
    share, one = (capacity, sum(sizes.values())) if policy == "global" else (capacity // count, max(sizes.values()))
    scale = 1 if policy == "global" else count
    what = f"{count} layers together" if policy == "global" else "a layer's share"
    if share < used * one:
        least = -(-used * one * scale // MIB)
        raise CacheError(
            f"an expert cache of {capacity / MIB:,.4g} MiB holds less than one token's {used} experts a layer "
            f"({what}: {share:,} of {used * one:,} bytes): give {least:,} MiB at least, or none"
        )
    if union is not None and share < union * one:
        slots = share // one
        return (
            f"the expert cache has {slots} slots a layer, a batch wants {union:.4g} experts: those beyond are read "
            f"every time; {-(-union * one * scale // MIB):,.0f} MiB would hold them"
        )
    return None


@dataclass
class CacheCounts:
    """What a cache did for a layer: experts, once for each pass that wanted them, and bytes."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    missed_bytes: int = 0
    evicted: int = 0
    """Experts of the layer that had to go."""

    def count(self, hit: bool, size: int) -> None:
        """One expert of ``size`` bytes."""
        if hit:
            self.hits += 1
            self.hit_bytes += size
        else:
            self.misses += 1
            self.missed_bytes += size


class _Asked(NamedTuple):
    """A piece that was submitted: kept already (``data``), or to be kept as this ``matrix`` of ``parts``."""

    matrix: int
    parts: list[bytes | None] | None
    data: bytes | None


class ExpertCache(Store):
    """A :class:`host.storage.Store` that keeps experts in RAM; used like one, in its place.

    A piece that is kept is handed over without a read, in its turn, and counted as ``cached``. Pieces that are no
    expert's matrix are read as ever. An expert counts once for each pass: when the first of its matrices is submitted,
    as a hit if all three are there. What is kept is not compared with the file again: that it changed is noticed by
    the next read, as :class:`Store` says, and then all of this cache has to be opened again.

    Parameters
    ----------
    path, direct, ahead and all other options
        As for :class:`Store`.
    layers
        The model's layers of experts, in order.
    used
        Experts a token.
    capacity, slots
        Bytes in all, or experts a layer: one of them.
    policy
        One of :data:`POLICIES`.
    union
        See :func:`check`, whose warning is ``warning``.

    Attributes
    ----------
    layers
        :class:`CacheCounts` of each layer, in their order.
    warning
        One line; None where there is none.

    Raises
    ------
    CacheError
        The cache is too small to help, see :func:`check`.
    """

    def __init__(
        self,
        path: str,
        layers: Sequence[Layer],
        used: int,
        *,
        capacity: int | None = None,
        slots: int | None = None,
        policy: str = "layer",
        union: float | None = None,
        **options: Any,
    ) -> None:
        sizes = {number: MATRICES * layer.matrix_bytes for number, layer in enumerate(layers)}
        if (capacity is None) == (slots is None):
            raise ValueError("give capacity or slots, one of them")
        self.capacity = capacity if capacity is not None else (slots or 0) * sum(sizes.values())
        self.policy = policy
        self._sizes = sizes
        self._pools = pools(policy, self.capacity, sizes)
        self.warning = check(policy, self.capacity, sizes, used, union)
        self._places = {
            offset + expert * layer.matrix_bytes: (number, expert, matrix, layer.matrix_bytes)
            for number, layer in enumerate(layers)
            for matrix, offset in enumerate(layer.offsets)
            for expert in range(layer.experts)
        }
        self._kept: dict[Key, list[bytes | None]] = {}
        self._asked: deque[_Asked] = deque()
        self._current: Key | None = None
        self._cached = 0
        self.layers = [CacheCounts() for _ in layers]
        super().__init__(path, **options)

    def announce(self, requests: Sequence[tuple[int, int]]) -> None:
        wanted = {place[:2] for offset, _ in requests if (place := self._places.get(offset))}
        for layer in {layer for layer, _ in wanted}:
            self._pools[layer].begin(wanted)

    def submit(self, offset: int, length: int) -> None:
        if self._closed or self.waiting >= MAX_OUTSTANDING:
            return super().submit(offset, length)  # which says what is wrong
        place = self._places.get(offset)
        matrix, parts = 0, None
        if place and place[3] == length:
            matrix = place[2]
            parts = self._enter(place[:2], matrix)
        data = parts[matrix] if parts else None
        if data is None:
            super().submit(offset, length)
        self._asked.append(_Asked(matrix, parts, data))
        return None

    def take(self, timeout: float = TIMEOUT) -> memoryview:
        asked = self._asked[0] if self._asked else _Asked(0, None, None)
        if asked.data is not None:
            self._asked.popleft()
            self._cached += len(asked.data)
            return memoryview(asked.data)
        waiting = len(self._waiting)
        try:
            data = super().take(timeout)
        finally:
            if len(self._waiting) < waiting:
                self._asked.popleft()
        if asked.parts is not None:
            asked.parts[asked.matrix] = bytes(data)
        return data

    def clear(self) -> None:
        super().clear()
        self._asked.clear()
        self._current = None

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        super().close(timeout)
        self._asked.clear()
        self._kept.clear()

    @property
    def waiting(self) -> int:
        return len(self._asked)

    @property
    def counts(self) -> ReadCounts:
        counts = super().counts
        counts.cached = self._cached
        counts.hits = sum(layer.hits for layer in self.layers)
        counts.misses = sum(layer.misses for layer in self.layers)
        return counts

    @property
    def kept_bytes(self) -> int:
        """Bytes that it holds now."""
        return sum(len(part) for parts in self._kept.values() for part in parts if part is not None)

    def _enter(self, key: Key, matrix: int) -> list[bytes | None] | None:
        """The expert's matrices, None those that are to be read; None in all: it is not kept."""
        if matrix and key == self._current:
            return self._kept.get(key)
        self._current = key
        layer, size = key[0], self._sizes[key[0]]
        parts = self._kept.get(key)
        # One of which a read failed counts as a miss; what is there of it is not read again.
        self.layers[layer].count(parts is not None and None not in parts, size)
        pool = self._pools[layer]
        _, gone = pool.touch(key, size)
        for other in gone:
            self.layers[other[0]].evicted += 1
            del self._kept[other]
        if parts is None and key in pool:
            parts = self._kept[key] = [None] * MATRICES
        return parts


def in_place_of(
    store: Store, model: ModelFile, *, capacity: int | None = None, slots: int | None = None
) -> ExpertCache:
    """A cache of the model file that ``store`` reads, which is closed; for ``Runtime.open``. CacheError as there."""
    store.close()
    layers = [engine_layer(model, layer) for layer in model.layers]
    return ExpertCache(store.path, layers, model.experts_used, capacity=capacity, slots=slots)


class BoardCache:
    """Experts kept in the board's own memory: which ones, the host decides before each layer, when it knows the routes.

    A miss is loaded over the link, then read from the memory with the hits. Loading does not overlap the layer: the
    hardware keeps nothing of what passes. What finds no room passes over the link as ever.

    Parameters
    ----------
    device
        With a memory; what :meth:`Device.load_experts` put there before stays.
    layers, used, policy, union
        As for :class:`ExpertCache`.
    capacity
        Bytes; None: all of the memory that is free.

    Attributes
    ----------
    layers, warning
        As for :class:`ExpertCache`.

    Raises
    ------
    CacheError
        The memory is too small to help.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[Layer],
        used: int,
        *,
        capacity: int | None = None,
        policy: str = "layer",
        union: float | None = None,
    ) -> None:
        sizes = {number: MATRICES * layer.matrix_bytes for number, layer in enumerate(layers)}
        free = device.memory_bytes - device.memory_used
        self.capacity = free if capacity is None else capacity
        if self.capacity > free:
            raise CacheError(
                f"{device.name}: {free:,} bytes of the board's memory are free, {self.capacity:,} asked for: give less"
            )
        self.warning = check(policy, self.capacity, sizes, used, union)
        self._device, self._sizes, self._layers = device, sizes, list(layers)
        self._numbers = {layer.offsets: number for number, layer in enumerate(layers)}
        self._pools = pools(policy, self.capacity, sizes)
        self.layers = [CacheCounts() for _ in layers]

    def load(self, layer: Layer, routes: Iterable[tuple[int, int, int]], store: Store) -> Ledger:
        """Load what these routes want and is not there; where those bytes went. Raises as ``Device.load_experts``."""
        number = self._numbers[layer.offsets]
        pool, size = self._pools[number], self._sizes[number]
        wanted = {expert for _, expert, _ in routes}
        wanted = range(layer.experts) if layer.mode == Mode.TAPE else sorted(wanted)
        pool.begin((number, expert) for expert in wanted)
        missing = []
        for expert in wanted:
            hit, gone = pool.touch((number, expert), size)
            self.layers[number].count(hit, size)
            for other in gone:
                self.layers[other[0]].evicted += 1
                self._device.unload_experts(self._layers[other[0]], [other[1]])
            if not hit and (number, expert) in pool:
                missing.append(expert)
        if not missing:
            return Ledger()
        try:
            return self._device.load_experts(layer, missing, store)
        except BaseException:
            for expert in missing:
                if expert not in self._device.loaded(layer):
                    pool.drop((number, expert))
            raise

    def run_layer(
        self,
        layer: Layer,
        x: ArrayLike | Activations,
        routes: Iterable[tuple[int, int, int]],
        store: Store,
        **options: Any,
    ) -> LayerResult:
        """:meth:`load`, then :meth:`Device.run_layer`; the ledger and the seconds are of both."""
        x, routes = self._device.check(layer, x, routes)
        now = self._device.transport.now
        begin = now()
        loading = self.load(layer, routes, store)
        result = self._device.run_layer(layer, x, routes, store, **options)
        return dataclasses.replace(result, ledger=loading + result.ledger, seconds=now() - begin)
