"""A list of transforms, done in as few passes over memory as possible."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from textwrap import indent
from typing import Any

import torch

from memload.transforms.arguments import column_names, integer, shown, wrong
from memload.transforms.following import KINDS, Followers
from memload.transforms.passes import group
from memload.transforms.pixels import Normalize
from memload.transforms.prepared import Prepared, is_own
from memload.transforms.transform import Transform

#: The functions there return a Compose; they are no transforms.
_RECIPES = "memload.transforms.recipes"
_MASK_FILL = 255


class Compose(Transform):
    """Transforms one after another, like torchvision's ``v2.Compose``.

    Neighbours are fused where possible, and `repr` shows which are. Crops, resizes, flips,
    Normalize and ToDtype take one pass over memory; on CUDA that is a Triton kernel. ColorJitter,
    TrivialAugmentWide and others that draw an operation for each sample are done together, and on
    CUDA in as few passes as possible. Other transforms follow in order, each by itself. Changes of
    colours after Normalize are refused, as they need values from black to white. For how to call it
    see `Transform`.

    Any callable or module that takes images and returns images, such as ``torch.nn.AvgPool2d``, can
    be in the list, too. One that changes images in place should not come first, as it would change
    those given, unless there are several views.

    What moves pixels also moves the columns named by ``points``, ``masks`` and ``boxes``, with the
    same random numbers. By default these are none, and in a Loader all those of the data set that
    are in its batches. Lists that are given stay, also empty ones.

    - ``points`` ``(N, K, 2)`` are x and y in pixels. Pixel centres have integer coordinates: (0, 0)
      is the centre of the top left pixel.
    - ``masks`` ``(N, H, W)`` are integers, such as uint8 or uint16, with the height and width of
      the images. They are resized to the nearest neighbour, so that every number was there before.
      Outside of the image they are ``mask_fill``. What changes colours leaves masks alone.
    - ``boxes`` ``(N, K, 4)`` are x1, y1, x2 and y2 of the edges, in pixels: the whole image is (0,
      0, W, H). NaN is no box. A box becomes the smallest upright box that holds its corners, within
      the image. If nothing of it is left, it becomes NaN.

    With ``views=2`` the list is applied twice with different random numbers. Then images are a
    tuple of two, and so are points, masks and boxes that may move, and other columns that differ
    between the views. ``views`` may also be a list of further transforms for each view, each a
    `Compose` or a list. They follow those in ``transforms``, and may give views of different sizes.

    ``memory_format`` is that of the images returned: ``torch.channels_last`` or
    ``torch.contiguous_format``.

    >>> pretrain = Compose([RandomResizedCrop(224), RandomHorizontalFlip(), Normalize("imagenet")],
    ...                    points=["eyes"], views=2)
    >>> (one, other), columns = pretrain(images, {"eyes": eyes, "label": labels}, samples=samples)
    >>> large = Compose([RandomResizedCrop(224, scale=(0.32, 1)), RandomHorizontalFlip()])
    >>> small = Compose([RandomResizedCrop(96, scale=(0.05, 0.32)), RandomHorizontalFlip()])
    >>> ten_views = Compose(views=[large, large, *[small] * 8])(images, samples=samples)
    >>> crop = Compose([RandomCrop(224, padding=8), RandomHorizontalFlip()], masks=["mask"])
    >>> images, columns = crop(images, {"mask": masks}, samples=samples)
    """

    def __init__(
        self,
        transforms: Sequence[Callable[..., Any]] = (),
        *others: object,
        points: Sequence[str] | None = None,
        masks: Sequence[str] | None = None,
        boxes: Sequence[str] | None = None,
        mask_fill: int = _MASK_FILL,
        views: int | Sequence[Any] = 1,
        memory_format: torch.memory_format = torch.channels_last,
    ) -> None:
        if others:
            given = 1 + len(others)
            raise TypeError(f"Compose takes one list, not {given} arguments. Write Compose([...]).")
        if memory_format not in (torch.channels_last, torch.contiguous_format):
            formats = "torch.channels_last or torch.contiguous_format"
            raise wrong(self, "memory_format", formats, repr(memory_format))
        self.points = column_names(self, "points", points)
        self.masks = column_names(self, "masks", masks)
        self.boxes = column_names(self, "boxes", boxes)
        self.mask_fill = integer(self, "mask_fill", mask_fill)
        self.memory_format = memory_format
        self.transforms = tuple(self._flatten(transforms))
        self.views: int | tuple[tuple[Any, ...], ...]
        if isinstance(views, Sequence) and not isinstance(views, str) and views:
            self.views = tuple(tuple(self._flatten(_as_list(view))) for view in views)
        else:
            expected = "an integer of at least 1, or a list of lists of transforms"
            self.views = integer(self, "views", views, 1, expected)
        self._bind_and_group({})

    def _flatten(self, transforms: Any) -> list[Any]:
        """Return a list of transforms without lists inside."""
        if not isinstance(transforms, Iterable):
            raise TypeError(f"Compose takes a list of transforms, not {transforms!r}. Write [...].")
        flat: list[Any] = []
        for step in transforms:
            if isinstance(step, Compose):
                formats = (torch.channels_last, self.memory_format)
                follows = any(getattr(step, name) for name in KINDS)
                fills = step.mask_fill not in (_MASK_FILL, self.mask_fill)
                if follows or fills or step.views != 1 or step.memory_format not in formats:
                    raise ValueError(
                        "A Compose inside another has points, masks, boxes, mask_fill, views or "
                        "memory_format. Give them to the outer one."
                    )
                flat += step.transforms
            elif isinstance(step, type) or getattr(step, "__module__", "") == _RECIPES:
                raise TypeError(f"Compose got {step.__name__} itself. Write {step.__name__}(...).")
            elif callable(step):
                flat.append(step)
            else:
                expected = "a transform, such as Resize(224), nor a function of images"
                raise TypeError(f"Compose got {step!r}, which is neither {expected}.")
        return flat

    def __repr__(self) -> str:
        if isinstance(self.views, int):
            text = _described(self._steps_of_views[0])
        else:
            text = _described_views(self._steps_of_views)
        text += "".join(f"{name}={getattr(self, name)},\n" for name in KINDS if getattr(self, name))
        if isinstance(self.views, int) and self.views > 1:
            text += f"views={self.views},\n"
        return f"Compose(\n{indent(text, '    ')})"

    def prepare(self, samples: Any, *, seed: int = 0, epoch: int = 0) -> Prepared:
        """See `Transform.prepare`."""
        return Prepared(
            type(self).__name__,
            self._steps_of_views,
            samples,
            seed,
            epoch,
            followers=self._followers,
            memory_format=self.memory_format,
        )

    # ``masks=None`` means: not given. In a Loader, `bind` then fills in the data set's columns.
    # `_bind_and_group` passes names and statistics on to the steps.
    def bind(self, **facts: Any) -> "Compose":
        """Return the list with what it and its transforms leave to the data set filled in.

        For ``facts`` see `Transform.bind`. Lists of ``points``, ``masks`` and ``boxes`` that were
        given to the list stay, also empty ones.
        """
        bound = copy.copy(self)
        for kind in KINDS:
            if getattr(self, kind) is None:
                setattr(bound, kind, column_names(self, kind, facts.get(kind)))
        bound._bind_and_group(facts)
        return bound

    def _bind_and_group(self, facts: Mapping[str, Any]) -> None:
        """Pass facts on to the steps, group the steps of each view, and set what follows them."""
        names = {kind: getattr(self, kind) for kind in KINDS}
        facts = {**facts, **names}
        self.transforms = _bound(self.transforms, facts)
        if isinstance(self.views, int):
            self._steps_of_views = [_grouped(self.transforms)] * self.views
        else:
            self.views = tuple(_bound(view, facts) for view in self.views)
            self._steps_of_views = [_grouped([*self.transforms, *view]) for view in self.views]
        steps = chain(self.transforms, *(self.views if isinstance(self.views, tuple) else ()))
        self.moves_pixels = any(getattr(step, "moves_pixels", False) for step in steps)
        self._followers = Followers.of(names, mask_fill=self.mask_fill)


def _bound(transforms: Sequence[Any], facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return transforms with what they leave to the data set filled in."""
    return tuple(step.bind(**facts) if isinstance(step, Transform) else step for step in transforms)


