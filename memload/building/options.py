"""The arguments of `memload.build`, checked, and what they say: the source, and its conversion."""

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from memload.building.decoders import MODE_OF_STORED
from memload.building.first_samples import find_arrays, first_usable
from memload.building.settings import PICTURE_SETTINGS, Origin, Settings, as_stored
from memload.building.shard import in_shards
from memload.building.summary import allowed_rejects
from memload.errors import BuildError, SourceError
from memload.machine import available_cores
from memload.sources.existing import IndexRows, NpyRows
from memload.sources.opening import open_source, paths_of
from memload.sources.samples import Source
from memload.storage.format import (
    FLAG_FALLBACK,
    FLAG_ORIENTED,
    RESERVED,
    check_array_name,
    output_paths,
)
from memload.storage.index import Array, Index
from memload.wording import parse_size

#: How pictures are stored if nothing is said: 256×256 pixels of RGB.
_SIDES: Final = (256, 256)
_MODE: Final = "RGB"

#: The settings of pictures that concatenated data sets should have in common.
_SHARED_SETTINGS = ("fit", "interpolation", "fast", "exif", "background", "fill")
#: The arguments of `open_source`.
READING_OPTIONS = (
    *("image", "label", "where", "root", "extensions", "masks", "arrays", "points", "boxes"),
    *("classes", "new_to"),
)


class Options(SimpleNamespace):
    """The arguments of `memload.build`, under the same names, checked.

    Raises ValueError, TypeError and DependencyError for wrong ones, as far as that is possible
    before the source is open, and BuildError if the output's folder is missing.
    """

    output: Path
    num_workers: int
    part: tuple[int, int] | None
    shard_size: int | None

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        output_paths(self.output)  # its name is right
        self.output = Path(self.output)
        if not self.output.parent.is_dir():
            raise BuildError(
                f"{self.output.parent}: there is no such folder for the output. Make it first.",
                path=self.output,
            )
        if not self.timeout > 0:  # NaN is not, either
            raise ValueError(f"timeout: {self.timeout!r} is not above 0 seconds.")
        if self.executor is not None and self.part is not None:
            raise ValueError("part and executor: an executor builds all parts. Leave out one.")
        if self.shard_size is None and (self.executor is not None or self.part is not None):
            name = "part" if self.executor is None else "executor"
            raise ValueError(
                f"{name}: what is shared are shards. Give shard_size, too, such as '4GB'."
            )
        if self.num_workers is None:
            self.num_workers = available_cores() if self.executor is None else 0
        if self.num_workers < 0:
            raise ValueError(f"num_workers: {self.num_workers} is negative.")
        if self.missing_masks is not None and not 0 <= self.missing_masks <= 65535:
            raise ValueError(
                f"missing_masks: {self.missing_masks!r} is not an id from 0 to 65,535, nor None, "
                "which rejects samples without a mask."
            )
        self.part = _checked_part(self.part)
        self.shard_size = _shard_bytes(self.shard_size)
        allowed_rejects(self.max_rejects, 1)
        self._check_image_options(self.mode)

    @property
    def image_options(self) -> dict[str, Any]:
        """The arguments of `Settings` apart from size and mode."""
        return {name: getattr(self, name) for name in PICTURE_SETTINGS}

    def _check_image_options(self, mode: Any) -> None:
        """Raise ValueError for a wrong option, or one without effect in a mode."""
        if mode != "array":
            Settings(mode=mode or _MODE, **self.image_options)
            return
        for name, value in self.image_options.items():
            if value != getattr(Settings, name):
                raise ValueError(
                    f"{name}: {value!r} has no effect in mode 'array', which stores arrays as they "
                    "are. Leave it out."
                )

    @property
    def is_of_files(self) -> bool:
        """Whether the source is given as paths or URLs, and not as an object."""
        return paths_of(self.source) is not None

    def open_source(self) -> Source:
        """Open the source. Its labels count into ``classes`` if these are given.

        Raises ValueError, SourceError and DependencyError.
        """
        workers = {"num_workers": self.num_workers, "timeout": self.timeout}
        opened = open_source(
            self.source,
            first_usable=functools.partial(first_usable, **workers),
            **{name: getattr(self, name) for name in READING_OPTIONS},
        )
        _check_source(opened)
        return opened

    def settings(self, source: Source) -> Settings:
        """Return how the records of the opened source are converted.

        Of arrays, masks and data sets in Python, the first usable samples are looked at. Raises
        ValueError, SourceError and DependencyError.
        """
        settings = self._settings_of_images(source)
        kinds = source.arrays
        if self.missing_masks is not None and "mask" not in kinds.values():
            raise ValueError(
                f"missing_masks: {self.missing_masks!r} has no effect, since no masks are given. "
                "Leave it out, or name the masks."
            )
        arrays = find_arrays(source, settings, self.missing_masks, self.num_workers, self.timeout)
        return replace(settings, extra_arrays=arrays)

    def _settings_of_images(self, source: Source) -> Settings:
        """Return how the images are converted. Arrays and data sets are stored as they are."""
        size: Any = self.size
        mode: Any = self.mode
        if self.new_to is not None:  # as that data set has it
            known = Index.open(self.new_to)
            size = known.image.shape[:2] if size is None else size
            mode = mode or known.setting("mode")
        sides = None if size is None else _height_and_width(size)
        index = _stored_index(source)
        own_mode, own_sides = _stored_as(source, index)
        mode = mode or own_mode or _MODE
        if mode != "array":
            settings = Settings(sides or own_sides or _SIDES, mode=mode, **self.image_options)
        else:
            self._check_image_options(mode)
            look = functools.partial(_settings_of_array, source, self.max_pixels)
            settings = first_usable(look, source.keys, self.num_workers, self.timeout)
        if mode == "array" and sides not in (None, settings.size):
            raise ValueError(
                f"size: {size} is not the size of the arrays, {settings.size}, which mode 'array' "
                "stores as they are. Leave it out, or resize them in the data set."
            )
        stored = settings.shape, settings.descr
        if index is None or (index.image.shape, index.image.descr) != stored:
            return settings
        origin = Origin(
            index.build.get("settings") or {},
            index.build.get("libraries", {}),
            flags=_by_row(source, index.flags & (FLAG_ORIENTED | FLAG_FALLBACK)),
            crc32=_by_row(source, index.crc32["image"][index.row]),
        )
        return replace(settings, mode="array", origin=origin)

    def array_files(self, settings: Settings, rows: int) -> list[Array]:
        """Return the images and each other array, of so many rows, in shards of ``shard_size``.

        Raises ValueError if a shard has no room for one row.
        """
        image = Array("image", settings.descr, settings.shape, ())
        others = (
            Array(extra.name, extra.descr, extra.shape, (), extra.kind)
            for extra in settings.extra_arrays
        )
        return in_shards([image, *others], self.output, rows, self.shard_size)

    def data_sets_read(self, source: Source) -> Iterator[Path]:
        """Yield the indexes of the data sets of memload's that the build depends on."""
        if self.new_to is not None:
            yield Path(self.new_to)
        images = source.images
        if isinstance(images, IndexRows):
            yield images.path

    def notes(self, settings: Settings) -> Iterator[str]:
        """Yield a note if the pictures will differ from those of the data set of ``new_to``."""
        if self.new_to is None:
            return
        there, here = Index.open(self.new_to), settings.as_dict()
        differences = [
            f"{name} {before} there and {here[name]} here"
            for name in _SHARED_SETTINGS
            if (before := there.setting(name)) is not None and here.get(name, before) != before
        ]
        if differences:
            yield f"other settings than those of {self.new_to}: {', '.join(differences)}"


