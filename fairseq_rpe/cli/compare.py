"""``compare``: whether one of two trained models is better, or no difference is shown."""

import argparse
import json
from pathlib import Path

from fairseq_rpe.cli.printing import add_json
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.output_checks import check_overwrite
from fairseq_rpe.utils.table import csv_text


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``compare``."""
    parser.description = (
        "Compare two models in each measurement that both have: the perplexity at a length, the accuracy on a "
        "generated task, the score on a set of questions. Each line states which model is better, or that no "
        "difference is shown, with a 95 % interval from paired documents, examples or questions."
    )
    about = "run folder of a sweep, or results file (--out of eval, eval-task or eval-questions), of one model"
    parser.add_argument("first", type=Path, metavar="RUN", help=about)
    parser.add_argument("second", type=Path, metavar="RUN", help="the same of another model")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the comparisons as CSV")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Run ``compare``."""
    from fairseq_rpe.reports.compare_runs import CSV_COLUMNS, compare_runs, load_run

    if args.out is not None:
        check_overwrite("--out", args.out, ".csv")
    runs = [load_run(path) for path in (args.first, args.second)]
    if args.out is not None and args.out.exists() and any(args.out.samefile(run.file) for run in runs):
        raise UserError(f"--out {args.out} is a results file to be compared: name another one")
    comparisons = compare_runs(*runs)
    if args.out is not None:
        atomic_write(args.out, csv_text(CSV_COLUMNS, (comparison.csv_row() for comparison in comparisons)))
    for comparison in comparisons:
        print(json.dumps(comparison.to_json()) if args.json else comparison)
    if len(comparisons) > 1 and not args.json:
        print(f"The p-values are corrected for {len(comparisons)} comparisons (Holm).")
