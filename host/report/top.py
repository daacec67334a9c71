"""The first screen: what it is, does it work, when it wins, when it loses."""

from __future__ import annotations

from collections.abc import Sequence

from host.report.inputs import Inputs
from host.report.page import Section


def first_screen(inputs: Inputs, sections: Sequence[Section]) -> str:
    return "<h1>emufpga</h1>"
