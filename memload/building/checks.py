"""Wrong arguments and unusable sources, reported before anything is begun."""

import multiprocessing
import operator
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args

import numpy as np
from PIL import Image

from memload.building.conversion import Settings
from memload.building.decoders import Mode
from memload.building.extra_arrays import MissingMasks
from memload.building.sources.listed import Files
from memload.building.sources.opening import FilesToOpen
from memload.building.sources.record import Column, Source, optional
from memload.building.sources.remote import RemoteFiles
from memload.errors import BuildError, SourceError
from memload.storage.format import DESCRS_OF_COLUMNS, RESERVED, check_array_name, output_paths
from memload.storage.keys import Keys


def check_arguments(
    source: Any,
    output: str | Path,
    *,
    mode: str | None,
    max_pixels: int,
    on_error: str,
    num_workers: int,
    timeout: float,
    lock_timeout: float,
    missing_masks: str,
    mask_fill: int,
    new_to: str | Path | None,
) -> tuple[Path, Path]:
    """Return the output's path as it was given, and from the root, should the folder change.

    Raises ValueError for a wrong argument. Raises BuildError if the output's folder is missing, or
    if this process may not start workers.
    """
    output = Path(output)
    _check_output(source, output, new_to)
    _check_choices(mode, on_error, missing_masks)
    if not (isinstance(timeout, Real) and timeout > 0):
        raise ValueError(f"timeout: {timeout!r} is not above 0 seconds.")
    if not (isinstance(lock_timeout, Real) and lock_timeout >= 0):
        raise ValueError(f"lock_timeout: {lock_timeout!r} is not a number of seconds, 0 or more.")
    if not isinstance(mask_fill, int) or isinstance(mask_fill, bool) or not 0 <= mask_fill <= 65535:
        raise ValueError(f"mask_fill: {mask_fill!r} is no whole number from 0 to 65,535.")
    _check_workers(num_workers, max_pixels)
    return output, output.absolute()


def checked_part(part: Any) -> tuple[int, int] | None:
    """Return a part ``(i, n)``, or None. Raises ValueError for anything else."""
    if part is None:
        return None
    if isinstance(part, str) and part == "auto":
        raise ValueError(
            "part: 'auto' is known to the command only. Give (i, n), for example "
            "(int(os.environ['RANK']), int(os.environ['WORLD_SIZE']))."
        )
    try:
        number, count = _two_integers(part)
    except (TypeError, ValueError):
        raise ValueError(
            f"part: {part!r:.80} is not (i, n), two whole numbers such as (0, 8)."
        ) from None
    if problem := part_problem(number, count):
        raise ValueError(f"part: {problem}")
    return number, count


def part_problem(number: int, count: int) -> str:
    """Say why there is no part ``number`` of ``count``. Empty if there is."""
    if 0 <= number < count:
        return ""
    last = f": the last one is {count - 1} of {count}" if count > 0 else ", such as 0 of 8"
    return f"{number} of {count} does not exist. Parts are counted from 0{last}."


def check_executor(executor: Any, part: Any, shard_size: Any) -> None:
    """Raise ValueError or TypeError for an executor that cannot be used, or not with the rest."""
    if executor is None:
        return
    if part is not None:
        raise ValueError("part and executor: an executor builds all parts. Leave out one of them.")
    if isinstance(executor, type):
        raise TypeError(
            f"executor: {executor.__name__} is a class. Give an instance, such as "
            f"{executor.__name__}()."
        )
    if not callable(getattr(executor, "submit", None)):
        raise TypeError(
            f"executor: {type(executor).__name__} has no method submit(). Give a "
            "concurrent.futures.Executor, such as ProcessPoolExecutor() or "
            "client.get_executor() of Dask."
        )
    if shard_size is None:
        raise ValueError(
            "executor: each task builds a shard, so give shard_size, too, such as '4GB'."
        )


def _check_output(source: Any, output: Path, new_to: str | Path | None) -> None:
    files = FilesToOpen.of(source)
    source = files.names[0] if files is not None and len(files.names) == 1 else source
    is_path = isinstance(source, (str, Path))
    if output.suffix != ".bin" and is_path and Path(source).suffix == ".bin":
        raise ValueError(
            f"source and output: {str(source)!r} is to be read and {str(output)!r} written. Are "
            "they swapped?"
        )
    output_paths(output)
    _check_folder(output)
    if (
        new_to is not None
        and Path(new_to).with_suffix(".idx").resolve() == output.with_suffix(".idx").resolve()
    ):
        raise ValueError(
            f"new_to: {new_to} is the output itself, which would hold only what is new then. Name "
            "another output, and put both under one index with 'memload concat'."
        )


