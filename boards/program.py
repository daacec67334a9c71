"""Load a board with the bitstream that ``make synth`` left.

``python -m boards.program --board ulx3s_85f`` loads ``build/synth/ulx3s_85f/top.bit`` until the power goes, ``--flash``
for good, with openFPGALoader, which needs the system's libusb-1.0.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from boards.build import current_id
from boards.catalogue import BOARDS, ECP5_BOARDS, Board
from hw.formats.params import Params

LIMIT_S = 600
"""Longer than any flash of these boards takes."""
LOADER = "openfpgaloader-cli"


class ProgramError(RuntimeError):
    """The board cannot be loaded; the message says why and what to do."""


def check(board: Board, directory: Path) -> Path:
    """The bitstream in ``directory``, if it is one of ``board`` and of these sources.

    Raises
    ------
    ProgramError
        Naming the file at fault.
    """
    bitstream, report = directory / "top.bit", directory / "report.json"
    again = f"build it with: make synth BOARD={board.name}"
    for path in (bitstream, report):
        if not path.is_file():
            raise ProgramError(f"there is no {path}: {again}")
    try:
        built = json.loads(report.read_text())
        params, mhz = Params(**built["params"]), built["bitstream_clock_hz"] / 1e6
        name, identity, met = built["board"], built["design_id"], built["met"]
    except (ValueError, KeyError, TypeError) as error:
        raise ProgramError(f"{report} is not a report of a build ({error!r}): {again}") from None
    if name != board.name:
        raise ProgramError(f"{bitstream} was built for {name}, not for {board.name}: {again}")
    if not met:
        raise ProgramError(f"{bitstream} missed its timing, see {report}: build it for a slower clock")
    if identity != (now := current_id(board, params, mhz)):
        raise ProgramError(f"{bitstream} has design id {identity}, these sources have {now}: {again}")
    return bitstream


def command(board: Board, bitstream: Path, *, flash: bool) -> list[str]:
    """The loader's command line."""
    installed = Path(sys.executable).parent / LOADER
    if not installed.exists():
        raise ProgramError(f"{LOADER} is not installed for this Python: pip install '.[synth]'")
    return [str(installed), *board.program, *(["--write-flash"] if flash else []), str(bitstream)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m boards.program", description=__doc__)
    boards = sorted(ECP5_BOARDS)
    parser.add_argument("--board", required=True, choices=boards, metavar="BOARD", help=", ".join(boards))
    parser.add_argument("--tokens", type=int, help="token lanes (default: what the catalogue gives the board)")
    parser.add_argument("--out", type=Path, help="where the build is (default: build/synth/BOARD)")
    parser.add_argument("--flash", action="store_true", help="write the flash, not only the running FPGA")
    parser.add_argument("--dry-run", action="store_true", help="check, and print the command instead of running it")
    options = parser.parse_args(arguments)
    board = BOARDS[options.board]
    try:
        name = board.result_name(board.with_tokens(options.tokens))
        bitstream = check(board, options.out or Path("build/synth") / name)
        line = command(board, bitstream, flash=options.flash)
        print(shlex.join([LOADER, *line[1:]]), flush=True)
        if options.dry_run:
            return 0
        if status := subprocess.run(line, timeout=LIMIT_S).returncode:
            raise ProgramError(
                f"{LOADER} failed with status {status}: is {board.name} plugged in, libusb-1.0 installed, and may this "
                "user open USB devices?"
            )
    except subprocess.TimeoutExpired:
        print(f"error: {LOADER} took more than {LIMIT_S} s: unplug {board.name} and try again", file=sys.stderr)
        return 2
    except (ProgramError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
