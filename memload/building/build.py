"""The conversion of a source into a data set: `build`, from its arguments to its report."""

import errno
import logging
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memload.building.conversion import AnySettings, Settings
from memload.building.decoders import Mode
from memload.building.options import Options, different_settings
from memload.building.plan import check_same, plan_of, read_plan, seed_of, write_once
from memload.building.progress import Show
from memload.building.progress import progress as progress_display
from memload.building.publish import (
    check_not_read,
    check_output,
    is_partly_published,
    make_index,
    publish,
    publishing,
    remove_leftovers,
    write_ledger,
)
from memload.building.record import record_type
from memload.building.report import ArrayReport, BuildReport
from memload.building.resizing import Fit, Interpolation
from memload.building.rows import Conversion, compare_rows, convert_rows
from memload.building.shard import PLAN, Shard, rows_per_shard, with_shards
from memload.building.summary import (
    array_notes,
    box_notes,
    frequent_reasons,
    picture_notes,
    sufficient_limit,
)
from memload.errors import BuildError, DecodeError, MemloadError, describe_error
from memload.sources.contents import MAX_PIXELS
from memload.sources.samples import Source
from memload.storage.format import output_paths
from memload.storage.index import Array, Index
from memload.storage.keys import Keys
from memload.storage.shards import describe
from memload.wording import counted, listed, size_text

logger = logging.getLogger("memload")

#: The workers of a build that was killed may keep its lock for a moment.
_LOCK_SECONDS = 5.0


