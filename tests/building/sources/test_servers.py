"""Servers that fail, in a process of its own, as fsspec starts a thread that never ends."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memload

from .conftest import Done, Server

pytestmark = pytest.mark.slow
Serve = Callable[[Path], Server]
Command = Callable[..., Done]

SOURCES = Path(__file__).parents[3] / "docs" / "sources.md"
EXAMPLES = [
    line
    for line in re.findall(r"^\$ memload (.*)", SOURCES.read_text(), re.MULTILINE)
    if "://" in line or ".." in line
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_servers_and_shards_run(
    containers: Any, serve: Serve, command: Command, example: str
) -> None:
    containers.table()
    (containers.directory().parent / "train").symlink_to("images")
    (containers.folder / "shards").mkdir()
    for number in range(3):
        containers.tar(f"shards/{number:03d}.tar", range(10 * number, 10 * number + 10))
    url = serve(containers.folder).url
    line = re.sub(r"s3://bucket|https://example.org/pets", url, example).replace("123", "002")
    done = command(*shlex.split(line))
    assert done.status == 0, done.error
    assert "30 samples" in done.output


def build(command: Command, url: str, *options: str) -> Done:
    return command("build", url, "out.bin", "--size", "16", "-j", "2", *options)


@pytest.mark.parametrize("fault", ["error", "cut"])
def test_a_file_that_fails_is_asked_for_four_times_and_rejected(
    containers: Any, serve: Serve, command: Command, tmp_path: Path, fault: str
) -> None:
    server = serve(containers.directory())
    server.fault = lambda path: fault if path == "/bee/15.jpg" else None
    done = build(command, server.url)
    assert done.status == 0, done.error
    assert server.asked.count("/bee/15.jpg") == 4
    assert len(memload.MemmapDataset(tmp_path / "out.bin")) == 29
    assert (tmp_path / "out.rejects.csv").read_text().count("\nbee/15.jpg,") == 1


def test_a_file_that_fails_three_times_is_fetched(
    containers: Any, serve: Serve, command: Command, tmp_path: Path
) -> None:
    server = serve(containers.directory())

    def fault(path: str) -> str | None:
        is_early = path == "/bee/15.jpg" and server.asked.count(path) < 4
        return "cut" if is_early else None

    server.fault = fault
    assert build(command, server.url).status == 0
    assert len(memload.MemmapDataset(tmp_path / "out.bin")) == 30


def test_a_server_that_goes_ends_the_build_which_goes_on_when_it_is_back(
    containers: Any, serve: Serve, command: Command, tmp_path: Path
) -> None:
    memload.build(containers.directory(), tmp_path / "folder.bin", size=16, num_workers=0)
    server = serve(containers.folder / "images")
    server.fault = lambda path: (
        "error" if path.endswith(".jpg") and len(set(server.asked)) > 16 else None
    )
    done = build(command, server.url)
    assert done.status == 1
    assert "run the same command again" in done.error.lower()
    assert not (tmp_path / "out.bin").exists()
    server.fault = lambda path: None
    server.asked.clear()
    done = build(command, server.url)
    assert done.status == 0, done.error
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "folder.bin").read_bytes()


def test_a_file_that_hangs_costs_itself_alone(
    containers: Any, serve: Serve, command: Command, tmp_path: Path
) -> None:
    server = serve(containers.directory())
    server.fault = lambda path: "hang" if path == "/bee/15.jpg" else None
    done = build(command, server.url, "--timeout", "3")
    assert done.status == 0, done.error
    assert done.seconds < 60
    assert len(memload.MemmapDataset(tmp_path / "out.bin")) == 29


def test_a_server_that_hangs_is_an_error(containers: Any, serve: Serve, command: Command) -> None:
    server = serve(containers.directory())
    server.fault = lambda path: "hang"
    done = build(command, server.url)
    assert done.status == 1
    assert "cannot be listed" in done.error
    assert done.seconds < 90


def test_what_a_server_does_not_have_is_told_at_once(
    containers: Any, serve: Serve, command: Command
) -> None:
    server = serve(containers.directory())
    for name in ("nothing", "nothing.tar"):
        done = build(command, f"{server.url}/{name}")
        assert done.status == 1
        assert f"/{name} cannot be" in done.error
        assert len([path for path in server.asked if path == f"/{name}"]) == 1
