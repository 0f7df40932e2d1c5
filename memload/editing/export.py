"""Writes the samples of a data set as files that any program reads: a folder, or a WebDataset."""

import io
import json
import math
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from memload.building.progress import Show
from memload.building.progress import progress as progress_of
from memload.editing.file_names import distinct, safe_name, safe_path
from memload.editing.index_files import index_of
from memload.errors import ChecksumError
from memload.machine import available_cores
from memload.sources.tables import EXPORTED_KEY, PATH
from memload.storage.index import Index, sync
from memload.storage.shards import Shards, describe

#: The element types and channels that a PNG can hold.
_PICTURES = (("|u1", 1), ("|u1", 2), ("|u1", 3), ("|u1", 4), ("<u2", 1))
#: Samples that are encoded at once.
_CHUNK = 256


def export(dataset: Any, output: str | Path, *, progress: bool | None = None) -> Path:
    """Write the samples of a data set as PNG files into a folder, or into a tar file.

    A folder gets ``CLASS/KEY.png`` for each image: in a folder for its class, unless its key begins
    with that. ``metadata.jsonl`` has ``file_name``, ``memload_key``, ``label`` and all columns, as
    ImageFolder of Hugging Face reads it. Masks are written beside, to
    ``output.mask/CLASS/KEY.png``, as gray PNGs of 8 or 16 bits, and other arrays to
    ``output.NAME/CLASS/KEY.npy``.

    If ``output`` ends in ``.tar``, it is a WebDataset: ``KEY.png``, ``KEY.mask.png``,
    ``KEY.NAME.npy``, ``KEY.cls`` with the number of the class, and ``KEY.json`` with key, label and
    columns. Dots in a key become underscores. The same samples always give the same bytes.

    `memload.build` reads both. Keys are not trusted: all files lie in the folder, whatever the keys
    are. If two keys would have the same path, the later one gets a number. Files are written into
    ``output.exporting``, which is renamed in the end. If that exists already, another export is
    running, or was killed: remove it then.

    Args:
        dataset: A path such as ``"out.bin"``, a `MemmapDataset`, or an index.
        output: A new folder, or a new file that ends in ``.tar``.
        progress: As in `memload.build`.

    Returns ``output``. Raises ValueError for images that PNG cannot hold: it holds uint8 with 1 to
    4 channels, and uint16 with one. Raises FileExistsError, FormatError, ChecksumError for a row
    that has changed since it was written, and OSError. Nothing is left behind then.

    >>> memload.export("out.bin", "pngs/")  # doctest: +SKIP
    >>> memload.export(memload.where("out.bin", label="cat"), "cats.tar")  # doctest: +SKIP
    """
    index = index_of(dataset)
    if (index.image.descr, index.image.shape[2]) not in _PICTURES:
        raise ValueError(
            f"PNG cannot hold the images of {index.path}, "
            f"{describe((index.image.rows, *index.image.shape), index.image.descr)}. Read them "
            "with np.load, or with MemmapDataset."
        )
    path = Path(os.path.abspath(output))  # noqa: PTH100  # resolve() would follow a link
    is_tar = path.suffix == ".tar"
    names = [] if is_tar else [a.name for a in index.arrays if a.name != "image"]
    with (
        _written_aside([*(_beside(path, name) for name in names), path]) as folder,
        progress_of(path.name, len(index), progress, "samples") as show,
    ):
        write = _write_tar if is_tar else _write_folder
        write(index, folder / path.name, _encoded(index, show))
    return Path(output)


@contextmanager
def _written_aside(targets: Sequence[Path]) -> Iterator[Path]:
    """Yield a folder for files of the same names as ``targets``, which are renamed in the end."""
    if existing := [target for target in targets if os.path.lexists(target)]:
        raise FileExistsError(f"{existing[0]} exists already. Remove it, or choose another output.")
    output = targets[-1]
    folder = output.with_name(f"{output.name}.exporting")
    folder.mkdir()
    try:
        yield folder
        for target in targets:
            (folder / target.name).rename(target)
        sync(output.parent)
    finally:
        shutil.rmtree(folder)


# ------------------------------------------------------------------------------------ what is in it


