"""The conversion of a source into a data set: `build`, from its arguments to its report."""

import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Literal

from memload.building.checks import check_executor, checked_part
from memload.building.completion import all_notes, complete, report_on
from memload.building.decoders import MAX_PIXELS, Mode
from memload.building.destination import check_not_read, publish
from memload.building.extra_arrays import MissingMasks
from memload.building.file_systems import check_file_system
from memload.building.parts.build import build_in_parts
from memload.building.parts.workspace import is_in_parts
from memload.building.progress import progress as progress_display
from memload.building.report import BuildReport
from memload.building.request import Request, request_of
from memload.building.resizing import Fit, Interpolation
from memload.building.rows import OnError, convert_rows
from memload.building.sole import SoleWorkspace
from memload.building.sources.record import Source
from memload.building.system_errors import system_error
from memload.building.workspace import arrays_of, remove
from memload.building.writer import rows_per_shard
from memload.machine import available_cores
from memload.storage.index import Index


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
    shard_size: int | str | None = None,
    part: tuple[int, int] | None = None,
    executor: Executor | None = None,
    lock_timeout: float = 150.0,
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

    ``shard_size`` splits the pixels, and each other array, into files of at most that many bytes,
    such as ``"4GB"``.
    ``progress`` shows a progress bar; by default, if stderr is a terminal or this is a notebook.
    Elsewhere the logger ``memload`` gets a line about every 30 seconds, of level INFO.

    ``num_workers`` processes convert the images, by default one per core. An image that crashes a
    worker, or takes longer than ``timeout`` seconds, is rejected. With 0, this process converts
    them, without that protection. The result does not depend on ``num_workers``.

    Several machines can share a build that is split into shards, if all of them see ``source`` and
    ``output`` under the same paths:

    - ``part=(i, n)`` builds the shards i, i + n, i + 2n and so on. Call it for each i from 0 to
      n - 1 on any machine, at once or in turn, with the same options and versions. The part that
      ends last publishes the data set. Before that, ``is_published`` of the report is false, and
      ``str()`` of it says which parts are not done. If another part has published it already,
      nothing is converted, even with ``overwrite``.
    - A part may be called again at any time, and goes on where it stopped. n may differ from call
      to call. Without ``part``, all that is left is built. The source is listed once: samples that
      are added later are not taken in. Without ``shard_size``, each part gets at least four shards.
    - ``executor`` is any `concurrent.futures.Executor`, such as Dask's. It gets a task for each
      shard. ``num_workers`` is that of a task then, by default 0. If tasks fail, the others end
      first, and BuildError has the first reasons.
    - ``lock_timeout``: a process that works on what this call needs is waited for. If it gives no
      sign of life for that many seconds, BuildError is raised.

    Blocks until the build, or the part, is complete. If it is interrupted at any moment, the same
    call goes on where it stopped, and the result is the same to the byte. Images that were rejected
    are tried again then, changed files are converted again, and added and removed files are taken
    into account. A build in parts looks again only at shards that are not done. An existing
    ``output`` is an error unless ``overwrite`` is true; even then it stays until the new one is
    complete. An unfinished build in parts is never discarded: delete its folder to begin anew.

    >>> memload.build("images/", "out.bin", size=224).samples
    1281167
    >>> memload.build("images/", "out.bin", masks="masks/", fit="pad").arrays
    (ArrayReport(name='mask', kind='mask', shape=(256, 256), dtype='uint8'),)
    >>> memload.build("images/", "out.bin", shard_size="4GB", part=(0, 8)).is_published
    False

    Raises ValueError, SourceError, DependencyError and BuildError, and DecodeError if ``on_error``
    is ``"raise"``.
    """
    part = checked_part(part)
    check_executor(executor, part, shard_size)
    if num_workers is None:
        num_workers = available_cores() if executor is None else 0
    request = request_of(
        source,
        output,
        source_options={
            "masks": masks,
            "arrays": arrays,
            "points": points,
            "boxes": boxes,
            "new_to": new_to,
        },
        size=size,
        fit=fit,
        interpolation=interpolation,
        mode=mode,
        classes=classes,
        decoder=decoder,
        fast=fast,
        strict=strict,
        exif=exif,
        background=background,
        fill=fill,
        max_pixels=max_pixels,
        on_error=on_error,
        max_rejects=max_rejects,
        num_workers=num_workers,
        shard_size=shard_size,
        lock_timeout=lock_timeout,
        timeout=timeout,
        overwrite=overwrite,
        progress=progress,
        missing_masks=missing_masks,
        mask_fill=mask_fill,
    )
    try:
        if part is None and executor is None and not is_in_parts(request.folder):
            return _build_alone(request)
        return build_in_parts(request, part, executor)
    except OSError as error:
        raise system_error(request.name, error) from error


def _build_alone(request: Request) -> BuildReport:
    """Convert what is not done yet, and publish the data set."""
    check_file_system(request.output.parent, in_parts=False)
    source = request.preparation.open()
    settings = request.preparation.settings(source)
    workspace = SoleWorkspace(
        source,
        request.output,
        settings,
        name=request.name,
        rows_per_shard=rows_per_shard(arrays_of(settings), request.shard_size),
        overwrite=request.overwrite,
    )
    for path in request.data_sets_read(source):
        check_not_read(Index.open(path), request.output, workspace.arrays)
    # Of more workers, some would have nothing to do.
    num_workers = min(request.num_workers, len(source))
    started, converted = time.perf_counter(), 0
    with workspace.opened(request.lock_timeout) as index:
        if index is None:
            name, rows = str(request.name), len(source)
            with progress_display(name, rows, request.progress) as show:
                converted = convert_rows(
                    workspace.target(),
                    num_workers=num_workers,
                    timeout=request.timeout,
                    on_error=request.on_error,
                    show=show,
                    discard=functools.partial(remove, request.output),
                )
            index = complete(workspace, request.limit)
        notes = all_notes(workspace, index, request.new_to)
        publish(index, workspace.folder, request.output, request.overwrite)
        remove(request.output)
    return report_on(
        request.name,
        index,
        converted=converted,
        seconds=time.perf_counter() - started,
        num_workers=num_workers,
        notes=notes,
    )
