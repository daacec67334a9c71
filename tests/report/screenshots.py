"""``make screenshots``: the pictures of the report in docs/, from the page as it is made now."""

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Literal

from PIL import Image

from host.report.__main__ import main as report
from tests.report.conftest import FLAGS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COLOURS = 160
"""Of a picture; fewer make it smaller."""


def main() -> int:
    from playwright.sync_api import Page, sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        print("make screenshots: error: no chromium: apt-get install chromium", file=sys.stderr)
        return 1

    def shoot(tab: Page, selector: str | None = None) -> Image.Image:
        if selector:
            tab.add_style_tag(content=".bar { position: static !important; }")
        taken = tab.locator(selector).screenshot() if selector else tab.screenshot()
        return Image.open(io.BytesIO(taken)).convert("RGB")

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        if report(["--out", folder]):
            return 1
        address = (Path(folder) / "index.html").as_uri()
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS.split())

        def page(width: int, height: int, scheme: Literal["light", "dark"], place: str = "") -> Page:
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                reduced_motion="reduce",
                bypass_csp=True,
            )
            tab = context.new_page()
            tab.goto(address + place)
            return tab

        save(shoot(page(1440, 900, "light")), "report-desktop")
        save(shoot(page(1440, 900, "dark", "#pipeline"), "#pipeline"), "report-pipeline")
        phones = [shoot(page(390, 844, scheme, place)) for scheme, place in PHONES]
        save(beside(phones), "report-phone")
        browser.close()
    return 0


PHONES: tuple[tuple[Literal["light", "dark"], str], ...] = (
    ("light", ""),
    ("light", "#bytes_by_batch"),
    ("dark", "#roofline"),
)
"""Colours and place of each."""


def beside(pictures: list[Image.Image], gap: int = 24) -> Image.Image:
    """Pictures of one height in a row."""
    width = sum(each.width for each in pictures) + gap * (len(pictures) - 1)
    row = Image.new("RGB", (width, pictures[0].height), "white")
    left = 0
    for each in pictures:
        row.paste(each, (left, 0))
        left += each.width + gap
    return row


def save(picture: Image.Image, name: str) -> None:
    path = DOCS / f"{name}.png"
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {picture.width} x {picture.height}, {path.stat().st_size:,} B")


if __name__ == "__main__":
    sys.exit(main())
