"""An extension of Griffe for the site: examples of docstrings, which begin with ``>>>``, become blocks of code."""

import re
import textwrap
from typing import Any

import griffe

EXAMPLE = re.compile(r"^ *>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


class FencedExamples(griffe.Extension):
    """Markdown would take ``>>>`` for three quotations, one within another."""

    def on_object(self, *, obj: griffe.Object, **others: Any) -> None:
        """Fence the examples of a docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)


def fenced(found: re.Match[str]) -> str:
    """Return an example as a block of code."""
    indent = " " * (len(found[0]) - len(found[0].lstrip()))
    return textwrap.indent(f"```pycon\n{textwrap.dedent(found[0])}\n```", indent)
