"""Peak memory of `memload build` for many small pictures in one tar file or one Parquet file.

Measured is the process that the user starts, without its workers, from its start to its end. It
holds names, labels and columns of all samples, and must not hold their pictures. `--records`
pictures of 60×60 pixels have a label, a number and a text with few values each.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from harness import Way, run_benchmark
from PIL import Image

import memload

#: Runs the command, and prints what this process held at most.
BUILD = """
from memload.cli import main

try:
    main()
finally:  # not getrusage(), which counts what the process was before it ran this program
    with open("/proc/self/status") as file:
        print(*[int(line.split()[1]) / 1000 for line in file if line.startswith("VmHWM")])
"""
_AT_A_TIME = 1000


def pictures(count: int) -> Iterator[bytes]:
    """Yield JPEGs of 60×60 pixels; every thousandth is the same."""
    rng, encoded = np.random.default_rng(0), []
    for _ in range(min(count, _AT_A_TIME)):
        pixels = rng.integers(0, 256, (15, 15, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((60, 60), Image.Resampling.BICUBIC).save(file, "JPEG")
        encoded.append(file.getvalue())
    return (encoded[number % len(encoded)] for number in range(count))


def write_tar(path: Path, count: int) -> None:
    """Write samples as WebDataset has them."""
    with tarfile.open(path, "w") as file:
        for number, picture in enumerate(pictures(count)):
            facts = {"age": number / 8, "split": ("train", "val")[number % 2]}
            parts = {
                "jpg": picture,
                "cls": b"%d" % (number % 100),
                "json": json.dumps(facts).encode(),
            }
            for extension, content in parts.items():
                member = tarfile.TarInfo(f"{number:08d}.{extension}")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))


def write_parquet(path: Path, count: int) -> None:
    """Write samples as Hugging Face has them, in row groups of 1,000."""
    import pyarrow
    from pyarrow import parquet

    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    fields = [("image", image), ("label", pyarrow.int64()), ("age", pyarrow.float64())]
    schema = pyarrow.schema([*fields, ("split", pyarrow.string())])
    encoded = pictures(count)
    with parquet.ParquetWriter(path, schema, use_dictionary=["split"]) as writer:
        for start in range(0, count, _AT_A_TIME):
            numbers = range(start, min(start + _AT_A_TIME, count))
            columns = {
                "image": [
                    {"bytes": next(encoded), "path": f"{number:08d}.jpg"} for number in numbers
                ],
                "label": [number % 100 for number in numbers],
                "age": [number / 8 for number in numbers],
                "split": [("train", "val")[number % 2] for number in numbers],
            }
            writer.write_table(pyarrow.table(columns, schema))


def ways(options: Any, folder: Path) -> dict[str, Way]:
    """Return a build of each file."""
    writers = {"tar": write_tar}
    if find_spec("pyarrow") is not None:
        writers["parquet"] = write_parquet
    found = {}
    for kind, write in writers.items():
        path = folder / f"records-{options.records}.{kind}"
        if not path.exists():
            write(path, options.records)
        found[kind] = lambda path=path: {"peak memory (MB)": peak_memory(path, options.side)}
    return found


def peak_memory(source: Path, side: int) -> float:
    """Build a source and return the peak memory of the process, in MB."""
    output = source.with_name(f"records-of-{os.getpid()}.bin")
    arguments = ["build", source, output, "--size", side, "--quiet"]
    run = subprocess.run(
        [sys.executable, "-P", "-c", BUILD, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(Path(memload.__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for file in (output, output.with_suffix(".idx")):
        file.unlink()
    return float(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    run_benchmark(
        ways,
        options={"records": 200_000, "side": 32, "rounds": 1},
        quick={"records": 20_000},
    )
