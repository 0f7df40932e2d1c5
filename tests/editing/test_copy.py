"""Data sets go between machines and stores, whatever happens on the way."""

import importlib.util
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import memload
from memload.editing import copy as copying
from memload.sources import remote
from tests.damage import flip

pytest.importorskip("aiohttp")


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    """Ranges of two rows, and no time between two attempts."""
    monkeypatch.setattr(copying, "_RANGE_BYTES", 2 * 4 * 6 * 3)
    monkeypatch.setattr(remote, "_WAITS", (0, 0, 0))


@pytest.fixture
def memory():
    """The file system of fsspec in memory, and its URL."""
    import fsspec

    system = fsspec.filesystem("memory")
    yield system
    for name in system.find("/"):
        system.rm(name)


@pytest.fixture
def dataset(write_dataset, add_array, tmp_path):
    """A data set of three files of pixels, with a mask and an array of another program."""
    folder = tmp_path / "made"
    folder.mkdir()
    index = write_dataset(folder, rows=(10, 10, 5), name="out.bin")
    numbers = np.random.default_rng(0).integers(0, 200, (25, 6, 6), dtype=np.uint8)
    index = add_array(index, "mask", numbers, "mask")
    return add_array(index, "features", numbers[:, 0].astype(np.float32), "npy")


@pytest.fixture
def server(dataset, serve):
    return serve(dataset.path.parent)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def test_it_is_the_same_after_a_way_through_a_store(dataset, memory, tmp_path):
    url = memload.copy(dataset.path, "memory://bucket/sets/out.bin")
    path = memload.copy(url, tmp_path / "back")
    assert (url, path) == ("memory://bucket/sets/out.bin", f"{tmp_path}/back/out.bin")
    assert contents(tmp_path / "back") == contents(dataset.path.parent)
    assert memload.verify(path).ok


