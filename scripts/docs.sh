#!/usr/bin/env bash
# Builds the site of README.md, docs/ and docstrings in runs/site, or serves it.
set -euo pipefail

if [[ "${1:-}" == "-h" || "${1:-}" == "--help" ]]; then
    cat <<'TEXT'
usage: scripts/docs.sh [--serve] [MKDOCS ARGUMENTS]

This script sets up .venv if needed, and installs mkdocs in the first call. It then builds a site in runs/site from
README.md, CONTRIBUTING.md, docs/*.md and the docstrings of core, encodings, positions and attention. A warning counts
as an error. To see the site, open runs/site/index.html.

  --serve  serve the site with search at http://127.0.0.1:8000, and rebuild it whenever a file changes
TEXT
    exit 0
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --quiet
# hides a notice about the future of mkdocs-material
export NO_MKDOCS_2_WARNING=1
# mkdocstrings formats signatures with ruff
export PATH="$PWD/.venv/bin:$PATH"
if [[ ! -x .venv/bin/mkdocs ]] || ! python -P -c "import material, mkdocstrings_handlers.python" 2>/dev/null; then
    python -P -m pip install -qq --no-input --disable-pip-version-check -c requirements/constraints.txt \
        mkdocs-material mkdocstrings-python
fi
if [[ "${1:-}" == "--serve" ]]; then
    exec mkdocs serve --strict "${@:2}"
fi
exec mkdocs build --strict "$@"
