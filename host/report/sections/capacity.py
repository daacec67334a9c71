"""What fits which memory: floors of three placements against the length of the context."""

from __future__ import annotations

from typing import Any

import numpy as np

from host import ledger
from host.report import plots
from host.report.inputs import Inputs
from host.report.page import Html, Section, command, figure, paragraph, table, tag, term
from host.seconds import MODELS
from hw.formats.q6_k import BLOCK_BYTES, BLOCK_WEIGHTS
from models.synthetic import SHAPES, Shape

VOCABULARY = {"granite-1b": 49_155, "granite-3b": 49_155, "olmoe": 50_304, "qwen3-30b": 151_936, "mixtral": 32_000}
"""Tokens, from the models' published configurations."""
SHOWN = ("granite-1b", "qwen3-30b")
MEMORIES_GB = (4, 6, 8, 12, 16)
CONTEXTS = (0, *(1024 << n for n in range(8)))
KV_VALUE_BYTES = 2
PLACEMENTS = ("resident", "cached", "serial")
PROVENANCE = {
    "file": "derived: every matrix in Q6_K, norms and routers in F32, without header; from the published configuration",
    "experts": "derived: layers x experts x bytes of an expert",
    "kv": "derived: 2 x layers x KV heads x head width x 2 B (F16)",
    "input": "derived: read buffers, frames and DMA buffer of the driver (docs/capacity.md)",
    "floor": "derived: what must be somewhere at least; activations and the framework's workspace come on top, unknown",
}


