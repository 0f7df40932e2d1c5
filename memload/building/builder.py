"""The conversion of a source into a data set: `build`, from its arguments to its report."""

import contextlib
import errno
import functools
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memload.building.checks import check_arguments
from memload.building.conversion import ArraySettings, Settings
from memload.building.decoders import MAX_PIXELS, Mode
from memload.building.destination import check_not_read, publish
from memload.building.extra_arrays import MissingMasks
from memload.building.inherited import check_positions, positions
from memload.building.journal import DONE, REJECTED, crc32_field, is_intact, names_of_boxes
from memload.building.notes import box_notes, missing_notes, picture_notes, size_notes
from memload.building.pool import Chunk, run
from memload.building.preparation import prepare
from memload.building.progress import progress as progress_display
from memload.building.rejects import RejectLimit, frequent_reasons, sufficient_limit
from memload.building.report import ArrayReport, BuildReport
from memload.building.resizing import Fit, Interpolation
from memload.building.sources.existing import ExistingDataset
from memload.building.sources.new_samples import different_settings
from memload.building.sources.record import Source, optional
from memload.building.sources.remote import RemoteFiles, RemoteFolder
from memload.building.sources.table import Manifest
from memload.building.sources.wrapped import unwrapped
from memload.building.statistics import mask_ids, statistics
from memload.building.worker import RowWork, SampleCheck, runs_user_code
from memload.building.workspace import Workspace
from memload.errors import BuildError, DecodeError
from memload.machine import available_cores
from memload.storage.format import output_paths
from memload.storage.index import Index, class_counts

OnError = Literal["skip", "raise"]

#: A chunk has at most this many rows, and fewer if some workers would get less than four chunks.
_CHUNK_ROWS = 32
#: A chunk that follows the source's groups has at most so many. A killed build loses its chunks.
_MAX_GROUP_ROWS = 4096


