"""The exceptions that memload raises, as a tree.

::

    MemloadError
    ├── FormatError            a file is not a memload data set, or is damaged   (.path)
    │   ├── MissingError       a file is missing; also a FileNotFoundError
    │   └── ChecksumError      a file holds other bytes than were written        (.rows)
    ├── SourceError            a folder, table or data set has no usable records  (.path)
    │   └── NothingNewError    all of a source is in the data set already
    ├── DecodeError            one image cannot be used                          (.key, .reason)
    ├── BuildError             a build cannot start or continue                  (.path)
    ├── FeedError              a feed does not work on this machine
    └── DependencyError        an optional library is missing; also an ImportError   (.name)

A wrong argument raises `ValueError`, `TypeError` or `IndexError` instead. Each message says what is
wrong, names the file, key or argument, and ends with what to do.
"""

from collections.abc import Sequence
from os import PathLike, fspath

Path = str | PathLike[str]


class MemloadError(Exception):
    """The base class of errors about files, images and the environment."""


class _PathError(MemloadError):
    def __init__(self, message: str, *, path: Path | None = None) -> None:
        super().__init__(message)
        self.path = None if path is None else fspath(path)


class FormatError(_PathError):
    """A file does not follow the format. ``path`` is the file."""


class MissingError(FormatError, FileNotFoundError):
    """A file of a data set does not exist. ``path`` is the file."""


class ChecksumError(FormatError):
    """Bytes have changed since they were written. ``rows`` are the rows known to be damaged."""

    def __init__(self, message: str, *, path: Path | None = None, rows: Sequence[int] = ()) -> None:
        super().__init__(message, path=path)
        self.rows = tuple(rows)


class SourceError(_PathError):
    """A source has no usable records. ``path`` is the folder or file."""


class NothingNewError(SourceError):
    """``memload.build(…, new_to=…)`` found nothing to build. ``path`` is that data set."""


class DecodeError(MemloadError):
    """One image cannot be used. ``key`` is its name in the source, ``reason`` says why."""

    def __init__(self, reason: str, *, key: str = "") -> None:
        super().__init__(f"{key}: {reason}" if key else reason)
        self.key = key
        self.reason = reason


class BuildError(_PathError):
    """A build cannot start or continue. Existing files are untouched. ``path`` is the output."""


class FeedError(MemloadError):
    """A feed cannot serve these samples on this device. The message says why."""


class DependencyError(MemloadError, ImportError):
    """An optional library is not installed or does not load. ``name`` is what to install."""


def describe_error(error: BaseException) -> str:
    """Return type and message of an exception, such as ``KeyError: 'a'``, even if ``str`` fails."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  # it comes from a data set of the user's, which may raise anything
        message = "(its message cannot be read: __str__ raises an exception)"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
