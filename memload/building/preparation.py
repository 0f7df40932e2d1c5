"""From the arguments of a build to its source, and to how the records of that are converted."""

import errno
import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

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
from memload.building.plans import differences
from memload.building.sources.arrays import ArrayFile
from memload.building.sources.classes import PinnedClasses, read_classes, refuse_splits
from memload.building.sources.existing import ExistingDataset
from memload.building.sources.new_samples import size_and_mode
from memload.building.sources.opening import FilesToOpen, open_source
from memload.building.sources.record import Source
from memload.building.sources.remote import is_url
from memload.building.sources.wrapped import unwrapped
from memload.errors import SourceError

#: How pictures are stored if nothing is said: 256×256 pixels of RGB.
_SIDES: Final = (256, 256)
_MODE: Final = "RGB"


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
            Settings(mode=self.mode or _MODE, **self.image_options)

    def open(self) -> Source:
        """Open the source. Its labels count into ``classes`` if these are given.

        Raises ValueError, SourceError and DependencyError.
        """
        classes = None if self.classes is None else read_classes(self.classes)
        try:
            opened = open_source(
                self.source,
                classes=classes,
                num_workers=self.num_workers,
                timeout=self.timeout,
                **self.source_options,
            )
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise SourceError(f"{self.source}: this path is too long. Check it.") from error
            if error.errno == errno.EACCES and error.filename:
                raise SourceError(f"{error.filename} cannot be read: {error.strerror}.") from error
            raise
        check_source(opened)
        if classes is not None:
            return PinnedClasses(opened, classes)
        refuse_splits(opened)
        return opened

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
        """Return how the source is opened, as JSON has it, to be compared between machines.

        The names are those that messages use.
        """
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
                described[f"the option {name}"] = _texts(value)
        if self.classes is not None:
            described["the list of classes"] = read_classes(self.classes)
        return described

    def given(self) -> dict[str, Any]:
        """Return the settings that are known before the source is opened, as an index has them."""
        given: dict[str, Any] = {"missing_masks": self.missing_masks, "mask_fill": self.mask_fill}
        given |= self.image_options
        size, mode = self.size, self.mode
        files = FilesToOpen.of(self.source)
        if files is not None and not files.have_settings and not self.source_options["new_to"]:
            if size is None and mode != "array":
                size = _SIDES
            mode = mode or _MODE
        if mode is not None:
            given["mode"] = mode
        if size is not None:
            given["size"] = list(height_and_width(size))
        return given

    def settings(self, source: Source) -> AnySettings:
        """Return how the records of the opened source are converted.

        The first usable samples are looked at. Raises ValueError, SourceError and DependencyError.
        """
        settings = self._settings_of_images(source)
        fills = self.missing_masks, self.mask_fill
        check_mask_options(source, *fills, are_masks=isinstance(settings, MaskSettings))
        arrays = find_arrays(source, settings, *fills, self.num_workers, self.timeout)
        return replace(settings, extra_arrays=arrays)

    def _settings_of_images(self, source: Source) -> AnySettings:
        """Return how records are converted, apart from masks and other arrays beside the images.

        By default, arrays and data sets of memload's are stored as they are.
        """
        size, mode, new_to = self.size, self.mode, self.source_options["new_to"]
        if new_to is not None:
            size, mode = size_and_mode(new_to, size, mode)
        original = unwrapped(source)
        sides = _SIDES if size is None else height_and_width(size)
        if isinstance(original, ExistingDataset):
            sides = height_and_width(original.shape[:2]) if size is None else sides
            mode = original.mode if mode is None else mode
        if mode is None:
            mode = "array" if isinstance(original, ArrayFile) else _MODE
        check_image_options(mode, self.image_options)
        if mode == "mask":
            return self._settings_of_masks(source, sides)
        if mode == "array":
            check_has_arrays(original)
            find = functools.partial(ArraySettings.of, source)
            settings: ArraySettings = first_usable(
                find, source.keys, self.num_workers, self.timeout
            )
            _check_size_of_arrays(settings, size)
            return settings
        return Settings(sides, mode=mode, **self.image_options)

    def _settings_of_masks(self, source: Source, sides: tuple[int, int]) -> MaskSettings:
        """Return how records are converted whose images are masks."""
        options = {name: self.image_options[name] for name in ("fit", "max_pixels")}
        look = functools.partial(MaskSettings(sides, fill=self.mask_fill, **options).of, source)
        settings: MaskSettings = find_type(look, source, self.num_workers, self.timeout)
        check_mask_fill(self.mask_fill, settings.descr, "the masks")
        return settings


def _state_text(path: Path) -> str:
    """Return size and time of a file. Its inode may differ between machines."""
    status = path.stat()
    seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
    time = datetime.fromtimestamp(seconds, UTC)
    return f"{status.st_size:,} bytes of {time:%Y-%m-%d %H:%M:%S}.{nanoseconds:09} UTC"


def different_descriptions(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say what differs between two descriptions, see `Preparation.description`."""
    text = differences(before, now)
    files = [name for name in before if name in now and Path(name).is_absolute()]
    if any(before[name] != now[name] for name in files):
        text += ". A copy of a file has to keep its time: cp -p, rsync -t"
    return text


def _from_root(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a source with the paths among them from the root."""
    return {
        name: _absolute(value) if name in ("masks", "arrays") else value
        for name, value in options.items()
    } | {
        name: os.path.abspath(options[name])  # noqa: PTH100  # without "..", to be compared
        for name in ("root", "labels", "new_to")
        if options.get(name) and not is_url(options[name])
    }


def _absolute(value: Any) -> Any:
    """Return what is named as masks or arrays, in any form, with folders from the root.

    What is no folder is a part of the source, such as the name of a column.
    """
    if isinstance(value, Mapping):
        return {name: _absolute(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):  # names of parts, and pairs of a name and a folder
        return [each if isinstance(each, str) else (each[0], _absolute(each[1])) for each in value]
    if isinstance(value, (str, Path)) and os.path.isdir(value):  # noqa: PTH112  # or too long
        return os.path.abspath(value)  # noqa: PTH100  # as above
    return value


def _texts(value: Any) -> list[str]:
    """Return the value of an option as texts, such as ``mask=/data/masks``, in any of its forms."""
    if isinstance(value, Mapping):
        value = value.items()
    elif isinstance(value, (str, Path)) or not isinstance(value, Iterable):
        return [str(value)]
    pairs = [(item,) if isinstance(item, str) else item for item in value]
    return ["=".join(str(text) for text in pair if text != "") for pair in pairs]


def _check_size_of_arrays(settings: ArraySettings, size: Any) -> None:
    if size is not None and height_and_width(size) != settings.size:
        raise ValueError(
            f"size: {size} is not the size of the arrays, {settings.size}, which mode 'array' "
            "stores as they are. Leave it out, or resize them in the data set."
        )
