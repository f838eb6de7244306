"""The report's page in a real browser, at the width of a desk and of a telephone.

`make test-browser` runs it; it needs a Chromium, such as Debian's package `chromium`.
"""

import html
import json
import re
import shutil
import subprocess

import pytest

from jax_ddp_weighting.cli import app as cli

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
QUIET = [
    *["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"],
    *["--disable-background-networking", "--disable-component-update", "--disable-sync"],
    "--hide-scrollbars",
]

# The page stands in a frame, since a window is never as narrow as a telephone's.
FRAME = """<!DOCTYPE html><body>
<iframe id="page" style="width:{width}px;height:900px" srcdoc="{page}"></iframe>
<script>
window.onload = () => {{
  const doc = document.getElementById("page").contentDocument;
  const all = (query) => [...doc.querySelectorAll(query)];
  document.body.dataset.seen = JSON.stringify({{
    pictures: all("figure img").map((each) => [each.naturalWidth, each.clientWidth]),
    captions: all("figcaption").map((each) => each.innerText),
    tables: all("table").map((each) => each.rows.length),
    headings: all("h2").map((each) => each.innerText),
    cut: all(".scroll").filter((each) => each.scrollWidth > each.clientWidth).length,
    verdicts: all("p.right, p.wrong").map((each) => each.className),
    font: parseFloat(getComputedStyle(doc.querySelector("td")).fontSize),
    width: doc.documentElement.clientWidth,
    needed: doc.documentElement.scrollWidth,
  }});
}};
</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "page.html"
    arguments = ["-n", "100003", "-w", "256", "-b", "16", "--tail", "repeat", "-k", "3"]
    convention = ["--convention", "mean_of_nonempty_means"]  # the longest name
    assert cli.run(["report", str(path), *arguments, *convention]) == 1
    return path.read_text()


def seen_by_a_browser(page, width, folder):
    """What a browser made of the page at a width in pixels."""
    framed = folder / "framed.html"
    framed.write_text(FRAME.format(width=width, page=html.escape(page)))
    command = [CHROMIUM, *QUIET, f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    ran = subprocess.run(
        [*command, framed.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', ran.stdout).group(1)))


@pytest.mark.parametrize("width", [1280, 375])
def test_a_browser_shows_every_picture_and_table(page, width, tmp_path):
    seen = seen_by_a_browser(page, width, tmp_path)
    assert seen["width"] == width
    assert seen["needed"] <= width, "the page is wider than the screen"
    assert len(seen["pictures"]) == 4
    for natural, shown in seen["pictures"]:
        assert natural > 900  # it was decoded
        assert 300 < shown <= width
    assert len(seen["captions"]) == 4
    assert len(seen["tables"]) == 4
    assert min(seen["tables"]) >= 3
    assert len(seen["headings"]) == 4
    assert seen["verdicts"] == ["wrong", "wrong"]
    assert seen["font"] >= 12
    assert seen["cut"] == 0, "a table is wider than the screen"


def test_a_picture_that_is_not_there_would_be_missed(page, tmp_path):
    torn = re.sub(
        r'src="data:image/png;base64,[^"]{100}', 'src="data:image/png;base64,', page, count=1
    )
    first, *rest = seen_by_a_browser(torn, 375, tmp_path)["pictures"]
    assert first[0] == 0
    assert all(natural > 900 for natural, _ in rest)
