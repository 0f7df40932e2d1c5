"""Whatever bytes a data set is made of: it is read or refused with FormatError, and does nothing else."""

import importlib.util
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

import memload
from memload.errors import FormatError
from memload.storage.index import Index

ROOT = Path(__file__).parent
CORPUS = ROOT / "corpus"


def _fuzz() -> Any:
    specification = importlib.util.spec_from_file_location("memload_fuzz", ROOT / "fuzz.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


fuzz = _fuzz()


def cases(kind: str) -> list[Path]:
    """Return files of the corpus; those of a test are looked at together, since there are many and each is quick."""
    found = sorted((CORPUS / kind).iterdir())
    assert found
    return found


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return list(fuzz.data_sets(tmp_path_factory.mktemp("sound")))


def placed(case: Path, folder: Path) -> Path:
    """Put a case in the place of its part of the sound data set; return the index."""
    folder.mkdir()
    for path in (CORPUS / "sound").iterdir():
        shutil.copy(path, folder)
    shutil.copy(case, folder / f"made{case.suffix}")
    return folder / "made.idx"


@pytest.fixture(scope="module", autouse=True)
def loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load what readers load on first use, which is no file of a data set."""
    for read in fuzz.readers(
        placed(CORPUS / "sound" / "made.idx", tmp_path_factory.mktemp("warm") / "set")
    ).values():
        read()


def test_the_sound_data_set_of_the_corpus_is_sound(tmp_path: Path) -> None:
    path = placed(CORPUS / "sound" / "made.idx", tmp_path / "set")
    fuzz.exercise(path)
    assert memload.verify(path).ok
    assert [label for _, label in memload.MemmapDataset(path)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("kind", ["refused", "shards"])
def test_what_was_found_to_be_refused_is_refused_quickly_and_in_little_memory(
    kind: str, tmp_path: Path
) -> None:
    passed, dear = [], {}
    for case in cases(kind):
        path = placed(case, tmp_path / case.stem)
        tracemalloc.start()
        try:
            with fuzz.watched(path.parent):
                memload.MemmapDataset(path)
        except FormatError:
            dear[case.name] = tracemalloc.get_traced_memory()[1]
        else:
            passed.append(case.name)
        finally:
            tracemalloc.stop()
        fuzz.exercise(path)
    assert not passed
    assert {name: peak for name, peak in dear.items() if peak > 4 << 20} == {}
    assert not list(tmp_path.rglob("pwned"))


def test_what_was_found_to_be_harmless_is_read(tmp_path: Path) -> None:
    for case in cases("read"):
        path = placed(case, tmp_path / case.stem)
        fuzz.exercise(path)
        assert [label for _, label in memload.MemmapDataset(path)] == [0, 1, 2, 0, 1], case.name


@settings(max_examples=80, derandomize=True, deadline=None, database=None)
@given(st.randoms(use_true_random=False))
def test_a_data_set_altered_at_random_is_read_or_refused(
    sound: list[Path], rng: random.Random
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fuzz.exercise(fuzz.draw(rng, sound, Path(folder)))


@settings(max_examples=120, derandomize=True, deadline=None, database=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_read_or_refused(data: bytes, with_length: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "any.idx"
        path.write_bytes(len(data).to_bytes(8, "little") + data if with_length else data)
        with pytest.raises(FormatError, match=r"any\.idx"):
            Index.read(path)


def test_what_is_read_safetensors_reads_too(sound: list[Path], tmp_path: Path) -> None:
    rng, read = random.Random(7), 0
    for number in range(600):
        path = fuzz.draw(rng, sound, tmp_path)
        try:
            index = Index.read(path)
        except FormatError:
            continue
        read += 1
        with safetensors.safe_open(path, framework="np") as file:
            assert {name for name, _ in index.tensors()} == set(file.keys()), number
    assert read > 20


@pytest.mark.parametrize(
    "statistics",
    [
        {},
        {"mean": "no", "std": None},
        {"mean": [10**400] * 3, "std": [1] * 3},
        {"mean": [0.5] * 3, "std": [-(10**400), 1, 1]},
        {"mean": [[]] * 3, "std": [{}] * 3},
        {"mean": [0.5] * 3, "std": [0, 0, 0]},
        {"mean": [0.5], "std": [1] * 1000},
    ],
    ids=lambda value: str(value)[:40],
)
def test_statistics_of_no_use_are_told_by_what_would_use_them(
    statistics: Any, make_dataset: Any
) -> None:
    path = make_dataset(statistics=statistics).path
    with pytest.raises(ValueError, match=r"mean|std"):
        list(memload.Loader(path, 2, device="cpu", transform=memload.transforms.Normalize()))


# ---- the fuzzer itself sees what it looks for


def test_a_file_elsewhere_is_seen(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "other").touch()
    (tmp_path / "set" / "link").symlink_to(tmp_path / "other")
    for name in ("../other", "link"):
        with pytest.raises(fuzz.BrokenError, match="open"), fuzz.watched(tmp_path / "set"):
            os.close(os.open(tmp_path / "set" / name, os.O_RDONLY))
    (tmp_path / "set" / "own").touch()
    with fuzz.watched(tmp_path / "set"):
        (tmp_path / "set" / "own").read_bytes()


def test_unpickling_is_seen(tmp_path: Path) -> None:
    data = pickle.dumps(Path)
    with pytest.raises(fuzz.BrokenError, match="pickle"), fuzz.watched(tmp_path):
        pickle.loads(data)


@pytest.mark.parametrize(
    "raised", [KeyError("row"), MemoryError(), TypeError(), OSError(), FormatError("of no file")]
)
def test_another_error_is_seen(
    raised: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    path = placed(CORPUS / "sound" / "made.idx", tmp_path / "set")
    monkeypatch.setattr(memload.Index, "read", fail)
    with pytest.raises(fuzz.BrokenError):
        fuzz.exercise(path)


def test_it_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.storage.fuzz", "--seconds", "1", "--seed", "3"],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 3: ")
