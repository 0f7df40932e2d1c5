"""Builds in parts: the flow of one part, and the same bytes as those of one machine."""

import csv
import errno
import html
import itertools
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload

Digests = Callable[[Path], dict[str, str]]

#: Six rows of 8×8 pixels a shard, so that the last of seven has four.
SHARDS = {"size": 8, "shard_size": 4096 + 6 * 8 * 8 * 3}


def build(source: Any, output: Path, **options: Any) -> memload.BuildReport:
    """Build in this process, with six rows a shard, and make the folder of the output."""
    output.parent.mkdir(exist_ok=True)
    return memload.build(source, output, **{"num_workers": 0, **SHARDS, **options})


def build_parts(
    source: Any, output: Path, count: int = 3, **options: Any
) -> list[memload.BuildReport]:
    """Build all parts in turn; return their reports. Only the last one publishes."""
    reports = [build(source, output, part=(part, count), **options) for part in range(count)]
    assert [report.is_published for report in reports] == [False] * (count - 1) + [True]
    return reports


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """The output of the build on one machine."""
    return tmp_path / "alone" / "out.bin"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The output of the build in parts."""
    return tmp_path / "shared" / "out.bin"


@pytest.fixture
def spoiled(pictures: Path) -> Path:
    """The pictures, three of which cannot be used: one each of shards 0, 3 and 6."""
    for path in ("class0/00000.jpg", "class1/00016.jpg", "class2/00038.jpg"):
        (pictures / path).write_bytes(b"no picture")
    return pictures


# The same bytes


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["ascending", "mixed"])
def test_parts_in_turn_have_the_bytes_of_one_machine(
    spoiled: Path,
    alone: Path,
    shared: Path,
    digests: Digests,
    order: Sequence[int],
    num_workers: int,
) -> None:
    whole = build(spoiled, alone)
    reports = [build(spoiled, shared, part=(i, 3), num_workers=num_workers) for i in order]
    assert [report.is_published for report in reports] == [False, False, True]
    assert sum(report.converted for report in reports) == 40
    assert digests(shared) == digests(alone)
    assert len(digests(shared)) == 7 + len(["out.idx", "out.rejects.csv"])
    assert reports[-1].samples, reports[-1].rejected == (37, 3)
    assert reports[-1].notes == whole.notes
    assert memload.verify(shared).ok


def test_the_number_of_parts_may_differ_from_run_to_run(
    pictures: Path, alone: Path, shared: Path, digests: Digests
) -> None:
    build(pictures, alone)
    parts = [(1, 2), (0, 4), (6, 7)]
    reports = [build(pictures, shared, part=part) for part in parts]
    shards = [[1, 3, 5], [0, 4], [6]]
    assert [report.converted for report in reports] == [18, 12, 4]
    assert [report.part.own_shards for report in reports] == [len(own) for own in shards]
    assert [report.part.unfinished for report in reports] == [(0,), (2,), (2,)]
    assert build(pictures, shared, part=(0, 1)).converted == 6
    assert digests(shared) == digests(alone)


def test_without_part_what_is_left_is_built_and_published(
    spoiled: Path, alone: Path, shared: Path, digests: Digests
) -> None:
    whole = build(spoiled, alone)
    assert build(spoiled, shared, part=(1, 3)).converted == 12
    report = build(spoiled, shared)
    assert report.is_published
    assert (report.converted, report.samples, report.notes) == (28, 37, whole.notes)
    assert "28 done before" not in str(report)
    assert "12 done before" in str(report)
    assert digests(shared) == digests(alone)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_parts_at_once_have_the_bytes_of_one_machine(
    thousand_pictures: Path,
    alone: Path,
    shared: Path,
    digests: Digests,
    start: Callable[..., Any],
    num_workers: int,
) -> None:
    options = {"size": 8, "shard_size": 4096 + 100 * 192}
    build(thousand_pictures, alone, **options)
    shared.parent.mkdir()
    arguments = ["-s", 8, "--shard-size", options["shard_size"], "-j", num_workers]
    parts = [
        start("build", thousand_pictures, shared, *arguments, "--part", f"{part}/3")
        for part in range(3)
    ]
    texts = [part.communicate(timeout=250) for part in parts]
    assert [part.returncode for part in parts] == [0, 0, 0], texts
    assert any("1,000 samples" in text for text, _ in texts)
    assert digests(shared) == digests(alone)


def write_table(pictures: Path) -> Path:
    """Write a table of the pictures, with labels that are texts and two columns of numbers."""
    table = pictures.parent / "table.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["path", "label", "age", "height"])
        for number, path in enumerate(sorted(pictures.rglob("*.jpg"))):
            lines.writerow(
                [path.relative_to(table.parent), f"kind {number % 5}", number, number / 7]
            )
    return table


def write_tar(pictures: Path) -> Path:
    tar = pictures.parent / "pics.tar"
    with tarfile.open(tar, "w") as file:
        for path in sorted(pictures.rglob("*.jpg")):
            file.add(path, f"{path.parent.name}/{path.name}")
    return tar


def write_parquet(pictures: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    paths = sorted(pictures.rglob("*.jpg"))
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    table = pyarrow.table({"image": images, "label": [path.parent.name for path in paths]})
    parquet.write_table(table, pictures.parent / "pics.parquet", row_group_size=9)
    return pictures.parent / "pics.parquet"


def write_array(pictures: Path) -> Path:
    path = pictures.parent / "array.npy"
    np.save(path, np.random.default_rng(0).integers(0, 99, (40, 8, 8, 3), np.uint8))
    return path


def write_dataset(pictures: Path) -> Path:
    memload.build(pictures, pictures.parent / "before.bin", size=8, num_workers=0)
    return pictures.parent / "before.bin"


def folder(pictures: Path) -> Path:
    return pictures


@pytest.mark.parametrize(
    "write", [folder, write_table, write_tar, write_parquet, write_array, write_dataset]
)
def test_sources_of_all_kinds_have_the_same_bytes_in_parts(
    pictures: Path, alone: Path, shared: Path, digests: Digests, write: Callable[[Path], Path]
) -> None:
    source = write(pictures)
    whole = build(source, alone)
    reports = build_parts(source, shared)
    assert digests(shared) == digests(alone)
    assert reports[-1].notes == whole.notes
    assert len(memload.MemmapDataset(shared)) == 40


def write_beside(pictures: Path, name: str, write: Callable[[int, Path], object]) -> Path:
    """Write a file for each picture into another folder, in the same classes."""
    beside = pictures.with_name(name)
    for number, path in enumerate(sorted(pictures.rglob("*.jpg"))):
        target = (beside / path.relative_to(pictures)).with_suffix("")
        target.parent.mkdir(parents=True, exist_ok=True)
        write(number, target)
    return beside


def write_mask(pictures: Path) -> Path:
    def write(number: int, target: Path) -> None:
        path = next(pictures.rglob(f"{target.name}.jpg"))
        with Image.open(path) as picture:
            ids = np.random.default_rng(number).integers(0, 20, picture.size[::-1], np.uint8)
        Image.fromarray(ids).save(target.with_suffix(".png"))

    return write_beside(pictures, "masks", write)


def write_depth(pictures: Path) -> Path:
    def write(number: int, target: Path) -> None:
        np.save(target.with_suffix(".npy"), np.full((5, 4), number / 3, np.float32))

    return write_beside(pictures, "depth", write)


def test_masks_and_arrays_have_the_same_bytes_in_parts(
    spoiled: Path, alone: Path, shared: Path, digests: Digests
) -> None:
    with_pictures = {"fit": "pad", "missing_masks": "fill"}
    for path in ("class0/00000.jpg", "class1/00016.jpg", "class2/00038.jpg"):
        shutil.copy(spoiled / "class0/00003.jpg", spoiled / path)
    masks, depth = write_mask(spoiled), write_depth(spoiled)
    (spoiled / "class1/00016.jpg").write_bytes(b"no picture")
    (masks / "class2/00038.png").unlink()
    options = {**with_pictures, "masks": masks, "arrays": {"depth": depth}}
    whole = build(spoiled, alone, **options)
    reports = build_parts(spoiled, shared, **options)
    assert [array.name for array in reports[0].arrays] == ["mask", "depth"]
    assert digests(shared) == digests(alone)
    assert len(digests(shared)) == 3 * 7 + len(["out.idx", "out.rejects.csv"])
    assert reports[-1].notes == whole.notes


@pytest.mark.parametrize("mode", ["mask", "array", "L", "I;16"])
def test_modes_have_the_same_bytes_in_parts(
    pictures: Path, alone: Path, shared: Path, digests: Digests, mode: str
) -> None:
    source: Any = pictures
    if mode == "mask":
        source = write_mask(pictures)
    if mode == "array":
        source = memload.ImageFolder(write_depth(pictures), extensions=(".npy",))
    options = {"mode": mode, "size": None if mode == "array" else 8}
    build(source, alone, **options)
    build_parts(source, shared, **options)
    assert digests(shared) == digests(alone)


class Boxed:
    """Twenty pictures with boxes and points, as a data set of the user's."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> dict[str, Any]:
        rng = np.random.default_rng(number)
        boxes = np.sort(rng.uniform(0, 12, (number % 4, 2, 2)), axis=1).reshape(-1, 4)
        return {
            "image": rng.integers(0, 256, (14 + number % 3, 12, 3), np.uint8),
            "label": number % 3,
            "boxes": boxes,
            "landmarks": rng.uniform(0, 12, (5, 2)),
        }


