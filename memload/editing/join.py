"""Further arrays beside the images of a data set: masks and features that exist already."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from memload.editing.matching import match_samples
from memload.editing.npy import array_in_file, checksums_of
from memload.editing.report import EditReport, check_index_output, link_command, report_on
from memload.editing.statistics import ids_of_masks
from memload.storage.format import DESCRS_OF_MASKS, FLAG_ORIENTED, check_array_name
from memload.storage.index import Array, Index
from memload.storage.shards import check_files, describe
from memload.wording import counted, listed


def join(
    output: str | Path, path: str | Path, /, *, overwrite: bool = False, **arrays: str | Path
) -> EditReport:
    """Write an index of the data set ``path`` that also has ``arrays``. Nothing is copied.

    Each array is a data set of memload's or an NPY file in the folder of ``path``. ``output`` is
    the new index, in the same folder.

    Of a data set, the array of the same name is taken, or else its only one. ``"other.bin:mask"``
    names another. Samples are matched by their names, whatever the extension: ``cat/1.jpg`` and
    ``cat/1.png``. Samples that one of the arrays lacks are left out, which the report notes.

    An NPY file, as `numpy.save` writes it, has a row for each sample of ``path``, in its order. It
    is read once, for its checksums.

    Masks move with the images in transforms, and arrays are left alone. Masks and arrays that a
    data set has beside its images stay what they are. Its images and the rows of an NPY file become
    masks ``(H, W)`` if they are uint8 or uint16, have the height and width of the images here, and
    at most one channel. Otherwise they become arrays, but images of uint8 or uint16 with one
    channel and another height or width are refused. Build masks by themselves with ``mode="mask"``,
    and with the size and fit of the images. Masks of images that were turned by their EXIF
    orientation are refused unless they were turned, too.

    Returns a report whose ``notes`` tell what each array has become, which samples were left out,
    and what may be wrong with masks. Raises ValueError for what does not fit together,
    FileExistsError, FormatError and OSError.

    >>> memload.join("both.idx", "out.bin", mask="masks.bin", feature="f.npy")  # doctest: +SKIP
    """
    return join_arrays(output, path, arrays, overwrite=overwrite)


def join_arrays(
    output: str | Path, path: str | Path, arrays: Mapping[str, str | Path], *, overwrite: bool
) -> EditReport:
    """Join arrays of any names, also that of an argument of `join`, which explains the rest."""
    first = Index.open(path)
    if not arrays:
        raise ValueError("arrays: there is nothing to join. Name an array, such as mask=masks.bin.")
    target = check_index_output(output, first.path.parent, overwrite)
    added = [_find(first, name, str(source)) for name, source in arrays.items()]
    notes = [note for addition in added for note in addition.notes]
    index = _joined(first, added)
    check_files(index)
    index.write(target)
    return report_on(target, index, notes)


class _Addition(NamedTuple):
    """An array to add: the row of each sample in it, or -1, and the checksums of all its rows."""

    array: Array
    rows: np.ndarray
    crc32: np.ndarray
    notes: tuple[str, ...]
    ids: Sequence[int] | None = None  #: which occur in it, if it is a mask and they are known


def _joined(first: Index, added: list[_Addition]) -> Index:
    """Return the samples that have a row in every array."""
    kept = np.flatnonzero(np.all([addition.rows >= 0 for addition in added], axis=0))
    if not len(kept):
        raise ValueError(f"No sample of {first.path} has all of these arrays. Join fewer of them.")
    index = first if len(kept) == len(first) else first.subset(kept)
    files = [shard.file for shard in index.shards]
    rows, crc32, ids = dict(index.other_rows), dict(index.crc32), ids_of_masks(index)
    for addition in added:
        name = addition.array.name
        for shard in addition.array.shards:
            if shard.file in files:
                raise ValueError(f"{name}: {shard.file} is already an array of this data set.")
            files.append(shard.file)
        if not np.array_equal(addition.rows[kept], index.row):
            rows[name] = addition.rows[kept]
        crc32[name] = addition.crc32
        if addition.ids is not None:
            ids[name] = list(addition.ids)
    united = (*index.arrays, *(addition.array for addition in added))
    statistics = {**index.statistics, "mask_ids": ids} if ids else index.statistics
    return replace(
        index, arrays=united, other_rows=rows, crc32=crc32, statistics=statistics, fingerprint=""
    )


def _find(first: Index, name: str, source: str) -> _Addition:
    check_array_name(name)
    if name in first.columns or any(array.name == name for array in first.arrays):
        raise ValueError(
            f"{name}: {first.path.name} has an array or a column of this name already. Choose "
            "another name."
        )
    if source.endswith((".npy", ".npz")):  # the latter is an error that says what to do
        return _from_npy(first, name, Path(source))
    chosen = ""
    if ":" in source and not Path(source).exists():
        source, _, chosen = source.rpartition(":")
    return _from_data_set(first, name, Index.open(source), chosen)


def _check_folder(first: Index, other: Index | Path) -> None:
    """Raise ValueError unless a data set or an NPY file is in the folder of the first."""
    folder = first.path.parent.resolve()
    path = other if isinstance(other, Path) else other.path
    if path.parent.resolve() != folder:
        command = f"ln {path} {folder}/" if isinstance(other, Path) else link_command(other, folder)
        raise ValueError(
            f"{path} is not in {folder}, as {first.path.name} is. All files of an index must lie "
            f"in one folder. Move it there, or make a hard link: '{command}'."
        )


# ------------------------------------------------------------------------------------- an NPY file


def _from_npy(first: Index, name: str, path: Path) -> _Addition:
    array = _as_mask(array_in_file(path, name), first.image)
    _check_folder(first, path)
    if array.rows != len(first):
        remedy = "Save one row for each sample, in the order of the data set."
        if array.rows == first.image.rows:
            remedy = (
                f"It has a row for each of the images in {first.image.shards[0].file}: join it to "
                "the data set that has all of them, and take the samples from the result."
            )
        raise ValueError(
            f"{path} has {array.rows:,} rows, but {first.path.name} has {len(first):,} samples. "
            f"{remedy}"
        )
    notes = (f"{name}: {_kind_text(array)}, from {path.name}",)
    return _Addition(array, np.arange(len(first)), checksums_of(path, array), notes)


def _as_mask(array: Array, image: Array) -> Array:
    """Return an array as a mask, if it has a number of 8 or 16 bits for each pixel of an image."""
    shape = array.shape[:2] if array.shape[2:] == (1,) else array.shape
    is_mask = array.descr in DESCRS_OF_MASKS and shape == image.shape[:2]
    return replace(array, shape=shape, kind="mask") if is_mask else replace(array, kind="array")


def _kind_text(array: Array) -> str:
    rows, _, shape = describe((array.rows, *array.shape), array.descr).partition(" of ")
    return f"{'masks' if array.kind == 'mask' else 'arrays'} of {shape}, {rows}"


# -------------------------------------------------------------------------- a data set of memload's


def _from_data_set(first: Index, name: str, other: Index, chosen: str) -> _Addition:
    _check_folder(first, other)
    source = _choose_array(name, other, chosen)
    array = replace(source, name=name)
    if source.kind == "image":
        array = _as_mask(array, first.image)
    _check_size(first, name, other, source)
    positions = match_samples(first, other.keys, other.path.name)
    found = positions >= 0
    if not len(other):
        raise ValueError(f"{name}: {other.path} has no samples.")
    if not found.any():
        raise ValueError(
            f"{name}: no sample of {other.path} has the name of one of {first.path.name}. The "
            f"first are {other.keys[0]!r:.200} and {first.keys[0]!r:.200}. Arrays without such "
            "names are joined as an NPY file, in the order of the samples."
        )
    rows = np.where(found, other.rows_of(source.name)[positions], -1)
    if array.kind == "mask":
        _check_orientation(first, name, other, positions)
    notes = [f"{name}: {_kind_text(array)}, from {other.path.name}"]
    notes += _notes_on_numbers(name, first, other, positions)
    missing = np.flatnonzero(~found).tolist()
    if missing:
        names = listed([first.keys[number] for number in missing[:4]], 3)
        count = f"{len(missing):,} of {counted(len(first), 'sample')}"
        verb = "is" if len(missing) == 1 else "are"
        notes.append(
            f"{name}: {count} {verb} not in {other.path.name} and {verb} left out: {names}"
        )
    if source.kind == "image" and array.kind == "mask":
        notes += _notes_on_ids(name, other)
    ids = ids_of_masks(other).get(source.name)
    return _Addition(array, rows, other.crc32[source.name], tuple(notes), ids)


def _notes_on_numbers(
    name: str, first: Index, other: Index, positions: np.ndarray
) -> Iterator[str]:
    """Yield a note if the names of one data set may be positions, which count from 0."""
    sample = int(np.argmax(positions >= 0))
    keys = (first.keys[sample], other.keys[int(positions[sample])])
    if keys[0].isdecimal() != keys[1].isdecimal():
        yield (
            f"{name}: {keys[0]} has {keys[1]}. If this number is only a position, which counts "
            "from 0, the names of files may count from 1: check it"
        )


def _choose_array(name: str, other: Index, chosen: str) -> Array:
    names = [array.name for array in other.arrays]
    wanted = chosen or (name if name in names or len(names) > 1 else names[0])
    if wanted not in names:
        raise ValueError(
            f"{name}: {other.path.name} has no array {wanted!r}, only {', '.join(names)}. Say "
            f"which, such as {name}={other.path.with_suffix('.bin')}:{names[-1]}."
        )
    return other.array(wanted)


def _check_size(first: Index, name: str, other: Index, source: Array) -> None:
    """Raise ValueError if masks, or what looks like them, are stored otherwise than the images."""
    is_like_masks = source.descr in DESCRS_OF_MASKS and source.shape[2:] == (1,)
    if source.kind == "array" or (source.kind == "image" and not is_like_masks):
        return
    height, width = first.image.shape[:2]
    if source.shape[:2] != (height, width):
        raise ValueError(
            f"{name}: {other.path} has {source.shape[0]}×{source.shape[1]} pixels, but the images "
            f"of {first.path.name} have {height}×{width}. Build it with --size {height}x{width}."
        )
    fits = [index.setting("fit") for index in (first, other)]
    if None not in fits and fits[0] != fits[1]:
        raise ValueError(
            f"{name}: {other.path} was built with --fit {fits[1]}, but {first.path.name} with "
            f"--fit {fits[0]}, so that masks would not lie on their images. Build it with --fit "
            f"{fits[0]}."
        )


def _check_orientation(first: Index, name: str, other: Index, positions: np.ndarray) -> None:
    turned = (first.flags & FLAG_ORIENTED) != 0
    others_turned = (other.flags[positions] & FLAG_ORIENTED) != 0
    differ = np.flatnonzero((positions >= 0) & (turned != others_turned)).tolist()
    if differ:
        names = listed([first.keys[number] for number in differ[:4]], 3)
        was = "its picture" if turned[differ[0]] else "its mask"
        raise ValueError(
            f"{name}: for {len(differ):,} of {len(first):,} samples, only one of picture and mask "
            f"was turned as its EXIF orientation says ({names}: {was}). Build them together with "
            "'memload build --mask', or the images with --no-exif and the masks with --mode mask."
        )


def _notes_on_ids(name: str, other: Index) -> Iterator[str]:
    if other.setting("mode") == "L":
        yield (
            f"{name}: {other.path.name} was built with --mode L, which stores the gray of a "
            "palette's colors. --mode mask keeps ids"
        )
    interpolation = other.setting("interpolation")
    sides = zip(("source_height", "source_width"), other.image.shape, strict=False)
    is_resized = any(other.statistics.get(side) != [size, size] for side, size in sides)
    if is_resized and interpolation not in (None, "nearest"):
        yield (
            f"{name}: {other.path.name} was resized with --interpolation {interpolation}, which "
            "mixes ids. Build it with --mode mask"
        )
