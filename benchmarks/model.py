"""Tokens per second and peak memory of whole models by encoding, in inference and training.

    python benchmarks/model.py                                   # base, 2,048 tokens; about 20 minutes on two cores
    python benchmarks/model.py --size tiny --tokens 512 --vocabulary 4096
    python benchmarks/model.py --device cuda --dtype bf16 --backend triton

Every measurement is a process of its own, in turns: it builds a model of the size, reads the same random block to its
logits several times, then makes several steps of training (fairseq's Adam, ``lm_cross_entropy``). The mean of all turns
counts, as in FIRE's Figure 5 (arXiv 2310.04418: 2,048 tokens, base size, mean of 10), and everything is also a multiple
of the same model without an encoding, ``nope``. ``fire, shared`` is FIRE-S: one FIRE for all layers. Peak memory is
what the process needs beyond the built model. Stopped, it goes on where it was when called again.
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

OUT = Path(__file__).parent / "results" / "model.csv"
ENCODINGS = ("nope", "sinusoidal", "rope", "alibi", "type1", "kerple_log", "t5_bias", "fire", "fire, shared")
STEPS = ("inference", "training")
SETTING = ("size", "tokens", "batch", "vocabulary", "dtype", "backend", "device", "repeats")


def serve(args: argparse.Namespace, encoding: str) -> None:
    """Print seconds of each repetition and peak MiB of both kinds of step; runs in the measured process."""
    rpe, _, shared = encoding.partition(", ")
    side = "bf16" if args.dtype == "bf16" else "fp32"
    more = {"attention_backend": args.backend, "rpe_share": "model" if shared else "auto"}
    step = build(side, args.size, args.tokens, args.batch, args.vocabulary, rpe, args.device, **more)
    block = torch.randint(4, args.vocabulary, (args.batch, args.tokens)).to(args.device)

    def read() -> None:
        with torch.inference_mode():
            logits, _ = step.model.eval()(block)
            logits[0, 0, 0].item()  # waits for a GPU

    def train() -> None:
        step.model.train()
        step()

    for kind, work in zip(STEPS, (read, train), strict=True):
        before = _memory(args.device)
        work()
        seconds = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"kind": kind, "seconds": seconds, "MiB": _most(args.device) - before}), flush=True)


def _memory(device: str) -> float:
    """Return MiB in use and reset the peak."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    machine.reset_peak()
    return machine.status("VmRSS") / 1024


def _most(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else machine.status("VmHWM") / 1024


def measure_encoding(args: argparse.Namespace, encoding: str) -> list[dict[str, Any]]:
    """Measure an encoding in a process of its own; return no rows if it fails."""
    flags = [word for name in SETTING for word in (f"--{name}", str(getattr(args, name)))]
    command = [sys.executable, __file__, "--serve", encoding, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        print(f"{encoding} is left out: {last}", file=sys.stderr)
        return []
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [{"encoding": encoding, **line} for line in lines]


def rows(found: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Return a row per encoding: speed, its multiple of ``nope``, and memory."""
    made = []
    base: dict[str, float] = {}
    for encoding in dict.fromkeys(line["encoding"] for line in found):
        row: dict[str, Any] = {"encoding": encoding}
        for kind in STEPS:
            own = [line for line in found if (line["encoding"], line["kind"]) == (encoding, kind)]
            seconds = statistics.mean(x for line in own for x in line["seconds"])
            time_of_nope = base.setdefault(kind, seconds)
            row |= {
                f"{kind}_tokens_per_s": round(tokens / seconds),
                f"{kind}_time": round(seconds / time_of_nope, 3),
                f"{kind}_MiB": round(max(line["MiB"] for line in own)),
            }
        made.append(row)
    return made


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS), help="the first is 1.00 (default: nope …)")
    parser.add_argument("--size", default="base", choices=["tiny", "small", "wiki103", "base", "large"])
    parser.add_argument("--tokens", type=int, default=2048, help="of a block (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="blocks at a time (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=50265, help="default: %(default)s")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"], help="as --compute-dtype")
    parser.add_argument("--backend", default="auto", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=5, help="of each step in a process (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="processes of each encoding (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args, args.serve)
    about = {name: getattr(args, name) for name in SETTING}
    part = args.out.with_suffix(".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    kept = [json.loads(line) for line in part.read_text().splitlines()] if part.exists() else []
    kept = [line for line in kept if line["setting"] == about]
    work = [(turn, encoding) for turn in range(args.turns) for encoding in args.encodings]
    with part.open("a") as file:
        for turn, encoding in tqdm(work, disable=None):
            if any((line["turn"], line["found"][0]["encoding"]) == (turn, encoding) for line in kept):
                continue
            if found := measure_encoding(args, encoding):
                kept.append({"setting": about, "turn": turn, "found": found})
                print(json.dumps(kept[-1]), file=file, flush=True)
    order = {encoding: at for at, encoding in enumerate(args.encodings)}
    lines = [line for one in kept if one["turn"] < args.turns for line in one["found"] if line["encoding"] in order]
    if not lines:
        sys.exit("nothing could be measured: the reasons are above")
    table = rows(sorted(lines, key=lambda line: order[line["encoding"]]), args.batch * args.tokens)
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{machine.processor()}, {os.cpu_count()} cores"
    head = f"{name}, torch {torch.__version__}, " + ", ".join(f"{key} {value}" for key, value in about.items())
    print(f"{head}, {args.turns} turns\n")
    print("| " + " | ".join(table[0]) + " |\n|" + "---|" * len(table[0]))
    for row in table:
        print("| " + " | ".join(map(str, row.values())) + " |")
    machine.write_csv(args.out, f"{head}, {args.turns} turns", table)
    part.unlink()


if __name__ == "__main__":
    main()
