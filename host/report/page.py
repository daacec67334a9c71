"""The report's page: sections, the marks of where figures come from, and one HTML file out of all of it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from host.report.inputs import Input

STATIC = Path(__file__).with_name("static")
MARKS: Mapping[str, tuple[str, str]] = {
    "measured": ("●", "taken from a clock or a meter on a machine that is named"),
    "counted": ("#", "an exact count: cycles of the simulated hardware, bytes of a file, experts of a trace"),
    "routed": ("◆", "from a placed and routed design, by the tool's own timing analysis"),
    "datasheet": ("▤", "from a vendor's data sheet"),
    "reported": ("❝", "published by somebody else, who is named"),
    "derived": ("=", "calculated from other figures; the equation is given"),
    "assumed": ("~", "taken for granted, for want of a better figure"),
    "unknown": ("?", "nobody knows yet, and it is not guessed"),
}
"""Where a figure comes from: its sign, and what the word means here."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


@dataclass(frozen=True)
class Section:
    """One question of the report.

    ``answer`` is one or two plain sentences made from the data, ``body`` HTML, ``data`` tables that a reader may take
    along, ``missing`` the inputs that are absent or broken, in words.
    """

    id: str
    title: str
    question: str
    answer: str
    body: str
    data: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def esc(text: object) -> Html:
    """Text as HTML; HTML as it is."""
    return text if isinstance(text, Html) else Html(html.escape(str(text)))


def kind(provenance: str) -> str:
    """The word of ``counted: by the engine``, or of ``a board, routed: by T``; ``ValueError`` where it has none."""
    found = re.match(rf"({'|'.join(MARKS)})\b", provenance) or re.search(rf"\b({'|'.join(MARKS)}):", provenance)
    if found is None:
        raise ValueError(f"{provenance!r} says none of {', '.join(MARKS)}")
    return found[1]


def tag(provenance: str) -> Html:
    """The mark of a figure; what else the provenance says is its tooltip."""
    word = kind(provenance)
    sign, meaning = MARKS[word]
    said = provenance if provenance != word else f"{word}: {meaning}"
    return Html(
        f'<span class="tag {word}" title="{html.escape(said)}"><span aria-hidden="true">{sign}</span> {word}</span>'
    )


def figure(text: str, provenance: str) -> Html:
    """A figure and its mark."""
    return Html(f'<span class="figure"><b>{esc(text)}</b> {tag(provenance)}</span>')


def paragraph(*parts: object) -> Html:
    return Html(f"<p>{''.join(esc(part) for part in parts)}</p>")


def term(name: str, text: str | None = None) -> Html:
    """A word of the glossary, by its key there; JavaScript shows what it means, the link leads there without."""
    return Html(f'<a class="term" href="#term-{html.escape(name)}">{esc(text or name)}</a>')


def table(caption: str, head: Sequence[object], rows: Iterable[Sequence[object]], words: int = 1) -> Html:
    """A table that scrolls by itself where it is too wide; all but the first ``words`` columns hold figures."""
    top = "".join(f'<th scope="col"{_side(place, words)}>{esc(cell)}</th>' for place, cell in enumerate(head))
    lines = []
    for row in rows:
        first, *rest = row
        cells = "".join(f"<td{_side(place, words)}>{esc(cell)}</td>" for place, cell in enumerate(rest, 1))
        lines.append(f'<tr><th scope="row">{esc(first)}</th>{cells}</tr>')
    return Html(
        f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(_plain(caption))}"><table>'
        f"<caption>{esc(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def details(summary: str, body: str) -> Html:
    """Something to open."""
    return Html(f"<details><summary>{esc(summary)}</summary>{body}</details>")


def command(text: str) -> Html:
    """A command line."""
    return Html(f"<code>{esc(text)}</code>")


def _side(place: int, words: int) -> str:
    return ' class="n"' if place >= words else ""


def _plain(text: str) -> str:
    return text if not isinstance(text, Html) else "table"


def broken(name: str, error: BaseException) -> Section:
    """What stands where a section failed."""
    said = f"{type(error).__name__}: {error}"
    return Section(
        id=name,
        title=name.replace("_", " ").capitalize(),
        question="This part could not be made.",
        answer="Nothing can be said here: a result has a form that this part does not know.",
        body=paragraph("What happened: ", command(said)),
        missing=[said],
    )


def make(section: Callable[[Any], Section], name: str, inputs: Any) -> tuple[Section, str | None]:
    """A section and, where it failed, why; it is shown as broken then, never left out."""
    try:
        return section(inputs), None
    except Exception as error:  # whatever it is: the page must say so
        return broken(name, error), f"{name}: {type(error).__name__}: {error}"


def render(
    sections: Sequence[Section], top: str, made: str, sources: Mapping[str, Sequence[Input]] | None = None
) -> str:
    """The page: one file that needs no other.

    ``top`` is the first screen, ``made`` says from what it was made, ``sources`` each section, by its id.
    """
    parts = {
        "style": _static("page.css") + "".join(_static(f"{each.id}.css") for each in sections),
        "script": _static("page.js") + "".join(_static(f"{each.id}.js") for each in sections),
        "links": "".join(f'<li><a href="#{each.id}">{esc(each.title)}{_flag(each)}</a></li>' for each in sections),
        "top": top,
        "sections": "".join(_section(each, (sources or {}).get(each.id, ())) for each in sections),
        "data": "".join(_data(each) for each in sections if each.data),
        "made": made,
    }
    page = _static("page.html")
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->", text, 1)
    return page


def _flag(section: Section) -> str:
    return ' <span class="flag">incomplete</span>' if section.missing else ""


def _section(section: Section, sources: Sequence[Input]) -> str:
    missing = "".join(f"<li>{esc(each)}</li>" for each in section.missing)
    note = f'<div class="missing" role="note"><b>Missing here</b><ul>{missing}</ul></div>' if missing else ""
    buttons = "".join(
        f'<span class="take">{esc(name.replace("_", " "))} '
        + " ".join(
            f'<button type="button" class="take-{form}" data-section="{section.id}" data-table="{html.escape(name)}"'
            f' aria-label="{html.escape(name.replace("_", " "))} as {form.upper()}">{form.upper()}</button>'
            for form in ("json", "csv")
        )
        + "</span>"
        for name in section.data
    )
    taken = f'<div class="data"><span>Data</span> {buttons}</div>' if buttons else ""
    return (
        f'<section id="{section.id}" aria-labelledby="{section.id}-title">'
        f'<h2 id="{section.id}-title"><a href="#{section.id}">{esc(section.title)}</a></h2>'
        f'<p class="question">{esc(section.question)}</p><p class="answer">{esc(section.answer)}</p>'
        f"{note}{section.body}{taken}{_sources(sources)}</section>"
    )


def _sources(sources: Sequence[Input]) -> str:
    """From which files a section is, of which day and commit."""
    files: dict[tuple[str, str], list[str]] = {}
    for each in sources:
        if not each.problem:
            files.setdefault((each.date, "fresh, " + each.commit if each.fresh else each.commit), []).append(each.path)
    lines = (f"{', '.join(paths)} ({date}, {commit})" for (date, commit), paths in files.items())
    return f'<p class="sources">From {esc("; ".join(lines))}.</p>' if files else ""


def _data(section: Section) -> str:
    text = json.dumps(section.data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="data-{section.id}">{text}</script>'


def _static(name: str) -> str:
    path = STATIC / name
    return path.read_text(encoding="utf-8") if path.exists() else ""