def _encoded(index: Index, show: Show) -> Iterator[dict[str, bytes]]:
    """Yield the files of each sample: contents by what their names end in, such as ``mask.png``."""
    opened = [Shards(index, array.name) for array in index.arrays]

    def encode(position: int) -> dict[str, bytes]:
        return dict(_file_of(index, shards, position) for shards in opened)

    with ThreadPoolExecutor(available_cores()) as pool:
        for start in range(0, len(index), _CHUNK):
            for contents in pool.map(encode, range(start, min(start + _CHUNK, len(index)))):
                yield contents
                show(1, None)


def _file_of(index: Index, shards: Shards, position: int) -> tuple[str, bytes]:
    """Return the file of a row: what its name ends in, and its content.

    Raises ChecksumError if the row has changed since it was written.
    """
    array, row = shards.array, int(index.rows_of(shards.array.name)[position])
    values = shards.row(row)
    if zlib.crc32(values.data) != index.crc32[array.name][row]:
        raise ChecksumError(
            f"{index.path} is damaged: row {row} of {array.name} ({index.keys[position]}) has "
            f"changed since it was written. 'memload verify {index.path}' shows the extent.",
            path=index.path,
            rows=[row],
        )
    file = io.BytesIO()
    if array.kind == "array":
        np.save(file, values)
        return f"{array.name}.npy", file.getvalue()
    is_gray = values.ndim == 3 and values.shape[2] == 1
    picture = Image.fromarray(values[:, :, 0] if is_gray else values)
    # Photos are written three times as fast as with the default, 6, and are 6 % larger.
    picture.save(file, format="PNG", compress_level=1)
    return "png" if array.kind == "image" else f"{array.name}.png", file.getvalue()


def _facts(index: Index, position: int) -> dict[str, Any]:
    """Return the key and the columns of a sample. Numbers that are missing are None."""
    facts: dict[str, Any] = {EXPORTED_KEY: index.keys[position]}
    for name, column in index.columns.items():
        value, texts = column[position].tolist(), index.texts.get(name)
        entry = f"{name}_" if name in (PATH, EXPORTED_KEY) else name
        facts[entry] = _plain(value) if texts is None else texts[value]
    return facts


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


# ---------------------------------------------------------------------------------- where that goes


def _beside(folder: Path, name: str) -> Path:
    """Return the folder of an array beside that of the images, such as ``pngs.mask``."""
    return folder.with_name(f"{folder.name}.{name}")


def _write_folder(index: Index, folder: Path, samples: Iterator[dict[str, bytes]]) -> None:
    """Write a file for each array of a sample, and a line of ``metadata.jsonl``."""
    classes = [*distinct(map(safe_name, index.classes or ()))]
    folders = [classes[n] for n in index.columns["label"]] if classes else [None] * len(index)
    paths = (safe_path(key, name) for key, name in zip(index.keys, folders, strict=True))
    folder.mkdir()
    with (folder / "metadata.jsonl").open("x", encoding="utf-8") as table:
        for position, (path, contents) in enumerate(zip(distinct(paths), samples, strict=True)):
            for ending, content in contents.items():
                name, _, extension = ending.rpartition(".")
                file = (_beside(folder, name) if name else folder) / f"{path}.{extension}"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            table.write(json.dumps({PATH: f"{path}.png", **_facts(index, position)}) + "\n")


def _write_tar(index: Index, path: Path, samples: Iterator[dict[str, bytes]]) -> None:
    """Write the files of each sample. Members have no owner and no time: the same bytes again."""
    # The key of a WebDataset ends at the first dot in the name of the file.
    stems = distinct(safe_path(key, has_dots=False) for key in index.keys)
    label = index.columns.get("label", np.zeros(0))
    # GNU's format holds names of any length and bytes.
    with tarfile.open(
        path, "x", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for position, (stem, contents) in enumerate(zip(stems, samples, strict=True)):
            if label.ndim == 1 and label.dtype.kind == "i":
                contents["cls"] = str(label[position]).encode()
            contents["json"] = json.dumps(_facts(index, position)).encode()
            for ending, content in contents.items():
                member = tarfile.TarInfo(f"{stem}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            tar.members.clear()  # type: ignore[attr-defined]  # 1 KB for each member
    sync(path)