def build(
    source: str | Path | Source | Any,
    output: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    fit: Fit = "crop",
    interpolation: Interpolation = "bilinear",
    mode: Mode | Literal["mask", "array"] | None = None,
    classes: Any = None,
    decoder: Literal["pillow", "jpeg4py"] = "pillow",
    fast: bool = False,
    strict: bool = False,
    exif: bool = True,
    background: str = "white",
    fill: str = "black",
    max_pixels: int = MAX_PIXELS,
    on_error: OnError = "skip",
    max_rejects: int | float | str = "10%",
    num_workers: int | None = None,
    shard_size: int | None = None,
    timeout: float = 60.0,
    overwrite: bool = False,
    progress: bool | None = None,
    masks: str | Path | Sequence[str] | Mapping[str, str | Path] | None = None,
    arrays: Sequence[str] | Mapping[str, str | Path] | None = None,
    points: Sequence[str] | Mapping[str, str | int] | None = None,
    boxes: Mapping[str, int | str] | None = None,
    missing_masks: MissingMasks = "reject",
    mask_fill: int = 255,
    new_to: str | Path | None = None,
) -> BuildReport:
    """Decode every image of ``source`` once, into the memory map ``output`` and its index.

    ``source`` is a path or a URL (see `open_source` for what is read), a `Source` such as
    `Manifest`, or any map-style data set (see `DatasetSource`). ``output`` is a path that ends in
    ``.bin``. The index is written beside it, as ``.idx``.

    ``classes`` are the names of the classes, so that labels mean the same in several data sets: a
    list, a data set or its path, or a text file with one name a line. A class that is not among
    them is an error.

    Options for images:

    - ``size`` is the side of the stored images, or (height, width). The default is 256, and the
      size of its images for a data set of memload's.
    - ``fit``: ``"crop"`` covers the size and cuts evenly, to the bit like torchvision's Resize and
      CenterCrop. ``"squash"`` changes the aspect ratio. ``"pad"`` puts a margin of the color
      ``fill`` around the image.
    - ``interpolation`` is the filter of Pillow that resizes: ``"nearest"``, ``"box"``,
      ``"bilinear"``, ``"hamming"``, ``"bicubic"`` or ``"lanczos"``.
    - ``fast`` resizes only the part that is kept, and decodes a JPEG at 1/2, 1/4 or 1/8 of its size
      if that leaves at least twice the stored size.
    - ``mode``: ``"RGB"``, ``"L"`` (gray) or ``"I;16"``, which stores gray of up to 16 bits as
      uint16 ``(H, W, 1)``, with the values of the file. Colors become gray of 0 to 255 then.
    - ``background`` is the color behind transparent pixels. ``exif=False`` ignores the EXIF
      orientation. ``max_pixels`` rejects larger images before they take memory. ``decoder`` and
      ``strict`` say what decodes JPEGs, and whether damage that Pillow accepts rejects them. See
      `memload.building.decoders.Decoder`.

    ``mode="mask"`` is for masks that `memload.join` adds to images later. It stores ids
    ``(H, W, 1)`` as ``masks`` does, which is explained below. Of the options above, only ``size``,
    ``fit`` and ``max_pixels`` apply, and ``mask_fill`` is the id of a margin.

    ``mode="array"`` is for data sets whose samples are arrays ``(H, W)`` or ``(H, W, C)``, or
    tensors ``(C, H, W)``: uint8, uint16, int16, int32, float16 or float32 with any number of
    channels; and for folders and tables of .npy files of such arrays (``extensions=(".npy",)``).
    They are stored as they are, bit for bit. The first usable sample determines the shape and the
    type; samples that differ are rejected. The options above do not apply, except that
    ``size`` may repeat the arrays' own. In the statistics, unsigned integers count as fractions of
    their type's largest value, signed integers and floats as they are. Mean and std are left out if
    there are NaN or infinite values.

    Beside the images (see `open_source` for all forms that sources can have):

    - ``masks`` have an id for each pixel of their image. Give a folder of pictures that are named
      as the images are, or ``{name: folder}``, or for a map-style data set the names of entries. A
      mask is stored as ``out.mask.bin``, ``(N, H, W)``, and goes where its image goes: the same
      EXIF orientation, crop or margin, with nearest neighbor. Ids are palette indices or gray
      values as in the file. A mask with colors, as JPEG, or of another size than its image in its
      file, rejects the sample.
    - Pictures and arrays of 8 bits are stored as uint8, and those of 16 bits as uint16. The first
      usable mask determines the type, and later masks with larger ids are rejected. Arrays of other
      types, such as int64, the default of NumPy and torch, become uint8 if the ids of the first 32
      masks fit, else uint16. If only later ones need uint16, give masks of that type.
    - ``mask_fill`` is the id in the margin of ``fit="pad"``. A sample without a mask is rejected,
      or with ``missing_masks="fill"`` gets one of nothing but ``mask_fill``.
    - ``arrays`` are given in the same way: further pictures, or .npy files, one for each sample.
      They are stored as they are, as ``out.NAME.bin``. The first usable sample determines the shape
      and the type; samples that differ are rejected.
    - ``points`` and ``boxes`` name entries of a map-style data set, such as ``["landmarks"]`` and
      ``{"boxes": 100}``, with the largest number of boxes a sample. They are columns that move with
      the image. Points ``(k, 2)`` are x, y, and (0, 0) is the center of the top left pixel. Boxes
      ``(k, 4)`` are the edges x1, y1, x2, y2, so that the whole picture is (0, 0, W, H). They are
      clipped, and rows of NaN are no boxes. A sample with more boxes is rejected.

    ``new_to`` is the path of a data set. Only samples whose names it does not have are built, by
    default with its size and mode. If there are none, NothingNewError is raised. `memload.concat`
    puts both under one index.

    ``on_error="skip"`` lists images that cannot be used in ``out.rejects.csv`` and goes on.
    ``"raise"`` stops at the first. If more than ``max_rejects`` cannot be used, nothing is
    published, and the error shows the most frequent reasons. It is a share of all images, such as
    ``"10%"`` or ``0.1``, or a count if it is an integer.

    ``shard_size`` splits the pixels, and each other array, into files of at most that many bytes.
    ``progress`` shows a progress bar; by default, if stderr is a terminal or this is a notebook.
    Elsewhere the logger ``memload`` gets a line about every 30 seconds, of level INFO.

    ``num_workers`` processes convert the images, by default one per core. An image that crashes a
    worker, or takes longer than ``timeout`` seconds, is rejected. With 0, this process converts
    them, without that protection. The result does not depend on ``num_workers``.

    Blocks until the build is complete. If it is interrupted at any moment, the same call goes on
    where it stopped, and the result is the same to the byte. Images that were rejected are tried
    again then, changed files are converted again, and added and removed files are taken into
    account. An existing ``output`` is an error unless ``overwrite`` is true; even then it stays
    until the new one is complete.

    >>> memload.build("images/", "out.bin", size=224).samples
    1281167
    >>> memload.build("images/", "out.bin", masks="masks/", fit="pad").arrays
    (ArrayReport(name='mask', kind='mask', shape=(256, 256), dtype='uint8'),)

    Raises ValueError, SourceError, DependencyError and BuildError, and DecodeError if ``on_error``
    is ``"raise"``.
    """
    num_workers = available_cores() if num_workers is None else num_workers
    name, output = check_arguments(
        source,
        output,
        mode=mode,
        max_pixels=max_pixels,
        on_error=on_error,
        num_workers=num_workers,
        timeout=timeout,
        missing_masks=missing_masks,
        mask_fill=mask_fill,
        new_to=new_to,
    )
    image_options: dict[str, Any] = {
        "fit": fit,
        "interpolation": interpolation,
        "decoder": decoder,
        "fast": fast,
        "strict": strict,
        "exif": exif,
        "background": background,
        "fill": fill,
        "max_pixels": max_pixels,
    }
    source_options: dict[str, Any] = {
        "masks": masks,
        "arrays": arrays,
        "points": points,
        "boxes": boxes,
        "new_to": new_to,
    }
    limit = RejectLimit(max_rejects)
    source, settings = prepare(
        source,
        classes=classes,
        size=size,
        mode=mode,
        image_options=image_options,
        source_options=source_options,
        missing_masks=missing_masks,
        mask_fill=mask_fill,
        num_workers=num_workers,
        timeout=timeout,
    )
    workspace = Workspace(
        source, output, settings, name=name, shard_size=shard_size, overwrite=overwrite
    )
    for path in _data_sets_read(source, new_to):
        check_not_read(Index.open(path), output, workspace.arrays)
    return _run(workspace, limit, new_to, on_error, num_workers, timeout, progress)


