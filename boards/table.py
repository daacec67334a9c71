"""The table of routed boards, made of ``boards/results/``.

``python -m boards.table`` prints it; ``--write docs/boards.md`` puts it there between its two markers.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from boards.build import RESULTS, fits_rule
from sim.record import filled

COLUMNS = (
    *("result", "part", "tokens x batch", "routed, worst seed", "clock cap", "bitstream"),
    *("LUT4", "FF", "multipliers", "block RAM", "under 80 %"),
)
RESOURCES = ("lut4", "flip_flops", "multipliers", "block_rams")


def row(name: str, result: dict[str, Any]) -> list[str]:
    """Cells of one result."""
    used = [result["utilisation"][resource] for resource in RESOURCES]
    params = result["params"]
    return [
        f"`{name}`",
        f"{result['device']}-{result['speed_grade']}",
        f"{params['tokens']} x {params['max_batch']}",
        f"{result['fmax_worst_hz'] / 1e6:.1f} MHz of {len(result['seeds'])}",
        f"{result['clock_cap_hz'] / 1e6:.1f} MHz",
        f"{result['bitstream_clock_hz'] / 1e6:g} MHz{'' if result['met'] else ', MISSED'}",
        *(f"{counts['used']:,} ({counts['percent']:.0f} %)" for counts in used),
        "yes" if fits_rule(result["utilisation"]) else "no",
    ]


def table(results: Path = RESULTS) -> str:
    """All routed results as Markdown, by name; docs/artix.md has the others."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    rows = [row(name, result) for name, result in found.items() if "seeds" in result]  # of ECP5, which are routed
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [COLUMNS, ["---"] * len(COLUMNS), *rows])


def replaced(text: str, path: Path, results: Path = RESULTS) -> str:
    """``text`` of ``path`` with the table between the markers; raises ``ValueError`` where it has not one of each."""
    return filled(text, path, {"boards.table": table(results)})


def write(path: Path) -> None:
    """Put the table into ``path``."""
    path.write_text(replaced(path.read_text(), path))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m boards.table", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into FILE instead of printing it")
    options = parser.parse_args(arguments)
    if options.write is None:
        print(table())
        return 0
    try:
        write(options.write)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
