# Sourced by demo, test and check. Makes .venv and installs memload into it with the extras named:
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
    echo "memload: expected Python 3.11 or newer on the PATH, found none. Install it from python.org" >&2
    return 1
}

make_venv() {
    local python
    python=$(find_python)
    echo "setting up Python in .venv, once …" >&2
    # Debian's Python comes without ensurepip; virtualenv brings a pip of its own.
    "$python" -m venv .venv >/dev/null 2>&1 || {
        rm -rf .venv
        "$python" -m pip install --quiet --target .virtualenv virtualenv &&
            PYTHONPATH=.virtualenv "$python" -m virtualenv --quiet .venv
        rm -rf .virtualenv
    }
}

install() {
    local stamp=.venv/.memload-$1
    # A stamp, so that the second run starts at once; a changed pyproject.toml makes it stale.
    [[ $stamp -nt pyproject.toml ]] && return
    echo "installing memload and what it needs into .venv: the first time torch too, which takes minutes …" >&2
    # torch first: asked for by memload, pip would take the newest, and with it gigabytes of CUDA.
    .venv/bin/python -c 'import torch' 2>/dev/null || .venv/bin/python -m pip install --quiet torch==2.13.0
    .venv/bin/python -m pip install --quiet --editable ".${1:+[$1]}"
    touch "$stamp"
}

[[ -x .venv/bin/python ]] && .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
install "${1:-}"
