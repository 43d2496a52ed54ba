"""``longrope-search``: search the LongRoPE factors with the lowest perplexity on longer text."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_device, positive_int, seed
from fairseq_rpe.utils.records import from_attributes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``longrope-search``."""
    parser.description = (
        "Search LongRoPE factors from 1 to 1 + N / training length with an evolutionary algorithm. Results in --out "
        "are not measured again."
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint trained with --rpe rope")
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder")
    parser.add_argument("--tokens", type=positive_int, required=True, metavar="N", help="length to extend to")
    parser.add_argument("--split", default="valid", help="split that ranks the candidates (default: %(default)s)")
    parser.add_argument("--samples", type=positive_int, default=5, metavar="K", help="blocks of the split (default: 5)")
    parser.add_argument(
        "--population", type=positive_int, default=64, metavar="K", help="candidates per round (default: 64)"
    )
    parser.add_argument("--iterations", type=positive_int, default=40, metavar="K", help="rounds (default: 40)")
    parser.add_argument("--seed", type=seed, default=1, help="seed of the search (default: 1)")
    parser.add_argument(
        "--attention",
        choices=("sqrt", "yarn", "none"),
        default="sqrt",
        help="option attention of longrope (default: sqrt)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON-lines file of the measurements")
    add_device(parser)
    parser.set_defaults(log=None)


def run(args: argparse.Namespace) -> None:
    """Run ``longrope-search``."""
    from fairseq_rpe.evaluation.longrope_search import SearchRequest, search_factors

    for line in search_factors(from_attributes(SearchRequest, args)):
        print(line, flush=True)
