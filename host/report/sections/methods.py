"""How figures are got, and how each can be got again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from host.report.inputs import KINDS, Inputs
from host.report.page import MARKS, Html, Section, command, esc, paragraph, table, tag

EQUATIONS = (
    ("bytes of a block", "256 weights of Q6_K: 210 B", "counted: the format"),
    ("bytes of an expert", "3 × width × expert width / 256 × 210", "derived: three matrices"),
    ("union of independent tokens", "U(B) = E (1 − (1 − k/E)^B)", "derived: uniform, independent choices"),
    ("bytes of a layer", "210 n U(B); as tape 210 n E", "derived: n blocks an expert"),
    (
        "cycles of a layer",
        "16 n P(B), as tape and 210/W n (E − U(B)), and what a token costs beside its blocks",
        "derived: all three counted",
    ),
    (
        "seconds of a layer",
        "max(bytes / (bandwidth × payload share), cycles / clock) + vectors + round trips",
        "derived: transfer and compute overlap",
    ),
    ("tokens a second", "B / (layers × seconds of a layer)", "derived: all B tokens count"),
    ("serial floor", "input path + all but the experts + context × KV a token", "derived: least memory"),
    ("KV a token", "layers × KV heads × (key + value length) × 2 B", "derived: F16"),
)

RULES = (
    "A measured figure is a median of n runs, with the least and the most, or says that it was measured once.",
    "What is compared on one clock takes turns in each run, to meet the machine in one state; its load stands beside.",
    "Cycles are those of the Verilog that is synthesised, in Verilator, every output compared with the golden model.",
    "A routed clock is the worst of its seeds, no more than the data sheet's limit of the primitives used.",
    "Power is unknown unless a meter was read: there is no open estimator for these parts.",
    "A page made twice from one commit is the same, byte for byte.",
)


def section(inputs: Inputs) -> Section:
    body = Html(
        "<h3>Marks</h3>"
        + paragraph(
            "Every figure carries one of these. In pictures, measured, counted and routed lines are whole, derived "
            "ones dashed, reported ones have hollow triangles, and the word stands in the legend."
        )
        + table(
            "Where a figure comes from",
            ["mark", "means"],
            [[tag(word), meaning] for word, (_, meaning) in MARKS.items()],
            words=2,
        )
        + "<h3>Equations</h3>"
        + _list((name, Html(f"<code>{esc(text)}</code> {tag(said)}")) for name, text, said in EQUATIONS)
        + "<h3>Measuring</h3>"
        + Html(f"<ul>{''.join(f'<li>{esc(rule)}</li>' for rule in RULES)}</ul>")
        + "<h3>Get it again</h3>"
        + table(
            "Each command writes the file of its name in sim/results/ (a clean clone, make and Python 3.11 suffice; "
            "routes are files of yours)",
            ["result", "command"],
            [[name, command(text)] for name, (text, _) in KINDS.items()],
            words=2,
        )
        + "<h3>Tools of the results</h3>"
        + _list(
            (f"{tool} {version}", esc(", ".join(names))) for (tool, version), names in sorted(_tools(inputs).items())
        )
    )
    return Section(
        "methods",
        "Methods",
        "How was each kind of figure got, and how do I get it again?",
        f"Each figure has one of {len(MARKS)} marks that says where it is from, and a command that makes it again; "
        "what is unknown is called unknown.",
        body,
    )


def _list(entries: Iterable[tuple[str, Html]]) -> Html:
    """Names, and what belongs to each."""
    return Html(f'<dl class="terms">{"".join(f"<dt>{esc(name)}</dt><dd>{text}</dd>" for name, text in entries)}</dl>')


def _tools(inputs: Inputs) -> dict[tuple[str, str], list[str]]:
    """Results by the tool and version that they name."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in inputs.every():
        if isinstance(each.data, dict) and isinstance(each.data.get("tools"), dict):
            for tool, version in each.data["tools"].items():
                found.setdefault((tool, str(version)), []).append(Path(each.path).stem)
    return found
