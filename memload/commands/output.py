"""What commands print."""

import json
from typing import Any

import click

from memload.wording import printable


def echo(text: str, *, err: bool = False) -> None:
    """Print one line, even if a file name in it contains line breaks or control characters."""
    click.echo(printable(text), err=err)


def print_json(facts: dict[str, Any]) -> None:
    """Print facts as JSON, indented."""
    click.echo(json.dumps(facts, indent=1))


def start_logging(quiet: bool = False) -> None:
    """Let memload's log, which has a line every 30 seconds, appear on stderr."""
    import logging

    class OneLine(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            """Return the message, in which the names of machines and files are escaped, too."""
            return printable(super().format(record))

    handler = logging.NullHandler() if quiet else logging.StreamHandler()
    handler.setFormatter(OneLine())
    logger = logging.getLogger("memload")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def print_report(report: Any) -> None:
    """Print the notes of a report on stderr, then its summary."""
    for note in report.notes:
        echo(f"note: {note}", err=True)
    for line in str(report).splitlines():
        echo(line)
