#!/usr/bin/env bash
# Makes the code corpus data-bin/stdlib from the installed Python's library; all arguments go to fairseq-rpe prepare-stdlib.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/prepare_stdlib.sh [--out DIR] [--source DIR] [--vocab-size N] [--seed N]
                                 [--valid-fraction X] [--test-fraction X] [--workers N] [--max-bytes N] [--overwrite]

Makes a binarised code corpus, data-bin/stdlib, from the Python standard library: about ten seconds,
no network. Does nothing if it already exists; a corpus made with other options is replaced only with
--overwrite. Relative paths count from the root of the repository.
Sets up .venv first if needed; all options go to fairseq-rpe prepare-stdlib, whose --help explains them.
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
