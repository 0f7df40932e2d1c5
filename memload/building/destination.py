"""The files of the output: whether they may be written, and how a finished build replaces them."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from memload.errors import BuildError, FormatError
from memload.storage.format import output_paths
from memload.storage.index import Index, sync


class Destination:
    """The index, shards and ledger of an output, by their names, and what may happen to them.

    Without ``overwrite``, none of them may exist when a build begins, nor when it ends.
    """

    def __init__(self, output: Path, overwrite: bool) -> None:
        self.output, self.overwrite = output, overwrite
        self.index, _, self.ledger = output_paths(output)
        #: what the shards of this output are called, however many there are
        self.shard_name = re.compile(re.escape(output.stem) + r"(-\d{5,}-of-\d{5,})?\.bin")

    def check(self, shards: Iterable[str]) -> None:
        """Raise BuildError if the output exists and is not to be replaced."""
        paths = [self.output.parent / name for name in shards]
        for path in paths:
            index = path.with_suffix(".idx")
            if path != self.output and index.exists():
                raise BuildError(
                    f"A shard of this output would be called {path.name}, which is the data set "
                    f"of {index.name}. Choose another output.",
                    path=self.output,
                )
        existing = [path for path in (self.index, self.ledger, *paths) if os.path.lexists(path)]
        if existing and not self.overwrite:
            raise BuildError(
                f"{existing[0]} exists already. Choose another output, or say --overwrite.",
                path=self.output,
            )

    def publish(self, index: Index, folder: Path) -> None:
        """Rename the files of a finished build in ``folder`` into place, the index last.

        If it was stopped before, it goes on where it stopped. Raises BuildError if files of these
        names have appeared since the build began, without ``overwrite``.
        """
        parent, replaced = self.output.parent, folder / "replaced.idx"
        shards = [shard.file for shard in index.image.shards]
        has_ledger = index.build["rejected"] > 0
        names = [*shards, self.ledger.name] if has_ledger else shards
        if self.overwrite and self.index.exists():
            # From here on until the end there is no data set.
            self.index.replace(replaced)
            sync(parent)
        for name in [*names, self.index.name]:
            target = parent / name
            if not self.overwrite and os.path.lexists(target) and (folder / name).exists():
                raise BuildError(
                    f"{target} was made by somebody else while the build ran. The finished build "
                    f"waits in {folder}. Move that file away, or say --overwrite, and run the "
                    "same command again.",
                    path=self.output,
                )
        for name in names:
            move(folder / name, parent)
        if self.overwrite:
            for name in self._unused(shards_of(replaced)) - set(shards):
                (parent / name).unlink(missing_ok=True)
            if not has_ledger:
                self.ledger.unlink(missing_ok=True)
        sync(parent)
        move(folder / self.index.name, parent)
        sync(parent)

    def _unused(self, shards: Iterable[str]) -> set[str]:
        """Return those shards of this output that no other index names."""
        unused = {name for name in shards if self.shard_name.fullmatch(name)}
        if unused:
            for other in self.output.parent.glob("*.idx"):
                if other != self.index:
                    unused -= shards_of(other)
        return unused


def shards_of(index: Path) -> set[str]:
    """Return the files that an index names; none if it is missing or damaged."""
    if not index.exists():
        return set()
    try:
        return {shard.file for array in Index.read(index).arrays for shard in array.shards}
    except FormatError:
        return set()


def move(path: Path, folder: Path) -> None:
    """Move a file, unless it was moved before a crash."""
    if path.exists():
        path.replace(folder / path.name)
