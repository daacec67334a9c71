"""``make report``: write build/report/index.html and the pictures beside it; exit status 1 where a section failed."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from host.report import page, plots, top
from host.report.inputs import ROOT, Input, Inputs
from host.report.page import Section
from host.report.sections import NAMES


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m host.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "report", metavar="DIR", help="(build/report)")
    parser.add_argument("--fresh", action="store_true", help="results in build/sim/ take the place of committed ones")
    args = parser.parse_args(argv)
    begin = perf_counter()

    def say(text: str) -> None:
        print(f"[{perf_counter() - begin:5.1f} s] {text}", flush=True)

    say("reading what is committed")
    inputs = Inputs(fresh=args.fresh)
    for problem in (problems := inputs.problems()):
        say(f"missing: {problem}")
    sections, failed, sources = build(inputs, args.out, say)
    path = args.out / "index.html"
    args.out.mkdir(parents=True, exist_ok=True)
    path.write_text(page.render(sections, top.first_screen(inputs, sections), made(inputs), sources), encoding="utf-8")
    say(f"written to {path} ({path.stat().st_size / 1e6:.1f} MB), pictures beside it")
    if problems:
        say(f"{len(problems)} inputs are absent or broken; the page names each")
    for each in failed:
        print(f"make report: error: section {each}", file=sys.stderr)
    return 1 if failed else 0


def build(
    inputs: Inputs, folder: Path | None, say: Callable[[str], None] = lambda text: None
) -> tuple[list[Section], list[str], dict[str, list[Input]]]:
    """All sections in order, what failed, and what each was made from; ``folder`` gets the pictures as PNG."""
    plots.FOLDER = folder
    sections, failed, sources = [], [], {}
    for name in NAMES:
        say(f"section {name}")
        inputs.used.clear()
        made, problem = page.make(_section(name), name, inputs)
        sections.append(made)
        sources[made.id] = list(inputs.used.values())
        if problem:
            failed.append(problem)
    return sections, failed, sources


def _section(name: str):
    def section(inputs: Inputs) -> Section:
        return importlib.import_module(f"host.report.sections.{name}").section(inputs)

    return section


def made(inputs: Inputs) -> str:
    """The page's foot: from what it was made."""
    changed = "" if inputs.clean else ", with results that are not committed"
    return (
        f"Made by <code>make report</code> from commit {page.esc(inputs.head())}{changed}; every input with its date "
        "and "
        'commit is in the <a href="#ledger">ledger</a>. MIT licence, the emufpga authors.'
    )


if __name__ == "__main__":
    sys.exit(main())
