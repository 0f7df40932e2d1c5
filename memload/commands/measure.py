"""The command ``memload bench``."""

import click

from memload.commands import values
from memload.commands.output import Command, echo, print_json


@click.command(cls=Command)
@click.argument("path", metavar="OUT.BIN")
@click.option(
    "--images",
    type=values.FOLDER,
    help="Folder that OUT.BIN was built from, to measure decoding, too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", type=values.FILE, help="Image file to write, such as speed.png.")
def bench(path: str, images: str | None, as_json: bool, plot: str | None) -> None:
    """Measure what each stage and feed reaches with OUT.BIN on this machine, within a minute."""
    from pathlib import Path

    from memload import bench as measuring

    if plot is not None:
        measuring.check_plot(Path(plot))
    report = measuring.measure(path, images=images)
    if as_json:
        print_json(report.as_dict())
    else:
        for line in report.text().splitlines():
            echo(line)
    if plot is not None:  # last, because this may fail when the disk is full
        report.plot(Path(plot))
