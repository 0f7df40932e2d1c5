"""The command ``memload build``."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import click

from memload.commands import values
from memload.commands.output import Command, echo, print_json, print_report, start_logging
from memload.errors import NothingNewError

#: The options that say how a source is read, apart from those of the classes.
_SOURCE_OPTIONS = (
    *("extensions", "root", "path_column", "extension", "where", "image_column", "label_column"),
    *("points", "boxes", "labels"),
)


class _BuildCommand(Command):
    sections: ClassVar = {
        "How the source is read": (
            *(*_SOURCE_OPTIONS, "arrays", "masks", "missing_masks", "new_to"),
            *("classes", "classes_from", "manifest"),
        ),
        "How images are stored": (
            *("size", "fit", "interpolation", "mode", "background", "fill", "mask_fill", "no_exif"),
            "shard_size",
        ),
        "How images are decoded": ("fast", "decoder", "strict", "max_pixels"),
        "Several machines": ("part", "parts", "lock_timeout"),
    }


# fmt: off
@click.command(cls=_BuildCommand)
@click.argument("arguments", metavar="SOURCE... OUT.BIN", nargs=-1)
@click.option(
    "--extensions", metavar="E,F,…",
    help="Folders and zips: extensions of image files, such as .jpg,.gif. Default: torchvision's."
)
@click.option(
    "--root", help="Tables: folder or URL that paths are relative to. Default: the table's folder."
)
@click.option(
    "--path-column",
    help="Tables: column with the paths. Default: file_name, the first of images, or the first."
)
@click.option(
    "--extension", help="Tables: extension to add to paths that have none, such as .jpg."
)
@click.option(
    "--where", type=values.condition, metavar="NAME=TEXT", multiple=True,
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
    "--points", type=values.optionally_named, metavar="NAME=PATTERN", multiple=True,
    help="Tables: columns that are x, y pairs, such as 'landmarks=part_*' (x, y, x, y, …), "
    "'landmarks=x*,y*', or landmarks=2 for all others. Tars: the NAME of an entry in .json. "
    "Repeatable."
)
@click.option(
    "--boxes", type=values.boxes, metavar="NAME=PATTERN|K", multiple=True,
    help="Tables: columns that are boxes, such as 'box=x1*,y1*,x2*,y2*'. Tars: an entry in .json, "
    "and how many boxes a sample has at most. Repeatable."
)
@click.option(
    "--masks", type=values.mask, metavar="[NAME=]FOLDER|ENTRY", multiple=True,
    help="Folder of masks, each with the name of its image: PNG, TIFF, BMP or .npy, whose values "
    "are ids. Stored as 'mask', or NAME. Tables and Parquet: or a column. Tars: or what follows "
    "the name of the image, such as seg for 0001.seg.png. Repeatable."
)
@click.option(
    "--missing-masks", type=click.Choice(["reject", "fill"]), default="reject",
    help="What becomes of an image without a mask. fill: its mask is all --mask-fill."
)
@click.option(
    "--array", "arrays", type=values.named, metavar="NAME=FOLDER|ENTRY", multiple=True,
    help="Folder of .npy files or further pictures, all of one shape, each with the name of its "
    "image, such as features=features/, or an entry as with --masks. Tables: or columns of numbers "
    "that form one array, such as 'pose=r*:3x3'. Repeatable."
)
@click.option(
    "--new-to", type=values.FILE, metavar="OUT.BIN",
    help="Build only samples that this data set does not have, by their names, in its size and "
    "mode. 'memload concat' puts both under one index."
)
@click.option("--labels", type=values.FILE, help="Arrays: file with the labels (.npy).")
@click.option(
    "--classes", metavar="A,B,…", help="Names of the classes. They are numbered in this order."
)
@click.option(
    "--classes-from", type=values.FILE, metavar="FILE",
    help="Number the classes as in this data set, or as in this text file with one name a line."
)
@click.option(
    "--manifest", type=values.FILE, help="Table to read in place of SOURCE, whatever its name is."
)
@click.option(
    "-s", "--size", type=values.size, metavar="SIDE|HxW",
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
    "--shard-size", type=values.file_size, metavar="BYTES",
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
    "--max-rejects", type=values.reject_limit, metavar="SHARE%|COUNT", default="10%",
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
@click.option(
    "--part", type=values.part, metavar="I/N|auto",
    help="Build only the shards of part I of N, counted from 0. All parts may run at once, on any "
    "machines that see SOURCE and OUT.BIN; the one that ends last publishes. Without --part: build "
    "what is left. auto: take I and N from Slurm, torchrun or Kubernetes, and say which."
)
@click.option(
    "--parts", type=click.IntRange(min=1), metavar="N",
    help="With --part auto in an indexed job of Kubernetes: its number of completions."
)
@click.option(
    "--lock-timeout", type=click.FloatRange(min=0), default=150, metavar="SECONDS",
    help="Give up on a lock once its holder has shown no sign of life for so long. File servers "
    "keep the lock of a machine that died for a while."
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
    'memload info OUT.BIN' says how far it is.
    """
    quiet, as_json = options.pop("quiet"), options.pop("as_json")
    import memload
    from memload.building.sources.opening import UsageError

    start_logging(quiet)
    exif, progress = not options.pop("no_exif"), False if quiet else None
    try:
        options["part"] = _part(options["part"], options.pop("parts"), quiet)
        source, output = source_and_output(arguments, options)
        report = memload.build(source, output, exif=exif, progress=progress, **options)
    except ValueError as error:
        text = with_typed_option(str(error))
        raise (click.UsageError if isinstance(error, UsageError) else ValueError)(text) from None
    except NothingNewError as error:  # that is no failure
        if not quiet:
            echo(str(error), err=True)
        return
    try:
        if as_json:
            print_json(report.as_dict())
        elif not quiet:
            print_report(report)
    except OSError as error:  # stdout is a full disk, for example
        error.strerror = f"{report.path} is complete, but this cannot be printed: {error.strerror}"
        raise
