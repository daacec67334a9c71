"""From what the page is made: every input with its command, date and commit, and what is wrong with it."""

from __future__ import annotations

from host.report.inputs import NOT_COMMITTED, Input, Inputs
from host.report.page import Html, Section, command, esc, paragraph, table


def section(inputs: Inputs) -> Section:
    every = list(inputs.every())
    bad = [each for each in every if each.problem]
    loose = [each for each in every if not each.problem and each.commit == NOT_COMMITTED]
    answer = (
        f"{len(every) - len(bad)} of {len(every)} inputs are there and whole"
        + (f"; {len(bad)} are not, and are named below" if bad else "")
        + (f"; {len(loose)} not as committed." if loose else ", all as committed.")
    )
    body = Html(
        paragraph(
            "Every figure of this page is in one of these files or calculated from them while the page is made. A "
            "row marked ",
            Html("<b>fresh</b>"),
            " was measured after the last commit; ",
            command("make report FRESH=1"),
            " takes such rows in.",
        )
        + table(
            "Inputs",
            ["file", "state", "date", "commit", "made by"],
            [
                [command(each.path), _state(each), _line(each.date), _line(each.commit), _made_by(each)]
                for each in every
            ],
            words=5,
        )
    )
    rows = [
        {
            "file": each.path,
            "problem": each.problem,
            "date": each.date,
            "commit": each.commit,
            "command": each.command,
            "fresh": each.fresh,
        }
        for each in every
    ]
    return Section(
        "ledger",
        "Ledger",
        "From which files, commands and commits does this page come?",
        answer,
        body,
        {"inputs": rows},
        [each.problem for each in bad if each.problem],
    )


def _line(text: str) -> Html:
    return Html(f'<span class="figure">{esc(text)}</span>')


def _made_by(each: Input) -> Html:
    return esc(each.command) if each.command.startswith("none") else command(each.command)


def _state(each: Input) -> Html:
    if each.problem:
        return Html(
            f'<span class="verdict failure">{esc("absent" if "not there" in each.problem else "broken")}</span>'
        )
    if each.fresh:
        return Html("<b>fresh</b>")
    return esc("whole" if each.commit != NOT_COMMITTED else "whole, changed since the commit")
