#!/usr/bin/env bash
# Trains four tiny models and evaluates them over lengths, from nothing to a table and a figure in a few minutes on a laptop.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/quickstart.sh [SWEEP ARGUMENTS]

This script sets up .venv and binarises the source code of the Python standard library into data-bin/stdlib.
It trains four tiny language models (sinusoidal, alibi, type1, inv_n) on 64 tokens for 400 updates and evaluates
them at up to 1152 tokens. It writes a table and a figure into runs/quickstart. The script takes a few minutes on
two cores. You may stop it at any time; run it again to resume. After it has finished, another call takes seconds.

Expected result: compare the perplexity at 1152 tokens with the perplexity at 64 tokens.
  sinusoidal    at least 1.2 times as high
  alibi, type1  at most 1.02 times as high
  inv_n         higher at 1152 tokens than type1
TEXT
}

out=""
previous=""
for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit 0 ;;
        --out=*) out="${argument#--out=}" ;;
    esac
    if [[ "$previous" == "--out" ]]; then out="$argument"; fi
    previous="$argument"
done

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${out:-$root/runs/quickstart}"
"$root/scripts/setup.sh" --quiet
"$root/scripts/prepare_stdlib.sh"
"$root/.venv/bin/fairseq-rpe" sweep "$root/data-bin/stdlib" \
    --encodings "sinusoidal alibi type1 inv_n" --lengths 64,128,256,512,768,1152 \
    --arch tiny --tokens 64 --updates 400 --out "$root/runs/quickstart" "$@"
cat <<TEXT

What next:
  the loss curves      '$root/.venv/bin/tensorboard' --logdir '$out/tensorboard'
  every figure         '$root/.venv/bin/fairseq-rpe' figures --sweep '$out' --data '$root/data-bin/stdlib'
  one more encoding    '$root/scripts/quickstart.sh' --encodings "sinusoidal, alibi, type1, inv_n, kerple_log"
TEXT
