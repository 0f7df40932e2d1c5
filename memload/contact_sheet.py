"""Picture a finished data set: a contact sheet of some of its samples."""

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from memload.building.resizing import nearest
from memload.errors import FormatError
from memload.storage.format import DESCRS_OF_MASKS
from memload.storage.index import Array, Index
from memload.storage.shards import Shards
from memload.wording import listed

#: A contact sheet has at most this many pixels, which take 400 MB of memory.
_MAX_SHEET_PIXELS = 1 << 27
#: A tile of a contact sheet is at most this many times as high as it is wide.
_MAX_TILE_RATIO = 8
_GAP, _CAPTION_HEIGHT = 4, 14

#: Colors of a mask's ids from 1 on, chosen to be told apart; after the last they start again. Their
#: number is prime, so that ids in steps of 10 or 1,000 differ, too.
_COLORS = np.array(
    [
        *[(230, 25, 75), (60, 180, 75), (255, 225, 25), (0, 130, 200), (245, 130, 48)],
        *[(145, 30, 180), (70, 240, 240), (240, 50, 230), (210, 245, 60), (250, 190, 212)],
        *[(0, 128, 128), (220, 190, 255), (170, 110, 40), (255, 250, 200), (128, 0, 0)],
        *[(170, 255, 195), (128, 128, 0), (255, 215, 180), (0, 0, 128)],
    ],
    np.uint16,
)
#: A mask with more ids than this on a sheet, such as one of depths, is drawn in levels of gray.
_MAX_COLORS = 64


class Preview(list[int]):
    """The numbers of the samples on a contact sheet, and the sheet, which a notebook shows.

    >>> memload.preview("out.bin").image.size
    (1060, 1172)
    """

    def __init__(self, samples: Sequence[int], image: Image.Image, masks: Sequence[str]) -> None:
        super().__init__(samples)
        self.image = image  #: the contact sheet
        self.masks = masks  #: the names of all masks; the first is the one shown

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.image.save(file, "PNG")
        return file.getvalue()


def preview(
    path: str | Path,
    output: str | Path | None = None,
    *,
    count: int = 64,
    seed: int = 0,
    indices: Sequence[int] | None = None,
    class_name: str | None = None,
    mask: str | None = None,
    tile: int = 128,
) -> Preview:
    """Draw a contact sheet of samples, and return which samples it shows.

    Each sample has its number, its label, its mask, its points (red) and its boxes (yellow, with
    their numbers of the column "labels"). The mask is half transparent. Each id has a color, which
    the line at the bottom tells; more than 64 ids are levels of gray. Pixels of id 0, the
    background, and of the fill, 255, are left as they are. Other arrays are not shown.

    Args:
        path: The data set, such as ``"out.bin"``, or an index.
        output: The picture to write, such as ``"grid.png"``. By default none is written.
        count: How many random samples are shown, in the order of the data set.
        seed: Chooses them.
        indices: The samples to show instead, in this order.
        class_name: Restricts them to a class, or to a label if classes have no names.
        mask: The mask to show. By default the first.
        tile: The width of each sample in pixels.

    Returns the numbers of the samples, as a list. Its ``image`` is the sheet, which a notebook
    shows. Raises FormatError if a file is missing or damaged or ``output`` cannot be written, and
    ValueError or IndexError for wrong arguments.

    >>> memload.preview("out.bin", "grid.png", indices=[5, 17])
    [5, 17]
    """
    index = Index.open(path)
    chosen = _choose(index, count, seed, indices, class_name)
    masks = _masks_of(index, mask)
    sheet = _draw_sheet(index, chosen, tile, masks[0] if masks else None)
    if output is not None:
        _save(sheet, output)
    return Preview(chosen, sheet, [array.name for array in masks])


def _save(sheet: Image.Image, output: str | Path) -> None:
    try:
        sheet.save(output)
    except (ValueError, KeyError) as error:  # KeyError: a format that Pillow can only read
        raise ValueError(
            f"{str(output)!r} is not a name for an image: Pillow cannot write this format "
            f"({error}). Use a name such as grid.png"
        ) from None
    except OSError as error:
        raise FormatError(
            f"{output} cannot be written: {error.strerror or error}. Check its folder, or write "
            "elsewhere",
            path=output,
        ) from error


def _choose(
    index: Index, count: int, seed: int, indices: Sequence[int] | None, class_name: str | None
) -> list[int]:
    size = len(index)
    if indices is not None:
        for position in indices:
            if not -size <= position < size:
                raise IndexError(f"index {position} is out of range for {size:,} samples")
        chosen = [position % size for position in indices]
    else:
        candidates = np.arange(size) if class_name is None else _samples_of(index, class_name)
        rng = np.random.default_rng(seed)
        chosen = sorted(rng.choice(candidates, min(count, len(candidates)), replace=False).tolist())
    if not chosen:
        raise ValueError("There is no sample to show. Choose another class, or other indices")
    return chosen