def build(
    source: Any,
    output: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    fit: Fit = "crop",
    interpolation: Interpolation = "bilinear",
    mode: Mode | Literal["array"] | None = None,
    classes: Any = None,
    decoder: Literal["pillow", "jpeg4py"] = "pillow",
    fast: bool = False,
    exif: bool = True,
    background: str = "white",
    fill: str = "black",
    max_pixels: int = MAX_PIXELS,
    max_rejects: int | float | str = "10%",
    num_workers: int | None = None,
    timeout: float = 60.0,
    shard_size: int | str | None = None,
    part: tuple[int, int] | None = None,
    executor: Executor | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    image: str | None = None,
    label: str | Path | None = None,
    where: Mapping[str, Any] | None = None,
    root: str | Path | None = None,
    extensions: Sequence[str] | None = None,
    masks: str | Path | Sequence[str] | Mapping[str, str | Path] | None = None,
    arrays: Sequence[str] | Mapping[str, str | Path] | None = None,
    points: Sequence[str] | Mapping[str, str] | None = None,
    boxes: Sequence[str] | Mapping[str, str | int] | None = None,
    missing_masks: int | None = None,
    new_to: str | Path | None = None,
) -> BuildReport:
    """Decode every image of ``source`` once, into the memory map ``output`` and its index.

    Blocks until the build, or the part, is complete. If it is interrupted at any moment, run the
    same call again: it goes on where it stopped, and the result is the same to the byte. Images
    that were rejected are tried again then. If the source or an option has changed meanwhile, the
    call says what. Delete ``out.building`` to begin anew.

    Args:
        source: A path or a URL (a folder, a table, an archive, Parquet, an .npy file or a data set
            of memload's), or any map-style data set.
        output: A path that ends in ``.bin``. The index is written beside it, as ``.idx``.
        size: The side of the stored images, or (height, width). The default is 256. A data set of
            memload's keeps its own.
        fit: ``"crop"`` resizes the image until it covers the size, then cuts equal margins. The
            pixels equal torchvision's Resize and CenterCrop bit for bit. ``"squash"`` changes the
            aspect ratio. ``"pad"`` keeps the whole image, with a margin of the color ``fill``.
        interpolation: Pillow's filter: ``"nearest"``, ``"box"``, ``"bilinear"``, ``"hamming"``,
            ``"bicubic"`` or ``"lanczos"``.
        mode: ``"RGB"``, ``"L"`` (gray), ``"I;16"`` (gray of up to 16 bits, as the files have it),
            or ``"array"``, which stores arrays as they are. The default is ``"RGB"``, or
            ``"array"`` for an .npy file.
        classes: The names of the classes, so that labels mean the same in several data sets: a
            list, a data set or its path, or a text file with one name per line.
        decoder: What decodes JPEGs: ``"pillow"`` or ``"jpeg4py"``.
        fast: Decode a JPEG at 1/2, 1/4 or 1/8 of its size if that leaves at least twice the stored
            size.
        exif: Whether images are turned as their EXIF orientation says.
        background: The color behind transparent pixels.
        fill: The color of the margin of ``fit="pad"``.
        max_pixels: Larger images are rejected before they take memory.
        max_rejects: Publish nothing if more samples than this cannot be used: a share such as
            ``"10%"`` or ``0.1``, or a count. With 0, the build stops at the first.
        num_workers: How many processes convert the images. The default is one per core. With 0,
            this process converts them, and an image that crashes it or hangs is not caught.
        timeout: Give up on an image after this many seconds.
        shard_size: Split the pixels, and each other array, into files of at most that many bytes,
            such as ``"4GB"``.
        part: ``(i, n)`` builds the shards i, i + n, i + 2n and so on. Call it for each i from 0 to
            n - 1, at once or in turn, on any machines that see ``source`` and ``output``. Whoever
            ends last publishes the data set. Until then, ``is_published`` of the report is false.
        executor: Any `concurrent.futures.Executor`, such as Dask's. It gets one call for each
            shard. ``num_workers`` is that of a call then, by default 0.
        overwrite: Replace the data set that is there, once the new one is complete.
        progress: Whether to show a bar. The default: if stderr is a terminal or this is a notebook.
            Otherwise the logger ``memload`` gets a line every 30 seconds.
        image: The column of the images, or a template for a table's, such as
            ``"train_images/{image_id}.jpg"``. `memload.open_source` explains this and the other
            options for reading, and which sources have them.
        label: The column or entry of the labels. For an .npy file, another one.
        where: Reads only lines of a table, or samples of a memload data set, with these values.
        root: The folder or URL that the paths of a table are relative to.
        extensions: The extensions of images in a folder or a zip, such as ``[".jpg", ".gif"]``.
        masks: A folder of pictures or .npy files that are named as the images are, or ``{name:
            folder, column or template}``; for a map-style data set, the names of entries. A mask
            has an id for each pixel, uint8 or uint16, and goes where its image goes, with nearest
            neighbor. It is stored as ``out.mask.bin``. Margins get the id 255.
        arrays: The same for further pictures or .npy files, which are stored as they are. All have
            the shape and type of the first.
        points: Columns of points ``(k, 2)``, by name: x, y, where (0, 0) is the center of the top
            left pixel. They move with the image.
        boxes: Columns of boxes ``(k, 4)``, by name: x1, y1, x2, y2 of the edges. They move with the
            image and are clipped. Rows of NaN are no boxes. For a map-style data set, with the most
            that a sample has, such as ``{"boxes": 100}``.
        missing_masks: The id of the whole mask of a sample that has none. None rejects it.
        new_to: A data set. Only samples whose names it does not have are built, by default with its
            size and mode. `memload.concat` puts both under one index.

    Returns:
        What was done. ``str()`` of it is a line.

    Raises:
        ValueError, TypeError: An argument is wrong.
        SourceError: The source cannot be read, or has no usable samples. NothingNewError is one.
        DependencyError: An optional library is missing.
        BuildError: The build cannot begin, go on or be published.
        DecodeError: An image cannot be used, with ``max_rejects=0``.

    >>> memload.build("images/", "out.bin", size=224).samples
    1281167
    >>> memload.build("images/", "out.bin", masks="masks/", fit="pad").arrays
    (ArrayReport(name='mask', kind='mask', shape=(256, 256), dtype='uint8'),)
    >>> memload.build("images/", "out.bin", shard_size="4GB", part=(0, 8)).is_published
    False
    """
    arguments = dict(locals())  # of this call, by name
    options = Options(**arguments)
    try:
        if executor is not None:
            return _build_with(options, arguments)
        return _build(options, Path(output))
    except MemloadError:  # some are OSErrors, too
        raise
    except OSError as error:
        raise _system_error(Path(output), error) from error


