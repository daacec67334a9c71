"""How figures are got, and how each can be got again."""

from __future__ import annotations

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


def section(inputs: Inputs) -> Section:
    counts = _tools(inputs)
    body = Html(
        "<h3>Marks</h3>"
        + paragraph(
            "Every figure carries one of these. In pictures, measured, counted and routed lines are whole, derived "
            "ones dashed, "
            "reported ones have hollow triangles, and the word stands in the legend."
        )
        + table(
            "Where a figure comes from",
            ["mark", "means"],
            [[tag(word), meaning] for word, (_, meaning) in MARKS.items()],
            words=2,
        )
        + "<h3>Equations</h3>"
        + table(
            "How a derived figure is calculated",
            ["figure", "equation", ""],
            [[name, Html(f"<code>{esc(text)}</code>"), tag(said)] for name, text, said in EQUATIONS],
            words=3,
        )
        + "<h3>Measuring</h3>"
        + Html(
            "<ul>"
            "<li>A measured figure is a median of n runs, with the least and the most. Runs of what is compared take "
            "turns, so that all meet "
            "the machine in the same state.</li>"
            "<li>Load of the machine stands beside what was measured. Nothing was measured on a board, and no GPU "
            "was at hand.</li>"
            "<li>Cycles are those of the Verilog that is synthesised, in Verilator, with every output compared with "
            "the NumPy golden model.</li>"
            "<li>A routed clock is the worst of its seeds, no more than the data sheet's limit of the primitives "
            "used.</li>"
            "<li>Power is unknown: there is no open estimator for these parts, and it is not guessed.</li>"
            "<li>A page made twice from one commit is the same, byte for byte.</li>"
            "</ul>"
        )
        + "<h3>Get it again</h3>"
        + table(
            "Each command writes the file of its name in sim/results/ (a clean clone, make and Python 3.11 suffice; "
            "routes are files of yours)",
            ["result", "command"],
            [[name, command(text)] for name, (text, _) in KINDS.items()],
            words=2,
        )
        + (
            table("Tools of the results, as each file says", ["tool", "version", "results"], counts, words=3)
            if counts
            else ""
        )
    )
    return Section(
        "methods",
        "Methods",
        "How was each kind of figure got, and how do I get it again?",
        f"Each figure has one of {len(MARKS)} marks that says where it is from, and a command that makes it again; "
        "what is unknown is "
        "called unknown.",
        body,
    )


def _tools(inputs: Inputs) -> list[list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for each in inputs.every():
        if isinstance(each.data, dict) and isinstance(each.data.get("tools"), dict):
            for tool, version in each.data["tools"].items():
                found.setdefault((tool, str(version)), []).append(each.path.rsplit("/", 1)[-1].removesuffix(".json"))
    return [[tool, version, ", ".join(names)] for (tool, version), names in sorted(found.items())]
