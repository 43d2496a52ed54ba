#!/usr/bin/env bash
# Sets up .venv if needed, then writes tables, figures and pages of sweeps; all arguments go to fairseq-rpe report.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" --quiet
exec "$root/.venv/bin/fairseq-rpe" report "$@"
