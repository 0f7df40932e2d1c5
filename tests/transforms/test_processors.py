"""What is said of torchvision's pixels holds on other processors, which settings stand for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = [Path(__file__).with_name(name) for name in ("test_warping.py", "test_automatic.py")]
AVX2 = {"avx2", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512cd", "avx512dq", "avx512bw", "avx512vl"}


def abilities() -> set[str]:
    """Return what a processor of x86 can do, as Linux names it."""
    lines = re.findall(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(lines[0].split()) if lines else set()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("setting", "needed"),
    [
        ("MKL_CBWR=AVX512", AVX512),
        ("MKL_CBWR=AVX2", AVX2),
        ("MKL_CBWR=COMPATIBLE", set()),
        # torch takes these without a look at the processor, and would end at an instruction that
        # it does not have.
        ("ATEN_CPU_CAPABILITY=avx512", AVX512),
        ("ATEN_CPU_CAPABILITY=avx2", AVX2),
        ("ATEN_CPU_CAPABILITY=default", set()),
        ("PYTEST_PLUGINS=tests.transforms.fused_products", set()),
    ],
)
def test_warps_and_policies_are_like_torchvisions(setting: str, needed: set[str]) -> None:
    if missing := needed - abilities():
        pytest.skip(f"the processor has no {', '.join(sorted(missing))}")
    name, _, value = setting.partition("=")
    others = {
        key: old
        for key, old in os.environ.items()
        if key not in ("MKL_CBWR", "ATEN_CPU_CAPABILITY", "PYTEST_PLUGINS")
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, FILES)],
        cwd=FILES[0].parents[2],
        env=others | {name: value},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
