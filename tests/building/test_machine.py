"""Whatever happens to a build, it ends with the bytes of an undisturbed one."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from PIL import Image

import memload

CHANGES = ("replace", "rename", "fsync", "unlink", "truncate", "mkdir", "pwrite", "link")
WORKERS = st.sampled_from([0, 0, 0, 1, 2])


def in_a_process(function):
    """Call a function in a forked process. Returns how it ended."""
    pid = os.fork()
    if not pid:
        try:
            function()
            os._exit(0)
        except BaseException:  # noqa: BLE001
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def kill_before(step):
    """Have this process killed before a change to the disk."""
    steps = iter(range(step))

    def counting(usual):
        def call(*arguments, **options):
            if next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return usual(*arguments, **options)

        return call

    for name in CHANGES:
        setattr(os, name, counting(getattr(os, name)))


class Builds(RuleBasedStateMachine):
    """A source that grows and is mended, and an output that is built, killed, damaged and replaced.

    ``options`` are those of the build that is unfinished, or of the next one.
    """

    @initialize(
        size=st.sampled_from([5, 8]),
        rows=st.sampled_from([None, 7]),
        mode=st.sampled_from(["RGB", "L"]),
        fit=st.sampled_from(["crop", "pad"]),
        has_masks=st.booleans(),
    )
    def begin(self, size, rows, mode, fit, has_masks):
        self.root = Path(tempfile.mkdtemp())
        self.output = self.root / "place" / "out.bin"
        self.output.parent.mkdir()
        self.count, self.damaged, self.is_mended, self.has_changed = 0, [], False, False
        self.options = {"size": size, "mode": mode, "fit": fit, "max_rejects": "100%"}
        row = size * size * (3 if mode == "RGB" else 1)
        if rows is not None:
            self.options["shard_size"] = 4096 + rows * row
        if has_masks:
            self.options |= {"masks": self.root / "masks", "missing_masks": 0}
        (self.root / "masks").mkdir()
        for _ in range(20):
            self._add_picture(self.count % 9 == 4)

    def teardown(self):
        shutil.rmtree(self.root, ignore_errors=True)

    def _add_picture(self, is_damaged):
        number, rng = self.count, np.random.default_rng(self.count)
        path = self.root / "images" / "abc"[number % 3] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (12, 9 + number % 4, 3), np.uint8)).save(path)
        mask = self.root / "masks" / path.parent.name / path.name
        mask.parent.mkdir(exist_ok=True)
        if number % 5:
            Image.fromarray(rng.integers(0, 9, (12, 9 + number % 4), np.uint8)).save(mask)
        if is_damaged:
            self.damaged.append((path, path.read_bytes()))
            path.write_bytes(b"no image")
        self.count += 1

    @property
    def folder(self):
        return self.output.with_suffix(".building")

    @property
    def is_unfinished(self):
        return (self.folder / "plan.json").exists()

    def _build(self, output=None, **options):
        output = output or self.output
        options = {"progress": False, **self.options} | options
        return memload.build(self.root / "images", output, **options)

    def _undisturbed(self):
        output = self.root / "undisturbed" / "out.bin"
        shutil.rmtree(output.parent, ignore_errors=True)
        output.parent.mkdir()
        self._build(output, num_workers=0)
        return self._files(output.parent)

    @staticmethod
    def _files(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def _check_published(self):
        assert self._files(self.output.parent) == self._undisturbed()
        assert not self.folder.exists()
        self.is_mended = self.has_changed = False

    @precondition(lambda self: not self.has_changed)
    @rule(workers=WORKERS)
    def build(self, workers):
        report = self._build(num_workers=workers, overwrite=True)
        assert report.is_published
        self._check_published()

    @precondition(lambda self: "shard_size" in self.options and not self.has_changed)
    @precondition(lambda self: not self.is_mended)  # a part tries only its own rejected rows again
    @rule(number=st.integers(0, 3), count=st.integers(1, 4), workers=WORKERS)
    def build_a_part(self, number, count, workers):
        part = (number % count, count)
        report = self._build(num_workers=workers, overwrite=True, part=part)
        if report.is_published:
            self._check_published()

    @precondition(lambda self: not self.has_changed)
    @rule(step=st.integers(0, 120), workers=WORKERS)
    def kill(self, step, workers):
        before = self._files(self.output.parent)

        def killed():
            kill_before(step)
            self._build(num_workers=workers, overwrite=True)

        if in_a_process(killed) == 0 or not self.is_unfinished:
            if self._files(self.output.parent) != before:
                shutil.rmtree(self.folder, ignore_errors=True)  # killed while it was removed
                self._check_published()
        elif self.output.with_suffix(".idx").exists():
            assert memload.verify(self.output).ok

    # Once the index is made, a build only publishes: no row is tried again.
    @precondition(lambda self: self.damaged and not (self.folder / "out.idx").exists())
    @rule()
    def mend(self):
        path, content = self.damaged.pop()
        path.write_bytes(content)
        self.is_mended = True

    @rule(is_damaged=st.booleans())
    def add(self, is_damaged):
        self._add_picture(is_damaged)
        self.has_changed = True

    @precondition(lambda self: self.has_changed)
    @rule()
    def go_on_with_another_source(self):
        is_begun = self.is_unfinished and any(self.folder.glob("*.bin"))
        if is_begun and not (self.folder / "out.idx").exists():
            with pytest.raises(memload.BuildError, match=r"samples was .* and is"):
                self._build(num_workers=0, overwrite=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.has_changed = False

    @precondition(lambda self: self.is_unfinished)
    @rule(where=st.floats(0, 1), choice=st.integers(0, 9), cut=st.booleans())
    def damage(self, where, choice, cut):
        journals = sorted(self.folder.glob("*.rows"))
        if not journals:
            return
        journal = journals[choice % len(journals)]
        number, shards = int(journal.stem), len({*self.folder.glob("out-*.bin")})
        names = [f"out-{number:05d}-of-*.bin", f"out.mask-{number:05d}-of-*.bin"]
        pixels = [path for name in names for path in self.folder.glob(name)]
        files = [journal, *(pixels if shards else self.folder.glob("*.bin"))]
        path = files[choice % len(files)]
        content = bytearray(path.read_bytes())
        if content and cut:
            path.write_bytes(content[: int(where * len(content))])
        elif content:
            content[int(where * (len(content) - 1))] ^= 0xFF
            path.write_bytes(content)

    @invariant()
    def a_data_set_is_whole_unless_it_is_being_replaced(self):
        if self.output.with_suffix(".idx").exists():
            assert memload.verify(self.output).ok


Builds.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # to shrink a failure takes minutes
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_flushed")
class TestBuilds(Builds.TestCase):
    pass
