"""The commands that put data sets together, change them and write them anew."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from memload.commands import values
from memload.commands.output import Command, print_report, start_logging


@click.command(cls=Command)
@click.argument("paths", metavar="OUT.BIN...", nargs=-1, required=True)
@click.option(
    "-o", "--output", type=values.FILE, required=True, help="Index to write, such as all.idx."
)
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

    print_report(memload.concat(output, *paths, columns=columns, overwrite=overwrite))


def _where(function: Any) -> Any:
    """Add the option ``--where`` of `export` and `copy`."""
    return click.option(
        "--where",
        type=values.condition,
        metavar="NAME=VALUE",
        multiple=True,
        help="Take only samples with this value in a column, such as label=cat, or with one of "
        "several: label=cat,dog. Repeatable: all must hold.",
    )(function)


def _write_selected(
    write: Callable[..., Any],
    path: str,
    output: str,
    where: Sequence[tuple[str, str]],
    quiet: bool,
    options: Mapping[str, Any],
) -> None:
    """Export or copy the samples that ``--where`` selects, and print the report."""
    from memload.storage.index import Index
    from memload.storage.where import values_in

    start_logging(quiet)
    index = Index.open(path)
    texts = values.by_name("--where", where)
    conditions = {name: values_in(text, index, name) for name, text in texts.items()}
    report = write(index, output, where=conditions, progress=False if quiet else None, **options)
    if not quiet:
        print_report(report)


@click.command(cls=Command)
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

    _write_selected(memload.export, path, output, where, quiet, options)


@click.command(cls=Command)
@click.argument("path", metavar="OUT.BIN")
@click.argument("arrays", metavar="NAME=FILE...", type=values.array, nargs=-1, required=True)
@click.option(
    "-o", "--output", type=values.FILE, required=True, help="Index to write, such as both.idx."
)
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
def join(path: str, arrays: tuple[tuple[str, str], ...], output: str, overwrite: bool) -> None:
    """Add arrays to the images of OUT.BIN: masks, features. Nothing is copied.

    FILE is a data set of memload's, whose samples have the same names, or an NPY file with a row
    for each sample. All files must be in one folder.

    \b
      memload join out.bin mask=masks.bin -o both.idx
      memload join out.bin features=feat.npy -o both.idx
    """
    from memload.editing.join import join_arrays

    named = values.by_name("NAME=FILE", arrays)
    print_report(join_arrays(output, path, named, overwrite=overwrite))


@click.command(cls=Command)
@click.argument("path", metavar="OUT.BIN")
@click.argument("table", metavar="TABLE")
@click.option(
    "-o", "--output", type=values.FILE, required=True, help="Index to write, such as new.idx."
)
@click.option(
    "--missing",
    type=click.Choice(["error", "drop", "keep"]),
    default="error",
    help="Samples without a line in TABLE are an error, are left out, or keep what they have.",
)
@click.option(
    "--classes",
    "classes",
    metavar="FILE",
    help="Data set whose classes the labels count into, or a text file with a name a line.",
)
@click.option(
    "--key-column",
    help="Column with the names of samples. Default: file_name, the first of images, or the first.",
)
@click.option("--label-column", help="Column with the labels. Default: label.")
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
def relabel(path: str, table: str, output: str, **options: Any) -> None:
    """Give OUT.BIN the labels and other columns of TABLE (.csv, .tsv). Pixels are not copied.

    \b
      memload relabel out.bin labels.csv -o new.idx
    """
    import memload

    print_report(memload.relabel(path, table, output, **options))


@click.command(cls=Command)
@click.argument("path", metavar="ALL.IDX")
@click.argument("output", metavar="OUT.BIN")
@_where
@click.option(
    "--shard-size",
    type=values.file_size,
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

    _write_selected(memload.copy, path, output, where, quiet, options)


@click.command(cls=Command)
@click.argument("path", metavar="OUT.BIN")
@click.argument("new", metavar="NEW.BIN")
def rename(path: str, new: str) -> None:
    """Rename OUT.BIN with its index and all else that belongs to it. Nothing is copied.

    At any moment, the old or the new name opens. Other indexes that name the same files follow.

    \b
      memload rename out.bin photos.bin
    """
    import memload

    print_report(memload.rename(path, new))
