# Sourced by the other scripts: makes the virtual environment inside the checkout and keeps it current.
# Usage: ensure_environment EXTRAS [PIP-ARGUMENT...]   (the environment is $VENV, its Python $PYTHON)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${ASYNCPAR_VENV:-$ROOT/.venv}"
PYTHON="$VENV/bin/python"
# Tests start Python processes by the hundred: where no bytecode may be kept, each compiles all that it imports.
unset PYTHONDONTWRITEBYTECODE
# Arguments of pytest: a worker for each processor, which takes tests from others when it has none left.
PARALLEL=(-n logical --maxprocesses 8 --dist worksteal)

find_python() {
    local candidate
    for candidate in "${ASYNCPAR_PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 python; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "asyncpar needs Python 3.11 or newer; set ASYNCPAR_PYTHON to its path" >&2
    return 1
}

# The stamp holds what was installed: a changed pyproject.toml, other extras or packages install again.
ensure_environment() {
    local extras="$1" stamp="$VENV/.asyncpar-$1" wanted python
    shift
    wanted="$(cksum <"$ROOT/pyproject.toml") $ROOT${*:+ $*}"
    if [ -x "$PYTHON" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    python="$(find_python)"
    echo "setting up $VENV (once)" >&2
    [ -x "$PYTHON" ] || "$python" -m venv "$VENV"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --editable "$ROOT[$extras]" "$@" >&2
    echo "$wanted" >"$stamp"
}
