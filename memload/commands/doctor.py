"""The command ``memload doctor``."""

import sys

import click

from memload.commands.output import echo, print_json


@click.command()
@click.argument("path", metavar="[OUT.BIN]", required=False)
@click.option(
    "--step-ms",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MS",
    help="Milliseconds that your model takes for a batch, measured on data that is there already.",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=256, help="Samples a batch.")
@click.option(
    "--images",
    type=click.Path(exists=True, file_okay=False),
    help="Folder that OUT.BIN was built from, to compare with decoding.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    path: str | None, step_ms: float | None, batch_size: int, images: str | None, as_json: bool
) -> None:
    """Say what bounds training on OUT.BIN here, and what to do. It takes at most 30 seconds.

    Without OUT.BIN, check the machine alone. The exit status is 1 if anything is broken.
    """
    if path is None and (step_ms is not None or images is not None):
        raise click.UsageError("--step-ms and --images need OUT.BIN.")
    from memload.measure.diagnosis import examine

    if path is not None:
        echo("Measuring for at most 30 s …", err=True)
    diagnosis = examine(path, step_ms=step_ms, batch_size=batch_size, images=images)
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        for line in str(diagnosis).splitlines():
            echo(line)
    sys.exit(0 if diagnosis.ok else 1)