def _check_choices(mode: str | None, on_error: str, missing_masks: str) -> None:
    modes = (*get_args(Mode), "mask", "array")
    if mode is not None and mode not in modes:
        raise ValueError(f"mode: {mode!r} is not one of {', '.join(modes)}.")
    if on_error not in ("skip", "raise"):
        raise ValueError(f"on_error: {on_error!r} is neither 'skip' nor 'raise'.")
    if missing_masks not in get_args(MissingMasks):
        raise ValueError(f"missing_masks: {missing_masks!r} is neither 'reject' nor 'fill'.")


def _check_workers(num_workers: int, max_pixels: int) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    if not isinstance(num_workers, Integral):
        raise TypeError(f"num_workers: {num_workers!r} is no whole number.")
    if num_workers < 0:
        raise ValueError(f"num_workers: {num_workers} is negative.")
    if num_workers == 0 and limit is not None and max_pixels > 2 * limit:
        raise ValueError(
            f"max_pixels: {max_pixels:,} is too large for num_workers=0, because Pillow's own "
            f"limit of {2 * limit:,} applies in this process. Use workers, or raise "
            "PIL.Image.MAX_IMAGE_PIXELS."
        )
    check_may_start_workers(num_workers)


def check_may_start_workers(num_workers: int) -> None:
    """Raise BuildError if there are to be workers, and this process may not start any."""
    if num_workers > 0 and multiprocessing.current_process().daemon:
        raise BuildError(
            "Workers cannot be started here: this is a daemonic process, such as a worker of a "
            "DataLoader, of a Pool or of Dask. Use num_workers=0, which works everywhere. Workers "
            "of Dask may start processes with its setting distributed.worker.daemon: False, or as "
            "'dask worker --no-nanny'."
        )


def _check_folder(output: Path) -> None:
    try:
        is_folder, _ = output.parent.is_dir(), output.exists()
    except OSError as error:  # the path is too long, for example
        raise BuildError(
            f"{output}: nothing can be stored there: {error.strerror}. Choose another output.",
            path=output,
        ) from error
    if not is_folder:
        raise BuildError(
            f"{output.parent}: there is no such folder for the output. Make it first.", path=output
        )


def height_and_width(size: Any) -> tuple[int, int]:
    """Return a size given as a side or as (height, width). Raises ValueError."""
    sides = size if isinstance(size, Sequence) else (size, size)
    try:
        return _two_integers(sides)
    except (TypeError, ValueError):
        raise ValueError(
            f"size: {size!r} is neither a side nor (height, width), in whole pixels."
        ) from None


def _two_integers(values: Any) -> tuple[int, int]:
    """Return two whole numbers, which may be of NumPy. Raises TypeError and ValueError."""
    if isinstance(values, str) or any(isinstance(value, bool) for value in values):
        raise TypeError
    first, second = map(operator.index, values)
    return first, second


#: What acts on images in the modes that store numbers as they are, and what these modes do.
_ACTING = {
    "mask": (("fit", "max_pixels"), "keeps ids as they are"),
    "array": ((), "stores arrays as they are"),
}


