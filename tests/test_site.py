"""./scripts/docs: the site builds without a broken link, and shows docstrings as they are meant."""

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250
    )
    assert not done.returncode, done.stderr[-3000:]
    return folder


def text_of(page):
    """Return what a reader sees of a page, without its code."""
    source = re.sub("<(script|style|pre|code).*?</\\1>", "", page.read_text(), flags=re.DOTALL)
    return html.unescape(re.sub("<[^>]*>", "", source))


def test_each_link_leads_to_a_page_and_a_place_on_it(site):
    broken, checked = [], 0
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for link in re.findall(r'(?:href|src)="([^"]*)"', page.read_text()):
            if "://" in link or link.startswith(("mailto:", "data:")):
                continue
            path, _, anchor = html.unescape(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            found = target.exists()
            if found and anchor and target.suffix == ".html":
                found = f'id="{anchor}"' in target.read_text() or anchor == "__top"
            checked += 1
            if not found:
                broken.append((page.name, link))
    assert checked > 1000
    assert broken == []


@pytest.mark.parametrize(
    "page", ["api/memload.html", "api/transforms.html", "api/recipes.html", "files.html"]
)
def test_docstrings_are_shown_as_they_are_meant(site, page):
    seen = text_of(site / page)
    assert ">>>" not in seen  # examples are code
    assert "``" not in seen
    assert "===" not in seen  # tables are tables


def test_arguments_are_described_one_by_one(site):
    page = (site / "api" / "memload.html").read_text()
    entries = re.findall("<b><code>([a-z_]+)</code></b>", page)
    assert {"dataset", "rank", "num_replicas", "cache_bytes", "missing_masks"} <= {*entries}
