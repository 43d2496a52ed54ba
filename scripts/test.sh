#!/usr/bin/env bash
# Everything that continuous integration checks.
set -euo pipefail

if [[ "${1:-}" == "-h" || "${1:-}" == "--help" ]]; then
    cat <<'TEXT'
usage: scripts/test.sh [--release] [PYTEST ARGUMENTS]

Sets up .venv if needed, then runs ruff, mypy, shellcheck and the tests, e.g. scripts/test.sh -k sweep -x. The tests
run in processes of one thread each, one more than there are cores, at most four (-n 0: one process).

  --release  also run the tests that matter before a release only: packages in clean environments, the site,
             benchmark scripts, every set of questions, many kills
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
# The tests start many processes, and each of them compiles torch anew where Python may keep nothing.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$PWD/.venv/pycache"
# too large for everybody's set-up; torch's builds for CUDA bring their own triton
missing=()
while read -r name; do missing+=("$name"); done < <(python -P -c '
import sys
from importlib.metadata import distributions
there = {one.name.lower() for one in distributions()}
wanted = ["build", "mkdocs-material", "mkdocstrings-python", "mypy", "transformers", "twine"]
wanted += ["triton==3.9.0"] if sys.platform == "linux" else []
sys.stdout.writelines(name + "\n" for name in wanted if name.partition("=")[0] not in there)
')
if ((${#missing[@]})); then
    # compiling all of them ahead takes longer than the few that are loaded
    python -P -m pip install -qq --no-compile --no-input --disable-pip-version-check \
        -c requirements/constraints.txt "${missing[@]}"
fi
ruff check .
mypy -n 2
shellcheck scripts/*.sh .ci/run
# a process per core, and one for those that wait: tests are small, and threads that wait for each other cost more
# than they give
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
arguments=(-q -n "$(python -P -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')" --dist worksteal)
if [[ -z "$release" ]]; then
    echo "Tests that are marked release are left out: scripts/test.sh --release runs them too."
    arguments+=(-m "not release")
fi
exec pytest "${arguments[@]}" "$@"
