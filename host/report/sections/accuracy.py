"""Error against float64: this project's arithmetic, llama.cpp's Q8_K, hls4ml's types."""

from __future__ import annotations

from typing import Any

from host.report import plots
from host.report.inputs import InputError, Inputs
from host.report.page import Html, Section, command, esc, paragraph, table, tag, term


def section(inputs: Inputs) -> Section:
    missing: list[str] = []
    data: dict[str, list[dict[str, Any]]] = {}
    body, said = [], []
    for part in (_ours, _layer, _hls4ml):
        try:
            html, tables, sentence = part(inputs)
        except InputError as error:
            missing.append(str(error))
            continue
        body.append(html)
        data |= tables
        said.append(sentence)
    return Section(
        "accuracy",
        "Accuracy",
        "How far from exact arithmetic is an output, beside what others do?",
        " ".join(said) or "Not recorded: nothing can be said about errors.",
        "".join(body),
        data,
        missing,
    )


Part = tuple[Html, dict[str, list[dict[str, Any]]], str]


def _ours(inputs: Inputs) -> Part:
    report = inputs.need("accuracy")
    rows = [
        {
            "distribution": name,
            "int16_blocks": row["int16_blocks"],
            "q8_k": row["q8_k"],
            "ratio": row["q8_k"] / row["int16_blocks"],
        }
        for name, row in report["errors"].items()
    ]
    ratios = [row["ratio"] for row in rows]

    def draw(fig: Any, narrow: bool) -> None:
        axes = fig.subplots()
        places = range(len(rows))
        for row, place in zip(rows, places, strict=True):
            axes.plot([row["int16_blocks"], row["q8_k"]], [place, place], color=plots.LINE, linewidth=3, zorder=1)
        axes.plot(
            [row["int16_blocks"] for row in rows],
            places,
            "o",
            color=plots.A,
            markersize=8,
            label="int16 blocks, here (measured)",
        )
        axes.plot(
            [row["q8_k"] for row in rows],
            places,
            "s",
            color=plots.B,
            markersize=8,
            label="Q8_K, llama.cpp's (measured)",
        )
        axes.set_yticks(places, [row["distribution"].replace(" degrees", "°") for row in rows])
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel("relative RMS error; left is better")
        axes.grid(axis="x")
        figure_legend = dict(loc="outside upper left") if not narrow else dict(loc="outside upper left", fontsize=7.5)
        fig.legend(**figure_legend, ncols=1 if narrow else 2)

    html = Html(
        paragraph(
            f"A {report['width']:,} × {report['rows']} Q6_K matrix times vectors with ever heavier tails, mean of "
            f"{report['seeds']} "
            "seeded matrices. What differs is how activations are held: 16 bits with an exponent a block here, 8 "
            "bits with a scale "
            "in llama.cpp's ",
            term("Q8_K"),
            ". ",
            tag(report["provenance"]),
            " ",
            command("make accuracy"),
            ".",
        )
        + plots.picture(
            "accuracy",
            "Relative RMS error of a product against float64, by the distribution of the activations",
            "; ".join(
                f"{row['distribution']}: int16 blocks {row['int16_blocks']:.1e}, Q8_K {row['q8_k']:.1e}" for row in rows
            ),
            draw,
            height=(3.1, 3.4),
        )
        + table(
            "Relative RMS error (measured)",
            ["activations drawn from", "int16 blocks", "Q8_K", "ratio"],
            [
                [row["distribution"], f"{row['int16_blocks']:.2e}", f"{row['q8_k']:.2e}", f"{row['ratio']:.0f}"]
                for row in rows
            ],
        )
    )
    sentence = (
        f"A product's error is {min(row['int16_blocks'] for row in rows):.1e} to "
        f"{max(row['int16_blocks'] for row in rows):.1e} of its "
        f"size, {min(ratios):.0f} to {max(ratios):.0f} times less than with llama.cpp's 8-bit activations."
    )
    return html, {"products": rows}, sentence


