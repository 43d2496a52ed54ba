#!/usr/bin/env bash
# Sets up .venv if needed, then makes the corpus PG-19 (books); all arguments go to fairseq-rpe prepare-corpus books.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" --quiet
exec "$root/.venv/bin/fairseq-rpe" prepare-corpus books "$@"