def sizes(name: str, file_bytes: int | None = None) -> dict[str, Any]:
    """Bytes of a public shape: file (by the formula where it is not given), experts, the others, KV, input path."""
    shape = SHAPES[name]
    experts = shape.bank_bytes
    others = _others(shape, VOCABULARY[name]) if file_bytes is None else file_bytes - experts
    matrix = shape.width * shape.expert_width // BLOCK_WEIGHTS * BLOCK_BYTES
    return {
        "model": name,
        "name": shape.name,
        "file": experts + others,
        "experts": experts,
        "others": others,
        "kv_token": 2 * shape.layers * shape.kv_heads * shape.head_width * KV_VALUE_BYTES,
        "input": ledger.input_bytes(matrix)["pcie"],
        "half_cache": shape.layers * (shape.experts // 2) * shape.expert_bytes,
        "context_length": shape.context,
        "expert_share": experts / (experts + others),
    }


def _others(shape: Shape, vocabulary: int) -> int:
    """Bytes of all but the experts: matrices as Q6_K, norms and routers as F32."""
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    embeddings = vocabulary * shape.width * (1 if shape.tied else 2)
    weights = embeddings + shape.layers * 2 * shape.width * (queries + keys)
    plain = shape.layers * (2 * shape.width + shape.query_norm + shape.key_norm + shape.experts * shape.width)
    return weights // BLOCK_WEIGHTS * BLOCK_BYTES + 4 * (plain + shape.width)


def floors(size: dict[str, Any], context: int) -> dict[str, int]:
    """Bytes of each placement at a context."""
    cache = context * size["kv_token"]
    serial = size["input"] + size["others"] + cache
    return {"resident": size["file"] + cache, "cached": serial + size["half_cache"], "serial": serial}


def longest(size: dict[str, Any], memory: int, placement: str) -> int:
    """Tokens of context that fit a memory; -1 where the floor alone does not."""
    room = memory - floors(size, 0)[placement]
    return room // size["kv_token"] if room >= 0 else -1


def section(inputs: Inputs) -> Section:
    published = inputs.upstream()["granite_file_bytes"]
    known = {"granite-1b": published["value"]}
    all_sizes = [sizes(name, known.get(name)) for name in SHAPES]
    granite, qwen = (next(size for size in all_sizes if size["model"] == name) for name in SHOWN)
    wall = -(-granite["file"] // granite["kv_token"])
    fits = [gb for gb in MEMORIES_GB if longest(qwen, gb * 10**9, "serial") >= 0]
    short = [gb for gb in MEMORIES_GB if longest(qwen, gb * 10**9, "resident") < 0]
    context = longest(qwen, fits[0] * 10**9, "serial") if fits else 0
    answer = (
        f"{qwen['name']} needs {_gb(qwen['file'])} with all experts resident, more than any memory here of up to "
        f"{max(short)} GB; without them {fits[0]} GB hold the rest and a context of {context:,} tokens, activations "
        "aside. "
        f"For {granite['name']} the KV cache outgrows the whole file at {wall:,} tokens: from there on, moving weights "
        "away saves less than half of what is needed."
        if fits and short
        else f"{qwen['name']} needs {_gb(qwen['file'])} resident and {_gb(floors(qwen, 0)['serial'])} without experts."
    )
    measured, missing = _measured(inputs)
    body = Html(
        paragraph(
            "Three placements. ",
            term("resident", "Resident"),
            ": everything in one memory. ",
            term("serial", "Serial"),
            ": experts stay on storage and pass through the device, whether as ",
            term("tape"),
            " or ",
            term("selected"),
            "; both need the same memory. Cached: serial, and half of every layer's experts kept. All in one memory "
            "here; the input path and the cache may lie in the host's RAM and the rest on the GPU. ",
            tag(PROVENANCE["floor"]),
        )
        + plots.picture(
            "capacity",
            "Least memory by length of context, three placements, and GPUs of 4 to 16 GB",
            _describe([granite, qwen]),
            lambda figure, narrow: _draw(figure, narrow, [granite, qwen]),
            height=(4.0, 7.2),
        )
        + _calculator(all_sizes)
        + table(
            "Longest context that fits, in tokens (derived); no: not even the floor fits",
            ["model", "placement", "bytes at context 0", *(f"{gb} GB" for gb in MEMORIES_GB)],
            [
                [
                    size["name"],
                    placement,
                    figure(_gb(floors(size, 0)[placement]), PROVENANCE["floor"]),
                    *(_context(longest(size, gb * 10**9, placement)) for gb in MEMORIES_GB),
                ]
                for size in all_sizes
                for placement in PLACEMENTS
            ],
            words=2,
        )
        + paragraph(
            f"The file of {granite['name']} has ",
            figure(f"{granite['file']:,} B", published["provenance"]),
            f"; the formula of the other files gives {sizes('granite-1b')['file']:,} B for it, without header and "
            "vocabulary. ",
            command("emufpga ledger FILE.gguf"),
            " says all this of a file of yours.",
        )
        + measured
    )
    rows = [
        {"model": size["model"], "context": each, "kv": each * size["kv_token"], **floors(size, each)}
        for size in all_sizes
        for each in CONTEXTS
    ]
    data = {"floors": rows, "sizes": all_sizes, "measured_memory": _memory_rows(inputs)}
    return Section(
        "capacity",
        "Capacity",
        "Which memory holds which model, and where does the KV cache become the wall?",
        answer,
        body,
        {name: table for name, table in data.items() if table},
        missing,
    )


def _gb(value: float) -> str:
    return f"{value / 1e9:,.2f} GB" if value < 1e10 else f"{value / 1e9:,.1f} GB"


def _context(tokens: int) -> str:
    return "no" if tokens < 0 else f"{tokens:,}"


def _describe(shown: list[dict[str, Any]]) -> str:
    parts = []
    for size in shown:
        ends = floors(size, CONTEXTS[-1])
        begins = floors(size, 0)
        parts.append(
            f"{size['name']}: "
            + "; ".join(
                f"{name} {_gb(begins[name])} without context, {_gb(ends[name])} at {CONTEXTS[-1]:,} tokens"
                for name in PLACEMENTS
            )
        )
    return ". ".join(parts) + ". All derived."


def _draw(figure: Any, narrow: bool, shown: list[dict[str, Any]]) -> None:
    axes = plots.panels(figure, len(shown), narrow)
    x = np.array([0.5, *(2.0**n for n in np.arange(0, 7.1, 0.25))]) * 1024
    for panel, size in zip(axes, shown, strict=True):
        top = 1.25 * max(16e9, size["file"]) / 1e9 if size["file"] > 8e9 else 17.5
        for gb in MEMORIES_GB:
            panel.axhline(gb, color=plots.LINE, linewidth=1)
            panel.text(x[0], gb, f"{gb} GB", fontsize=7.5, color=plots.SOFT, va="bottom")
        for colour, placement in zip(plots.SERIES, PLACEMENTS, strict=False):
            y = [floors(size, int(each))[placement] / 1e9 for each in x]
            style = {"resident": "-", "cached": "-.", "serial": "--"}[placement]
            panel.plot(x, y, color=colour, linestyle=style, label=placement, linewidth=2.2)
        kv = [each * size["kv_token"] / 1e9 for each in x]
        panel.fill_between(x, 0, kv, color=plots.FILL, label="of it KV cache", linewidth=0)
        if size["context_length"] < x[-1]:
            panel.axvline(size["context_length"], color=plots.SOFT, linewidth=0.9, linestyle=(0, (2, 3)))
            panel.text(
                size["context_length"] * 0.93,
                1,
                "the model's own limit",
                fontsize=7.5,
                color=plots.SOFT,
                rotation=90,
                ha="right",
            )
        panel.set_xscale("log", base=2)
        ticks = [1024, 4096, 16384, 65536] if narrow else [1024, 4096, 16384, 65536, 131072]
        panel.set_xticks(ticks, [f"{tick // 1024}k" for tick in ticks])
        panel.set_xlim(x[0], x[-1])
        panel.set_ylim(0, top)
        panel.minorticks_off()
        panel.set_xlabel("context, tokens")
        panel.set_title(f"{size['name']} (derived)")
    axes[0].set_ylabel("GB")
    axes[0].legend(loc="upper left", bbox_to_anchor=(0.1, 1.0), ncols=1 if narrow else 2, fontsize=7.8)


def _calculator(all_sizes: list[dict[str, Any]]) -> Html:
    """Filled in by capacity.js; without it the table below says the same."""
    options = "".join(
        f'<option value="{size["model"]}"{" selected" if size["model"] == "qwen3-30b" else ""}>{size["name"]}</option>'
        for size in all_sizes
    )
    return Html(
        '<div class="controls" id="capacity-controls" hidden>'
        f'<div><label for="capacity-model">Model</label><select id="capacity-model">{options}</select></div>'
        '<div><label for="capacity-context">Context: <output id="capacity-context-out"></output> tokens</label>'
        '<input type="range" id="capacity-context" min="0" max="131072" step="1024" value="32768"></div>'
        '<div style="grid-column:1/-1" id="capacity-result" aria-live="polite"></div></div>'
    )


def _memory_rows(inputs: Inputs) -> list[dict[str, Any]]:
    found = inputs.get("capacity")
    if found.problem:
        return []
    return [
        {
            "placement": name,
            "peak_bytes": row["memory"]["peak"],
            "own_bytes": row["memory"]["own"],
            "mapped_bytes": row["memory"]["mapped"],
        }
        for name, row in found.data["rows"].items()
    ]


def _measured(inputs: Inputs) -> tuple[Html, list[str]]:
    """Peak memory of whole runs."""
    found = inputs.get("capacity")
    if found.problem:
        return Html(""), [found.problem]
    rows = _memory_rows(inputs)
    said = found.data["provenance"]["memory"]
    order = sorted(rows, key=lambda row: row["peak_bytes"])
    text = "; ".join(f"{row['placement']} {row['peak_bytes'] / 1e6:,.0f} MB" for row in order)

    def draw(figure: Any, narrow: bool) -> None:
        axes = figure.subplots()
        names = [row["placement"] for row in order]
        axes.barh(names, [row["own_bytes"] / 1e6 for row in order], color=plots.A, label="its own")
        axes.barh(
            names,
            [row["mapped_bytes"] / 1e6 for row in order],
            left=[row["own_bytes"] / 1e6 for row in order],
            color=plots.FILL,
            edgecolor=plots.A,
            hatch="///",
            linewidth=0.8,
            label="mapped from files",
        )
        for place, row in enumerate(order):
            axes.text(
                (row["own_bytes"] + row["mapped_bytes"]) / 1e6,
                place,
                f" {row['peak_bytes'] / 1e6:,.0f}",
                va="center",
                fontsize=8,
            )
        axes.set_xlabel("MB of memory at the peak (measured)" if not narrow else "MB at the peak (measured)")
        axes.margins(x=0.16)
        axes.legend(loc="lower right")

    model = MODELS["granite-1b"]
    return Html(
        "<h3>Measured: a whole run of a Granite-size file</h3>"
        + paragraph(
            f"Random weights in the shapes of {model.name}, a prompt and two tokens on the CPU, each row a process "
            "of its own. ",
            tag(said),
            " PyTorch alone is the floor under every row but llama.cpp's.",
        )
        + plots.picture("memory", "Peak memory of a run, by where the experts are", text, draw, height=(3.2, 3.6))
    ), []
