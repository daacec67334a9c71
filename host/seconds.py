"""``emufpga seconds``: from counted cycles, routed clocks and bandwidths to seconds a layer and tokens a second.

Nothing here measures. Every figure is bytes / bandwidth, cycles / clock, or a sum or maximum of these; each carries its
provenance, which begins with one of ``PROVENANCES``. The equations are in docs/seconds.md.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from host.model_file import ModelFile
from host.routing import GRANITE, Unions, independent, load, recorded
from hw.formats.messages import HEADER_BYTES
from hw.formats.q6_k import BLOCK_BYTES, BLOCK_WEIGHTS, SUB_BLOCK_WEIGHTS, SUB_BLOCKS

ROOT = Path(__file__).resolve().parent.parent
BOARDS = ROOT / "boards" / "results"
COUNTED = ROOT / "sim" / "results"
BATCHES = (1, 2, 4, 8, 16)
MODES = ("selected", "tape")
UART_BAUD = 3_000_000
BAUD_BITS = 10
"""A byte as 8N1."""
PROVENANCES = ("measured", "counted", "routed", "datasheet", "reported", "derived", "assumed", "unknown")
POWER_UNKNOWN = "unknown: there is no open estimator for ECP5; measure, and give --watts"


class SecondsError(Exception):
    """A board, file or figure that is asked for is not there or cannot be; the text says what there is."""


@dataclass(frozen=True)
class Shape:
    """A model's experts: ``used`` of ``experts`` a token in each of ``layers``, all matrices ``Q6_K``."""

    name: str
    layers: int
    experts: int
    used: int
    width: int
    expert_width: int

    @property
    def blocks(self) -> int:
        """Blocks of an expert: three matrices of width x expert width weights."""
        return 3 * self.width * self.expert_width // BLOCK_WEIGHTS

    @property
    def expert_bytes(self) -> int:
        return self.blocks * BLOCK_BYTES

    @property
    def token_bytes(self) -> int:
        """All layers' experts of a token."""
        return self.layers * self.used * self.expert_bytes

    @property
    def bank_bytes(self) -> int:
        return self.layers * self.experts * self.expert_bytes


MODELS = {
    "granite-1b": Shape("Granite 3.1 1B-A400M", 24, 32, 8, 1024, 512),
    "granite-3b": Shape("Granite 3.x 3B-A800M", 32, 40, 8, 1536, 512),
    "olmoe": Shape("OLMoE-1B-7B", 16, 64, 8, 2048, 1024),
    "qwen3-30b": Shape("Qwen3-30B-A3B", 48, 128, 8, 2048, 768),
    "qwen3-30b-k6": Shape("Qwen3-30B-A3B cut to 6 experts a token", 48, 128, 6, 2048, 768),
    "mixtral": Shape("Mixtral-8x7B", 32, 8, 2, 4096, 14336),
}
"""From the models' published configurations."""


@dataclass(frozen=True)
class Home:
    """Where experts come from: a link from the host, or a memory on the board.

    ``bandwidth`` in bytes/s before framing, ``share`` of it that is weights, ``latency`` in s for a message to reach
    the host (None: unknown, taken as 0; a memory's vectors pass over the board's link, whose latency it is).
    """

    kind: str
    bandwidth: float
    provenance: str
    share: str = ""
    """Whose payload share in link.json: ``uart``, ``axis`` or none."""
    latency: float | None = None
    latency_provenance: str = "unknown: taken as 0"


FTDI = "datasheet: FTDI's latency timer at its least; 16 ms where the system refuses it"
MSI = "reported: 3.6-4.8 us from MSI to handler on an Artix-7 (pcie_7x)"
HOMES = {
    "pcie-gen2x4": Home("link", 1600e6, "reported: XDMA host to card, K7-325T, 8 MB transfers", "axis", 4.8e-6, MSI),
    "pcie-gen2x1": Home("link", 417e6, "reported: opencores pcie_sg_dma, Virtex-6, read", "axis", 4.8e-6, MSI),
    "ft601": Home("link", 366e6, "reported: USB 3, non-blocking transfers of 1 MB", "axis"),
    "gbe": Home("link", 117e6, "assumed: 98 % of 119.6 MB/s, UDP of 1,472 of 1,538 B on the wire", "axis"),
    "ddr3-800x16": Home("memory", 1440e6, "derived: data sheet's peak of 1600 MB/s x 90 %, assumed"),
    "ddr3-300x16": Home("memory", 510e6, "derived: ECP5, LiteDRAM at 75 MHz, peak of 600 MB/s x 85 %, assumed"),
    "sdram-133x16": Home("memory", 226e6, "derived: data sheet's peak of 266 MB/s x 85 %, assumed"),
    "sd-50": Home("memory", 22.5e6, "derived: 4 bits at 50 MHz, peak of 25 MB/s x 90 %, as LiteSDCard reports"),
}
"""Beside the UART, whose rate is the board's. Efficiencies are assumptions, not of a controller of this project."""
OWN = {"nitefury": ("pcie-gen2x4", "ddr3-800x16"), "acorn": ("pcie-gen2x4", "ddr3-800x16")}
"""What a board has, by the beginning of its name; any other: the UART."""


