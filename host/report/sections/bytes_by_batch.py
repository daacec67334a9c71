"""Bytes of experts that a token costs, by how many tokens share a layer's pass."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from host.model_file import ModelFile, ModelFileError
from host.report import plots
from host.report.inputs import InputError, Inputs
from host.report.page import Html, Section, details, esc, paragraph, table, tag, term
from host.routing import GRANITE, independent
from host.seconds import MODELS

TINY = "the tiny model, independent requests"


@dataclass(frozen=True)
class Union:
    """Mean number of different experts that a layer's batch wants, of real tokens."""

    batch: int
    mean: float
    least: float | None
    most: float | None
    n: int | None


@dataclass(frozen=True)
class Source:
    """Unions of one model; ``expert_bytes`` of one expert in the types of its file."""

    name: str
    experts: int
    used: int
    expert_bytes: float
    bytes_provenance: str
    provenance: str
    unions: tuple[Union, ...]


def sources(inputs: Inputs) -> tuple[list[Source], list[str]]:
    """All models with unions of real tokens, and what is missing."""
    found, missing = [_granite()], []
    for read in (_requests, _traces):
        try:
            found += read(inputs)
        except (InputError, ModelFileError) as error:
            missing.append(str(error))
    return found, missing


def _granite() -> Source:
    shape = MODELS["granite-1b"]
    unions = tuple(Union(batch, mean, None, None, None) for batch, mean in GRANITE.means.items())
    said = "reported: sw-ml-study/emufpga measured it, mean over layers, 23 prompt tokens of 5 prompts"
    return Source(
        shape.name, shape.experts, shape.used, shape.expert_bytes, "derived: 3 matrices of Q6_K blocks", said, unions
    )


def _requests(inputs: Inputs) -> list[Source]:
    """The 45 tasks, several at a time: tokens of unlike requests that decoded together."""
    suite = inputs.need("suite")
    rows = [row for row in suite["rows"].values() if row.get("device")]
    most = max(rows, key=lambda row: sum(union["n"] for union in row["unions"]))
    unions = tuple(Union(*(row[key] for key in UNION_KEYS)) for row in most["unions"] if row["n"])
    with ModelFile.open(str(inputs.root / "models" / suite["model"])) as model:
        size, experts, used = model.layers[0].expert_bytes, model.expert_count, model.experts_used
    return [Source(TINY, experts, used, size, "counted: from the file", suite["provenance"]["unions"], unions)]


UNION_KEYS = ("batch", "mean", "min", "max", "n")


def _traces(inputs: Inputs) -> list[Source]:
    routing, traces = inputs.need("routing"), inputs.need("traces")
    sizes = {trace["model"]: trace["expert_bytes"] for trace in traces["traces"]}
    return [
        Source(
            short(trace["model"]),
            trace["experts"],
            trace["experts_used"],
            sizes[trace["model"]],
            traces["provenance"]["expert_bytes"],
            routing["provenance"],
            tuple(Union(row["batch"], row["mean"], row["min"], row["max"], row["batches"]) for row in trace["rows"]),
        )
        for trace in routing["traces"]
    ]


def short(model: str) -> str:
    """A traced file's name without its types and maker."""
    return model.removesuffix("-Q4_K_M").removesuffix("-it").removeprefix("google_")


def rows(source: Source) -> Iterator[dict[str, Any]]:
    """Bytes of a layer's experts a token, by batch: all of them, the union, and what independent tokens would take."""
    for union in source.unions:
        apart = independent(source.experts, source.used, union.batch)
        yield {
            "model": source.name,
            "batch": union.batch,
            "experts": source.experts,
            "used": source.used,
            "union": union.mean,
            "union_min": union.least,
            "union_max": union.most,
            "n": union.n,
            "union_independent": apart,
            "bytes_all": source.experts * source.expert_bytes / union.batch,
            "bytes_union": union.mean * source.expert_bytes / union.batch,
            "bytes_independent": apart * source.expert_bytes / union.batch,
            "useful_share_all": union.mean / source.experts,
            "provenance": source.provenance,
        }


def section(inputs: Inputs) -> Section:
    found, missing = sources(inputs)
    table_rows = [row for source in found for row in rows(source)]
    body = Html(
        paragraph(
            "A layer's pass fetches each expert that somebody wants once, for all tokens of the batch: the ",
            term("union"),
            ". ",
            term("tape", "Tape"),
            " moves all experts whatever the batch, so its cost a token falls with 1/B; ",
            term("selected"),
            " moves the union. The dashed line is what the union would be if tokens chose "
            "experts uniformly and independently, E (1 − (1 − k/E)",
            Html("<sup>B</sup>"),
            "). ",
            tag("derived: E (1 - (1 - k/E)^B)"),
        )
        + plots.picture(
            "bytes",
            "Expert bytes of one layer, a token, by batch: all experts, the union that was seen, the independent "
            "formula",
            _describe(found),
            lambda figure, narrow: _draw(figure, narrow, found),
            height=(5.4, 11.5),
        )
        + Html(f"<ul class='marks'>{''.join(_mark(source) for source in found)}</ul>")
        + details(
            "Every figure, with the share of a tape that some token wants",
            table(
                "Unions and bytes a layer and token",
                [
                    "model",
                    "batch",
                    "union, mean",
                    "min–max",
                    "n",
                    "if independent",
                    "all, MB",
                    "union, MB",
                    "useful of all",
                ],
                [
                    [
                        row["model"],
                        row["batch"],
                        f"{row['union']:.2f}",
                        "unknown" if row["union_min"] is None else f"{row['union_min']}–{row['union_max']}",
                        "unknown" if row["n"] is None else f"{row['n']:,}",
                        f"{row['union_independent']:.2f}",
                        f"{row['bytes_all'] / 1e6:.2f}",
                        f"{row['bytes_union'] / 1e6:.2f}",
                        f"{row['useful_share_all']:.1%}",
                    ]
                    for row in table_rows
                ],
            ),
        )
        + _engine(inputs, missing)
    )
    return Section(
        "bytes_by_batch",
        "Bytes by batch",
        "How many bytes of experts does a token cost, alone and in company?",
        _answer(found),
        body,
        {"unions": table_rows},
        missing,
    )


