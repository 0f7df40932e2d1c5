"""A build in parts, by processes of its own or by an executor, gives the files of one build."""

import concurrent.futures
import functools
import multiprocessing
import os

import numpy as np
import pytest
from click.testing import CliRunner

import memload
from memload.cli import main

ROW = 8 * 8 * 3
SHARD = 4096 + 12 * ROW


def build(drill, place, **options):
    options = {"size": 8, "num_workers": 0, "progress": False, "shard_size": SHARD} | options
    return memload.build(drill.source, place / "out.bin", **options)


@pytest.fixture
def expected(drill, tmp_path):
    """The files of an undisturbed build."""
    (tmp_path / "expected").mkdir()
    build(drill, tmp_path / "expected")
    return drill.files(tmp_path / "expected")


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 1, 0, 2]])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_parts_in_any_order_give_the_files_of_one_build(drill, place, expected, order, num_workers):
    for number in order[:-1]:
        report = build(drill, place, part=(number, 3), num_workers=num_workers)
        assert not report.is_published
        assert f"part {number} of 3 is done" in str(report)
    assert not (place / "out.idx").exists()
    report = build(drill, place, part=(order[-1], 3), num_workers=num_workers)
    assert (report.is_published, report.samples) == (True, 57)
    assert drill.files(place) == expected


def test_without_part_what_is_left_is_built_and_the_number_of_parts_may_change(
    drill, place, expected
):
    assert build(drill, place, part=(0, 5)).converted == 12
    assert build(drill, place, part=(1, 2)).converted == 24
    assert build(drill, place).converted == 24 + 1  # a rejected one is tried again
    assert drill.files(place) == expected


def test_a_part_without_shards_does_nothing(drill, place):
    report = build(drill, place, part=(7, 9))
    assert str(report).endswith("part 7 of 9 is done; 5 shards are not done yet")
    assert (report.converted, report.samples) == (0, 0)


def test_a_late_part_finds_the_data_set(drill, place):
    build(drill, place)
    report = build(drill, place, part=(0, 3))
    assert (report.is_published, report.samples, report.converted) == (True, 57, 0)
    assert str(report).endswith("published already")
    with pytest.raises(memload.BuildError, match="exists already"):
        build(drill, place)


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"size": 6}, r"size was \[8, 8\] and is \[6, 6\]"),
        ({"fit": "pad"}, "fit was 'crop' and is 'pad'"),
        ({"extensions": [".png"]}, None),
    ],
)
def test_a_late_part_of_something_else_is_refused(drill, place, expected, options, difference):
    build(drill, place)
    if difference is None:
        (drill.source / "bee" / "007.jpg").rename(drill.source / "bee" / "007.png")
        difference = "samples was 60 and is 1"
    with pytest.raises(memload.BuildError, match=difference):
        build(drill, place, part=(1, 2), **options)
    assert drill.files(place) == expected


def test_parts_replace_a_data_set_once_all_are_done(drill, place, expected):
    build(drill, place, size=6, shard_size=None)
    before = drill.files(place)
    build(drill, place, part=(0, 2), overwrite=True)
    assert drill.files(place) == before
    build(drill, place, part=(1, 2), overwrite=True)
    assert drill.files(place) == expected


@pytest.mark.parametrize("size", [0, 3000, 10**6])
def test_pixels_that_were_damaged_after_their_shard_was_done_are_not_published(drill, place, size):
    build(drill, place, part=(0, 2))
    path = min((place / "out.building").glob("*.bin"))
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(memload.BuildError, match=r"Shards were damaged after they were done"):
        build(drill, place, part=(1, 2))
    assert not (place / "out.idx").exists()


def test_a_shard_that_lost_its_rows_is_told(drill, place):
    build(drill, place, part=(0, 2))
    path = place / "out.building" / "00000.done"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(memload.BuildError, match=r"00000\.done is damaged\. Delete it"):
        build(drill, place, part=(1, 2))
    path.unlink()
    assert build(drill, place).samples == 57


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
        build(drill, place, **options)
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


@pytest.mark.slow
def test_processes_build_a_data_set_and_a_folder(drill, place, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(drill.root)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        report = memload.build(
            "images", place / "out.bin", size=8, shard_size=SHARD, executor=executor
        )
        assert report.samples == 57
        assert drill.files(place) == expected


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


def in_a_process(drill, function):
    """Engines leave threads and files behind."""
    assert os.waitpid(drill.fork(function), 0)[1] == 0


@pytest.mark.slow
def test_dask_builds_the_shards(drill, place, expected):
    distributed = pytest.importorskip("distributed")

    def run():
        options = {"threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
        with (
            distributed.LocalCluster(n_workers=2, **options) as cluster,
            distributed.Client(cluster) as client,
        ):
            assert build(drill, place, executor=client.get_executor()).samples == 57

    in_a_process(drill, run)
    assert drill.files(place) == expected


@pytest.mark.slow
def test_ray_builds_the_shards(drill, place, expected):
    ray = pytest.importorskip("ray")

    class Executor(concurrent.futures.Executor):
        """As in docs/clusters.md."""

        def submit(self, function, /, *arguments):
            return ray.remote(function).remote(*arguments).future()

    def run():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        assert build(drill, place, executor=Executor()).samples == 57
        ray.shutdown()

    in_a_process(drill, run)
    assert drill.files(place) == expected


def test_a_call_that_is_made_again_after_publishing_begins_nothing(drill, place):
    calls = []

    class Executor(concurrent.futures.ThreadPoolExecutor):
        def submit(self, *arguments):
            calls.append(arguments)
            return super().submit(*arguments)

    with Executor(2) as executor:
        build(drill, place, executor=executor, overwrite=True)
    before = drill.files(place)
    function, *arguments = calls[0]
    assert function(*arguments).is_published
    assert drill.files(place) == before
    assert not (place / "out.building").exists()