def _layer(inputs: Inputs) -> Part:
    """Do these errors change answers?"""
    suite = inputs.need("suite")
    rows = [{"row": name, "right": row["right"], "tasks": suite["tasks"]} for name, row in suite["rows"].items()]
    best = all(row["right"] == row["tasks"] for row in rows)
    html = Html(
        "<h3>Does it change an answer?</h3>"
        + table(
            f"Right answers of {suite['tasks']} (measured)",
            ["who computes", "right", "SHA-256 of every logit"],
            [
                [name, row["right"], command(row["logits_sha256"][:12]) if "logits_sha256" in row else "–"]
                for name, row in suite["rows"].items()
            ],
        )
        + paragraph(
            "Rows with one hash have the same bits in every logit, whatever the batch, the schedule or the device. ",
            tag(suite["provenance"]["same_logit_bits"].split(" of every")[0]),
        )
    )
    return (
        html,
        {"answers": rows},
        (f"All {suite['tasks']} tasks are right whoever computes." if best else "Some tasks are wrong: see the table."),
    )


def _hls4ml(inputs: Inputs) -> Part:
    report = inputs.need("hls4ml")
    errors = report["errors"]
    golden = {row["size"]: row["relative_rms_error"] for row in errors["golden"]}
    rows = [
        {
            "size": row["size"],
            "bits": row["bits"],
            "table": row["table"],
            "backend": row["backend"],
            "strategy": row["strategy"],
            "reuse": row["reuse"],
            "relative_rms_error": row["relative_rms_error"],
            "ours": golden[row["size"]],
            "ratio": row["relative_rms_error"] / golden[row["size"]],
        }
        for row in errors["rows"]
        if row["relative_rms_error"] is not None
    ]
    whole = max(row["size"] for row in rows)
    shown = [row for row in rows if row["size"] == whole]

    def name(row: dict[str, Any]) -> str:
        types = "default types" if row["bits"] is None else f"{row['bits']} bits"
        return types + (f", table {row['table']:,}" if row["table"] != 1024 else "")

    def draw(fig: Any, narrow: bool) -> None:
        axes = fig.subplots()
        names = [name(row) for row in shown] + ["this engine"]
        values = [row["relative_rms_error"] for row in shown] + [golden[whole]]
        axes.barh(names, values, color=[plots.B] * len(shown) + [plots.A], height=0.6, left=1e-6)
        for place, value in enumerate(values):
            axes.text(value * 1.15, place, f"{value:.1e}", va="center", fontsize=8)
        axes.set_xscale("log")
        axes.set_xlim(1e-5, 3)
        axes.invert_yaxis()
        axes.set_xlabel("relative RMS error (measured); left is better")

    best = min(shown, key=lambda row: row["relative_rms_error"])
    worst = max(shown, key=lambda row: row["relative_rms_error"])
    refused = "; ".join(f"{row['backend']}: {row['reason'].split(': ', 1)[-1]}" for row in errors.get("refused", []))
    html = Html(
        "<h3>The same expert in hls4ml's types</h3>"
        + paragraph(
            f"Expert 0 of the tiny model's first layer, {whole} × {whole}, all of hls4ml's weights on the chip. "
            "Its types are for one layer and all inputs; ours has an exponent a block. ",
            tag(errors["provenance"]),
            f" What {errors['versions'].get('hls4ml', 'this release')} of hls4ml cannot do without a vendor's tool "
            "is unknown" + (f" ({refused})." if refused else "."),
        )
        + plots.picture(
            "hls4ml-error",
            "Relative RMS error of one expert against float64: hls4ml by its types, and this engine",
            "; ".join(f"{name(row)}: {row['relative_rms_error']:.1e}" for row in shown)
            + f"; this engine: {golden[whole]:.1e}",
            draw,
            height=(2.9, 3.2),
        )
        + table(
            "Error against float64 (measured)",
            ["cut", "weights and results", "sigmoid table", "backend, strategy", "hls4ml", "this engine", "ratio"],
            [
                [
                    f"{row['size']} × {row['size']}",
                    "default" if row["bits"] is None else f"{row['bits']} bits, fitted",
                    f"{row['table']:,}",
                    esc(f"{row['backend']}, {row['strategy']}, RF {row['reuse']}"),
                    f"{row['relative_rms_error']:.2e}",
                    f"{row['ours']:.2e}",
                    f"{row['ratio']:,.0f}",
                ]
                for row in rows
            ],
        )
    )
    sentence = (
        f"hls4ml's default types leave {worst['relative_rms_error']:.0%} of a {whole} × {whole} expert's size as "
        "error; its best "
        f"{best['relative_rms_error']:.1e}, this engine {golden[whole]:.1e}."
    )
    return html, {"hls4ml": rows}, sentence
