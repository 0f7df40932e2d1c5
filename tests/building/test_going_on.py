"""An interrupted build goes on, or says in one line why not. Nothing is lost, and nothing hangs."""

import errno
import json
import os
import subprocess
import sys

import pytest
from PIL import Image

import memload
from memload.building import rows, shard
from memload.sources.samples import Source

ROW = 8 * 8 * 3


class Stop(BaseException):
    pass


def build(drill, place, **options):
    options = {"size": 8, "num_workers": 0, "progress": False} | options
    return memload.build(drill.source, place / "out.bin", **options)


@pytest.fixture
def expected(drill, tmp_path):
    """The files of an undisturbed build."""
    (tmp_path / "expected").mkdir()
    build(drill, tmp_path / "expected")
    return drill.files(tmp_path / "expected")


@pytest.fixture
def interrupt(drill, place, monkeypatch):
    """A function that builds, and is interrupted after 48 of 60 rows."""

    def run(**options):
        usual = Source.__getitem__

        def stopped(source, number):
            if number == 50:
                raise Stop
            return usual(source, number)

        with monkeypatch.context() as patch:
            patch.setattr(Source, "__getitem__", stopped)
            with pytest.raises(Stop):
                build(drill, place, **options)

    return run


def test_what_is_done_is_kept_and_the_bytes_are_the_same(drill, place, interrupt, expected):
    interrupt()
    assert str(memload.build_status(place / "out.bin")).startswith(
        f"{place / 'out.building'}: 45 of 60 rows are done (75%)"
    )
    report = build(drill, place, num_workers=2)
    assert report.converted == 60 - 43  # of 45 rows, two had been rejected and are tried again
    assert drill.files(place) == expected
    assert memload.build_status(place / "out.bin") is None
    assert not (place / "out.building").exists()


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"size": (8, 9)}, r"size was \[8, 8\] and is \[8, 9\]"),
        ({"fit": "pad", "mode": "L"}, "fit was 'crop' and is 'pad'; mode was 'RGB' and is 'L'"),
        ({"shard_size": 4096 + 12 * ROW}, "rows per shard was 60 and is 12"),
        (
            {"classes": ["ant", "cat", "bee"]},
            r"classes was \['ant', 'bee', 'cat'\] and is \['ant', 'cat', 'bee'\]",
        ),
    ],
)
def test_other_options_are_refused_with_what_differs(drill, place, interrupt, options, difference):
    interrupt()
    with pytest.raises(memload.BuildError, match=difference) as caught:
        build(drill, place, **options)
    assert str(caught.value).endswith(
        "Give the same source and options to go on with it, or delete that folder to begin anew."
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_source_with_other_pixels_is_refused(drill, place, interrupt, num_workers):
    interrupt()
    for path in drill.source.rglob("*.jpg"):
        Image.new("RGB", (30, 20), "red").save(path)
    with pytest.raises(memload.BuildError, match=r"something else: ant/000\.jpg has other pixels"):
        build(drill, place, num_workers=num_workers)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (json.dumps({"size": [8, 8], "overwrite": False}), "of another version of memload"),
        (json.dumps({"plan": {}, "begun": {}}), "of another version of memload"),
        ("{", "plan.json is damaged"),
        ("[]", "plan.json is damaged"),
    ],
)
def test_a_folder_of_another_version_is_refused(drill, place, content, problem):
    folder = place / "out.building"
    folder.mkdir()
    (folder / "plan.json").write_text(content)
    for function in (build, lambda drill, place: memload.build_status(place / "out.bin")):
        with pytest.raises(memload.BuildError, match=problem) as caught:
            function(drill, place)
        assert f"Delete {folder}, then run the same command again." in str(caught.value)


@pytest.mark.parametrize("name", ["out.bin", "00000.rows"])
def test_pages_that_were_lost_are_done_again(drill, place, interrupt, expected, name):
    """After a power cut, a file has its size, but some of its pages hold zeros."""
    interrupt()
    path = place / "out.building" / name
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 500] = bytes(500)
    path.write_bytes(content)
    assert build(drill, place).converted > 17
    assert drill.files(place) == expected


