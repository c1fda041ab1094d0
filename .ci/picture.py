"""Draws the picture of a report that README.md shows: python .ci/picture.py DEMO docs/images/report.png

`make picture` calls it with the demo's folder, and draws its teacher and student by the author's grades. Next to the
picture it writes the page's sections, one a line: `tests/report/test_picture.py` fails once a report has other ones.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from relabel.jobs.evaluate import JudgingOptions
from relabel.jobs.report.build import build_report
from relabel.manifests.files import Storage

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH = 1400
MARGIN = 10
"""Pixels below the plots."""
COLOURS = 64
"""Of the picture: a fifth of the bytes, and nobody sees it."""


def chromium_path() -> str:
    """Of the Chromium that is installed, or that RELABEL_CHROMIUM names."""
    named = os.environ.get("RELABEL_CHROMIUM")
    if named:
        return named
    for name in CHROMIUMS:
        path = shutil.which(name)
        if path:
            return path
    sys.exit("picture: no Chromium here. Install it (make browser), or name one: RELABEL_CHROMIUM=/path/to/chrome")


def draw(page: Any, picture: Path) -> None:
    """Everything from the page's top to the plots of its labels against gold."""
    plots = [plot.bounding_box() for plot in page.locator("#gold figure").all()]
    height = max(box["y"] + box["height"] for box in plots) + MARGIN
    data = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
    Image.open(io.BytesIO(data)).quantize(COLOURS).save(picture, optimize=True)


def main(demo: Path, picture: Path) -> None:
    """Build the report of a demo's labels and its student's scores, and draw it."""
    picture = picture.absolute()
    os.chdir(demo)  # so that the page names them shortly
    html = build_report(["run", "scores"], Storage(), gold=JudgingOptions(qrels="pairs.parquet")).html
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        file = Path(folder, "report.html")
        file.write_text(html, encoding="utf-8")
        browser = driver.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(file.as_uri())
        draw(page, picture)
        browser.close()
    sections = re.findall(r'<li><a href="#[a-z-]+">(.*?)</a></li>', html)
    picture.with_suffix(".txt").write_text("\n".join(sections) + "\n", encoding="utf-8")
    print(f"Wrote {picture} and {picture.with_suffix('.txt')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
