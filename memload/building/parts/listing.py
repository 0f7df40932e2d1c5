"""The opened source as a file, so that a build in parts lists its source only once.

The file is a pickle. A pickle can name any function for its reader to call, so only classes of
sources, and what they consist of, are let in when it is read: the folder may lie where others write
(https://docs.python.org/3/library/pickle.html#restricting-globals). What these can do is to read
files as a source does. Arrays are written as bytes and a type of numbers or text, since NumPy's own
pickles may say that bytes are pointers to objects.
"""

import hashlib
import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from memload.building.sources.record import Source
from memload.building.workspace import write_at_once
from memload.errors import BuildError, describe_error

_SOURCES = "memload.building.sources."

#: Which classes a pickled source may name. A test pickles every kind of source.
_ALLOWED = {
    f"{_SOURCES}arrays": {"ArrayFile"},
    f"{_SOURCES}beside": {"FilesBeside", "_Folder"},
    f"{_SOURCES}classes": {"PinnedClasses"},
    f"{_SOURCES}entries": {"ArrayEntries"},
    f"{_SOURCES}existing": {"ExistingDataset", "_Rows"},
    f"{_SOURCES}folder": {"ImageFolder"},
    f"{_SOURCES}new_samples": {"NewSamples"},
    f"{_SOURCES}parquet": {"ParquetFiles", "_RowGroup"},
    f"{_SOURCES}positional": {"PositionalFile"},
    f"{_SOURCES}record": {"Column", "FileState"},
    f"{_SOURCES}remote": {"RemoteFolder"},
    f"{_SOURCES}table": {"Manifest"},
    f"{_SOURCES}tar": {"TarShards"},
    f"{_SOURCES}zip": {"ZipArchive"},
    __name__: {"_array", "_scalar"},
    "memload.storage.keys": {"Keys"},
    "pathlib": {"PosixPath"},
}


def write_source(source: Source, path: Path) -> str:
    """Pickle a source into a file that is complete as soon as it has its name.

    Returns a digest. `read_source` refuses other bytes.
    """
    with io.BytesIO() as buffer:
        _Writer(buffer, protocol=5).dump(source)
        data = buffer.getvalue()
    write_at_once(path, data)
    return hashlib.sha256(data).hexdigest()


def write_data_set(source: Source, folder: Path) -> str:
    """Pickle a source with code of the user's. Raises BuildError if it cannot be pickled.

    Returns a digest. `read_data_set` refuses other bytes.
    """
    try:
        data = pickle.dumps(source, protocol=5)
    except Exception as error:  # a data set's own code may raise anything
        raise BuildError(
            "The data set cannot be pickled, which tasks of an executor need: "
            f"{describe_error(error):.300}. Define its class at the top level of a module, without "
            "lambdas and open files, or build with part=(i, n), which does not pickle it."
        ) from error
    digest = hashlib.sha256(data).hexdigest()
    write_at_once(_path_of(folder, digest), data)
    return digest


def read_source(path: Path, digest: str) -> Source:
    """Read what `write_source` wrote.

    Raises BuildError if the file has other bytes, or names other code.
    """
    data = path.read_bytes()
    reason: object = "it is damaged"
    if hashlib.sha256(data).hexdigest() == digest:
        try:
            source: Source = _Reader(io.BytesIO(data)).load()
        except Exception as error:  # noqa: BLE001  # a pickle may raise anything
            is_ours = isinstance(error, pickle.UnpicklingError)
            reason = error if is_ours else describe_error(error)
        else:
            return source
    raise BuildError(f"{path} cannot be read: {reason}", path=path)


def read_data_set(folder: Path, digest: str) -> Source:
    """Read what `write_data_set` wrote. Raises BuildError if the file has other bytes."""
    path = _path_of(folder, digest)
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise BuildError(f"{path} is damaged. Run the build again.", path=path)
    try:
        source: Source = pickle.loads(data)
    except Exception as error:  # a data set's own code may raise anything
        raise BuildError(
            f"The data set cannot be read from {path}: {describe_error(error):.300}. Its class has "
            "to be in a module that can be imported there, and not in a script or notebook."
        ) from error
    return source


def _path_of(folder: Path, digest: str) -> Path:
    return folder / f"source-{digest[:16]}.pickle"


class _Writer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Let arrays and scalars be made by the functions below."""
        if type(value) is np.ndarray:
            return _array, (value.dtype.str, value.shape, value.tobytes())
        if isinstance(value, np.generic):
            return _scalar, (value.dtype.str, value.tobytes())
        return NotImplemented


def _dtype(descr: str) -> np.dtype[Any]:
    """Return a type of numbers or text. Raises UnpicklingError for all others.

    Pickles cannot name this function, since they could change the size of the type that it returns.
    """
    if not (type(descr) is str and re.fullmatch(r"[<>|=][biufcSU][0-9]{1,6}", descr)):
        raise pickle.UnpicklingError(f"it has an array of {descr!r:.40}")
    return np.dtype(descr)


def _array(descr: str, shape: tuple[int, ...], data: bytes) -> np.ndarray:
    return np.frombuffer(data, _dtype(descr)).reshape(shape)


def _scalar(descr: str, data: bytes) -> np.generic:
    scalar: np.generic = np.frombuffer(data, _dtype(descr))[0]
    return scalar


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what a source may consist of. Raises UnpicklingError for all others."""
        module = {"pathlib._local": "pathlib"}.get(module, module)  # so called by Python 3.13
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no source consists of")
        return super().find_class(module, name)
