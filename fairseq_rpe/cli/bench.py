"""``bench``: how fast attention is with each encoding and backend on this machine, against attention without a bias."""

import argparse
import sys
from dataclasses import astuple
from pathlib import Path

from fairseq_rpe.cli.options import add_rpe_module, heads, int_list, positive_int, width, words
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import atomic_write, check_folder
from fairseq_rpe.core.table import csv_text

COLUMNS = ("encoding", "backend", "pass", "length", "milliseconds", "ratio", "least_ms", "most_ms")
_ENCODINGS = "nope alibi kerple_log fire"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times all encodings and backends in turns at each length, as ratios to torch's own causal attention "
        "without a bias in the same turns. What a backend refuses is left out, with a line that says so."
    )
    about = f'separated by blanks or commas (default: "{_ENCODINGS}")'
    parser.add_argument("--encodings", type=words, default=_ENCODINGS, metavar='"SPEC ..."', help=about)
    parser.add_argument("--backends", type=words, default="all", metavar='"NAME ..."', help="default: all")
    parser.add_argument("--lengths", type=int_list, default=[512, 1024, 2048], metavar="N,N,...", help="in tokens")
    parser.add_argument("--batch", type=positive_int, default=1, metavar="N", help="texts per call (default: 1)")
    parser.add_argument("--heads", type=heads, default=8, metavar="N", help="attention heads (default: 8)")
    parser.add_argument("--width", type=width, default=64, metavar="N", help="width of a head (default: 64)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: fp32")
    parser.add_argument("--passes", choices=("forward", "training", "both"), default="both", help="default: both")
    parser.add_argument(
        "--repeats", type=positive_int, default=5, metavar="N", help="timings of each, of which the median counts (5)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for bench.csv, bench.md and bench.png")
    add_rpe_module(parser)


def run(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from fairseq_rpe.analysis.speed import Setting, measure, tables
    from fairseq_rpe.attention import BACKENDS
    from fairseq_rpe.core.devices import chosen

    if args.out is not None:
        check_folder(args.out, ("bench.csv", "bench.md", "bench.png"))
    names, specs = list(BACKENDS if args.backends == ("all",) else args.backends), list(args.encodings)
    for name in names:
        if name not in BACKENDS:
            raise UserError(f"--backends: unknown '{name}'; known: {', '.join(BACKENDS)}")
    if not specs or not names:
        raise UserError("--encodings and --backends name at least one each")
    device = chosen(args.device)
    setting = Setting(specs, names, args.batch, args.heads, args.width, args.dtype, args.repeats, device)
    steps = ("forward", "training") if args.passes == "both" else (args.passes,)
    timings, told = [], set()
    for length, step in tqdm([(n, step) for n in args.lengths for step in steps], disable=None, unit="length"):
        found, left_out = measure(setting, step, length)
        timings += found
        for line in dict.fromkeys(line for line in left_out if line not in told):
            print(line, file=sys.stderr)
        told.update(left_out)
    about = str(setting)
    text = "\n".join([f"{about}\n", *(table.markdown() for table in tables(timings))])
    print(text)
    if args.out is not None:
        from fairseq_rpe.figures.style import save
        from fairseq_rpe.figures.timing import of_attention

        atomic_write(args.out / "bench.csv", f"# {about}\n{csv_text(COLUMNS, map(astuple, timings))}")
        atomic_write(args.out / "bench.md", text)
        save(of_attention(timings, about), args.out / "bench.png")
        print(f"figure: {args.out / 'bench.png'}")
