#!/usr/bin/env bash
# Sets up .venv if needed, then draws the analysis of index warping; all arguments go to fairseq-rpe sensitivity.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" --quiet
exec "$root/.venv/bin/fairseq-rpe" sensitivity "$@"
