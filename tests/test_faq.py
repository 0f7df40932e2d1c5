"""docs/faq.md: every error in it is what memload says."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import memload
from memload import transforms
from memload.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "faq.md"
BLOCKS = re.findall(
    r"^```(shell-session|pycon)\n(?:\$|>>>) (.*)\n([^`]*)^```$", PAGE.read_text(), re.MULTILINE
)
FINGERPRINT = re.compile("'[0-9a-f]{64}'")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files that the page speaks of."""
    root = tmp_path_factory.mktemp("faq")
    rng = np.random.default_rng(0)
    for number in range(30):
        path = root / "images" / ("ant", "bee", "cat")[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (70, 80, 3), np.uint8)).save(path)
    memload.build(root / "images", root / "out.bin", size=64, num_workers=0)
    for part in ("train", "val"):
        shutil.copytree(root / "images", root / "dataset" / part)
    for folder in ("damaged", "renamed", "lonely"):
        (root / folder).mkdir(parents=True)
    pictures = sorted((root / "images" / "ant").iterdir())
    for number in range(2):
        (root / "damaged" / f"{number}.jpg").write_text("no picture")
        shutil.copy(pictures[number], root / "damaged")
    (root / "names.csv").write_text("id,label\nimg0,a\nimg1,b\nimg2,a\n")
    for folder, name in (("renamed", "other"), ("lonely", "out")):
        shutil.copy(root / "out.idx", root / folder / f"{name}.idx")
    for name in ("out", "other"):
        shutil.copy(root / "out.bin", root / "renamed" / f"{name}.bin")
    scans = [(np.zeros((8, 8), np.int16), number) for number in range(4)]
    memload.build(scans, root / "scans.bin", mode="array", num_workers=0)
    return root


def said_by_command(command):
    """Return the last line that a command prints, which has to fail."""
    done = CliRunner().invoke(main, shlex.split(command.removeprefix("memload ")))
    assert done.exit_code == 1, done.output
    return done.output.splitlines()[-1]


def said_by_python(statement):
    """Return the error of a statement as the interpreter ends with it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # its type and text are returned
        exec(statement, {"memload": memload, "transforms": transforms, "torch": torch})
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("kind", "line", "message"), BLOCKS, ids=[f"{line[:40]}" for _, line, _ in BLOCKS]
)
def test_an_error_of_the_faq_is_said(kind, line, message, files, monkeypatch):
    monkeypatch.chdir(files)
    said = said_by_python(line) if kind == "pycon" else said_by_command(line)
    said = FINGERPRINT.sub("'…'", said.replace(f"{files}/", ""))
    assert " ".join(said.split()) == " ".join(message.split())


def test_the_errors_of_the_faq_are_found():
    assert len(BLOCKS) == len(
        re.findall("^```(?:shell-session|pycon)$", PAGE.read_text(), re.MULTILINE)
    )
