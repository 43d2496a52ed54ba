#!/usr/bin/env bash
# Sets up .venv if needed, then makes the corpus WikiText-103, in its word-level version if the first argument is --words;
# all other arguments go to fairseq-rpe prepare-corpus.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" --quiet
name=wikitext103
if [[ "${1:-}" == "--words" ]]; then
    name=wikitext103-words
    shift
fi
exec "$root/.venv/bin/fairseq-rpe" prepare-corpus "$name" "$@"