def check_image_options(mode: str | None, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options without effect in a mode."""
    if mode not in _ACTING:
        return
    acting, what = _ACTING[mode]
    for name, value in options.items():
        if name not in acting and value != getattr(Settings, name):
            remedy = (
                "Give mask_fill instead" if (mode, name) == ("mask", "fill") else "Leave it out"
            )
            raise ValueError(
                f"{name}: {value!r} has no effect in mode {mode!r}, which {what}. {remedy}."
            )


def check_has_arrays(source: Source) -> None:
    """Raise ValueError if the samples of a source are no arrays, which mode "array" needs."""
    is_npy = isinstance(source, Files) and source.names[0].endswith(".npy")
    if isinstance(source, (Files, RemoteFiles)) and not is_npy:
        raise ValueError(
            "mode 'array' needs a data set whose samples are arrays, or .npy files, but the source "
            f"holds other files, such as {source.names[0]}. Use mode 'RGB' or 'L', or read the "
            "files in a data set of your own."
        )


def check_mask_options(
    source: Source, missing_masks: str, mask_fill: int, *, are_masks: bool
) -> None:
    """Raise ValueError for options of masks if there are none.

    ``are_masks`` says whether the images themselves are masks.
    """
    if "mask" in optional(source).arrays.values():
        return
    given: dict[str, tuple[Any, Any]] = {"missing_masks": (missing_masks, "reject")}
    if not are_masks:
        given["mask_fill"] = (mask_fill, 255)
    for name, (value, default) in given.items():
        if value != default:
            raise ValueError(
                f"{name}: {value!r} has no effect, since no masks are given. Leave it out, or name "
                "the masks."
            )


def check_mask_fill(fill: int, descr: str, masks: str) -> None:
    """Raise ValueError if the id of the margin does not fit the type of ``masks``."""
    largest = np.iinfo(descr).max
    if fill > largest:
        raise ValueError(
            f"mask_fill: {fill:,} does not fit {masks}, whose ids go up to {largest:,}. Choose one "
            "of these, or save the masks with 16 bits (uint16)."
        )


def check_source(source: Source) -> None:
    """Raise SourceError for what would keep the index from being written in the end."""
    if not len(source):
        raise SourceError("The source has no samples.")
    if len(source.keys) != len(source):
        raise SourceError(
            f"The source has {len(source):,} samples, but {len(source.keys):,} keys. Each sample "
            "needs one."
        )
    if not isinstance(source.keys, Keys):  # which are packed names
        for name in source.keys:
            try:
                name.encode(errors="surrogateescape")
            except (AttributeError, UnicodeEncodeError) as error:
                raise SourceError(f"keys: {name!r:.40} cannot be encoded ({error}).") from None
    for name, column in source.schema.items():
        _check_column(name, column)
    for name, kind in optional(source).arrays.items():
        _check_array(name, kind, source)
    for name, texts in optional(source).categories.items():
        are_texts = all(isinstance(text, str) for text in texts)
        if source.schema.get(name) != Column("<i8") or not are_texts:
            raise SourceError(
                f"categories: {name!r:.80} must be a column of int64 (Column('<i8')) that counts "
                f"into a list of texts. It is {source.schema.get(name)}, with {texts!r:.80}."
            )
    if source.classes is None:
        return
    if source.schema.get("label") != Column("<i8"):
        raise SourceError(
            "The source has classes, so it needs a column 'label' of int64 that counts into "
            f"them. It has {source.schema.get('label')}."
        )
    for name in source.classes:
        if not isinstance(name, str):
            raise SourceError(f"classes: {name!r:.40} is of type {type(name).__name__}, not str.")


def _check_array(name: str, kind: str, source: Source) -> None:
    """Raise SourceError if an array cannot be stored under its name."""
    if kind not in ("mask", "array"):
        raise SourceError(f"arrays: {name!r:.40} is of kind {kind!r:.40}, not 'mask' or 'array'.")
    try:
        check_array_name(str(name))
    except ValueError as error:
        raise SourceError(f"arrays: {error}") from None
    if name in source.schema:
        raise SourceError(
            f"arrays: {name!r:.80} is the name of a column, too. Give one of them another name."
        )


def _check_column(name: str, column: Column) -> None:
    try:
        name.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise SourceError(f"names of columns: {name!r:.40} cannot be encoded ({error}).") from None
    if name in RESERVED or "/" in name:
        raise SourceError(
            f"column {name!r:.80}: the index uses this name itself. Give it another name."
        )
    try:
        descr = np.dtype(column.dtype).newbyteorder("<").str
    except TypeError:
        descr = ""
    if descr not in DESCRS_OF_COLUMNS:
        raise SourceError(
            f"column {name!r:.80}: {column.dtype!r} is not a type of numbers of at most 64 bits. "
            "Convert the column, or leave it out."
        )
    if column.boxes and (len(column.shape) != 2 or column.shape[1] != 4 or descr != "<f4"):
        raise SourceError(
            f"column {name!r:.80}: boxes are float32 of shape (k, 4), not {descr} of "
            f"{column.shape}."
        )
    if column.points and (len(column.shape) != 2 or column.shape[1] != 2 or descr[1] != "f"):
        raise SourceError(
            f"column {name!r:.80}: points are floats of shape (k, 2), not {descr} of "
            f"{column.shape}."
        )