@dataclass(frozen=True)
class Board:
    """A build of the hardware as boards/results/ has it; ``clock_hz`` None: unknown."""

    name: str
    clock_hz: float | None
    clock_provenance: str
    lanes: int
    max_batch: int
    link_bytes: int
    limits: tuple[int, int, int]
    """Width, expert width and experts that it takes."""
    memory_bytes: int
    uart_baud: int

    @cached_property
    def own(self) -> tuple[str, ...]:
        return next((homes for start, homes in OWN.items() if self.name.startswith(start)), ("uart",))

    def home(self, name: str) -> Home:
        if name != "uart":
            return HOMES[name]
        rate = self.uart_baud / BAUD_BITS
        source = f"datasheet: {self.uart_baud / 1e6:g} Mbaud, {BAUD_BITS} bits a byte"
        return Home("link", rate, source, "uart", 1e-3, FTDI)

    def takes(self, shape: Shape) -> bool:
        return all(
            need <= limit
            for need, limit in zip((shape.width, shape.expert_width, shape.experts), self.limits, strict=True)
        )


@dataclass(frozen=True)
class Counts:
    """What the simulation counted: payload shares, and a layer's cycles beside its blocks for one Granite token."""

    shares: Mapping[str, float]
    rest: float

    @classmethod
    def read(cls) -> Counts:
        """From sim/results/; :class:`SecondsError` where a file is not there or has another form."""
        link, cycles = _json(COUNTED / "link.json"), _json(COUNTED / "layer_cycles.json")
        try:
            one = next(r for r in cycles["rows"] if (r["lanes"], r["tokens"], r["mode"]) == (1, 1, "selected"))
            rest = one["cycles"] - SUB_BLOCKS * one["blocks"]
            return cls({name: link[name]["payload_share"] for name in ("uart", "axis")}, rest)
        except (KeyError, StopIteration, TypeError) as error:
            raise SecondsError(f"{COUNTED}: link.json or layer_cycles.json has another form: {error!r}") from error


def boards(folder: Path | None = None) -> dict[str, Board]:
    """All boards with results; :class:`SecondsError` for a file of another form."""
    return {path.stem: _board(path) for path in sorted((folder or BOARDS).glob("*.json"))}


def board_of(name: str, there: Mapping[str, Board]) -> Board:
    """One of ``boards``; :class:`SecondsError` that names those that there are."""
    if name not in there:
        raise SecondsError(f"board {name}: no boards/results/{name}.json; there are {', '.join(there) or 'none'}")
    return there[name]


def _board(path: Path) -> Board:
    result = _json(path)
    try:
        params = result["params"]
        clock = result["clock_hz"]
        bits = params.get("memory_bits", 0)
        return Board(
            name=path.stem,
            clock_hz=clock,
            clock_provenance=result["clock_provenance"] if clock is not None else _unknown(result["clock_provenance"]),
            lanes=params["tokens"],
            max_batch=params["max_batch"],
            link_bytes=params["link_bytes"],
            limits=(params["max_width"], params["max_expert_width"], params["max_experts"]),
            memory_bytes=2**bits if bits else 0,
            uart_baud=result.get("uart_baud") or UART_BAUD,
        )
    except (KeyError, TypeError) as error:
        raise SecondsError(f"{path}: not a result of `make synth RECORD=1`: {error!r}") from error


def _unknown(text: str) -> str:
    return text if text.startswith("unknown") else f"unknown: {text}"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise SecondsError(f"{path}: cannot read: {error.strerror}; run in a checkout of the project") from error
    except ValueError as error:
        raise SecondsError(f"{path}: not JSON: {error}") from error


