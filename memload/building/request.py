"""The checked arguments of a build."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memload.building.checks import check_arguments
from memload.building.extra_arrays import MissingMasks
from memload.building.preparation import Preparation
from memload.building.rejects import RejectLimit
from memload.building.rows import OnError
from memload.building.sources.existing import ExistingDataset
from memload.building.sources.record import Source
from memload.building.sources.wrapped import unwrapped
from memload.building.writer import parse_shard_size
from memload.storage.format import output_paths


@dataclass(frozen=True)
class Request:
    """What is built, where it goes, and how much may be used for it. See `memload.build`."""

    preparation: Preparation
    output: Path  #: from the root
    name: Path  #: the output as it was given, for messages
    overwrite: bool
    shard_size: int | None  #: in bytes
    limit: RejectLimit
    on_error: OnError
    num_workers: int
    timeout: float
    lock_timeout: float
    progress: bool | None

    @property
    def folder(self) -> Path:
        """The folder of the unfinished build."""
        return output_paths(self.output)[1]

    @property
    def new_to(self) -> Any:
        """The data set whose samples are left out, if there is one."""
        return self.preparation.source_options["new_to"]

    def data_sets_read(self, source: Source) -> Iterator[str | Path]:
        """Yield the paths of the data sets of memload's that the build depends on."""
        if self.new_to is not None:
            yield self.new_to
        existing = unwrapped(source)
        if isinstance(existing, ExistingDataset):
            yield existing.path


def request_of(
    source: Any,
    output: str | Path,
    *,
    source_options: Mapping[str, Any],
    size: Any,
    mode: str | None,
    classes: Any,
    missing_masks: MissingMasks,
    mask_fill: int,
    on_error: OnError,
    max_rejects: int | float | str,
    shard_size: int | str | None,
    num_workers: int,
    timeout: float,
    lock_timeout: float,
    overwrite: bool,
    progress: bool | None,
    **image_options: Any,
) -> Request:
    """Check the arguments of `memload.build`, as far as that is possible before the source is open.

    ``source_options`` and ``image_options`` are those of a `Preparation`.

    Raises ValueError, DependencyError and BuildError.
    """
    name, path = check_arguments(
        source,
        output,
        mode=mode,
        max_pixels=image_options["max_pixels"],
        on_error=on_error,
        num_workers=num_workers,
        timeout=timeout,
        lock_timeout=lock_timeout,
        missing_masks=missing_masks,
        mask_fill=mask_fill,
        new_to=source_options["new_to"],
    )
    preparation = Preparation(
        source=source,
        classes=classes,
        source_options=source_options,
        size=size,
        mode=mode,
        image_options=image_options,
        missing_masks=missing_masks,
        mask_fill=mask_fill,
        num_workers=num_workers,
        timeout=timeout,
    )
    preparation.check()
    return Request(
        preparation=preparation,
        output=path,
        name=name,
        overwrite=overwrite,
        shard_size=parse_shard_size(shard_size),
        limit=RejectLimit(max_rejects),
        on_error=on_error,
        num_workers=num_workers,
        timeout=timeout,
        lock_timeout=lock_timeout,
        progress=progress,
    )
