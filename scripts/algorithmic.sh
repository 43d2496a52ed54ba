#!/usr/bin/env bash
# Length generalisation on algorithmic tasks: encodings × tasks, resumable, then table and figure.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/algorithmic.sh [--algorithms "copy reverse ..."] [--methods "NAME ..."|all] [SWEEP ARGUMENTS]

Sets up .venv if needed, then trains tiny models to copy up to 20 items and tests them on up to 100: rope,
rope with position interpolation at the test, and rope trained with position index warping. Writes
accuracy.csv, accuracy.md (beside the published means) and accuracy.png into runs/warping-algorithmic-laptop.
Takes 16 minutes of processor time, shared by two cores; it may be stopped at any time, and rerunning it
resumes.

  --algorithms  tasks, e.g. "copy reverse sort summation add_subtract" or "copy:items=10"
  --methods     rope interpolation alibi randomized-10x randomized-5x warping warping-beta, or all
  --preset paper for the published size; other arguments are those of fairseq-rpe sweep

Expected on copy: every method answers more than 95 % exactly up to 20 items; beyond that, warping is clearly
better than rope with interpolation, which is a little better than rope.
TEXT
}

for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit 0 ;;
    esac
done

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh" --quiet
exec "$root/.venv/bin/fairseq-rpe" sweep --recipe warping-algorithmic "$@"