def test_boxes_and_points_have_the_same_bytes_in_parts(
    alone: Path, shared: Path, digests: Digests
) -> None:
    options = {"boxes": {"boxes": 2}, "points": ["landmarks"], "max_rejects": "50%"}
    whole = build(Boxed(), alone, **options)
    reports = build_parts(Boxed(), shared, **options)
    assert whole.rejected == 5
    assert digests(shared) == digests(alone)
    assert reports[-1].notes == whole.notes


def test_samples_new_to_a_data_set_have_the_same_bytes_in_parts(
    tmp_path: Path, pictures: Path, alone: Path, shared: Path, digests: Digests, make_pictures: Any
) -> None:
    build(pictures, tmp_path / "before.bin")
    make_pictures(pictures, 60)
    options = {"new_to": tmp_path / "before.bin", "size": None}
    whole = build(pictures, alone, **options)
    reports = build_parts(pictures, shared, **options)
    assert (whole.samples, reports[-1].notes) == (20, whole.notes)
    assert digests(shared) == digests(alone)


# Shards without a given size


@pytest.mark.parametrize(("count", "rows"), [(3, 3), (4, 2), (10, 1), (60, 1)])
def test_without_a_shard_size_each_part_has_four_shards_and_it_says_so(
    pictures: Path,
    alone: Path,
    shared: Path,
    digests: Digests,
    caplog: pytest.LogCaptureFixture,
    count: int,
    rows: int,
) -> None:
    caplog.set_level("INFO", "memload")
    report = build(pictures, shared, shard_size=None, part=(count - 1, count))
    named = 4096 + rows * 192
    assert f"so a shard has {rows} row" in caplog.text
    assert f"as with --shard-size {named}" in caplog.text
    assert report.part.shards == -(-40 // rows)
    assert report.part.shards >= min(40, 4 * count)
    caplog.clear()
    build(pictures, shared, shard_size=None, part=(0, 2))
    assert "no --shard-size is given" not in caplog.text
    build(pictures, shared, shard_size=None)
    build(pictures, alone, shard_size=named)
    assert digests(shared) == digests(alone)


def test_a_part_beyond_the_shards_has_none(pictures: Path, shared: Path) -> None:
    report = build(pictures, shared, part=(8, 9))
    state = "none of 7 shards is part 8 of 9's; parts 0, 1, 2, 3, 4, 5 and 6 are not done yet"
    assert str(report) == f"{shared.with_suffix('.building')}: {state}"
    build(pictures, shared, part=(0, 1))
    assert len(memload.MemmapDataset(shared)) == 40


def test_a_data_set_of_one_shard_is_built_by_part_0(
    pictures: Path, alone: Path, shared: Path, digests: Digests
) -> None:
    build(pictures, alone, shard_size="1GB")
    assert not build(pictures, shared, shard_size="1GB", part=(1, 2)).is_published
    assert build(pictures, shared, shard_size="1GB", part=(0, 2)).is_published
    assert digests(shared) == digests(alone)
    assert sorted(digests(shared)) == ["out.bin", "out.idx"]


# What a part reports


def test_the_closing_line_of_a_part_says_who_is_not_done(pictures: Path, shared: Path) -> None:
    first, second = (build(pictures, shared, part=(part, 4)) for part in (3, 0))
    folder = shared.with_suffix(".building")
    assert str(first) == (
        f"{folder}: 1 of 7 shards is part 3 of 4's, all done; parts 0, 1 and 2 are not done yet"
    )
    assert str(second) == (
        f"{folder}: 2 of 7 shards are part 0 of 4's, all done; parts 1 and 2 are not done yet"
    )
    third = build(pictures, shared, part=(1, 4))
    assert str(third).endswith("all done; part 2 is not done yet")
    assert str(second) in repr(second)
    assert html.escape(str(second)) in second._repr_html_()
    facts = json.loads(json.dumps(second.as_dict()))
    assert facts["part"]["part"] == [0, 4]
    assert (facts["part"]["own_shards"], facts["part"]["shards"]) == (2, 7)
    assert facts["part"]["unfinished"] == [1, 2]
    assert (facts["is_published"], facts["converted"], facts["samples"]) == (False, 12, 0)
    last = build(pictures, shared, part=(2, 4))
    assert last.as_dict()["is_published"]
    assert str(last).startswith(f"{shared}: 40 samples of 8×8×3 uint8, 3 classes")


def test_the_command_prints_the_state_of_a_part(
    pictures: Path, shared: Path, start: Callable[..., Any]
) -> None:
    shared.parent.mkdir()
    arguments = [pictures, shared.name, "-s", 8, "--shard-size", 4096 + 6 * 192, "-j", 0]
    part = start("build", *arguments, "--part", "1/3", cwd=shared.parent)
    text, log = part.communicate(timeout=60)
    assert part.returncode == 0
    assert text == (
        "out.building: 2 of 7 shards are part 1 of 3's, all done; parts 0 and 2 are not done yet\n"
    )
    assert "out.bin: part 1 of 3 has 2 of 7 shards of 6 rows, and builds 2 now" in log


# Published already


@pytest.mark.parametrize("options", [{}, {"overwrite": True}], ids=["", "overwrite"])
def test_a_part_that_finds_the_data_set_published_converts_nothing(
    pictures: Path, shared: Path, digests: Digests, options: dict[str, Any]
) -> None:
    build_parts(pictures, shared)
    before = digests(shared), shared.with_suffix(".idx").stat().st_mtime_ns
    report = build(pictures, shared, part=(1, 3), **options)
    assert report.is_published
    assert report.part.was_published
    assert (report.converted, report.samples) == (0, 40)
    assert str(report).endswith("0 rejected; published already")
    assert (digests(shared), shared.with_suffix(".idx").stat().st_mtime_ns) == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": 9}, "size was .8, 8. and is .9, 9."),
        ({"fit": "pad"}, "fit was 'crop' and is 'pad'"),
        ({"mode": "L"}, "mode was 'RGB' and is 'L'"),
        ({"shard_size": 4096 + 5 * 192}, "rows per shard was 6 and is 5"),
        ({"size": None}, "size was .8, 8. and is .256, 256."),
    ],
    ids=["size", "fit", "mode", "shard_size", "default size"],
)
def test_a_published_data_set_with_other_settings_is_an_error(
    pictures: Path, shared: Path, digests: Digests, options: dict[str, Any], text: str
) -> None:
    build_parts(pictures, shared)
    before = digests(shared)
    with pytest.raises(memload.BuildError, match=f"exists already, with other settings: {text}"):
        build(pictures, shared, part=(1, 3), **options)
    assert digests(shared) == before


