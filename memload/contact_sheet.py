"""Picture a finished data set: a contact sheet of some of its samples."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from memload.storage.index import Index
from memload.storage.shards import Shards
from memload.storage.where import matching
from memload.wording import listed, printable

_GAP, _CAPTION_HEIGHT = 4, 14
#: From one id of a mask to the next, the hue goes this part of the circle: the golden ratio, which
#: keeps the hues of any ids apart.
_HUE_STEP = 0.618034


class Preview(list[int]):
    """The numbers of the samples on a contact sheet, and the sheet, which a notebook shows.

    >>> memload.preview("out.bin").image.size
    (1060, 1172)
    """

    def __init__(self, samples: Sequence[int], image: Image.Image) -> None:
        super().__init__(samples)
        self.image = image  #: the contact sheet

    def _repr_png_(self) -> bytes | None:
        return self.image._repr_png_()


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

    Each sample has its number, its label, its mask, its points (red) and its boxes (yellow). The
    mask is half transparent, with a color for each id. Pixels of id 0, the background, and of 255,
    the margins and missing masks, are left as they are. Other arrays are not shown.

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
    shows. Raises FormatError if a file is missing or damaged, OSError if ``output`` cannot be
    written, and ValueError or IndexError for wrong arguments.

    >>> memload.preview("out.bin", "grid.png", indices=[5, 17])
    [5, 17]
    """
    index = Index.open(path)
    if indices is not None:
        chosen = np.arange(len(index))[np.array(indices, int)].tolist()
    else:
        of_class = {} if class_name is None else {"label": class_name}
        known = matching(len(index), index.columns, index.texts, of_class)
        rng = np.random.default_rng(seed)
        chosen = sorted(rng.choice(known, min(count, len(known)), replace=False).tolist())
    if not chosen:
        raise ValueError("There is no sample to show. Choose another class, or other indices")
    masks = [array.name for array in index.arrays if array.kind == "mask"]
    if mask is not None and mask not in masks:
        known_masks = f"the masks are {listed(masks)}" if masks else "it has none"
        raise ValueError(f"There is no mask {mask!r} in {index.path}: {known_masks}")
    sheet = _draw_sheet(index, chosen, tile, mask or next(iter(masks), None))
    if output is not None:
        try:
            sheet.save(output)
        except (ValueError, KeyError) as error:  # KeyError: a format that Pillow can only read
            raise ValueError(
                f"{str(output)!r} is not a name for an image: Pillow cannot write this format "
                f"({error}). Use a name such as grid.png"
            ) from None
    return Preview(chosen, sheet)


def _draw_sheet(index: Index, chosen: Sequence[int], tile: int, mask: str | None) -> Image.Image:
    """Draw samples in rows and columns, about as many pixels high as wide."""
    height, width, _ = index.image.shape
    size = tile, max(1, round(tile * height / width))
    step_x, step_y = size[0] + _GAP, size[1] + _CAPTION_HEIGHT + _GAP
    columns = min(len(chosen), max(1, round((len(chosen) * step_y / step_x) ** 0.5)))
    rows = -(-len(chosen) // columns)
    sheet = Image.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), "white")
    images, masks = Shards(index), None if mask is None else Shards(index, mask)
    for number, sample in enumerate(chosen):
        image = _picture(images.row(int(index.row[sample])))
        if masks is not None:
            image = _with_mask(image, masks.row(int(index.rows_of(masks.array.name)[sample])))
        captioned = Image.new("RGB", (size[0], size[1] + _CAPTION_HEIGHT), "white")
        captioned.paste(_with_shapes(image.resize(size, Image.Resampling.BILINEAR), index, sample))
        ImageDraw.Draw(captioned).text((0, size[1]), _caption(index, sample), "black")
        row, column = divmod(number, columns)
        sheet.paste(captioned, (_GAP + column * step_x, _GAP + row * step_y))
    return sheet


def _picture(pixels: np.ndarray) -> Image.Image:
    if pixels.dtype != np.uint8:  # other dtypes have no fixed range: show from minimum to maximum
        with np.errstate(invalid="ignore"):  # some kinds of NaN warn
            values = np.nan_to_num(pixels.astype(np.float64), posinf=0, neginf=0)
        low, high = float(values.min()), float(values.max())
        pixels = ((values - low) / ((high - low) or 1) * 255).astype(np.uint8)
    channels = [0, 1, 2] if pixels.shape[2] > 2 else [0, 0, 0]
    return Image.fromarray(np.ascontiguousarray(pixels[:, :, channels]))


def _with_mask(image: Image.Image, ids: np.ndarray) -> Image.Image:
    """Return a picture that is half covered by the colors of a mask's ids ``(H, W)``."""
    hues = (ids * _HUE_STEP % 1 * 256).astype(np.uint8)
    full = np.full_like(hues, 255)
    colors = Image.fromarray(np.dstack([hues, full, full]), "HSV").convert("RGB")
    cover = Image.fromarray(np.where(np.isin(ids, (0, 255)), 0, 128).astype(np.uint8))
    sized = (each.resize(image.size, Image.Resampling.NEAREST) for each in (colors, cover))
    return Image.composite(next(sized), image, next(sized))


def _with_shapes(image: Image.Image, index: Index, sample: int) -> Image.Image:
    """Return a tile with the outlines of boxes, which are edges, and with points.

    The whole picture is the box (0, 0, W, H); the center of its first pixel is the point (0, 0).
    """
    draw, (height, width, _) = ImageDraw.Draw(image), index.image.shape
    scale = np.array([image.width / width, image.height / height])
    for name in index.boxes:
        corners = index.columns[name][sample].clip(0, [width, height] * 2) * np.tile(scale, 2)
        for left, top, right, bottom in corners.tolist():
            if left < right and top < bottom:  # neither NaN nor outside of the picture
                first = math.floor(left), math.floor(top)
                last = math.ceil(right) - 1, math.ceil(bottom) - 1
                draw.rectangle((*first, *last), outline="yellow")
    for name in index.points:
        for x, y in ((index.columns[name][sample] + 0.5) * scale).tolist():
            if 0 <= x <= image.width and 0 <= y <= image.height:
                draw.ellipse((x - 1.5, y - 1.5, x + 1.5, y + 1.5), fill="red")
    return image


def _caption(index: Index, sample: int) -> str:
    """Return the number of a sample, and its class, label or file name."""
    name = index.keys[sample].rpartition("/")[2]
    if "label" in index.columns:
        label = index.columns["label"][sample]
        name = str(label) if index.classes is None else index.classes[label]
    # The font may lack letters beyond Latin-1.
    return printable(f"{sample} {name}").encode("latin-1", "replace").decode("latin-1")