def _run(
    workspace: Workspace,
    limit: RejectLimit,
    new_to: str | Path | None,
    on_error: OnError,
    num_workers: int,
    timeout: float,
    progress: bool | None,
) -> BuildReport:
    """Convert what is not done yet, and publish the data set. See `build` for the arguments."""
    source, settings = workspace.source, workspace.settings
    num_workers = min(num_workers, len(source))  # of more, some would have nothing to do
    started, converted, notes = time.perf_counter(), 0, list(source.notes)
    try:
        with workspace.opened() as index:
            if index is None:
                _check_finished_samples(workspace, num_workers, timeout)
                with _shared_files_noticed(workspace, num_workers):
                    converted = _convert(workspace, num_workers, timeout, on_error, progress)
                index = _complete(workspace, limit)
            if new_to is not None:
                notes += different_settings(new_to, settings.as_dict())
            notes += [*_notes(workspace), *_label_notes(index), *_id_notes(index)]
            publish(index, workspace.folder, workspace.output, workspace.overwrite)
            workspace.remove()
    except OSError as error:
        raise _system_error(workspace.name, error) from error
    seconds = time.perf_counter() - started
    return _report(workspace, index, converted, seconds, num_workers, notes)


def _data_sets_read(source: Source, new_to: str | Path | None) -> Iterator[str | Path]:
    """Yield the paths of the data sets of memload's that a build depends on."""
    if new_to is not None:
        yield new_to
    existing = unwrapped(source)
    if isinstance(existing, ExistingDataset):
        yield existing.path


def _system_error(output: Path, error: OSError) -> BuildError:
    """Return the error for a call of the system that failed: a lack of something, or writing."""
    goes_on = "then run the same command again: it goes on where it stopped."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        text = f"too many files are open ({error}). Raise that limit (ulimit -n), {goes_on}"
    elif error.errno in (errno.EAGAIN, errno.ENOMEM):
        text = f"the system has no memory or processes left ({error}). Free some, {goes_on}"
    else:
        text = f"cannot be written: {error}. Make room or mend that, {goes_on}"
    return BuildError(f"{output}: {text}", path=output)


def _check_finished_samples(workspace: Workspace, num_workers: int, timeout: float) -> None:
    """Convert up to eight finished samples again. Raises BuildError if one of them has changed.

    This is for samples without a file. The state of a file shows a change.
    """
    if not workspace.resumed:
        return
    records = workspace.journal.mapped()
    rows = np.flatnonzero((records["status"] == DONE) & (records["file_state"][:, 0] < 0))
    rows = rows[np.linspace(0, len(rows) - 1, min(8, len(rows))).round().astype(int)]
    chunks = [Chunk(row, row + 1) for row in rows.tolist() if is_intact(records[row])]
    if chunks:
        make = functools.partial(SampleCheck, workspace, in_worker=num_workers > 0)
        list(run(make, iter(chunks), num_workers=min(num_workers, 1), timeout=timeout))


