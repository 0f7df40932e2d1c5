"""What the benchmarks read: data sets of made pixels, and JPEGs.

Data sets are written as memload/storage/format.py specifies them, so that any version of memload
can be measured.
"""

import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy


def noise_dataset(
    folder: Path, count: int, side: int, *, shards: int = 1, masks: bool = False
) -> Path:
    """Write a data set of random pixels, unless it is there from an earlier run; return its path.

    500 pictures repeat, which takes less time than a build. So do 500 masks of 20 ids.
    """
    path = folder / f"noise-{count}-{side}-{shards}{'-masks' * masks}.bin"
    random = np.random.default_rng(0)
    pictures = random.integers(0, 256, (500, side, side, 3), np.uint8)
    ids = random.integers(0, 20, (500, side, side), np.uint8) if masks else None
    labels = np.arange(count) % 1000
    return write_dataset(path, pictures, labels, map(str, range(count)), shards, ids)


def empty_dataset(folder: Path, count: int, side: int = 256) -> Path:
    """Write a data set of black pictures, named and labelled as ImageNet's, that takes no room."""
    labels = np.sort(np.random.default_rng(0).integers(0, 1000, count))
    keys = (f"n{label:08d}/n{label:08d}_{i}.JPEG" for i, label in enumerate(labels.tolist()))
    black = np.zeros((1, side, side, 3), np.uint8)
    return write_dataset(folder / f"empty-{count}-{side}.bin", black, labels, keys)


def write_dataset(
    path: Path,
    pictures: np.ndarray,
    labels: np.ndarray,
    keys: Iterable[str],
    shards: int = 1,
    masks: np.ndarray | None = None,
) -> Path:
    """Write a data set that repeats some pictures and masks, unless it exists; return its path.

    One picture is taken to be black, and the file to be sparse.
    """
    if path.with_suffix(".idx").exists():
        return path
    arrays = [write_array(path, "image", pictures, len(labels), shards)]
    if masks is not None:
        arrays.append(write_array(path.with_suffix(".mask.bin"), "mask", masks, len(labels)))
    write_index(path, arrays, labels, [key.encode() for key in keys])
    return path


def write_array(
    path: Path, name: str, values: np.ndarray, count: int, shards: int = 1
) -> tuple[dict[str, Any], np.ndarray]:
    """Write so many rows, which repeat; return the entry of the index, and their checksums."""
    shape, files, order = values.shape[1:], [], []
    starts = np.linspace(0, count, shards + 1).astype(int).tolist()
    for number, (start, stop) in enumerate(itertools.pairwise(starts)):
        rows, suffix = stop - start, f"-{number:05d}-of-{shards:05d}" if shards > 1 else ""
        file = path.with_name(f"{path.stem}{suffix}.bin")
        described = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {(rows, *shape)}, }}"
        with file.open("wb") as written:
            header = b"\x93NUMPY\x01\x00\xf6\x0f" + described.ljust(4085).encode() + b"\n"
            written.write(header)
            for first in range(0, rows if len(values) > 1 else 0, len(values)):
                values[: rows - first].tofile(written)
            written.truncate(len(header) + rows * values[0].size)
        files.append({"file": file.name, "rows": rows, "bytes": file.stat().st_size})
        order.append(np.arange(rows) % len(values))
    checksums = np.array([zlib.crc32(row) for row in values], "<u4")
    entry = {"name": name, "descr": "|u1", "shape": shape, "shards": files}
    if name != "image":
        entry["kind"] = name
    return entry, checksums[np.concatenate(order)]


def write_index(
    path: Path,
    arrays: list[tuple[dict[str, Any], np.ndarray]],
    labels: np.ndarray,
    names: list[bytes],
) -> None:
    """Write the index of a data set. Its first array are the images."""
    tensors = {
        "row": np.arange(len(names), dtype="<i8"),
        "flags": np.zeros(len(names), np.uint8),
        "key/offsets": np.cumsum([0, *map(len, names)], dtype="<i8"),
        "key/bytes": np.frombuffer(b"".join(names), np.uint8),
        **{f"crc32/{entry['name']}": checksums for entry, checksums in arrays},
        "label": labels.astype("<i8"),
    }
    content = {
        "format_version": min(2, len(arrays)),
        "samples": len(names),
        "arrays": [entry for entry, _ in arrays],
        "tensors": {
            name: {"dtype": tensor.dtype.str, "shape": tensor.shape, "crc32": zlib.crc32(tensor)}
            for name, tensor in tensors.items()
        },
        "columns": ["label"],
        "classes": [f"n{label:08d}" for label in range(1000)],
        "points": [],
        "build": {},
        "statistics": {},
    }
    content["fingerprint"] = hashlib.sha256(canonical(content).encode()).hexdigest()
    safetensors.numpy.save_file(tensors, path.with_suffix(".idx"), {"memload": canonical(content)})


def canonical(content: Any) -> str:
    """Return JSON as an index holds it."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))
