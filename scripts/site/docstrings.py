"""Our docstrings as Markdown: an extension of Griffe, which reads them for the site.

They are written for `help()`: prose with double backticks, examples that begin with ``>>>``, names of memload in
single backticks, and tables between lines of ``===``.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

EXAMPLE = re.compile(r"^ *>>> .*(?:\n(?! *$).*)*", re.MULTILINE)
NAME = re.compile(r"(?<!`)`(?:memload\.)?([A-Za-z_][\w.]*)`(?!`)")
TABLE = re.compile(
    r"^( *)=[= ]+\n((?:.+\n)+?)\1=[= ]+\n(?:((?:.*\n)*?)\1=[= ]+(?:\n|\Z))?", re.MULTILINE
)
REFERENCE = Path(__file__).parents[2] / "docs" / "api"


class Docstrings(griffe.Extension):
    """Turns each docstring into Markdown when it is read."""

    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        """Convert all docstrings of a package that is completely read."""
        if pkg.path != "memload":
            return
        names = described(pkg)
        for item in everything_in(pkg):
            if item.docstring:
                item.docstring.value = markdown(item.docstring.value, names)


def described(package: griffe.Module) -> dict[str, str]:
    """Return the full paths of the names in the reference, by what docstrings call them: ``Loader``, ``Loader.feed``."""
    names = {}
    for page in REFERENCE.glob("*.md"):
        for path in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            member = package[path.removeprefix("memload.")]
            name = path.rpartition(".")[2]
            inner = [name, *(f"{name}.{inner}" for inner in member.members if member.is_class)]
            names |= {
                each: f"{path.removesuffix(name)}{each}" for each in inner if "._" not in each
            }
    return names


def everything_in(item: griffe.Object) -> Iterator[griffe.Object]:
    """Yield a module or class and all that it contains, without what it imports."""
    yield item
    for member in item.members.values():
        if not member.is_alias:
            yield from everything_in(member)


def markdown(text: str, names: dict[str, str]) -> str:
    """Return a docstring as Markdown. ``names`` are those that the reference describes."""
    text = TABLE.sub(table, text)
    text = EXAMPLE.sub(lambda found: fenced(found[0]), text)

    def link(found: re.Match[str]) -> str:
        path = names.get(found[1])
        return f"[`{found[1]}`][{path}]" if path else f"`{found[1]}`"

    return NAME.sub(link, text)


def fenced(example: str) -> str:
    """Return an example as a block of code."""
    indent = " " * (len(example) - len(example.lstrip()))
    return f"{indent}```pycon\n{example}\n{indent}```"


def table(found: re.Match[str]) -> str:
    """Return a table of reStructuredText as one of Markdown. Lines that begin with a blank continue a cell."""
    indent, first, second = found[1], found[2], found[3]
    borders = found[0].split("\n", 1)[0]
    spans = [match.span() for match in re.finditer("=+", borders)]
    spans[-1] = spans[-1][0], None
    rows: list[list[str]] = []
    for line in (second if second is not None else first).splitlines():
        cells = [line[start:end].strip() for start, end in spans]
        if cells[0] or not rows:
            rows.append(cells)
        else:
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)]
    titles = [""] * len(spans)
    if second is not None:
        titles = [first.splitlines()[0][start:end].strip() for start, end in spans]
    lines = [titles, ["---"] * len(spans), *rows]
    return (
        "\n".join(f"{indent}| {' | '.join(escaped(cell) for cell in line)} |" for line in lines)
        + "\n"
    )


def escaped(cell: str) -> str:
    """Return a cell whose bars do not end it."""
    return cell.replace("|", "\\|")
