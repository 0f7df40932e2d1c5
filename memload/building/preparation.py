"""From the arguments of a build to its source, and to how the records of that are converted."""

import errno
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memload.building.checks import (
    check_has_arrays,
    check_image_options,
    check_mask_fill,
    check_mask_options,
    check_source,
    height_and_width,
)
from memload.building.conversion import AnySettings, ArraySettings, MaskSettings, Settings
from memload.building.extra_arrays import MissingMasks
from memload.building.first_arrays import find_arrays, find_type
from memload.building.first_samples import first_usable
from memload.building.sources.arrays import ArrayFile
from memload.building.sources.classes import PinnedClasses, read_classes, refuse_splits
from memload.building.sources.existing import ExistingDataset
from memload.building.sources.new_samples import size_and_mode
from memload.building.sources.opening import FilesToOpen, open_source
from memload.building.sources.record import Source
from memload.building.sources.wrapped import unwrapped
from memload.errors import SourceError

#: Options of sources whose values may be paths.
_OPTIONS_WITH_PATHS = ("root", "labels", "masks", "arrays", "new_to")


@dataclass(frozen=True)
class Preparation:
    """The arguments of `memload.build` that say what is built.

    ``image_options`` are arguments of `Settings`, and ``source_options`` of `open_source`.
    """

    source: Any
    classes: Any
    source_options: Mapping[str, Any]
    size: Any
    mode: Any
    image_options: Mapping[str, Any]
    missing_masks: MissingMasks
    mask_fill: int
    num_workers: int
    timeout: float

    def check(self) -> None:
        """Raise ValueError or DependencyError for wrong options, before the source is opened."""
        check_image_options(self.mode, self.image_options)
        if self.mode not in ("mask", "array"):
            Settings(mode=self.mode or "RGB", **self.image_options)

    def open(self) -> Source:
        """Open the source. Raises ValueError, SourceError and DependencyError."""
        return _open(self.source, self.classes, self.source_options, self.num_workers, self.timeout)

    @property
    def is_of_files(self) -> bool:
        """Whether the source is given as paths or URLs, and not as an object."""
        return FilesToOpen.of(self.source) is not None

    def with_absolute_paths(self) -> "Preparation":
        """Return the same with all paths from the root."""
        source, files = self.source, FilesToOpen.of(self.source)
        if files is not None:
            source = replace(files.absolute(), options=_from_root(files.options))
        return replace(self, source=source, source_options=_from_root(self.source_options))

    def description(self) -> dict[str, Any]:
        """Return how the source is opened, as JSON has it, to be compared between machines."""
        absolute = self.with_absolute_paths()
        described: dict[str, Any] = {"type": type(self.source).__name__}
        options, files = dict(absolute.source_options), FilesToOpen.of(absolute.source)
        if files is not None:
            described = {"paths": list(files.names)}
            # The list has positions in archives, and values of tables.
            described |= {str(path): _state_text(path) for path in files.paths()}
            options |= files.options
        for name, value in options.items():
            if value:
                described[name] = str(value) if isinstance(value, (str, Path)) else repr(value)
        if self.classes is not None:
            described["classes"] = read_classes(self.classes)
        return described

    def given(self) -> dict[str, Any]:
        """Return the settings that are known before the source is opened, as an index has them."""
        given: dict[str, Any] = {"missing_masks": self.missing_masks, "mask_fill": self.mask_fill}
        given |= self.image_options
        size, mode = self.size, self.mode
        files = FilesToOpen.of(self.source)
        if files is not None and not files.have_settings and not self.source_options["new_to"]:
            size, mode = 256 if size is None and mode != "array" else size, mode or "RGB"
        if mode is not None:
            given["mode"] = mode
        if size is not None:
            given["size"] = list(height_and_width(size))
        return given

    def settings(self, source: Source) -> AnySettings:
        """Return how the records of the opened source are converted.

        The first usable samples are looked at. Raises ValueError, SourceError and DependencyError.
        """
        size, mode, workers = self.size, self.mode, (self.num_workers, self.timeout)
        new_to = self.source_options["new_to"]
        if new_to is not None:
            size, mode = size_and_mode(new_to, size, mode)
        settings = _settings(source, mode, size, self.image_options, self.mask_fill, *workers)
        are_masks = isinstance(settings, MaskSettings)
        check_mask_options(source, self.missing_masks, self.mask_fill, are_masks=are_masks)
        arrays = find_arrays(source, settings, self.missing_masks, self.mask_fill, *workers)
        return replace(settings, extra_arrays=arrays)


