"""Take Vivado's reports of a build that ``boards.artix`` prepared into its ``report.json``.

``python -m boards.vivado report build/synth/arty_a7_35`` reads ``timing.rpt`` (``report_timing_summary``) and
``utilization.rpt`` (``report_utilization``) there. Only reports of a routed design of the same part count.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
UNKNOWN = "unknown: nobody has run Vivado yet (docs/artix.md says how)"
PERIOD_TOLERANCE_NS = 0.001
"""Reports round a period to this."""
SITES = {
    "lut": ("Slice LUTs", "CLB LUTs"),
    "flip_flops": ("Slice Registers", "CLB Registers"),
    "multipliers": ("DSPs",),
    "block_rams": ("Block RAM Tile",),
}
"""Rows of the utilization report, by our names."""


CHECKS = {"setup": "TNS", "hold": "THS", "pulse width": "TPWS"}
"""Checks and the columns of their failing endpoints."""


class ReportError(ValueError):
    """A report that cannot be used; the message says which, why, and what to do."""


def header(text: str, file: str) -> dict[str, str]:
    """The ``| Key : value`` lines on top of a report.

    Raises
    ------
    ReportError
        If it has no tool version or no device.
    """
    found = dict(re.findall(r"^\| ([A-Z][\w ]*?) *: (.*?) *$", text, re.MULTILINE))
    for key in ("Tool Version", "Device"):
        if key not in found:
            raise ReportError(f"{file}: no line '| {key}' as Vivado's reports have it")
    return found


def check_stage(fields: dict[str, str], text: str, file: str) -> None:
    """Raise ReportError unless the report is of a routed design: by its state, and no delay is an estimate."""
    state = fields.get("Design State", "Routed")  # not in every release's timing report
    if state != "Routed":
        raise ReportError(f"{file}: the design is {state}, which is an estimate; report it after route_design")
    if re.search(r"net \(fo=\d+, (estimated|unplaced)\)", text):
        raise ReportError(f"{file}: has estimated delays; report it after route_design")


def check_part(fields: dict[str, str], part: str, file: str) -> None:
    """Raise ReportError unless the report is of ``part``, as ``xc7a35ticsg324-1L``.

    A timing report writes the device as ``7a35ti-csg324`` and the grade apart.
    """

    def plain(name: str) -> str:
        return name.lower().replace("-", "").removeprefix("xc")

    device, wanted = plain(fields["Device"]), plain(part)
    if not device or not wanted.startswith(device):
        raise ReportError(f"{file}: is of {fields['Device']}, not of {part}")
    grade = fields.get("Speed File", "").split()
    if grade and grade[0].lower() != "-" + part.rsplit("-", 1)[1].lower():
        raise ReportError(f"{file}: is of speed grade {grade[0].lstrip('-')}, not of {part}")


def section(text: str, title: str, file: str) -> list[str]:
    """The lines below the heading ``| title`` of a timing report, up to the next heading, without blank ones."""
    found = re.search(rf"^\| {re.escape(title)}\n\| -+\n-+\n(.*?)(?=^-{{40,}}$|\Z)", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise ReportError(f"{file}: no table '{title}'; make it with report_timing_summary")
    return [line for line in found[1].splitlines() if line.strip()]


def number(text: str, what: str, file: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ReportError(f"{file}: {what} is {text!r}, not a number: are there no timing constraints?") from None


def design_timing(text: str, file: str) -> dict[str, float]:
    """The row of the 'Design Timing Summary': slacks in ns and failing endpoints, by column name."""
    lines = section(text, "Design Timing Summary", file)
    names = re.split(r"\s{2,}", lines[0].strip())
    if len(lines) < 3 or len(lines[2].split()) != len(names):
        raise ReportError(f"{file}: the table 'Design Timing Summary' has no row of {len(names)} numbers")
    return {name: number(value, name, file) for name, value in zip(names, lines[2].split(), strict=True)}


def clock_periods(text: str, file: str) -> dict[str, float]:
    """Period in ns of each clock of the 'Clock Summary'."""
    periods = {}
    for line in section(text, "Clock Summary", file)[2:]:
        if row := re.match(r"\s*(\S+)\s+\{[^}]*\}\s+([\d.]+)\s+[\d.]+\s*$", line):
            periods[row[1]] = float(row[2])
    return periods


def clock_slacks(text: str, file: str) -> dict[str, float]:
    """WNS in ns of each clock of the 'Intra Clock Table' that has paths."""
    slacks = {}
    for line in section(text, "Intra Clock Table", file)[2:]:
        fields = line.split()
        if len(fields) > 5:  # a clock without paths has its pulse widths only
            slacks[fields[0]] = number(fields[1], f"WNS of {fields[0]}", file)
    return slacks


def read_timing(text: str, *, target_hz: float, part: str, file: str = "timing.rpt") -> dict[str, Any]:
    """What a timing report says of the clock of ``target_hz``.

    Returns
    -------
    dict
        ``clock`` (name), ``period_ns``, ``wns_ns``, ``fmax_hz`` = 1 / (period - WNS), ``version``, ``grade``, ``met``
        (no endpoint of the design fails), ``failing`` (what fails, in words, or empty) and ``hold_met``.

    Raises
    ------
    ReportError
        If a table is missing, no clock has the period, or the report is not of the routed part.
    """
    fields = header(text, file)
    check_stage(fields, text, file)
    check_part(fields, part, file)
    whole = design_timing(text, file)
    periods, slacks = clock_periods(text, file), clock_slacks(text, file)
    wanted = 1e9 / target_hz
    clocks = [name for name in periods if abs(periods[name] - wanted) <= PERIOD_TOLERANCE_NS and name in slacks]
    if not clocks:
        said = ", ".join(f"{name} {period:g} ns" for name, period in periods.items()) or "none"
        raise ReportError(f"{file}: no clock of {wanted:.3f} ns with paths; there are: {said}")
    clock = min(clocks, key=lambda name: slacks[name])
    checks = {name: f"{total} Failing Endpoints" for name, total in CHECKS.items()}
    missing = [column for column in checks.values() if column not in whole]
    if missing:
        raise ReportError(f"{file}: the table 'Design Timing Summary' has no column {missing[0]!r}")
    failing = {name: int(whole[column]) for name, column in checks.items() if whole[column]}
    version = re.search(r"\bv\.?(\d\S*)", fields["Tool Version"])
    return {
        "clock": clock,
        "period_ns": periods[clock],
        "wns_ns": slacks[clock],
        "fmax_hz": round(1e9 / (periods[clock] - slacks[clock])),
        "met": not failing,
        "hold_met": not failing.keys() - {"setup"},
        "failing": ", ".join(f"{count} {name} endpoints" for name, count in failing.items()),
        "version": version[1] if version else fields["Tool Version"],
    }


def table_rows(text: str) -> list[dict[str, str]]:
    """Every row of every ``+---+`` table of a utilization report, by its column names; notes' stars are dropped."""
    rows, names = [], []
    lines = text.splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if above.startswith("+") and "Used" in cells:
            names = cells
        elif len(cells) == len(names):
            rows.append(dict(zip(names, (cell.rstrip("*") for cell in cells), strict=True)))
    return rows