def _convert(
    workspace: Workspace,
    num_workers: int,
    timeout: float,
    on_error: OnError,
    is_shown: bool | None,
) -> int:
    """Convert all rows that are not done; return how many they were."""
    rows = len(workspace.source)
    results = run(
        functools.partial(RowWork, workspace, in_worker=num_workers > 0),
        _chunks(workspace.source, num_workers),
        num_workers=num_workers,
        timeout=timeout,
    )
    converted = rejected = 0
    with (
        contextlib.closing(results),
        warnings.catch_warnings(),
        progress_display(str(workspace.name), rows, is_shown) as show,
    ):
        warnings.filterwarnings("ignore", module=r"PIL\.")  # as errors they would reject pictures
        for chunk, outcome in results:
            converted += outcome.converted
            rejected += len(outcome.rejects)
            show(chunk.stop - chunk.start, rejected)
            if outcome.rejects and on_error == "raise":
                _raise_reject(workspace.source, *outcome.rejects[0])
    return converted


@contextlib.contextmanager
def _shared_files_noticed(workspace: Workspace, num_workers: int) -> Iterator[None]:
    """Raise BuildError, and keep nothing, if workers have moved the position in an open file."""
    is_checked = num_workers > 0 and runs_user_code(workspace.source)
    before = positions() if is_checked else {}
    yield
    try:
        check_positions(before)
    except BuildError:
        workspace.remove()  # samples may be mixed up, which no checksum would show
        raise