def _build(options: Options, name: Path) -> BuildReport:
    """Build the shards of this call. Publish the data set if all are done.

    ``name`` is what messages call the output.
    """
    started, output = time.perf_counter(), options.output
    index_path, folder, _ = output_paths(output)
    remove_leftovers(output)
    is_published = index_path.exists() and not folder.exists() and not options.overwrite
    if is_published and options.part is not None:
        return _report_on(Index.open(index_path), name, options)
    work = _begin(options, name)
    converted = 0
    if not is_partly_published(output):
        converted = _build_shards(work)
    with publishing(folder) as is_left:
        if not is_left:  # another process has ended last
            return _report_on(Index.open(index_path), name, options, converted=converted)
        unfinished = sum(not shard.is_done for shard in work.shards)
        notes: Sequence[str] = work.source.notes
        if not unfinished:
            notes = _complete(work)
            publish(output, options.overwrite)
    seconds = time.perf_counter() - started
    if unfinished:
        return _unfinished_report(work, unfinished, converted, seconds)
    index = Index.open(index_path)
    return _report_on(index, name, options, converted=converted, seconds=seconds, notes=notes)


@dataclass(frozen=True)
class _Work:
    """A build whose source is open and whose plan is in its folder."""

    options: Options
    name: Path
    source: Source
    settings: AnySettings
    keys: Keys
    arrays: Sequence[Array]
    shards: Sequence[Shard]
    is_resumed: bool

    @property
    def folder(self) -> Path:
        """The folder of the unfinished build."""
        return output_paths(self.options.output)[1]

    @property
    def own_shards(self) -> Sequence[Shard]:
        """The shards of this call."""
        number, count = self.options.part or (0, 1)
        return self.shards[number::count]

    @property
    def conversion(self) -> Conversion:
        """How its rows are converted. Of more workers, some would have nothing to do."""
        workers = min(self.options.num_workers, len(self.keys))
        prints = not self.options.is_of_files
        return Conversion(self.source, self.settings, workers, self.options.timeout, prints)


def _begin(options: Options, name: Path) -> _Work:
    """Open the source. Begin a build, or go on with the one in the folder if it is the same."""
    output = options.output
    _, folder, _ = output_paths(output)
    former = read_plan(folder) if folder.exists() else None
    source = options.open_source()
    settings = options.settings(source)
    keys = source.keys if isinstance(source.keys, Keys) else Keys.of(list(source.keys))
    arrays = [Array("image", settings.descr, settings.shape, ())]
    arrays += [
        Array(extra.name, extra.descr, extra.shape, (), extra.kind)
        for extra in settings.extra_arrays
    ]
    rows = rows_per_shard(arrays, options.shard_size, len(keys))
    arrays = [with_shards(array, output, len(keys), rows) for array in arrays]
    files = [file.file for array in arrays for file in array.shards]
    for read in options.data_sets_read(source):
        check_not_read(read, output, files)
    plan = plan_of(source, settings, keys, rows)
    if former is not None and former != plan and is_partly_published(output):
        with publishing(folder) as is_left:  # or there would be no data set until this one is built
            if is_left:
                publish(output, overwrite=True)
        former = None
    if former is not None:
        check_same(folder, former, plan)
    schema = source.schema
    dtype = record_type(settings.shape[2], schema, settings.descr, settings.extra_arrays)
    shards = list(_shards_of(folder, arrays, dtype, seed_of(plan)))
    work = _Work(options, name, source, settings, keys, arrays, shards, former is not None)
    if not is_partly_published(output):
        check_output(output, files, options.overwrite)
        _check_space(work)
    if former is None:
        folder.mkdir(exist_ok=True)
        write_once(folder, plan)
        check_same(folder, read_plan(folder) or plan, plan)  # another process may have been first
    return work


