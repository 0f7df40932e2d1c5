"""The wheel and the sdist, as a release has them: built, installed into a new environment, and used."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

import memload

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
VERSION = memload.__version__
pytest.importorskip("hatchling")


def run(*command, cwd):
    """Run a program that must not see this checkout, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist of this checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "-d", folder, cwd=ROOT)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel that the sdist makes, as an index would."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as file:
        file.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", folder, cwd=unpacked)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A new environment with memload's wheel. What memload depends on comes from this one."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        names = {name.partition("/")[0] for name in file.namelist()}
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
    run(*pip, "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    assert names == {path.name for path in packages.iterdir()}
    (packages / "others.pth").write_text(
        "\n".join(path for path in sys.path if "site-packages" in path)
    )
    return folder


def test_the_wheel_builds_inspects_and_reads_a_data_set(environment, folder, tmp_path):
    command = environment / "bin" / "memload"
    assert run(command, "--version", cwd=tmp_path).split()[-1] == VERSION
    run(command, "build", folder, "out.bin", "--size", "8", cwd=tmp_path)
    assert np.load(tmp_path / "out.bin", mmap_mode="r").shape == (12, 8, 8, 3)
    run(command, "verify", "out.bin", cwd=tmp_path)
    script = """
import memload, sys
assert memload.__file__.startswith(sys.prefix), memload.__file__
from memload.transforms import train
images, labels = next(iter(memload.Loader("out.bin", 4, transform=train(4), device="cpu")))
print(tuple(images.shape), labels.tolist())
"""
    said = run(environment / "bin" / "python", "-c", script, cwd=tmp_path)
    assert said.split("\n")[0] == "(4, 3, 4, 4) [0, 0, 0, 0]"


def test_the_sdist_has_what_tests_and_pages_need(sdist):
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for name in ("memload/py.typed", "tests/conftest.py", "docs/index.md", "mkdocs.yml", "LICENSE"):
        assert name in names
    assert not [name for name in names if name.startswith((".git/", "site/", ".venv/"))]


def test_the_version_is_that_of_the_citation_and_the_changelog():
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()
