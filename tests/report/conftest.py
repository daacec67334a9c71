"""The report made once, and a browser to look at it with."""

import shutil
from pathlib import Path

import pytest

from host.report import __main__ as command
from host.report.inputs import Inputs

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
PATIENCE_MS = 300_000
"""A busy machine is slow; that is no failure."""
HEIGHTS = {390: 844, 1440: 900}
"""A phone's and a desktop's screen."""


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    """The page from what is committed, pictures and all."""
    folder = tmp_path_factory.mktemp("report")
    assert command.main(["--out", str(folder)]) == 0
    return folder / "index.html"


@pytest.fixture(scope="session")
def sections(made):
    """The same sections, by id, without their pictures' files."""
    found, failed, _ = command.build(Inputs(), None)
    assert failed == []
    return {section.id: section for section in found}


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test does it")
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield found
        found.close()


@pytest.fixture
def visit(browser):
    """Opens an address at a width, in a colour scheme; a message, an error or a request there fails the test."""
    contexts, trouble = [], []

    def open_page(address: str, width: int = 1440, scheme: str = "light", *, script: bool = True):
        context = browser.new_context(
            viewport={"width": width, "height": HEIGHTS[width]},
            color_scheme=scheme,
            reduced_motion="reduce",
            java_script_enabled=script,
            accept_downloads=True,
        )
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: trouble.append(message.text))
        tab.on("pageerror", lambda error: trouble.append(str(error)))
        here = address.split("#")[0]
        tab.on(
            "request",
            lambda request: (
                trouble.append(request.url) if not request.url.startswith((here, "blob:", "data:")) else None
            ),
        )
        tab.goto(address)
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []
