"""The conversion of a source into a data set: `build`, from its arguments to its report."""

import logging
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from memload.building.conversion import Conversion
from memload.building.decoders import Mode
from memload.building.options import Options
from memload.building.plan import check_same, differences, plan_of, read_plan, seed_of, write_once
from memload.building.progress import Show
from memload.building.progress import progress as progress_display
from memload.building.publish import (
    check_not_read,
    check_output,
    has_index,
    make_index,
    publish,
    publishing,
    remove_leftovers,
    write_ledger,
)
from memload.building.record import record_type
from memload.building.report import ArrayReport, BuildReport
from memload.building.resizing import Fit, Interpolation
from memload.building.rows import compare_rows, convert_rows
from memload.building.settings import Settings
from memload.building.shard import PLAN, Shard, shards_of
from memload.building.summary import allowed_rejects, frequent_reasons, notes_on
from memload.errors import BuildError, DecodeError, FormatError, MemloadError, describe_error
from memload.sources.contents import MAX_PIXELS
from memload.sources.samples import Source
from memload.storage.format import output_paths
from memload.storage.index import Array, Index
from memload.storage.keys import Keys
from memload.storage.shards import check_files, describe
from memload.wording import counted, listed, size_text

if TYPE_CHECKING:
    from concurrent.futures import Executor

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
    executor: "Executor | None" = None,
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
            memload's keeps its own: then its rows are stored as they are, and the new index keeps
            what its index knows of how they were made.
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
            A part that comes later says so.
        executor: Any `concurrent.futures.Executor`, such as Dask's. It gets one call for each
            shard. ``num_workers`` is that of a call then, by default 0.
        overwrite: Replace the data set that is there, once the new one is complete. Call each part
            once then: after the last one, a further call would begin anew.
        progress: Whether to show a bar. The default: if stderr is a terminal or this is a notebook.
            Otherwise the logger ``memload`` gets a line every 30 seconds.
        image: The column of the images, or a template for a table's, such as
            ``"train_images/{image_id}.jpg"``. `memload.open_source` explains this and the other
            options for reading, and which sources have them.
        label: The column or entry of the labels. For an .npy file, another one.
        where: Reads only the samples with these values: of a table, Parquet, tars, Hugging Face's
            or a memload data set.
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
    options = Options(**locals())
    try:
        return _build(options) if executor is None else _build_with(options)
    except MemloadError:  # some are OSErrors, too
        raise
    except OSError as error:
        raise BuildError(
            f"{output} cannot be built: {error}. Make room, or free memory or open files, then run "
            "the same command again: it goes on where it stopped.",
            path=output,
        ) from error


def _build(options: Options) -> BuildReport:
    """Build the shards of this call. Publish the data set if all are done."""
    started, output = time.perf_counter(), options.output
    index_path, folder, _ = output_paths(output)
    remove_leftovers(output)
    is_published = index_path.exists() and not (folder / PLAN).exists() and not options.overwrite
    if is_published and options.part is not None:
        _check_published(options)
        return _published_report(options)
    work = _begin(options)
    if work is None:
        _check_published(options)
        return _published_report(options)
    converted, notes = _build_shards(work), work.source.notes
    with publishing(folder) as is_left:  # no: another process ended last and has published
        unfinished = sum(not shard.is_done for shard in work.shards) if is_left else 0
        if is_left and not unfinished:
            notes = _complete(work)
            publish(output, options.overwrite)
    facts = {
        "converted": converted,
        "seconds": time.perf_counter() - started,
        "notes": tuple(notes),
    }
    if not unfinished:
        return _published_report(options, **facts)
    return _report(
        options,
        work.arrays,
        samples=0,
        classes=work.source.classes,
        columns=tuple(work.source.schema),
        rejected=sum(len(shard.reasons()) for shard in work.own_shards),
        libraries=work.settings.libraries(),
        unfinished_shards=unfinished,
        **facts,
    )


def _check_published(options: Options) -> None:
    """Raise BuildError if a data set was built with other settings, or from fewer or more samples.

    A part that comes late takes it for that of the other parts.
    """
    index, source = Index.open(output_paths(options.output)[0]), options.open_source()
    before = {**index.build.get("settings", {}), "samples": index.image.rows}
    now = {**options.settings(source).as_dict(), "samples": len(source)}
    if texts := [*differences(before, now)]:
        raise BuildError(
            f"{options.output} exists already, and is something else: {'; '.join(texts)}. Choose "
            "another output, or say --overwrite.",
            path=options.output,
        )


@dataclass(frozen=True)
class _Work:
    """A build whose source is open and whose plan is in its folder."""

    options: Options
    source: Source
    settings: Settings
    keys: Keys
    arrays: Sequence[Array]
    shards: Sequence[Shard]
    own_shards: Sequence[Shard]  #: those of this call
    is_resumed: bool

    @property
    def folder(self) -> Path:
        """The folder of the unfinished build."""
        return output_paths(self.options.output)[1]

    @property
    def conversion(self) -> Conversion:
        """How samples become rows."""
        return Conversion(self.source, self.settings, self.options)


