#!/usr/bin/env bash
# Tests and measures what runs on a GPU, or with --device cpu on the CPU, into one folder with a summary.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/gpu_report.sh [--device cuda|cpu] [--out DIR] [--small] [--dry-run]

Within 9 minutes: the tests of what runs on a GPU, fairseq-rpe selftest, the speed of attention, and of whole models that
read a block and train on it. Everything goes into DIR (default: runs/gpu-report), what was found first of all into DIR/summary.txt. Each step
has a time limit; one that fails does not stop the next, but then the exit code is 1. Steps that need fairseq or pytest
are skipped, and said to be, where it is not installed. Installs nothing: it runs .venv/bin/python, or the PYTHON that is
named, or python3, with torch.

  --device cuda|cpu  where (default: cuda)
  --out DIR          another folder
  --small            seconds instead of minutes: few encodings, short texts, no tests
  --dry-run          only print the commands
TEXT
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
device=cuda out="$root/runs/gpu-report" small="" dry=""
while (($#)); do
    case "$1" in
    -h | --help) usage && exit 0 ;;
    --device) device="${2:-}" && shift 2 ;;
    --out) out="${2:-}" && shift 2 ;;
    --small) small=yes && shift ;;
    --dry-run) dry=yes && shift ;;
    *) echo "error: unknown argument '$1' (see scripts/gpu_report.sh --help)" >&2 && exit 2 ;;
    esac
done
if [[ ! "$device" =~ ^(cuda|cpu)$ || -z "$out" ]]; then
    echo "error: --device is cuda or cpu, and --out names a folder (see scripts/gpu_report.sh --help)" >&2
    exit 2
fi
python="${PYTHON:-$root/.venv/bin/python}"
command -v "$python" >/dev/null || python=python3
# python -m and -c would import from the current folder
export PYTHONSAFEPATH=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# what auto finds out is part of the report, and is found out anew
export FAIRSEQ_RPE_CACHE="$out/auto"

failed=0
say() { if [[ $dry ]]; then echo "# $1"; else echo "$1" | tee -a "$out/summary.txt"; fi; }

# step NAME SECONDS COMMAND...: its output goes into NAME.log, its end into the summary
step() {
    local name=$1 limit=$2 begin=$SECONDS code=0
    shift 2
    if [[ $dry ]]; then
        printf 'timeout %s' "$limit" && printf ' %q' "$@" && echo
        return
    fi
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null || code=$?
    case $code in
    0) say "$name: ok, $((SECONDS - begin)) s" ;;
    124 | 137) say "$name: not done after $limit s" ;;
    *) say "$name: failed with exit code $code after $((SECONDS - begin)) s" ;;
    esac
    ((code == 0)) || failed=1
    { grep -E '^(error|failed|refused): |^[0-9]+ (passed|failed)' "$out/$name.log" || tail -n 1 "$out/$name.log"; } |
        cut -c1-200 | tail -n 12 | sed 's/^/    /' | tee -a "$out/summary.txt"
}

has() { "$python" -c "import sys; from importlib.util import find_spec; sys.exit(find_spec('$1') is None)"; }
rpe=("$python" -m fairseq_rpe.cli.main)

if [[ ! $dry ]]; then
    machine=$("$python" -c "
import sys, torch
from fairseq_rpe.attention import autotune_cache
if '$device' == 'cuda' and not torch.cuda.is_available():
    sys.exit('error: torch sees no GPU here: check nvidia-smi, or give --device cpu')
print(*(f'{name}: {value}' for name, value in autotune_cache.describe_machine(torch.device('$device')).items()), sep='; ')
") || exit 2
    mkdir -p "$out"
    rm -rf "$out/auto"
    echo "$machine" | tee "$out/summary.txt"
fi

if [[ $small ]]; then
    step selftest 120 "${rpe[@]}" selftest --device "$device" --encodings "alibi kerple_log" --backends "reference sdpa" --dtype fp32 --out "$out"
    step bench 60 "${rpe[@]}" bench --device "$device" --lengths 64 --encodings alibi --backends sdpa --repeats 1 --out "$out/bench"
    ((failed == 0))
    exit
fi

if has pytest && has fairseq; then
    tests=("$root"/tests/attention/test_{cuda,flex,triton,triton_curve,triton_prune}.py)
    step tests 110 "$python" -m pytest -q --maxfail=20 -p no:cacheprovider "${tests[@]}"
else
    say "tests: skipped, they need pytest and fairseq"
fi
dtype=bf16
[[ $device == cuda ]] || dtype=fp32
# one encoding for each form of a bias; flex is compiled anew for each, which takes long
step selftest 130 "${rpe[@]}" selftest --device "$device" --encodings "nope rope alibi t5_bias kerple_log fire" --backends "reference sdpa triton" --out "$out"
step flex 80 "${rpe[@]}" selftest --device "$device" --encodings "nope kerple_log fire" --backends flex --dtype "$dtype" --out "$out/flex"
step bench 80 "${rpe[@]}" bench --device "$device" --dtype "$dtype" --lengths 512,4096 --out "$out/bench"
if has fairseq; then
    # whole models, reading a block and training on it
    step models 130 "$python" "$root/benchmarks/model.py" --device "$device" --dtype "$dtype" --encodings nope fire --repeats 3 --turns 1 --out "$out/models.csv"
else
    say "models: skipped, they need fairseq"
fi
((failed == 0))
