"""The whole report in a real browser: every control, every figure that it shows against the JSON, no request."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

from host.report.inputs import Inputs
from host.report.sections import agents, capacity, glossary, scorecard
from tests.report.conftest import HEIGHTS

SIZES = [(width, scheme) for width in HEIGHTS for scheme in ("light", "dark")]
FOCUSABLE = "a[href], button, input, select, summary, [tabindex='0']"


@pytest.fixture
def opened(visit, made):
    def open_page(hash_: str = "", **options):
        return visit(made.as_uri() + hash_, **options)

    return open_page


def text(tab, selector: str) -> str:
    return re.sub(r"\s+", " ", tab.locator(selector).inner_text())


def table(tab, selector: str) -> list[list[str]]:
    """Cells of a table, head and all."""
    script = "table => [...table.rows].map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    return tab.locator(selector).evaluate(script)


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_every_size_and_scheme(opened, width, scheme):
    """Nothing is wider than the screen, closed or opened; the four answers are on the first screen."""
    tab = opened(width=width, scheme=scheme)
    cards = tab.locator("#top .card")
    assert cards.count() == 4
    for number in range(4):
        box = cards.nth(number).bounding_box()
        assert box["y"] + box["height"] <= HEIGHTS[width]
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 23, 26)"
    assert dark == (scheme == "dark")
    tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    script = f"""[...document.querySelectorAll('main *')].filter(each => !each.closest('.scroll, svg, .unseen')
        && each.getBoundingClientRect().right > {width} + 1).map(each => each.outerHTML.slice(0, 99))"""
    assert tab.evaluate(script) == []


@pytest.mark.parametrize("width", HEIGHTS)
def test_pictures_are_shown_and_told(opened, width):
    """One drawing of each picture, as wide as its screen, with a title and a description."""
    tab = opened(width=width)
    shown = "narrow" if width < 620 else "wide"
    plots = tab.locator("figure.plot")
    assert plots.count() > 8
    for number in range(plots.count()):
        plot = plots.nth(number)
        for kind in ("wide", "narrow"):
            assert plot.locator(f".{kind}").is_visible() == (kind == shown)
        box = plot.locator(f".{shown} svg").bounding_box()
        assert 250 < box["width"] <= width
        assert box["height"] > 150
        for part in ("title", "desc"):
            assert len(plot.locator(f".{shown} {part}").first.text_content()) > 15


@pytest.mark.parametrize("width", HEIGHTS)
def test_the_keyboard_reaches_every_control(opened, width):
    tab = opened(width=width)
    script = f"""[...document.querySelectorAll("{FOCUSABLE}")].filter(each => each.checkVisibility()
        && !each.disabled && each.tabIndex >= 0).map((each, place) => each.dataset.place = place)"""
    wanted = set(tab.evaluate(script))
    assert len(wanted) > 80
    reached = set()
    for _ in range(len(wanted) + 5):
        tab.keyboard.press("Tab")
        place = tab.evaluate("document.activeElement.dataset.place")
        if place is not None:
            reached.add(int(place))
    assert wanted - reached == set()


def test_colours(opened):
    """System, light, dark, and again; kept when the page is loaded again."""
    tab = opened(scheme="light")
    button = tab.locator("#theme")
    grounds = []
    for word in ("system", "light", "dark", "system"):
        assert button.inner_text() == f"Colours: {word}"
        grounds.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        button.click()
    assert grounds[0] == grounds[1] == grounds[3] != grounds[2]
    button.click()
    tab.reload()
    assert tab.locator("#theme").inner_text() == "Colours: dark"
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == grounds[2]


def test_contents_on_a_phone(opened, sections):
    tab = opened(width=390)
    menu, contents = tab.locator("#menu"), tab.locator("#contents")
    assert not contents.is_visible()
    for name in sections:
        menu.focus()
        tab.keyboard.press("Enter")
        assert contents.is_visible()
        assert menu.get_attribute("aria-expanded") == "true"
        contents.locator(f'a[href="#{name}"]').click()
        assert not contents.is_visible()
        assert 0 <= tab.locator(f"#{name} > h2").bounding_box()["y"] < 200
    menu.click()
    tab.keyboard.press("Escape")
    assert not contents.is_visible()


def test_contents_on_a_desktop(opened, sections):
    tab = opened()
    links = tab.locator("#contents a")
    assert [link.get_attribute("href") for link in links.all()] == [f"#{name}" for name in sections]
    for name in sections:
        tab.locator(f'#contents a[href="#{name}"]').click()
        assert tab.locator(f"#{name} > h2").is_visible()
    for link in tab.locator("#top a").all():
        link.click()


def test_every_table_can_be_taken_along(opened, sections):
    """Every button of every section: JSON is the section's data, CSV has its rows and keys."""
    tab = opened()
    taken = 0
    for name, section in sections.items():
        for key, rows in section.data.items():
            for form in ("json", "csv"):
                with tab.expect_download() as waited:
                    tab.locator(f'button.take-{form}[data-section="{name}"][data-table="{key}"]').click()
                assert waited.value.suggested_filename == f"emufpga-{name}-{key}.{form}"
                content = Path(waited.value.path()).read_text(encoding="utf-8")
                if form == "json":
                    assert json.loads(content) == json.loads(json.dumps(rows))
                else:
                    read = list(csv.DictReader(io.StringIO(content, newline="")))
                    assert len(read) == len(rows)
                    assert set(read[0]) == {each for row in rows for each in row}
                taken += 1
                tab.wait_for_timeout(150)  # Chromium takes no more than ten a second
    assert tab.locator("button.take-json, button.take-csv").count() == taken > 30


