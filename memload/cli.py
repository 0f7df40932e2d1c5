"""The command line: parse, call one function, print. Heavy imports wait until a command runs."""

import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from memload import __version__

# Generic from click 8.4 on, for a type checker only.
if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType

FILE = click.Path(dir_okay=False)


@contextmanager
def _errors_told(interrupted: str = "interrupted") -> Iterator[None]:
    """Turn what a user can mend into one line and exit status 1, and Ctrl-C into 130."""
    from memload.errors import MemloadError

    for descriptor in range(
        3
    ):  # one that is closed would be given to the next file, and be written to by libraries
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    try:
        yield
    except (
        BrokenPipeError
    ):  # the reader of the output has enough, as head does; click ends in silence
        raise
    except (MemloadError, ValueError, IndexError, OSError) as error:
        _echo(f"memload: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo(f"memload: {interrupted}", err=True)
        sys.exit(130)


def _echo(text: str, *, err: bool = False) -> None:
    """Print one line, whatever a name in it may hold."""
    click.echo("".join(c if c.isprintable() else repr(c)[1:-1] for c in text), err=err)


class _Size(_ParamType):
    name = "SIDE|HxW"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        found = re.fullmatch(r"(\d{1,9})(?:[x×](\d{1,9}))?", str(value))
        if not found or not 0 < int(found[1]) <= 65535 or not 0 < int(found[2] or 1) <= 65535:
            self.fail(
                f"expected a side such as 256 or height×width such as 224x160, found {value!r}",
                param,
                ctx,
            )
        return int(found[1]), int(found[2] or found[1])


class _Bytes(_ParamType):
    name = "BYTES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(
            r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?)(i?)B?", str(value).strip(), re.IGNORECASE
        )
        if not found or (found[3] and not found[2]):
            self.fail(
                f"expected a size such as 4GB, 512MiB or a number of bytes, found {value!r}",
                param,
                ctx,
            )
        power = " KMGT".index(found[2].upper() or " ")
        return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


class _Named(_ParamType):
    name = "NAME=PATTERN"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        name, equals, pattern = str(value).partition("=")
        if not (name and equals and pattern):
            self.fail(
                f"expected a name and a pattern such as 'landmarks=x*,y*', found {value!r}",
                param,
                ctx,
            )
        return name, pattern


class _Numbers(_ParamType):
    name = "I,J,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        try:
            return [int(number) for number in str(value).split(",")]
        except ValueError:
            self.fail(f"expected numbers such as 0,5,17, found {value!r}", param, ctx)


class _Group(click.Group):
    """The command line, on any console: one whose encoding lacks a letter, as "×", is given its number instead."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            # Not where it is closed, or somebody has put his own there.
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().main(*arguments, **options)
        except OSError as error:  # of --help and --version, which no command's own handler sees
            with suppress(OSError):
                click.echo(f"memload: {error}", err=True)
            sys.exit(1)
        finally:
            _drop_unwritten()


def _drop_unwritten() -> None:
    """Throw away what could not be written, as to a full disk: Python would try again at its end, and tell its way."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            with open(os.devnull, "w") as nowhere:  # noqa: PTH123  # pathlib is not loaded for --help
                os.dup2(nowhere.fileno(), stream.fileno())
        except ValueError:  # closed
            pass


@click.group(
    cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="memload")
def main() -> None:
    """Decode every image once, then feed the model at the speed of the bus."""


