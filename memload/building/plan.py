"""What decides on the rows of a build, as JSON. An unfinished build goes on only with the same."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from memload.building.settings import Settings
from memload.building.shard import PLAN
from memload.errors import BuildError
from memload.sources.samples import Source
from memload.storage.index import sync
from memload.storage.keys import Keys
from memload.wording import shape_text

#: Of the folder of an unfinished build. Other versions of memload may have other files in it.
_FORMAT = 2

#: Entries of a plan that are checksums, and what it means if they differ.
_UNREADABLE = {
    "names": "the samples have other names",
    "source": "the source is read with other options, or has other columns",
}


def plan_of(source: Source, settings: Settings, keys: Keys, rows_per_shard: int) -> dict[str, Any]:
    """Return the plan of a build, in the types of JSON."""
    plan = {
        "format": _FORMAT,
        **settings.as_dict(),
        **settings.libraries(),
        "samples": len(keys),
        "names": hashlib.sha256(b"".join(map(np.ndarray.tobytes, keys.pack()))).hexdigest(),
        "source": source.identity,
        "classes": source.classes and [*source.classes],
        "rows per shard": rows_per_shard,
    }
    for name, column in source.schema.items():
        kind = "points" if column.points else "boxes" if column.boxes else "column"
        plan[f"{kind} {name!r}"] = (
            f"{np.dtype(column.dtype).name} {shape_text(column.shape)}".strip()
        )
    for array in settings.extra_arrays:
        plan[f"{array.kind} {array.name!r}"] = str(array)
    for name, texts in source.categories.items():
        plan[f"texts of {name!r}"] = [*texts]
    found: dict[str, Any] = json.loads(json.dumps(plan))
    return found


def seed_of(plan: Mapping[str, Any]) -> int:
    """Return a checksum of a plan, which all records of the build contain."""
    return zlib.crc32(json.dumps(plan, sort_keys=True).encode())


def write_once(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan unless there is one. Of several processes, one is the first."""
    temporary = folder / f".{os.urandom(8).hex()}.tmp"
    temporary.write_text(json.dumps(plan, indent=1, sort_keys=True), encoding="ascii")
    try:
        sync(temporary)
        os.link(temporary, folder / PLAN)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links, such as exFAT
        if not (folder / PLAN).exists():
            temporary.replace(folder / PLAN)
    finally:
        temporary.unlink(missing_ok=True)
    sync(folder)


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Return the plan of an unfinished build, or None if there is none.

    Raises BuildError if it is of another version, or damaged.
    """
    try:
        plan = json.loads((folder / PLAN).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        plan = None
    if not isinstance(plan, dict):
        problem = f"{folder / PLAN} is damaged"
    elif plan.get("format") != _FORMAT:
        problem = f"{folder} holds an unfinished build of another version of memload"
    else:
        return plan
    raise BuildError(f"{problem}. Delete {folder}, then run the same command again.", path=folder)


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise BuildError if the unfinished build in a folder has another plan."""
    if before == now:
        return
    texts = list(differences(before, now))
    raise BuildError(
        f"{folder} holds an unfinished build of something else: {'; '.join(texts)}. Give the same "
        "source and options to go on with it, or delete that folder to begin anew.",
        path=folder,
    )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs between two plans, such as ``size was [224, 224] and is [256, 256]``."""
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old != new and name in _UNREADABLE:
            yield _UNREADABLE[name]
        elif old != new:
            texts = ["not there" if value is None else f"{value!r:.60}" for value in (old, new)]
            yield f"{name} was {texts[0]} and is {texts[1]}"
