"""The checked arguments of a build."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memload.building.preparation import Preparation
from memload.building.rejects import RejectLimit
from memload.building.rows import OnError
from memload.building.sources.existing import ExistingDataset
from memload.building.sources.record import Source
from memload.building.sources.wrapped import unwrapped
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
