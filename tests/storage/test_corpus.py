"""Damaged and forged data sets: each is read or refused with FormatError, in little memory."""

import contextlib
import shutil
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memload
from memload import MemmapDataset
from memload.errors import FormatError
from memload.storage.index import Index

CORPUS = Path(__file__).parent / "corpus"
SOUND = CORPUS / "sound"


def cases(*kinds: str) -> list[Any]:
    """Return the files of the corpus: each takes the place of its part of the sound data set."""
    paths = [path for kind in kinds for path in sorted((CORPUS / kind).iterdir())]
    assert paths
    return [pytest.param(path, id=path.name) for path in paths]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SOUND, tmp_path / "set"))


def use_everything(path: Path) -> None:
    """Use all that reads a data set. Each part of it works or raises FormatError."""
    with contextlib.suppress(FormatError):
        memload.info(path)
    with contextlib.suppress(FormatError):
        memload.verify(path, num_threads=1)
    with contextlib.suppress(FormatError):
        list(Index.read(path).keys)
    with contextlib.suppress(FormatError):
        dataset = MemmapDataset(path)
        for _ in dataset:
            pass
        dataset.gather(range(len(dataset)))
        repr(dataset.subset([0, 0]))


@pytest.mark.parametrize("case", cases("refused", "shards"))
def test_damage_is_refused_in_little_memory(case: Path, folder: Path) -> None:
    shutil.copy(case, folder / f"made{case.suffix}")
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            MemmapDataset(folder / "made.idx")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1000
    use_everything(folder / "made.idx")
    assert not list(folder.rglob("pwned"))  # which the pickles in the corpus would make


@pytest.mark.parametrize("case", cases("read"))
def test_harmless_oddities_are_read(case: Path, folder: Path) -> None:
    shutil.copy(case, folder / f"made{case.suffix}")
    assert [label for _, label in MemmapDataset(folder / "made.idx")] == [0, 1, 2, 0, 1]
    use_everything(folder / "made.idx")


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_refused(data: bytes, with_length: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "any.idx"
        path.write_bytes(len(data).to_bytes(8, "little") + data if with_length else data)
        with pytest.raises(FormatError, match=r"any\.idx"):
            Index.read(path)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.data())
def test_a_sound_data_set_with_other_bytes_is_read_or_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(SOUND, Path(name) / "set"))
        path = folder / data.draw(st.sampled_from(["made.idx", "made.bin"]))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            start = data.draw(st.integers(0, len(content) - 1))
            length = data.draw(st.integers(0, 8))
            content[start : start + length] = data.draw(st.binary(max_size=8))
        path.write_bytes(content)
        use_everything(folder / "made.idx")
