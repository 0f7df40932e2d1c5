"""What commands print, and how ``--help`` shows them."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import click

from memload.wording import printable


class Command(click.Command):
    """Shows options in sections."""

    #: The sections of the help text, each with its options. The others come last.
    sections: ClassVar[Mapping[str, Sequence[str]]] = {}

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        section_of = {name: title for title, names in self.sections.items() for name in names}
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in self.sections}
        for option in self.get_params(context):
            record = option.get_help_record(context)
            if isinstance(option, click.Option) and record:  # not an argument
                title = section_of.get(str(option.name), "Options")
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def echo(text: str, *, err: bool = False) -> None:
    """Print one line, even if a file name in it contains line breaks or control characters."""
    click.echo(printable(text), err=err)


def print_json(facts: dict[str, Any]) -> None:
    """Print facts as JSON, indented."""
    click.echo(json.dumps(facts, indent=1))


def start_logging(quiet: bool) -> None:
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
        with suppress(OSError):  # stderr is full; the closing line is worth more
            echo(f"note: {note}", err=True)
    for line in str(report).splitlines():
        echo(line)
