"""Machines that differ: one error that names the machine and the difference; the rest goes on."""

import json
import os
import re
import shutil
import socket
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload
from memload.building.conversion import Settings

OPTIONS: dict[str, Any] = {"size": 8, "num_workers": 0, "progress": False}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that gives this machine another name."""

    def name(text: str) -> None:
        monkeypatch.setattr(socket, "gethostname", lambda: text)

    return name


@pytest.fixture
def refused(pictures: Path, tmp_path: Path, machine: Callable[[str], None]) -> Callable[..., str]:
    """A function that begins a build on machine-a, and returns the error of another on machine-b.

    ``between`` is called before that. Afterwards the build goes on as it began.
    """

    def begin(between: Callable[[], None] = lambda: None, **changed: Any) -> str:
        first: dict[str, Any] = {"source": pictures, "output": tmp_path / "out.bin", **OPTIONS}
        machine("machine-a")
        memload.build(**first, part=(0, 2))
        before = contents(tmp_path / "out.building")
        machine("machine-b")
        between()
        with pytest.raises(memload.BuildError) as raised:
            memload.build(**first | {"part": (1, 2)} | changed)
        after = contents(tmp_path / "out.building")
        assert after == before
        return str(raised.value)

    return begin


@pytest.fixture
def write_masks(pictures: Path, tmp_path: Path) -> Callable[[], Path]:
    """A function that writes a mask for each picture, and returns their folder."""

    def write() -> Path:
        masks = tmp_path / "masks"
        for path in pictures.rglob("*.jpg"):
            with Image.open(path) as picture:
                mask = Image.new("L", picture.size, 1)
            name = (masks / path.relative_to(pictures)).with_suffix(".png")
            name.parent.mkdir(parents=True, exist_ok=True)
            mask.save(name)
        return masks

    return write


def contents(folder: Path) -> dict[str, bytes]:
    """Return what a folder has, except its locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def assert_names_both(error: str, difference: str) -> None:
    assert "holds a build that began on machine-a, and what is given on machine-b differs" in error
    assert difference in error
    assert "Use the same source, settings and versions on all machines, or delete" in error


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"size": 9}, "size was [8, 8] and is [9, 9]"),
        ({"fit": "pad"}, "fit was 'crop' and is 'pad'"),
        ({"fast": True}, "fast was False and is True"),
        ({"exif": False}, "exif was True and is False"),
        ({"mode": "L"}, "mode was 'RGB' and is 'L'"),
        ({"shard_size": 4096 + 192}, "rows per shard was 5 and is 1"),
        (
            {"classes": ["class2", "class1", "class0"]},
            "the list of classes was None and is [class2, c",
        ),
        ({"masks": ["mask"]}, "the option masks was None and is [mask]"),
        ({"arrays": ["depth"]}, "the option arrays was None and is [depth]"),
        ({"boxes": {"boxes": 9}}, "the option boxes was None and is [boxes=9]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_settings_are_refused(
    refused: Callable[..., str], changed: dict[str, Any], difference: str
) -> None:
    assert_names_both(refused(**changed), difference)


@pytest.mark.parametrize("name", ["pillow", "libjpeg-turbo"])
def test_another_library_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original = Settings.libraries

    def libraries(self: Settings) -> dict[str, str]:
        found = original(self)
        assert name in found
        return {**found, name: "0.0.1"}

    def other() -> None:
        monkeypatch.setattr(Settings, "libraries", libraries)

    found = original(Settings((8, 8)))[name]
    assert_names_both(refused(other), f"{name} was {found!r} and is '0.0.1'")


def test_another_memload_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = memload.__version__
    error = refused(lambda: monkeypatch.setattr(memload, "__version__", "0.0.1"))
    assert_names_both(error, f"memload was {version!r} and is '0.0.1'")


