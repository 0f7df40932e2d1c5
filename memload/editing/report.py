"""What an edit has made, and where an index may be written."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memload.storage.format import RESERVED
from memload.storage.index import Index
from memload.wording import counted


@dataclass(frozen=True)
class EditReport:
    """The data set that was made: its index, how many samples and classes it has, and notes.

    ``classes`` is None if labels have no names. ``notes`` say what the user should know, such as
    which samples were left out. ``str(report)`` is one line.
    """

    path: Path
    samples: int
    classes: int | None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        facts = [counted(self.samples, "sample")]
        if self.classes is not None:
            facts.append(counted(self.classes, "class", "classes"))
        return f"{self.path}: {', '.join(facts)}"


def report_on(path: Path, index: Index, notes: Sequence[str]) -> EditReport:
    """Return the report on an index that was written to ``path``."""
    classes = None if index.classes is None else len(index.classes)
    return EditReport(path, len(index), classes, tuple(notes))


def check_index_output(path: str | Path, folder: Path, overwrite: bool) -> Path:
    """Return the path of an index that may be written for pixels in ``folder``.

    Raises ValueError for another folder or a wrong name, and FileExistsError.
    """
    path = Path(path)
    if path.suffix != ".idx":
        raise ValueError(
            f"The output is {str(path)!r}, but its name must end in '.idx'. Write "
            f"'{path.with_suffix('.idx') if path.name else 'out.idx'}'."
        )
    if path.resolve().parent != folder.resolve():
        raise ValueError(
            f"The output is {str(path)!r}, but the index must be in the folder of the pixels. "
            f"Write '{folder / path.name}'."
        )
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} exists already. Say overwrite=True (--overwrite) to replace it."
        )
    return path


def link_command(index: Index, folder: Path) -> str:
    """Return the command that links all files of a data set into another folder."""
    shards = (re.sub(r"-\d{5,}(-of-\d{5,})", r"-*\1", shard.file) for shard in index.shards)
    paths = (str(index.path.with_name(name)) for name in dict.fromkeys([*shards, index.path.name]))
    return f"ln {' '.join(paths)} {folder}/"


def check_column_name(name: str) -> None:
    """Raise ValueError unless a column may have this name."""
    if not name or name in RESERVED or "/" in name or not name.isprintable():
        raise ValueError(
            f"{name!r:.80} cannot be the name of a column. Names have no '/', and "
            f"{', '.join(RESERVED)} are taken. Choose another name."
        )