def _state_text(path: Path) -> str:
    """Return size and time of a file. Its inode may differ between machines."""
    status = path.stat()
    seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
    time = datetime.fromtimestamp(seconds, UTC)
    return f"{status.st_size:,} bytes of {time:%Y-%m-%d %H:%M:%S}.{nanoseconds:09} UTC"


def _from_root(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a source with the paths among them from the root."""

    def absolute(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: absolute(entry) for name, entry in value.items()}
        if isinstance(value, (list, tuple)):  # as they are typed, paths are in pairs with names
            return [
                (entry[0], *map(absolute, entry[1:])) if isinstance(entry, tuple) else entry
                for entry in value
            ]
        # A text that is no path is the name of a column, or a path that is missing.
        if isinstance(value, (str, Path)) and os.path.exists(value):  # noqa: PTH110  # or too long
            return os.path.abspath(value)  # noqa: PTH100  # without "..", to be compared
        return value

    return {
        name: absolute(value) if name in _OPTIONS_WITH_PATHS else value
        for name, value in options.items()
    }


def _open(
    source: Any, classes: Any, options: Mapping[str, Any], num_workers: int, timeout: float
) -> Source:
    """Return the source. Its labels count into ``classes`` if these are given."""
    names = None if classes is None else read_classes(classes)
    try:
        opened = open_source(
            source, classes=names, num_workers=num_workers, timeout=timeout, **options
        )
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise SourceError(f"{source}: this path is too long. Check it.") from error
        raise
    check_source(opened)
    if names is not None:
        return PinnedClasses(opened, names)
    refuse_splits(opened)
    return opened


def _settings(
    source: Source,
    mode: Any,
    size: Any,
    image_options: Mapping[str, Any],
    mask_fill: int,
    num_workers: int,
    timeout: float,
) -> AnySettings:
    """Return how records are converted, apart from masks and other arrays beside the images.

    By default, arrays and data sets of memload's are stored as they are.
    """
    original = unwrapped(source)
    sides = (256, 256) if size is None else height_and_width(size)
    if isinstance(original, ExistingDataset):
        sides = height_and_width(original.shape[:2]) if size is None else sides
        mode = original.mode if mode is None else mode
    if mode is None:
        mode = "array" if isinstance(original, ArrayFile) else "RGB"
    check_image_options(mode, image_options)
    if mode == "mask":
        options = {name: image_options[name] for name in ("fit", "max_pixels")}
        look = functools.partial(MaskSettings(sides, fill=mask_fill, **options).of, source)
        mask_settings: MaskSettings = find_type(look, source, num_workers, timeout)
        check_mask_fill(mask_fill, mask_settings.descr, "the masks")
        return mask_settings
    if mode == "array":
        check_has_arrays(original)
        find = functools.partial(ArraySettings.of, source)
        array_settings: ArraySettings = first_usable(find, source.keys, num_workers, timeout)
        _check_size_of_arrays(array_settings, size)
        return array_settings
    return Settings(sides, mode=mode, **image_options)


def _check_size_of_arrays(settings: ArraySettings, size: Any) -> None:
    if size is not None and height_and_width(size) != settings.size:
        raise ValueError(
            f"size: {size} is not the size of the arrays, {settings.size}, which mode 'array' "
            "stores as they are. Leave it out, or resize them in the data set."
        )
