"""What a source is: records by position, and the columns that all of them have."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image

#: The extensions that torchvision's ImageFolder takes for images, in any case.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class Column(NamedTuple):
    """Type and shape of a column's entries. Points and boxes move with the image.

    Points are pairs x, y of floats, ``(K, 2)``, where (0, 0) is the center of the top left pixel.
    Boxes are ``(K, 4)``: x1, y1, x2, y2 of the edges, float32, so that the whole picture is
    (0, 0, W, H), as in torchvision and COCO. A row of NaN is no box.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    points: bool = False
    boxes: bool = False

    @property
    def follows(self) -> bool:
        """Whether the entries follow the image, wherever it is moved."""
        return self.points or self.boxes


class FileState(NamedTuple):
    """What shows that a file has changed, or that another one has its name now.

    These are its size in bytes, the time of its last change (ns since 1970), and its inode.
    """

    size: int
    mtime_ns: int
    inode: int = 0  #: 0 if it is not compared


class Record(NamedTuple):
    """One image, its name, and the values of its columns.

    ``image`` is the path of a file, which is read when its turn comes, the bytes of one, a PIL
    image, or an array ``(H, W)`` or ``(H, W, C)`` of uint8, or ``(H, W)`` of uint16. A build with
    ``mode="array"`` takes only arrays and the paths of .npy files, of uint8, uint16, int16, int32,
    float16 or float32 and with any number of channels.

    ``state`` is for an image that comes out of a larger file, such as a tar shard. If that file has
    changed when a build continues, the image is converted again.

    ``arrays`` are the masks and other arrays of the sample, by name, in one of the same forms. A
    mask has an id for each pixel of the image: a picture of palette colors or gray, or an array
    ``(H, W)`` of uint8 or uint16. Another array is a numpy array, an .npy file, or a picture. A
    name that is missing, or None, means that the sample lacks it.
    """

    key: str
    image: Path | bytes | Image.Image | np.ndarray
    columns: Mapping[str, Any]
    state: FileState | None = None
    arrays: Mapping[str, Path | bytes | Image.Image | np.ndarray | None] = {}


@runtime_checkable
class Source(Protocol):
    """What `memload.build` reads. Several processes ask for records by position.

    A source may also have the attributes of `Optional`, and two methods:

    - ``__getitems__(indices)`` returns several records at once, where that is faster, as from a
      server. An exception in place of a record rejects that one record.
    - ``without_image(index)`` returns a record quickly, without its image. A build that goes on
      compares the columns of all finished rows with it.
    """

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the classes that the column ``label`` counts into, or None."""

    @property
    def schema(self) -> Mapping[str, Column]:
        """The columns that every record has."""

    @property
    def keys(self) -> Sequence[str]:
        """The names of the records."""

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know, such as what was skipped and why."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record:
        """Return one record. An exception rejects this one record."""


class Optional(NamedTuple):
    """The attributes that a source may have, with what stands for those that it lacks.

    - ``arrays`` maps the names of the records' masks and other arrays to ``"mask"`` or ``"array"``,
      in the order in which they are stored.
    - ``categories`` maps the names of columns of int64 to the texts that they count into.
    - ``label_texts`` maps labels to the texts that they were read from, as in a table. Where a list
      of classes has these texts, they are names.
    - ``has_numbers_as_keys`` is true if the keys are no names, but count the records. Then files
      beside the images cannot be found by their names.
    - ``identity`` is what else decides the records, as JSON has it, such as the name of the column
      with the images. An unfinished build goes on only with the same.
    - ``group_starts`` are the first rows of groups that are best read by one worker, in a row.
    - ``is_portable`` is false if another machine cannot read records of a pickled copy.
    - ``root`` is the folder or URL of the images, for messages.
    """

    arrays: Mapping[str, Literal["mask", "array"]] = {}
    categories: Mapping[str, Sequence[str]] = {}
    label_texts: Mapping[int, str] = {}
    has_numbers_as_keys: bool = False
    identity: Any = None
    group_starts: Sequence[int] | None = None
    is_portable: bool = True
    root: Path | str | None = None


def optional(source: Source) -> Optional:
    """Return the attributes that a source has beyond those of all sources."""
    return Optional(
        **{name: getattr(source, name) for name in Optional._fields if hasattr(source, name)}
    )
