#!/usr/bin/env bash
# Photographs TensorBoard's tabs for a sweep in headless Chromium; all arguments go to board_screenshot.py.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" --quiet
exec "$root/.venv/bin/python" "$root/scripts/board_screenshot.py" "$@"
