"""``bench``: how fast attention, or a whole model, is with each encoding and backend on this machine."""

import argparse
import sys
from dataclasses import astuple, fields
from pathlib import Path

from fairseq_rpe.checkpoints.model_sizes import SIZES
from fairseq_rpe.cli.options import add_latex, add_rpe_module, add_width, heads, int_list, positive_int, width, words
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.table import csv_text, latex_text

COLUMNS = ("encoding", "backend", "pass", "length", "milliseconds", "ratio", "least_ms", "most_ms")
_FILES = ("bench.csv", "bench.md", "bench.png", "bench.pdf")
_LATEX = "bench.tex"
_GIVEN = (
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


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times all encodings and backends in turns at each length, as ratios to torch's own causal attention "
        "without a bias in the same turns; with --model whole untrained models, each reading one block. What a "
        "backend refuses is left out, with a line that says so."
    )
    parser.add_argument("--model", choices=SIZES, help="time models of this size, not attention alone")
    about = 'separated by blanks or commas (default: "nope alibi kerple_log fire"; models: also rope and t5_bias)'
    parser.add_argument("--encodings", type=words, metavar='"SPEC ..."', help=about)
    about = "encodings of models that all layers share, timed too (default: fire, which then is FIRE-S)"
    parser.add_argument("--shared", type=words, metavar='"SPEC ..."', help=about)
    parser.add_argument("--backends", type=words, metavar='"NAME ..."', help="default: all; models: auto")
    about = "in tokens (default: 512,1024,2048; models: 2048)"
    parser.add_argument("--lengths", type=int_list, metavar="N,N,...", help=about)
    parser.add_argument("--batch", type=positive_int, metavar="N", help="texts per call (default: 1)")
    parser.add_argument("--vocabulary", type=width, metavar="N", help="of models (default: 4096)")
    parser.add_argument("--heads", type=heads, metavar="N", help="attention heads (default: 8)")
    parser.add_argument("--head-width", dest="width", type=width, metavar="N", help="width of a head (default: 64)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: fp32")
    parser.add_argument("--passes", choices=("forward", "training", "both"), help="default: both; models: forward")
    about = "timings of each: the median of 5 (default), of models the mean of 10"
    parser.add_argument("--repeats", type=positive_int, metavar="N", help=about)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder for {', '.join(_FILES)}")
    add_width(parser, other="--head-width")
    add_latex(parser)
    add_rpe_module(parser)
    parser.set_defaults(log=None)


def run(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.utils.devices import chosen

    if args.out is not None:
        check_output(args.out, (*_FILES, _LATEX))
    elif args.latex or args.figure_width:
        raise UserError(f"{'--latex' if args.latex else '--width'} is for what --out holds: give --out DIR too")
    if args.model:
        from fairseq_rpe.evaluation import model_benchmark as kind
    else:
        from fairseq_rpe.analysis import speed as kind
    given = {name: getattr(args, name) for name in ("model", *_GIVEN) if getattr(args, name) is not None}
    if odd := sorted(given.keys() - {field.name for field in fields(kind.Setting)}):
        flag = {"width": "head-width"}.get(odd[0], odd[0])
        raise UserError(f"--{flag} goes {'not' if args.model else 'only'} with --model: leave it out")
    setting = kind.Setting(device=chosen(args.device), **given)
    setting.check()
    timings, told = [], set()
    for at in tqdm(setting.measurements(), disable=None, unit="length"):
        found, left_out = at()
        timings += found
        for line in dict.fromkeys(line for line in left_out if line not in told):
            print(line, file=sys.stderr)
        told.update(left_out)
    about = str(setting)
    tables = list(kind.tables(timings))
    text = "\n".join([f"{about}\n", *(table.markdown() for table in tables)])
    print(text)
    if args.out is not None:
        from fairseq_rpe.figures.style import drawn_at, save
        from fairseq_rpe.figures.timing import of_attention, of_models

        atomic_write(args.out / "bench.csv", f"# {about}\n{csv_text(COLUMNS, map(astuple, timings))}")
        atomic_write(args.out / "bench.md", text)
        if args.latex:
            atomic_write(args.out / _LATEX, latex_text(tables))
        with drawn_at(args.figure_width):
            figure = (of_models if args.model else of_attention)(timings, about)
            save(figure, args.out / "bench.png", args.out / "bench.pdf")
        print(f"figure: {args.out / 'bench.png'}")
