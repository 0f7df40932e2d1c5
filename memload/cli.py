"""The command line: its commands, and how it reports errors."""

import errno
import io
import os
import sys
from importlib import import_module
from typing import Any

import click

from memload import __version__
from memload.commands.output import echo
from memload.errors import MemloadError
from memload.wording import printable

#: The commands in groups, each with the module in `memload.commands` that has them.
_GROUPS = {
    "Build": ("build", ["build"]),
    "Look": ("describe", ["info", "verify", "preview"]),
    "Share": ("copy", ["copy"]),
    "Change": ("edit", ["concat", "join", "relabel", "export"]),
    "Measure": ("doctor", ["doctor"]),
}
_MODULE_OF = {name: module for module, names in _GROUPS.values() for name in names}


class _CommandLine(click.Group):
    """Reports an error that a user can fix in one line. Exits with 1, or with 130 after Ctrl-C.

    Only the command that is called is imported, so that all start fast.
    """

    def list_commands(self, context: click.Context) -> list[str]:
        """See click."""
        return [*_MODULE_OF]

    def get_command(self, context: click.Context, name: str) -> Any:
        """See click."""
        module = _MODULE_OF.get(name)
        return module and getattr(import_module(f"memload.commands.{module}"), name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        for title, (_, names) in _GROUPS.items():
            lines = [self.get_command(context, name).get_short_help_str(80) for name in names]
            with formatter.section(title):
                formatter.write_dl([*zip(names, lines, strict=True)])

    def main(self, *arguments: Any, **options: Any) -> Any:
        _prepare_streams()
        try:
            return super().main(*arguments, **options)
        except (MemloadError, ValueError, IndexError, OSError) as error:
            echo(f"memload: {error}", err=True)
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
