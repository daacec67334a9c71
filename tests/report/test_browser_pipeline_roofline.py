"""The pipeline and the roofline in a real browser: every control, every number against the data, no request."""

import json
import math
import re
from pathlib import Path
from urllib.parse import parse_qs
from urllib.request import url2pathname

import pytest

from host.report import page
from host.report.inputs import Inputs
from host.report.sections import pipeline, roofline
from host.report.sections.roofline import Scenario

PHONE, DESKTOP = 390, 1440
SIZES = [(width, scheme) for width in (PHONE, DESKTOP) for scheme in ("light", "dark")]


@pytest.fixture(scope="module")
def world():
    found, _ = roofline.read(Inputs())
    assert found is not None
    return found


@pytest.fixture(scope="module")
def sections():
    inputs = Inputs()
    return {each.id: each for each in (pipeline.section(inputs), roofline.section(inputs))}


@pytest.fixture(scope="module")
def address(tmp_path_factory, sections):
    path = tmp_path_factory.mktemp("report") / "index.html"
    path.write_text(page.render(list(sections.values()), "<h1>emufpga</h1>", ""), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def opened(visit, address):
    def open_page(hash_="", width=DESKTOP, scheme="light", script=True):
        return visit(address + hash_, width, scheme, script=script)

    return open_page


def value(tab, name):
    """The equation's value, with all its digits."""
    text = tab.get_attribute(f"#roofline-{name}-value", "data-value")
    return None if text is None else float(text)


def expect(tab, world, ask):
    """What the page shows is what host.seconds gives."""
    found = world.answer(ask)
    for name, (wanted, _) in roofline.steps(world, ask).items():
        got = value(tab, name)
        assert got == (None if wanted is None else pytest.approx(wanted, rel=1e-9)), name
    said = tab.inner_text("#roofline-said")
    if found.rate is not None:
        assert f"{roofline.rate_text(found.rate)} tokens/s" in said
        assert f"the {found.layer.binds} bind" in said
    elif found.fits:
        assert f"no more than {roofline.rate_text(found.at_most)} tokens/s" in said
    else:
        assert "do not fit" in said


def set_slider(tab, name, value):
    tab.eval_on_selector(
        name, "(slide, value) => { slide.value = value; slide.dispatchEvent(new Event('input')); }", str(value)
    )


def until(tab, condition):
    """Wait for it, without the evaluation of strings that the page forbids."""
    for _ in range(1000):
        if condition():
            return
        tab.wait_for_timeout(20)
    pytest.fail("it never came")


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_it_opens_without_trouble(opened, width, scheme):
    tab = opened(width=width, scheme=scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.get_attribute("#roofline-check", "data-wrong") == "0"
    for picture in tab.query_selector_all("#pipeline svg[role=img], #roofline svg[role=img]"):
        assert picture.query_selector("title").inner_html()
        assert picture.bounding_box()["height"] > 100


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_text_can_be_read(opened, width, scheme):
    """No text of the pictures is smaller than 8 pixels on the screen."""
    tab = opened(width=width, scheme=scheme)
    sizes = tab.evaluate(
        """() => [...document.querySelectorAll("#pipeline svg text, #roofline svg text")].map((text) => {
            const scale = text.ownerSVGElement.getScreenCTM().a;
            return parseFloat(getComputedStyle(text).fontSize) * scale;
        })"""
    )
    assert min(sizes) >= 8


def test_the_arithmetic_of_the_page(opened, world):
    """Every scenario of the grid, compared here and not by the page itself."""
    rows = roofline.grid(world)
    got = opened().evaluate("(rows) => rows.map((row) => report.roofline(row))", rows)
    for row, one in zip(rows, got, strict=True):
        for theirs, ours in (("at_least", "atLeast"), ("bytes", "bytes"), ("cycles", "cycles"), ("rate", "rate")):
            assert (row[theirs] is None) == (one[ours] is None)
            assert row[theirs] is None or math.isclose(row[theirs], one[ours], rel_tol=1e-9)
        assert row["binds"] == one["binds"]


def test_the_page_sees_a_difference(browser, address, tmp_path):
    """The page's own comparison fails when a figure is wrong."""
    text = Path(url2pathname(address.removeprefix("file://"))).read_text(encoding="utf-8")
    changed = re.sub(r'("sub_blocks":)\d+', r"\g<1>17", text, count=1)
    assert changed != text
    path = tmp_path / "index.html"
    path.write_text(changed, encoding="utf-8")
    tab = browser.new_page()
    tab.goto(path.as_uri())
    assert int(tab.get_attribute("#roofline-check", "data-wrong")) > 100
    tab.close()


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_every_control_of_the_roofline(opened, world, width):
    tab = opened(width=width)
    first = roofline.start(world)
    expect(tab, world, first)
    for board in world.boards:
        tab.select_option("#roofline-board", board)
        expect(tab, world, Scenario(board, world.boards[board].own[0]))
    tab.select_option("#roofline-board", first.board)
    for home in roofline.HOME_NAMES:
        tab.select_option("#roofline-home", home)
        expect(tab, world, Scenario(first.board, home))
    tab.select_option("#roofline-home", "gbe")
    for model in roofline.MODELS:
        tab.select_option("#roofline-model", model)
        expect(tab, world, Scenario(first.board, "gbe", model))
    tab.select_option("#roofline-model", "granite-1b")
    tab.select_option("#roofline-mode", "tape")
    expect(tab, world, Scenario(first.board, "gbe", mode="tape"))
    tab.select_option("#roofline-mode", "selected")
    for batch in (1, 2, 7, 16):
        set_slider(tab, "#roofline-batch", batch)
        expect(tab, world, Scenario(first.board, "gbe", batch=batch))
    set_slider(tab, "#roofline-mbs", 800)
    megabytes = float(tab.inner_text("#roofline-mbs-out").removesuffix(" MB/s").replace(",", ""))
    assert megabytes == pytest.approx(10 ** (-1 + 0.8 * math.log10(200_000)), rel=5e-3)
    expect(tab, world, Scenario(first.board, "gbe", batch=16, bandwidth=megabytes * 1e6))
    assert "assumed" in tab.inner_text("#roofline-mbs-tag")
    set_slider(tab, "#roofline-mhz", 42)
    expect(tab, world, Scenario(first.board, "gbe", batch=16, bandwidth=megabytes * 1e6, clock=42e6))
    assert "assumed" in tab.inner_text("#roofline-mhz-tag")
    set_slider(tab, "#roofline-experts", 100)
    set_slider(tab, "#roofline-used", 4)
    ask = Scenario(first.board, "gbe", batch=16, bandwidth=megabytes * 1e6, clock=42e6, experts=100, used=4)
    expect(tab, world, ask)
    assert "derived" in tab.inner_text("#roofline-batch-tag")
    assert "bandwidth, clock, experts a layer, experts a token" in tab.inner_text("#roofline-said")
    set_slider(tab, "#roofline-experts", 3)  # fewer than a token chooses: it then chooses all
    expect(tab, world, Scenario(first.board, "gbe", batch=16, bandwidth=megabytes * 1e6, clock=42e6, experts=3, used=3))
    tab.click("#roofline-reset")
    expect(tab, world, Scenario(first.board, "gbe", batch=16))


def test_the_table_follows_model_and_mode(opened, world):
    tab = opened()
    tab.select_option("#roofline-model", "olmoe")
    tab.select_option("#roofline-mode", "tape")
    assert all("OLMoE" in text for text in tab.locator("#roofline .roof-table caption").all_text_contents())
    cells = tab.eval_on_selector_all(
        "#roofline .rate", "(cells) => cells.map((cell) => [{ ...cell.dataset }, cell.firstChild.textContent])"
    )
    assert len(cells) == len(world.boards) * len(roofline.HOME_NAMES) * 5
    for data, text in cells:
        found = world.answer(Scenario(data["board"], data["home"], "olmoe", "tape", int(data["batch"])))
        wanted = roofline.rate_text(found.at_most)
        assert text == ("does not fit" if not found.fits else wanted if found.rate is not None else f"< {wanted}")


def test_a_scenario_can_be_shared(opened, world):
    tab = opened(width=PHONE)
    first = roofline.start(world)
    tab.select_option("#roofline-home", "ft601")
    set_slider(tab, "#roofline-batch", 5)
    set_slider(tab, "#roofline-mhz", 77)
    tab.select_option("#roofline-mode", "tape")
    shared = "#" + tab.url.split("#", 1)[1]
    assert tab.get_attribute("#roofline-link", "href") == shared
    assert parse_qs(shared.split("?")[1])["mhz"] == ["77"]
    other = opened(shared)
    ask = Scenario(first.board, "ft601", mode="tape", batch=5, clock=77e6)
    expect(other, world, ask)
    assert 0 <= other.locator("#roofline").bounding_box()["y"] < 200
    assert other.input_value("#roofline-home") == "ft601"
    # In a page that is open already, too.
    other.evaluate("(hash) => { location.hash = hash; }", f"#roofline?board={first.board}&home=uart&batch=2&mbs=3.5")
    until(other, lambda: other.input_value("#roofline-batch") == "2")
    expect(other, world, Scenario(first.board, "uart", batch=2, bandwidth=3.5e6))


def test_a_link_that_is_wrong_is_told(opened, world):
    tab = opened("#roofline?board=none&batch=17&mbs=a&k=40&mode=selected")
    said = tab.inner_text("#roofline-said")
    assert all(each in said for each in ("board=none", "batch=17", "mbs=a", "k=40"))
    expect(tab, world, roofline.start(world))


def now(tab):
    return int(tab.inner_text("#pipeline-cycle"))


def told(tab, sections):
    """What is said of the cycle is what the data has."""
    data = sections["pipeline"].data
    row, text = data["cycles"][now(tab)], tab.inner_text("#pipeline-now")
    assert f"Cycle {row['cycle']}." in text
    names = {
        "fetch": "Fetch",
        "align": "Align",
        "drain": "Drain",
        "mac": "Decode and MAC",
        "sum": "Block sum",
        "row": "Row",
    }
    for stage, name in names.items():
        lines = [line for line in text.splitlines() if line.startswith(f"{name}: ")]
        assert len(lines) == (row[stage] != "idle")
        for line in lines:
            block = data["blocks"][row[f"{stage}_block"]]
            assert f"{block['kind']} block {block['block']} of expert {block['expert']}" in line
            assert ("waits" in line) == (row[stage] == "waits")
            if row[f"{stage}_of"] > 1:
                assert f"({row[f'{stage}_part']} of {row[f'{stage}_of']})" in line


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_every_control_of_the_pipeline(opened, sections, width):
    tab = opened(width=width)
    last = len(sections["pipeline"].data["cycles"]) - 1
    edge = now(tab)
    told(tab, sections)
    assert sections["pipeline"].data["cycles"][edge]["drain"] == "moves"
    tab.click("#pipeline-on")
    assert now(tab) == edge + 1
    told(tab, sections)
    tab.click("#pipeline-back")
    tab.click("#pipeline-back")
    assert now(tab) == edge - 1
    tab.click("#pipeline-first")
    assert now(tab) == 0
    tab.click("#pipeline-back")
    assert now(tab) == 0
    tab.click("#pipeline-edge")
    assert now(tab) == edge
    for cycle in (0, 1, 13, edge // 2, last - 1, last):
        set_slider(tab, "#pipeline-at", cycle)
        assert now(tab) == cycle
        told(tab, sections)
        here, seen = (tab.locator(name).bounding_box() for name in ("#pipeline-here", "#pipeline-close"))
        assert seen["x"] <= here["x"]
        assert here["x"] + here["width"] <= seen["x"] + seen["width"] + 1
        cursor, held = (tab.locator(name).bounding_box() for name in ("#pipeline-cursor", ".pipe .scroll"))
        assert held["x"] <= cursor["x"] <= held["x"] + held["width"]
    tab.click("#pipeline-on")
    assert now(tab) == last


def test_it_plays_and_stops(opened, sections):
    tab = opened()
    tab.select_option("#pipeline-speed", "30")
    before = now(tab)
    tab.click("#pipeline-play")
    assert tab.get_attribute("#pipeline-play", "aria-label") == "Stop"
    assert tab.get_attribute("#pipeline-now", "aria-live") == "off"
    until(tab, lambda: now(tab) > before + 3)
    tab.select_option("#pipeline-speed", "8")
    assert tab.get_attribute("#pipeline-play", "aria-label") == "Stop"
    tab.click("#pipeline-play")
    stopped = now(tab)
    assert tab.get_attribute("#pipeline-play", "aria-label") == "Play"
    assert tab.get_attribute("#pipeline-now", "aria-live") == "polite"
    tab.wait_for_timeout(300)
    assert now(tab) == stopped
    told(tab, sections)
    # To its end, where it stops by itself; from there it begins again.
    last = len(sections["pipeline"].data["cycles"]) - 1
    set_slider(tab, "#pipeline-at", last - 2)
    tab.click("#pipeline-play")
    until(tab, lambda: tab.get_attribute("#pipeline-play", "aria-label") == "Play")
    assert now(tab) == last
    tab.click("#pipeline-play")
    until(tab, lambda: now(tab) < 100)
    tab.click("#pipeline-play")


def test_a_click_on_the_overview_goes_there(opened):
    tab = opened()
    box = tab.locator("#pipeline-all").bounding_box()
    left, scale, width = (
        float(tab.get_attribute("#pipeline-all", "data-left")),
        float(tab.get_attribute("#pipeline-all", "data-scale")),
        pipeline.WIDTH,
    )
    x = (left + 50.5 * scale) * box["width"] / width
    tab.mouse.click(box["x"] + x, box["y"] + 20)
    assert now(tab) == 50


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_keyboard_reaches_and_moves_every_control(opened, width):
    tab = opened(width=width)
    wanted = set(
        tab.eval_on_selector_all(
            ":is(#pipeline, #roofline) :is(button, input, select, a, summary, [tabindex='0'])",
            """(found) => found.filter((each) => each.checkVisibility()).map((each, number) => {
                each.dataset.number = number;
                return String(number);
            })""",
        )
    )
    assert len(wanted) > 20
    reached = set()
    for _ in range(3 * len(wanted)):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("document.activeElement.dataset.number"))
    assert wanted <= reached
    tab.focus("#pipeline-at")
    before = now(tab)
    tab.keyboard.press("ArrowRight")
    assert now(tab) == before + 1
    assert f"Cycle {before + 1}." in tab.get_attribute("#pipeline-at", "aria-valuetext")
    for name in ("mbs", "mhz", "batch", "experts", "used"):
        text = tab.inner_text(f"#roofline-{name}-out")
        tab.focus(f"#roofline-{name}")
        tab.keyboard.press("ArrowRight")
        assert tab.inner_text(f"#roofline-{name}-out") != text, name
    tab.focus("#pipeline-play")
    tab.keyboard.press("Enter")
    assert tab.get_attribute("#pipeline-play", "aria-label") == "Stop"
    tab.keyboard.press("Space")
    assert tab.get_attribute("#pipeline-play", "aria-label") == "Play"


def test_without_javascript(opened, sections):
    tab = opened(script=False, width=PHONE)
    assert tab.locator("#pipeline-all rect.mac").count() > 4
    assert tab.locator("#pipeline-close").is_visible()
    assert tab.locator("#roofline-line").count() == 1
    assert not tab.locator("#pipeline-play").is_visible()
    assert not tab.locator("#roofline-board").is_visible()
    assert tab.locator("#roofline .rate").first.is_visible()
    assert tab.locator("#roofline-bytes-value").inner_text().endswith(" B")


@pytest.mark.parametrize("form", ["json", "csv"])
def test_data_can_be_taken(opened, sections, form):
    tab = opened()
    for name, section in sections.items():
        for table, rows in section.data.items():
            with tab.expect_download() as waiting:
                tab.click(f"#{name} .take-{form}[data-table={table}]")
            text = waiting.value.path().read_text(encoding="utf-8")
            if form == "json":
                assert json.loads(text) == json.loads(json.dumps(rows))
            else:
                assert len(text.splitlines()) == len(rows) + 1
