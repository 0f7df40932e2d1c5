"""An .npy file of images as a source."""

from pathlib import Path
from typing import Any

import numpy as np

from memload.building.sources.columns import ColumnCollector
from memload.building.sources.listed import ListedSource
from memload.building.sources.record import FileState
from memload.errors import SourceError, describe_error
from memload.storage.format import DESCRS

_NAMES = [np.dtype(descr).name for descr in DESCRS]


class ArrayFile(ListedSource):
    """The images of an NPY file: an array ``(N, H, W)`` or ``(N, H, W, C)`` of any byte order.

    They are stored as they are, so a build takes them with ``mode="array"``. ``labels`` is an NPY
    file of ``N`` numbers, or of names of classes. A key is the number of the image. Opening maps
    the file and reads nothing of the images. ``notes`` says if their shape looks like
    ``(N, C, H, W)``.

    Raises SourceError if a file is not such an array.

    >>> from memload.building.sources.arrays import ArrayFile
    >>> source = ArrayFile("x_train.npy", labels="y_train.npy")  # doctest: +SKIP
    """

    def __init__(self, path: str | Path, *, labels: str | Path | None = None) -> None:
        self.path = Path(path)
        #: None in a copy that was pickled, until an image is read
        self._images: np.ndarray | None = _load(self.path)
        images = self._images
        shape = images.shape
        if not images.size:
            raise SourceError(
                f"{path} has no pixels: its shape is {shape}. Give an array with images.", path=path
            )
        if len(shape) not in (3, 4):
            raise SourceError(
                f"{path} has the shape {shape}, which is neither (N, H, W) nor (N, H, W, C). "
                "Reshape it.",
                path=path,
            )
        _check_type(images.dtype, self.path)
        status = self.path.stat()
        self._file_state = FileState(status.st_size, status.st_mtime_ns)
        columns = ColumnCollector()
        if len(shape) == 4 and shape[1] in (1, 3, 4) and shape[3] > 4:
            columns.notes.append(
                f"the shape {shape} looks like (N, C, H, W), channels first; save "
                "array.transpose(0, 2, 3, 1), which is (N, H, W, C)"
            )
        if labels is None:
            columns.notes.append(f"no labels: name an array of {len(images):,} with --labels")
        else:
            columns.add_labels(self._checked_labels(Path(labels), len(images)))
        self.has_numbers_as_keys = True
        super().__init__([str(number) for number in range(len(images))], columns.finish())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the map, with which all images would be pickled."""
        return {**vars(self), "_images": None}

    def _checked_labels(self, path: Path, count: int) -> np.ndarray:
        values = _load(path)
        if values.shape not in ((count,), (count, 1)) or values.dtype.kind not in "biufU":
            raise SourceError(
                f"{path} has the shape {values.shape} and type {values.dtype}, but the labels of "
                f"{self.path} are {count:,} numbers or texts, of shape ({count},). Save them so.",
                path=path,
            )
        return np.array(values).reshape(count)

    def _image(self, index: int) -> np.ndarray:
        if self._images is None:
            self._images = _load(self.path)
        return np.asarray(self._images[index])

    def _state(self, index: int) -> FileState:
        return self._file_state


def _load(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise SourceError(
            f"{path} cannot be read: {error.strerror or error}.", path=path
        ) from error
    except Exception as error:  # a damaged header may raise anything
        if "Object arrays" in str(error) or "Python objects" in str(error):
            problem = "holds Python objects. Save the array as numpy.stack(list(array))"
        else:
            why = describe_error(error)
            problem = f"is no .npy file, or is truncated ({why}). Copy or download it again"
        raise SourceError(f"{path} {problem}.", path=path) from error
    if not isinstance(array, np.ndarray):
        names = ", ".join(array.files[:5])
        array.close()
        raise SourceError(
            f"{path} is an .npz file, which holds several arrays ({names}). Save the images alone "
            f"with numpy.save, and their labels too: numpy.save('x.npy', numpy.load({path.name!r})"
            "['…']).",
            path=path,
        )
    return array


def _check_type(dtype: np.dtype, path: Path) -> None:
    if dtype.newbyteorder("<").str in DESCRS:
        return
    other = {"f": "float32", "b": "uint8"}.get(dtype.kind, "one of them")
    raise SourceError(
        f"{path} is of {dtype}, and arrays are stored as {', '.join(_NAMES)}. Convert it to "
        f"{other} with array.astype, and save it again.",
        path=path,
    )