def test_between_folders(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(dataset.path.parent)
    assert memload.copy("out.bin", f"{tmp_path}/a/b/") == f"{tmp_path}/a/b/out.bin"
    monkeypatch.chdir(tmp_path / "a/b")
    assert memload.copy(Path("out"), "../c/out.idx") == f"{tmp_path}/a/c/out.bin"
    assert contents(tmp_path / "a/c") == contents(dataset.path.parent)


def test_what_is_there_is_not_read_again(dataset, server, tmp_path):
    path = memload.copy(f"{server.url}/out.bin", tmp_path / "x")
    assert len(set(server.rows_asked())) == len(server.rows_asked()) > 20
    server.asked.clear()
    assert memload.copy(f"{server.url}/out.bin", tmp_path / "x") == path
    assert {name for name, _ in server.asked} == {"out.idx"}
    (tmp_path / "x" / "out.mask.bin").unlink()
    server.asked.clear()
    memload.copy(f"{server.url}/out.bin", tmp_path / "x")
    assert {name for name, _ in server.rows_asked()} == {"out.mask.bin"}
    assert contents(tmp_path / "x") == contents(dataset.path.parent)


def test_a_copy_that_was_stopped_goes_on(dataset, server, tmp_path):
    allowed = iter(range(12))
    server.fault = lambda path, start: "busy" if start and next(allowed, None) is None else None
    for _ in range(2):
        with pytest.raises(memload.SourceError, match=r"out.* cannot be read: .*503"):
            memload.copy(f"{server.url}/out.bin", tmp_path, num_threads=1)
        with pytest.raises(memload.MissingError):
            memload.MemmapDataset(tmp_path / "out.bin")
        read = set(server.rows_asked()[:12])
        allowed = iter(range(0))
    server.fault, server.asked = (lambda path, start: None), []
    memload.copy(f"{server.url}/out.bin", tmp_path)
    assert not read & set(server.rows_asked())
    assert memload.verify(tmp_path / "out.bin").ok
    assert not (tmp_path / "out.copying").exists()


@pytest.mark.parametrize("fault", ["busy", "cut"])
def test_a_server_that_fails_once_is_asked_again(dataset, server, tmp_path, fault):
    failed = set()

    def fail(path, start):
        first = (path, start) not in failed
        failed.add((path, start))
        return fault if first else None

    server.fault = fail
    assert memload.verify(memload.copy(f"{server.url}/out.bin", tmp_path)).ok


def test_a_server_without_ranges_is_an_error(dataset, server, tmp_path):
    server.has_ranges = False
    with pytest.raises(memload.SourceError, match=r"out.idx: the server sends whole files only"):
        memload.copy(f"{server.url}/out.bin", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("status", [403, 500])
def test_what_a_server_refuses_to_say_is_no_missing_file(dataset, server, tmp_path, status):
    server.status = status
    with pytest.raises(
        memload.SourceError, match=f"out-00000-of-00003.bin cannot be read: .*{status}"
    ):
        memload.copy(f"{server.url}/out.bin", tmp_path, num_threads=1)


def test_rows_that_change_meanwhile_are_an_error(dataset, server, tmp_path):
    path = dataset.path.with_name("out-00001-of-00003.bin")
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(memload.ChecksumError, match=r"00001.*: row 9 differs") as error:
        memload.copy(f"{server.url}/out.bin", tmp_path)
    assert error.value.rows == (9,)
    assert not list(tmp_path.glob("*.bin"))
    path.write_bytes(before)
    assert memload.verify(memload.copy(f"{server.url}/out.bin", tmp_path)).ok


def test_an_incomplete_data_set_is_an_error(dataset, server, memory, tmp_path):
    shard = dataset.path.with_name("out-00001-of-00003.bin")
    shard.rename(tmp_path / "away")
    for source, error, destination in [
        (f"{server.url}/out.bin", memload.FormatError, tmp_path / "x"),
        (dataset.path, memload.MissingError, "memory://x"),
        (dataset.path, memload.FormatError, tmp_path / "x"),
        (f"{server.url}/none.bin", memload.SourceError, tmp_path / "x"),
        (tmp_path / "none.bin", memload.SourceError, tmp_path / "x"),
        ("memory://none/out.bin", memload.SourceError, tmp_path / "x"),
    ]:
        with pytest.raises(error, match=r"00001-of-00003.bin is missing|does not exist"):
            memload.copy(source, destination)
    assert not memory.find("/")
    assert not list(tmp_path.glob("x/out*"))
    (tmp_path / "cut.idx").write_bytes(dataset.path.read_bytes()[:500])
    with pytest.raises(memload.FormatError, match=r"cut.idx is damaged"):
        memload.copy(tmp_path / "cut.bin", tmp_path / "x")


def test_another_data_set_stays_unless_it_is_to_be_replaced(
    dataset, write_dataset, memory, tmp_path
):
    other = write_dataset(tmp_path, rows=(3,), name="out.bin", seed=7)
    before = contents(tmp_path / "made"), other.path.read_bytes()
    memload.copy(other.path, "memory://bucket")
    for source, destination in [
        (dataset.path, tmp_path),
        (other.path, dataset.path.parent),
        (dataset.path, "memory://bucket"),
        ("memory://bucket/out.bin", dataset.path.parent),
    ]:
        with pytest.raises(FileExistsError, match="is not that of this data set"):
            memload.copy(source, destination)
    assert (contents(tmp_path / "made"), other.path.read_bytes()) == before
    memload.copy(dataset.path, "memory://bucket", overwrite=True)
    path = memload.copy("memory://bucket/out.bin", tmp_path, overwrite=True)
    assert memload.verify(path).ok
    assert len(memload.MemmapDataset(path)) == 25


def test_only_the_index_is_copied_if_labels_have_changed(dataset, server, tmp_path):
    memload.copy(f"{server.url}/out.bin", tmp_path)
    memload.with_columns(dataset, age=np.arange(25)).write(dataset.path)
    server.asked.clear()
    path = memload.copy(f"{server.url}/out.bin", tmp_path, overwrite=True)
    assert not server.rows_asked()
    assert memload.MemmapDataset(path, columns="all").columns["age"].tolist() == list(range(25))


def test_files_that_were_renamed_with_their_index_are_found(dataset, memory, tmp_path):
    for path in list(dataset.path.parent.iterdir()):
        path.rename(path.with_name(path.name.replace("out", "pets")))
    memload.copy(dataset.path.with_name("pets.bin"), "memory://bucket")
    path = memload.copy("memory://bucket/pets.bin", tmp_path / "x")
    assert contents(tmp_path / "x") == contents(dataset.path.parent)
    assert memload.verify(path).ok


def test_an_upload_that_was_stopped_looks_unfinished_and_goes_on(dataset, memory, monkeypatch):
    written = []
    put = type(memory).put_file

    def broken(self, local, path, **options):
        if len(written) == 3:
            raise ConnectionError("gone")
        written.append(path)
        put(self, local, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", broken)
        with pytest.raises(memload.SourceError, match=r"cannot be written: ConnectionError: gone"):
            memload.copy(dataset.path, "memory://bucket")
    with pytest.raises(memload.SourceError, match="does not exist"):
        memload.copy("memory://bucket/out.bin", "x")
    first, written[:] = set(written), []
    with monkeypatch.context() as patch:
        patch.setattr(
            type(memory), "put_file", lambda *a, **o: (written.append(a[2]), put(*a, **o))
        )
        memload.copy(dataset.path, "memory://bucket")
    assert not first & set(written)
    assert written[-1] == "/bucket/out.idx"


def test_a_web_server_cannot_be_written_to(dataset, server):
    with pytest.raises(memload.SourceError, match=r"cannot be written"):
        memload.copy(dataset.path, f"{server.url}/new/")


def test_a_full_disk_is_an_error_and_the_same_call_goes_on(
    dataset, memory, tmp_path, full_behind, monkeypatch
):
    memload.copy(dataset.path, "memory://bucket")
    with full_behind(4500), pytest.raises(OSError, match="File too large"):
        memload.copy("memory://bucket/out.bin", tmp_path)
    assert not list(tmp_path.glob("*.*n"))
    full = shutil.disk_usage(tmp_path)._replace(free=100)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: full)
        with pytest.raises(memload.BuildError, match=r"has 0 MB free"):
            memload.copy("memory://bucket/out.bin", tmp_path)
    assert memload.verify(memload.copy("memory://bucket/out.bin", tmp_path)).ok


def test_wrong_destinations(dataset, tmp_path):
    for source, destination, message in [
        ("s3://a/out.bin", "gs://b/out.bin", "are URLs. Copy to this machine first"),
        (dataset.path, tmp_path / "new.bin", "has another name than"),
        (dataset.path, "", "'' is no place"),
        (dataset.path, "s3://", "'s3://' is no place"),
        (Path("s3://a/out.bin"), Path("s3://b/"), "are URLs"),
    ]:
        with pytest.raises(ValueError, match=message):
            memload.copy(source, destination)


@pytest.mark.parametrize(
    "open_it", [memload.MemmapDataset, memload.Loader, memload.info, memload.verify]
)
def test_a_url_elsewhere_names_the_command(open_it):
    message = "s3://bucket/out.bin is not on this machine. .*memload copy s3://bucket/out.bin ."
    with pytest.raises(memload.MissingError, match=message):
        open_it("s3://bucket/out.bin")


def test_a_damaged_data_set_is_not_uploaded(dataset, memory):
    flip(dataset.path.with_name("out.mask.bin"), 4096 + 5 * 36)
    with pytest.raises(memload.ChecksumError, match=r"out.mask.bin is missing|is damaged"):
        memload.copy(dataset.path, "memory://bucket")
    assert "/bucket/out.idx" not in memory.find("/")


@pytest.mark.parametrize("name", ["out-00001-of-00003.bin", "out.features.bin"])
def test_a_file_that_is_there_with_other_rows_is_not_taken(dataset, tmp_path, name):
    flip(Path(shutil.copy(dataset.path.with_name(name), tmp_path)), -100)
    with pytest.raises(FileExistsError, match=name):
        memload.copy(dataset.path, tmp_path)
    assert memload.verify(memload.copy(dataset.path, tmp_path, overwrite=True)).ok


def test_a_renamed_data_set_does_not_take_a_file_of_its_old_name(dataset, write_dataset, tmp_path):
    for path in list(dataset.path.parent.iterdir()):
        path.rename(path.with_name(path.name.replace("out", "pets")))
    write_dataset(tmp_path, rows=(10, 10, 5), name="out.bin", seed=3)
    with pytest.raises(FileExistsError, match=r"out-00000-of-00003.bin is there already"):
        memload.copy(dataset.path.with_name("pets.bin"), tmp_path, overwrite=True)


def test_what_is_returned_opens_whatever_its_files_are_called(dataset, tmp_path):
    dataset.subset(np.arange(5)).write(dataset.path.with_name("few.idx"))
    path = memload.copy(dataset.path.with_name("few.idx"), tmp_path)
    assert path == f"{tmp_path}/few.idx"
    assert len(memload.MemmapDataset(path)) == 5


def test_names_of_any_letters(write_dataset, serve, tmp_path, monkeypatch):
    (tmp_path / "from").mkdir()
    index = write_dataset(tmp_path / "from", name="my set é%20[1]#a::b.bin")
    name = "my%20set%20%C3%A9%2520[1]%23a::b.bin"
    path = memload.copy(f"{serve(tmp_path / 'from').url}/{name}", tmp_path / "a::b")
    assert path == f"{tmp_path}/a::b/{index.path.stem}.bin"
    assert contents(tmp_path / "a::b") == contents(tmp_path / "from")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert memload.copy(path, "~/") == f"{tmp_path}/home/{index.path.stem}.bin"


COPY = [sys.executable, "-m", "memload", "copy"]


def test_processes_wait_for_the_one_that_copies(dataset, server, tmp_path):
    command = [*COPY, f"{server.url}/out.bin", str(tmp_path)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        output, error = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, f"{tmp_path}/out.bin: complete\n"), error
    assert len(server.rows_asked()) == len(set(server.rows_asked()))
    assert contents(tmp_path / "made").items() <= contents_of_files(tmp_path).items()


def contents_of_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_was_stopped_anywhere_leaves_nothing_that_looks_whole(
    dataset, server, tmp_path, stop
):
    for allowed in (3, 9, 14):
        server.asked, target = [], tmp_path / f"{allowed}"
        process = subprocess.Popen(
            [*COPY, f"{server.url}/out.bin", str(target), "--num-threads", "1"],
            stderr=subprocess.PIPE,
            text=True,
        )
        while len(server.asked) < allowed and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(stop)
        _, error = process.communicate(timeout=60)
        assert "Traceback" not in error
        if process.returncode:
            assert not (target / "out.idx").exists()
        assert memload.verify(memload.copy(f"{server.url}/out.bin", target)).ok
        assert contents(target) == contents(dataset.path.parent)


# In a process of its own: the server and s3fs leave threads and sockets.
THROUGH_S3 = """
import os, sys
from moto.server import ThreadedMotoServer

store = ThreadedMotoServer(port=0, verbose=False)
store.start()
os.environ["AWS_ENDPOINT_URL"] = "http://%s:%s" % store.get_host_and_port()
os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "test"
import memload, s3fs

s3fs.S3FileSystem().mkdir("bucket")
try:
    memload.copy("s3://bucket/sets/out.bin", sys.argv[2])
except memload.SourceError as error:
    print(error)
print(memload.copy(sys.argv[1], "s3://bucket/sets/"))
print(memload.copy("s3://bucket/sets/out.bin", sys.argv[2]))
store.stop()
"""


@pytest.mark.slow
def test_a_store_with_the_interface_of_s3(dataset, tmp_path):
    for package in ("moto.server", "s3fs"):
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            pytest.skip(f"needs {package}")
    command = [sys.executable, "-c", THROUGH_S3, str(dataset.path), str(tmp_path / "x")]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert output.splitlines() == [
        "s3://bucket/sets/out.idx cannot be read: it does not exist. Check the path or URL.",
        "s3://bucket/sets/out.bin",
        f"{tmp_path}/x/out.bin",
    ]
    assert contents(tmp_path / "x") == contents(dataset.path.parent)
    assert memload.verify(tmp_path / "x/out.bin").ok


def test_files_of_a_data_set_that_was_replaced_go(dataset, write_dataset, tmp_path):
    write_dataset(tmp_path, rows=(4, 4, 4, 4), name="out.bin", seed=3)
    before = {file.name for file in tmp_path.glob("out*")}
    memload.copy(dataset.path, tmp_path, overwrite=True)
    copied = {file.name for file in dataset.path.parent.glob("out*")}
    assert {file.name for file in tmp_path.glob("out*")} == copied
    assert before - copied
    assert memload.verify(tmp_path / "out.bin").ok


def test_overwrite_repairs_damaged_rows(dataset, tmp_path):
    path = memload.copy(dataset.path, tmp_path)
    flip(sorted(tmp_path.glob("out-*.bin"))[1], -50)
    assert not memload.verify(path).ok
    memload.copy(dataset.path, tmp_path, overwrite=True)
    assert memload.verify(path).ok


def test_overwrite_repairs_a_damaged_object_of_a_store(dataset, memory, tmp_path):
    memload.copy(dataset.path, "memory://bucket")
    name = next(each for each in memory.find("/bucket") if each.endswith("00001-of-00003.bin"))
    content = bytearray(memory.cat_file(name))
    content[-50] ^= 1
    memory.pipe_file(name, bytes(content))
    memload.copy(dataset.path, "memory://bucket", overwrite=True)
    assert memload.verify(memload.copy("memory://bucket/out.bin", tmp_path)).ok