@dataclass(frozen=True)
class Routing:
    """Mean union of a batch's experts: from real routes where they have that batch, else for independent ones."""

    shape: Shape
    unions: Unions | None

    def __post_init__(self) -> None:
        if self.unions and (self.unions.experts, self.unions.used) != (self.shape.experts, self.shape.used):
            raise SecondsError(
                f"{self.unions.name}: its routes are {self.unions.used} of {self.unions.experts} experts, "
                f"{self.shape.name} has {self.shape.used} of {self.shape.experts}; give another --model or --unions"
            )

    def union(self, batch: int) -> float:
        if self.unions and batch in self.unions.means:
            return self.unions.means[batch]
        return independent(self.shape.experts, self.shape.used, batch)

    def provenance(self, *batches: int) -> str:
        """Of the unions of these batches, those of no token aside: derived where one of them is."""
        if self.unions and all(batch in self.unions.means for batch in batches if batch):
            return self.unions.provenance
        return "derived: E (1 - (1 - k/E)^B), experts chosen uniformly and independently; no routes of this batch"

    def passes(self, batch: int, lanes: int) -> float:
        """Expert passes: a group of ``lanes`` tokens passes each expert of its own union once."""
        if lanes == 1:
            return batch * self.shape.used  # exact: a pass for each route
        whole, left = divmod(batch, lanes)
        return whole * self.union(lanes) + (self.union(left) if left else 0)


@dataclass(frozen=True)
class Chosen(Routing):
    """The routes of one run of a layer instead of means: ``chosen`` is tokens × experts of a token."""

    chosen: tuple[tuple[int, ...], ...] = ()

    def union(self, batch: int) -> float:
        return len(set().union(*self.chosen[:batch]))

    def passes(self, batch: int, lanes: int) -> float:
        some = self.chosen[:batch]
        groups = (some[first : first + lanes] for first in range(0, batch, lanes))
        return sum(len(set().union(*group)) for group in groups)


@dataclass(frozen=True)
class Layer:
    """One layer of one batch; seconds, bytes and cycles. ``seconds`` None: unknown, but no less than ``at_least``."""

    batch: int
    runs: int
    union: float
    """Experts fetched, all runs together."""
    bytes: float
    cycles: float
    transfer: float
    compute: float | None
    vectors: float
    trips: float
    seconds: float | None
    at_least: float
    bound: float | None
    """max(bytes / bandwidth, MACs / (16 x lanes x clock)), with no framing, no round trip, nothing beside blocks."""
    binds: str | None


def layer(
    routing: Routing, board: Board, home: Home, link: Home, counts: Counts, batch: int, mode: str, storage: float | None
) -> Layer:
    """The model: per run max(transfer, compute) + vectors + round trips; a batch beyond the board's takes more runs.

    ``link`` carries the vectors; ``storage`` is the rate in bytes/s of the file behind a host link, None: no limit.
    """
    shape = routing.shape
    whole, left = divmod(batch, board.max_batch)
    sizes = [board.max_batch] * whole + [left] * (left > 0)
    bandwidth = home.bandwidth * counts.shares.get(home.share, 1.0)
    slow_storage = home.kind == "link" and storage is not None and storage < bandwidth
    raw = home.bandwidth
    if slow_storage:
        assert storage is not None
        bandwidth = raw = storage
    total: dict[str, float] = dict.fromkeys(("union", "bytes", "cycles", "transfer", "compute", "vectors", "both"), 0.0)
    for size in sizes:
        union = routing.union(size)
        moved = (union if mode == "selected" else shape.experts) * shape.expert_bytes
        cycles = _cycles(routing, board, counts, size, mode)
        transfer, compute = moved / bandwidth, cycles / board.clock_hz if board.clock_hz else 0.0
        step = {
            "union": union,
            "bytes": moved,
            "cycles": cycles,
            "transfer": transfer,
            "compute": compute,
            "vectors": _vector_bytes(shape, size) / link.bandwidth,
            "both": max(transfer, compute),
        }
        total = {name: total[name] + step[name] for name in total}
    # The host waits for the first request (none where all experts lie on the board), then for the outputs.
    trips = len(sizes) * (2 if home.kind == "link" else 1) * (link.latency or 0.0)
    at_least = total["both"] + total["vectors"] + trips
    macs = batch * shape.used * shape.blocks * BLOCK_WEIGHTS
    known = board.clock_hz is not None
    parts = {
        "storage" if slow_storage else home.kind: total["transfer"],
        "multipliers": total["compute"],
        "vectors": total["vectors"],
        "round trips": trips,
    }
    bound = None
    if board.clock_hz:
        bound = max(total["bytes"] / raw, macs / (SUB_BLOCK_WEIGHTS * board.lanes * board.clock_hz))
    return Layer(
        batch=batch,
        runs=len(sizes),
        union=total["union"],
        bytes=total["bytes"],
        cycles=total["cycles"],
        transfer=total["transfer"],
        compute=total["compute"] if known else None,
        vectors=total["vectors"],
        trips=trips,
        seconds=at_least if known else None,
        at_least=at_least,
        bound=bound,
        binds=max(parts, key=lambda name: parts[name]) if known else None,
    )


