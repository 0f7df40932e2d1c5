"""What is public, what it loads, and what it leaves alone in the process of the user."""

import ast
import importlib
import inspect
import pickle
import re
import subprocess
import sys
import textwrap
from importlib import metadata, resources
from pathlib import Path

import pytest

import memload

PACKAGE = Path(memload.__file__).parent


def in_new_process(script, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def imports_for_type_checkers():
    """Return the names that ``__init__.py`` imports for type checkers, each with its module."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: str(node.module)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_nothing_heavy_is_loaded_before_it_is_needed():
    script = """
    import sys
    import memload.cli

    try:
        memload.cli.main(["build", "--help"])
    except SystemExit:
        heavy = {"numpy", "torch", "PIL", "tqdm", "safetensors", "multiprocessing"}
        assert not heavy & sys.modules.keys()
        print("done")
    """
    assert in_new_process(script).endswith("done")


def test_building_and_inspecting_a_data_set_never_loads_torch(folder, tmp_path):
    script = """
    import sys
    from memload.cli import main

    images, output = sys.argv[1:]
    sheet = output.replace(".bin", ".png")
    for arguments in (
        ["build", images, output, "--size", "8", "--num-workers", "0"],
        ["info", output],
        ["verify", output],
        ["preview", output, sheet],
    ):
        try:
            main(arguments)
        except SystemExit as ended:
            assert not ended.code, arguments
        assert "torch" not in sys.modules, arguments
    """
    in_new_process(script, folder, tmp_path / "out.bin")
    assert (tmp_path / "out.png").exists()


def test_the_public_names_exist_are_described_and_seen_by_type_checkers():
    imports = imports_for_type_checkers()
    assert imports.pop("transforms") == "memload"
    assert dir(memload) == sorted({"__version__", *imports})
    for name, module in imports.items():
        value = getattr(memload, name)
        assert getattr(importlib.import_module(module), name) is value
        assert inspect.getdoc(value)
        assert issubclass(value, memload.MemloadError) if name.endswith("Error") else True
    assert not {path.stem for path in PACKAGE.iterdir()} & set(memload.__all__)  # hides no module
    with pytest.raises(AttributeError, match="module 'memload' has no attribute 'MemapDataset'"):
        memload.MemapDataset  # noqa: B018


def test_the_description_of_a_folder_names_every_file():
    missing = []
    for package in PACKAGE.glob("*/**/__init__.py"):
        text = ast.get_docstring(ast.parse(package.read_text())) or ""
        others = {path.stem for path in package.parent.glob("*.py")} - {"__init__"}
        missing += [name for name in others if not re.search(rf"\b{name}\b", text)]
    assert missing == []


@pytest.mark.parametrize(
    "error",
    [
        memload.MissingError("gone", path=Path("out.bin")),
        memload.ChecksumError("changed", path="out.bin", rows=[3]),
        memload.DecodeError("damaged", key="ant/1.jpg"),
        memload.DependencyError("not installed", name="jpeg4py"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_text_and_attributes_when_processes_send_them(error):
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), str(sent), vars(sent)) == (type(error), str(error), vars(error))
    assert getattr(sent, "name", None) == getattr(error, "name", None)


def test_the_package_is_installed_with_its_version_types_and_command():
    assert metadata.version("memload") == memload.__version__
    assert resources.files("memload").joinpath("py.typed").is_file()
    (command,) = metadata.entry_points(group="console_scripts", name="memload")
    assert command.value == "memload.cli:main"


UNCHANGED = """
import gc
import locale
import logging
import os
import pickle
import random
import signal
import sys
import threading
import warnings

import numpy as np
import PIL.Image
import PIL.ImageFile
import torch
import torch.utils.data
import tqdm


def state():
    mask = os.umask(0)
    os.umask(mask)
    return {
        "torch": (torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype()),
        "torch's device": (torch.get_default_device(), torch.is_grad_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch's random numbers": torch.get_rng_state().tolist(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "numpy": (pickle.dumps(np.random.get_state()), np.geterr()),
        "python": (random.getstate(), sys.getrecursionlimit(), list(sys.path)),
        "environment": (dict(os.environ), os.getcwd(), mask, locale.setlocale(locale.LC_ALL)),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "warnings": (list(warnings.filters), warnings.showwarning),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "threads running": threading.active_count(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "root logger": (logging.root.handlers[:], logging.root.level),
        "logger": (logging.getLogger("memload").handlers[:], logging.getLogger("memload").level),
        "pillow": (PIL.Image.MAX_IMAGE_PIXELS, PIL.ImageFile.LOAD_TRUNCATED_IMAGES, PIL.ImageFile.MAXBLOCK),
        "tqdm": (tqdm.tqdm.monitor_interval, tqdm.tqdm.monitor),
    }


def main(images, output):
    torch.rand(1), np.random.rand(1), random.random()
    torch.get_num_threads()
    before = state()

    import memload

    memload.build(images, output, size=8, num_workers=2)
    memload.build(images, output, size=8, num_workers=0, overwrite=True)
    assert memload.verify(output).ok
    dataset = memload.MemmapDataset(output)
    dataset[3:].gather([0, 1])
    images, labels = memload.fast_collate([dataset[0], dataset[1]])
    memload.fast_collate([PIL.Image.new("RGB", (4, 4))])
    dataset[:3].save(output.replace(".bin", "-part.idx"))
    del images, labels, dataset
    after = state()
    for name, value in before.items():
        assert after[name] == value, (name, value, after[name])
    print("unchanged")


main(*sys.argv[1:])
"""


def test_nothing_of_the_users_process_is_changed(folder, tmp_path):
    assert in_new_process(UNCHANGED, folder, tmp_path / "out.bin") == "unchanged"


def test_a_new_process_gets_all_names_no_start_method_and_no_compiler(folder, tmp_path):
    script = """
    import multiprocessing
    import sys
    import memload

    memload.build(sys.argv[1], sys.argv[2], size=8, num_workers=2)
    assert multiprocessing.get_start_method(allow_none=True) is None
    multiprocessing.set_start_method("spawn")
    import torch
    known = {*sys.modules}
    from memload import *
    assert {*memload.__all__} <= {*dir()}
    memload.transforms.train(4)(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    assert not {"triton", "torch._dynamo", "torchvision"} & ({*sys.modules} - known)
    """
    in_new_process(script, folder, tmp_path / "out.bin")
