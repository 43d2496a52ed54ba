"""``longrope-search``: the factors with which a trained rope reads longer text best."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import positive_int, seed
from fairseq_rpe.utils.records import filled


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = "Evolves factors of 1 to 1 + N / trained length; what is in --out is not measured again."
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="trained with --rpe rope")
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder")
    parser.add_argument("--tokens", type=positive_int, required=True, metavar="N", help="length that is to be read")
    parser.add_argument("--subset", default="valid", help="split that judges (default: %(default)s)")
    parser.add_argument("--samples", type=positive_int, default=5, metavar="K", help="blocks of it that judge (5)")
    parser.add_argument("--population", type=positive_int, default=64, metavar="K", help="candidates at a time (64)")
    parser.add_argument("--iterations", type=positive_int, default=40, metavar="K", help="rounds of new ones (40)")
    parser.add_argument("--seed", type=seed, default=1, help="of what is drawn (default: 1)")
    parser.add_argument("--attention", choices=("sqrt", "yarn", "none"), default="sqrt", help="longrope's option")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON-lines file that keeps what is measured")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.set_defaults(log=None)


def run(args: argparse.Namespace) -> None:
    from fairseq_rpe.evaluation.longrope_search import SearchRequest, search

    for line in search(filled(SearchRequest, args)):
        print(line, flush=True)
