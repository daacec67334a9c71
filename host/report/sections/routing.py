"""Which experts real tokens choose: load by layer and expert, skew, reuse, unions."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from host.report import plots
from host.report.inputs import InputError, Inputs
from host.report.page import Html, Section, figure, paragraph, table, tag, term
from host.report.sections.bytes_by_batch import Source, short, sources
from host.routing import independent

TENTH = 0.1


def statistics(trace: dict[str, Any]) -> dict[str, Any]:
    """Of one trace: how uneven its layers are, and what consecutive tokens share."""
    counts = np.array(trace["counts"], float)
    ordered = -np.sort(-counts, axis=1)
    top = max(1, round(trace["experts"] * TENTH))
    shares = ordered[:, :top].sum(axis=1) / ordered.sum(axis=1)
    reuse = [each for each in trace["reuse"] if each is not None]
    return {
        "model": short(trace["model"]),
        "layers": trace["layers"],
        "experts": trace["experts"],
        "used": trace["experts_used"],
        "tokens": trace["tokens"],
        "top_tenth_share": float(shares.mean()),
        "top_tenth_least": float(shares.min()),
        "top_tenth_most": float(shares.max()),
        "never_chosen": float((counts == 0).mean()),
        "reuse": fmean(reuse),
        "reuse_least": min(reuse),
        "reuse_most": max(reuse),
        "reuse_independent": trace["experts_used"] / trace["experts"],
    }


def lorenz(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over layers: share of all choices that the most chosen experts have, by how many of them; begins with 0."""
    ordered = -np.sort(-counts, axis=1)
    shares = (ordered / ordered.sum(axis=1, keepdims=True)).cumsum(axis=1)
    return np.concatenate([[0.0], shares.mean(axis=0)])


def section(inputs: Inputs) -> Section:
    missing = []
    upstream = inputs.upstream()["granite_load"]
    granite = np.array(upstream["counts"], float)
    try:
        traces = inputs.need("traces")
        made = traces["traces"]
        provenance = traces["provenance"]
    except InputError as error:
        missing.append(str(error))
        made, provenance = [], {}
    found, _ = sources(inputs)
    table_rows = [statistics(trace) for trace in made]
    body = Html("")
    if made:
        body = Html(
            paragraph(
                "Each row of a map is a layer, each column an expert, each cell how many decoded tokens chose it. ",
                tag(provenance["counts"]),
                " Columns are in the order of the file: a bright cell is an expert that much of this text wanted.",
            )
            + plots.picture(
                "heat",
                "How often each expert of each layer was chosen",
                _describe_heat(table_rows),
                lambda fig, narrow: _draw_heat(fig, narrow, made),
                height=(3.5, 8.2),
            )
            + "<h3>How uneven is the load?</h3>"
            + plots.picture(
                "skew",
                "Share of all choices that the most chosen experts have, by share of experts; the diagonal is an "
                "even load",
                "; ".join(
                    f"{row['model']}: the most chosen tenth of a layer's experts has {row['top_tenth_share']:.0%} of "
                    "its choices"
                    for row in table_rows
                ),
                lambda fig, narrow: _draw_skew(fig, made, granite),
                height=(3.4, 3.4),
            )
            + table(
                "By model: counted from decode routes, mean over layers (least–most of a layer)",
                [
                    "model",
                    "experts",
                    "layers",
                    "tokens",
                    "most chosen tenth has",
                    "never chosen",
                    "reuse",
                    "reuse if independent",
                ],
                [
                    [
                        row["model"],
                        f"{row['used']} of {row['experts']}",
                        row["layers"],
                        row["tokens"],
                        f"{row['top_tenth_share']:.0%} ({row['top_tenth_least']:.0%}–{row['top_tenth_most']:.0%})",
                        f"{row['never_chosen']:.0%}",
                        f"{row['reuse']:.1%} ({row['reuse_least']:.1%}–{row['reuse_most']:.1%})",
                        f"{row['reuse_independent']:.1%}",
                    ]
                    for row in table_rows
                ],
            )
        )
    spread = granite.max() / granite.mean(), granite.min() / granite.mean()
    body = Html(
        body
        + paragraph(
            term("reuse", "Reuse"),
            " is the share of a token's experts that the token before had in the same layer. "
            "A few hundred tokens of one text are far too few to call an expert unused: they say what one request "
            "does, "
            "not what a model does. Granite 3.1 1B-A400M, a prompt's tokens, all layers together: the most chosen "
            "expert has ",
            figure(f"{spread[0]:.2f} times", upstream["provenance"]),
            f" an even share, the least {spread[1]:.2f} times.",
        )
        + "<h3>Do tokens in company share experts?</h3>"
        + table(
            "Mean union of a layer's batch over what independent tokens would want: below 100 % they share more",
            ["source", *(f"B={batch}" for batch in BATCHES), ""],
            [[source.name, *(_ratio(source, batch) for batch in BATCHES), tag(source.provenance)] for source in found],
        )
    )
    return Section(
        "routing",
        "Routing",
        "Do tokens ask for few experts again and again, so that sharing and caching pay?",
        _answer(table_rows),
        body,
        {"models": table_rows, "counts": _cells(made)} if made else {},
        missing,
    )


