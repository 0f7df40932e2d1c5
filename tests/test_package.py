"""What is public, what it loads, and what it leaves alone in the process of the user."""

import ast
import importlib
import inspect
import subprocess
import sys
import textwrap
from importlib import metadata, resources
from pathlib import Path

import pytest

import memload

PACKAGE = Path(memload.__file__).parent


def in_new_process(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def loaded_after(statement: str, *names: str) -> str:
    """Return which of these modules a statement loads in a new process."""
    return in_new_process(
        f"import sys\n{statement}\nprint(*(name for name in {names!r} if name in sys.modules))"
    ).splitlines()[-1]


def imports_for_type_checkers() -> dict[str, str]:
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


HEAVY = ("numpy", "torch", "PIL", "tqdm", "safetensors", "multiprocessing", "sys")


@pytest.mark.parametrize(
    "statement",
    [
        "import memload",
        "import memload.cli",
        "import memload.cli\ntry: memload.cli.main(['--version'])\nexcept SystemExit: print()",
        "import memload.cli\ntry: memload.cli.main(['build', '--help'])\nexcept SystemExit: print()",
    ],
    ids=["package", "command line", "version", "help"],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(statement: str) -> None:
    assert loaded_after(statement, *HEAVY) == "sys"


def test_building_and_inspecting_a_data_set_never_loads_torch(folder: Path, tmp_path: Path) -> None:
    script = """
    import sys
    from memload.cli import main

    images, output = sys.argv[1:]
    sheet = output.replace(".bin", ".png")
    for arguments in (
        ["build", images, output, "--size", "8", "--num-workers", "0"],
        ["info", output],
        ["info", "--environment"],
        ["verify", output],
        ["preview", output, "-o", sheet],
    ):
        try:
            main(arguments)
        except SystemExit as ended:
            assert not ended.code, arguments
        assert "torch" not in sys.modules, arguments
    """
    in_new_process(script, folder, tmp_path / "out.bin")
    assert (tmp_path / "out.png").exists()


def test_type_checkers_see_the_names_that_exist_at_run_time() -> None:
    imports = imports_for_type_checkers()
    assert imports.pop("transforms") == "memload"
    assert sorted(memload.__all__) == sorted({"__version__", *imports})
    for name, module in imports.items():
        assert getattr(importlib.import_module(module), name) is getattr(memload, name)


def test_every_public_name_is_described_and_can_be_listed() -> None:
    assert dir(memload) == sorted(memload.__all__)
    for name in set(memload.__all__) - {"__version__"}:
        value = getattr(memload, name)
        assert value.__name__ == name
        assert value.__module__.startswith("memload.")
        assert inspect.getdoc(value)
        assert issubclass(value, memload.MemloadError) if name.endswith("Error") else True


def test_no_public_name_hides_a_module() -> None:
    modules = {path.stem for path in PACKAGE.iterdir()}
    assert not modules & set(memload.__all__)


def test_transforms_are_reached_without_another_import() -> None:
    assert in_new_process("import memload; print(memload.transforms.Normalize.__name__)")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'memload' has no attribute 'MemapDataset'"):
        memload.MemapDataset  # noqa: B018


def test_a_star_import_brings_every_public_name() -> None:
    script = "from memload import *\nprint(*sorted(name for name in dir() if name[0] != '_' or name == '__version__'))"
    assert in_new_process(script).split() == sorted(memload.__all__)


def test_the_package_is_installed_with_its_version_types_and_command() -> None:
    assert metadata.version("memload") == memload.__version__
    assert resources.files("memload").joinpath("py.typed").is_file()
    entries = {
        (entry.group, entry.name): entry.value
        for entry in metadata.distribution("memload").entry_points
    }
    assert entries["console_scripts", "memload"] == "memload.cli:main"


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
    return {
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch's random numbers": torch.get_rng_state().tolist(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "numpy's random numbers": pickle.dumps(np.random.get_state()),
        "numpy's errors": np.geterr(),
        "random numbers": random.getstate(),
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "warnings": list(warnings.filters),
        "show warning": warnings.showwarning,
        "folder": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "path": list(sys.path),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "threads running": threading.active_count(),
        "recursion": sys.getrecursionlimit(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "loggers": (logging.root.handlers[:], logging.root.level, logging.getLogger("memload").level),
        "handlers": logging.getLogger("memload").handlers[:],
        "pillow's limits": (PIL.Image.MAX_IMAGE_PIXELS, PIL.ImageFile.LOAD_TRUNCATED_IMAGES, PIL.ImageFile.MAXBLOCK),
        "umask": mask(),
        "tqdm": (tqdm.tqdm.monitor_interval, tqdm.tqdm.monitor),
    }


def mask():
    value = os.umask(0)
    os.umask(value)
    return value


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


def test_nothing_of_the_users_process_is_changed(folder: Path, tmp_path: Path) -> None:
    assert in_new_process(UNCHANGED, folder, tmp_path / "out.bin") == "unchanged"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_build_leaves_the_start_method_of_processes_to_the_user(
    folder: Path, tmp_path: Path, num_workers: int
) -> None:
    script = """
    import multiprocessing
    import sys
    import memload

    memload.build(sys.argv[1], sys.argv[2], size=8, num_workers=int(sys.argv[3]))
    assert multiprocessing.get_start_method(allow_none=True) is None
    multiprocessing.set_start_method("spawn")
    """
    in_new_process(script, folder, tmp_path / "out.bin", str(num_workers))
