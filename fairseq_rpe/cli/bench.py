"""``bench``: time attention or whole models with each encoding and backend on this machine."""

import argparse
import sys
from dataclasses import astuple, fields
from pathlib import Path

from fairseq_rpe.checkpoints.model_sizes import MODEL_SIZES
from fairseq_rpe.cli.options import (
    add_device,
    add_figure_width,
    add_latex,
    add_rpe_module,
    heads,
    int_list,
    positive_int,
    spec_list,
    width,
)
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.table import csv_text, join_latex

COLUMNS = ("encoding", "backend", "pass", "length", "milliseconds", "ratio", "least_ms", "most_ms")
_FILES = ("bench.csv", "bench.md", "bench.png", "bench.pdf")
_LATEX = "bench.tex"
_SETTINGS = (
    "encodings",
    "shared",
    "backends",
    "lengths",
    "batch",
    "vocabulary",
    "heads",
    "width",
    "dtype",
    "passes",
    "repeats",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench``."""
    parser.description = (
        "Time attention with some encodings on each backend, in turns at each length, relative to torch's own causal "
        "attention without a bias. With --model, time untrained models on one block. Combinations that a backend does "
        "not support are skipped with a message."
    )
    parser.add_argument("--model", choices=MODEL_SIZES, help="time models of this size instead of attention alone")
    about = (
        'encodings, separated by blanks or commas (default: "nope alibi kerple_log fire"; with --model also rope and '
        "t5_bias)"
    )
    parser.add_argument("--encodings", type=spec_list, metavar='"SPEC ..."', help=about)
    about = "with --model: also time these encodings, shared by all layers (default: fire, which is then FIRE-S)"
    parser.add_argument("--shared", type=spec_list, metavar='"SPEC ..."', help=about)
    parser.add_argument(
        "--backends", type=spec_list, metavar='"NAME ..."', help="attention backends (default: all; with --model auto)"
    )
    about = "lengths in tokens (default: 512,1024,2048; with --model 2048)"
    parser.add_argument("--lengths", type=int_list, metavar="N,N,...", help=about)
    parser.add_argument("--batch", type=positive_int, metavar="N", help="texts per call (default: 1)")
    parser.add_argument("--vocabulary", type=width, metavar="N", help="vocabulary size of models (default: 4096)")
    parser.add_argument("--heads", type=heads, metavar="N", help="attention heads (default: 8)")
    parser.add_argument("--head-width", dest="width", type=width, metavar="N", help="width of a head (default: 64)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="dtype (default: fp32)")
    parser.add_argument("--passes", choices=("forward", "training", "both"), help="default: both; with --model forward")
    about = "timings of each combination (default: 5, with their median; with --model 10, with their mean)"
    parser.add_argument("--repeats", type=positive_int, metavar="N", help=about)
    add_device(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder for {', '.join(_FILES)}")
    add_figure_width(parser, other="--head-width")
    add_latex(parser)
    add_rpe_module(parser)
    parser.set_defaults(log=None)


def run(args: argparse.Namespace) -> None:
    """Run ``bench``."""
    from tqdm import tqdm

    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.utils.devices import resolve_device

    if args.out is not None:
        check_output(args.out, (*_FILES, _LATEX))
    elif args.latex or args.figure_width:
        raise UserError(f"{'--latex' if args.latex else '--width'} applies to the files of --out: give --out DIR too")
    if args.model:
        from fairseq_rpe.evaluation.model_benchmark import ModelBenchmark as Benchmark
        from fairseq_rpe.evaluation.model_benchmark import tables as make_tables
    else:
        from fairseq_rpe.analysis.speed import BenchSetting as Benchmark
        from fairseq_rpe.analysis.speed import tables as make_tables
    settings = {name: getattr(args, name) for name in ("model", *_SETTINGS) if getattr(args, name) is not None}
    if unsupported := sorted(settings.keys() - {field.name for field in fields(Benchmark)}):
        flag = {"width": "head-width"}.get(unsupported[0], unsupported[0])
        raise UserError(f"--{flag} goes {'not' if args.model else 'only'} with --model: leave it out")
    setting = Benchmark(device=resolve_device(args.device), **settings)
    setting.check()
    timings, printed = [], set()
    for measure in tqdm(setting.measurements(), disable=None, unit="length"):
        new_timings, skipped = measure()
        timings += new_timings
        for line in dict.fromkeys(line for line in skipped if line not in printed):
            print(line, file=sys.stderr)
        printed.update(skipped)
    about = str(setting)
    tables = list(make_tables(timings))
    text = "\n".join([f"{about}\n", *(table.to_markdown() for table in tables)])
    print(text)
    if args.out is not None:
        from fairseq_rpe.figures.style import figures_at_width, save
        from fairseq_rpe.figures.timing import draw_attention_timing, draw_model_timing

        atomic_write(args.out / "bench.csv", f"# {about}\n{csv_text(COLUMNS, map(astuple, timings))}")
        atomic_write(args.out / "bench.md", text)
        if args.latex:
            atomic_write(args.out / _LATEX, join_latex(tables))
        with figures_at_width(args.figure_width):
            figure = (draw_model_timing if args.model else draw_attention_timing)(timings, about)
            save(figure, args.out / "bench.png", args.out / "bench.pdf")
        print(f"figure: {args.out / 'bench.png'}")