def _samples_of(index: Index, class_name: str) -> np.ndarray:
    classes = index.classes or ()
    if class_name in classes:
        return np.flatnonzero(index.columns["label"] == classes.index(class_name))
    labels = index.columns.get("label")
    if not classes and class_name.isdecimal() and labels is not None and labels.ndim == 1:
        return np.flatnonzero(labels == int(class_name))
    known = f"the classes are {listed(classes)}" if classes else "this data set has no classes"
    raise ValueError(f"There is no class {class_name!r}: {known}")


def _masks_of(index: Index, chosen: str | None) -> list[Array]:
    """Return the masks of a data set, the chosen one first."""
    masks = [array for array in index.arrays if array.kind == "mask"]
    image = index.image
    if index.setting("mode") == "mask" and image.descr in DESCRS_OF_MASKS and image.shape[2] == 1:
        masks.insert(0, image)
    if chosen is not None and chosen not in (array.name for array in masks):
        known = f"the masks are {listed(array.name for array in masks)}" if masks else "it has none"
        raise ValueError(f"There is no mask {chosen!r} in {index.path}: {known}")
    return sorted(masks, key=lambda array: array.name != chosen)


def _draw_sheet(
    index: Index, chosen: Sequence[int], tile: int, mask_array: Array | None
) -> Image.Image:
    """Draw samples in rows and columns, about as many pixels high as wide."""
    height, width, _ = index.image.shape
    tile_height = min(max(1, round(tile * height / width)), _MAX_TILE_RATIO * tile)
    step_x, step_y = tile + _GAP, tile_height + _CAPTION_HEIGHT + _GAP
    columns = min(len(chosen), max(1, round((len(chosen) * step_y / step_x) ** 0.5)))
    rows = -(-len(chosen) // columns)
    legend_height = 0 if mask_array is None else _CAPTION_HEIGHT
    size = (columns * step_x + _GAP, rows * step_y + _GAP + legend_height)
    if size[0] * size[1] > _MAX_SHEET_PIXELS:
        raise ValueError(
            f"The preview would have {size[0]:,}×{size[1]:,} pixels: {len(chosen):,} tiles of "
            f"{tile}×{tile_height}. At most {_MAX_SHEET_PIXELS:,} pixels are possible. Show fewer "
            "samples or smaller ones"
        )
    sheet = Image.new("RGB", size, "white")
    mask = None
    if mask_array is not None:
        mask = _Mask(index, mask_array, chosen, (tile_height, tile))
        mask.draw_legend(sheet, _GAP + rows * step_y)
    shards = Shards(index)
    buffer = np.empty((1, *index.image.shape), index.image.descr)
    for number, sample in enumerate(chosen):
        row, column = divmod(number, columns)
        pixels = shards.gather(index.row[[sample]], buffer)[0]
        image = _to_image(pixels).resize((tile, tile_height), Image.Resampling.BILINEAR)
        if mask is not None:
            image = mask.draw_on(image, number)
        _draw_boxes(image, index, sample)
        _draw_points(image, index, sample)
        captioned = ImageOps.expand(image, (0, 0, 0, _CAPTION_HEIGHT), "white")
        caption = _caption(index, sample)
        ImageDraw.Draw(captioned).text((0, tile_height), caption, "black", ImageFont.load_default())
        sheet.paste(captioned, (_GAP + column * step_x, _GAP + row * step_y))
    return sheet


def _to_image(pixels: np.ndarray) -> Image.Image:
    if pixels.dtype != np.uint8:  # other dtypes have no fixed range: show from minimum to maximum
        with np.errstate(invalid="ignore"):  # some kinds of NaN warn
            values = np.nan_to_num(pixels.astype(np.float64), posinf=0, neginf=0)
        low, high = float(values.min()), float(values.max())
        pixels = ((values - low) / ((high - low) or 1) * 255).astype(np.uint8)
    channels = [0, 1, 2] if pixels.shape[2] > 2 else [0, 0, 0]
    return Image.fromarray(np.ascontiguousarray(pixels[:, :, channels]))


class _Mask:
    """A mask of a data set, drawn on the samples of a contact sheet."""

    def __init__(
        self, index: Index, array: Array, samples: Sequence[int], size: tuple[int, int]
    ) -> None:
        self._name = array.name
        fill = index.setting("mask_fill")
        self._hidden = [0, fill if isinstance(fill, int) else 255]
        #: the ids of each tile's pixels
        self._ids = np.empty((len(samples), *size), array.descr)
        shards, rows = Shards(index, array.name), index.rows_of(array.name)
        buffer = np.empty((1, *array.shape), array.descr)
        sides = zip(array.shape, size, strict=False)  # without the channel of images that are masks
        y, x = (nearest(length, resized, 0, resized) for length, resized in sides)
        for number, sample in enumerate(samples):
            ids = shards.gather(rows[[sample]], buffer).reshape(array.shape[:2])
            self._ids[number] = ids[y[:, None], x]
        drawn = np.unique(self._ids)
        #: the ids on the sheet
        self._drawn = drawn[~np.isin(drawn, self._hidden)].astype(np.int64)

    @property
    def _is_gray(self) -> bool:
        return len(self._drawn) > _MAX_COLORS

    def _colors_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the color of each id ``(n,)``, uint16 ``(n, 3)``."""
        ids = ids.astype(np.int64)
        if not self._is_gray:
            return np.asarray(_COLORS[(ids - 1) % len(_COLORS)])
        low, high = self._drawn[[0, -1]]
        levels = (ids - low) * 255 // (high - low)
        return np.asarray(levels.astype(np.uint16)[:, None].repeat(3, 1))

    def draw_on(self, image: Image.Image, number: int) -> Image.Image:
        """Return the image of a tile, half covered by the colors of the mask's ids."""
        ids, pixels = self._ids[number], np.array(image)
        visible = ~np.isin(ids, self._hidden)
        pixels[visible] = (pixels[visible] + self._colors_of(ids[visible])) // 2
        return Image.fromarray(pixels)

    def draw_legend(self, sheet: Image.Image, y: int) -> None:
        """Write the name of the mask and the ids drawn, each beside its color, in one line.

        Of levels of gray, these are the lowest and the highest.
        """
        ids = self._drawn[[0, -1]] if self._is_gray else self._drawn
        draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
        x = _GAP + round(font.getlength(_printable(self._name)))
        draw.text((_GAP, y), _printable(self._name), "black", font)
        for number, color in zip(ids.tolist(), self._colors_of(ids).tolist(), strict=True):
            x += 2 * _GAP
            end = x + 10 + 2 + round(font.getlength(str(number)))
            if end > sheet.width - _GAP:
                draw.text((x, y), "...", "black", font)
                return
            outline = "black" if self._is_gray else None
            draw.rectangle((x, y + 2, x + 9, y + 11), tuple(color), outline)
            draw.text((x + 12, y), str(number), "black", font)
            x = end


def _draw_boxes(image: Image.Image, index: Index, sample: int) -> None:
    """Draw the outlines of boxes, which are edges, and their labels if each has one.

    The whole picture is (0, 0, W, H).
    """
    height, width, _ = index.image.shape
    draw = ImageDraw.Draw(image)
    scale = np.array([image.width / width, image.height / height] * 2)
    labels = index.columns.get("labels")
    for name in index.boxes:
        boxes = index.columns[name][sample]
        corners = boxes.clip(0, [width, height] * 2) * scale
        has_labels = labels is not None and labels.shape[1:] == boxes.shape[:1]
        texts = labels[sample].tolist() if labels is not None and has_labels else [""] * len(boxes)
        for (left, top, right, bottom), text in zip(corners.tolist(), texts, strict=True):
            if left < right and top < bottom:  # neither NaN nor outside of the picture
                first = math.floor(left), math.floor(top)
                draw.rectangle(
                    (*first, math.ceil(right) - 1, math.ceil(bottom) - 1), outline="yellow"
                )
                draw.text((first[0] + 2, first[1]), str(text), "yellow", ImageFont.load_default())


def _draw_points(image: Image.Image, index: Index, sample: int) -> None:
    height, width, _ = index.image.shape
    draw = ImageDraw.Draw(image)
    for name in index.points:
        for x, y in index.columns[name][sample].tolist():
            center_x, center_y = (x + 0.5) * image.width / width, (y + 0.5) * image.height / height
            if 0 <= center_x <= image.width and 0 <= center_y <= image.height:
                corners = (center_x - 1.5, center_y - 1.5, center_x + 1.5, center_y + 1.5)
                draw.ellipse(corners, fill="red")


def _caption(index: Index, sample: int) -> str:
    """Return the number of a sample, and its class, label or file name."""
    if "label" not in index.columns:
        name = index.keys[sample].rpartition("/")[2]
    else:
        label = index.columns["label"][sample]
        name = str(label) if index.classes is None else index.classes[int(label)]
    # A name may be endless, and hold line breaks or letters that the font lacks.
    return _printable(f"{sample} {name}")


def _printable(text: str) -> str:
    letters = text[:500].encode("latin-1", "replace").decode("latin-1")
    return "".join(letter if letter.isprintable() else "?" for letter in letters)
