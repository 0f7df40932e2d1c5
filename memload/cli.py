"""The command line: its commands, and how it reports errors."""

import errno
import io
import os
import sys
from typing import Any

import click

from memload import __version__
from memload.commands.build import build
from memload.commands.describe import info, preview, verify
from memload.commands.doctor import doctor
from memload.commands.edit import concat, export, join, relabel
from memload.commands.output import echo
from memload.errors import MemloadError, shorten
from memload.wording import printable


class _CommandLine(click.Group):
    """Reports an error that a user can fix in one line. Exits with 1, or with 130 after Ctrl-C."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        _prepare_streams()
        try:
            return super().main(*arguments, **options)
        except (MemloadError, ValueError, IndexError, OSError) as error:
            echo(f"memload: {shorten(str(error))}", err=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                sys.stdout = None  # or Python tries again to flush it
            sys.exit(1)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except click.UsageError as error:  # it may quote the name of a file
            raise click.UsageError(printable(error.format_message()), error.ctx) from None
        except KeyboardInterrupt:
            building = context.invoked_subcommand == "build"
            remedy = ". Run the same command again to continue where it stopped" if building else ""
            echo(f"memload: interrupted{remedy}", err=True)
            sys.exit(130)


def _prepare_streams() -> None:
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file would get this number, and libraries print into it
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # not every console can show "×"


@click.group(
    cls=_CommandLine,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(__version__, prog_name="memload")
def main() -> None:
    """Decode every image once, then feed the model at the speed of the bus."""


_DATA = (build, info, verify, preview, concat, join, relabel, export)
for command in (*_DATA, doctor):
    main.add_command(command)