def _answer(found: list[Source]) -> str:
    first = found[0]
    alone, last = first.unions[0], first.unions[-1]
    saved = 1 - last.mean / (last.batch * alone.mean)
    every = 1 - alone.mean / first.experts
    shared = {source.name: source.unions[-1] for source in found if source.unions[-1].batch >= 8}
    below = [
        source.name
        for source in found
        if source.unions[-1].batch >= 8
        and source.unions[-1].mean < independent(source.experts, source.used, source.unions[-1].batch)
    ]
    return (
        f"Alone, a token of {first.name} needs {alone.mean * first.expert_bytes / 1e6:.1f} MB a layer: {every:.0%} "
        "less than "
        f"streaming all experts; {last.batch} tokens together pay {saved:.0%} less each. In {len(below)} of "
        f"{len(shared)} sources with batches of 8 or more, real tokens share more than independent ones would."
    )


def _mark(source: Source) -> str:
    return f"<li>{esc(source.name)} {tag(source.provenance)}</li>"


def _describe(found: list[Source]) -> str:
    parts = []
    for source in found:
        first, last = source.unions[0], source.unions[-1]
        parts.append(
            f"{source.name}, {source.used} of {source.experts} experts: {first.mean:g} experts at batch 1, "
            f"{last.mean:.1f} at "
            f"batch {last.batch} ({independent(source.experts, source.used, last.batch):.1f} if independent); a "
            "token costs "
            f"{first.mean * source.expert_bytes / 1e6:.1f} MB a layer alone, "
            f"{last.mean * source.expert_bytes / last.batch / 1e6:.1f} "
            f"MB at batch {last.batch}, and {source.experts * source.expert_bytes / last.batch / 1e6:.1f} MB there "
            "if all experts pass"
        )
    return ". ".join(parts) + "."


def _draw(figure: Any, narrow: bool, found: list[Source]) -> None:
    axes = plots.panels(figure, len(found), narrow, across=3)
    for panel, source in zip(axes, found, strict=True):
        batches = [1 << n for n in range(6) if 1 << n <= max(8, source.unions[-1].batch)]
        size = source.expert_bytes / 1e6
        panel.plot(
            batches,
            [source.experts * size / each for each in batches],
            color=plots.B,
            linestyle=":",
        )
        panel.plot(
            batches,
            [independent(source.experts, source.used, each) * size / each for each in batches],
            color=plots.SOFT,
            linestyle="--",
        )
        word = source.provenance.split(":")[0]
        x = [union.batch for union in source.unions]
        style: dict[str, Any] = plots.STYLES[word] | {"linestyle": "-"}
        panel.plot(
            x,
            [union.mean * size / union.batch for union in source.unions],
            color=plots.A,
            **style,
        )
        spread = [union for union in source.unions if union.least is not None and union.most is not None]
        if spread:
            panel.fill_between(
                [union.batch for union in spread],
                [(union.least or 0) * size / union.batch for union in spread],
                [(union.most or 0) * size / union.batch for union in spread],
                color=plots.FILL,
                linewidth=0,
            )
        plots.powers(panel, batches, "batch, tokens")
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.minorticks_off()
        panel.grid(axis="y")
        panel.set_title(
            "\n".join(textwrap.wrap(f"{source.name}: {source.used} of {source.experts}", 38 if narrow else 25))
        )
        panel.set_ylabel("MB a layer and token")
    lines: dict[str, tuple[Any, Any, Any]] = {
        "all experts (derived)": (plots.B, ":", ""),
        "independent (derived)": (plots.SOFT, "--", ""),
    }
    lines |= {"union (counted)": (plots.A, "-", "s"), "union (reported)": (plots.A, "-", "^")}
    handles = [
        Line2D(
            [],
            [],
            color=colour,
            linestyle=style,
            marker=marker,
            label=name,
            fillstyle="none" if marker == "^" else "full",
        )
        for name, (colour, style, marker) in lines.items()
    ]
    figure.legend(
        handles=[*handles, Patch(color=plots.FILL, label="union, min–max")],
        loc="outside upper left" if narrow else "lower right",
        **({} if narrow else {"bbox_to_anchor": (0.97, 0.12)}),
        fontsize=8,
    )


def _engine(inputs: Inputs, missing: list[str]) -> Html:
    """The same unions, by the hardware's own counters."""
    try:
        replay = inputs.need("unions")
    except InputError as error:
        missing.append(str(error))
        return Html("")
    equal = "the same as the trace's, and every output bit for bit" if replay["equal"] else "not the trace's: a fault"
    return Html(
        "<h3>Does the hardware fetch the union, no more?</h3>"
        + paragraph(
            f"Layer {replay['layer']} of {short(replay['model'])} through the simulated engine, first tokens of the "
            "trace: "
            f"bytes asked for make unions that are {equal}. ",
            tag(replay["provenance"]["union_engine"]),
        )
        + table(
            "Experts fetched by the engine (counted)",
            ["batch", "engine", "trace", "if independent", "fetches saved by sharing"],
            [
                [
                    str(row["batch"]),
                    row["union_engine"],
                    row["union_trace"],
                    f"{row['union_independent']:.1f}",
                    f"{row['saved']:.1%}",
                ]
                for row in replay["rows"]
            ],
        )
    )