def _shards_of(
    folder: Path, arrays: Sequence[Array], dtype: np.dtype[Any], seed: int
) -> Sequence[Shard]:
    shards, start = [], 0
    for number, files in enumerate(zip(*(array.shards for array in arrays), strict=True)):
        own = [replace(array, shards=(file,)) for array, file in zip(arrays, files, strict=True)]
        shards.append(Shard(folder, number, start, own, dtype, seed))
        start += files[0].rows
    return shards


def _build_shards(work: _Work) -> int:
    """Convert what is not done of the shards of this call. Return how many rows that were.

    Shards that another process is at come last. Raises BuildError if it keeps them.
    """
    if work.is_resumed:
        _go_on(work)
    left = [shard for shard in work.own_shards if not shard.is_done]
    rows, converted = sum(shard.rows for shard in left), 0
    with progress_display(str(work.name), rows, work.options.progress) as show:
        for seconds in (0.0, _LOCK_SECONDS):
            deadline = time.monotonic() + seconds
            for shard in left:
                converted += _build_shard(work, shard, deadline, show)
            left = [shard for shard in left if not shard.is_done]
    if left and (work.folder / PLAN).exists():
        numbers = listed((shard.number for shard in left), 5)
        raise BuildError(
            f"{work.folder}: {'shard' if len(left) == 1 else 'shards'} {numbers} "
            f"{'is' if len(left) == 1 else 'are'} being built by another process. Run the same "
            "command again when that has ended.",
            path=work.options.output,
        )
    return converted


def _go_on(work: _Work) -> None:
    """See whether finished rows would be the same now. Let rejected ones be tried again."""
    if difference := compare_rows(work.conversion, work.own_shards):
        raise BuildError(
            f"{work.folder} holds an unfinished build of something else: {difference}. Give "
            "the same source to go on with it, or delete that folder to begin anew.",
            path=work.options.output,
        )
    with publishing(work.folder) as is_left:
        for shard in work.own_shards if is_left else ():
            shard.reopen_rejected()
    done = sum(len(shard.rows_done()) for shard in work.own_shards)
    if done:
        logger.info(f"{work.name}: going on with an unfinished build; {done:,} rows are done")


def _build_shard(work: _Work, shard: Shard, deadline: float, show: Show) -> int:
    """Convert what is not done of a shard, unless another process is at it until the deadline."""
    converted = rejected = 0
    with shard.locked(deadline) as is_ours:
        if not is_ours:
            return 0
        for chunk, result in convert_rows(work.conversion, shard):
            converted += result.converted
            rejected += len(result.rejects)
            show(chunk.stop - chunk.start, rejected)
            if result.rejects and work.options.max_rejects.is_none:
                raise _reject_error(work, *result.rejects[0])
        shard.finish()
    return converted


def _reject_error(work: _Work, row: int, reason: str) -> DecodeError:
    key, root = work.source.keys[row], getattr(work.source, "root", None)
    what = "that sample" if root is None else f"{root}/{key}"
    return DecodeError(
        f"{reason}. Mend or remove {what} and build again, or allow for such samples with "
        "--max-rejects",
        key=key,
    )


def _check_space(work: _Work) -> None:
    """Raise BuildError if the disk has no room for what is left to write by this call."""
    total = allocated = 0
    for array in (array for shard in work.own_shards for array in shard.arrays):
        total += array.data_bytes
        path = work.folder / array.shards[0].file
        if path.exists():
            allocated += path.stat().st_blocks * 512
    needed, free = total - allocated, shutil.disk_usage(work.options.output.parent).free
    image, *others = work.arrays
    rows = describe((sum(shard.rows for shard in work.own_shards), *image.shape), image.descr)
    if others:
        rows += f" with {', '.join(array.name for array in others)}"
    if needed > free:
        raise BuildError(
            f"{work.name}: the disk is too small: {rows} need {size_text(needed)}, but "
            f"{size_text(free)} are free. Make room, or choose a smaller --size or another disk.",
            path=work.options.output,
        )
    logger.info(f"{work.name}: {rows}, {size_text(total)}; {size_text(free)} free on the disk")


