"""An .npy file of images as a source."""

from pathlib import Path

import numpy as np

from memload.building.sources.columns import Columns
from memload.building.sources.listed import ListedSource
from memload.building.sources.record import FileState
from memload.errors import SourceError


class ArrayFile(ListedSource):
    """The images of an NPY file: an array ``(N, H, W)`` or ``(N, H, W, C)``.

    They are stored as they are, so a build takes them with ``mode="array"``. ``labels`` is an NPY
    file of ``N`` numbers. A key is the number of the image. Opening maps the file and reads
    nothing.

    Raises SourceError if a file is not such an array.

    >>> source = memload.ArrayFile("x_train.npy", labels="y_train.npy")  # doctest: +SKIP
    """

    def __init__(self, path: str | Path, *, labels: str | Path | None = None) -> None:
        self.path = Path(path)
        self._images = _load(self.path)
        shape = self._images.shape
        if len(shape) not in (3, 4) or not self._images.size:
            raise SourceError(
                f"{path} has the shape {shape}, which is neither (N, H, W) nor (N, H, W, C). "
                "Reshape it.",
                path=path,
            )
        status = self.path.stat()
        self._file_state = FileState(status.st_size, status.st_mtime_ns)
        columns = Columns()
        if labels is None:
            columns.notes.append(f"no labels: name an array of {len(self._images):,} with --labels")
        else:
            columns.add("label", self._checked_labels(Path(labels)))
        super().__init__([str(number) for number in range(len(self._images))], columns.finish())

    def _checked_labels(self, path: Path) -> np.ndarray:
        values = np.squeeze(_load(path))
        if values.shape != (len(self._images),) or values.dtype.kind not in "biuf":
            raise SourceError(
                f"{path} has the shape {values.shape} and type {values.dtype}, but {self.path} "
                f"needs ({len(self._images)},) of numbers.",
                path=path,
            )
        return np.array(values)

    def _image(self, index: int) -> np.ndarray:
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
    except (ValueError, EOFError) as error:
        raise SourceError(f"{path} is not an .npy file: {error}.", path=path) from error
    if not isinstance(array, np.ndarray):
        raise SourceError(f"{path} is an .npz file. Save one array with numpy.save.", path=path)
    return array
