"""Our docstrings as Markdown: an extension of Griffe, which reads them for the site.

They are written for `help()`: prose with double backticks, examples that begin with ``>>>``, names of memload in
single backticks, tables between lines of ``===``, and lists of arguments below ``Args:``.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

EXAMPLE = re.compile(r"^ *>>> .*(?:\n(?! *$).*)*", re.MULTILINE)
NAME = re.compile(r"(?<!`)`(?:memload\.)?([A-Za-z_][\w.]*)`(?!`)")
ARGUMENTS = re.compile(r"^( *)Args:\n((?:\1 +.+\n?)+)", re.MULTILINE)
ARGUMENT = re.compile(r"^([\w, ]+): ", re.MULTILINE)
BORDER = "=[= ]+"
TABLE = re.compile(rf"^( *)({BORDER})\n((?:.+\n)+?)\1{BORDER}(?=\n *\n|\s*\Z)", re.MULTILINE)
REFERENCE = Path(__file__).parents[2] / "docs" / "api"


class Docstrings(griffe.Extension):
    """Turns each docstring into Markdown when it is read."""

    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        """Convert all docstrings of a package that is completely read."""
        if pkg.path != "memload":
            return
        items = list(everything_in(pkg))
        for item in items:
            if item.is_attribute and not item.docstring:
                item.docstring = comment_above(item)
        names = described(pkg)
        for item in items:
            if item.docstring:
                item.docstring.value = markdown(item.docstring.value, names)


def described(package: griffe.Module) -> dict[str, str]:
    """Return the full paths of the names in the reference, by what docstrings call them: ``Loader``, ``Loader.feed``."""
    names = {}
    for page in REFERENCE.glob("*.md"):
        for path in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            member = package[path.removeprefix("memload.")]
            name = path.rpartition(".")[2]
            inner = [name, *(f"{name}.{inner}" for inner in documented_in(member))]
            names |= {
                each: f"{path.removesuffix(name)}{each}" for each in inner if "._" not in each
            }
    return names


def documented_in(item: griffe.Object) -> list[str]:
    """Return the names within a class that the reference shows."""
    members = item.members.items() if item.is_class else ()
    return [name for name, member in members if member.has_docstring]


def comment_above(attribute: griffe.Attribute) -> griffe.Docstring | None:
    """Return the comment above an attribute, each of whose lines begins with ``#:``."""
    lines = attribute.filepath.read_text().splitlines()[: attribute.lineno - 1]
    texts: list[str] = []
    while lines and lines[-1].strip().startswith("#:"):
        texts.insert(0, lines.pop().strip().removeprefix("#:").strip())
    return griffe.Docstring("\n".join(texts), parent=attribute) if texts else None


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
    text = ARGUMENTS.sub(arguments, text)

    def link(found: re.Match[str]) -> str:
        path = names.get(found[1])
        return f"[`{found[1]}`][{path}]" if path else f"`{found[1]}`"

    return NAME.sub(link, text)


def arguments(found: re.Match[str]) -> str:
    """Return a section of arguments as a list. A line that is indented further continues an entry."""
    entries = re.sub(r"\n +", " ", textwrap.dedent(found[2]))
    return textwrap.indent("Args:\n\n" + ARGUMENT.sub(r"- **\1**: ", entries), found[1])


def fenced(example: str) -> str:
    """Return an example as a block of code."""
    indent = " " * (len(example) - len(example.lstrip()))
    return f"{indent}```pycon\n{example}\n{indent}```"


def table(found: re.Match[str]) -> str:
    """Return a table of reStructuredText as one of Markdown. A line that begins with a blank continues a cell."""
    indent, border, body = found.groups()
    spans = [match.span() for match in re.finditer("=+", border)]
    spans[-1] = spans[-1][0], None
    *titles, text = re.split(rf"^ *{BORDER}\n", body, flags=re.MULTILINE)
    rows: list[list[str]] = []
    for line in text.splitlines():
        line = line.removeprefix(indent)
        cells = [line[start:end].strip() for start, end in spans]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)]
    first = titles[0].removeprefix(indent) if titles else ""
    head = [first[start:end].strip() for start, end in spans]
    lines = [head, ["---"] * len(spans), *rows]
    return "\n".join(f"{indent}| {' | '.join(map(escaped, line))} |" for line in lines)


def escaped(cell: str) -> str:
    """Return a cell whose bars do not end it."""
    return cell.replace("|", "\\|")