def test_words_are_explained(opened):
    """By pointer and by keyboard; Escape hides it."""
    tab = opened()
    links = tab.locator("a.term")
    assert links.count() > 10
    for link in links.all():
        word = link.get_attribute("href").removeprefix("#term-")
        link.focus()
        assert text(tab, "#tip") == glossary.TERMS[word]
        assert link.get_attribute("aria-describedby") == "tip"
        tab.keyboard.press("Escape")
        assert not tab.locator("#tip").is_visible()
    links.first.hover()
    assert tab.locator("#tip").is_visible()
    tab.mouse.move(5, 5)
    assert not tab.locator("#tip").is_visible()


def test_what_fits(opened):
    """The calculator against the floors, every model, by pointer and keyboard."""
    tab = opened("#capacity")
    known = {"granite-1b": Inputs().upstream()["granite_file_bytes"]["value"]}
    for name in capacity.SHAPES:
        size = capacity.sizes(name, known.get(name))
        tab.locator("#capacity-model").select_option(name)
        for context in (0, 1024, 32768, 131072):
            tab.locator("#capacity-context").fill(str(context))
            assert text(tab, "#capacity-context-out") == f"{context:,}"
            for placement, floor in capacity.floors(size, context).items():
                shown = text(tab, f'#capacity-result td[data-placement="{placement}"]')
                assert float(shown.removesuffix(" GB")) == pytest.approx(floor / 1e9, abs=0.0051)
    tab.locator("#capacity-context").focus()
    tab.keyboard.press("ArrowLeft")
    assert text(tab, "#capacity-context-out") == "130,048"


def test_agents(opened):
    """Every figure of both workloads, as agents.json has it."""
    workloads = Inputs().need("agents")["workloads"]
    tab = opened("#agents")
    for name, report in workloads.items():
        place = f'.agents[data-workload="{name}"]'
        for metric, (_, scale, _) in agents.METRICS.items():
            tab.locator(f"{place} select").select_option(metric)
            lines = table(tab, f"{place} table")[1:]
            shown = {
                (line[0].removesuffix(" *"), n): cell
                for line in lines
                for n, cell in zip(report["slots"], line[2:], strict=True)
            }
            for row in report["rows"]:
                key = row["placement"] if row["home"] is None else f"{row['placement']}, {row['home']}"
                value = row[metric]["value"]
                want = "unknown" if value is None else agents.number(value * scale)
                assert shown.pop((key, row["n"])) == want
            assert not shown


def test_the_tables_are_the_jsons(opened):
    """Cycles, boards' files, claims: what is shown, not what was meant."""
    inputs = Inputs()
    tab = opened()
    lines = table(tab, "#timing table >> nth=0")[1:]
    for line, row in zip(lines, inputs.need("layer_cycles")["rows"], strict=True):
        assert line[:2] == [str(row["lanes"]), str(row["tokens"])]
        assert [int(line[place].replace(",", "")) for place in (3, 4, 5, 6)] == [
            row[key] for key in ("experts", "passes", "blocks", "cycles")
        ]
    listed = {line[0]: line[1:4] for line in table(tab, "#ledger table")[1:]}
    for each in inputs.every():
        assert listed[each.path][1:] == [each.date, each.commit]
    for result in scorecard.results(inputs):
        shown = text(tab, f"#claim-{result.claim.id}")
        assert result.verdict in shown
        assert result.figure in shown
    storage = {mode["mode"]: mode for mode in inputs.need("storage")["modes"]}
    head, *lines = next(
        each for each in (table(tab, f"#timing table >> nth={n}") for n in range(5)) if each[0][1:] == list(storage)
    )
    for line, what in zip(lines, ("ceiling", "feed", "feed_ahead", "framing", "framing_ahead"), strict=True):
        for mode, cell in zip(head[1:], line[1:], strict=True):
            speed = storage[mode]["speeds"][what]
            assert cell == f"{speed['median']:.2f} ({speed['min']:.2f}–{speed['max']:.2f}), {speed['n']}"


def test_the_first_screen(opened):
    """Its figures, from the JSON by hand."""
    inputs = Inputs()
    shown = text(opened(), "#top")
    token, suite, memory = inputs.need("token"), inputs.need("suite"), inputs.need("capacity")["rows"]
    assert f"{token['outputs']:,} outputs of {token['layers']} Granite-size layers" in shown
    assert f"{min(row['right'] for row in suite['rows'].values())}/{suite['tasks']}" in shown
    assert f"{memory['selected']['memory']['peak'] / 1e6:,.0f} MB" in shown
    clocks = [each.data["clock_hz"] for each in inputs.boards() if each.data and each.data["clock_hz"]]
    assert f"{max(clocks) / 1e6:.0f} MHz" in shown
    for word in scorecard.SIGNS:
        count = sum(result.verdict == word for result in scorecard.results(inputs))
        assert f"{count} {word}" in shown


def test_details_open(opened):
    tab = opened()
    for summary in tab.locator("summary").all():
        summary.focus()
        tab.keyboard.press("Enter")
    assert tab.evaluate("[...document.querySelectorAll('details')].every(each => each.open)")


def test_without_javascript(opened, sections):
    """Contents, answers, tables and pictures are there; controls that would do nothing are not."""
    tab = opened(width=390, script=False)
    assert tab.locator("#contents").is_visible()
    for name, section in sections.items():
        assert text(tab, f"#{name} > .answer") == re.sub(r"\s+", " ", section.answer)
    assert tab.locator("figure.plot .narrow svg").first.is_visible()
    for control in ("#capacity-controls", ".agents .controls", "#theme", "#menu", ".data button"):
        for each in tab.locator(control).all():
            assert not each.is_visible()
