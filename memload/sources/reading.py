"""How a source is read: the options that all kinds of sources have in common."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memload.sources.contents import EXTENSIONS

Kind = Literal["mask", "array"]


@dataclass(frozen=True)
class Reading:
    """How a source is read. `memload.open_source` explains the options.

    ``entries`` are the kinds of masks and other arrays, and what in the source they are, by name.
    """

    image: str | None = None
    label: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    root: str | None = None
    extensions: tuple[str, ...] = EXTENSIONS
    entries: Mapping[str, tuple[Kind, Any]] = field(default_factory=dict)
    points: Mapping[str, str] = field(default_factory=dict)
    boxes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        *,
        masks: Any = None,
        arrays: Any = None,
        points: Any = None,
        boxes: Any = None,
        extensions: Any = None,
        **others: Any,
    ) -> "Reading":
        """Return options as users give them. Raises TypeError and ValueError.

        >>> Reading.of(masks="masks/", points=["eyes"]).entries
        {'mask': ('mask', 'masks/')}
        """
        if isinstance(masks, (str, os.PathLike)):
            masks = {"mask": masks}
        if isinstance(extensions, str):  # each of its characters would count as one
            raise TypeError(f"extensions must be a list such as ['.jpg'], not {extensions!r}")
        masks, arrays = _named("masks", masks), _named("arrays", arrays)
        if twice := masks.keys() & arrays.keys():
            raise ValueError(f"arrays: {min(twice)!r:.80} is a mask, too. Choose another name.")
        return cls(
            extensions=tuple(map(str.lower, extensions or EXTENSIONS)),
            entries={name: ("mask", value) for name, value in masks.items()}
            | {name: ("array", value) for name, value in arrays.items()},
            points=_named("points", points),
            boxes=_named("boxes", boxes),
            **{name: value for name, value in others.items() if value},
        )

    def is_image(self, name: str) -> bool:
        """Return whether a file has one of the extensions."""
        return name.lower().endswith(self.extensions)


def _named(argument: str, given: Any) -> dict[str, Any]:
    """Return what is given by name: a mapping, or a list of names. Raises TypeError for a text.

    >>> _named("masks", ["seg"]), _named("points", {"marks": "x*,y*", "nose": ""})
    ({'seg': 'seg'}, {'marks': 'x*,y*', 'nose': 'nose'})
    """
    if isinstance(given, (str, os.PathLike)):
        raise TypeError(f"{argument} must be a list, or a mapping such as {{'name': {given!r}}}.")
    pairs = given if isinstance(given, Mapping) else dict.fromkeys(given or (), "")
    return {name: name if value == "" else value for name, value in pairs.items()}
