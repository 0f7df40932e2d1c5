"""Systems that lack what Linux has: simulated in a process of their own, where all of it is taken away first."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

#: Run by the process and by every worker that it spawns, before anything of memload's is imported.
LACKING = """
    import mmap, os, signal, sys, types
    import multiprocessing.connection, multiprocessing.sharedctypes, multiprocessing.popen_spawn_posix
    from fcntl import flock
    import click, concurrent.futures.thread, numpy
    import PIL.ImageDraw, PIL.ImageFont, safetensors.numpy, tqdm, urllib.request

    if __name__ == "__main__":  # in the workers of a build there is none
        import torch
    for module, names in (
        (os, "sched_getaffinity posix_fadvise pread preadv pwrite pwritev posix_fallocate sendfile copy_file_range "
             "memfd_create getppid O_NONBLOCK O_CLOEXEC O_DIRECTORY O_PATH POSIX_FADV_DONTNEED POSIX_FADV_WILLNEED"),
        (mmap, " ".join(name for name in dir(mmap) if name.startswith(("MADV_", "MAP_NORESERVE", "MAP_POPULATE")))),
    ):
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in ("fcntl", "resource", "pwd", "grp", "termios"):
        sys.modules[name] = None
    if sys.argv[1] == "win32":
        def locking(descriptor, mode, size):
            try:
                flock(descriptor, 6)  # at once or not at all
            except BlockingIOError:
                raise PermissionError(13, "Permission denied") from None

        def refusing(function):
            # what removes or replaces a file does not, there, while it is open or mapped
            def checked(*paths, **options):
                opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
                for path in paths:
                    if os.path.realpath(path) in opened and "/out" in str(path):
                        raise PermissionError(13, "The process cannot access the file", str(path))
                return function(*paths, **options)

            return checked

        for name in ("unlink", "remove", "rename", "replace"):
            setattr(os, name, refusing(getattr(os, name)))
        sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
        for name in ("MAP_SHARED", "MAP_PRIVATE", "PROT_READ", "PROT_WRITE"):
            delattr(mmap, name)
    else:
        sys.modules["fcntl"] = types.SimpleNamespace(flock=flock, LOCK_EX=2, LOCK_NB=4, LOCK_UN=8)
    sys.platform = sys.argv[1]
"""

USED = """
    if __name__ == "__main__":
        import memload, memload.bench, memload.cli, memload.storage.format, memload.building.journal, memload.building.workers

        images, output = sys.argv[2], sys.argv[3]
        assert memload.building.workers._CONTEXT.get_start_method() == "spawn"
        assert memload.build(images, output, size=8, num_workers=2).samples == 6
        assert memload.build(images, output, size=8, num_workers=0, overwrite=True).rejected == 0
        with memload.building.journal.locked(memload.storage.format.output_paths(output)[1]):
            try:
                memload.build(images, output, size=8, num_workers=0, overwrite=True)
            except memload.BuildError as error:
                assert "found one running" in str(error), error
            else:
                raise AssertionError("two builds of one output")
        assert memload.info(output)["samples"] == 6
        assert memload.verify(output).ok
        memload.preview(output, output.replace(".bin", ".png"))
        from memload.machine import available_memory
        from memload.transforms import train

        dataset = memload.MemmapDataset(output)
        expected = dataset.gather(range(6)).permute(0, 3, 1, 2)
        loader = memload.Loader(dataset, 4, num_threads=2)
        assert torch.equal(torch.cat([images for images, _ in loader]), expected)
        assert [len(images) for images, _ in memload.Loader(output, 4, transform=train(4), shuffle=True)] == [4, 2]
        assert loader.feed.name == "cpu"
        for feed in ("dma", "uva", "pinned", "resident"):
            try:
                memload.Loader(output, 4, feed=feed)
            except memload.FeedError as error:
                assert "CUDA" in str(error)
            else:
                raise AssertionError(feed)
        batches = torch.utils.data.DataLoader(dataset, 6, collate_fn=memload.fast_collate)
        [(images, labels)] = memload.ThreadPrefetcher(memload.CudaPrefetcher(batches, device="cpu"))
        assert torch.equal(images, expected)
        available_memory()
        print("done")
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(6):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 8, 3), 40 * number, np.uint8)).save(path)
    return tmp_path / "images"


@pytest.mark.skipif(sys.platform == "win32", reason="what is taken away is not there")
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_what_a_system_lacks_is_done_without(system: str, images: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(LACKING) + textwrap.dedent(USED))
    command = [sys.executable, str(script), system, str(images), str(tmp_path / "out.bin")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert names == ["out.bin", "out.idx", "out.png", "script.py"]
