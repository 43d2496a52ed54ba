#!/usr/bin/env bash
# Makes .venv with everything the project needs; if .venv is complete, does nothing.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/setup.sh [--verbose | --quiet]

This script makes .venv in the repository with Python 3.11 or 3.12. It installs the pinned requirements and
the project (editable). If .venv exists already with the same requirements, the script does nothing.

The script needs Linux on x86-64, because fairseq's wheels are built for this platform. To install only the
PyTorch part of the project, without training and evaluation, use pip install . on any platform with Python
3.11 or later.

The script prints a line when it starts and a line when it is done.

  --verbose  show each step and pip's output
  --quiet    print no line at the end, and no line at all if there is nothing to do
  PYTHON     environment variable with the Python to use (default: the first of python3.11, python3.12, python3)
TEXT
}

quiet=""
verbose=""
pip_quiet="-qq"
for argument in "$@"; do
    case "$argument" in
        --quiet) quiet="yes" ;;
        --verbose) verbose="yes" pip_quiet="" ;;
        -h | --help) usage; exit 0 ;;
        *) echo "error: unknown argument '$argument': see scripts/setup.sh --help" >&2; exit 2 ;;
    esac
done

case "${PYTHON:-}" in
    /*) ;;
    */*) PYTHON="$PWD/$PYTHON" ;; # a path relative to the folder of the call
esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
venv="$root/.venv"
platforms="Linux x86_64 with Python 3.11 or 3.12"

say() { if [[ -z "$quiet" ]]; then echo "$@"; fi; }

detail() { if [[ -n "$verbose" ]]; then echo "$@"; fi; }

digest() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi; }

python_version() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

venv_version() { sed -n 's/^version *= *//p' "$venv/pyvenv.cfg" 2>/dev/null || true; }

# The stamp contains the path of the repository because scripts in a virtual environment contain absolute paths.
stamp() {
    local files
    files="$(cat requirements/*.txt setup.py pyproject.toml | digest | cut -d' ' -f1)"
    echo "$files $(venv_version) $root"
}

# Checked first, because without a wheel of fairseq pip would fail only after it has downloaded all other packages.
check_platform() {
    local system
    system="$(uname -s) $(uname -m)"
    if [[ "$system" != "Linux x86_64" ]]; then
        echo "error: this is $system, and fairseq's wheels support $platforms only: use such a machine," \
            "or install the PyTorch part alone with: pip install ." >&2
        exit 1
    fi
}

find_python() {
    local candidate version
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        version="$(python_version "$candidate" || true)"
        case "$version" in
            3.11.* | 3.12.*) echo "$candidate"; return ;;
        esac
        if [[ -n "${PYTHON:-}" && -n "$version" ]]; then
            echo "error: PYTHON=$PYTHON is Python $version, and fairseq's wheels support $platforms only:" \
                "set PYTHON to one of these or unset it, or install the PyTorch part alone with: pip install ." >&2
            exit 1
        elif [[ -n "${PYTHON:-}" ]]; then
            echo "error: PYTHON=$PYTHON does not run: set PYTHON to Python 3.11 or 3.12 or unset it" >&2
            exit 1
        fi
    done
    echo "error: no Python 3.11 or 3.12 runs here: install one, or name it with PYTHON=/path/to/python" >&2
    exit 1
}

# The lock is on a folder, so no lock file remains. The system releases it when this shell ends, even if it is killed.
if command -v flock >/dev/null; then
    exec 9<"$root/requirements"
    flock 9
fi

wanted="${PYTHON:+$(python_version "$PYTHON" || echo unusable)}"
if [[ -f "$venv/stamp" && -x "$venv/bin/fairseq-rpe" && "$(cat "$venv/stamp")" == "$(stamp)" &&
    (-z "$wanted" || "$wanted" == "$(venv_version)") ]]; then
    say "$venv is up to date"
    exit 0
fi

check_platform
python="$(find_python)"
echo "setting up $venv, once: this takes a minute or more" >&2
if [[ -d "$venv" ]]; then
    # Remove a .venv that an interrupted run left incomplete, that was moved, or that has another Python.
    if [[ -f "$venv/unfinished" || "$(python_version "$python")" != "$(venv_version)" ]] ||
        ! "$venv/bin/python" -c '' 2>/dev/null ||
        { [[ -f "$venv/stamp" ]] && [[ "$(cut -d' ' -f3- "$venv/stamp")" != "$root" ]]; }; then
        detail "removing the unusable $venv"
        rm -rf "$venv"
    fi
fi
mkdir -p "$venv"
rm -f "$venv/stamp"
touch "$venv/unfinished"
if [[ ! -x "$venv/bin/python" ]]; then
    detail "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi

# --no-compile: compiling all files takes long; Python compiles the few files that it imports
install() {
    "$venv/bin/python" -m pip install ${pip_quiet:+"$pip_quiet"} --no-compile --no-input \
        --disable-pip-version-check --progress-bar off "$@"
}
pins="requirements/constraints.txt"
detail "installing PyTorch"
install -c "$pins" torch
detail "installing fairseq"
install --require-hashes --no-deps -r requirements/fairseq.txt
detail "installing the other requirements and fairseq_rpe itself"
install -c "$pins" -e ".[test]"

stamp >"$venv/stamp.new"
rm -f "$venv/unfinished"
mv "$venv/stamp.new" "$venv/stamp"
say "$venv is ready"
