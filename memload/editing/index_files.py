"""Indexes come from paths and data sets, and go to new files."""

from pathlib import Path
from typing import Any

from memload.storage.index import Index
from memload.storage.shards import check_files


def index_of(dataset: Any) -> Index:
    """Return the index of a data set: a path, a `MemmapDataset`, or an index, which is returned.

    Raises FormatError and TypeError as `Index.open` does.
    """
    index = dataset if isinstance(dataset, Index) else getattr(dataset, "index", None)
    return index if isinstance(index, Index) else Index.open(dataset)


def write(index: Index, output: str | Path, overwrite: bool = False) -> Index:
    """Write an index as `Index.write` does, unless that would replace a file by mistake.

    Raises what `Index.write` raises, FileExistsError, and FormatError if files of pixels are
    missing or have been replaced since they were opened.
    """
    path = Path(output)
    if path.suffix == ".idx" and path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} exists already. Say overwrite=True (--overwrite) to replace it."
        )
    check_files(index)
    return index.write(path)
