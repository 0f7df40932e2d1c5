"""Real accidents, at random moments: builds are killed, files are damaged, a data set is replaced."""

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import memload

pytestmark = pytest.mark.slow

IMAGES, SIDE = 120, 16
SHARD_BYTES = 4096 + 20 * SIDE * SIDE * 3


def draw(folder, seed):
    """Write images that take some time to decode, in three classes, two of them broken."""
    rng = np.random.default_rng(seed)
    for number in range(IMAGES):
        path = folder / f"class {number % 3}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number in (5, 6):
            path.write_bytes(b"not an image")
        else:
            small = Image.fromarray(rng.integers(0, 256, (60, 60, 3), np.uint8))
            small.resize((480, 480), Image.Resampling.NEAREST).save(path, quality=90)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("drills") / "images", seed=0)


def command(images, output):
    """Return the command line of a build with two workers and six shards."""
    options = ["--size", str(SIDE), "--num-workers", "2", "--shard-size", str(SHARD_BYTES)]
    return [sys.executable, "-m", "memload", "build", str(images), str(output), *options]


def digests(folder):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("out*"))
        if path.is_file()
    }


def processes_of_group(group):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
            if state not in "ZX" and int(its_group) == group:
                found.append(int(stat.parent.name))
    return found


@pytest.fixture(scope="module")
def undisturbed(images, tmp_path_factory):
    """The folder of a build that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    subprocess.run(command(images, folder / "out.bin"), check=True, capture_output=True, timeout=60)
    return folder


@pytest.mark.parametrize("victim", ["parent", "worker", "ctrl-c"])
def test_a_build_killed_at_random_moments_ends_with_the_same_bytes(
    victim, images, undisturbed, tmp_path
):
    dice = random.Random(victim)
    output, kills = tmp_path / "out.bin", 0
    for attempt in range(30):
        with subprocess.Popen(
            command(images, output), stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as build:
            time.sleep(dice.uniform(0.05, 0.15 * 1.4**attempt))  # later and later, so that it ends
            members = processes_of_group(build.pid)
            if victim == "parent":
                build.kill()
            elif victim == "ctrl-c":
                os.killpg(build.pid, signal.SIGINT)
            elif workers := [member for member in members if member != build.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(dice.choice(workers), signal.SIGKILL)
            _, stderr = build.communicate(timeout=60)
        deadline = time.monotonic() + 10
        while processes_of_group(build.pid):
            assert time.monotonic() < deadline, "a worker outlived its parent"
            time.sleep(0.01)
        published = output.with_suffix(".idx").exists()
        if published:
            break
        # Before the command begins, click says "Aborted!", and Python itself shows where it was.
        told = ("Aborted!", "KeyboardInterrupt")
        assert build.returncode in (-signal.SIGINT, -signal.SIGKILL, 130) or any(
            word in stderr for word in told
        ), stderr
        kills += 1
        with pytest.raises(memload.MissingError):
            memload.MemmapDataset(output)
    assert kills or victim == "worker"
    assert digests(tmp_path) == digests(undisturbed)


@pytest.fixture
def copy(undisturbed, tmp_path):
    for path in undisturbed.iterdir():
        shutil.copy(path, tmp_path)
    return tmp_path / "out.bin"


def test_readers_keep_their_data_set_while_it_is_replaced(images, undisturbed, copy, tmp_path):
    others = draw(tmp_path / "others", seed=1)
    old = memload.MemmapDataset(copy)
    loader = memload.Loader(copy, 7, num_threads=2)
    expected = old.gather(range(len(old))).numpy().copy()

    def epoch():
        for pixels, _ in loader:
            yield pixels.permute(0, 2, 3, 1).numpy()

    for number in range(2):
        batches = epoch()
        read = [next(batches)]  # in the midst of an epoch
        memload.build(
            others if number % 2 == 0 else images,
            copy,
            size=SIDE,
            num_workers=2,
            shard_size=SHARD_BYTES,
            overwrite=True,
        )
        np.testing.assert_array_equal(np.concatenate([*read, *batches]), expected)
        np.testing.assert_array_equal(old.gather(range(len(old))).numpy(), expected)
        new = memload.MemmapDataset(copy)
        same = np.array_equal(new.gather(range(len(new))).numpy(), expected)
        assert same == (number % 2 == 1)
    assert digests(undisturbed) == {
        name: digest for name, digest in digests(copy.parent).items() if name != "out.building"
    }
