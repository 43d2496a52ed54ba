#!/usr/bin/env bash
# Takes pictures of TensorBoard's tabs for a sweep in headless Chromium; all arguments go to docs/tools/board_screenshot.py.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" --quiet
# setup.sh does not install playwright, because only the pictures of the docs need it; it drives the system's browser
if ! "$root/.venv/bin/python" -P -c "import playwright" 2>/dev/null; then
    (cd "$root" && .venv/bin/python -P -m pip install -q --no-input --disable-pip-version-check \
        -c requirements/constraints.txt playwright)
fi
exec "$root/.venv/bin/python" "$root/docs/tools/board_screenshot.py" "$@"
