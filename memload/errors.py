"""What can go wrong, as a tree.

::

    MemloadError
    ├── FormatError            a file is no memload data set, or is damaged   (.path)
    │   ├── MissingError       ... is not there; also a FileNotFoundError
    │   └── ChecksumError      ... holds other bytes than were written       (.rows)
    ├── SourceError            a folder, manifest or data set that no record can be taken from (.path)
    ├── DecodeError            one picture cannot be used                     (.key, .reason)
    ├── BuildError             a build cannot start or go on                  (.path)
    ├── FeedError              a way of getting samples to the device does not work here
    └── DependencyError        an optional library is missing; also an ImportError (.name)

A wrong argument is none of these: it raises `ValueError`, `TypeError` or `IndexError`. A message names
the subject, what was expected, what was found and what to do.
"""

from collections.abc import Sequence
from os import PathLike, fspath

Path = str | PathLike[str]


class MemloadError(Exception):
    """Whatever memload raises about files, pictures and the environment."""


class _PathError(MemloadError):
    def __init__(self, message: str, *, path: Path | None = None) -> None:
        super().__init__(message)
        self.path = None if path is None else fspath(path)

    def __reduce__(self) -> tuple[object, ...]:  # exceptions cross process borders
        return (type(self), self.args, self.__dict__)


class FormatError(_PathError):
    """A file is not what the format says. ``path`` is the file."""


class MissingError(FormatError, FileNotFoundError):
    """A file of a data set is not there. ``path`` is the file."""

    def __init__(self, message: str, *, path: Path | None = None) -> None:
        FormatError.__init__(self, message, path=path)

    def __str__(self) -> str:  # OSError's own would look for an errno
        return str(self.args[0])


class ChecksumError(FormatError):
    """Bytes have changed since they were written. ``rows`` are the rows known to be bad."""

    def __init__(self, message: str, *, path: Path | None = None, rows: Sequence[int] = ()) -> None:
        super().__init__(message, path=path)
        self.rows = tuple(rows)


class SourceError(_PathError):
    """No records can be taken from a source. ``path`` is the folder or file."""


class DecodeError(MemloadError):
    """One picture cannot be used. ``key`` says which, ``reason`` why."""

    def __init__(self, reason: str, *, key: str = "") -> None:
        super().__init__(f"{key}: {reason}" if key else reason)
        self.key = key
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (_decode_error, (self.reason, self.key))


def _decode_error(reason: str, key: str) -> DecodeError:
    return DecodeError(reason, key=key)


class BuildError(_PathError):
    """A build cannot start or go on. What was there before is untouched. ``path`` is the output."""


class FeedError(MemloadError):
    """A feed cannot serve these samples on this device. The message says why."""


class DependencyError(MemloadError, ImportError):
    """An optional library is not installed or does not load. ``name`` is what to install."""

    def __init__(self, message: str, *, name: str = "") -> None:
        ImportError.__init__(self, message, name=name)
