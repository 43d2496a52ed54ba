"""``longrope-search``: the factors with which a trained rope reads longer text best."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import positive_int, seed
from fairseq_rpe.core.records import filled


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = "Ends with the spec to use; candidates that are already in --out are not measured again."
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="trained with --rpe rope")
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder")
    parser.add_argument("--tokens", type=positive_int, required=True, metavar="N", help="length that is to be read")
    parser.add_argument("--subset", default="valid", help="split that judges (default: %(default)s)")
    sizes = {"samples": (5, "blocks of N tokens that judge"), "population": (64, "candidates"), "iterations": (40, "")}
    for name, (usual, about) in sizes.items():
        parser.add_argument(f"--{name}", type=positive_int, default=usual, help=f"{about} (default: {usual})".strip())
    parser.add_argument("--seed", type=seed, default=1, help="of what is drawn (default: 1)")
    parser.add_argument("--attention", choices=("sqrt", "yarn", "none"), default="sqrt", help="longrope's option")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON-lines file that keeps what is measured")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.set_defaults(log=None)


def run(args: argparse.Namespace) -> None:
    from fairseq_rpe.evaluation.longrope_search import SearchRequest, search

    for line in search(filled(SearchRequest, args)):
        print(line, flush=True)