def _complete(work: _Work) -> list[str]:
    """Write the index of all shards, and the list of rejected samples. Return the notes.

    Raises BuildError if too many samples are rejected, or all. Hold `publishing` meanwhile.
    """
    index_path, folder, ledger = output_paths(work.options.output)
    found = [shard.records() for shard in work.shards]
    for shard, records in zip(work.shards, found, strict=True):
        if not records["status"].all():
            raise BuildError(
                f"{shard.done} is damaged. Delete it, then run the same command again: it builds "
                "that shard again.",
                path=shard.done,
            )
    records = found[0] if len(found) == 1 else np.concatenate(found)
    reasons = {row: reason for shard in work.shards for row, reason in shard.reasons().items()}
    if not is_partly_published(work.options.output):
        _check_rejects(work, reasons)
        write_ledger(folder / ledger.name, work.source.keys, reasons)
        settings, arrays = work.settings, work.arrays
        index = make_index(work.source, settings, arrays, index_path, work.keys, records)
        index.write(folder / index_path.name)
    return _notes(work, records)


def _check_rejects(work: _Work, reasons: Mapping[int, str]) -> None:
    limit, total, source = work.options.max_rejects, len(work.keys), work.source
    folder, ledger = work.folder, output_paths(work.options.output)[2]
    root = getattr(source, "root", None)
    noun = "samples" if root is None else f"pictures in {root}"
    frequent = frequent_reasons(reasons, source.keys)
    if len(reasons) == total:
        shutil.rmtree(folder, ignore_errors=True)
        none = (
            f"none of {total:,} {noun} can" if total > 1 else f"the only one of the {noun} cannot"
        )
        options = "" if root is None else ", and --root if their paths begin elsewhere"
        raise BuildError(
            f"{work.name}: {none} be used: {frequent}. Check the {noun}{options}.",
            path=work.options.output,
        )
    if not limit.allows(len(reasons), total):
        write_ledger(folder / ledger.name, source.keys, reasons)
        share = sufficient_limit(len(reasons), total)
        raise BuildError(
            f"{work.name}: {len(reasons):,} of {total:,} {noun} cannot be used, and at most "
            f"{limit} may be rejected: {frequent}. {folder / ledger.name} lists all. Mend them, or "
            f"leave them out with --max-rejects {share} (max_rejects='{share}' in Python). Then "
            "run the same command again: it goes on from what is done. If you change other "
            f"options, delete {folder} first.",
            path=work.options.output,
        )


def _notes(work: _Work, records: np.ndarray) -> list[str]:
    """Return the notes on the source and on all samples."""
    settings, options = work.settings, work.options
    notes = list(work.source.notes)
    if options.new_to is not None:
        notes += different_settings(options.new_to, settings.as_dict())
    if isinstance(settings, Settings):
        notes += picture_notes(records, settings.size, settings.background)
    notes += box_notes(records, work.source.schema)
    return [*notes, *array_notes(records, settings.extra_arrays, work.keys)]


# ---------------------------------------------------------------------------------------- executors


def _build_with(options: Options, arguments: Mapping[str, Any]) -> BuildReport:
    """Have an executor build each shard as a part. Return the report on all.

    If calls fail, the others end first. Then BuildError is raised, which has the first reason.
    """
    started, name = time.perf_counter(), Path(arguments["output"])
    work = _begin(options, name)
    given = dict(arguments)
    given.update(output=options.output, executor=None, progress=False)
    given.update(num_workers=options.num_workers, source=_from_root(options.source))
    count, futures = len(work.shards), dict[int, Future[BuildReport]]()
    failed: dict[int, BaseException] = {}
    try:
        for number in range(count):
            part = {**given, "part": (number, count)}
            futures[number] = options.executor.submit(_build_part, part, uuid.uuid4().hex)
        reports = []
        for number, future in futures.items():
            try:
                reports.append(future.result())
            except Exception as error:  # noqa: BLE001  # of the call, or of the executor
                failed[number] = error
    finally:  # after a Ctrl-C, calls that have not begun are given up
        for future in futures.values():
            future.cancel()
    if failed:
        number, first = next(iter(failed.items()))
        text = str(first) if isinstance(first, MemloadError) else describe_error(first)
        raise BuildError(
            f"{name}: {len(failed):,} of {counted(count, 'shard')} failed. Shard {number}: "
            f"{text:.1000} Run the same build again: it does only what is left.",
            path=options.output,
        )
    published = next((report for report in reports if report.is_published), None)
    if published is None:
        raise BuildError(
            f"{name}: all shards are done, but nobody has published them. Run the same build again."
        )
    return replace(
        published,
        path=name,
        ledger=output_paths(name)[2] if published.rejected else None,
        converted=sum(report.converted for report in reports),
        notes=max((report.notes for report in reports), key=len),
        seconds=time.perf_counter() - started,
        part=None,
    )


