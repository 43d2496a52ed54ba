#!/usr/bin/env bash
# Sets up .venv if needed, then trains and evaluates several encodings; all arguments go to fairseq-rpe sweep.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" --quiet
exec "$root/.venv/bin/fairseq-rpe" sweep "$@"