BATCHES = (2, 4, 8, 16, 32)


def _ratio(source: Source, batch: int) -> str:
    for union in source.unions:
        if union.batch == batch:
            return f"{union.mean / independent(source.experts, source.used, batch):.0%}"
    return "unknown"


def _answer(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "The counts of real routes are missing, so only reported figures are shown."
    least, most = min(rows, key=lambda row: row["reuse"]), max(rows, key=lambda row: row["reuse"])
    return (
        f"Uneven, and somewhat repetitive: within one text a token takes {least['reuse']:.0%} ({least['model']}) to "
        f"{most['reuse']:.0%} ({most['model']}) of its experts from the token before, where chance would give "
        f"{least['reuse_independent']:.1%} to {most['reuse_independent']:.1%}. Most of what a token wants is still new."
    )


def _cells(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"model": short(trace["model"]), "layer": layer, "counts": " ".join(map(str, counts))}
        for trace in made
        for layer, counts in enumerate(trace["counts"])
    ]


def _describe_heat(rows: list[dict[str, Any]]) -> str:
    return ". ".join(
        f"{row['model']}: {row['layers']} layers of {row['experts']} experts, {row['tokens']} tokens; the most "
        "chosen tenth "
        f"has {row['top_tenth_least']:.0%} to {row['top_tenth_most']:.0%} of a layer's choices, "
        f"{row['never_chosen']:.0%} of "
        "the cells are empty"
        for row in rows
    )


def _draw_heat(fig: Any, narrow: bool, made: list[dict[str, Any]]) -> None:
    axes = plots.panels(fig, len(made), narrow, across=len(made))
    for panel, trace in zip(axes, made, strict=True):
        counts = np.array(trace["counts"], float) / trace["tokens"]
        panel.imshow(counts, aspect="auto", cmap="cividis", vmin=0, vmax=0.5, interpolation="nearest")
        panel.set_title(f"{short(trace['model'])}\n{trace['experts_used']} of {trace['experts']} (counted)")
        panel.set_xlabel("expert")
        panel.set_ylabel("layer")
    bar = fig.colorbar(axes[0].images[0], ax=axes, location="bottom" if narrow else "right", fraction=0.05, aspect=30)
    bar.set_label("share of tokens that chose it")
    bar.outline.set_visible(False)
    bar.set_ticks([0, 0.25, 0.5], labels=["0", "25 %", "≥ 50 %"])


def _draw_skew(fig: Any, made: list[dict[str, Any]], granite: NDArray[np.float64]) -> None:
    axes = fig.subplots()
    axes.plot([0, 100], [0, 100], color=plots.SOFT, linestyle=":", linewidth=1)
    for colour, trace in zip(plots.SERIES, made, strict=False):
        y = lorenz(np.array(trace["counts"], float))
        axes.plot(np.linspace(0, 100, len(y)), 100 * y, color=colour, label=f"{short(trace['model'])} (counted)")
    y = lorenz(granite[None, :])
    axes.plot(
        np.linspace(0, 100, len(y)),
        100 * y,
        color=plots.SERIES[3],
        linestyle="-.",
        label="Granite 1B, layers summed (reported)",
    )
    axes.set_xlabel("% of a layer's experts, most chosen first")
    axes.set_ylabel("% of its choices")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 101)
    axes.grid()
    axes.legend(loc="lower right", fontsize=7.5)