def chosen_seconds(
    shape: Shape,
    board: Board,
    home: Home,
    link: Home,
    counts: Counts,
    chosen: Sequence[Sequence[int]],
    mode: str,
    storage: float | None = None,
    cycles: int | None = None,
) -> float:
    """:func:`layer`'s seconds for the very experts that a batch wants, in the device's order of tokens.

    ``cycles`` of all of it, where a device counted them, take the place of the formula's. :class:`SecondsError` for a
    board whose clock is unknown.
    """
    if not board.clock_hz:
        raise SecondsError(f"board {board.name}: its clock is {board.clock_provenance}: no time follows from it")
    runs = []
    for first in range(0, len(chosen), board.max_batch):
        part = tuple(tuple(row) for row in chosen[first : first + board.max_batch])
        runs.append(layer(Chosen(shape, None, part), board, home, link, counts, len(part), mode, storage))
    if cycles is None:
        return sum(run.at_least for run in runs)
    beside = sum(run.vectors + run.trips for run in runs)
    return max(sum(run.transfer for run in runs), cycles / board.clock_hz) + beside


def _cycles(routing: Routing, board: Board, counts: Counts, batch: int, mode: str) -> float:
    """16 cycles a block and pass, but no fewer than its bytes need; 210 / link bytes a drained block; and the rest.

    The rest, counted for one Granite token, is taken once a token, in proportion to the width and, beyond 8, to the
    experts of a token: counted layers of up to 8 tokens have up to a fifth less.
    """
    shape = routing.shape
    union = routing.union(batch)
    bus = BLOCK_BYTES / board.link_bytes
    cycles = shape.blocks * max(SUB_BLOCKS * routing.passes(batch, board.lanes), bus * union)
    if mode == "tape":
        cycles += shape.blocks * bus * (shape.experts - union)
    granite = MODELS["granite-1b"]
    return cycles + batch * counts.rest * shape.width / granite.width * max(1.0, shape.used / granite.used)


def _vector_bytes(shape: Shape, batch: int) -> int:
    """CONFIG, LOAD_X and ROUTES in, OUTPUT and DONE out (hw/formats/messages.py)."""
    load = shape.width // BLOCK_WEIGHTS * (HEADER_BYTES + 2 * BLOCK_WEIGHTS)
    routes = HEADER_BYTES + 8 * batch * shape.used
    output = HEADER_BYTES + 8 * shape.width
    return HEADER_BYTES + 48 + routes + batch * (load + output) + HEADER_BYTES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("--board", action="append", metavar="NAME", help="of boards/results (default: all)")
    parser.add_argument(
        "--model", default="granite-1b", metavar="NAME", help=f"{', '.join(MODELS)}, or FILE.gguf (default: granite-1b)"
    )
    homes = ("uart", *HOMES)
    parser.add_argument(
        "--home",
        action="append",
        choices=("all", *homes),
        help="where the experts lie, also one that the board has not (default: its own)",
    )
    parser.add_argument("--batch", type=_batch, action="append", metavar="B", help="tokens a step (1, 2, 4, 8, 16)")
    parser.add_argument("--mode", choices=MODES, default="selected", help="which experts pass (default: selected)")
    parser.add_argument("--watts", type=_positive, metavar="W", help="the board's measured power, for joules a token")
    parser.add_argument("--bandwidth", type=_positive, metavar="MB/S", help="measured rate of --home, for the table's")
    parser.add_argument("--unions", type=Path, metavar="FILE", help="routes (route_trace v1) or unions (make replay)")
    parser.add_argument("--storage", type=Path, metavar="FILE", help="what `emufpga bench storage --json FILE` wrote")
    parser.add_argument("--json", action="store_true", help="print JSON: every figure with unit and provenance")


