"""What decides on the rows of a build, as JSON. An unfinished build goes on only with the same."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from memload.building.checked_json import record
from memload.building.conversion import AnySettings
from memload.building.sources.record import Source, optional
from memload.wording import listed, shape_text

#: How many names of a list a difference shows.
_NAMES_SHOWN = 5
#: Longer texts are cut.
_MAX_LETTERS = 60


def plan_of(source: Source, settings: AnySettings, rows_per_shard: int | None) -> dict[str, Any]:
    """Return the plan of a build."""
    plan = {
        **settings.as_dict(),
        **settings.libraries(),
        "rows per shard": rows_per_shard,
        "columns": {
            name: [column.dtype, list(column.shape), column.points, *["boxes"] * column.boxes]
            for name, column in source.schema.items()
        },
    }
    if settings.extra_arrays:
        plan["arrays"] = {
            array.name: [array.kind, array.descr, list(array.shape)]
            for array in settings.extra_arrays
        }
    return plan | _identity(source)


class Begun(NamedTuple):
    """What ``plan.json`` of a build in parts has besides the plan: who began it, from what."""

    machine: str
    process: int
    work: str  #: such as ``part 0 of 8``
    rows: int
    source: dict[str, Any]  #: how it was opened, see `Preparation.description`
    list_sha256: str  #: of the file ``source`` with the opened source; empty if there is none
    samples: dict[str, dict[str, int]]  #: see `memload.building.parts.samples`
    overwrite: bool  #: whether the data set may be replaced that is there


def checked_plan(plan: Any) -> dict[str, Any]:
    """Return what ``plan.json`` says. Raises ValueError if that cannot be of its form.

    It is a plan with ``overwrite``, and for a build in parts a plan and a `Begun`: ``{"plan": …,
    "begun": …}``. Settings may have any values, since they are only compared.
    """
    if isinstance(plan, dict) and "begun" in plan:
        settings = checked_plan(plan.get("plan"))
        if "rows per shard" not in settings:
            raise ValueError("'rows per shard' is missing")
        begun = record(Begun, plan["begun"])
        if not all(isinstance(checksums, dict) for checksums in begun.samples.values()):
            raise ValueError("'samples' are no checksums")
        return {"plan": settings, "begun": begun}
    if not isinstance(plan, dict):
        raise ValueError("it is no object")
    rows = plan.get("rows per shard")
    if rows is not None and not (type(rows) is int and 0 < rows < 2**53):
        raise ValueError(f"'rows per shard' is {rows!r:.40}")
    for kind, describe in _BY_NAME.items():
        entries = plan.get(kind, {})
        if not isinstance(entries, dict):
            raise ValueError(f"{kind!r} is {entries!r:.40}")
        try:
            for entry in entries.values():
                describe(entry)
        except (TypeError, ValueError, SyntaxError) as error:  # of NumPy's, for example
            raise ValueError(f"{kind!r} is {entries!r:.40}") from error
    return plan


def _identity(source: Source) -> dict[str, Any]:
    """Return what decides the records besides their columns' types, as JSON has it.

    Classes are left out if `RowWork` compares the labels of all finished rows: a folder may be
    added in the meantime then.
    """
    identity: dict[str, Any] = {}
    if optional(source).identity is not None:
        identity["source"] = optional(source).identity
    if not hasattr(source, "without_image"):
        texts = optional(source).categories
        identity["classes"] = None if source.classes is None else list(source.classes)
        identity["categories"] = {name: list(texts[name]) for name in texts}
    return identity


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say what differs between two plans."""
    texts: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old == new or (name == "rows per shard" and before.get("size") != now.get("size")):
            continue  # larger rows are fewer in a shard
        if name in _BY_NAME and {type(old), type(new)} <= {dict, type(None)}:
            texts += _differences_by_name(name, old or {}, new or {})
        elif name != "source" or _are_short(old, new):
            texts.append(f"{name} was {_text(old)} and is {_text(new)}")
    # The identity of a source repeats much of the rest, in a form that programs read.
    return "; ".join(texts) or "the source is another one, or is read with other options"


def _differences_by_name(
    kind: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what differs between the columns, arrays or categories of two plans."""
    noun = {"columns": "column", "arrays": "array", "categories": "category"}[kind]
    describe = _BY_NAME[kind]
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            yield f"the {noun} {name!r:.80} is gone"
        elif name not in before:
            yield f"the {noun} {name!r:.80} is new"
        elif before[name] != now[name]:
            texts = [describe(content[name]) for content in (before, now)]
            if texts[0] == texts[1]:
                yield f"the {noun} {name!r:.80} is another one"
            else:
                yield f"the {noun} {name!r:.80} was {texts[0]} and is {texts[1]}"


def _column(entry: Sequence[Any]) -> str:
    """Return, for example, ``boxes of float32 100×4``."""
    dtype, shape, is_points, *rest = entry
    kind = "points of " if is_points else "boxes of " if rest else ""
    return f"{kind}{np.dtype(dtype).name} {shape_text(shape)}".rstrip()


def _array(entry: Sequence[Any]) -> str:
    """Return, for example, ``a mask of uint8 256×256``."""
    kind, descr, shape = entry
    return f"{kind} of {np.dtype(descr).name} {shape_text(shape)}"


def _are_short(*values: Any) -> bool:
    return all(isinstance(value, str) and len(value) < _MAX_LETTERS for value in values)


def _text(value: Any) -> str:
    """Return a setting, or the first ones of a list of names."""
    if isinstance(value, list) and not all(isinstance(item, int) for item in value):
        return f"[{listed(value, _NAMES_SHOWN)}]"
    return f"{value!r:.{_MAX_LETTERS}}"


#: What a plan has by name, and how an entry is shown.
_BY_NAME: dict[str, Callable[[Any], str]] = {
    "columns": _column,
    "arrays": _array,
    "categories": _text,
}
