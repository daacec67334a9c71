"""Pictures for the report: matplotlib draws them, the page's style sheet colours them.

Every picture is drawn twice, for a wide screen and for a phone. In the page the text of a picture is text, and its
colours are variables of the style sheet, so that light and dark are one drawing; a PNG has the light ones.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import colors, pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from host.report.page import Html, esc

WIDE, NARROW = 7.6, 3.5
"""Inches, at 100 dots an inch on the screen."""
COLOURS: Mapping[str, tuple[str, str]] = {
    "ink": ("#010101", "#1f2328"),
    "soft": ("#020202", "#5b626b"),
    "line": ("#030303", "#d9d5cc"),
    "paper": ("#040404", "#ffffff"),
    "a": ("#050505", "#0b6e8a"),
    "b": ("#060606", "#c2500c"),
    "c": ("#070707", "#6a4fb3"),
    "d": ("#080808", "#2f7d32"),
    "e": ("#090909", "#a01c5b"),
    "fill": ("#0b0b0b", "#e9f1f3"),
}
"""By name: what stands for it in an SVG, replaced by the style sheet's ``--NAME``, and the light colour of a PNG."""
INK, SOFT, LINE, PAPER, A, B, C, D, E, FILL = (f"report:{name}" for name in COLOURS)
SERIES = (A, B, C, D, E)
STYLES: Mapping[str, dict[str, Any]] = {
    "measured": {"linestyle": "-", "marker": "o"},
    "counted": {"linestyle": "-", "marker": "s"},
    "routed": {"linestyle": "-", "marker": "D"},
    "datasheet": {"linestyle": ":", "marker": "d", "fillstyle": "none"},
    "reported": {"linestyle": "-.", "marker": "^", "fillstyle": "none"},
    "derived": {"linestyle": "--", "marker": ""},
    "assumed": {"linestyle": (0, (1, 3)), "marker": ""},
    "unknown": {"linestyle": (0, (4, 4)), "marker": "x"},
}
"""How a line is drawn, by where its figures come from."""
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "emufpga",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "hatch.linewidth": 0.6,
}
colors.get_named_colors_mapping().update({f"report:{name}": pair[1] for name, pair in COLOURS.items()})
FOLDER: Path | None = None
"""Where pictures are also written as PNG; None: nowhere."""
Draw = Callable[[Figure, bool], None]
"""Draws into a figure; True: for a phone."""


def picture(
    name: str,
    title: str,
    description: str,
    draw: Draw,
    *,
    height: tuple[float, float] = (3.8, 3.6),
) -> Html:
    """A picture with its text alternative; ``height`` in inches for wide and narrow. ``FOLDER`` also gets a PNG."""
    drawn = [_svg(name, title, description, draw, narrow, height[narrow]) for narrow in (False, True)]
    if FOLDER is not None:
        png(FOLDER / f"{name}.png", draw, height[0])
    return Html(
        f'<figure class="plot" id="plot-{name}"><div class="wide">{drawn[0]}</div><div class="narrow">{drawn[1]}</div>'
        f"<figcaption>{esc(title)}</figcaption></figure>"
    )


@contextmanager
def _colours(*, light: bool, **settings: Any) -> Iterator[None]:
    """While drawing: the names above mean what stands for them, or the light colours."""
    names = colors.get_named_colors_mapping()
    names.update({f"report:{name}": pair[light] for name, pair in COLOURS.items()})
    given: dict[Any, Any] = SETTINGS | settings
    with matplotlib.rc_context(given):
        yield


def png(path: Path, draw: Draw, height: float = 3.8) -> None:
    """The wide picture in light colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _colours(light=True, **{"figure.facecolor": PAPER}):
        figure = pyplot.figure(figsize=(WIDE, height), layout="constrained")
        draw(figure, False)
        figure.savefig(path, dpi=160)
        pyplot.close(figure)


def _svg(name: str, title: str, description: str, draw: Draw, narrow: bool, height: float) -> str:
    width = NARROW if narrow else WIDE
    with _colours(light=False, **({"font.size": 8.5} if narrow else {})):
        figure = pyplot.figure(figsize=(width, height), layout="constrained")
        draw(figure, narrow)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return themed(text.getvalue(), f"{name}-{'narrow' if narrow else 'wide'}", title, description)


def themed(svg: str, identifier: str, title: str, description: str) -> str:
    """matplotlib's SVG for the inside of the page: its own ids, variables for colours, title and description."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{identifier}-\1"', svg)
    svg = re.sub(r'(href="#|url\(#)([^")]+)', rf"\1{identifier}-\2", svg)
    for variable, (sentinel, _) in COLOURS.items():
        svg = svg.replace(sentinel, f"var(--{variable})")
    svg = re.sub(r'font: ([\d.]+)px [^;"]*', r"font: \1px var(--font)", svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    opening, rest = svg.split(">", 1)
    opening = re.sub(r' (width|height)="[^"]*"', "", opening)
    return (
        f'{opening} role="img" aria-labelledby="{identifier}-t {identifier}-d">'
        f'<title id="{identifier}-t">{esc(title)}</title><desc id="{identifier}-d">{esc(description)}</desc>{rest}'
    )


def panels(figure: Figure, count: int, narrow: bool, across: int = 2, **options: Any) -> Sequence[Axes]:
    """Several pictures of one kind: side by side, under one another on a phone."""
    columns = 1 if narrow else min(across, count)
    rows = -(-count // columns)
    found = figure.subplots(rows, columns, squeeze=False, **options).flat
    axes = list(found)
    for spare in axes[count:]:
        spare.set_axis_off()
    return axes[:count]


def line(axes: Axes, x: Sequence[float], y: Sequence[float], provenance: str, label: str, **options: Any) -> None:
    """A line in the way of its provenance, whose word is part of its label."""
    word = provenance.split(":")[0].split(" ")[0]
    given: dict[str, Any] = STYLES[word] | {"label": f"{label} ({word})"} | options
    axes.plot(x, y, **given)


def powers(axes: Axes, values: Sequence[int], label: str) -> None:
    """A horizontal axis of powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [f"{value:,}" for value in values])
    axes.minorticks_off()
    axes.set_xlabel(label)
