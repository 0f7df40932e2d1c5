"""The command ``memload plan``."""

import contextlib
import functools
import itertools
import os
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import click

from memload.commands import values
from memload.commands.build import build, source_and_output, with_typed_option
from memload.commands.output import Command, echo, print_json, start_logging
from memload.errors import NothingNewError

if TYPE_CHECKING:
    from memload.planning import Plan

#: The options of `memload build` that neither change how long it takes nor what comes of it.
_WITHOUT_EFFECT: Final = ("part", "parts", "lock_timeout", "as_json", "quiet")
_OPTIONS_OF_BUILD: Final = [
    option
    for option in build.params
    if isinstance(option, click.Option) and option.name not in _WITHOUT_EFFECT
]

#: The endings of sources that may be several. What follows any other source is the output.
_SEVERAL: Final = (".tar", ".parquet")


class _PlanCommand(Command):
    sections: ClassVar = {
        "The machine, if it is another one": ("cores", "ram", "gpu_memory"),
        **{
            title: names
            for title, names in build.sections.items()
            if not set(names) & set(_WITHOUT_EFFECT)
        },
    }

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """See click. The options of a build are kept, spelled out."""
        typed, _, _ = self.make_parser(context).parse_args(list(arguments))
        context.obj = list(_as_typed(typed))
        return super().parse_args(context, arguments)


def _as_typed(typed: dict[str, Any]) -> Iterator[str]:
    """Yield the options of a build among those of a command line, as words."""
    for option in _OPTIONS_OF_BUILD:
        found = typed.get(str(option.name))
        for value in found if isinstance(found, list) else [found]:
            if isinstance(value, str):
                yield from (option.opts[-1], value)
            elif value is True:
                yield option.opts[-1]


# fmt: off
@click.command(cls=_PlanCommand, params=list(_OPTIONS_OF_BUILD))
@click.argument("arguments", metavar="SOURCE... [OUT.BIN]", nargs=-1)
@click.option(
    "--cores", type=click.IntRange(min=1), metavar="N",
    help="Number of cores. The time is that on as many cores of this machine."
)
@click.option("--ram", type=values.memory, metavar="BYTES", help="Available RAM, such as 256GB.")
@click.option(
    "--gpu-memory", type=values.file_size, metavar="BYTES",
    help="Free memory of the GPU, such as 80GB. 0: there is no GPU."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan, with its notes, as JSON.")
@click.pass_context
def plan(
    context: click.Context, /, arguments: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Before building: how large OUT.BIN will be, how long that takes, and what will read it.

    SOURCE and all options but the three of the machine are those of 'memload build'. SOURCE is
    listed, and 200 or more of its records are converted to find out. They go into a folder beside
    OUT.BIN, or with temporary files if its disk is full. The folder is removed again.

    \b
      memload plan images/ --size 256
      memload plan images/ --size 256 --cores 64 --ram 256GB --gpu-memory 80GB
    """
    start_logging(quiet=False, only_warnings=True)
    arguments = _with_output(arguments, options)
    try:
        found = _predict(arguments, options)
    except NothingNewError as error:  # that is no failure
        echo(str(error), err=True)
        return
    command = _command(arguments, context.obj, overwrite=found.output_exists)
    if as_json:
        print_json({**found.as_dict(), "command": command})
        return
    for note in found.notes:
        echo(f"note: {note}", err=True)
    for line in (*found.lines(), command):
        echo(line)
# fmt: on


def _predict(arguments: Sequence[str], options: dict[str, Any]) -> "Plan":
    from memload.building.sources.opening import UsageError
    from memload.planning import Machine, predict

    machine = Machine(*(options.pop(name) for name in ("cores", "ram", "gpu_memory")))
    exif = not options.pop("no_exif")
    try:
        source, output = source_and_output(arguments, options)
        with _ended_by_signals():
            return predict(
                source,
                output,
                machine=machine,
                seconds_so_far=time.process_time(),  # of imports, which a build needs, too
                announce=functools.partial(echo, err=True),
                exif=exif,
                **options,
            )
    except ValueError as error:
        text = with_typed_option(str(error))
        raise (click.UsageError if isinstance(error, UsageError) else ValueError)(text) from None


def _with_output(arguments: Sequence[str], options: dict[str, Any]) -> tuple[str, ...]:
    """Return the arguments with an output, a new one if the user has named none."""
    if not arguments and not options["manifest"]:
        raise click.UsageError("Give SOURCE, such as a folder of images.")
    has_source = len(arguments) > 1 or options["manifest"]
    if has_source and arguments and not arguments[-1].lower().endswith(_SEVERAL):
        return tuple(arguments)  # if the output's name is wrong, that is found later
    from pathlib import Path  # which slows --help

    stems = itertools.chain(["out"], (f"out{number}" for number in itertools.count(2)))
    return (*arguments, next(f"{stem}.bin" for stem in stems if not any(Path().glob(f"{stem}.*"))))


def _command(arguments: Sequence[str], options: Sequence[str], *, overwrite: bool) -> str:
    """Return the command that builds, to be typed."""
    options = [*options, *["--overwrite"] * (overwrite and "--overwrite" not in options)]
    if any(argument.startswith("-") for argument in arguments):
        return shlex.join(["memload", "build", *options, "--", *arguments])
    return shlex.join(["memload", "build", *arguments, *options])


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this as a Ctrl-C does, so that nothing is left behind.

    A signal that is ignored, as SIGHUP is after ``nohup``, stays so.
    """
    process = os.getpid()

    def end(number: int, frame: object) -> None:
        if os.getpid() == process:  # or else it is a worker, which is ended by this process
            # A shell lets SIGINT be ignored in what a script starts with "&".
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.raise_signal(signal.SIGINT)  # which waits while workers are forked

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