def _grouped(transforms: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return what `group` returns. Raise ValueError for colours that are changed too late."""
    is_normalized = False
    for step in transforms:
        # What the user has written may undo it.
        if not is_own(step):
            is_normalized = False
        steps = list(_innermost(step))
        late = [each for each in steps if not getattr(each, "takes_normalized", True)]
        if is_normalized and late:
            raise ValueError(
                f"Compose: {type(late[0]).__name__} comes after Normalize, but needs values from "
                "black to white: 0 to 255, or for floats 0 to 1. Put it before Normalize."
            )
        is_normalized |= any(isinstance(each, Normalize) for each in steps)
    return group(transforms)


def _innermost(step: Any) -> Iterator[Any]:
    """Yield a transform, or those that are inside of it."""
    options = getattr(step, "options", None)
    if options is None:
        yield step
    else:
        for option in options:
            for inner in option.transforms:
                yield from _innermost(inner)


def _described(steps: Sequence[tuple[int, Any]]) -> str:
    """Return the passes over memory as lines."""
    return "".join(f"{shown(step)},\n" for _, step in steps)


def _described_views(steps_of_views: Sequence[Sequence[tuple[int, Any]]]) -> str:
    """Return the passes of each view as lines. Neighbours that are equal are told once."""
    text, first = "", 0
    for passes, views in groupby(map(_described, steps_of_views)):
        last = first + len(list(views)) - 1
        numbers = f"view {first}" if first == last else f"views {first} to {last}"
        text += f"{numbers}:\n{indent(passes, '    ')}"
        first = last + 1
    return text


def _as_list(view: Any) -> Any:
    """Return the transforms of a view as a list."""
    return view if isinstance(view, Sequence) else [view]
