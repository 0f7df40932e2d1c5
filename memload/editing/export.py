"""Writes the samples of a data set as files that any program reads: a folder, or a WebDataset.

::

    rows ──▶ threads: encode ──▶ pngs.exporting/ ──▶ pngs/cat/1.png, pngs.mask/cat/1.png
                                                     x.tar, with 1.png, 1.mask.png, 1.cls, 1.json
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from memload.building.decoders import MODE_OF_STORED
from memload.building.progress import progress as progress_of
from memload.editing.aside import written_aside
from memload.editing.cells import TABLE
from memload.editing.encoding import Encoder
from memload.editing.facts import are_readable, classes_in_use
from memload.editing.selected import select
from memload.editing.threads import in_order
from memload.editing.writers import FolderWriter, TarWriter, array_folders, member_ending
from memload.sources.matching import stem_of
from memload.storage.index import Index
from memload.storage.shards import describe
from memload.wording import counted

ImageFormat = Literal["png", "jpg", "npy"]

#: The element types and channels of pictures that a format can hold.
_PICTURES: Mapping[str, Sequence[tuple[str, int]]] = {
    "png": (("|u1", 1), ("|u1", 2), ("|u1", 3), ("|u1", 4), ("<u2", 1)),
    "jpg": (("|u1", 1), ("|u1", 3)),
}
#: The endings of files that are mistaken for what can be written.
_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip")


@dataclass(frozen=True)
class ExportReport:
    """What was written: the folder or the tar, how many samples, in which format, and notes.

    ``beside`` are the folders of masks and other arrays. ``notes`` say which keys are no names of
    files, and how to build a data set from what was written. ``str(report)`` is one line.
    """

    path: Path
    samples: int
    format: str
    beside: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        count = counted(self.samples, "sample")
        beside = f", and {', '.join(map(str, self.beside))}" if self.beside else ""
        return f"{self.path}: {count} as {self.format.upper()}{beside}"


def export(
    dataset: Any,
    output: str | Path,
    *,
    where: Mapping[str, Any] | None = None,
    format: ImageFormat = "png",
    num_threads: int | None = None,
    progress: bool | None = None,
) -> ExportReport:
    """Write the samples of a data set as image files into a folder, or into a tar file.

    ``dataset`` is a path such as ``"out.bin"``, or a `memload.MemmapDataset`, which may be a view.
    ``where`` takes only some of its samples, as `MemmapDataset.where` does.

    ``format`` is that of the images:

    - ``"png"`` is lossless. It holds uint8 with 1 to 4 channels (gray, gray with alpha, RGB, RGBA),
      and uint16 with one channel.
    - ``"jpg"`` is lossy, of quality 95 and without subsampling of colors. It holds uint8 with 1 or
      3 channels.
    - ``"npy"`` holds any array, ``(H, W, C)``.

    If ``output`` is a folder, an image is written to ``CLASS/KEY.png``: into a folder for its
    class, unless its key begins with that, or for its label if the classes have no names. Without
    labels, keys are the paths. Masks are written beside, to ``output.mask/CLASS/KEY.png``, as gray
    PNGs of 8 or 16 bits, and other arrays to ``output.NAME/CLASS/KEY.npy``. A table,
    ``output/metadata.csv``, has ``file_name``, ``key``, ``label`` and all columns, as ImageFolder
    of Hugging Face reads it. Unless the format is ``"jpg"``, the command in ``notes`` builds the
    same pixels, labels, keys and columns again.

    If ``output`` ends in ``.tar``, it is a WebDataset: ``KEY.png``, ``KEY.mask.png``,
    ``KEY.NAME.npy``, ``KEY.cls`` with the number of the class, and ``KEY.json`` with key, label and
    columns. Dots in a key become underscores. The same samples always give the same bytes.

    Keys are not trusted: all files lie in the folder, whatever the keys are. If two keys would have
    the same path, the later one gets a number. Nothing is replaced. Files are written into
    ``output.exporting``, which is renamed in the end, so that an export that was stopped leaves
    nothing that looks complete.

    Images are encoded in ``num_threads`` threads, by default one for each core. Each writes some
    160 PNGs of 256×256 a second. ``progress`` is as in `memload.build`.

    Returns an `ExportReport`. Raises ValueError for a data set that the format cannot hold and for
    an output that cannot be one, FileExistsError, FormatError, ChecksumError for a row that has
    changed since it was written, and BuildError if another process writes this output now, or if
    it cannot be written, for example because the disk is full. Nothing is left behind then.

    >>> memload.export("out.bin", "cats/", where={"label": "cat"})  # doctest: +SKIP
    >>> memload.export("out.bin", "train.tar", where={"split": "train"})  # doctest: +SKIP
    """
    index = select(dataset, where)
    _check_format(index, format)
    encoder = Encoder(index, format)
    path = _checked_output(output)
    writer_of = TarWriter if path.suffix == ".tar" else FolderWriter
    targets = {"image": path} if path.suffix == ".tar" else array_folders(index, path)
    with (
        written_aside([*targets.values()]) as folder,
        writer_of(index, folder / path.name, encoder.endings) as writer,
        progress_of(path.name, len(index), progress, "samples") as show,
    ):
        encoded = in_order(encoder.encode, range(len(index)), num_threads)
        for position, contents in enumerate(encoded):
            writer.write(position, contents)
            show(1, None)
    return _report(index, Path(output), targets, format, writer.stems)


def _checked_output(output: str | Path) -> Path:
    """Return the absolute path of an output. Raises ValueError."""
    path = Path(os.path.abspath(output))  # noqa: PTH100  # resolve() would follow a link
    if path.suffix.lower() in _COMPRESSED:
        raise ValueError(
            f"output: {str(output)!r} would be compressed, but an export is a folder or a .tar. "
            f"Write '{path.name.partition('.')[0]}.tar', whose images are compressed already."
        )
    if path == Path.cwd():
        raise ValueError("output: this is the current folder. Name a new one.")
    return path


def _report(
    index: Index, output: Path, targets: Mapping[str, Path], format: str, stems: Sequence[str]
) -> ExportReport:
    """Return the report. ``targets`` has the absolute path of each array's folder by its name."""
    beside = {
        name: output.with_name(target.name) for name, target in targets.items() if name != "image"
    }
    notes = []
    changed = [
        (key, stem)
        for key, stem in zip(index.keys, stems, strict=True)
        if not f"/{stem}".endswith(f"/{stem_of(key)}")
    ]
    if changed:
        (key, stem), count = changed[0], len(changed)
        where = "the .json files have" if output.suffix == ".tar" else "metadata.csv has"
        samples = counted(count, "sample has another name", "samples have other names")
        notes.append(f"{samples} than the key, such as {stem} for {key:.200}; {where} the keys")
    if command := _command(index, output, beside, format):
        notes.append(f"build it again: {command}")
    return ExportReport(output, len(index), format, tuple(beside.values()), tuple(notes))