# Lack of something


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_full_disk_is_told_and_the_build_goes_on_once_there_is_room(
    drill, place, expected, num_workers, monkeypatch
):
    usual = os.pwrite

    def write(descriptor, data, offset):
        if offset > 4096 + 30 * ROW:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        with pytest.raises(memload.BuildError, match=r"No space left on device\. Make room"):
            build(drill, place, num_workers=num_workers)
    build(drill, place)
    assert drill.files(place) == expected


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "There is not enough memory to convert ant/003.jpg"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "cannot be read: Cannot allocate memory"),
        (OSError(errno.EMFILE, "Too many open files"), "cannot be read: Too many open files"),
    ],
)
def test_a_machine_that_lacks_something_rejects_no_picture(
    drill, place, expected, num_workers, error, message, monkeypatch
):
    usual = os.open

    def refuse(path, *arguments, **options):
        if str(path).endswith("ant/003.jpg"):
            raise error
        return usual(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(memload.BuildError, match=message):
            build(drill, place, num_workers=num_workers)
    build(drill, place)
    assert drill.files(place) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_good_picture_is_not_rejected_where_memory_is_limited(tmp_path):
    """One of 144 megapixels takes more than the limit, and small ones do not."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "images" / "0.png")
    Image.new("L", (12_000, 12_000)).save(tmp_path / "images" / "1.png", compress_level=1)
    code = (
        "import resource, sys, memload;"
        "resource.setrlimit(resource.RLIMIT_AS, (700_000_000,) * 2);"
        "memload.build(sys.argv[1], sys.argv[2], num_workers=1, max_pixels=200_000_000)"
    )
    command = [sys.executable, "-c", code, tmp_path / "images", tmp_path / "out.bin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        "BuildError: There is not enough memory to decode a picture of 12,000×12,000" in done.stderr
    )
    assert not (tmp_path / "out.idx").exists()
    report = memload.build(
        tmp_path / "images", tmp_path / "out.bin", num_workers=1, max_pixels=200_000_000
    )
    assert (report.samples, report.converted) == (2, 1)


# Several processes


def test_a_shard_that_another_process_is_at_is_passed_over(drill, place, interrupt, monkeypatch):
    monkeypatch.setattr("memload.building.build._LOCK_SECONDS", 0.2)
    interrupt()
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'r+b');"
        "fcntl.flock(file, fcntl.LOCK_EX); print('locked', flush=True); time.sleep(600)"
    )
    journal = place / "out.building" / "00000.rows"
    with subprocess.Popen([sys.executable, "-c", code, journal], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(memload.BuildError, match="another process is building shard 0"):
            build(drill, place)
        other.kill()
    assert build(drill, place).samples == 57


def test_several_processes_that_build_one_output_at_once_do_not_disturb_it(
    drill, place, expected, monkeypatch
):
    monkeypatch.setattr("memload.building.build._LOCK_SECONDS", 30.0)

    def run():
        try:
            build(drill, place, overwrite=False)
        except memload.BuildError as error:
            if "exists already" not in str(error) and "another process" not in str(error):
                raise

    pids = [drill.fork(run) for _ in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert drill.files(place) == expected


def test_a_data_set_that_appears_while_a_build_runs_is_not_replaced(drill, place, monkeypatch):
    usual = shard.Shard.finish

    def finish(self):
        usual(self)
        (place / "out.idx").write_bytes(b"somebody else's")

    with monkeypatch.context() as patch:
        patch.setattr(shard.Shard, "finish", finish)
        with pytest.raises(memload.BuildError, match=r"out\.idx exists already"):
            build(drill, place)
    assert (place / "out.idx").read_bytes() == b"somebody else's"
    (place / "out.idx").unlink()
    assert build(drill, place).samples == 57


def test_chunks_follow_the_groups_of_a_source():
    class Grouped:
        group_starts = (0, 3, 100, 101, 160)

    found = [(chunk.start, chunk.stop) for chunk in rows.chunks_of(Grouped(), 0, 160, 1)]
    assert found == [(0, 32), (32, 64), (64, 96), (96, 100), (100, 132), (132, 160)]
