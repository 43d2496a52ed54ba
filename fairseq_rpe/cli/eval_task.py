"""``eval-task``: exact-match accuracy on an algorithmic task by number of items, decoded greedily with the cache."""

import argparse
import functools
from pathlib import Path
from typing import Any

from fairseq_rpe.cli.options import add_checkpoint_options, float_list, int_list, positive_int
from fairseq_rpe.cli.printing import Column, ResultPrinter, add_json, seconds
from fairseq_rpe.utils.progress import Progress
from fairseq_rpe.utils.records import from_attributes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``eval-task``."""
    parser.description = (
        "Print the exact-match accuracy by number of items, and by depth if the task has one. Results in --out are not "
        "measured again."
    )
    add_checkpoint_options(parser)
    add_json(parser)
    parser.add_argument("--split", default="test", choices=("train", "valid", "test"), help="split (default: test)")
    parser.add_argument("--lengths", type=int_list, metavar="N,N,...", help="numbers of items (default: all)")
    about = "depths of the answer, from 0 (first) to 1 (last), for tasks with depths (default: the task's)"
    parser.add_argument("--depths", type=float_list, metavar="X,X,...", help=about)
    about = "unit of M and L in the ratio M/L of interpolated positions (default: items)"
    parser.add_argument("--ratio-unit", choices=("items", "tokens"), default="items", help=about)
    parser.add_argument(
        "--batch-size", type=positive_int, default=256, metavar="N", help="examples per batch (default: 256)"
    )
    about = "JSON-lines file to which the predicted answers are appended; a result without them is measured again"
    parser.add_argument("--predictions", type=Path, metavar="FILE", help=about)


def run(args: argparse.Namespace) -> None:
    """Run ``eval-task``."""
    from fairseq_rpe.evaluation.checkpoint_defaults import with_checkpoint_rotation
    from fairseq_rpe.evaluation.exact_match import make_evaluator
    from fairseq_rpe.evaluation.predictions import keys_without_predictions
    from fairseq_rpe.evaluation.records import ExactMatchKey, ExactMatchRequest, ExactMatchResult, resume_results
    from fairseq_rpe.evaluation.task_model import checkpoint_algorithm
    from fairseq_rpe.runs import checkpoints

    request = with_checkpoint_rotation(from_attributes(ExactMatchRequest, args))
    checkpoint = checkpoints.load(request.checkpoint)
    algorithm = checkpoint_algorithm(checkpoint)
    with Progress(algorithm.spec, "tokens") as bar:
        begin, keys = functools.partial(make_evaluator, request, checkpoint, bar), request.keys(algorithm)
        repeated: set[ExactMatchKey] = set()
        if request.predictions is not None:
            repeated = keys_without_predictions(request.predictions, keys, args.out)
        deep = any(key.depth is not None for key in keys)
        depth = [Column("depth", 6, lambda r: "" if r.depth is None else f"{r.depth:g}")] if deep else []
        columns = [
            Column("items", 8, lambda r: str(r.length)),
            *depth,
            Column("exact %", 8, lambda r: f"{100 * r.accuracy:.1f}"),
            Column("right", 8, lambda r: f"{r.right:,}"),
            Column("examples", 9, lambda r: f"{r.examples:,}"),
            Column("seconds", 9, seconds),
            *([Column("exact % by gap", 16, _by_gap)] if algorithm.has_labels else []),
        ]
        printer = ResultPrinter(columns, args.json, bar.write)
        for result in resume_results(ExactMatchResult, args.out, keys, begin, repeated):
            printer.add(result)


def _by_gap(result: Any) -> str:
    """Return the accuracies by gap; "8: 97.5" stands for gaps of 8 to 15 tokens."""
    return ", ".join(f"{count.gap}: {100 * count.right / count.examples:.1f}" for count in result.by_gap or ())
