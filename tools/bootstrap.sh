#!/usr/bin/env bash
# Makes the two things every other target stands on:
#   .tools/uv/bin/uv   the package manager, installed by pip where it is missing
#   .tools/python      a file with the absolute path of a Python 3.12 that really runs
# A python3.12 on the PATH may be a pyenv shim for a version that is not selected: it is there, and does not run.
set -euo pipefail

UV_VERSION=0.13.9
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tools=$root/.tools
uv=$tools/uv/bin/uv

fail() {
    printf 'bootstrap: %s\n' "$*" >&2
    exit 1
}

# Prints the interpreter's own absolute path if it runs and is 3.12.
python312() {
    [ -x "$1" ] && "$1" -I -c 'import sys; print(sys.executable) if sys.version_info[:2] == (3, 12) else sys.exit(1)' 2>/dev/null
}

candidates() {
    [ -z "${UV_PYTHON:-}" ] || printf '%s\n' "$UV_PYTHON"
    type -aP python3.12 python3 || true
    printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12
}

find_python312() {
    local candidate
    while IFS= read -r candidate; do
        python312 "$candidate" && return 0
    done < <(candidates)
    return 1
}

any_python3() {
    local candidate
    while IFS= read -r candidate; do
        "$candidate" -I -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null && printf '%s\n' "$candidate" && return 0
    done < <(candidates)
    fail "no Python 3 runs on this machine: install Python 3.12 (Debian: apt-get install python3 python3-pip) and try again"
}

install_uv() {
    local python=$1
    printf 'bootstrap: installing uv %s into .tools/uv\n' "$UV_VERSION"
    if "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m pip install --quiet --disable-pip-version-check --no-input --root-user-action=ignore --upgrade --target "$tools/uv" "uv==$UV_VERSION" ||
            fail "pip could not install uv $UV_VERSION: is the package index reachable? Its own message is above"
    elif "$python" -m venv "$tools/uv" >/dev/null 2>&1; then
        "$tools/uv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --root-user-action=ignore "uv==$UV_VERSION" ||
            fail "pip could not install uv $UV_VERSION: is the package index reachable? Its own message is above"
    else
        fail "$python has neither pip nor venv: install pip (Debian: apt-get install python3-pip) and try again"
    fi
}

mkdir -p "$tools"
python=$(find_python312) || python=""
"$uv" --version >/dev/null 2>&1 || install_uv "${python:-$(any_python3)}"
"$uv" --version >/dev/null 2>&1 || fail "$uv does not run after its installation: remove .tools and try again"
if [ -z "$python" ]; then
    printf 'bootstrap: no Python 3.12 runs here; uv downloads one into .tools\n'
    export UV_PYTHON_INSTALL_DIR=$tools/pythons
    "$uv" python install --quiet 3.12 ||
        fail "no Python 3.12 on the PATH or under pyenv, and uv could not download one: install it, or pass UV_PYTHON=/path/to/python3.12"
    python=$(python312 "$(env -u UV_PYTHON "$uv" python find --managed-python 3.12)") ||
        fail "the Python 3.12 that uv downloaded does not run: pass UV_PYTHON=/path/to/python3.12"
fi
# Written only when it changes: the environments depend on this file.
[ "$(cat "$tools/python" 2>/dev/null)" = "$python" ] || printf '%s\n' "$python" >"$tools/python"