def _check_format(index: Index, format: str) -> None:
    """Raise ValueError if a format cannot hold the images of a data set."""
    if format not in get_args(ImageFormat):
        raise ValueError(f"format: {format!r} is not one of {', '.join(get_args(ImageFormat))}.")
    image = index.image
    if format == "npy" or (image.descr, image.shape[2]) in _PICTURES[format]:
        return
    remedy = "png" if (image.descr, image.shape[2]) in _PICTURES["png"] else "npy"
    raise ValueError(
        f"format: {format!r} cannot hold the images of {index.path}, "
        f"{describe((image.rows, *image.shape), image.descr)}. Say --format {remedy} "
        f"(format='{remedy}' in Python)."
    )


def _are_found_again(index: Index) -> bool:
    """Return whether sources number the classes of an export as this index does."""
    used = classes_in_use(index)
    return list(index.classes or ()) == sorted(used) and are_readable(used)


def _command(index: Index, output: Path, beside: Mapping[str, Path], format: str) -> str | None:
    """Return the command that builds what was exported, or None if none gives the same pixels.

    ``beside`` has the folders of masks and other arrays by name. It is empty for a tar.
    """
    height, width, channels = index.image.shape
    mode: str | None = MODE_OF_STORED.get((index.image.descr, channels))
    is_tar = output.suffix == ".tar"
    words = ["memload", "build", str(output if is_tar else output / TABLE), "again.bin"]
    if format == "npy":
        mode = None if is_tar else "array"
    else:
        words += ["--size", f"{height}x{width}"]
    if mode is None:
        return None
    words += ["--mode", mode] if mode != "RGB" else []
    for array in index.arrays:
        if array.kind == "image":
            continue
        member = member_ending(array.name, "png" if array.kind == "mask" else "npy")
        place = member if is_tar else str(beside[array.name])
        words += [f"--{'masks' if array.kind == 'mask' else 'array'}", f"{array.name}={place}"]
    if is_tar:
        words += [word for name in index.points for word in ("--points", name)]
        for name in index.boxes:
            words += ["--boxes", f"{name}={index.columns[name].shape[1]}"]
    if index.classes is not None and not _are_found_again(index):
        words += ["--classes", str(index.path)]
    return shlex.join(words)
