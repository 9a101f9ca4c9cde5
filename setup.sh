#!/usr/bin/env bash
# Makes the virtual environment in .venv, with everything that the commands, the checks and the tests need.
set -euo pipefail
cd "$(dirname "$0")"
venv=${VENV:-.venv}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"; else
        echo "please run as root: $*" >&2
        return 1
    fi
}

debian() { # debian PACKAGE...: installs what the machine lacks, where it is a Debian-like one
    command -v apt-get >/dev/null || return 1
    as_root apt-get update -qq && DEBIAN_FRONTEND=noninteractive as_root apt-get install -y -qq "$@"
}

find_python() {
    for python in python3.13 python3.12 python3.11 python3; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "Python 3.11 or newer is needed" >&2
    return 1
}

if [ "${1:-}" = "--tests" ] && ! command -v ip >/dev/null; then
    # Network namespaces, for the test that puts every party on a host of its own.
    debian iproute2 || echo "iproute2 could not be installed: the test across network namespaces will be skipped" >&2
fi
if [ "${1:-}" = "--tests" ] && ! command -v initdb >/dev/null &&
    ! compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; then
    # PostgreSQL's server, which the tests start in a temporary folder.
    debian postgresql || echo "PostgreSQL could not be installed: the tests of it as the store will be skipped" >&2
fi
if [ "${1:-}" = "--tests" ] && ! command -v chromium >/dev/null; then
    # A browser, for the report's accessibility check.
    debian chromium || echo "Chromium could not be installed: the report's accessibility check will be skipped" >&2
fi

if [ ! -e "$venv/.ready" ] || [ pyproject.toml -nt "$venv/.ready" ] || [ constraints.txt -nt "$venv/.ready" ]; then
    python=$(find_python)
    if ! "$python" -m venv "$venv"; then
        debian "$(basename "$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')")-venv"
        "$python" -m venv --clear "$venv"
    fi
    echo "installing into $venv (PyTorch is large; this takes a few minutes the first time)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
    touch "$venv/.ready"
fi
