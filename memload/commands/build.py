"""The command ``memload build``."""

import os
from collections.abc import Sequence
from typing import Any

import click

from memload.commands import values
from memload.commands.output import echo, print_json, print_report, start_logging
from memload.errors import NothingNewError

#: The sections of ``--help``, each with its first option.
_SECTIONS = {
    "image": "How the source is read",
    "size": "How images are stored",
    "fast": "How images are decoded",
    "part": "Several machines",
    "max_rejects": "Options",
}


class _BuildCommand(click.Command):
    """Shows options in sections."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        sections: dict[str, list[tuple[str, str]]] = {}
        records: list[tuple[str, str]] = []
        for option in self.get_params(context):
            if title := _SECTIONS.get(str(option.name)):
                records = sections[title] = []
            if record := option.get_help_record(context):
                records.append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


# fmt: off
@click.command(cls=_BuildCommand)
@click.argument("arguments", metavar="SOURCE... OUT.BIN", nargs=-1)
@click.option(
    "--image", metavar="COLUMN|TEMPLATE",
    help="Tables and Parquet: column of the images, or a template of columns for their paths, such "
    "as 'train_images/{image_id}.jpg'. Default: file_name, image, or the first of images."
)
@click.option(
    "--label", metavar="COLUMN|FILE",
    help="Column of the labels. Default: label, or another usual name. Arrays: a file (.npy)."
)
@click.option(
    "--where", type=values.named, metavar="NAME=TEXT", **values.PAIRS,
    help="Tables, Parquet, tars and memload data sets: read only what has this text, such as "
    "split=train. Repeatable."
)
@click.option(
    "--root", help="Tables: folder or URL that paths are relative to. Default: the table's folder."
)
@click.option(
    "--extensions", type=values.extensions, metavar="E,F,…",
    help="Folders and zips: extensions of image files, such as .jpg,.gif. Default: torchvision's."
)
@click.option(
    "--mask", "masks", type=values.mask, metavar="[NAME=]FOLDER|COLUMN|TEMPLATE", **values.PAIRS,
    help="Folder of masks, each with the name of its image: PNG, TIFF, BMP or .npy, whose values "
    "are ids. Stored as 'mask', or NAME. Tables and Parquet: or a column, or a template such as "
    "'masks/{id}.png'. Tars: or what follows the name of the image, such as seg for 0001.seg.png. "
    "Repeatable."
)
@click.option(
    "--missing-masks", type=click.IntRange(0, 65535), metavar="ID",
    help="Id of the whole mask of an image that has none, such as 0. Default: it is rejected."
)
@click.option(
    "--array", "arrays", type=values.named, metavar="NAME=FOLDER|COLUMN|TEMPLATE", **values.PAIRS,
    help="Further pictures or .npy files, all of one shape, as with --mask, such as "
    "features=features/. Repeatable."
)
@click.option(
    "--points", type=values.optionally_named, metavar="NAME[=COLUMN|PATTERN]", **values.PAIRS,
    help="Column of lists of x, y. Or a pattern for columns of numbers, such as 'marks=x*,y*', or "
    "'marks=part_*' for x, y, x, y, …. Repeatable."
)
@click.option(
    "--boxes", type=values.optionally_named, metavar="NAME[=COLUMN|PATTERN]", **values.PAIRS,
    help="Column of lists of x1, y1, x2, y2, or a pattern such as 'box=x1*,y1*,x2*,y2*'. "
    "Repeatable."
)
@click.option(
    "--classes", type=values.classes, metavar="A,B,…|FILE|DATASET",
    help="Names of the classes, which are numbered in this order: in words, in a text file with "
    "one name a line, or those of a data set."
)
@click.option(
    "--new-to", type=values.FILE, metavar="OUT.BIN",
    help="Build only samples that this data set does not have, by their names, in its size and "
    "mode. 'memload concat' puts both under one index."
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
    "--mode", type=click.Choice(["RGB", "L", "I;16", "array"]),
    help="RGB: color. L: grayscale. 'I;16' (in quotes): grayscale of 16 bits. array: store arrays "
    "as they are. Default: array for .npy files, else RGB."
)
@click.option("--background", default="white", help="Color behind transparent pixels.")
@click.option("--fill", default="black", help="Color of the margin with --fit pad.")
@click.option("--no-exif", is_flag=True, help="Ignore the EXIF orientation of images.")
@click.option(
    "--shard-size", metavar="BYTES",
    help="Split the pixels into files of at most this size, such as 4GB."
)
@click.option(
    "--fast", is_flag=True,
    help="Decode JPEGs at 1/2, 1/4 or 1/8 of their size if that is still twice the stored size."
)
@click.option(
    "--decoder", type=click.Choice(["pillow", "jpeg4py"]), default="pillow",
    help="What decodes JPEGs. pillow-simd counts as pillow."
)
@click.option(
    "--max-pixels", type=click.IntRange(min=1), default=89_478_485,
    help="Reject larger images before they take memory."
)
@click.option(
    "--part", type=values.part, metavar="I/N",
    help="Build only the shards of part I of N, counted from 0, such as $RANK/$WORLD_SIZE. All "
    "parts may run at once, on any machines that see SOURCE and OUT.BIN; the one that ends last "
    "publishes. Needs --shard-size. Without --part: build what is left."
)
@click.option(
    "--max-rejects", metavar="SHARE%|COUNT", default="10%",
    help="Publish nothing if more images than this cannot be used, such as 50% or 20. 0: stop at "
    "the first. OUT.rejects.csv lists them."
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
@click.option(
    "--dry-run", is_flag=True,
    help="Build nothing, but say what would be stored, and how long that takes. Two random "
    "selections are built for that, and removed again."
)
@click.option("--quiet", is_flag=True, help="Print only errors.")
def build(arguments: tuple[str, ...], **options: Any) -> None:
    """Decode the images of SOURCE once, into the memory map OUT.BIN. Its index is OUT.idx.

    SOURCE is a folder with one subfolder for each class, a table (.csv, .tsv, .txt, .jsonl), a
    .zip, .parquet or .tar files, an array (.npy), a memload data set (.bin, .idx), or the URL of a
    folder or a table.

    \b
      memload build images/ out.bin
      memload build labels.csv train.bin --root images/ --where split=train
      memload build 'shards/{000..123}.tar' out.bin -s 224
      memload build val/ val.bin --classes train.bin
      memload build images/ out.bin --mask masks/
      memload build images/ more.bin --new-to out.bin
      memload build all.idx packed.bin --where label=cat,dog

    If a build is interrupted, run the same command again: it continues where it stopped.
    'memload info OUT.BIN' says how far it is.
    """
    quiet, as_json = options.pop("quiet"), options.pop("as_json")
    is_dry_run = options.pop("dry_run")
    # NumPy would start a thread for each core, which takes 0.1 s and which no build uses.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import memload
    start_logging(quiet or is_dry_run)
    exif, progress = not options.pop("no_exif"), False if quiet else None
    try:
        source, output = source_and_output(arguments)
        run = memload.dry_run if is_dry_run else memload.build
        report: Any = run(source, output, exif=exif, progress=progress, **options)
    except ValueError as error:
        raise click.UsageError(with_typed_option(str(error))) from None
    except NothingNewError as error:  # that is no failure
        if not quiet:
            echo(str(error), err=True)
        return
    if as_json:
        print_json(report.as_dict())
    elif not quiet:
        print_report(report)
# fmt: on


def with_typed_option(message: str) -> str:
    """Return a message that begins with the name of an argument with that of the option."""
    name, colon, rest = message.partition(":")
    for option in click.get_current_context().command.params:
        if option.name == name:
            return f"{option.opts[-1]}{colon}{rest}"
    return message


def source_and_output(arguments: Sequence[str]) -> tuple[Any, str]:
    """Return what to build from, and the output."""
    if len(arguments) < 2:
        raise click.UsageError(f"Give SOURCE and OUT.BIN. Given: {' '.join(arguments) or 'none'}.")
    *sources, output = arguments
    if len(sources) == 1:
        return sources[0], output
    from memload.sources.opening import paths_of

    if paths_of(sources) is None:  # these would be taken for samples
        raise click.UsageError(
            f"{len(sources)} sources are given: {', '.join(sources[:3])}. Build them one by one."
        )
    return sources, output
