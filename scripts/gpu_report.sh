#!/usr/bin/env bash
# Runs the tests and measurements for GPUs, or with --device cpu for the CPU, and writes results and a summary into a folder.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/gpu_report.sh [--device cuda|cpu] [--out DIR] [--small] [--dry-run]

Within 9 minutes this script runs the tests for GPUs and fairseq-rpe selftest. It then measures the speed of attention, and
of whole models in a forward pass and in training. It writes all files into DIR and a summary into DIR/summary.txt. Each
step has a time limit. If a step fails, the script continues with the next step and ends with exit code 1. If pytest or
fairseq is not installed, the script skips the steps that need the package and reports this. The script installs nothing.
It runs .venv/bin/python, the Python that the variable PYTHON names, or python3; this Python needs torch.

  --device cuda|cpu  device (default: cuda)
  --out DIR          folder DIR for all files (default: runs/gpu-report)
  --small            run few encodings on short texts and no tests, in seconds instead of minutes
  --dry-run          only print the commands
TEXT
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
device=cuda out="$root/runs/gpu-report" small="" dry=""
while (($#)); do
    case "$1" in
    -h | --help) usage && exit 0 ;;
    --device) device="${2:-}" && shift "$(($# > 1 ? 2 : 1))" ;;
    --out) out="${2:-}" && shift "$(($# > 1 ? 2 : 1))" ;;
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
# the backend auto stores its measurements here: they are part of the report, and each report measures again
export FAIRSEQ_RPE_CACHE="$out/auto"

failed=0
say() { if [[ $dry ]]; then echo "# $1"; else echo "$1" | tee -a "$out/summary.txt"; fi; }

# step NAME SECONDS COMMAND...: runs a command with a time limit; NAME.log gets its output, the summary its last lines
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
    124) say "$name: not done after $limit s" ;;
    137) if ((SECONDS - begin >= limit)); then say "$name: not done after $limit s"; else
        say "$name: killed after $((SECONDS - begin)) s, perhaps for lack of memory"; fi ;;
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
    tests=("$root"/tests/attention/test_{cuda,flex,triton,triton_content,triton_curve,triton_prune}.py)
    step tests 110 "$python" -m pytest -q --maxfail=20 -p no:cacheprovider "${tests[@]}"
else
    say "tests: skipped, they need pytest and fairseq"
fi
dtype=bf16
[[ $device == cuda ]] || dtype=fp32
# one encoding for each type of bias; the next step has fewer, because flex takes long to compile each of them
step selftest 130 "${rpe[@]}" selftest --device "$device" --encodings "nope rope alibi t5_bias kerple_log fire forgetting shaw" --backends "reference sdpa triton" --out "$out"
step flex 80 "${rpe[@]}" selftest --device "$device" --encodings "nope kerple_log fire" --backends flex --dtype "$dtype" --out "$out/flex"
step bench 80 "${rpe[@]}" bench --device "$device" --dtype "$dtype" --lengths 512,4096 --out "$out/bench"
if has fairseq; then
    step models 130 "$python" "$root/benchmarks/model.py" --device "$device" --dtype "$dtype" --encodings nope fire --repeats 3 --turns 1 --out "$out/models.csv"
else
    say "models: skipped, they need fairseq"
fi
((failed == 0))
