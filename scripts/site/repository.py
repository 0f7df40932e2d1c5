"""What the site has beside docs/: other pages of the repository, and the files that pages link to.

A hook of MkDocs. Links such as ``../benchmarks/fidelity.py`` work in the repository. On the site they lead to a page
with the text of that file.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.append(str(Path(__file__).parent))
from docstrings import markdown  # noqa: E402

#: Pages outside of docs/, with their names on the site.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
PICTURE = re.compile(r"(!\[[^\]]*\]\()([^)\s]+)\)")
FORMAT = "<!-- the format -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, their pictures, and all files that are linked."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for plot in (ROOT / "benchmarks" / "plots").glob("*.png"):
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot)))
    pages = [page.src_uri for page in files.documentation_pages()]
    linked = {target for page in pages for target in links(page)}
    for target in sorted(target for target in linked if is_text(target)):
        files.append(File.generated(config, text_page(target), content=as_page(target)))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page whose links lead to pages of the site."""
    uri = page.file.src_uri
    if uri.startswith("repository/"):
        return text
    text = text.replace(FORMAT, specification())
    text = PICTURE.sub(lambda found: f"{found[1]}{found[2].removeprefix('../docs/')})", text)
    return LINK.sub(lambda found: mapped(found, uri), text)


def mapped(found: re.Match[str], uri: str) -> str:
    """Return one link of a page as it is on the site."""
    label, link, anchor = found[1], found[2], found[3] or ""
    target = in_repository(link, uri)
    if target is None:
        return found[0]
    if target.startswith("docs/"):
        page = target.removeprefix("docs/")
    elif target in PAGES:
        page = PAGES[target]
    elif is_text(target):
        page, anchor = text_page(target), ""
    else:  # a folder
        return label if target in label else f"{label} (`{target}`)"
    return f"[{label}]({os.path.relpath(page, Path(uri).parent)}{anchor})"


def links(uri: str) -> Iterator[str]:
    """Yield what a page links to, as paths in the repository."""
    text = source_of(uri).read_text()
    for found in LINK.finditer(text):
        if target := in_repository(found[2], uri):
            yield target


def in_repository(link: str, uri: str) -> str | None:
    """Return the path in the repository that a link of a page means; None if it is an address."""
    if "://" in link or link.startswith("mailto:"):
        return None
    return os.path.relpath(source_of(uri).parent / link, ROOT)


def source_of(uri: str) -> Path:
    """Return the file of a page of the site."""
    outside = {page: source for source, page in PAGES.items()}
    return ROOT / outside.get(uri, f"docs/{uri}")


def is_text(target: str) -> bool:
    """Tell whether a path of the repository is a file that gets a page of its own."""
    in_site = target.startswith("docs/") or target in PAGES
    return not in_site and (ROOT / target).is_file()


def text_page(target: str) -> str:
    """Return the name of the page with the text of a file."""
    return f"repository/{target}.md"


def as_page(target: str) -> str:
    """Return the page with the text of a file. Searches do not find it."""
    text = (ROOT / target).read_text()
    if target.endswith(".md"):
        return f"---\nsearch:\n  exclude: true\n---\n\n{text}"
    language = "python" if target.endswith(".py") else "text"
    head = f"---\nsearch:\n  exclude: true\n---\n\n# `{target}`"
    return f"{head}\n\n````{language}\n{text}\n````\n"


def specification() -> str:
    """Return the specification of the files, which is a docstring, as Markdown."""
    from memload.storage import format as described

    _, _, text = (described.__doc__ or "").partition("\n\n")
    sections = re.split(r"^(\S.*)\n(?=    )", text, flags=re.MULTILINE)
    parts = [sections[0]]
    for title, body in zip(sections[1::2], sections[2::2], strict=True):
        parts.append(f"### {title}\n\n{re.sub('^    ', '', body, flags=re.MULTILINE)}")
    return markdown("\n".join(parts), {})
