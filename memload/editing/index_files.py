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
    """Write an index to a file in the folder of its pixels, and return it as written.

    Args:
        index: The index.
        output: A name that ends in ``.idx``.
        overwrite: Whether to replace a file of this name.

    Raises ValueError for another folder or name, FileExistsError, FormatError if files of pixels
    are missing or have been replaced, and OSError.
    """
    path, folder = Path(output), index.path.parent
    if path.resolve().parent != folder.resolve():
        raise ValueError(
            f"The output is {str(path)!r}, but the index must be in the folder of the pixels. "
            f"Write '{folder / path.name}'."
        )
    if path.suffix == ".idx" and path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} exists already. Say overwrite=True (--overwrite) to replace it."
        )
    check_files(index)
    return index.write(path)