def test_another_path_is_refused(
    refused: Callable[..., str], pictures: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(pictures, tmp_path / "elsewhere")
    assert_names_both(refused(source=other), "paths was [")


def test_a_folder_that_is_not_mounted_is_refused(
    refused: Callable[..., str], pictures: Path
) -> None:
    error = refused(lambda: shutil.rmtree(pictures))
    assert_names_both(error, "the source is another one, or is missing: 8 samples")
    assert "the image of class0/00000.jpg, for example, cannot be read here" in error


def test_other_pictures_at_the_same_path_are_refused(
    refused: Callable[..., str], pictures: Path
) -> None:
    def change() -> None:
        for path in pictures.rglob("*.jpg"):
            Image.new("RGB", (16, 12), "red").save(path)

    error = refused(change)
    assert_names_both(error, "8 samples of 8 that were looked at differ")
    assert "is another one here" in error


def test_pictures_that_were_mended_meanwhile_do_not_stop_a_part(
    pictures: Path, tmp_path: Path
) -> None:
    build = partial(memload.build, pictures, tmp_path / "out.bin", **OPTIONS)
    build(part=(0, 2))
    first, *_, last = sorted(pictures.rglob("*.jpg"))
    Image.new("RGB", (16, 12), "red").save(first)
    last.unlink()
    assert build(part=(1, 2)).is_published


@pytest.mark.parametrize("kind", ["tar", "csv"])
def test_an_archive_or_a_table_that_was_rewritten_meanwhile_is_refused(
    machine: Callable[[str], None], pictures: Path, tmp_path: Path, kind: str
) -> None:
    """The list has the positions in it, or its values."""
    path = tmp_path / f"pictures.{kind}"
    names = [str(each.relative_to(pictures)) for each in sorted(pictures.rglob("*.jpg"))]

    def write(names: Sequence[str]) -> None:
        if kind == "csv":
            lines = [f"{pictures / name},{name[:6]}" for name in names]
            path.write_text("\n".join(["path,label", *lines, ""]))
            return
        with tarfile.open(path, "w") as file:
            for name in names:
                file.add(pictures / name, name)

    build = partial(memload.build, path, tmp_path / "out.bin", **OPTIONS)
    machine("machine-a")
    write(names)
    build(part=(0, 2))
    machine("machine-b")
    write(names[1:])
    with pytest.raises(memload.BuildError) as raised:
        build(part=(1, 2))
    assert_names_both(str(raised.value), f"{path} was '")
    assert "bytes of 20" in str(raised.value)
    assert "A copy of a file has to keep its time: cp -p, rsync -t" in str(raised.value)


class Numbered:
    """A data set whose images are arrays."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index >= self.count:
            raise IndexError
        return np.full((8, 8, 3), index, np.uint8), index % 2


def test_a_data_set_with_other_samples_is_refused(refused: Callable[..., str]) -> None:
    error = refused(source=Numbered(30))
    assert "machine-b differs" in error


def test_a_data_set_with_other_names_is_refused(
    tmp_path: Path, machine: Callable[[str], None]
) -> None:
    build = partial(memload.build, output=tmp_path / "out.bin", **OPTIONS)
    machine("machine-a")
    build(Numbered(16), part=(0, 2))
    machine("machine-b")
    with pytest.raises(memload.BuildError) as raised:
        build(Numbered(17), part=(1, 2))
    assert_names_both(str(raised.value), "its samples have other names")
    assert build(Numbered(16), part=(1, 2)).is_published


class Reversed(Numbered):
    """The same samples in another order, as of an unsorted list of files."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return super().__getitem__(self.count - 1 - index)


class Relabelled(Numbered):
    """The same images with other labels, as of an unsorted list of classes."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image, label = super().__getitem__(index)
        return image, 1 - label


class Augmented(Numbered):
    """Each call gives another image."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        noise = np.random.default_rng().integers(0, 256, (8, 8, 3), np.uint8)
        return noise, super().__getitem__(index)[1]


class Ending(Numbered):
    """One of the samples ends the process."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index == 0:
            os._exit(1)
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        (Reversed, "6 samples of 7 that were looked at differ: the image of sample 0, for example"),
        (Relabelled, "7 samples of 7 that were looked at differ: the column 'label' of sample 0"),
    ],
)
def test_a_data_set_with_other_samples_of_the_same_names_is_refused(
    tmp_path: Path,
    machine: Callable[[str], None],
    kind: type[Numbered],
    difference: str,
    num_workers: int,
) -> None:
    options = {**OPTIONS, "num_workers": num_workers, "shard_size": 4096 + 192}
    build = partial(memload.build, output=tmp_path / "out.bin", **options)
    machine("machine-a")
    build(Numbered(7), part=(0, 2))
    machine("machine-b")
    other = kind(7)
    other.__class__ = type("Numbered", (kind,), {})  # by its name, it is the same
    with pytest.raises(memload.BuildError) as raised:
        build(other, part=(1, 2))
    assert_names_both(str(raised.value), difference)
    assert "sort lists of files" in str(raised.value)
    assert build(Numbered(7), part=(1, 2)).is_published


def test_a_data_set_that_changes_at_random_is_refused(tmp_path: Path) -> None:
    with pytest.raises(memload.BuildError, match=re.escape("change nothing at random")):
        memload.build(Augmented(16), tmp_path / "out.bin", part=(0, 2), **OPTIONS)


def test_a_rejected_sample_of_a_data_set_may_be_mended_meanwhile(tmp_path: Path) -> None:
    build = partial(memload.build, output=tmp_path / "out.bin", max_rejects="50%", **OPTIONS)
    images: list[Any] = [b"no image", *(np.full((8, 8, 3), index) for index in range(7))]
    images[1:] = [image.astype(np.uint8) for image in images[1:]]
    build(images, part=(1, 2))
    images[0] = images[1]
    report = build(images, part=(0, 2))
    assert (report.samples, report.rejected) == (8, 0)


def test_samples_that_are_compared_may_end_their_worker(tmp_path: Path) -> None:
    options = {**OPTIONS, "num_workers": 1}
    for part in range(2):
        report = memload.build(Ending(16), tmp_path / "out.bin", part=(part, 2), **options)
    assert (report.samples, report.rejected) == (15, 1)


@pytest.mark.parametrize(
    ("change", "missing_masks"),
    [("other masks", "reject"), ("other masks", "fill"), ("no masks", "fill")],
)
def test_other_masks_at_the_same_path_are_refused(
    pictures: Path,
    tmp_path: Path,
    write_masks: Callable[[], Path],
    machine: Callable[[str], None],
    change: str,
    missing_masks: str,
) -> None:
    masks = write_masks()
    options = {"masks": masks, "missing_masks": missing_masks, **OPTIONS}
    build = partial(memload.build, pictures, tmp_path / "out.bin", **options)
    machine("machine-a")
    build(part=(0, 3))
    machine("machine-b")
    away = masks.rename(tmp_path / "away")
    if change == "other masks":
        for path in shutil.copytree(away, masks).rglob("*.png"):
            with Image.open(path) as mask:
                Image.new("L", mask.size, 2).save(path)
    with pytest.raises(memload.BuildError) as raised:
        build(part=(1, 3))
    what = "is another one" if change == "other masks" else "cannot be read"
    assert_names_both(str(raised.value), "8 samples of 8 that were looked at differ: the mask 'mas")
    assert f"for example, {what} here" in str(raised.value)


def test_relative_paths_count_from_the_folder_of_each_machine(
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_masks: Callable[[], Path],
) -> None:
    masks = write_masks()
    monkeypatch.chdir(tmp_path)
    memload.build("pics", "out.bin", masks="masks", part=(0, 3), **OPTIONS)
    monkeypatch.chdir(masks)
    memload.build(pictures, "../out.bin", masks=masks, part=(1, 3), **OPTIONS)
    with pytest.raises(memload.BuildError, match=re.escape("paths was [")):
        memload.build("pics", "../out.bin", masks=masks, part=(2, 3), **OPTIONS)
    report = memload.build("../pics", "../out.bin", masks="../masks", part=(2, 3), **OPTIONS)
    assert report.is_published
    assert report.samples == 40


@pytest.mark.parametrize("option", ["--masks", "--array"])
def test_relative_paths_of_the_command_count_from_its_folder(
    pictures: Path,
    tmp_path: Path,
    write_masks: Callable[[], Path],
    start: Callable[..., Any],
    option: str,
) -> None:
    folder, elsewhere = write_masks(), tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere / "masks")

    def run(where: Path, name: str, part: str) -> tuple[int, str]:
        arguments = [pictures, tmp_path / "out.bin", "-s", 8, "-j", 0, "--max-rejects", "100%"]
        with start("build", *arguments, "--part", part, option, name, cwd=where) as process:
            errors = process.communicate(timeout=60)[1]
        return process.returncode, errors

    value = "masks=" if option == "--masks" else "depth="
    assert run(tmp_path, f"{value}masks", "0/3")[0] == 0
    assert run(pictures, f"{value}../masks", "1/3")[0] == 0
    code, errors = run(elsewhere, f"{value}masks", "2/3")
    assert code == 1
    before, now = (f"[{value}{path / 'masks'}]" for path in (tmp_path, elsewhere))
    name = "masks" if option == "--masks" else "arrays"
    assert f"the option {name} was {before} and is {now}" in errors
    assert run(folder, f"{value}.", "2/3")[0] == 0
    assert memload.verify(tmp_path / "out.bin").ok


def test_a_column_may_be_called_as_a_file_of_the_current_folder(
    tmp_path: Path, pictures: Path, write_masks: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only folders are taken for folders of masks, as in a build without parts."""
    masks = write_masks()
    names = [path.relative_to(pictures) for path in sorted(pictures.rglob("*.jpg"))]
    lines = [f"{pictures / name},{(masks / name).with_suffix('.png')}" for name in names]
    (tmp_path / "pictures.csv").write_text("\n".join(["path,seg", *lines, ""]))
    (tmp_path / "seg").touch()
    monkeypatch.chdir(tmp_path)
    for part in range(2):
        report = memload.build(
            "pictures.csv", "out.bin", masks={"mask": "seg"}, part=(part, 2), **OPTIONS
        )
    assert [array.name for array in report.arrays] == ["mask"]


@pytest.mark.parametrize("samples", [{"the image": 5}, {"the image": {"-1": 5, "x": []}}])
def test_checksums_of_another_form_are_an_error_or_passed_over(
    pictures: Path, tmp_path: Path, samples: dict[str, Any]
) -> None:
    build = partial(memload.build, pictures, tmp_path / "out.bin", **OPTIONS)
    build(part=(0, 2))
    path = tmp_path / "out.building" / "plan.json"
    plan = json.loads(path.read_bytes())
    plan["begun"]["samples"] = samples
    path.write_text(json.dumps(plan))
    if isinstance(samples["the image"], dict):
        assert build(part=(1, 2)).is_published
        return
    with pytest.raises(memload.BuildError, match=r"plan\.json is missing or damaged"):
        build(part=(1, 2))