def read_utilization(text: str, *, part: str, file: str = "utilization.rpt") -> dict[str, dict[str, float]]:
    """Used, available and percent of LUTs, flip-flops, multipliers and block RAMs.

    Raises
    ------
    ReportError
        If a row is missing, or the report is not of the routed part.
    """
    fields = header(text, file)
    if "Design State" not in fields:
        raise ReportError(f"{file}: no line '| Design State'; make it with report_utilization")
    check_stage(fields, text, file)
    check_part(fields, part, file)
    rows: dict[str, dict[str, str]] = {}
    for row in table_rows(text):
        rows.setdefault(row.get("Site Type", ""), row)
    used = {}
    for name, sites in SITES.items():
        row = next((rows[site] for site in sites if site in rows), None)
        if row is None:
            raise ReportError(f"{file}: no row '{sites[0]}'; make it with report_utilization")
        count, total = number(row["Used"], sites[0], file), number(row.get("Available", ""), sites[0], file)
        used[name] = {"used": count, "available": total, "percent": round(100 * count / total, 1)}
        used[name] |= {key: int(value) for key, value in used[name].items() if key != "percent" and value % 1 == 0}
    return used


def merge(prepared: dict[str, Any], timing_text: str, utilization_text: str) -> dict[str, Any]:
    """The report of ``boards.artix`` with what Vivado found; a hold violation leaves the clock unknown."""
    part = f"{prepared['device']}{prepared['package']}-{prepared['speed_grade']}"
    timing = read_timing(timing_text, target_hz=prepared["target_hz"], part=part)
    used = read_utilization(utilization_text, part=part)
    if timing["hold_met"]:
        missed = (
            "" if timing["met"] else f"; TIMING MISSED at {prepared['target_hz'] / 1e6:g} MHz ({timing['failing']})"
        )
        hz, provenance = timing["fmax_hz"], f"routed: Vivado {timing['version']}, {part}, one run{missed}"
    else:
        hz, provenance = None, f"unknown: routed by Vivado {timing['version']}, but {timing['failing']} fail"
    return prepared | {
        "met": timing["met"],
        "fmax_worst_hz": hz,
        "clock_hz": hz,
        "clock_provenance": provenance,
        "utilisation": used,
        "utilisation_provenance": f"routed: Vivado {timing['version']}, the whole design",
        "fits_80": all(counts["percent"] <= 80 for counts in used.values()),
        "counted_before_vivado": prepared.get("counted_before_vivado", prepared["utilisation"]),
        "tools": prepared["tools"] | {"vivado": timing["version"]},
        "timing": timing,
    }


def read(path: Path, how: str) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}; {how}") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m boards.vivado", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="take timing.rpt and utilization.rpt into report.json")
    report.add_argument("directory", type=Path, help="build/synth/BOARD")
    report.add_argument("--timing", type=Path, help="default: DIRECTORY/timing.rpt")
    report.add_argument("--utilization", type=Path, help="default: DIRECTORY/utilization.rpt")
    report.add_argument("--record", action="store_true", help="write the report to boards/results too")
    options = parser.parse_args(arguments)
    directory = options.directory
    try:
        text = read(directory / "report.json", "make synth BOARD=... writes it")
        try:
            prepared = json.loads(text)
        except ValueError:
            raise ReportError(f"{directory / 'report.json'}: is not JSON; make synth BOARD=... makes it") from None
        how = "Vivado writes it with -source build.tcl"
        summary = merge(
            prepared,
            read(options.timing or directory / "timing.rpt", how),
            read(options.utilization or directory / "utilization.rpt", how),
        )
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    recorded = [RESULTS / f"{summary['result']}.json"] if options.record else []
    for path in [directory / "report.json", *recorded]:
        path.write_text(json.dumps(summary, indent=2) + "\n")
        print(f"report: {path}")
    hz = summary["clock_hz"]
    print(f"{summary['board']}: {'unknown' if hz is None else f'{hz / 1e6:.1f} MHz'}, {summary['clock_provenance']}")
    return 0 if summary["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
