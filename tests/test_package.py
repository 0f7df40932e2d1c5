import ast
import importlib
import inspect
import os
import subprocess
import sys
import textwrap
from importlib import metadata, resources
from pathlib import Path

import pytest

import memload

PACKAGE = Path(memload.__file__).parent
MODULES = {
    path.stem
    for path in PACKAGE.iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
}


def in_new_process(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def loaded_after(statement: str, *names: str) -> str:
    """Return which of these modules a statement has loaded in a new process."""
    return in_new_process(
        f"import sys\n{statement}\nprint(*(name for name in {names!r} if name in sys.modules))"
    )


def names_for_type_checkers() -> set[str]:
    """Return the names that ``__init__.py`` imports for type checkers alone."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    guarded = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_importing_memload_loads_neither_numpy_nor_torch() -> None:
    heavy = ("numpy", "torch", "PIL", "tqdm", "safetensors", "click", "multiprocessing")
    assert loaded_after("import memload", *heavy) == ""


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    heavy = ("numpy", "torch", "PIL", "tqdm", "safetensors", "multiprocessing")
    assert loaded_after("import memload.cli", *heavy) == ""


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_asking_for_the_version_or_for_help_loads_nothing_heavy(option: str) -> None:
    statement = (
        f"import memload.cli\ntry: memload.cli.main([{option!r}])\nexcept SystemExit: print()"
    )
    loaded = loaded_after(statement, "sys", "numpy", "torch", "PIL", "tqdm", "safetensors")
    assert loaded.splitlines()[-1] == "sys"


def test_building_and_looking_at_a_data_set_never_loads_torch(folder: Path, tmp_path: Path) -> None:
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


def test_all_lists_every_public_name_once() -> None:
    assert sorted(memload.__all__) == sorted({"__version__", *names_for_type_checkers()})
    assert dir(memload) == sorted(memload.__all__)


def test_every_public_name_resolves() -> None:
    for name in memload.__all__:
        assert getattr(memload, name) is not None


def test_every_public_name_is_one_of_memloads_own_and_described() -> None:
    for name in set(memload.__all__) - {"__version__"}:
        value = getattr(memload, name)
        assert value.__name__ == name
        assert value.__module__.startswith("memload.")
        assert inspect.getdoc(value)


def test_type_checkers_find_a_name_where_it_is_found_at_run_time() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memload."):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert getattr(module, alias.name) is getattr(memload, alias.name)


def test_no_public_name_is_the_name_of_a_module() -> None:
    assert not MODULES & set(memload.__all__)


def test_looking_a_name_up_leaves_it_where_it_is_found_at_once() -> None:
    assert memload.Index is memload.Index
    assert "Index" in vars(memload)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'memload' has no attribute 'MemapDataset'"):
        memload.MemapDataset  # noqa: B018


def test_a_star_import_brings_what_all_lists() -> None:
    script = "from memload import *\nprint(*sorted(name for name in dir() if name[0] != '_' or name == '__version__'))"
    assert in_new_process(script).split() == sorted(memload.__all__)


def test_the_version_is_the_installed_ones() -> None:
    assert metadata.version("memload") == memload.__version__


def test_the_package_says_that_it_is_typed() -> None:
    assert resources.files("memload").joinpath("py.typed").is_file()


def test_the_command_is_installed() -> None:
    (entry,) = (
        entry for entry in metadata.distribution("memload").entry_points if entry.name == "memload"
    )
    assert (entry.group, entry.value) == ("console_scripts", "memload.cli:main")


def test_public_errors_are_memload_errors() -> None:
    for name in memload.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(memload, name), memload.MemloadError)


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="builds with forked workers")
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
