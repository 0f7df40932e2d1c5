"""Folders on which several machines cannot write a data set together."""

from pathlib import Path


def check_file_system(folder: Path) -> None:
    """Raise BuildError for mounts of object storage."""
