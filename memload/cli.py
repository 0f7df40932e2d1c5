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
from memload.errors import MemloadError, shorten
from memload.wording import printable

#: The commands in groups: the module of each in `memload.commands`, and its line in ``--help``.
_COMMANDS = {
    "Build": {"build": ("build", "Decode images once, into a memory map.")},
    "Look": {
        "info": ("describe", "Describe a data set, or how far its build is."),
        "verify": ("describe", "Compare all files with their checksums."),
        "preview": ("describe", "Draw images with labels, masks, boxes and points."),
    },
    "Share": {"copy": ("copy", "Copy a data set between machines and stores.")},
    "Change": {
        "concat": ("edit", "Put data sets under one index, one after another."),
        "join": ("edit", "Add arrays to the images, such as features."),
        "relabel": ("edit", "Take labels and other columns from a table."),
        "export": ("edit", "Write PNG files, or a tar as WebDataset."),
    },
    "Measure": {"doctor": ("doctor", "Say what bounds training here, and what to do.")},
}
_MODULE_OF = {name: module for group in _COMMANDS.values() for name, (module, _) in group.items()}


class _CommandLine(click.Group):
    """Reports an error that a user can fix in one line. Exits with 1, or with 130 after Ctrl-C.

    Only the command that is called is imported, so that all start fast.
    """

    def list_commands(self, context: click.Context) -> list[str]:
        """See click."""
        return [*_MODULE_OF]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """See click."""
        if name not in _MODULE_OF:
            return None
        command: click.Command = getattr(
            import_module(f"memload.commands.{_MODULE_OF[name]}"), name
        )
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        for title, commands in _COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, line) for name, (_, line) in commands.items()])

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
