"""Time and peak memory of every type of bias, compared with the usual implementations of attention.

    pip install x-transformers                          # optional, as are a C++ compiler (FlexAttention) and flash-attn
    python benchmarks/attention_biases.py --threads 2   # about an hour on two cores; resumes after an interruption
    python benchmarks/attention_biases.py --table       # the CSV as Markdown, and the figure drawn again
    python benchmarks/attention_biases.py --device cuda --dtype bf16 --csv gpu.csv --figure gpu.png

Attention is causal, with eight heads of 64. The script times the forward pass, and forward + backward with the
gradients of q, k, v and of learned parameters, as multiples of torch's causal attention without a bias. This project's
implementations have the names of its backends; attention_implementations.py describes the other implementations. Before
anything is timed, each implementation is compared with the reference. An implementation that is wrong or fails is left
out, and the exit status is 1.

At each length, implementations are timed in rotation, and medians are reported: of seven runs below half a second,
three below ten, two below thirty, otherwise one. Below 0.1 s the second of two calls counts; compilation never does.
Memory is the peak of a step in a fresh process (on a GPU: of the allocator), including inputs and whatever is stored
between steps; setup_mib is the peak while these are created. A case is left out if a run would take more than
--limit-seconds or more memory than is free. Both are predicted from the previous length, by a factor of four if the
length doubles.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import attention_biases_report as report
import attention_implementations as implementations
import machine
import torch
from attention_implementations import BASELINE, BIASES, COMPILED, NO_BIAS, Case, Inputs

from fairseq_rpe.attention import BACKENDS
from fairseq_rpe.core import UserError

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PASSES = {False: "forward", True: "forward+backward"}
RUNS = ((0.5, 7), (10.0, 3), (30.0, 2))  # below so many seconds of a run: number of runs
WARM_UP_SECONDS = 0.1  # a first call that is shorter measures how long memory and code take to load
PROCESS_SECONDS = 0.5  # start of a process that measures memory
MAX_MEMORY_SHARE = 0.85  # of the free memory
# modules that a process for measuring memory finds imported, so that they do not count
PRELOADED = ["torch._inductor.compile_fx", "fairseq_rpe.positions", "fairseq_rpe.utils.table", "matplotlib.figure"]
PRELOADED += ["fairseq_rpe.attention", "fairseq_rpe.figures.style", "matplotlib.ticker", "x_transformers"]
Rows = list[dict[str, Any]]
Pair = tuple[str, str]  # bias and implementation
BASELINE_PAIR: Pair = (NO_BIAS, BASELINE)


def run_count(seconds: float) -> int:
    """Return the number of timed runs for an implementation that takes ``seconds``."""
    return next((count for most, count in RUNS if seconds < most), 1)


def time_step(x: Inputs, step: implementations.Step) -> float:
    """Return the seconds of one run."""
    synchronise = torch.cuda.synchronize if x.device == "cuda" else lambda: None
    synchronise()
    start = time.perf_counter()
    x.run(step)
    synchronise()
    return time.perf_counter() - start


def time_case(case: Case) -> float:
    """Return the seconds of a run on new inputs, of the second run if the first is short."""
    x = Inputs(case)
    step = implementations.make_step(case, x)
    seconds = time_step(x, step)
    return time_step(x, step) if seconds < WARM_UP_SECONDS else seconds


def time_interleaved(cases: dict[Pair, Case]) -> dict[Pair, list[float]]:
    """Return the seconds of every run; implementations are timed in rotation."""
    times: dict[Pair, list[float]] = {pair: [] for pair in cases}
    for case in cases.values():
        if case.implementation in COMPILED:
            time_case(case)  # compiles; not reported
    for _ in range(max(count for _, count in RUNS)):
        for pair, case in cases.items():
            if not times[pair] or len(times[pair]) < run_count(times[pair][0]):
                times[pair].append(time_case(case))
    return times


def measure_peaks(case: Case, threads: int) -> tuple[float, float]:
    """Return the peak memory of a step in MiB and that of its setup; on a CPU in a separate process."""
    if case.device != "cpu":
        return measure_peaks_here(case, threads)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure_peaks_here, case, threads).result()


def measure_peaks_here(case: Case, threads: int) -> tuple[float, float]:
    """Return what :func:`measure_peaks` returns, measured in this process."""
    if case.device == "cpu":
        torch.set_num_threads(threads)
        torch._inductor.config.compile_threads = 1
        current, peak = partial(machine.status, "VmRSS"), partial(machine.status, "VmHWM")
        reset_peak, units_per_mib = machine.reset_peak, 1024
    else:
        current, peak = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
        reset_peak, units_per_mib = torch.cuda.reset_peak_memory_stats, 2**20
    # the first use loads or compiles code
    x = Inputs(case, case.length if case.implementation in COMPILED else implementations.CHECK_LENGTH)
    x.run(implementations.make_step(case, x))
    del x
    reset_peak()
    before = current()
    x = Inputs(case)
    step = implementations.make_step(case, x)
    setup = peak() - before
    reset_peak()
    x.run(step)
    return (peak() - before) / units_per_mib, setup / units_per_mib


def wrong_or_refused(case: Case) -> str | None:
    """Return why a case is not timed: wrong results or unsupported; None if it is timed."""
    try:
        deviation = implementations.deviation(case)
    except (UserError, NotImplementedError) as error:
        return str(error)
    except Exception as error:  # another package, of any version and on any GPU: the other cases are still measured
        return f"FAILED: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    allowed = implementations.TOLERANCE[case.dtype]
    return None if deviation <= allowed else f"WRONG: {deviation:.1e} from the reference, {allowed:g} allowed"


def predict_cost(rows: Rows, case: Case) -> tuple[float, float]:
    """Predict seconds and MiB of a run from the longest measured length; 0 without one."""
    about = PASSES[case.backward], case.bias, case.implementation
    shorter = [
        r for r in rows if (r["pass"], r["bias"], r["implementation"]) == about and int(r["length"]) < case.length
    ]
    if not shorter:
        return 0.0, 0.0
    last = max(shorter, key=lambda r: int(r["length"]))
    scale = (case.length / int(last["length"])) ** 2
    return scale * float(last["ms"]) / 1000, scale * max(float(last["peak_mib"]), float(last["setup_mib"]))


def limit_reason(rows: Rows, case: Case, limit_seconds: float) -> str | None:
    """Return why a case would exceed the limit of time or of memory; None if it would not."""
    seconds, mib = predict_cost(rows, case)
    free = (torch.cuda.mem_get_info()[0] if case.device == "cuda" else machine.available()) / 2**20
    if seconds > limit_seconds:
        return f"a run would take about {seconds:.0f} s, and --limit-seconds is {limit_seconds:g}"
    if mib > MAX_MEMORY_SHARE * free:
        return f"it would need about {mib / 1024:.1f} GiB, and {free / 1024:.1f} are free"
    return None


def measure_memory(cases: dict[Pair, Case], threads: int) -> dict[Pair, tuple[float, float]]:
    """Return the peaks of each case, without the cases for which memory does not suffice."""
    memory: dict[Pair, tuple[float, float]] = {}
    for pair, case in cases.items():
        try:
            memory[pair] = measure_peaks(case, threads)
        except UserError as error:
            report_left_out(case, str(error))
        except BrokenProcessPool:
            report_left_out(case, "its process was killed, usually for lack of memory")
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            report_left_out(case, "not enough memory")
    if BASELINE_PAIR not in memory:
        raise UserError("torch's attention without a bias does not fit into memory: give smaller --lengths")
    return memory


def measure_group(cases: dict[Pair, Case], threads: int) -> Rows:
    """Measure the cases of one length and pass, and return their rows."""
    memory = measure_memory(cases, threads)
    times = time_interleaved({pair: cases[pair] for pair in memory})
    seconds = {pair: statistics.median(values) for pair, values in times.items()}
    baseline_seconds, (baseline_peak, _) = seconds[BASELINE_PAIR], memory[BASELINE_PAIR]
    rows = []
    for pair, median in seconds.items():
        case, (peak, setup) = cases[pair], memory[pair]
        rows.append(
            {
                "length": case.length,
                "pass": PASSES[case.backward],
                "bias": case.bias,
                "encoding": BIASES[case.bias].label,
                "implementation": case.implementation,
                "ms": f"{1000 * median:.2f}",
                "ratio": f"{median / baseline_seconds:.3f}",
                "peak_mib": f"{peak:.1f}",
                "peak_ratio": f"{peak / baseline_peak:.3f}",
                "setup_mib": f"{setup:.1f}",
                "runs": len(times[pair]),
            }
        )
    return rows


def report_left_out(case: Case, reason: str) -> None:
    about = f"{case.bias}, {case.implementation}, {PASSES[case.backward]}, {case.length} tokens"
    print(f"left out, {about}: {reason}", file=sys.stderr)


def estimate_remaining(cases: list[Case], rows: Rows, limit_seconds: float) -> float:
    """Estimate the remaining seconds: timed runs, and a process for the memory of each case."""
    total = 0.0
    for case in cases:
        seconds, _ = predict_cost(rows, case)
        if limit_reason(rows, case, limit_seconds) is None:
            runs = run_count(seconds) * (1 + (seconds < WARM_UP_SECONDS)) + 1  # one more for its memory
            total += PROCESS_SECONDS + runs * seconds
    return total


def describe_setting(args: argparse.Namespace) -> str:
    """Return a description of the machine and settings, which all results of a file share."""
    cuda = args.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else f"{machine.processor()}, {os.cpu_count()} cores"
    parts = [name, f"torch {torch.__version__}", f"{args.threads} threads"]
    parts += [f"{implementations.HEADS} heads of {implementations.WIDTH}", args.dtype]
    parts += ["all biases" if set(args.biases) == set(BIASES) else f"biases {' + '.join(args.biases)}"]
    parts += [f"backends {' + '.join(args.backends)}", f"limit {args.limit_seconds:g} s"]
    return ", ".join([*parts, f"load {os.getloadavg()[0]:.1f}"])


def read_previous(args: argparse.Namespace, setting: str) -> tuple[str, Rows]:
    """Return the description and the rows of an interrupted measurement, or ``setting`` and no rows.

    Raises:
        UserError: the file has results of another machine or of other settings.
    """
    if not args.csv.exists() or args.fresh:
        return setting, []
    previous, rows = report.read(args.csv)
    if previous.rpartition(", load")[0] != setting.rpartition(", load")[0]:
        raise UserError(f"{args.csv} was measured as '{previous}', this is '{setting}': --fresh starts over")
    return previous, rows


def find_usable(
    pairs: list[Pair], passes: list[bool], args: argparse.Namespace
) -> tuple[set[tuple[str, str, bool]], bool]:
    """Return the (bias, implementation, backward) that can be timed, and whether some other is wrong or fails."""
    usable, has_wrong = set(), False
    for backward in passes:
        for pair in pairs:
            case = Case(*pair, implementations.CHECK_LENGTH, backward, args.device, DTYPES[args.dtype])
            reason = wrong_or_refused(case)
            if reason is None:
                usable.add((*pair, backward))
                continue
            has_wrong |= reason.startswith(("WRONG", "FAILED"))
            print(f"left out, {case.bias}, {case.implementation}, {PASSES[backward]}: {reason}", file=sys.stderr)
    return usable, has_wrong


def measure(args: argparse.Namespace) -> int:
    """Measure all cases that the CSV file lacks, write it after each length and pass, and return the exit status."""
    start = time.perf_counter()
    setting, rows = read_previous(args, describe_setting(args))
    pairs = [pair for pair in implementations.list_pairs(args.backends) if pair[0] in {NO_BIAS, *args.biases}]
    groups = [(n, backward) for n in args.lengths for backward in PASSES if not is_measured(rows, n, backward)]
    usable, has_wrong = find_usable(pairs, list(dict.fromkeys(backward for _, backward in groups)), args)
    cases_of = {
        (n, backward): {
            pair: Case(*pair, n, backward, args.device, DTYPES[args.dtype])
            for pair in pairs
            if (*pair, backward) in usable
        }
        for n, backward in groups
    }
    for index, ((n, backward), cases) in enumerate(cases_of.items()):
        measured = {}
        for pair, case in cases.items():
            # the other cases of the group are relative to the baseline, so it has no limit
            reason = limit_reason(rows, case, args.limit_seconds) if case.implementation != BASELINE else None
            if reason is None:
                measured[pair] = case
            else:
                report_left_out(case, reason)
        rows += measure_group(measured, args.threads)
        machine.write_csv(args.csv, setting, rows)
        later = [case for group in groups[index + 1 :] for case in cases_of[group].values()]
        to_go = estimate_remaining(later, rows, args.limit_seconds) / 60
        used = (time.perf_counter() - start) / 60
        print(f"{n} tokens, {PASSES[backward]}: done; {used:.1f} min used, about {to_go:.1f} to go", flush=True)
    report.draw(args.csv, args.figure)
    print(f"wrote {args.csv} and {args.figure}")
    return int(has_wrong)


def is_measured(rows: Rows, length: int, backward: bool) -> bool:
    return any(int(r["length"]) == length and r["pass"] == PASSES[backward] for r in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N")
    parser.add_argument("--biases", nargs="+", choices=list(BIASES), default=list(BIASES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument(
        "--backends", nargs="+", choices=tuple(BACKENDS), help="default: sdpa; on a GPU flex, triton too"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument(
        "--limit-seconds", type=float, default=60.0, metavar="S", help="longest run in seconds (default: %(default)g)"
    )
    parser.add_argument("--fresh", action="store_true", help="discard the results in --csv")
    parser.add_argument("--csv", type=Path, default=ROOT / "benchmarks/results/attention-biases.csv", metavar="FILE")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/attention-biases.png", metavar="FILE")
    parser.add_argument("--table", action="store_true", help="print and draw the results in --csv without measuring")
    args = parser.parse_args()
    args.lengths = sorted(set(args.lengths))
    args.backends = args.backends or (["sdpa", "flex", "triton"] if args.device == "cuda" else ["sdpa"])
    try:
        if args.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: torch sees no GPU here: drop the flag")
        if args.table:
            print(report.markdown(args.csv))
            report.draw(args.csv, args.figure)
            return 0
        torch.set_num_threads(args.threads)
        return measure(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
