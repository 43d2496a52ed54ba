#!/usr/bin/env bash
# Sets up .venv if needed, then compares sliding-window and non-overlapping evaluation; all arguments go to fairseq-rpe sliding.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" --quiet
exec "$root/.venv/bin/fairseq-rpe" sliding "$@"