@pytest.mark.parametrize("change", ["settings", "names"])
@pytest.mark.parametrize("finish", ["part", "plain", "executor"])
def test_overwriting_in_parts_keeps_the_old_data_set_until_the_new_one_is_complete(
    pictures: Path,
    alone: Path,
    shared: Path,
    digests: Digests,
    make_pictures: Any,
    change: str,
    finish: str,
) -> None:
    build(pictures, shared, shard_size=None if change == "settings" else SHARDS["shard_size"])
    old = digests(shared)
    if change == "names":
        make_pictures(pictures, 50)
    options = {"overwrite": True}
    assert not build(pictures, shared, part=(0, 2), **options).is_published
    kept = {path.name for path in shared.parent.iterdir() if path.is_file()}
    assert kept == old.keys()
    assert memload.verify(shared).ok
    last: dict[str, Any] = {"part": (1, 2), **options} if finish == "part" else {}
    with ThreadPoolExecutor(2) as executor:
        if finish == "executor":
            last = {"executor": executor}
        assert build(pictures, shared, **last).is_published
    build(pictures, alone)
    assert digests(shared) == digests(alone)


@pytest.mark.parametrize("how", ["part", "plain", "executor"])
def test_overwriting_never_discards_an_unfinished_build(
    pictures: Path, shared: Path, how: str
) -> None:
    build(pictures, shared, part=(0, 2))
    with ThreadPoolExecutor(1) as executor:
        options = {"part": {"part": (0, 2)}, "plain": {}, "executor": {"executor": executor}}[how]
        message = r"size was \[8, 8\] and is \[9, 9\].* or delete that folder to begin anew"
        with pytest.raises(memload.BuildError, match=message):
            build(pictures, shared, overwrite=True, size=9, **options)
        report = build(pictures, shared, overwrite=True, **options)
    assert report.converted == (0 if how == "part" else 18)


