"""Tokens per second and peak memory of whole models by encoding, in inference and training.

    python benchmarks/model.py                                   # base, 2,048 tokens; about 20 minutes on two cores
    python benchmarks/model.py --size tiny --tokens 512 --vocabulary 4096
    python benchmarks/model.py --device cuda --dtype bf16 --backend triton

Each measurement runs in a separate process; the encodings are measured in rotation. A process builds a model, computes
the logits of one random block several times, and then runs several training steps (fairseq's Adam,
``lm_cross_entropy``). The script reports the mean of all rounds, as FIRE's Figure 5 does (arXiv 2310.04418: 2,048
tokens, base size, mean of 10). It also reports times as multiples of the same model without an encoding, ``nope``.
``fire, shared`` is FIRE-S: one FIRE for all layers. Peak memory is what the process needs beyond the built model. After
an interruption the script resumes when it is called again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine
import torch
from tqdm import tqdm
from train_step import build

from fairseq_rpe.utils.json_files import append_json_line, read_json_lines

OUT = Path(__file__).parent / "results" / "model.csv"
ENCODINGS = ("nope", "sinusoidal", "rope", "alibi", "type1", "kerple_log", "t5_bias", "fire", "fire, shared")
STEPS = ("inference", "training")
# arguments that determine a measurement
SETTING = ("size", "tokens", "batch", "vocabulary", "dtype", "backend", "device", "repeats")


def print_measurements(args: argparse.Namespace, encoding: str) -> None:
    """Print seconds of each repetition and peak MiB of both kinds of step; runs in the measured process."""
    rpe, _, shared = encoding.partition(", ")
    side = "bf16" if args.dtype == "bf16" else "fp32"
    settings = {"attention_backend": args.backend, "rpe_share": "model" if shared else "auto"}
    step = build(side, args.size, args.tokens, args.batch, args.vocabulary, rpe, args.device, **settings)
    block = torch.randint(4, args.vocabulary, (args.batch, args.tokens)).to(args.device)

    def infer() -> None:
        with torch.inference_mode():
            logits, _ = step.model.eval()(block)
            logits[0, 0, 0].item()  # waits for a GPU

    def train() -> None:
        step.model.train()
        step()

    for kind, work in zip(STEPS, (infer, train), strict=True):
        before = _reset_peak(args.device)
        work()  # a warm-up, whose memory counts
        seconds = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"kind": kind, "seconds": seconds, "MiB": _peak(args.device) - before}), flush=True)


def _reset_peak(device: str) -> float:
    """Reset the peak and return the MiB in use."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    machine.reset_peak()
    return machine.status("VmRSS") / 1024


def _peak(device: str) -> float:
    """Return the peak in MiB."""
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else machine.status("VmHWM") / 1024


def measure_encoding(args: argparse.Namespace, encoding: str) -> list[dict[str, Any]]:
    """Return the measurements of an encoding in a new process: one of each kind of step, or none if it fails."""
    flags = [word for name in SETTING for word in (f"--{name}", str(getattr(args, name)))]
    command = [sys.executable, __file__, "--serve", encoding, *flags]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        print(f"{encoding} is left out: {last}", file=sys.stderr)
        return []
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return [{"encoding": encoding, **line} for line in lines]


def rows(measurements: list[dict[str, Any]], first: str, tokens: int) -> list[dict[str, Any]]:
    """Return a row for each encoding: speed, time as a multiple of the first encoding's, and memory.

    Args:
        measurements: results of :func:`measure_encoding`.
        first: the first encoding; if it has no results, no encoding has a multiple.
        tokens: number of tokens of a step.
    """
    table = []
    of_first = [x for x in measurements if x["encoding"] == first]
    baseline = {  # kind of step -> seconds of the first encoding
        kind: statistics.mean(value for x in of_first if x["kind"] == kind for value in x["seconds"])
        for kind in (STEPS if of_first else ())
    }
    for encoding in dict.fromkeys(x["encoding"] for x in measurements):
        row: dict[str, Any] = {"encoding": encoding}
        for kind in STEPS:
            matching = [x for x in measurements if (x["encoding"], x["kind"]) == (encoding, kind)]
            seconds = statistics.mean(value for x in matching for value in x["seconds"])
            row |= {
                f"{kind}_tokens_per_s": round(tokens / seconds),
                f"{kind}_time": round(seconds / baseline[kind], 3) if kind in baseline else None,
                f"{kind}_MiB": round(max(x["MiB"] for x in matching)),
            }
        table.append(row)
    return table


def measure_all(args: argparse.Namespace, setting: dict[str, Any], progress: Path) -> list[dict[str, Any]]:
    """Measure all encodings in rotation, and return the measurements in the order of ``args.encodings``.

    Args:
        args: encodings and number of rounds (``turns``).
        setting: values of :data:`SETTING`.
        progress: file with a JSON line for each process that has finished, which is read and appended to.
    """
    lines = [line for line in read_json_lines(progress) if line["setting"] == setting]
    measured = {(line["turn"], line["found"][0]["encoding"]) for line in lines}
    work = [(turn, encoding) for turn in range(args.turns) for encoding in args.encodings]
    for turn, encoding in tqdm(work, disable=None):
        if (turn, encoding) not in measured and (measurements := measure_encoding(args, encoding)):
            measured.add((turn, encoding))
            lines.append({"setting": setting, "turn": turn, "found": measurements})
            append_json_line(progress, lines[-1])
    order = {encoding: index for index, encoding in enumerate(args.encodings)}
    results = [x for line in lines if line["turn"] < args.turns for x in line["found"] if x["encoding"] in order]
    return sorted(results, key=lambda x: order[x["encoding"]])


def main() -> int:
    """Measure the encodings, and print and write the table; return the exit code, 1 if an encoding is left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--encodings", nargs="+", default=list(ENCODINGS), help="the first is the baseline, 1.00 (default: nope …)"
    )
    parser.add_argument("--size", default="base", choices=["tiny", "small", "wiki103", "base", "large"])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a block (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="blocks of a step (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=50265, help="default: %(default)s")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"], help="as --compute-dtype")
    parser.add_argument("--backend", default="auto", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each kind (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="processes of each encoding (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        print_measurements(args, args.serve)
        return 0
    setting = {name: getattr(args, name) for name in SETTING}
    progress = args.out.with_suffix(".part")
    progress.parent.mkdir(parents=True, exist_ok=True)
    measurements = measure_all(args, setting, progress)
    if not measurements:
        sys.exit("nothing could be measured: the reasons are above")
    table = rows(measurements, args.encodings[0], args.batch * args.tokens)
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{machine.processor()}, {os.cpu_count()} cores"
    head = f"{name}, torch {torch.__version__}, " + ", ".join(f"{key} {value}" for key, value in setting.items())
    print(f"{head}, {args.turns} turns\n")
    print("| " + " | ".join(table[0]) + " |\n|" + "---|" * len(table[0]))
    for row in table:
        print("| " + " | ".join("" if value is None else str(value) for value in row.values()) + " |")
    machine.write_csv(args.out, f"{head}, {args.turns} turns", table)
    progress.unlink()
    return int({row["encoding"] for row in table} != set(args.encodings))


if __name__ == "__main__":
    sys.exit(main())
