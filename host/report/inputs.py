"""What the report is made from: every committed result, with its date and commit, or what is wrong with it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FRESH = Path("build") / "sim"
"""Where a command without ``RECORD=1`` leaves its result."""
UPSTREAM = Path("host") / "report" / "upstream.json"
PUBLISHED = "none: figures that others publish"
WATCHED = (Path("sim") / "results", Path("boards") / "results", Path("models"), UPSTREAM)
"""What the page is made from."""
UNKNOWN = "unknown"
NOT_COMMITTED = "not committed"

KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "accuracy": ("make accuracy RECORD=1", ("errors", "provenance")),
    "agents": ("make agents RECORD=1", ("workloads",)),
    "cache": ("make cache-replay RECORD=1", ("traces", "provenance")),
    "capacity": ("make capacity RECORD=1", ("rows", "claims", "provenance")),
    "faults": ("make faults RECORD=1", ("total.faults", "total.wrong", "rows", "provenance")),
    "hls4ml": ("make hls4ml RECORD=1", ("errors", "engine", "derived")),
    "host_layer": ("make host-layer RECORD=1", ("rows", "runs", "load", "provenance")),
    "layer_cycles": ("make layer-cycles RECORD=1", ("rows", "expert_blocks", "bit_exact", "provenance")),
    "link": ("make link-rate RECORD=1", ("axis.payload_share", "uart.payload_share", "driver", "provenance")),
    "netlist": ("make netlist RECORD=1", ("equal", "layers", "provenance")),
    "pipeline": ("make pipeline RECORD=1", ("figures", "window.points", "upstream", "provenance")),
    "routing": ("python -m host.routing TRACE.csv ... --record", ("traces", "provenance")),
    "storage": ("emufpga bench storage FILE.gguf --json sim/results/storage.json", ("modes", "provenance")),
    "suite": ("make suite RECORD=1", ("rows", "right", "tasks", "provenance")),
    "sweep": ("make sweep RECORD=1", ("rows", "bit_exact", "provenance")),
    "token": ("make sim-token RECORD=1", ("bit_exact", "cycles_per_block", "blocks", "provenance")),
    "traces": ('make traces ROUTES="TRACE.csv ..." RECORD=1', ("traces", "provenance")),
    "unions": ("make replay ROUTES=TRACE.csv RECORD=1", ("rows", "equal", "provenance")),
}
"""Each result in sim/results/: the command that writes it, and keys without which it is something else."""
BOARD_KEYS = ("board", "params.tokens", "clock_hz", "clock_provenance", "utilisation")


@dataclass(frozen=True)
class Input:
    """A file: ``data`` None where ``problem`` says why; ``date`` and ``commit`` of its last change."""

    path: str
    data: Any
    problem: str | None
    date: str
    commit: str
    command: str
    fresh: bool = False

    @property
    def source(self) -> str:
        """Where a reader finds it: path, date and commit."""
        return f"{self.path}, {self.date}, {self.commit}"


class Inputs:
    """The files below ``root``; ``fresh``: what build/sim/ has takes the place of what is committed.

    Nothing here raises for a file's content: a broken or absent one is an :class:`Input` with a problem.
    """

    def __init__(self, root: Path = ROOT, *, fresh: bool = False) -> None:
        self.root = root
        self._fresh = fresh
        self._changed = self._git("status", "--porcelain", "--untracked-files=all", "--", *map(str, WATCHED))
        self._read: dict[str, Input] = {}
        self.used: dict[str, Input] = {}
        """Files that were asked for since this was emptied."""

    def get(self, name: str) -> Input:
        """A result of sim/results/, by its name without .json."""
        return self._use(self._result(name))

    def _result(self, name: str) -> Input:
        command, keys = KINDS.get(name, (UNKNOWN, ()))
        if self._fresh and (self.root / FRESH / f"{name}.json").exists():
            return self._load(FRESH / f"{name}.json", command, keys, fresh=True)
        return self._load(Path("sim") / "results" / f"{name}.json", command, keys)

    def need(self, name: str) -> Any:
        """Data of a result; :class:`InputError` with its problem where there is none."""
        found = self.get(name)
        if found.problem:
            raise InputError(found.problem)
        return found.data

    def boards(self) -> list[Input]:
        """All of boards/results/."""
        return [self._use(found) for found in self._boards()]

    def _boards(self) -> list[Input]:
        folder = self.root / "boards" / "results"
        return [
            self._load(path.relative_to(self.root), f"make synth BOARD={path.stem} RECORD=1", BOARD_KEYS)
            for path in sorted(folder.glob("*.json"))
        ]

    def suite(self) -> Input:
        """The 45 tasks, as they come with the model."""
        return self._load(Path("models") / "tiny-moe-suite.json", "make train", ("tasks",))

    def upstream(self) -> Any:
        """What sw-ml-study/emufpga reports of itself, to stand beside ours."""
        found = self._use(self._load(UPSTREAM, PUBLISHED, ("source",)))
        if found.problem:
            raise InputError(found.problem)
        return found.data

    def every(self) -> Iterator[Input]:
        """All that there is and all that should be, whether a section shows it or not."""
        folder = self.root / "sim" / "results"
        for name in sorted({*KINDS, *(path.stem for path in folder.glob("*.json"))}):
            yield self._result(name)
        yield from self._boards()
        yield self.suite()
        yield self._load(UPSTREAM, PUBLISHED, ("source",))

    def _use(self, found: Input) -> Input:
        self.used[found.path] = found
        return found

    def problems(self) -> list[str]:
        return [found.problem for found in self.every() if found.problem]

    @property
    def clean(self) -> bool:
        """All results are those of the commit."""
        return not self._changed and not self._fresh

    def head(self) -> str:
        """The commit of the checkout; ``unknown`` without git."""
        return self._git("rev-parse", "--short", "HEAD").strip() or UNKNOWN

    def _load(self, path: Path, command: str, keys: tuple[str, ...], *, fresh: bool = False) -> Input:
        name = path.as_posix()
        if name not in self._read:
            data, problem = self._content(path, command, keys)
            date, commit = self._history(path, fresh)
            self._read[name] = Input(name, data, problem, date, commit, command, fresh)
        return self._read[name]

    def _content(self, path: Path, command: str, keys: tuple[str, ...]) -> tuple[Any, str | None]:
        name = path.as_posix()
        try:
            data = json.loads((self.root / path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None, f"{name}: not there; `{command}` writes it"
        except OSError as error:
            return None, f"{name}: cannot read: {error.strerror}"
        except ValueError as error:
            return None, f"{name}: not JSON: {error}; `{command}` writes it again"
        for key in keys:
            part = data
            for step in key.split("."):
                if not isinstance(part, Mapping) or step not in part:
                    return None, f"{name}: has no key {key!r}; `{command}` writes it again"
                part = part[step]
        return data, None

    def _history(self, path: Path, fresh: bool) -> tuple[str, str]:
        """Day and commit of the last change; of a file that no commit has, its own day."""
        name = path.as_posix()
        logged = "" if fresh else self._git("log", "-1", "--format=%cs %h", "--", name).strip()
        changed = any(line[3:].strip('"') == name for line in self._changed.splitlines())
        if logged and not changed:
            date, commit = logged.split()
            return date, commit
        try:
            date = datetime.fromtimestamp((self.root / path).stat().st_mtime).date().isoformat()
        except OSError:
            date = UNKNOWN
        here = fresh or changed or (self._git("rev-parse", "HEAD") and not logged)
        return date, NOT_COMMITTED if here else UNKNOWN

    def _git(self, *words: str) -> str:
        try:
            command = ["git", "-C", str(self.root), *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout if done.returncode == 0 else ""


class InputError(Exception):
    """A result that a section cannot do without is absent or broken; the text is its problem."""
