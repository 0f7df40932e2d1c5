"""The commands that put data sets together, change them, and write their images to files."""

from typing import Any

import click

from memload.commands import values
from memload.commands.output import echo, start_logging


@click.command()
@click.argument("paths", metavar="OUT.BIN...", nargs=-1, required=True)
@click.argument("output", metavar="ALL.IDX", type=values.FILE)
@click.option(
    "--columns",
    type=click.Choice(["same", "common"]),
    default="same",
    help="same: columns that differ are an error. common: leave them out.",
)
@click.option("--overwrite", is_flag=True, help="Replace ALL.IDX if it exists.")
def concat(paths: tuple[str, ...], output: str, columns: Any, overwrite: bool) -> None:
    """Put data sets under one index, one after another. Pixels are not copied.

    All files must be in one folder. Labels follow the names of their classes.

    \b
      memload concat out.bin more.bin all.idx
    """
    import memload

    start_logging()
    _write(memload.concat(*paths, columns=columns), output, overwrite)


@click.command()
@click.argument("path", metavar="OUT.BIN")
@click.argument(
    "arrays",
    metavar="NAME=FILE...",
    type=values.named,
    nargs=-1,
    required=True,
    callback=values.by_name,
)
@click.argument("output", metavar="BOTH.IDX", type=values.FILE)
@click.option("--overwrite", is_flag=True, help="Replace BOTH.IDX if it exists.")
def join(path: str, arrays: dict[str, str], output: str, overwrite: bool) -> None:
    """Add arrays to the images of OUT.BIN, such as features. Nothing is copied.

    FILE is an NPY file with a row for each sample, or a data set whose samples have the same names.
    All files must be in one folder.

    \b
      memload join out.bin features=feat.npy both.idx
    """
    import memload

    start_logging()
    _write(memload.join(path, **arrays), output, overwrite)


@click.command()
@click.argument("path", metavar="OUT.BIN")
@click.argument("table", metavar="TABLE")
@click.argument("output", metavar="NEW.IDX", type=values.FILE)
@click.option(
    "--missing",
    type=click.Choice(["error", "drop", "keep"]),
    default="error",
    help="Samples without a line in TABLE are an error, are left out, or keep what they have.",
)
@click.option(
    "--classes",
    metavar="FILE",
    help="Data set whose classes the labels count into, or a text file with a name per line.",
)
@click.option(
    "--key",
    metavar="COLUMN",
    help="Column with the names of samples. Default: file_name, the first of images, or the first.",
)
@click.option(
    "--label", metavar="COLUMN", help="Column with the labels. Default: label, else class."
)
@click.option("--overwrite", is_flag=True, help="Replace NEW.IDX if it exists.")
def relabel(path: str, table: str, output: str, overwrite: bool, **options: Any) -> None:
    """Give OUT.BIN the labels and other columns of TABLE. Pixels stay.

    TABLE is a .csv, .tsv or .jsonl file.

    \b
      memload relabel out.bin labels.csv new.idx
    """
    import memload

    start_logging()
    _write(memload.relabel(path, table, **options), output, overwrite)


def _write(index: Any, output: str, overwrite: bool) -> None:
    """Write an index, and print what it holds."""
    from memload.editing.index_files import write
    from memload.wording import counted

    write(index, output, overwrite)
    facts = [counted(len(index), "sample")]
    if index.classes is not None:
        facts.append(counted(len(index.classes), "class", "classes"))
    echo(f"{output}: {', '.join(facts)}")


@click.command()
@click.argument("path", metavar="OUT.BIN")
@click.argument("output", metavar="FOLDER|X.TAR")
@click.option(
    "--where",
    type=values.named,
    metavar="NAME=VALUE",
    **values.PAIRS,
    help="Take only samples with this value in a column, such as label=cat, or with one of "
    "several: label=cat,dog. Repeatable: all must hold.",
)
@click.option("--quiet", is_flag=True, help="Print only errors.")
def export(path: str, output: str, where: Any, quiet: bool) -> None:
    """Write samples of OUT.BIN as PNG files, or as a tar for WebDataset.

    The folder gets a folder for each class, and metadata.jsonl with labels and columns. Masks and
    other arrays go beside it: FOLDER.mask.

    \b
      memload export out.bin pngs/ --where label=cat
      memload export out.bin x.tar
    """
    import memload
    from memload.wording import counted

    start_logging(quiet)
    index = memload.where(memload.Index.open(path), **(where or {}))
    memload.export(index, output, progress=False if quiet else None)
    if not quiet:
        echo(f"{output}: {counted(len(index), 'sample')}")
