"""Time and peak memory of every type of bias, compared with the usual implementations of attention.

    pip install x-transformers                         # optional, as are a C++ compiler (FlexAttention) and flash-attn
    python benchmarks/attention_forms.py --threads 2   # about an hour on two cores; resumes where it was killed
    python benchmarks/attention_forms.py --table       # the CSV as Markdown, and the figure drawn again
    python benchmarks/attention_forms.py --device cuda --dtype bf16 --csv gpu.csv --figure gpu.png

Eight heads of 64, causal, forward and forward + backward (gradients of q, k, v and of what the bias learns), as
multiples of torch's causal attention without a bias. This project goes by its backends' names; forms_ways.py describes
the other ways. Before anything is timed each way is compared with the reference: one that is wrong or fails is left
out, and the exit status is 1.

At each length the ways take turns: seven where a run takes less than half a second, three below ten, two below thirty,
else one; medians are reported. Below 0.1 s the second of two calls counts; compiling never does. Memory is what a fresh
process (on a GPU: the allocator) needs at the peak of a step, inputs and what is kept between steps included; setup_mib
is the peak while these were made. A way is left out where a run would take more than --limit-seconds or more memory
than is free, both predicted from the length before: four times its numbers where the length doubles.
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

import forms_report
import forms_ways as ways
import machine
import torch
from forms_ways import LIMIT, Case

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PASSES = {False: "forward", True: "forward+backward"}
RUNS = ((0.5, 7), (10.0, 3), (30.0, 2))  # seconds of a run: runs
SETTLED = 0.1  # seconds; a shorter first call says more about memory and code being fetched
START = 0.5  # seconds that a process for the memory takes before it runs anything
# what a process for the memory finds loaded already
PRELOADED = ["torch._inductor.compile_fx", "fairseq_rpe.positions", "fairseq_rpe.utils.table", "matplotlib.figure"]
PRELOADED += ["fairseq_rpe.attention", "fairseq_rpe.figures.style", "matplotlib.ticker", "x_transformers"]
Rows = list[dict[str, Any]]
Key = tuple[str, str]


def runs(seconds: float) -> int:
    """Return the number of timed runs for an implementation that takes ``seconds``."""
    return next((count for most, count in RUNS if seconds < most), 1)


def timed(x: ways.Inputs, step: ways.Step) -> float:
    """Return the seconds of one run."""
    synchronise = torch.cuda.synchronize if x.device == "cuda" else lambda: None
    synchronise()
    start = time.perf_counter()
    x.run(step)
    synchronise()
    return time.perf_counter() - start


def one_turn(case: Case) -> float:
    x = ways.Inputs(case)
    step = ways.prepare(case, x)
    seconds = timed(x, step)
    return timed(x, step) if seconds < SETTLED else seconds


def time_interleaved(cases: dict[Key, Case]) -> dict[Key, list[float]]:
    """Return the seconds of every run; implementations are timed in rotation."""
    times: dict[Key, list[float]] = {key: [] for key in cases}
    for case in cases.values():
        if case.way in ways.COMPILED:
            one_turn(case)
    for _ in range(max(count for _, count in RUNS)):
        for key, case in cases.items():
            if not times[key] or len(times[key]) < runs(times[key][0]):
                times[key].append(one_turn(case))
    return times


def peaks(case: Case, threads: int) -> tuple[float, float]:
    """Return the peak memory of a step in MiB and that of its inputs; on a CPU in a separate process."""
    if case.device == "cpu":
        torch.set_num_threads(threads)
        torch._inductor.config.compile_threads = 1
        now, highest = partial(machine.status, "VmRSS"), partial(machine.status, "VmHWM")
        forget, unit = machine.reset_peak, 1024
    else:
        now, highest = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
        forget, unit = torch.cuda.reset_peak_memory_stats, 2**20
    x = ways.Inputs(case, case.length if case.way in ways.COMPILED else ways.CHECK)
    x.run(ways.prepare(case, x))  # code is loaded, or compiled, on first use
    del x
    forget()
    before = now()
    x = ways.Inputs(case)
    step = ways.prepare(case, x)
    setup = highest() - before
    forget()
    x.run(step)
    return (highest() - before) / unit, setup / unit


def measured_peaks(case: Case, threads: int) -> tuple[float, float]:
    if case.device != "cpu":
        return peaks(case, threads)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(peaks, case, threads).result()


def wrong_or_refused(case: Case) -> str | None:
    """Return why a case is not timed: wrong results or unsupported; None if it is timed."""
    try:
        found = ways.deviation(case)
    except (ways.UserError, NotImplementedError) as error:
        return str(error)
    except Exception as error:  # other people's code, of any version and on any GPU: the rest is measured all the same
        return f"FAILED: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    allowed = ways.TOLERANCE[case.dtype]
    return None if found <= allowed else f"WRONG: {found:.1e} from the reference, {allowed:g} allowed"


def predicted_cost(rows: Rows, case: Case) -> tuple[float, float]:
    """Predict seconds and MiB of a run from the longest measured length; 0 without one."""
    known = [r for r in rows if (r["pass"], r["form"], r["way"]) == (PASSES[case.backward], case.form, case.way)]
    known = [r for r in known if int(r["length"]) < case.length]
    if not known:
        return 0.0, 0.0
    last = max(known, key=lambda r: int(r["length"]))
    scale = (case.length / int(last["length"])) ** 2
    return scale * float(last["ms"]) / 1000, scale * max(float(last["peak_mib"]), float(last["setup_mib"]))


def too_much(rows: Rows, case: Case, limit: float) -> str | None:
    seconds, mib = predicted_cost(rows, case)
    free = (torch.cuda.mem_get_info()[0] if case.device == "cuda" else machine.available()) / 2**20
    if seconds > limit:
        return f"a run would take about {seconds:.0f} s, and --limit-seconds is {limit:g}"
    return f"it would need about {mib / 1024:.1f} GiB, and {free / 1024:.1f} are free" if mib > 0.85 * free else None


def group(cases: dict[Key, Case], threads: int) -> Rows:
    """Measure and return the rows of one length and pass."""
    memory: dict[Key, tuple[float, float]] = {}
    for key, case in cases.items():
        try:
            memory[key] = measured_peaks(case, threads)
        except ways.UserError as error:
            told(case, str(error))
        except BrokenProcessPool:
            told(case, "its process was killed, for memory as a rule")
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            told(case, "not enough memory")
    if ("none", LIMIT) not in memory:
        raise ways.UserError("torch's attention without a bias does not fit into memory: give smaller --lengths")
    times = time_interleaved({key: cases[key] for key in memory})
    seconds = {key: statistics.median(found) for key, found in times.items()}
    rows = []
    for key, took in seconds.items():
        case, (peak, setup), limit = cases[key], memory[key], ("none", LIMIT)
        rows.append(
            {
                "length": case.length,
                "pass": PASSES[case.backward],
                "form": case.form,
                "encoding": ways.FORMS[case.form].label,
                "way": case.way,
                "ms": f"{1000 * took:.2f}",
                "ratio": f"{took / seconds[limit]:.3f}",
                "peak_mib": f"{peak:.1f}",
                "peak_ratio": f"{peak / memory[limit][0]:.3f}",
                "setup_mib": f"{setup:.1f}",
                "runs": len(times[key]),
            }
        )
    return rows


def told(case: Case, why: str) -> None:
    print(f"left out, {case.form}, {case.way}, {PASSES[case.backward]}, {case.length} tokens: {why}", file=sys.stderr)


def remaining(cases: list[Case], rows: Rows, limit: float) -> float:
    """Estimate the remaining seconds: timed runs, and a process for the memory of each case."""
    found = 0.0
    for case in cases:
        seconds, _ = predicted_cost(rows, case)
        if too_much(rows, case, limit) is None:
            found += START + (runs(seconds) * (1 + (seconds < SETTLED)) + 1) * seconds
    return found


def head(args: argparse.Namespace) -> str:
    """Return a description of the machine and settings, which all results of a file share."""
    cuda = args.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else f"{machine.processor()}, {os.cpu_count()} cores"
    parts = [name, f"torch {torch.__version__}", f"{args.threads} threads", f"{ways.HEADS} heads of {ways.WIDTH}"]
    forms = "all forms" if set(args.forms) == set(ways.FORMS) else f"forms {' + '.join(args.forms)}"
    parts += [args.dtype, forms, f"backends {' + '.join(args.backends)}", f"limit {args.limit_seconds:g} s"]
    return ", ".join([*parts, f"load {os.getloadavg()[0]:.1f}"])


def measure(args: argparse.Namespace) -> int:
    start, said = time.perf_counter(), head(args)
    rows: Rows = []
    if args.csv.exists() and not args.fresh:
        before, rows = forms_report.read(args.csv)
        if before.rpartition(", load")[0] != said.rpartition(", load")[0]:
            raise ways.UserError(f"{args.csv} was measured as '{before}', this is '{said}': --fresh starts over")
        said = before
    pairs = [pair for pair in ways.pairs(args.backends) if pair[0] in {"none", *args.forms}]
    groups = [(n, b) for n in args.lengths for b in PASSES if not measured(rows, n, b)]
    wrong, usable = False, {}
    for backward in dict.fromkeys(b for _, b in groups):
        for pair in pairs:
            case = Case(*pair, ways.CHECK, backward, args.device, DTYPES[args.dtype])
            why = wrong_or_refused(case)
            usable[*pair, backward] = why is None
            if why is not None:
                wrong |= why.startswith(("WRONG", "FAILED"))
                print(f"left out, {case.form}, {case.way}, {PASSES[backward]}: {why}", file=sys.stderr)
    plan = {
        (n, b): {p: Case(*p, n, b, args.device, DTYPES[args.dtype]) for p in pairs if usable[*p, b]} for n, b in groups
    }
    for place, (at, cases) in enumerate(plan.items()):
        reasons = {key: too_much(rows, case, args.limit_seconds) for key, case in cases.items() if key[1] != LIMIT}
        for key, why in reasons.items():
            if why is not None:
                told(cases[key], why)
        rows += group({key: case for key, case in cases.items() if reasons.get(key) is None}, args.threads)
        machine.write_csv(args.csv, said, rows)
        to_go = remaining(
            [case for later in groups[place + 1 :] for case in plan[later].values()], rows, args.limit_seconds
        )
        used = (time.perf_counter() - start) / 60
        print(f"{at[0]} tokens, {PASSES[at[1]]}: done; {used:.1f} min used, about {to_go / 60:.1f} to go", flush=True)
    forms_report.draw(args.csv, args.figure)
    print(f"wrote {args.csv} and {args.figure}")
    return int(wrong)


def measured(rows: Rows, length: int, backward: bool) -> bool:
    return any(int(r["length"]) == length and r["pass"] == PASSES[backward] for r in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N")
    parser.add_argument("--forms", nargs="+", choices=list(ways.FORMS), default=list(ways.FORMS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument(
        "--backends", nargs="+", choices=tuple(ways.BACKENDS), help="default: sdpa; on a GPU flex, triton too"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument(
        "--limit-seconds", type=float, default=60.0, metavar="S", help="longest run in seconds (default: %(default)g)"
    )
    parser.add_argument("--fresh", action="store_true", help="discard the results in --csv")
    parser.add_argument("--csv", type=Path, default=ROOT / "benchmarks/results/attention-forms.csv", metavar="FILE")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/attention-forms.png", metavar="FILE")
    parser.add_argument("--table", action="store_true", help="print and draw the results in --csv without measuring")
    args = parser.parse_args()
    args.lengths = sorted(set(args.lengths))
    args.backends = args.backends or (["sdpa", "flex", "triton"] if args.device == "cuda" else ["sdpa"])
    try:
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ways.UserError("--device cuda: torch sees no GPU here: drop the flag")
        if args.table:
            print(forms_report.markdown(args.csv))
            forms_report.draw(args.csv, args.figure)
            return 0
        torch.set_num_threads(args.threads)
        return measure(args)
    except ways.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