def turn(pictures: Path) -> None:
    for path in pictures.rglob("*.jpg"):
        with Image.open(path) as picture:
            picture.transpose(Image.Transpose.ROTATE_180).save(path)


def test_a_part_does_not_replace_a_data_set_of_the_same_names_and_says_how_to(
    pictures: Path, shared: Path, digests: Digests, caplog: pytest.LogCaptureFixture
) -> None:
    build_parts(pictures, shared)
    before = digests(shared)
    turn(pictures)
    caplog.set_level("INFO", "memload")
    report = build(pictures, shared, part=(1, 3), overwrite=True)
    assert report.part.was_published
    assert f"To build it anew, delete {shared.with_suffix('.idx')}" in caplog.text
    assert digests(shared) == before


def test_an_executor_replaces_a_data_set_of_the_same_names(
    pictures: Path, alone: Path, shared: Path, digests: Digests
) -> None:
    build_parts(pictures, shared)
    turn(pictures)
    with ThreadPoolExecutor(2) as executor:
        report = build(pictures, shared, executor=executor, overwrite=True)
    assert report.converted == 40
    build(pictures, alone)
    assert digests(shared) == digests(alone)


def test_a_data_set_of_other_samples_is_not_taken_for_the_one_of_this_build(
    pictures: Path, shared: Path, digests: Digests
) -> None:
    build_parts(pictures, shared)
    before = digests(shared)
    for path in sorted(pictures.rglob("*.jpg"))[:21]:
        path.rename(path.with_name(f"other{path.name}"))
    with pytest.raises(
        memload.BuildError, match=r"19 of its 40 names are in the source\. Choose another"
    ):
        build(pictures, shared, part=(1, 3))
    assert digests(shared) == before