def _by_name(option: str, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    if len(dict(pairs)) < len(pairs):
        raise click.UsageError(f"{option}: expected different names, found one twice")
    return dict(pairs)


@main.command()
@click.argument("arguments", metavar="[IMAGES] OUT.BIN", nargs=-1, required=True)
@click.option(
    "--size",
    type=_Size(),
    default="256",
    show_default=True,
    help="Stored pictures: side, or height×width.",
)
@click.option(
    "--fit",
    type=click.Choice(["crop", "squash", "pad"]),
    default="crop",
    show_default=True,
    help="Cover and cut evenly; change the aspect ratio; or show all, with a margin.",
)
@click.option(
    "--interpolation",
    default="bilinear",
    show_default=True,
    type=click.Choice(["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]),
    help="Resizing filter.",
)
@click.option(
    "--mode",
    type=click.Choice(["RGB", "L"]),
    default="RGB",
    show_default=True,
    help="Colour or grey.",
)
@click.option(
    "--fast",
    is_flag=True,
    help="JPEGs decoded at 1/2, 1/4 or 1/8 where that leaves twice the size, and only the kept part resized; "
    "not with --resizer torch.",
)
@click.option(
    "--decoder",
    type=click.Choice(["pillow", "jpeg4py"]),
    default="pillow",
    show_default=True,
    help="What decodes JPEGs; pillow-simd counts as pillow.",
)
@click.option(
    "--resizer",
    type=click.Choice(["pillow", "torch"]),
    default="pillow",
    show_default=True,
    help="What resizes; torch's pixels differ by up to 2 levels. torch: bilinear or bicubic, without --fast.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Reject JPEGs with damage that Pillow passes in silence (needs simplejpeg).",
)
@click.option(
    "--no-exif", is_flag=True, help="Leave pictures as stored, whatever their EXIF orientation."
)
@click.option(
    "--background", default="white", show_default=True, help="Colour behind transparent pixels."
)
@click.option(
    "--fill", default="black", show_default=True, help="Colour of the margin of --fit pad."
)
@click.option(
    "--max-pixels",
    type=click.IntRange(min=1),
    default=89_478_485,
    show_default=True,
    help="Larger pictures are rejected, before they take memory.",
)
@click.option(
    "--extensions", help="Endings of image files, such as .jpg,.gif; torchvision's by default."
)
@click.option("--manifest", type=FILE, help="CSV file: path, label, numbers; instead of IMAGES.")
@click.option(
    "--root",
    type=click.Path(file_okay=False),
    help="Folder of the manifest's paths; its own by default.",
)
@click.option(
    "--points",
    type=_Named(),
    multiple=True,
    help="Columns of the manifest that are x, y pairs, e.g. "
    "'landmarks=part_*' (x, y, x, y, …), 'landmarks=x*,y*', or landmarks=2 for all.",
)
@click.option(
    "--array",
    "arrays",
    type=_Named(),
    multiple=True,
    help="Columns of the manifest as one array, e.g. 'pose=r*:3x3'.",
)
@click.option(
    "--on-error",
    type=click.Choice(["skip", "raise"]),
    default="skip",
    show_default=True,
    help="List bad pictures in OUT.rejects.csv and go on; or stop at the first.",
)
@click.option(
    "--num-workers",
    type=click.IntRange(min=0),
    help="Processes; one a core by default, 0 for none.",
)
@click.option(
    "--shard-size",
    type=_Bytes(),
    help="Split the pixels into files of at most this size, e.g. 4GB.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1),
    default=60,
    show_default=True,
    help="Seconds after which a picture is given up.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT.BIN, once the new one is complete.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def build(arguments: tuple[str, ...], **options: Any) -> None:
    """Decode a folder of IMAGES once, into the memory map OUT.BIN and its index OUT.idx.

    IMAGES holds one class a sub-folder, or just images. Interrupted at any moment, the same command goes
    on where it stopped.
    """
    manifest, root = options.pop("manifest"), options.pop("root")
    points, arrays = (_by_name(name, options.pop(name)) for name in ("points", "arrays"))
    extensions, quiet = options.pop("extensions"), options.pop("quiet")
    wanted = 1 if manifest else 2
    if len(arguments) != wanted:
        expected = "OUT.BIN alone beside --manifest" if manifest else "IMAGES and OUT.BIN"
        raise click.UsageError(
            f"expected {expected}, found {len(arguments)}: {' '.join(arguments)}"
        )
    if not manifest and (root or points or arrays):
        raise click.UsageError(
            "--root, --points and --array describe a manifest: give --manifest FILE"
        )
    if manifest and extensions:
        raise click.UsageError(
            "--extensions is for a folder of IMAGES: a manifest names its files itself"
        )
    if options["fast"] and options["resizer"] == "torch":
        raise click.UsageError(
            "--fast and --resizer torch: expected one of them, found both: --fast resizes only the part of a picture "
            "that is kept, and torch's resizer whole pictures. Leave one out"
        )
    with _errors_told("interrupted. Run the same command again: it goes on where it stopped"):
        import logging

        import memload

        logger = logging.getLogger("memload")
        logger.addHandler(logging.NullHandler() if quiet else logging.StreamHandler())
        logger.setLevel(logging.INFO)
        source: Any = arguments[0]
        if manifest:
            source = memload.Manifest(manifest, root=root, points=points, arrays=arrays)
        elif extensions:
            endings = [f".{ending.strip().lstrip('.')}" for ending in extensions.split(",")]
            source = memload.ImageFolder(source, extensions=endings)
        report = memload.build(
            source,
            arguments[-1],
            exif=not options.pop("no_exif"),
            progress=False if quiet else None,
            **options,
        )
        if not quiet:
            for note in report.notes:
                _echo(f"note: {note}", err=True)
            _echo(str(report))


@main.command()
@click.argument("path", required=False)
@click.option(
    "--environment", is_flag=True, help="Versions, and which Pillow and libjpeg are really loaded."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(path: str | None, environment: bool, as_json: bool) -> None:
    """Say what is in a data set (OUT.BIN or an index), or what memload runs on."""
    if (path is None) == (not environment):
        found = "neither" if path is None else f"both {path} and --environment"
        raise click.UsageError(f"expected OUT.BIN or --environment, not both, found {found}")
    with _errors_told():
        from memload import inspection

        facts: dict[str, Any] = inspection.environment() if path is None else inspection.info(path)
        if as_json:
            click.echo(json.dumps(facts, indent=1))
            return
        with suppress(
            AttributeError, LookupError, TypeError, ValueError
        ):  # those of another's index hold anything
            facts |= {"statistics": _explained(facts)}
        for line in _text(facts):
            _echo(line)


def _explained(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the statistics of a data set with what their numbers are."""
    told = dict(facts["statistics"])
    for name in ("source_width", "source_height"):
        if name in told:
            told[name] = "{:,} to {:,} pixels".format(*told[name])
    if sides := told.get("source_shorter_side"):
        told["source_shorter_side"] = {
            f"from {int(side):,} pixels": f"{sides[side]:,} images"
            for side in sorted(sides, key=int)
        }
    if counts := told.get("class_counts"):
        few = [f"{name} {count:,}" for name, count in zip(facts["classes"], counts, strict=True)]
        told["class_counts"] = (
            few if len(few) <= 12 else f"{min(counts):,} to {max(counts):,} samples a class"
        )
    return told


def _text(facts: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _text(value, indent + "  ")
        elif isinstance(value, list) and len(value) > 12:
            yield f"{indent}{name}: {', '.join(map(str, value[:8]))}, … ({len(value):,})"
        elif isinstance(value, list):
            yield f"{indent}{name}: {', '.join(f'{v:.4f}' if isinstance(v, float) else str(v) for v in value)}"
        else:
            yield f"{indent}{name}: {value}"


@main.command()
@click.argument("path")
@click.option("--num-threads", type=click.IntRange(min=1), help="Threads; one a core by default.")
def verify(path: str, num_threads: int | None) -> None:
    """Read OUT.BIN whole and compare it with its checksums; exit status 1 if anything differs."""
    with _errors_told():
        from memload import inspection

        report = inspection.verify(path, num_threads=num_threads)
        for problem in report.problems:
            _echo(f"memload: {problem}", err=True)
        if report.bad_rows:
            shown = ", ".join(map(str, report.bad_rows[:20])) + (
                ", …" if len(report.bad_rows) > 20 else ""
            )
            keys = ", ".join(report.bad_keys[:5]) + (", …" if len(report.bad_keys) > 5 else "")
            _echo(
                f"memload: {path}: expected {report.rows:,} rows as they were written, found {len(report.bad_rows):,} "
                f"altered: rows {shown}{f' ({keys})' if keys else ''}. Restore the file, or build again",
                err=True,
            )
        if not report.ok:
            sys.exit(1)
        _echo(f"{path}: {report.rows:,} rows, {report.bytes:,} bytes, all as they were written")


@main.command()
@click.argument("path")
@click.option(
    "-o", "--output", type=FILE, required=True, help="Image file to write, such as grid.png."
)
@click.option(
    "--count", type=click.IntRange(min=1), default=64, show_default=True, help="How many samples."
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Which ones, at random.",
)
@click.option("--indices", type=_Numbers(), help="Which ones, by number.")
@click.option("--class", "class_name", help="Only of this class.")
@click.option(
    "--tile",
    type=click.IntRange(min=8, max=2048),
    default=128,
    show_default=True,
    help="Width of each.",
)
def preview(path: str, output: str, **options: Any) -> None:
    """Write a contact sheet of OUT.BIN with labels and points."""
    with _errors_told():
        from memload import inspection

        chosen = inspection.preview(path, output, **options)
        click.echo(f"{output}: {len(chosen)} samples of {path}")


@main.command()
@click.argument("path")
@click.option(
    "--images",
    type=click.Path(file_okay=False),
    help="The folder that it was built from, to decode too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", type=FILE, help="Image file to write, such as speed.png.")
def bench(path: str, images: str | None, as_json: bool, plot: str | None) -> None:
    """Measure what each stage and feed reaches with OUT.BIN on this machine, in less than a minute."""
    with _errors_told():
        from pathlib import Path

        from memload import bench as measuring
        from memload.bench_report import check_plot

        if plot is not None:
            check_plot(Path(plot))
        report = measuring.measure(path, images=images)
        if as_json:
            click.echo(json.dumps(report.as_dict(), indent=1))
        else:
            for line in report.text().splitlines():
                _echo(line)
        if plot is not None:  # last, as the disk may be full by now
            report.plot().save(plot)