def _stored_index(source: Source) -> Index | None:
    """Return the index of a source that is a data set of memload's."""
    images = source.images
    return Index.open(images.path) if isinstance(images, IndexRows) else None


def _by_row(source: Source, values: np.ndarray) -> Any:
    """Return values of the samples of an index by row of a source, which may be a selection."""
    rows = source.images.rows
    return values if rows is None else values[rows]


def _settings_of_array(source: Source, max_pixels: int, row: int) -> Settings:
    """Return the settings for arrays like that of a sample. Raises DecodeError."""
    array = as_stored(source[row].image, max_pixels)
    height, width, channels = array.shape
    descr = array.dtype.str
    return Settings(
        (height, width), mode="array", channels=channels, descr=descr, max_pixels=max_pixels
    )


def _stored_as(source: Source, index: Index | None) -> tuple[Any, tuple[int, int] | None]:
    """Return the mode and the sides with which a source is stored by default, if it has its own.

    A data set of memload's keeps both, and an .npy file keeps its arrays.
    """
    if isinstance(source.images, NpyRows):
        return "array", None
    if index is None:
        return None, None
    height, width, channels = index.image.shape
    return MODE_OF_STORED.get((index.image.descr, channels), "array"), (height, width)


def _checked_part(part: Any) -> tuple[int, int] | None:
    """Return a part ``(i, n)``, or None. Raises ValueError for anything else."""
    if part is None:
        return None
    try:
        number, count = map(operator.index, part)
    except (TypeError, ValueError):
        number, count = -1, 0
    if not 0 <= number < count:
        raise ValueError(
            f"part: {part!r:.80} is not (i, n), two whole numbers such as (0, 8). Parts are "
            "counted from 0 to n - 1."
        )
    return number, count


def _shard_bytes(shard_size: int | str | None) -> int | None:
    try:
        return None if shard_size is None else parse_size(shard_size)
    except ValueError as error:
        raise ValueError(f"shard_size: {error}") from None


def _height_and_width(size: Any) -> tuple[int, int]:
    """Return a size given as a side or as (height, width). Raises ValueError."""
    try:
        height, width = map(operator.index, size if isinstance(size, Sequence) else (size, size))
    except (TypeError, ValueError):
        raise ValueError(
            f"size: {size!r} is neither a side nor (height, width), in whole pixels."
        ) from None
    return height, width


def _check_source(source: Source) -> None:
    """Raise SourceError for what would keep the index from being written in the end."""
    if not len(source):
        raise SourceError("The source has no samples.")
    for name in source.schema:
        if name in RESERVED or "/" in name:
            raise SourceError(
                f"column {name!r:.80}: the index uses this name itself. Give it another name."
            )
    for name in source.arrays:
        try:
            check_array_name(str(name))
        except ValueError as error:
            raise SourceError(f"arrays: {error}") from None
        if name in source.schema:
            raise SourceError(
                f"arrays: {name!r:.80} is the name of a column, too. Give one of them another name."
            )
