"""The command line: parse the arguments, call one function, print the result.

A command imports what it needs only when it runs, so that ``--help`` is fast.
"""

import errno
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import click

from memload import __version__
from memload.errors import MemloadError, NothingNewError, shorten

FILE = click.Path(dir_okay=False)
FOLDER = click.Path(file_okay=False)


#: The options of `memload build` that say how a source is read, apart from those of the classes.
_SOURCE_OPTIONS = (
    *("extensions", "root", "path_column", "extension", "where", "image_column", "label_column"),
    *("points", "boxes", "labels"),
)

#: The sections of the help text of `memload build`, each with its options. The others come last.
_SECTIONS = {
    "How the source is read": (
        *(*_SOURCE_OPTIONS, "arrays", "masks", "missing_masks", "new_to"),
        *("classes", "classes_from", "manifest"),
    ),
    "How images are stored": (
        *("size", "fit", "interpolation", "mode", "background", "fill", "mask_fill", "no_exif"),
        "shard_size",
    ),
    "How images are decoded": ("fast", "decoder", "strict", "max_pixels"),
}


class _Command(click.Command):
    """Shows options in sections, and a whole sentence about itself in the list of commands."""

    def get_short_help_str(self, limit: int = 45) -> str:
        return " ".join((self.help or "").partition("\n\n")[0].split())

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        sections_of_build = _SECTIONS if self.name == "build" else {}
        section_of = {name: title for title, names in sections_of_build.items() for name in names}
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(context):
            record = option.get_help_record(context)
            if isinstance(option, click.Option) and record:  # not an argument
                title = section_of.get(str(option.name), "Options")
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class _CommandLine(click.Group):
    """Reports an error that a user can fix in one line. Exits with 1, or with 130 after Ctrl-C."""

    command_class = _Command

    def main(self, *arguments: Any, **options: Any) -> Any:
        _prepare_streams()
        try:
            return super().main(*arguments, **options)
        except (MemloadError, ValueError, IndexError, OSError) as error:
            _echo(f"memload: {shorten(str(error))}", err=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                sys.stdout = None  # or Python tries again to flush it
            sys.exit(1)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            building = context.invoked_subcommand == "build"
            remedy = ". Run the same command again to continue where it stopped" if building else ""
            _echo(f"memload: interrupted{remedy}", err=True)
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


def _echo(text: str, *, err: bool = False) -> None:
    """Print one line, even if a file name in it contains line breaks or control characters."""
    click.echo("".join(c if c.isprintable() else repr(c)[1:-1] for c in text), err=err)


def _print_json(facts: dict[str, Any]) -> None:
    click.echo(json.dumps(facts, indent=1))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _size(text: str) -> tuple[int, int]:
    """Parse a side, or height×width, for ``--size``."""
    match = re.fullmatch(r"(\d{1,5})(?:[x×](\d{1,5}))?", text)
    height, width = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not (0 < height <= 65535 and 0 < width <= 65535):
        raise click.BadParameter(
            f"{text!r} is not a size. Give a side such as 256, or height×width such as 224x160. "
            "A side has 1 to 65,535 pixels."
        )
    return height, width


def _bytes(text: str) -> int:
    """Parse a number of bytes with an optional unit for ``--shard-size``."""
    pattern = r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([KMGT])(i?))?B?"
    match = re.fullmatch(pattern, text.strip(), re.IGNORECASE)
    if not match:
        raise click.BadParameter(
            f"{text!r} is not a size. Give a number of bytes, with a unit if you like: 4GB, 512MiB."
        )
    number, unit, binary = match.groups()
    power = "KMGT".index(unit.upper()) + 1 if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def _reject_limit(text: str) -> str:
    """Check the value of ``--max-rejects``."""
    from memload.building.rejects import RejectLimit

    try:
        RejectLimit(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is neither a share such as 50% nor a count such as 20."
        ) from None
    return text


def _named(text: str) -> tuple[str, str]:
    """Parse NAME=PATTERN for ``--points``, ``--boxes`` and ``--array``."""
    name, _, pattern = text.partition("=")
    if not (name and pattern):
        raise click.BadParameter(
            f"{text!r} is not NAME=PATTERN. Give a name and a pattern such as 'landmarks=x*,y*'."
        )
    return name, pattern


