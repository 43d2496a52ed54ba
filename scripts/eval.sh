#!/usr/bin/env bash
# Sets up .venv if needed, then evaluates a checkpoint at several lengths; all arguments go to fairseq-rpe eval.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" --quiet
exec "$root/.venv/bin/fairseq-rpe" eval "$@"