def _batch(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 to 1024, not {text!r}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def run(args: argparse.Namespace) -> None:
    """The command; :class:`SecondsError` or ``RoutingError`` for what is not there."""
    report = calculate(
        board_names=args.board,
        model=args.model,
        home_names=args.home,
        batches=tuple(dict.fromkeys(args.batch or BATCHES)),
        mode=args.mode,
        watts=args.watts,
        megabytes=args.bandwidth,
        unions=args.unions,
        storage=args.storage,
    )
    print(json.dumps(report, indent=2) if args.json else table(report))


def calculate(
    *,
    board_names: Sequence[str] | None = None,
    model: str = "granite-1b",
    home_names: Sequence[str] | None = None,
    batches: Sequence[int] = BATCHES,
    mode: str = "selected",
    watts: float | None = None,
    megabytes: float | None = None,
    unions: Path | None = None,
    storage: Path | None = None,
) -> dict[str, Any]:
    """All rows; every number of a row is ``{"value", "unit", "provenance"}``, value None where it is unknown."""
    there = boards()
    for name in board_names or ():
        board_of(name, there)
    if megabytes is not None and (home_names is None or len(home_names) != 1 or home_names[0] == "all"):
        raise SecondsError("--bandwidth is the rate of one home: give one --home with it")
    routing = Routing(shape := _shape(model), load(unions) if unions else _unions(model))
    counts = Counts.read()
    rate, rate_provenance = _storage(storage) if storage else (None, "unknown: taken to keep up with the link")
    rows = []
    for name in dict.fromkeys(board_names or there):
        board = there[name]
        names = ("uart", *HOMES) if home_names and "all" in home_names else tuple(home_names or board.own)
        for home_name in dict.fromkeys(names):
            home = board.home(home_name)
            if megabytes is not None:
                home = replace(home, bandwidth=megabytes * 1e6, provenance="measured: given with --bandwidth")
            own = home_name in board.own
            link = home if home.kind == "link" else board.home(board.own[0])
            for batch in batches:
                one = layer(routing, board, home, link, counts, batch, mode, rate)
                lacks = own and home.kind == "memory" and 0 < board.memory_bytes < shape.bank_bytes
                rows.append(_row(routing, board, (home_name, home, own), link, counts, one, mode, watts, lacks))
                if rate is not None and home.kind == "link":
                    rows[-1]["storage"] = _figure(rate, "B/s", rate_provenance)
    return {
        "model": shape.name,
        "shape": {
            "layers": shape.layers,
            "experts": shape.experts,
            "experts_used": shape.used,
            "width": shape.width,
            "expert_width": shape.expert_width,
        },
        "mode": mode,
        "expert_bytes": _figure(shape.expert_bytes, "B", "derived: 3 x width x expert width / 256 x 210"),
        "token_bytes": _figure(shape.token_bytes, "B", "derived: layers x experts a token x bytes of an expert"),
        "power": _figure(watts, "W", "measured: given with --watts" if watts is not None else POWER_UNKNOWN),
        "rows": rows,
    }


def _shape(model: str) -> Shape:
    if model in MODELS:
        return MODELS[model]
    if not model.endswith(".gguf"):
        raise SecondsError(f"model {model}: not known; there are {', '.join(MODELS)}, or give a FILE.gguf")
    with ModelFile.open(model) as file:
        return Shape(
            file.name or Path(model).name,
            len(file.layers),
            file.expert_count,
            file.experts_used,
            file.width,
            file.expert_width,
        )


def _unions(model: str) -> Unions | None:
    if model == "granite-1b":
        return GRANITE
    return recorded().get("Qwen3-30B-A3B-Q4_K_M") if model == "qwen3-30b-k6" else None


def _storage(path: Path) -> tuple[float, str]:
    report = _json(path)
    try:
        modes = {mode["mode"]: mode["speeds"]["feed"]["median"] for mode in report["modes"]}
        name = "direct" if "direct" in modes else min(modes, key=lambda mode: modes[mode])
        return modes[name] * 1e9, f"measured: feed, {name}, median; {path}"
    except (KeyError, TypeError, ValueError) as error:
        raise SecondsError(f"{path}: not a report of `emufpga bench storage --json`: {error!r}") from error


def _figure(value: float | None, unit: str, provenance: str) -> dict[str, Any]:
    return {"value": value, "unit": unit, "provenance": provenance}


def _row(
    routing: Routing,
    board: Board,
    named: tuple[str, Home, bool],
    link: Home,
    counts: Counts,
    one: Layer,
    mode: str,
    watts: float | None,
    lacks: bool,
) -> dict[str, Any]:
    shape = routing.shape
    name, home, own = named
    clock = board.clock_provenance
    if board.clock_hz is not None and not board.takes(shape):
        limits = "width {}, expert width {}, {} experts".format(*board.limits)
        clock = f"assumed: as of the build for {limits}, which cannot hold this model; that was {clock}"
    why = "derived: max(transfer, compute) + vectors + round trips"
    seconds = one.seconds
    if board.clock_hz is None:
        why = "unknown: the clock is unknown; see at_least"
    if lacks:
        seconds, why = None, f"unknown: {shape.bank_bytes:,} B of experts do not fit {board.memory_bytes:,} B"
    step = None if seconds is None else shape.layers * seconds
    fastest = one.batch / (shape.layers * one.at_least)
    share = counts.shares.get(home.share)
    joules = None if step is None or watts is None else watts * step / one.batch
    size = min(one.batch, board.max_batch)
    parts = "derived: each run's bytes / (bandwidth x payload share, or storage's rate if that is less)"
    return {
        "board": board.name,
        "home": name,
        "board_has_it": own,
        "binds": one.binds if seconds is not None else None,
        "batch": _figure(one.batch, "tokens", "assumed: as asked for"),
        "runs": _figure(one.runs, "runs a layer", f"derived: the build holds {board.max_batch} tokens at a time"),
        "clock": _figure(board.clock_hz, "Hz", clock),
        "bandwidth": _figure(home.bandwidth, "B/s", home.provenance),
        "payload_share": _figure(
            1.0 if share is None else share,
            "1",
            "assumed: bursts are in the bandwidth" if share is None else f"counted: {home.share} in RTL, link.json",
        ),
        "experts": _figure(
            one.union, "experts a layer", routing.provenance(size, one.batch % board.max_batch if one.runs > 1 else 0)
        ),
        "bytes": _figure(one.bytes, "B a layer", f"derived: {'union of' if mode == 'selected' else 'all'} experts"),
        "cycles": _figure(
            one.cycles,
            "cycles a layer",
            f"derived: {SUB_BLOCKS} a block and pass, {BLOCK_BYTES / board.link_bytes:g} a drained block, "
            f"{counts.rest:g} more a Granite token (all three counted)",
        ),
        "transfer": _figure(one.transfer, "s a layer", parts),
        "compute": _figure(
            one.compute, "s a layer", "derived: cycles / clock" if one.compute else "unknown: the clock is unknown"
        ),
        "vectors": _figure(one.vectors, "s a layer", "derived: bytes of vectors, routes, outputs / link's bandwidth"),
        "round_trips": _figure(one.trips, "s a layer", link.latency_provenance),
        "seconds": _figure(seconds, "s a layer", why),
        "at_least": _figure(one.at_least, "s a layer", "derived: what is known of seconds"),
        "tokens_per_second": _figure(
            None if step is None else one.batch / step,
            "tokens/s",
            why if step is None else "derived: batch / (layers x seconds)",
        ),
        "tokens_per_second_at_most": _figure(fastest, "tokens/s", "derived: batch / (layers x at_least)"),
        "over_bound": _figure(
            None if seconds is None or one.bound is None else seconds / one.bound,
            "1",
            "derived: seconds / max(bytes / bandwidth, MACs / (16 x lanes x clock))" if seconds is not None else why,
        ),
        "joules_per_token": _figure(
            joules,
            "J",
            why
            if step is None and watts is not None
            else POWER_UNKNOWN
            if watts is None
            else "derived: watts x seconds of a step / batch",
        ),
    }


def table(report: Mapping[str, Any]) -> str:
    """The rows under one another, then where their figures come from; 120 columns."""
    shape, watts = report["shape"], report["power"]["value"]
    joules_shown = watts is not None  # in place of the bytes: 120 columns hold no more
    title = (
        f"{report['model']}: {shape['layers']} layers, {shape['experts_used']} of {shape['experts']} experts, "
        f"{report['token_bytes']['value']:,} B a token; {report['mode']} mode"
    )
    lines = [
        title,
        "",
        f"{'board':<15}{'clock':>9}  {'home':<13}{'batch':>5}{'experts':>8}"
        + ("" if joules_shown else f"{'MB/layer':>9}")
        + f"{'s/layer':>18}"
        f"{'tokens/s':>18}  {'binds':<12}{'x bound':>7}" + (f"{'J/token':>10}" if watts is not None else ""),
    ]
    sources: dict[tuple[str, str], dict[str, None]] = {}
    for row in report["rows"]:
        value = {key: figure["value"] for key, figure in row.items() if isinstance(figure, Mapping)}
        clock = "unknown" if value["clock"] is None else f"{value['clock'] / 1e6:.1f} MHz"
        seconds = f"unknown, >{value['at_least']:.3g}" if value["seconds"] is None else f"{value['seconds']:.4g}"
        most = f"unknown, <{value['tokens_per_second_at_most']:.3g}"
        speed = most if value["seconds"] is None else f"{value['tokens_per_second']:.3g}"
        if row["seconds"]["provenance"].endswith(" B"):  # what does not fit has no speed at all
            seconds = speed = "does not fit"
        over = "unknown" if value["over_bound"] is None else f"{value['over_bound']:.3f}"
        mark = "" if row["board_has_it"] else "*"
        known = "~" if row["experts"]["provenance"].startswith("derived") else ""
        megabytes = "" if joules_shown else f"{value['bytes'] / 1e6:>9.2f}"
        line = (
            f"{row['board']:<15}{clock:>9}  {row['home'] + mark:<13}{value['batch']:>5}"
            f"{known + format(value['experts'], '.2f'):>8}{megabytes}{seconds:>18}{speed:>18}  "
            f"{row['binds'] or 'unknown':<12}{over:>7}"
        )
        if watts is not None:
            joules = value["joules_per_token"]
            line += f"{'unknown' if joules is None else format(joules, '.4g'):>10}"
        lines.append(line)
        rate, share = value["bandwidth"] / 1e6, value["payload_share"]
        for kind, label, key, shown in (
            ("clock", row["board"], "clock", ""),
            ("bandwidth", row["home"], "bandwidth", f"{rate:,.4g} MB/s, "),
            ("payload share", row["home"], "payload_share", f"{share:.2%}, "),
            ("round trips", row["home"], "round_trips", ""),
            ("experts, batch", str(value["batch"]), "experts", ""),
            *(
                [("storage", row["home"], "storage", f"{value['storage'] / 1e6:,.0f} MB/s, ")]
                if "storage" in row
                else []
            ),
        ):
            if key not in row:
                continue
            text = shown + row[key]["provenance"].split(", capped at")[0]
            sources.setdefault((kind, text), {})[label] = None
    lines += ["", "By hand, bytes of a token alone over each bandwidth, without and with framing:"]
    homes = {row["home"]: row for row in report["rows"]}
    for name, row in homes.items():
        size, rate, share = report["token_bytes"]["value"], row["bandwidth"]["value"], row["payload_share"]["value"]
        lines.append(
            f"  {name}: {size:,} B / {rate / 1e6:,.4g} MB/s = {size / rate:.4g} s a token (derived); "
            f"at {share:.2%} payload {size / rate / share:.4g} s"
        )
    lines += ["", "Where it comes from:"]
    lines += _folded([f"{kind} {', '.join(labels)}: {text}" for (kind, text), labels in sources.items()])
    lines += _folded([f"cycles: {report['rows'][0]['cycles']['provenance']}" if report["rows"] else ""])
    lines += _folded(["s/layer: derived: max(transfer, compute) + vectors + round trips; tokens/s counts all B tokens"])
    lines += _folded([f"power: {report['power']['provenance']}"])
    if any(not row["board_has_it"] for row in report["rows"]):
        lines.append("  * this board does not have it: what if it had")
    if any(row["experts"]["provenance"].startswith("derived") for row in report["rows"]):
        lines.append("  ~ by the formula for independent tokens, not from routes")
    return "\n".join(lines)


def _folded(texts: Sequence[str]) -> list[str]:
    return [
        line
        for text in texts
        for line in textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    ]
