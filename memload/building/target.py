"""What workers have to know of a build: which rows they convert, and where these go."""

from dataclasses import dataclass
from pathlib import Path

from memload.building.conversion import AnySettings
from memload.building.journal import Journal
from memload.building.sources.record import Source
from memload.errors import BuildError
from memload.storage.index import Array


@dataclass(frozen=True)
class RowTarget:
    """Rows of a build: those of its journal, from a source to shards. Every worker has a copy."""

    source: Source
    settings: AnySettings
    output: Path  #: what the data set will be called
    folder: Path  #: where the shards lie
    arrays: tuple[Array, ...]  #: with all of their shards, the images first
    journal: Journal  #: its rows are the ones to be converted
    is_resumed: bool  #: whether some of them may be finished already

    def other_data_set(self, difference: str) -> BuildError:
        """Return the error for an unfinished build of another data set. It says what differs."""
        return BuildError(
            f"{self.folder} holds an unfinished build of another data set: {difference}. Give the "
            "same data set to go on with it, or delete that folder to begin anew.",
            path=self.output,
        )
