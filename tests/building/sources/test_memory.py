"""Opening and building hold names and columns of all samples in memory, but not their pictures."""

import io
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SAMPLES, LARGE = 2000, 40_000

BUILD = """
import sys
from memload.building.builder import build

build(sys.argv[1], sys.argv[2], size=8, num_workers=1, progress=False)
with open("/proc/self/status") as file:
    print(*[line.split()[1] for line in file if line.startswith("VmHWM")])
"""


def picture(size: int) -> bytes:
    """Return a small JPEG, followed by bytes that decoders leave alone."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16), "teal").save(file, "JPEG")
    noise = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    return file.getvalue() + noise.tobytes()


def write_tar(path: Path, content: bytes) -> None:
    with tarfile.open(path, "w") as file:
        for number in range(SAMPLES):
            for name, data in ((f"{number:05d}.jpg", content), (f"{number:05d}.cls", b"3")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))


def write_parquet(path: Path, content: bytes) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"image": [{"bytes": content, "path": f"{n:05d}.jpg"} for n in range(SAMPLES)]}
    table = pyarrow.table(columns | {"label": [3] * SAMPLES})
    parquet.write_table(table, path, row_group_size=200, use_dictionary=False, compression="none")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("write", [write_tar, write_parquet])
def test_memory_does_not_grow_with_the_bytes_of_the_pictures(
    write: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    peaks = []
    for size in (0, LARGE):
        path = tmp_path / f"{size}.{write.__name__.removeprefix('write_')}"
        write(path, picture(size))
        arguments = [sys.executable, "-c", BUILD, str(path), str(path.with_suffix(".bin"))]
        peaks.append(int(subprocess.check_output(arguments, text=True, timeout=250)))
    small, large = peaks  # kB
    assert large - small < SAMPLES * LARGE / 1000 / 4
