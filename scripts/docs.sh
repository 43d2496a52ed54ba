#!/usr/bin/env bash
# Builds the site of README.md, docs/ and docstrings in runs/site, or serves it.
set -euo pipefail

if [[ "${1:-}" == "-h" || "${1:-}" == "--help" ]]; then
    cat <<'TEXT'
usage: scripts/docs.sh [--serve] [MKDOCS ARGUMENTS]

Sets up .venv if needed, then builds the site of README.md, CONTRIBUTING.md, docs/*.md and the docstrings of core,
encodings, positions and attention in runs/site; a warning is an error. Open runs/site/index.html. The first time installs mkdocs.

  --serve  serve it at http://127.0.0.1:8000 instead, with search, and rebuild it whenever a file changes
TEXT
    exit 0
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --quiet
# a notice about the future of mkdocs-material
export NO_MKDOCS_2_WARNING=1
# signatures are formatted by ruff
export PATH="$PWD/.venv/bin:$PATH"
if [[ ! -x .venv/bin/mkdocs ]] || ! python -P -c "import material, mkdocstrings_handlers.python" 2>/dev/null; then
    python -P -m pip install -qq --no-input --disable-pip-version-check -c requirements/constraints.txt \
        mkdocs-material mkdocstrings-python
fi
if [[ "${1:-}" == "--serve" ]]; then
    exec mkdocs serve --strict "${@:2}"
fi
exec mkdocs build --strict "$@"