# fmt: on


def with_typed_option(message: str) -> str:
    """Return a message that begins with the name of an argument with that of the option."""
    name, colon, rest = message.partition(":")
    for option in click.get_current_context().command.params:
        if option.name == name:
            return f"{option.opts[-1]}{colon}{rest}"
    return message


def _part(
    part: tuple[int, int] | Literal["auto"] | None, parts: int | None, quiet: bool
) -> tuple[int, int] | None:
    """Return the part to build, if only one is. Says where the numbers of ``auto`` are from."""
    if part != "auto":
        if parts is not None:
            raise click.UsageError(
                "--parts is only for --part auto. Give --part I/N, which has the number of parts."
            )
        return part
    import os

    from memload.building.parts.environment import part_of

    try:
        (index, count), source = part_of(os.environ, parts)
    except ValueError as error:
        raise click.UsageError(f"--part auto: {error}") from None
    if not quiet:
        echo(f"part {index} of {count}, from {source}", err=True)
    return index, count


def source_and_output(arguments: Sequence[str], options: dict[str, Any]) -> tuple[Any, str]:
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
    from memload.building.sources.opening import FilesToOpen

    reading = _reading_options(options)
    if len(sources) == 1 and not (reading and output.endswith(".bin")):
        return sources[0], output  # if the output's name is wrong, memload.build says so
    if not output.endswith(".bin"):  # known before many files are opened
        raise click.UsageError(f"OUT.BIN comes last, and ends in .bin. {output} is given.")
    return FilesToOpen(tuple(sources or [manifest]), bool(manifest), reading), output


def _reading_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options for sources of some kind, if they are given, out of ``options``."""
    reading = {name: options.pop(name) for name in (*_SOURCE_OPTIONS, "masks", "arrays")}
    for name in ("where", "points", "boxes"):
        reading[name] = values.by_name(f"--{name}", reading[name])
    if reading["extensions"]:
        endings = reading["extensions"].split(",")
        reading["extensions"] = [f".{ending.strip().lstrip('.')}" for ending in endings]
    return {name: value for name, value in reading.items() if value}


def _classes(names: str | None, file: str | None) -> list[str] | str | None:
    if names and file:
        raise click.UsageError("Give either --classes or --classes-from.")
    return [name.strip() for name in names.split(",")] if names else file
