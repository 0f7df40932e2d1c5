"""Where kernels are tested: on a GPU or, without one, by Triton's interpreter.

Triton chooses between them when it is imported, so the interpreter has a process of its own.
"""

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_device = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="done in another process"
)


def starts_the_interpreter(test):
    """Mark a test that starts the interpreter. It takes a minute, or several on a busy machine."""
    is_done_here = INTERPRETED or torch.cuda.is_available()
    return pytest.mark.timeout(600)(
        pytest.mark.skipif(is_done_here, reason="done in this process")(test)
    )


def assert_passes_in_interpreter(file, count):
    """Run the tests of a file by the interpreter, and assert that so many pass."""
    command = f"{sys.executable} -m pytest -q --noconftest -p no:cacheprovider {file}".split()
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert f" {count} passed" in f" {done.stdout.splitlines()[-1]}", done.stdout
