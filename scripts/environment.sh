# Sourced by the other scripts: makes the virtual environment inside the checkout and keeps it current.
# Usage: ensure_environment EXTRAS [REQUIREMENT...]   (the environment is $VENV, its Python $PYTHON)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${ASYNCPAR_VENV:-$ROOT/.venv}"
PYTHON="$VENV/bin/python"
# Tests start Python processes by the hundred: where no bytecode may be kept, each compiles all that it imports.
unset PYTHONDONTWRITEBYTECODE
# Arguments of pytest: a worker for each processor and one more, since tests wait for a fifth of their time; a worker
# takes tests from others when it has none left.
PARALLEL=(-n "$(($(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1))" --maxprocesses 8 --dist worksteal)

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

# Print, as lines of NAME=VALUE, pip's settings of this machine that are in files.
pip_settings() {
    python3 - <<'PYTHON'
import ast, os, subprocess, sys

command = [sys.executable, "-m", "pip", "config", "list"]  # prints nothing where there is no pip
listed = subprocess.run(command, capture_output=True, text=True).stdout
for line in listed.splitlines():
    key, _, value = line.partition("=")
    section, _, name = key.partition(".")
    variable = "PIP_" + name.upper().replace("-", "_")
    if section in ("global", "install") and variable not in os.environ:
        print(f"{variable}={' '.join(ast.literal_eval(value).split())}")
PYTHON
}

# Run uv with pip's settings; what is set for uv itself comes first.
run_uv() (
    local setting
    while read -r setting; do [ -z "$setting" ] || export "${setting?}"; done < <(pip_settings)
    set_default() { [ -z "$2" ] || [ -n "${!1:-}" ] || export "$1=$2"; }
    set_default UV_DEFAULT_INDEX "${PIP_INDEX_URL:-}"
    set_default UV_INDEX "${PIP_EXTRA_INDEX_URL:-}"
    set_default UV_INDEX_STRATEGY unsafe-best-match # as pip does: the newest of all indexes
    set_default UV_NO_INDEX "${PIP_NO_INDEX:-}"
    set_default UV_FIND_LINKS "${PIP_FIND_LINKS:+${PIP_FIND_LINKS// /,}}"
    set_default UV_CONSTRAINT "${PIP_CONSTRAINT:-}"
    set_default UV_INSECURE_HOST "${PIP_TRUSTED_HOST:-}"
    set_default UV_HTTP_TIMEOUT "${PIP_DEFAULT_TIMEOUT:-}"
    set_default SSL_CERT_FILE "${PIP_CERT:-}"
    "$VENV/bin/uv" "$@"
)

# Install packages into the environment, or with --prefix FOLDER or --target FOLDER first into that folder.  uv takes
# seconds where pip takes a minute; pip does it where uv cannot.
install_packages() {
    local pip=("$PYTHON" -m pip install --quiet --disable-pip-version-check --no-warn-script-location) alone=()
    case "$1" in --prefix | --target) alone=(--ignore-installed) ;; esac
    if [ -x "$VENV/bin/uv" ] || "${pip[@]}" uv >&2; then
        ! run_uv pip install --quiet --python "$PYTHON" "$@" >&2 || return 0
        echo "uv cannot install this: pip tries" >&2
    fi
    "${pip[@]}" --no-compile "${alone[@]}" "$@" >&2
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
    install_packages --editable "$ROOT[$extras]" "$@"
    "$PYTHON" -m compileall -q -j 0 "$ROOT/asyncpar" # otherwise all workers of the suite compile it at the same time
    echo "$wanted" >"$stamp"
}
