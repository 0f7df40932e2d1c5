"""A build in parts, by processes of its own or by an executor, gives the files of one build."""

import concurrent.futures
import functools

import numpy as np
import pytest
from click.testing import CliRunner

import memload
from memload.cli import main
from tests.damage import flip

SHARD = 4096 + 12 * 8 * 8 * 3


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 1, 0, 2]])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_parts_in_any_order_give_the_files_of_one_build(drill, place, expected, order, num_workers):
    for number in order[:-1]:
        report = drill.build(place, part=(number, 3), num_workers=num_workers)
        assert not report.is_published
        assert f"part {number} of 3 is done" in str(report)
    assert not (place / "out.idx").exists()
    report = drill.build(place, part=(order[-1], 3), num_workers=num_workers)
    assert (report.is_published, report.samples) == (True, 57)
    assert drill.files(place) == expected


def test_without_part_what_is_left_is_built_and_the_number_of_parts_may_change(
    drill, place, expected
):
    assert drill.build(place, part=(0, 5)).converted == 12
    assert drill.build(place, part=(1, 2)).converted == 24
    assert drill.build(place).converted == 24 + 1  # a rejected one is tried again
    assert drill.files(place) == expected


def test_a_part_without_shards_does_nothing(drill, place):
    report = drill.build(place, part=(7, 9))
    assert str(report).endswith("part 7 of 9 is done; 5 shards are not done yet")
    assert (report.converted, report.samples) == (0, 0)


def test_a_late_part_finds_the_data_set(drill, place):
    drill.build(place)
    report = drill.build(place, part=(0, 3))
    assert (report.is_published, report.samples, report.converted) == (True, 57, 0)
    assert str(report).endswith("published already")
    with pytest.raises(memload.BuildError, match="exists already"):
        drill.build(place)


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"size": 6}, r"size was \[8, 8\] and is \[6, 6\]"),
        ({"fit": "pad"}, "fit was 'crop' and is 'pad'"),
        ({"extensions": [".png"]}, None),
    ],
)
def test_a_late_part_of_something_else_is_refused(drill, place, expected, options, difference):
    drill.build(place)
    if difference is None:
        (drill.source / "bee" / "007.jpg").rename(drill.source / "bee" / "007.png")
        difference = "samples was 60 and is 1"
    with pytest.raises(memload.BuildError, match=difference):
        drill.build(place, part=(1, 2), **options)
    assert drill.files(place) == expected


def test_parts_replace_a_data_set_once_all_are_done(drill, place, expected):
    drill.build(place, size=6, shard_size=None)
    before = drill.files(place)
    drill.build(place, part=(0, 2), overwrite=True)
    assert drill.files(place) == before
    drill.build(place, part=(1, 2), overwrite=True)
    assert drill.files(place) == expected


@pytest.mark.parametrize("size", [0, 3000, 10**6])
def test_pixels_that_were_damaged_after_their_shard_was_done_are_not_published(drill, place, size):
    drill.build(place, part=(0, 2))
    path = min((place / "out.building").glob("*.bin"))
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(memload.BuildError, match=r"Shards were damaged after they were done"):
        drill.build(place, part=(1, 2))
    assert not (place / "out.idx").exists()


def test_a_shard_that_lost_its_rows_is_told(drill, place):
    drill.build(place, part=(0, 2))
    path = place / "out.building" / "00000.done"
    flip(path, 100)
    with pytest.raises(memload.BuildError, match=r"00000\.done is damaged\. Delete it"):
        drill.build(place, part=(1, 2))
    path.unlink()
    assert drill.build(place).samples == 57


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"part": (0, 2), "shard_size": None}, ValueError, "part: what is shared are shards"),
        ({"part": (2, 2)}, ValueError, r"part: \(2, 2\) is not"),
        ({"part": (0, 0)}, ValueError, r"part: \(0, 0\) is not"),
        ({"part": "auto"}, ValueError, "part: 'auto' is not"),
        ({"part": (0.0, 2)}, ValueError, "part: "),
        ({"part": (0, 2), "executor": object()}, ValueError, "part and executor"),
    ],
)
def test_wrong_arguments_are_errors(drill, place, options, error, message):
    with pytest.raises(error, match=message):
        drill.build(place, **options)
    assert not list(place.iterdir())


def test_the_command_builds_parts(drill, place, expected):
    arguments = ["build", str(drill.source), str(place / "out.bin"), "-s", "8", "-j", "0"]
    arguments += ["--shard-size", str(SHARD)]
    for number in range(2):
        done = CliRunner().invoke(main, [*arguments, "--part", f"{number}/2"])
        assert done.exit_code == 0, done.output
    assert drill.files(place) == expected
    wrong = CliRunner().invoke(main, [*arguments, "--part", "2/2"])
    assert (wrong.exit_code, "--part: (2, 2) is not (i, n)" in wrong.output) == (2, True)


# Executors


class Samples:
    """A data set that can be pickled."""

    def __len__(self):
        return 40

    def __getitem__(self, number):
        if number == 7:
            raise KeyError("gone")
        return np.full((8, 8, 3), number, np.uint8), number


class Failing(Samples):
    def __getitem__(self, number):
        if number == 15:
            raise memload.BuildError("the server is gone")
        return super().__getitem__(number)


def test_a_task_that_fails_is_told_once_the_others_have_ended(tmp_path):
    options = {"size": 8, "shard_size": SHARD}
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        build_it = functools.partial(
            memload.build, output=tmp_path / "out.bin", executor=executor, **options
        )
        with pytest.raises(
            memload.BuildError, match=r"1 of 4 shards failed\. Shard 1: .*the server is"
        ):
            build_it(Failing())
        assert len(list((tmp_path / "out.building").glob("*.done"))) == 3
        assert build_it(Samples()).samples == 39


def test_a_call_that_is_made_again_after_publishing_begins_nothing(drill, place):
    calls = []

    class Executor(concurrent.futures.ThreadPoolExecutor):
        def submit(self, *arguments):
            calls.append(arguments)
            return super().submit(*arguments)

    with Executor(2) as executor:
        drill.build(place, executor=executor, overwrite=True)
    before = drill.files(place)
    function, *arguments = calls[0]
    assert function(*arguments).is_published
    assert drill.files(place) == before
    assert not (place / "out.building").exists()
