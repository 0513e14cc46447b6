"""The documentation site builds without warnings, and opens without errors."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import browser

ROOT = Path(__file__).parents[1]
OPENED = [
    "index",
    "root/readme",
    "contracts",
    "mechanisms/rope2d",
    "api/relattn.kernels",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("myst_nb", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-E"]
    result = subprocess.run(
        [*command, "-b", "html", "docs", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    found = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    assert len(found) > 40
    return found


@pytest.mark.slow
def test_no_link_or_picture_is_missing(pages):
    assert browser.dead_links(pages) == []


@pytest.mark.slow
@pytest.mark.skipif(not browser.CHROMIUM, reason="needs chromium")
def test_no_page_scrolls_sideways_on_a_phone(pages):
    widths = browser.widths(pages, browser.PHONE)
    wide = {page.name: width for page, width in widths.items() if width > browser.PHONE}
    assert wide == {}


@pytest.mark.slow
def test_pages_have_one_search_box(site):
    for name in OPENED:
        text = (site / f"{name}.html").read_text("utf-8")
        assert text.count("search-button-field") == 1


@pytest.mark.slow
@pytest.mark.skipif(not browser.CHROMIUM, reason="needs chromium")
@pytest.mark.parametrize("width", [browser.DESKTOP, browser.PHONE])
@pytest.mark.parametrize("name", OPENED)
def test_pages_open_without_errors(name, width, site):
    assert browser.console_errors(site / f"{name}.html", width) == []