# Samples that cannot be used


@pytest.mark.parametrize("finish", ["part", "another part", "plain"])
@pytest.mark.parametrize("is_mended", [True, False])
def test_too_many_rejects_lose_nothing_and_the_next_run_tries_them_again(
    spoiled: Path, alone: Path, shared: Path, digests: Digests, finish: str, is_mended: bool
) -> None:
    for part in (0, 1):
        build(spoiled, shared, part=(part, 3), max_rejects=1)
    with pytest.raises(memload.BuildError, match=r"3 of 40 pictures .* at most 1 may be rejected"):
        build(spoiled, shared, part=(2, 3), max_rejects=1)
    assert shared.with_suffix(".building").is_dir()
    if is_mended:
        for path in ("class0/00000.jpg", "class1/00016.jpg"):
            shutil.copy(spoiled / "class0/00003.jpg", spoiled / path)
    options: dict[str, Any] = {"max_rejects": 1 if is_mended else 3}
    if finish != "plain":
        options["part"] = (2, 3) if finish == "part" else (1, 3)
    report = build(spoiled, shared, **options)
    assert report.is_published
    assert report.converted == 3
    build(spoiled, alone)
    assert digests(shared) == digests(alone)


def test_if_no_sample_can_be_used_the_last_part_says_so(pictures: Path, shared: Path) -> None:
    for path in pictures.rglob("*.jpg"):
        path.write_bytes(b"no picture")
    for part in (0, 1):
        assert build(pictures, shared, part=(part, 3)).part.unfinished
    with pytest.raises(memload.BuildError, match=r"none of 40 pictures in .* can be used"):
        build(pictures, shared, part=(2, 3))
    assert list(shared.parent.iterdir()) == []


