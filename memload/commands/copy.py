"""The command that copies a data set between machines and stores."""

import click

from memload.commands.output import echo, start_logging


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--num-threads", type=click.IntRange(1), default=16, show_default=True, help="Reads at a time."
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace another data set, an older state of this one, or damaged files.",
)
@click.option("--quiet", is_flag=True, help="Print only errors.")
def copy(source: str, destination: str, num_threads: int, overwrite: bool, quiet: bool) -> None:
    """Copy a data set to this machine, or from it to a store.

    One of SRC and DST is on this machine. The other may be a URL that fsspec knows, such as s3://,
    gs://, az://, hf:// or https://. DST may be a folder. Run it again after a stop: only what is
    missing is copied.

    \b
      memload copy out.bin s3://bucket/sets/
      memload copy s3://bucket/sets/out.bin /nvme/
    """
    import memload

    start_logging(quiet)
    path = memload.copy(
        source,
        destination,
        num_threads=num_threads,
        overwrite=overwrite,
        progress=False if quiet else None,
    )
    if not quiet:
        echo(f"{path}: complete")
