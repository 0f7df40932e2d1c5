# Sourced by demo, test and check. Creates .venv and installs memload in it, with these extras:
#   . scripts/environment.sh EXTRA[,EXTRA]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "memload: there is no Python 3.11 or newer on the PATH. Install it from python.org" >&2
    return 1
}

make_venv() {
    local python
    python=$(find_python)
    echo "creating .venv (only the first time) …" >&2
    # The Python of Debian lacks ensurepip. virtualenv comes with its own pip.
    "$python" -m venv .venv >/dev/null 2>&1 || {
        rm -rf .venv
        "$python" -m pip install --quiet --target .virtualenv virtualenv &&
            PYTHONPATH=.virtualenv "$python" -m virtualenv --quiet .venv
        rm -rf .virtualenv
    }
}

install() {
    local stamp=.venv/.memload-$1
    # The stamp makes the next run start at once, unless pyproject.toml has changed.
    [[ $stamp -nt pyproject.toml ]] && return
    echo "installing memload and its dependencies in .venv; the first time, torch may take minutes …" >&2
    # To compile all modules takes most of the installation. They are compiled when they are first imported.
    export PIP_NO_COMPILE=1
    # torch first: as a dependency, pip would take its newest build, with gigabytes of CUDA.
    .venv/bin/python -c 'import torch' 2>/dev/null || .venv/bin/python -m pip install --quiet torch==2.13.0
    .venv/bin/python -m pip install --quiet --editable ".${1:+[$1]}"
    # The tests set the transforms beside torchvision's. Its wheel is for CUDA, and beside torch for the CPU it fails in
    # libraries that import it where they find it. So it has a folder of its own, where only these tests look.
    if [[ $1 == *test* && ! -d .venv/torchvision ]]; then
        .venv/bin/python -m pip install --quiet --no-deps --target .venv/torchvision torchvision==0.28.0
    fi
    touch "$stamp"
}

# Containers often set it. Then each process of a test would compile all that it imports, which takes 5 s for torch alone.
unset PYTHONDONTWRITEBYTECODE
[[ -x .venv/bin/python ]] && .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
install "${1:-}"
