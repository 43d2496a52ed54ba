#!/usr/bin/env bash
# Runs everything that continuous integration checks.
set -euo pipefail

if [[ "${1:-}" == "-h" || "${1:-}" == "--help" ]]; then
    cat <<'TEXT'
usage: scripts/test.sh [--release] [PYTEST ARGUMENTS]

This script sets up .venv if needed. It then runs ruff, mypy, shellcheck and pytest. All arguments except --release
go to pytest, e.g. scripts/test.sh -k sweep -x. The tests run in processes of one thread each. There is one process
more than there are cores, but at most four; -n 0 runs all tests in one process.

  --release  also run the tests marked release, which are needed only before a release: packages in clean
             environments, the site, benchmark scripts, all question sets, many killed processes
TEXT
    exit 0
fi
release=""
if [[ "${1:-}" == "--release" ]]; then
    release="yes"
    shift
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --quiet
export PATH="$PWD/.venv/bin:$PATH"
# The tests start many processes. Without a bytecode cache, each process would compile torch's files again.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$PWD/.venv/pycache"
# setup.sh does not install these packages, because they are large; torch's builds for CUDA include their own triton
missing=()
while read -r name; do missing+=("$name"); done < <(python -P -c '
import sys
from importlib.metadata import distributions
installed = {distribution.name.lower() for distribution in distributions()}
packages = ["build", "mkdocs-material", "mkdocstrings-python", "mypy", "transformers", "twine"]
packages += ["triton==3.9.0"] if sys.platform == "linux" else []
sys.stdout.writelines(name + "\n" for name in packages if name.partition("=")[0] not in installed)
')
if ((${#missing[@]})); then
    # --no-compile: compiling all files takes long; Python compiles the few files that it imports
    python -P -m pip install -qq --no-compile --no-input --disable-pip-version-check \
        -c requirements/constraints.txt "${missing[@]}"
fi
ruff check .
mypy -n 2
shellcheck scripts/*.sh .ci/run
# One process per core, and one more for the time that processes wait. Each process has one thread, because the tests
# are too small for several.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
arguments=(-q -n "$(python -P -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')" --dist worksteal)
if [[ -z "$release" ]]; then
    echo "Tests marked release are left out; scripts/test.sh --release runs them too."
    arguments+=(-m "not release")
fi
exec pytest "${arguments[@]}" "$@"