def _build_part(arguments: dict[str, Any], call: str) -> BuildReport:
    """Build one shard. ``call`` differs for each, since Dask keeps results of equal calls."""
    output = arguments["output"]
    if not output_paths(output)[1].exists():  # it was published, and this call is made again
        return _report_on(Index.open(output_paths(output)[0]), output, Options(**arguments))
    return build(**arguments)


def _from_root(source: Any) -> Any:
    """Return a source as a process elsewhere finds it, which may have another current folder."""
    if isinstance(source, (str, Path)) and os.path.exists(source):  # noqa: PTH110  # or a URL
        return os.path.abspath(source)  # noqa: PTH100
    return source


# ------------------------------------------------------------------------------------------ reports


def _report_on(
    index: Index,
    name: Path,
    options: Options,
    *,
    converted: int = 0,
    seconds: float = 0.0,
    notes: Sequence[str] = (),
) -> BuildReport:
    """Return the report of a build that is published. ``name`` is what the output is called."""
    image, rejected = index.image, index.image.rows - len(index)
    height, width, channels = image.shape
    return BuildReport(
        path=name,
        samples=len(index),
        classes=index.classes,
        label_range=_label_range(index),
        columns=tuple(index.columns),
        rejected=rejected,
        bytes=index.data_bytes,
        shape=(height, width, channels),
        dtype=np.dtype(image.descr).name,
        converted=converted,
        seconds=seconds,
        num_workers=min(options.num_workers, image.rows),
        libraries=index.build["libraries"],
        notes=tuple(notes),
        ledger=output_paths(name)[2] if rejected else None,
        arrays=_array_reports(index.arrays),
        part=options.part,
    )


def _unfinished_report(work: _Work, unfinished: int, converted: int, seconds: float) -> BuildReport:
    """Return the report of a part that leaves shards to others. There is no data set yet."""
    settings = work.settings
    return BuildReport(
        path=work.name,
        samples=0,
        classes=work.source.classes,
        label_range=None,
        columns=tuple(work.source.schema),
        rejected=sum(len(shard.reasons()) for shard in work.own_shards),
        bytes=sum(array.data_bytes for array in work.arrays),
        shape=settings.shape,
        dtype=np.dtype(settings.descr).name,
        converted=converted,
        seconds=seconds,
        num_workers=work.conversion.num_workers,
        libraries=settings.libraries(),
        notes=tuple(work.source.notes),
        ledger=None,
        arrays=_array_reports(work.arrays),
        part=work.options.part,
        unfinished_shards=unfinished,
    )


def _label_range(index: Index) -> tuple[float, float] | None:
    """Return the least and greatest label, if each sample has one number."""
    labels = index.columns.get("label")
    if labels is None or labels.ndim != 1:
        return None
    labels = labels[np.isfinite(labels)]
    return (labels.min().item(), labels.max().item()) if labels.size else None


def _array_reports(arrays: Sequence[Array]) -> tuple[ArrayReport, ...]:
    return tuple(
        ArrayReport(array.name, array.kind, array.shape, np.dtype(array.descr).name)
        for array in arrays
        if array.kind != "image"
    )


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