def test_a_part_says_what_it_has_rejected_and_where(
    spoiled: Path, shared: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "machine-a")
    report = build(spoiled, shared, part=(0, 3))
    assert report.rejected == 3
    assert "part 0 of 3's, all done, with 3 samples rejected; parts 1 and 2 are" in str(report)
    line = "3 samples of part 0 of 3 cannot be used on machine-a: 3 × "
    assert line in caplog.text
    caplog.clear()
    assert build(spoiled, shared, part=(1, 3)).rejected == 0
    assert "cannot be used" not in caplog.text


def test_a_part_does_not_replace_the_mask_of_a_data_set_that_appeared_meanwhile(
    pictures: Path, tmp_path: Path, shared: Path
) -> None:
    masks = write_mask(pictures)
    build(pictures, shared, part=(0, 2), masks=masks, overwrite=True)
    build(pictures, shared.with_name("out.mask.bin"), overwrite=True)
    with pytest.raises(memload.BuildError, match=r"which is the data set of out\.mask\.idx"):
        build(pictures, shared, part=(1, 2), masks=masks, overwrite=True)
    assert memload.verify(shared.with_name("out.mask.bin")).ok


def test_a_part_that_stops_at_the_first_reject_leaves_the_others_alone(
    spoiled: Path, alone: Path, shared: Path, digests: Digests
) -> None:
    with pytest.raises(memload.DecodeError, match=r"00000\.jpg"):
        build(spoiled, shared, part=(0, 3), on_error="raise")
    build(spoiled, shared, part=(1, 3), on_error="raise")
    build(spoiled, shared, part=(2, 3))
    build(spoiled, shared, part=(0, 3))
    build(spoiled, alone)
    assert digests(shared) == digests(alone)


