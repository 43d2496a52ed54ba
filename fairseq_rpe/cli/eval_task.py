"""``accuracy``: exact answers to an algorithmic task by number of items, by greedy decoding with the cache."""

import argparse
import functools

from fairseq_rpe.cli.options import add_checkpoint, int_list, number_list, positive_int
from fairseq_rpe.cli.printing import Column, ResultPrinter, add_json, seconds
from fairseq_rpe.utils.progress import Progress
from fairseq_rpe.utils.records import filled


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a table of the exact answers by number of items, and depth; what is in --out is not measured again."
    )
    add_checkpoint(parser)
    add_json(parser)
    parser.add_argument("--split", default="test", choices=("train", "valid", "test"), help="default: test")
    parser.add_argument("--lengths", type=int_list, metavar="N,N,...", help="numbers of items (default: all there are)")
    about = "where the answer stands, 0 first, 1 last; for passkey and retrieval (default: the task's own)"
    parser.add_argument("--depths", type=number_list, metavar="X,X,...", help=about)
    about = "unit of interpolation's ratio M/L (default: items)"
    parser.add_argument("--unit", choices=("items", "tokens"), default="items", help=about)
    parser.add_argument("--batch-size", type=positive_int, default=256, metavar="N", help="default: 256")


def run(args: argparse.Namespace) -> None:
    from fairseq_rpe.evaluation.exact_match import algorithm_of, measuring
    from fairseq_rpe.evaluation.records import AnswerRequest, AnswerResult, resumed
    from fairseq_rpe.evaluation.replaced_encoding import with_checkpoint_rotation
    from fairseq_rpe.runs import checkpoints

    request = with_checkpoint_rotation(filled(AnswerRequest, args))
    checkpoint = checkpoints.load(request.checkpoint)
    algorithm = algorithm_of(checkpoint)
    with Progress(algorithm.spec, "tokens") as bar:
        begin, keys = functools.partial(measuring, request, checkpoint, bar), request.keys(algorithm)
        deep = any(key.depth is not None for key in keys)
        depth = [Column("depth", 6, lambda r: "" if r.depth is None else f"{r.depth:g}")] if deep else []
        columns = [
            Column("items", 8, lambda r: str(r.length)),
            *depth,
            Column("exact %", 8, lambda r: f"{100 * r.accuracy:.1f}"),
            Column("right", 8, lambda r: f"{r.right:,}"),
            Column("examples", 9, lambda r: f"{r.examples:,}"),
            Column("seconds", 9, seconds),
        ]
        printer = ResultPrinter(columns, args.json, bar.say)
        for result in resumed(AnswerResult, args.out, keys, begin):
            printer.add(result)
