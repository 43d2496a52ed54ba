#!/usr/bin/env bash
# Makes the code corpus data-bin/stdlib from Python's standard library; all arguments go to fairseq-rpe prepare-stdlib.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/prepare_stdlib.sh [--out DIR] [--source DIR] [--vocab-size N] [--seed N]
                                 [--valid-fraction X] [--test-fraction X] [--workers N] [--max-bytes N] [--overwrite]

This script makes the binarised code corpus data-bin/stdlib from the Python standard library. It takes about
ten seconds and needs no network. If the corpus exists already, the script does nothing. A corpus that was made
with other options is replaced only with --overwrite. Relative paths start at the root of the repository.
The script first sets up .venv if needed. It passes all options to fairseq-rpe prepare-stdlib, whose --help
explains them.
TEXT
}

for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit 0 ;;
    esac
done

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
scripts/setup.sh --quiet
exec .venv/bin/fairseq-rpe prepare-stdlib "$@"
