"""Writes the samples of a data set as files that any program reads: a folder, or a WebDataset."""

import io
import json
import math
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from memload.building.progress import progress as progress_of
from memload.editing.columns import where as where_of
from memload.editing.file_names import distinct, safe_name, safe_path
from memload.errors import ChecksumError
from memload.machine import available_cores
from memload.storage.index import Index, sync
from memload.storage.shards import Shards, describe

#: The columns of ``metadata.jsonl`` besides those of the data set.
PATH, KEY = "file_name", "key"
#: How Pillow writes images. For photos, PNGs of level 1 are written three times as fast as those of
#: the default, 6, and are 6 % larger.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "png": {"format": "PNG", "compress_level": 1},
    "jpg": {"format": "JPEG", "quality": 95, "subsampling": 0},
    "npy": {},
}
#: The element types and channels of images that a format can hold.
_PICTURES: Mapping[str, Sequence[tuple[str, int]]] = {
    "png": (("|u1", 1), ("|u1", 2), ("|u1", 3), ("|u1", 4), ("<u2", 1)),
    "jpg": (("|u1", 1), ("|u1", 3)),
}
#: Samples that are encoded at once.
_CHUNK = 256


def export(
    dataset: Any,
    output: str | Path,
    *,
    where: Mapping[str, Any] | None = None,
    format: str = "png",
    num_threads: int | None = None,
    progress: bool | None = None,
) -> Path:
    """Write the samples of a data set as image files into a folder, or into a tar file.

    A folder gets ``CLASS/KEY.png`` for each image: in a folder for its class, unless its key begins
    with that, or for its label if the classes have no names. ``metadata.jsonl`` has ``file_name``,
    ``key``, ``label`` and all columns, as ImageFolder of Hugging Face reads it. Masks are written
    beside, to ``output.mask/CLASS/KEY.png``, as gray PNGs of 8 or 16 bits, and other arrays to
    ``output.NAME/CLASS/KEY.npy``.

    If ``output`` ends in ``.tar``, it is a WebDataset: ``KEY.png``, ``KEY.mask.png``,
    ``KEY.NAME.npy``, ``KEY.cls`` with the number of the class, and ``KEY.json`` with key, label and
    columns. Dots in a key become underscores. The same samples always give the same bytes.

    `memload.build` reads both. Keys are not trusted: all files lie in the folder, whatever the keys
    are. If two keys would have the same path, the later one gets a number. Files are written into
    ``output.exporting``, which is renamed in the end.

    Args:
        dataset: A path such as ``"out.bin"``, a `MemmapDataset`, or an index.
        output: A new or empty folder, or a new file that ends in ``.tar``.
        where: Which samples to take, as `MemmapDataset.where` does. By default all.
        format: ``"png"`` is lossless, for uint8 with 1 to 4 channels and uint16 with one. ``"jpg"``
            is lossy (quality 95, colors not subsampled), for uint8 with 1 or 3. ``"npy"`` holds any
            array ``(H, W, C)``.
        num_threads: How many threads encode images, by default one for each core. Each writes some
            160 PNGs of 256×256 per second.
        progress: As in `memload.build`.

    Returns ``output``. Raises ValueError for a data set that the format cannot hold,
    FileExistsError, FormatError, ChecksumError for a row that has changed since it was written, and
    OSError. Nothing is left behind then.

    >>> memload.export("out.bin", "cats/", where={"label": "cat"})  # doctest: +SKIP
    >>> memload.export("out.bin", "train.tar", where={"split": "train"})  # doctest: +SKIP
    """
    index = where_of(dataset, **(where or {}))
    _check_format(index, format)
    if Path(output).suffix in (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip"):
        raise ValueError(f"output: {output} would be compressed. Name a folder or a .tar.")
    path = Path(os.path.abspath(output))  # noqa: PTH100  # resolve() would follow a link
    write = _write_tar if path.suffix == ".tar" else _write_folder
    names = [array.name for array in index.arrays if array.kind != "image"]
    beside = [] if path.suffix == ".tar" else [folder_beside(path, name) for name in names]
    with (
        _written_aside([*beside, path]) as folder,
        progress_of(path.name, len(index), progress, "samples") as show,
    ):
        write(index, folder / path.name, _encoded(index, format, num_threads, show))
    return Path(output)


def folder_beside(folder: Path, name: str) -> Path:
    """Return the folder of an array beside that of the images, such as ``pngs.mask``."""
    return folder.with_name(f"{folder.name}.{name}")


def _check_format(index: Index, format: str) -> None:
    """Raise ValueError if a format cannot hold the images of a data set."""
    if format not in _OPTIONS:
        raise ValueError(f"format: {format!r} is not one of {', '.join(_OPTIONS)}.")
    image = index.image
    if format in _PICTURES and (image.descr, image.shape[2]) not in _PICTURES[format]:
        raise ValueError(
            f"format: {format!r} cannot hold the images of {index.path}, "
            f"{describe((image.rows, *image.shape), image.descr)}. Say --format npy "
            "(format='npy' in Python)."
        )


@contextmanager
def _written_aside(targets: Sequence[Path]) -> Iterator[Path]:
    """Yield a folder for files of the same names as ``targets``, which are renamed in the end."""
    for target in targets:
        is_empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
        if os.path.lexists(target) and not is_empty:
            raise FileExistsError(f"{target} exists already. Remove it, or choose another output.")
    output = targets[-1]
    folder = output.with_name(f"{output.name}.exporting")
    try:
        folder.mkdir()
    except FileExistsError:
        raise FileExistsError(
            f"{folder} exists: another export is running, or was stopped. If none is running, "
            "remove the folder."
        ) from None
    try:
        yield folder
        for target in targets:
            (folder / target.name).rename(target)
        sync(output.parent)
    finally:
        shutil.rmtree(folder)


# ------------------------------------------------------------------------------------ what is in it


def _encoded(
    index: Index, format: str, num_threads: int | None, show: Callable[[int, None], None]
) -> Iterator[dict[str, bytes]]:
    """Yield the files of each sample: contents by names of arrays and extensions."""
    endings = {"image": format, "mask": "png", "array": "npy"}
    opened = [(array, Shards(index, array.name)) for array in index.arrays]

    def encode(position: int) -> dict[str, bytes]:
        found = {}
        for array, shards in opened:
            ending, values = endings[array.kind], _row(index, shards, position)
            name = ending if array.kind == "image" else f"{array.name}.{ending}"
            found[name] = _file_of(values, ending)
        return found

    with ThreadPoolExecutor(num_threads or available_cores()) as pool:
        for start in range(0, len(index), _CHUNK):
            for contents in pool.map(encode, range(start, min(start + _CHUNK, len(index)))):
                yield contents
                show(1, None)


def _row(index: Index, shards: Shards, position: int) -> np.ndarray:
    """Return the row of a sample. Raises ChecksumError if it has changed since it was written."""
    array, row = shards.array, index.rows_of(shards.array.name)[position : position + 1]
    values: np.ndarray = shards.gather(row, np.empty((1, *array.shape), array.descr))[0]
    if zlib.crc32(values.data) != index.crc32[array.name][row[0]]:
        path = shards.paths[int(array.shard_of(row)[0])]
        raise ChecksumError(
            f"{path} is damaged: row {row[0]} ({index.keys[position]}) has changed since it was "
            f"written. Run 'memload verify {index.path}' to see the extent. Then restore the file, "
            "or run 'memload build' again.",
            path=path,
            rows=row.tolist(),
        )
    return values


def _file_of(values: np.ndarray, ending: str) -> bytes:
    file = io.BytesIO()
    if ending == "npy":
        np.save(file, values)
    else:
        is_gray = values.ndim == 3 and values.shape[2] == 1
        picture = Image.fromarray(values[:, :, 0] if is_gray else values)
        picture.save(file, **_OPTIONS[ending])
    return file.getvalue()


def _facts(index: Index, position: int) -> dict[str, Any]:
    """Return the key and the columns of a sample. Numbers that are missing are None."""
    facts: dict[str, Any] = {KEY: index.keys[position]}
    for name, column in index.columns.items():
        value, texts = column[position].tolist(), index.texts.get(name)
        unused = f"{name}_" if name in (PATH, KEY) else name
        facts[unused] = _plain(value) if texts is None else texts[value]
    return facts


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


# ---------------------------------------------------------------------------------- where that goes


def _write_folder(index: Index, folder: Path, samples: Iterator[dict[str, bytes]]) -> None:
    """Write a file for each array of a sample, and a line of ``metadata.jsonl``."""
    classes = _class_folders(index)
    paths = (safe_path(key, name) for key, name in zip(index.keys, classes, strict=True))
    folder.mkdir()
    with (folder / "metadata.jsonl").open("x", encoding="utf-8") as table:
        for position, (path, contents) in enumerate(zip(distinct(paths), samples, strict=True)):
            for ending, content in contents.items():
                name, _, extension = ending.rpartition(".")
                root = folder_beside(folder, name) if name else folder
                file = root / f"{path}.{extension}"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
                if not name:
                    facts = {PATH: f"{path}.{extension}", **_facts(index, position)}
                    table.write(f"{json.dumps(facts)}\n")


def _class_folders(index: Index) -> list[str | None]:
    """Return the folder for each sample: its class, or its label as a number; None without."""
    label = index.columns.get("label")
    if label is None or label.ndim > 1 or label.dtype.kind not in "iu" or not len(label):
        return [None] * len(index)
    if index.classes is not None:
        names = list(distinct(map(safe_name, index.classes)))
        return [names[number] for number in label.tolist()]
    digits = len(str(label.max()))  # as many for all, so that the folders sort as the labels do
    return [f"{number:0{digits}}" for number in label.tolist()]


def _write_tar(index: Index, path: Path, samples: Iterator[dict[str, bytes]]) -> None:
    """Write the files of each sample. Members have no owner and no time: the same bytes again."""
    # The key of a WebDataset ends at the first dot in the name of the file.
    stems = distinct(safe_path(key, has_dots=False) for key in index.keys)
    label = index.columns.get("label")
    is_class = label is not None and label.ndim == 1 and label.dtype.kind in "iu"
    # GNU's format holds names of any length and bytes.
    with tarfile.open(
        path, "x", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for position, (stem, contents) in enumerate(zip(stems, samples, strict=True)):
            if label is not None and is_class:
                contents["cls"] = str(label[position]).encode()
            contents["json"] = json.dumps(_facts(index, position)).encode()
            for ending, content in contents.items():
                member = tarfile.TarInfo(f"{stem}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            tar.members.clear()  # type: ignore[attr-defined]  # 1 KB for each member
    sync(path)
