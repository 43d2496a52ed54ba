#!/usr/bin/env bash
# Sets up .venv if needed, then trains one language model (resumes by itself); all arguments go to fairseq-rpe train.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" --quiet
exec "$root/.venv/bin/fairseq-rpe" train "$@"