def _chunks(source: Source, num_workers: int) -> Iterator[Chunk]:
    """Yield chunks of rows, so many that all workers are done at about the same time.

    Rows that a source reads together, such as a row group of a Parquet file, stay in one chunk if
    they are not too many. Otherwise every worker would read the whole group.
    """
    rows = len(source)
    largest = max(1, rows // (4 * max(1, num_workers)))
    size = min(_CHUNK_ROWS, largest)
    groups: Sequence[int] = optional(source).group_starts or (0, rows)
    start = 0
    for end in groups[1:]:
        if end - start > min(largest, _MAX_GROUP_ROWS):
            for first in range(start, end, size):
                yield Chunk(first, min(first + size, end))
        elif end - start >= size or end == rows:
            yield Chunk(start, end)
        else:  # a small group joins the next one
            continue
        start = end


def _raise_reject(source: Source, row: int, reason: str) -> None:
    key, root = source.keys[row], optional(source).root
    what = "that sample" if root is None else f"{root}/{key}"
    raise DecodeError(
        f"{reason}. Mend or remove {what} and build again, or leave such samples out with "
        "--on-error skip (on_error='skip' in Python).",
        key=key,
    )


def _complete(workspace: Workspace, limit: RejectLimit) -> Index:
    """Write and return the index and the ledger of a build whose rows are all converted.

    Raises BuildError if more are rejected than ``limit`` allows.
    """
    records = workspace.journal.mapped()
    used = np.flatnonzero(records["status"] == DONE)
    reasons = workspace.journal.reasons()
    rejected = {row: reasons[row] for row in np.flatnonzero(records["status"] == REJECTED).tolist()}
    frequent = frequent_reasons(rejected, workspace.source.keys)
    if not used.size:
        workspace.remove()
        noun = _noun(workspace.source)
        none = f"none of {len(records):,} {noun} can"
        if len(records) == 1:
            none = f"the only one of the {noun} cannot"
        options = ", and --root, --path-column and --extension" * _is_table(workspace.source)
        raise BuildError(
            f"{workspace.name}: {none} be used: {frequent}. Check the {noun}{options}.",
            path=workspace.output,
        )
    if not limit.allows(len(rejected), len(records)):
        share = sufficient_limit(len(rejected), len(records))
        raise BuildError(
            f"{workspace.name}: {len(rejected):,} of {len(records):,} {_noun(workspace.source)} "
            f"cannot be used, and at most {limit} may be rejected: {frequent}. "
            f"{workspace.write_ledger(rejected)} lists all. Mend them, or leave them out with "
            f"--max-rejects {share} (max_rejects='{share}' in Python). Then run the same command "
            "again: it goes on from what is done. If you change other settings, add --overwrite "
            "(overwrite=True).",
            path=workspace.output,
        )
    return workspace.complete(_make_index(workspace, records, used), rejected)


def _noun(source: Source) -> str:
    """Return what messages call the samples of a source."""
    root = optional(source).root
    return "samples" if root is None else f"pictures in {root}"


def _is_table(source: Source) -> bool:
    source = unwrapped(source)
    is_remote = isinstance(source, RemoteFiles) and not isinstance(source, RemoteFolder)
    return isinstance(source, Manifest) or is_remote


def _make_index(workspace: Workspace, records: np.ndarray, used: np.ndarray) -> Index:
    from memload import __version__

    source = workspace.source
    columns = {
        name: np.ascontiguousarray(records[f"column/{name}"][used]) for name in source.schema
    }
    classes = None if source.classes is None else tuple(source.classes)
    facts = statistics(records, used, workspace.arrays[0])
    masks = [array.name for array in workspace.settings.extra_arrays if array.bitmap_size]
    if masks:
        facts["mask_ids"] = {name: mask_ids(records, used, name) for name in masks}
    if classes is not None:
        facts["class_counts"] = class_counts(columns["label"], len(classes))
    return Index(
        path=workspace.index_path,
        arrays=workspace.arrays,
        row=used.astype(np.int64),
        flags=np.ascontiguousarray(records["flags"][used]),
        keys=workspace.keys.take(used),
        columns=columns,
        crc32={
            array.name: np.ascontiguousarray(records[crc32_field(array.name)])
            for array in workspace.arrays
        },
        classes=classes,
        points=tuple(name for name, column in source.schema.items() if column.points),
        boxes=tuple(names_of_boxes(source.schema)),
        categories={name: tuple(texts) for name, texts in optional(source).categories.items()},
        build={
            "memload": __version__,
            "settings": workspace.settings.as_dict(),
            "libraries": workspace.libraries,
            "records": len(records),
            "rejected": len(records) - len(used),
        },
        statistics=facts,
    )


def _notes(workspace: Workspace) -> Iterator[str]:
    """Yield the notes on all pictures, including those that were converted by an earlier call."""
    settings = workspace.settings
    workspace.journal.create()  # at full size, should the records be damaged
    records = workspace.journal.mapped()
    if not isinstance(settings, ArraySettings):
        yield from size_notes(records, settings.size)
    if isinstance(settings, Settings):
        yield from picture_notes(records, settings.size, settings.background)
    yield from box_notes(records, names_of_boxes(workspace.source.schema))
    yield from missing_notes(records, settings.extra_arrays, workspace.keys)


def _label_notes(index: Index) -> Iterator[str]:
    """Yield a note if labels do not number classes."""
    labels = index.columns.get("label")
    if index.classes is not None or labels is None or labels.ndim != 1 or not labels.size:
        return
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        kind = "below 0" if labels.dtype.kind in "iu" else "no integers"
        yield f"some labels are {kind}, so num_classes is not known"


def _id_notes(index: Index) -> Iterator[str]:
    """Yield a note for each mask of black and white: white is what most losses leave out."""
    for name, ids in index.statistics.get("mask_ids", {}).items():
        if ids == [0, 255]:
            yield (
                f"{name} has only the ids 0 and 255, and 255 usually does not count "
                "(ignore_index=255). If it is the foreground, store 1 instead"
            )


def _label_range(index: Index) -> tuple[float, float] | None:
    """Return the least and greatest label, if each sample has one number."""
    labels = index.columns.get("label")
    if labels is None or labels.ndim != 1:
        return None
    labels = labels[np.isfinite(labels)]
    return (labels.min().item(), labels.max().item()) if labels.size else None


def _report(
    workspace: Workspace,
    index: Index,
    converted: int,
    seconds: float,
    num_workers: int,
    notes: Sequence[str],
) -> BuildReport:
    rejected = index.image.rows - len(index)
    return BuildReport(
        path=workspace.name,
        samples=len(index),
        classes=index.classes,
        label_range=_label_range(index),
        columns=tuple(index.columns),
        rejected=rejected,
        bytes=index.data_bytes,
        shape=workspace.settings.shape,
        dtype=np.dtype(index.image.descr).name,
        converted=converted,
        seconds=seconds,
        num_workers=num_workers,
        libraries=index.build["libraries"],
        notes=tuple(notes),
        ledger=output_paths(workspace.name)[2] if rejected else None,
        arrays=tuple(
            ArrayReport(array.name, array.kind, array.shape, np.dtype(array.descr).name)
            for array in index.arrays
            if array.kind != "image"
        ),
    )