def _begin(options: Options) -> _Work | None:
    """Open the source. Begin a build, or go on with the one in the folder if it is the same.

    Returns None if other parts have published it while this one opened the source.
    """
    output = options.output
    _, folder, _ = output_paths(output)
    former = read_plan(folder)
    source = options.open_source()
    if former is not None and read_plan(folder) is None and not options.overwrite:
        return None
    settings = options.settings(source)
    for read in options.data_sets_read(source):
        check_not_read(read, output)
    keys = source.keys
    arrays = options.array_files(settings, len(keys))
    plan = plan_of(source, settings, keys, arrays[0].shards[0].rows)
    if former not in (None, plan) and has_index(output):
        with publishing(folder) as is_left:  # it was killed while it renamed files
            if is_left:
                publish(output, options.overwrite)
        former = None
    if former is not None:
        check_same(folder, former, plan)
    extra_arrays = [array.name for array in settings.extra_arrays]
    dtype = record_type(settings.channels, source.schema, settings.descr, extra_arrays)
    shards = shards_of(folder, arrays, dtype, seed_of(plan))
    number, count = options.part or (0, 1)
    own = shards[number::count]
    work = _Work(options, source, settings, keys, arrays, shards, own, former is not None)
    if not has_index(output):
        files = [file.file for array in arrays for file in array.shards]
        check_output(output, files, options.overwrite)
        _check_space(work)
    if former is None:
        folder.mkdir(exist_ok=True)
        write_once(folder, plan)
        check_same(folder, read_plan(folder) or plan, plan)  # another process may have been first
    return work


def _check_space(work: _Work) -> None:
    """Raise BuildError if the disk has no room for what is left to write by this call."""
    needed, output = 0, work.options.output
    for array in (array for shard in work.own_shards for array in shard.arrays):
        path = work.folder / array.shards[0].file
        needed += array.data_bytes - (path.stat().st_blocks * 512 if path.exists() else 0)
    free = shutil.disk_usage(output.parent).free
    if needed > free:
        raise BuildError(
            f"{output}: the disk is too small: {size_text(needed)} are needed, but "
            f"{size_text(free)} are free. Make room, or choose a smaller --size or another disk.",
            path=output,
        )
    image = work.arrays[0]
    rows = describe((sum(shard.rows for shard in work.own_shards), *image.shape), image.descr)
    logger.info(f"{output}: {rows}, {size_text(needed)}; {size_text(free)} free on the disk")


def _build_shards(work: _Work) -> int:
    """Convert what is not done of the shards of this call. Return how many rows that were.

    Shards that another process is at come last. Raises BuildError if it keeps them.
    """
    if has_index(work.options.output):
        return 0
    if work.is_resumed:
        _go_on(work)
    left = [shard for shard in work.own_shards if not shard.is_done]
    rows, converted = sum(shard.rows for shard in left), 0
    with progress_display(str(work.options.output), rows, work.options.progress) as show:
        for seconds in (0.0, _LOCK_SECONDS):
            deadline = time.monotonic() + seconds
            for shard in left:
                converted += _build_shard(work, shard, deadline, show)
            left = [shard for shard in left if not shard.is_done]
    if left and (work.folder / PLAN).exists():
        raise BuildError(
            f"{work.folder}: another process is building shard "
            f"{listed((shard.number for shard in left), 5)}. Run the same command again when that "
            "has ended.",
            path=work.options.output,
        )
    return converted


def _go_on(work: _Work) -> None:
    """See whether finished rows would be the same now. Let rejected ones be tried again."""
    options = work.options
    if difference := compare_rows(work.conversion, work.own_shards):
        raise BuildError(
            f"{work.folder} holds an unfinished build of something else: {difference}. Give "
            "the same source to go on with it, or delete that folder to begin anew.",
            path=options.output,
        )
    with publishing(work.folder) as is_left:
        for shard in work.own_shards if is_left else ():
            shard.reopen_rejected()
    logger.info(f"{options.output}: going on with an unfinished build")


def _build_shard(work: _Work, shard: Shard, deadline: float, show: Show) -> int:
    """Convert what is not done of a shard, unless another process is at it until the deadline."""
    converted = rejected = 0
    options = work.options
    stops_at_first = not allowed_rejects(options.max_rejects, 1 << 40)
    with shard.locked(deadline) as is_ours:
        if not is_ours:
            return 0
        for chunk, result in convert_rows(work.conversion, shard):
            converted += result.converted
            rejected += len(result.rejects)
            show(chunk.stop - chunk.start, rejected)
            if result.rejects and stops_at_first:
                row, reason = result.rejects[0]
                raise DecodeError(
                    f"{reason}. Mend or remove that sample and build again, or allow for such "
                    "samples with --max-rejects",
                    key=work.source.keys[row],
                )
        shard.finish()
    return converted