def _optionally_named(text: str) -> tuple[str, str]:
    """Parse NAME=PATTERN or NAME for ``--points``."""
    return _named(text) if "=" in text or not text else (text, "")


def _mask(text: str) -> tuple[str, str]:
    """Parse FOLDER or NAME=FOLDER for ``--masks``. Without a name, it is empty."""
    if os.path.isdir(text):  # noqa: PTH112  # pathlib would slow down --help
        return "", text
    name, sign, value = text.partition("=")
    if not text or (sign and not (name and value)):
        raise click.BadParameter(
            f"{text!r} is not [NAME=]FOLDER. Give a folder such as masks/ or parts=parts/."
        )
    return (name, value) if sign else ("", name)


def _array(text: str) -> tuple[str, str]:
    """Parse NAME=FILE for ``memload join``."""
    name, _, file = text.partition("=")
    if not (name and file):
        raise click.BadParameter(
            f"{text!r} is not NAME=FILE. Give a name and a file such as mask=masks.bin."
        )
    return name, file


def _condition(text: str) -> tuple[str, str]:
    """Parse NAME=TEXT for ``--where``."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise click.BadParameter(
            f"{text!r} is not NAME=TEXT. Give a column and its text such as split=train."
        )
    return name, value


def _numbers(text: str) -> list[int]:
    """Parse numbers separated by commas for ``--indices``."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a list of numbers. Give numbers such as 0,5,17."
        ) from None


