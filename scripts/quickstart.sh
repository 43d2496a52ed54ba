#!/usr/bin/env bash
# From nothing to a table and a figure in a few minutes on a laptop.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/quickstart.sh [SWEEP ARGUMENTS]

Sets up .venv, binarises the Python standard library's own source into data-bin/stdlib, trains four
tiny language models (sinusoidal, alibi, type1, inv_n) on 64 tokens for 400 updates, evaluates them
at up to 1152 tokens and writes table and figure into runs/quickstart. Takes a few minutes on two
cores; it may be stopped at any time, and rerunning it resumes. Once finished, rerunning it takes seconds.

Expected: sinusoidal gets clearly worse beyond 64 tokens (perplexity at 1152 at least 1.2 times that
at 64), alibi and type1 stay level (at most 1.02 times), inv_n ends above type1.
TEXT
}

if [[ "${1:-}" == "-h" || "${1:-}" == "--help" ]]; then
    usage
    exit 0
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" --quiet
"$root/scripts/prepare_stdlib.sh"
"$root/.venv/bin/fairseq-rpe" sweep "$root/data-bin/stdlib" \
    --encodings "sinusoidal alibi type1 inv_n" --lengths 64,128,256,512,768,1152 \
    --arch tiny --tokens 64 --updates 400 --out "$root/runs/quickstart" "$@"
cat <<TEXT

What next:
  the loss curves      '$root/.venv/bin/tensorboard' --logdir '$root/runs/quickstart/tensorboard'
  every figure         '$root/.venv/bin/fairseq-rpe' figures --sweep '$root/runs/quickstart' --data '$root/data-bin/stdlib'
  one more encoding    '$root/scripts/quickstart.sh' --encodings "sinusoidal, alibi, type1, inv_n, kerple_log"
TEXT