def _complete(work: _Work) -> list[str]:
    """Write the index of all shards, and the list of rejected samples. Return the notes.

    Raises BuildError if too many samples are rejected, or all. Hold `publishing` meanwhile.
    """
    options, source, settings = work.options, work.source, work.settings
    index_path, folder, ledger = output_paths(options.output)
    found = [shard.records() for shard in work.shards]
    for shard, records in zip(work.shards, found, strict=True):
        if not records["status"].all():
            raise BuildError(
                f"{shard.done} is damaged. Delete it, then run the same command again: it builds "
                "that shard again.",
                path=shard.done,
            )
    records = found[0] if len(found) == 1 else np.concatenate(found)
    if not has_index(options.output):
        reasons = {row: reason for shard in work.shards for row, reason in shard.reasons().items()}
        write_ledger(folder / ledger.name, source.keys, reasons)
        _check_rejects(work, reasons)
        index = make_index(source, settings, work.arrays, index_path, work.keys, records)
        try:
            check_files(replace(index, path=folder / index_path.name))
        except FormatError as error:
            raise BuildError(
                f"{error} Shards were damaged after they were done. Delete {folder}, then run the "
                "same command again.",
                path=folder,
            ) from error
        index.write(folder / index_path.name)
    notes = [*source.notes, *options.notes(settings)]
    return [*notes, *notes_on(records, settings, source.schema, work.keys)]


def _check_rejects(work: _Work, reasons: Mapping[int, str]) -> None:
    limit, rejected, total = work.options.max_rejects, len(reasons), len(work.keys)
    if rejected <= allowed_rejects(limit, total) and rejected < total:
        return
    text = (
        f"{work.options.output}: {rejected:,} of {total:,} samples cannot be used: "
        f"{frequent_reasons(reasons, work.source.keys)}."
    )
    if rejected == total:
        shutil.rmtree(work.folder, ignore_errors=True)
        raise BuildError(f"{text} Check them, and --root if their paths begin elsewhere.")
    share = f"{-(-100 * rejected // total)}%"
    raise BuildError(
        f"{text} At most {limit} may be rejected. "
        f"{work.folder / output_paths(work.options.output)[2].name} lists all. Mend them, or leave "
        f"them out with --max-rejects {share} (max_rejects='{share}' in Python). Then run the same "
        "command again: it goes on from what is done. If you change other options, delete "
        f"{work.folder} first.",
        path=work.options.output,
    )


# ---------------------------------------------------------------------------------------- executors


def _build_with(options: Options) -> BuildReport:
    """Have an executor build each shard as a part. Return the report on all.

    If calls fail, the others end first. Then BuildError is raised, which has the first reason.
    """
    started, work = time.perf_counter(), _begin(options)
    if work is None:
        return _published_report(options)
    count = len(work.shards)
    arguments = vars(options) | {"executor": None, "progress": False}
    arguments["output"] = options.output.absolute()  # in whatever folder the calls are made
    futures: list[Any] = []
    reports: list[BuildReport] = []
    failures: list[str] = []
    try:
        for number in range(count):
            part = arguments | {"part": (number, count)}
            futures.append(options.executor.submit(_build_part, part, uuid.uuid4().hex))
        for number, future in enumerate(futures):
            try:
                reports.append(future.result())
            except Exception as error:  # noqa: BLE001  # of the call, or of the executor
                failures.append(f"Shard {number}: {describe_error(error):.1000}")
    finally:  # after a Ctrl-C, calls that have not begun are given up
        for future in futures:
            future.cancel()
    if failures:
        raise BuildError(
            f"{options.output}: {len(failures):,} of {counted(count, 'shard')} failed. "
            f"{failures[0]} Run the same build again: it does only what is left.",
            path=options.output,
        )
    return replace(
        max(reports, key=lambda report: (report.is_published, len(report.notes))),
        path=options.output,
        converted=sum(report.converted for report in reports),
        seconds=time.perf_counter() - started,
        part=None,
    )


def _build_part(arguments: dict[str, Any], call: str) -> BuildReport:
    """Build one shard. ``call`` differs for each, since Dask keeps results of equal calls."""
    if not output_paths(arguments["output"])[1].exists():  # published, and this call is made again
        return _published_report(Options(**arguments))
    return build(**arguments)


# ------------------------------------------------------------------------------------------ reports


def _published_report(options: Options, **facts: Any) -> BuildReport:
    """Return the report of a build that is published."""
    index = Index.open(output_paths(options.output)[0])
    return _report(
        options,
        index.arrays,
        samples=len(index),
        classes=index.classes,
        columns=tuple(index.columns),
        rejected=index.image.rows - len(index),
        libraries=index.build.get("libraries", {}),
        **facts,
    )


def _report(options: Options, arrays: Sequence[Array], **facts: Any) -> BuildReport:
    image, *others = arrays
    return BuildReport(
        path=options.output,
        bytes=sum(array.data_bytes for array in arrays),
        shape=image.shape,
        dtype=np.dtype(image.descr).name,
        num_workers=min(options.num_workers, image.rows),
        part=options.part,
        arrays=tuple(
            ArrayReport(array.name, array.kind, array.shape, np.dtype(array.descr).name)
            for array in others
        ),
        **facts,
    )