# Disks and folders


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_full_disk_stops_one_part_and_not_the_others(
    pictures: Path,
    alone: Path,
    shared: Path,
    digests: Digests,
    monkeypatch: pytest.MonkeyPatch,
    num_workers: int,
) -> None:
    usual, calls = os.pwrite, itertools.count()

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if len(data) == 192 and next(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    message = r"cannot be written: .*No space left on device.*goes on where it stopped"
    with pytest.raises(memload.BuildError, match=message):
        build(pictures, shared, part=(0, 3), num_workers=num_workers)
    monkeypatch.undo()
    build(pictures, shared, part=(1, 3))
    build(pictures, shared, part=(2, 3))
    build(pictures, shared, part=(0, 3))
    build(pictures, alone)
    assert digests(shared) == digests(alone)


def test_paths_may_be_relative_and_hold_spaces(
    pictures: Path, tmp_path: Path, digests: Digests, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaced = tmp_path / "a folder" / "some pics"
    spaced.parent.mkdir()
    pictures.rename(spaced)
    build(spaced, tmp_path / "alone" / "my out.bin")
    monkeypatch.chdir(spaced.parent)
    output = Path("new one") / "my out.bin"
    build("some pics", output, part=(0, 2))
    monkeypatch.chdir(tmp_path)
    reports = build(spaced, spaced.parent / output, part=(1, 2))
    assert reports.is_published
    assert digests(spaced.parent / output) == digests(tmp_path / "alone" / "my out.bin")


def test_a_missing_output_folder_is_an_error(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises((memload.BuildError, ValueError), match="nowhere"):
        memload.build(pictures, tmp_path / "nowhere" / "out.bin", part=(0, 2), num_workers=0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_an_error(pictures: Path, shared: Path) -> None:
    shared.parent.mkdir()
    shared.parent.chmod(0o500)
    with pytest.raises(memload.BuildError, match="cannot be written"):
        build(pictures, shared, part=(0, 2))


# Damage by hand


FILES = (
    *("out-00003-of-00007.bin", "done/00003", "shards/00003/rows", "shards/00003/rejects.jsonl"),
    *("source", "lock"),
)
DAMAGES = [
    *itertools.product(FILES, ["removed", "emptied", "overwritten"]),
    *itertools.product(["done", "shards/00003", "shards"], ["removed"]),
]


@pytest.mark.parametrize("finish", ["part", "plain"])
@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_folder_never_gives_other_bytes(
    spoiled: Path,
    alone: Path,
    shared: Path,
    digests: Digests,
    name: str,
    damage: str,
    finish: str,
) -> None:
    for part in (0, 1):
        build(spoiled, shared, part=(part, 3))
    path = shared.with_suffix(".building") / name
    if damage == "removed":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif damage == "emptied":
        path.write_bytes(b"")
    elif name.endswith(".bin"):
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path.write_bytes(b"x" * path.stat().st_size)
    last = {"part": (2, 3)} if finish == "part" else {}
    messages = []
    for options in (last, last, {}):
        try:
            if build(spoiled, shared, **options).is_published:
                break
        except memload.BuildError as error:
            messages.append(str(error))
    assert all("again" in message for message in messages)
    build(spoiled, alone)
    assert digests(shared) == digests(alone)


def test_pixels_of_shards_that_are_done_are_not_read_again_but_verify_finds_damage(
    pictures: Path, shared: Path
) -> None:
    build(pictures, shared, part=(0, 2))
    path = shared.with_suffix(".building") / "out-00002-of-00007.bin"
    content = bytearray(path.read_bytes())
    content[4096 + 7] ^= 255
    path.write_bytes(content)
    assert build(pictures, shared, part=(1, 2)).is_published
    assert not memload.verify(shared).ok


def test_a_plan_that_is_damaged_by_hand_loses_nothing(
    pictures: Path, alone: Path, shared: Path, digests: Digests
) -> None:
    build(pictures, shared, part=(0, 2))
    plan = shared.with_suffix(".building") / "plan.json"
    before = plan.read_bytes()
    for damaged in (b"", b"{", b"[]", b"{}", b'{"begun": 1}', b'{"begun": {}, "plan": {}}'):
        plan.write_bytes(damaged)
        for options in ({"part": (1, 2)}, {}):
            with pytest.raises(
                memload.BuildError, match=r"plan\.json|holds an unfinished build|begun without"
            ):
                build(pictures, shared, **options)
    plan.write_bytes(before)
    assert build(pictures, shared, part=(1, 2)).converted == 18
    build(pictures, alone)
    assert digests(shared) == digests(alone)


@pytest.mark.parametrize("options", [{"part": (1, 2)}, {}], ids=["part", "plain"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_if_the_plan_is_missing_what_is_done_is_kept(
    pictures: Path, shared: Path, options: dict[str, Any], overwrite: bool
) -> None:
    build(pictures, shared, part=(0, 2))
    folder = shared.with_suffix(".building")
    plan = (folder / "plan.json").read_bytes()
    (folder / "plan.json").unlink()
    with pytest.raises(memload.BuildError, match=r"plan\.json is missing .* delete that folder"):
        build(pictures, shared, overwrite=overwrite, **options)
    (folder / "plan.json").write_bytes(plan)
    assert build(pictures, shared, part=(1, 2)).converted == 18


@pytest.mark.parametrize(
    "name", ["out-00001-of-00007.bin", "shards/00001/rows", "shards/00001/rejects.jsonl"]
)
def test_what_leads_elsewhere_in_place_of_a_file_is_not_written_to(
    pictures: Path, tmp_path: Path, shared: Path, name: str
) -> None:
    build(pictures, shared, part=(0, 2))
    victim, path = tmp_path / "victim", shared.with_suffix(".building") / name
    path.parent.mkdir(exist_ok=True)
    victim.write_bytes(b"do not change")
    path.symlink_to(victim)
    for _ in range(2):
        with pytest.raises(memload.BuildError, match=f"{path.name} is no regular file"):
            build(pictures, shared, part=(1, 2))
        assert victim.read_bytes() == b"do not change"
        path.unlink()
        os.mkfifo(path)
    path.unlink()
    assert build(pictures, shared, part=(1, 2)).is_published


def test_a_build_that_was_begun_without_parts_is_finished_without(
    pictures: Path, shared: Path
) -> None:
    shared.parent.mkdir()
    folder = shared.with_suffix(".building")
    folder.mkdir()
    (folder / "plan.json").write_text('{"size": [8, 8]}')
    with pytest.raises(memload.BuildError, match=r"was begun without --part\. Finish it without"):
        build(pictures, shared, part=(0, 2))


def test_another_source_or_other_settings_on_a_machine_are_an_error(
    pictures: Path, tmp_path: Path, shared: Path, make_pictures: Any
) -> None:
    build(pictures, shared, part=(0, 2))
    others = make_pictures(tmp_path / "others", 40)
    with pytest.raises(memload.BuildError, match=r"began on .* differs: paths was .*others"):
        build(others, shared, part=(1, 2))
    with pytest.raises(memload.BuildError, match=r"differs: .*size was \[8, 8\] and is \[9, 9\]"):
        build(pictures, shared, part=(1, 2), size=9)
    with pytest.raises(memload.BuildError, match="rows per shard was 6 and is 5"):
        build(pictures, shared, part=(1, 2), shard_size=4096 + 5 * 192)
    assert build(pictures, shared, part=(1, 2)).is_published


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"part": "auto"}, ValueError, "part: 'auto' is known to the command only"),
        ({"part": "0/8"}, ValueError, r"part: '0/8' is not \(i, n\)"),
        ({"part": (True, 2)}, ValueError, r"part: \(True, 2\) is not \(i, n\)"),
        ({"part": (8, 8)}, ValueError, "part: 8 of 8 does not exist.*the last one is 7 of 8"),
        ({"part": (0, 0)}, ValueError, "part: 0 of 0 does not exist"),
        ({"part": (0.0, 2)}, ValueError, r"part: \(0.0, 2\) is not"),
        ({"lock_timeout": "5"}, ValueError, "lock_timeout: '5' is not a number of seconds"),
        ({"lock_timeout": None}, ValueError, "lock_timeout: None is not a number of seconds"),
        ({"num_workers": "2"}, TypeError, "num_workers: '2' is no whole number"),
        ({"num_workers": 1.5}, TypeError, "num_workers: 1.5 is no whole number"),
        ({"shard_size": "٤GB"}, ValueError, "shard_size: '٤GB' is not a size"),
    ],
)
def test_wrong_arguments_are_named(
    options: dict[str, Any], error: type[Exception], message: str, pictures: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        memload.build(pictures, tmp_path / "out.bin", size=8, **options)


def test_a_part_may_be_given_in_numbers_of_numpy(pictures: Path, shared: Path) -> None:
    assert build(pictures, shared, part=(np.int64(0), np.int64(1))).is_published
