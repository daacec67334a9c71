"""Route every ECP5 board of the catalogue, and keep the results.

``python -m boards.route_all`` writes ``boards/results/`` and the tables made of it. It passes over what these sources
were already routed for, so that it can be stopped and started again. It takes hours; ``--jobs`` routes several at once.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from boards import table
from boards.build import RESULTS, ROOT, current_id
from boards.catalogue import ECP5_BOARDS, Board
from hw.formats.params import Params

OUTCOMES = {0: "timing met", 1: "TIMING MISSED"}
"""By the exit status of :mod:`boards.build`."""
Run = Callable[[Board, Params, str], int]
LIMIT_S = 4 * 3600
"""For the three seeds of one board; the 85F takes a quarter of that."""


def wanted() -> list[tuple[Board, Params]]:
    """Every board with its own parameters, then with the others that it can have."""
    boards = ECP5_BOARDS.values()
    return [(board, board.params) for board in boards] + [
        (board, params) for board in boards for params in board.others.values()
    ]


def recorded(board: Board, params: Params, seeds: str) -> int | None:
    """Exit status of the build that left a result of these sources, parameters, clock and seeds; None without one."""
    path = RESULTS / f"{board.result_name(params)}.json"
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    same = result["design_id"] == current_id(board, params) and ",".join(map(str, result["seeds"])) == seeds
    return int(not result["met"]) if same else None


def route(board: Board, params: Params, seeds: str) -> int:
    """One build, its lines into a log; the exit status of :mod:`boards.build`."""
    directory = Path("build/synth") / board.result_name(params)
    directory.mkdir(parents=True, exist_ok=True)
    options = ["--board", board.name, "--tokens", str(params.tokens), "--seeds", seeds, "--record"]
    with (directory / "build.log").open("w") as log:
        try:
            return subprocess.run(
                [sys.executable, "-m", "boards.build", *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"error: {LIMIT_S} s were not enough", file=log)
            return 2


def main(arguments: list[str] | None = None, run: Run = route) -> int:
    parser = argparse.ArgumentParser(prog="python -m boards.route_all", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="boards at a time (default: %(default)s)")
    parser.add_argument("--seeds", default="1,2,3", help="placement seeds (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be positive, not {options.jobs}")
    start = time.monotonic()
    todo, failed = [], []

    def tell(name: str, status: int, text: str) -> None:
        outcome = OUTCOMES.get(status, "FAILED")
        print(f"[{time.monotonic() - start:6.0f} s] {name}: {outcome}, {text}", flush=True)
        if status:
            failed.append(f"{name} ({outcome})")

    for board, params in wanted():
        name = board.result_name(params)
        if (status := recorded(board, params, options.seeds)) is None:
            todo.append((name, board, params))
        else:
            tell(name, status, "routed already")

    def one(name: str, board: Board, params: Params) -> int:
        print(f"[{time.monotonic() - start:6.0f} s] {name}: build/synth/{name}/build.log tells…", flush=True)
        return run(board, params, options.seeds)

    pool = ThreadPoolExecutor(options.jobs)
    try:
        names = {pool.submit(one, name, board, params): name for name, board, params in todo}
        for done, future in enumerate(as_completed(names), 1):
            tell(names[future], future.result(), f"{done} of {len(todo)}")
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt reaches the running builds by itself; no more are started
    table.write(ROOT / "docs" / "boards.md")
    if failed:
        print(f"error: {', '.join(failed)}: see build/synth/NAME/build.log", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
