"""The command ``memload doctor``."""

import sys

import click

from memload.commands import values
from memload.commands.output import Command, echo, print_json


@click.command(cls=Command)
@click.argument("path", metavar="[OUT.BIN]", required=False)
@click.option(
    "--step-ms",
    type=values.milliseconds,
    help="Milliseconds that your model takes for a batch, measured on data that is there already.",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=256, help="Samples a batch.")
@click.option(
    "--images",
    type=values.FOLDER,
    help="Folder that OUT.BIN was built from, to compare with decoding.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    path: str | None, step_ms: float | None, batch_size: int, images: str | None, as_json: bool
) -> None:
    """Check this machine, and say what bounds training on OUT.BIN, within 30 seconds. Without
    OUT.BIN, check the machine alone. The exit status is 1 if anything is broken.
    """
    if path == "":
        raise click.UsageError("OUT.BIN is empty. Give a data set, or leave it out.")
    if path is None and (step_ms is not None or images is not None):
        raise click.UsageError("--step-ms and --images need OUT.BIN.")
    from memload.measure.diagnosis import examine

    diagnosis = examine(
        path,
        step_ms=step_ms,
        batch_size=batch_size,
        images=images,
        before_measuring=lambda: echo("Measuring for at most 30 s …", err=True),
    )
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        for line in str(diagnosis).splitlines():
            echo(line)
    sys.exit(0 if diagnosis.ok else 1)
