"""Builds that are killed at any step, at any moment, and in several parts, end with the same bytes."""

import functools
import os
import random
import shutil
import signal
import time

import pytest

import memload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_flushed")]

#: What changes the disk.
CHANGES = (
    *("replace", "rename", "fsync", "unlink", "ftruncate", "truncate", "rmdir", "mkdir"),
    *("pwrite", "link"),
)


def killed_before(step, function):
    """Call a function that is killed before a step. Raises nothing if there are fewer steps."""
    calls, process = iter(range(1, step)), os.getpid()

    def counting(usual):
        def call(*arguments, **options):
            if os.getpid() == process and next(calls, None) is None:
                os.kill(process, signal.SIGKILL)
            return usual(*arguments, **options)

        return call

    for name in CHANGES:
        setattr(os, name, counting(getattr(os, name)))
    function()


@pytest.mark.parametrize("has_old", [False, True])
def test_killed_before_each_change_to_the_disk_it_goes_on_to_the_same_bytes(
    drill, place, expected, has_old, tmp_path
):
    old = tmp_path / "old"
    old.mkdir()
    if has_old:
        drill.build(old, size=6, num_workers=0, shard_size=None)
    step = kills = 0
    while True:
        # Each of the first and last steps, which begin and publish; between them, every seventh.
        step += 1 if step < 40 or step > 125 else 7
        shutil.rmtree(place)
        shutil.copytree(old, place)
        before = drill.files(place)
        options = {"num_workers": 0, "overwrite": has_old}
        call = functools.partial(drill.build, place, **options)
        pid = drill.fork(functools.partial(killed_before, step, call))
        _, status = os.waitpid(pid, 0)
        if (place / "out.idx").exists():
            assert memload.verify(place / "out.bin").ok
            assert drill.files(place) == expected or before.items() <= drill.files(place).items()
        if drill.files(place) != expected:
            call()
        assert drill.files(place) == expected, step
        if status == 0:
            break
        kills += 1
    assert kills > 60


def test_parts_that_are_killed_while_others_run_end_with_the_same_bytes(drill, place, expected):
    chance = random.Random(2)

    def start(part):
        return drill.fork(
            functools.partial(drill.build, place, part=(part, 3), num_workers=part % 2)
        )

    for _ in range(6):
        shutil.rmtree(place)
        place.mkdir()
        running = {start(part): part for part in range(3)}
        kills = 20
        while running:
            time.sleep(chance.uniform(0.02, 0.2))
            if kills and chance.random() < 0.5:
                kills -= 1
                os.kill(chance.choice(list(running)), signal.SIGKILL)
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    part = running.pop(pid)
                    assert status in (0, signal.SIGKILL)
                    if status and not (place / "out.idx").exists():
                        running[start(part)] = part
        if not (place / "out.idx").exists():
            drill.build(place, num_workers=0)
        assert drill.files(place) == expected


def test_parts_that_end_at_once_publish_once(drill, place, expected):
    for _ in range(8):
        shutil.rmtree(place)
        place.mkdir()
        parts = [
            drill.fork(functools.partial(drill.build, place, part=(part, 5), num_workers=0))
            for part in range(5)
        ]
        assert [os.waitpid(pid, 0)[1] for pid in parts] == [0] * 5
        assert drill.files(place) == expected
        assert not (place / "out.building").exists()