def _by_name(option: str, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise click.UsageError(f"{option} has {twice.pop()!r} twice. Give each name once.")
    return dict(pairs)


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


# fmt: off
@main.command()
@click.argument("arguments", metavar="SOURCE... OUT.BIN", nargs=-1)
@click.option(
    "--extensions", metavar="E,F,…",
    help="Folders and zips: extensions of image files, such as .jpg,.gif. Default: torchvision's."
)
@click.option(
    "--root", help="Tables: folder or URL that paths are relative to. Default: the table's folder."
)
@click.option(
    "--path-column", help="Tables: column with the paths. Default: file_name, or the first."
)
@click.option(
    "--extension", help="Tables: extension to add to paths that have none, such as .jpg."
)
@click.option(
    "--where", type=_condition, metavar="NAME=TEXT", multiple=True,
    help="Tables: read only lines with this text, such as split=train. Repeatable."
)
@click.option(
    "--image-column", help="Parquet: column with the images. Default: image, img, jpg, png or webp."
)
@click.option(
    "--label-column",
    help="Tables and Parquet: column with the labels. Default: label, or the only column of text."
)
@click.option(
    "--points", type=_optionally_named, metavar="NAME=PATTERN", multiple=True,
    help="Tables: columns that are x, y pairs, such as 'landmarks=part_*' (x, y, x, y, …), "
    "'landmarks=x*,y*', or landmarks=2 for all. Tars: the NAME of an entry in .json. Repeatable."
)
@click.option(
    "--boxes", type=_named, metavar="NAME=PATTERN|K", multiple=True,
    help="Tables: columns that are boxes, such as 'box=x1*,y1*,x2*,y2*'. Tars: an entry in .json, "
    "and how many boxes a sample has at most. Repeatable."
)
@click.option(
    "--masks", type=_mask, metavar="[NAME=]FOLDER|ENTRY", multiple=True,
    help="Folder of masks, each with the name of its image: PNG, TIFF, BMP or .npy, whose values "
    "are ids. Stored as 'mask', or NAME. Tables and Parquet: or a column. Tars: or what follows "
    "the name of the image, such as seg for 0001.seg.png. Repeatable."
)
@click.option(
    "--missing-masks", type=click.Choice(["reject", "fill"]), default="reject",
    help="What becomes of an image without a mask. fill: its mask is all --mask-fill."
)
@click.option(
    "--array", "arrays", type=_named, metavar="NAME=FOLDER|ENTRY", multiple=True,
    help="Folder of further pictures or .npy files, each with the name of its image, such as "
    "depth=depth/, or an entry as with --masks. Tables: or columns of numbers that form one array, "
    "such as 'pose=r*:3x3'. Repeatable."
)
@click.option(
    "--new-to", type=FILE, metavar="OUT.BIN",
    help="Build only samples that this data set does not have, by their names, in its size and "
    "mode. 'memload concat' puts both under one index."
)
@click.option("--labels", type=FILE, help="Arrays: file with the labels (.npy).")
@click.option(
    "--classes", metavar="A,B,…", help="Names of the classes. They are numbered in this order."
)
@click.option(
    "--classes-from", type=FILE, metavar="FILE",
    help="Number the classes as in this data set, or as in this text file with one name a line."
)
@click.option(
    "--manifest", type=FILE, help="Table to read in place of SOURCE, whatever its name is."
)
@click.option(
    "-s", "--size", type=_size, metavar="SIDE|HxW",
    help="Size of the stored images: one side, or height×width. Default: 256. Arrays and memload "
    "data sets keep their size."
)
@click.option(
    "--fit", type=click.Choice(["crop", "squash", "pad"]), default="crop",
    help="crop: fill the size and cut off what extends beyond it, evenly. squash: change the "
    "aspect ratio. pad: keep the whole image, with a margin."
)
@click.option(
    "--interpolation", default="bilinear", help="Resampling filter.",
    type=click.Choice(["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
)
@click.option(
    "--mode", type=click.Choice(["RGB", "L", "I;16", "mask", "array"]),
    help="RGB: color. L: grayscale. 'I;16' (in quotes): grayscale of 16 bits. mask: ids of masks, "
    "for memload join. array: store arrays as they are. Default: array for arrays, else RGB."
)
@click.option("--background", default="white", help="Color behind transparent pixels.")
@click.option("--fill", default="black", help="Color of the margin with --fit pad.")
@click.option(
    "--mask-fill", type=click.IntRange(0, 65535), default=255, metavar="ID",
    help="Id of the margin of masks with --fit pad."
)
@click.option("--no-exif", is_flag=True, help="Ignore the EXIF orientation of images.")
@click.option(
    "--shard-size", type=_bytes, metavar="BYTES",
    help="Split the pixels into files of at most this size, such as 4GB."
)
@click.option(
    "--fast", is_flag=True,
    help="Decode JPEGs at 1/2, 1/4 or 1/8 of their size if that is still twice the stored size, "
    "and resize only the part that is kept."
)
@click.option(
    "--decoder", type=click.Choice(["pillow", "jpeg4py"]), default="pillow",
    help="What decodes JPEGs. pillow-simd counts as pillow."
)
@click.option(
    "--strict", is_flag=True,
    help="Reject damaged JPEGs that Pillow would decode without a warning (needs simplejpeg)."
)
@click.option(
    "--max-pixels", type=click.IntRange(min=1), default=89_478_485,
    help="Reject larger images before they take memory."
)
@click.option(
    "--on-error", type=click.Choice(["skip", "raise"]), default="skip",
    help="skip: list images that cannot be used in OUT.rejects.csv, and continue. raise: stop at "
    "the first."
)
@click.option(
    "--max-rejects", type=_reject_limit, metavar="SHARE%|COUNT", default="10%",
    help="Publish nothing if more images than this cannot be used, such as 50% or 20."
)
@click.option(
    "-j", "--num-workers", type=click.IntRange(min=0),
    help="Number of processes. Default: one for each core. 0: use this process."
)
@click.option(
    "--timeout", type=click.FloatRange(min=0.1), default=60,
    help="Give up on an image after this many seconds."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT.BIN once the new one is complete.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the report, with its notes, as JSON."
)
@click.option("--quiet", is_flag=True, help="Print only errors.")
def build(arguments: tuple[str, ...], **options: Any) -> None:
    """Decode the images of SOURCE once, into the memory map OUT.BIN and its index OUT.idx.

    SOURCE is a folder with one subfolder for each class, a table (.csv, .tsv, .txt), a .zip,
    .parquet or .tar files, an array (.npy), a memload data set (.bin, .idx), or a URL of these.

    \b
      memload build images/ out.bin
      memload build labels.csv train.bin --root images/ --where split=train
      memload build 'shards/{000..123}.tar' out.bin -s 224
      memload build val/ val.bin --classes-from train.bin
      memload build images/ out.bin --masks masks/
      memload build images/ more.bin --new-to out.bin

    If a build is interrupted, run the same command again: it continues where it stopped.
    """
    quiet, as_json = options.pop("quiet"), options.pop("as_json")
    source, output = _open_source(arguments, options)
    import memload

    _start_logging(quiet)
    exif, progress = not options.pop("no_exif"), False if quiet else None
    try:
        report = memload.build(source, output, exif=exif, progress=progress, **options)
    except ValueError as error:
        raise ValueError(_with_typed_option(str(error))) from None
    except NothingNewError as error:  # that is no failure
        if not quiet:
            _echo(str(error), err=True)
        return
    try:
        if as_json:
            _print_json(report.as_dict())
        elif not quiet:
            _print_report(report)
    except OSError as error:  # stdout is a full disk, for example
        error.strerror = f"{report.path} is complete, but this cannot be printed: {error.strerror}"
        raise
# fmt: on


def _start_logging(quiet: bool) -> None:
    """Let memload's log, which has a line every 30 seconds, appear on stderr."""
    import logging

    logger = logging.getLogger("memload")
    logger.addHandler(logging.NullHandler() if quiet else logging.StreamHandler())
    logger.setLevel(logging.INFO)


def _print_report(report: Any) -> None:
    for note in report.notes:
        with suppress(OSError):  # stderr is full; the closing line is worth more
            _echo(f"note: {note}", err=True)
    _echo(str(report))


def _with_typed_option(message: str) -> str:
    """Return a message that begins with the name of an argument with that of the option."""
    name, colon, rest = message.partition(":")
    for option in click.get_current_context().command.params:
        if option.name == name:
            return f"{option.opts[-1]}{colon}{rest}"
    return message


def _open_source(arguments: Sequence[str], options: dict[str, Any]) -> tuple[Any, str]:
    """Return what to build from, and the output.

    Takes the options that describe the source out of ``options``.
    """
    manifest = options.pop("manifest")
    if not arguments:
        what = f"OUT.BIN with --manifest {manifest}" if manifest else "SOURCE and OUT.BIN"
        raise click.UsageError(f"Give {what}.")
    *sources, output = arguments
    if manifest and sources:
        raise click.UsageError(
            f"Give only OUT.BIN with --manifest {manifest}. These are given: {' '.join(arguments)}."
        )
    if not manifest and not sources:
        raise click.UsageError(f"Give SOURCE and OUT.BIN. Only one is given: {output}.")
    options["classes"] = _classes(options.pop("classes"), options.pop("classes_from"))
    from memload.building.sources.opening import UsageError, has_entries, open_paths, open_table

    reading = _reading_options(options, with_entries=bool(manifest) or has_entries(sources[0]))
    if len(sources) == 1 and not (reading and output.endswith(".bin")):
        return sources[0], output  # if the output's name is wrong, memload.build says so
    if not output.endswith(".bin"):  # known before many files are opened
        raise click.UsageError(f"OUT.BIN comes last, and ends in .bin. {output} is given.")
    try:
        if manifest:
            return open_table(manifest, **reading), output
        return open_paths(sources, reading), output
    except UsageError as error:
        raise click.UsageError(str(error)) from None


def _reading_options(options: dict[str, Any], *, with_entries: bool) -> dict[str, Any]:
    """Take the options for sources of some kind, if they are given, out of ``options``.

    Those of masks and arrays stay in ``options`` if they are folders, which go with any source.
    """
    from memload.building.sources.opening import is_entry, split_folders

    reading = {name: options.pop(name) for name in _SOURCE_OPTIONS}
    for name in ("where", "points", "boxes"):
        reading[name] = _by_name(f"--{name}", reading[name])
    if not any(reading["points"].values()):
        reading["points"] = list(reading["points"])
    reading["boxes"] = {
        name: int(value) if value.isdecimal() else value for name, value in reading["boxes"].items()
    }
    if reading["extensions"]:
        endings = reading["extensions"].split(",")
        reading["extensions"] = [f".{ending.strip().lstrip('.')}" for ending in endings]
    named = {"arrays": options["arrays"], "masks": options["masks"]}
    # An entry such as seg.png, which means files such as 1.seg.png in a tar, has the name seg.
    named["masks"] = [
        (
            name or (value.split(".")[0] if is_entry(value, with_entries=with_entries) else "mask"),
            value,
        )
        for name, value in named["masks"]
    ]
    for name, pairs in named.items():
        values = _by_name("--array" if name == "arrays" else "--masks", pairs)
        folders, reading[name] = split_folders(values, with_entries=with_entries)
        options[name] = folders or None
    return {name: value for name, value in reading.items() if value}


def _classes(names: str | None, file: str | None) -> list[str] | str | None:
    if names and file:
        raise click.UsageError("Give either --classes or --classes-from.")
    return [name.strip() for name in names.split(",")] if names else file


@main.command()
@click.argument("path", metavar="[OUT.BIN]", required=False)
@click.option(
    "--environment",
    is_flag=True,
    help="Show the versions in use, and which Pillow and libjpeg are really loaded.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(path: str | None, environment: bool, as_json: bool) -> None:
    """Describe a data set (OUT.BIN or an index), or the software that memload runs on."""
    if (path is None) == (not environment):
        raise click.UsageError("Give either OUT.BIN or --environment.")
    from memload import inspection

    facts: dict[str, Any] = inspection.environment() if path is None else inspection.info(path)
    if as_json:
        _print_json(facts)
        return
    if path is not None:
        facts["arrays"] = {name: _array_line(array) for name, array in facts["arrays"].items()}
    # An index that memload did not write may hold anything there: then it is shown as it is.
    with suppress(AttributeError, LookupError, TypeError, ValueError):
        facts["statistics"] = _readable_statistics(facts)
    for line in _lines(facts):
        _echo(line)


def _array_line(array: dict[str, Any]) -> str:
    """Describe an array: ``mask, 64×64 uint8, 260 rows, 1,069,056 bytes in out.mask.bin``."""
    shape, files = "×".join(map(str, array["shape"])), array["files"]
    named = files[0] if len(files) == 1 else f"{files[0]} to {files[-1]}"
    return (
        f"{array['kind']}, {shape} {array['dtype']}, {_count(array['rows'], 'row')}, "
        f"{array['bytes']:,} bytes in {named}"
    )


def _readable_statistics(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the statistics of a data set with units, and with long lists summed up."""
    statistics = dict(facts["statistics"])
    for name in ("source_width", "source_height"):
        if name in statistics:
            statistics[name] = "{:,} to {:,} pixels".format(*statistics[name])
    if sides := statistics.get("source_shorter_side"):
        statistics["source_shorter_side"] = {
            f"from {_count(int(side), 'pixel')}": _count(sides[side], "image")
            for side in sorted(sides, key=int)
        }
    if counts := statistics.get("class_counts"):
        named = [f"{name} {count:,}" for name, count in zip(facts["classes"], counts, strict=True)]
        summary = f"{min(counts):,} to {max(counts):,} samples in each class"
        statistics["class_counts"] = named if len(named) <= 12 else summary
    return statistics


def _lines(facts: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list) and len(value) > 12:
            yield f"{indent}{name}: {', '.join(map(str, value[:8]))}, … ({len(value):,})"
        elif isinstance(value, list):
            shown = (f"{item:.4f}" if isinstance(item, float) else str(item) for item in value)
            yield f"{indent}{name}: {', '.join(shown)}"
        else:
            yield f"{indent}{name}: {value}"


@main.command()
@click.argument("path", metavar="OUT.BIN")
@click.option(
    "--num-threads",
    type=click.IntRange(min=1),
    help="Number of threads. Default: one for each core.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def verify(path: str, num_threads: int | None, as_json: bool) -> None:
    """Read all files of OUT.BIN and compare them with their checksums. The exit status is 1 if
    anything differs.
    """
    from memload import inspection

    report = inspection.verify(path, num_threads=num_threads)
    if as_json:
        _print_json({"path": path, **report.as_dict()})
        sys.exit(0 if report.ok else 1)
    for problem in report.problems:
        _echo(f"memload: {problem}", err=True)
    for damaged in report.damaged:
        file, array = report.path.parent / damaged.file, damaged.array
        rows, keys = _first(damaged.bad_rows, 20), _first(damaged.bad_keys, 5)
        command = "build" if damaged.file.endswith(".bin") else "join"  # of another program's file
        _echo(
            f"memload: {file} is damaged: {len(damaged.bad_rows):,} of "
            f"{_count(damaged.rows, 'row')}{'' if array == 'image' else f' of array {array!r}'} "
            f"changed after they were written: rows {rows}{f' ({keys})' if keys else ''}. "
            f"Restore the file, or run 'memload {command}' again.",
            err=True,
        )
    if not report.ok:
        sys.exit(1)
    _echo(f"{path}: {_count(report.rows, 'row')}, {report.bytes:,} bytes, all as they were written")


def _first(items: Sequence[object], limit: int) -> str:
    return ", ".join([*map(str, items[:limit]), *["…"] * (len(items) > limit)])


@main.command()
@click.argument("path", metavar="OUT.BIN")
@click.option(
    "-o", "--output", type=FILE, required=True, help="Image file to write, such as grid.png."
)
@click.option("--count", type=click.IntRange(min=1), default=64, help="Number of random samples.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the random choice.")
@click.option(
    "--indices", type=_numbers, metavar="I,J,…", help="Show these samples instead of random ones."
)
@click.option("--class", "class_name", help="Show only samples of this class, or with this label.")
@click.option(
    "--tile",
    type=click.IntRange(min=8, max=2048),
    default=128,
    help="Width of each sample in pixels.",
)
def preview(path: str, output: str, **options: Any) -> None:
    """Write a contact sheet of OUT.BIN with labels, masks, boxes and points."""
    import memload

    shown = memload.preview(path, output, **options)
    _echo(f"{output}: {_count(len(shown), 'sample')} of {path}")


@main.command()
@click.argument("paths", metavar="OUT.BIN...", nargs=-1, required=True)
@click.option("-o", "--output", type=FILE, required=True, help="Index to write, such as all.idx.")
@click.option(
    "--columns",
    type=click.Choice(["same", "common"]),
    default="same",
    help="same: columns that differ are an error. common: leave them out.",
)
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
def concat(paths: tuple[str, ...], output: str, columns: Any, overwrite: bool) -> None:
    """Put data sets under one index, one after another. Pixels are not copied.

    All files must be in one folder. Labels follow the names of their classes.

    \b
      memload concat out.bin more.bin -o all.idx
    """
    import memload

    _print_report(memload.concat(output, *paths, columns=columns, overwrite=overwrite))


def _where(function: Any) -> Any:
    """Add the option ``--where`` of `export` and `copy`."""
    return click.option(
        "--where",
        type=_condition,
        metavar="NAME=VALUE",
        multiple=True,
        help="Take only samples with this value in a column, such as label=cat, or with one of "
        "several: label=cat,dog. Repeatable: all must hold.",
    )(function)


def _conditions(path: str, where: Sequence[tuple[str, str]]) -> tuple[Any, dict[str, Any]]:
    """Return the index of a data set, and the conditions of ``--where`` for it."""
    from memload.storage.conditions import parsed
    from memload.storage.index import Index

    index = Index.open(path)
    texts = _by_name("--where", where)
    return index, {name: parsed(index, name, text) for name, text in texts.items()}


@main.command()
@click.argument("path", metavar="OUT.BIN")
@click.argument("output", metavar="FOLDER|X.TAR")
@_where
@click.option(
    "--format",
    type=click.Choice(["png", "jpg", "npy"]),
    default="png",
    help="png: lossless, for uint8 with up to 4 channels and gray uint16. jpg: lossy, of quality "
    "95. npy: for any array.",
)
@click.option(
    "--num-threads",
    type=click.IntRange(min=1),
    help="Number of threads. Default: one for each core.",
)
@click.option("--quiet", is_flag=True, help="Print only errors.")
def export(path: str, output: str, where: Any, quiet: bool, **options: Any) -> None:
    """Write the samples of OUT.BIN as image files into a folder, or into a tar as WebDataset.

    The folder gets a folder for each class, and metadata.csv with labels and columns. Masks and
    other arrays go beside it: FOLDER.mask.

    \b
      memload export out.bin pngs/ --where label=cat
      memload export out.bin x.tar
    """
    import memload

    _start_logging(quiet)
    index, conditions = _conditions(path, where)
    progress = False if quiet else None
    report = memload.export(index, output, where=conditions, progress=progress, **options)
    if not quiet:
        _print_report(report)


@main.command()
@click.argument("path", metavar="OUT.BIN")
@click.argument("arrays", metavar="NAME=FILE...", type=_array, nargs=-1, required=True)
@click.option("-o", "--output", type=FILE, required=True, help="Index to write, such as both.idx.")
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
def join(path: str, arrays: tuple[tuple[str, str], ...], output: str, overwrite: bool) -> None:
    """Add arrays to the images of OUT.BIN: masks, features. Nothing is copied.

    FILE is a data set of memload's, whose samples have the same names, or an NPY file with a row
    for each sample. All files must be in one folder.

    \b
      memload join out.bin mask=masks.bin -o both.idx
      memload join out.bin features=feat.npy -o both.idx
    """
    import memload

    named = _by_name("NAME=FILE", arrays)
    _print_report(memload.join(output, path, overwrite=overwrite, **named))


@main.command()
@click.argument("path", metavar="OUT.BIN")
@click.argument("table", metavar="TABLE")
@click.option("-o", "--output", type=FILE, required=True, help="Index to write, such as new.idx.")
@click.option(
    "--missing",
    type=click.Choice(["error", "drop"]),
    default="error",
    help="Samples without a line in TABLE are an error, or are left out.",
)
@click.option("--key-column", help="Column with the names of samples. Default: the first.")
@click.option(
    "--label-column", help="Column with the labels. Default: label, or the only column of text."
)
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
def relabel(path: str, table: str, output: str, **options: Any) -> None:
    """Give OUT.BIN the labels and other columns of TABLE (.csv, .tsv). Pixels are not copied.

    \b
      memload relabel out.bin labels.csv -o new.idx
    """
    import memload

    _print_report(memload.relabel(path, table, output, **options))


@main.command()
@click.argument("path", metavar="ALL.IDX")
@click.argument("output", metavar="OUT.BIN")
@_where
@click.option(
    "--shard-size",
    type=_bytes,
    metavar="BYTES",
    help="Split each array into files of at most this size, such as 4GB.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT.BIN once the new one is complete.")
@click.option("--quiet", is_flag=True, help="Print only errors.")
def copy(path: str, output: str, where: Any, quiet: bool, **options: Any) -> None:
    """Write the samples of ALL.IDX anew as one data set, OUT.BIN and its index.

    ALL.IDX is any data set, such as a subset, or what concat or join put together. Rows that no
    sample uses are left out.

    \b
      memload copy all.idx packed.bin
      memload copy out.bin cats.bin --where label=cat
    """
    import memload

    _start_logging(quiet)
    index, conditions = _conditions(path, where)
    progress = False if quiet else None
    report = memload.copy(index, output, where=conditions, progress=progress, **options)
    if not quiet:
        _print_report(report)


@main.command()
@click.argument("path", metavar="OUT.BIN")
@click.argument("new", metavar="NEW.BIN")
def rename(path: str, new: str) -> None:
    """Rename OUT.BIN with its index and all else that belongs to it. Nothing is copied.

    At any moment, the old or the new name opens. Other indexes that name the same files follow.

    \b
      memload rename out.bin photos.bin
    """
    import memload

    _print_report(memload.rename(path, new))


@main.command()
@click.argument("path", metavar="OUT.BIN")
@click.option(
    "--images", type=FOLDER, help="Folder that OUT.BIN was built from, to measure decoding, too."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", type=FILE, help="Image file to write, such as speed.png.")
def bench(path: str, images: str | None, as_json: bool, plot: str | None) -> None:
    """Measure what each stage and feed reaches with OUT.BIN on this machine, within a minute."""
    from pathlib import Path

    from memload import bench as measuring

    if plot is not None:
        measuring.check_plot(Path(plot))
    report = measuring.measure(path, images=images)
    if as_json:
        _print_json(report.as_dict())
    else:
        for line in report.text().splitlines():
            _echo(line)
    if plot is not None:  # last, because this may fail when the disk is full
        report.plot(Path(plot))
