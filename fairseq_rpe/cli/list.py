"""``list``, ``bias`` and ``user-dir``: list encodings, print a bias, print the folder for fairseq."""

import argparse
import csv
import sys

from fairseq_rpe.cli.options import add_rpe_module, distances, heads, width
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import PACKAGE_DIR


def add_list_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``list``."""
    about = "with --backends: encodings or patterns of layers (default: all encodings)"
    parser.add_argument("specs", nargs="*", metavar="SPEC", help=about)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--positions", action="store_true", help="list the position transforms instead")
    kinds.add_argument("--algorithms", action="store_true", help="list the algorithmic tasks instead")
    kinds.add_argument("--backends", action="store_true", help="list the attention backends that support each encoding")
    parser.add_argument("--names", action="store_true", help="print only the names, one per line")
    add_rpe_module(parser)


def add_bias_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bias``."""
    about = "encoding, e.g. alibi or type1:variant=paper, or a pattern of layers, e.g. '2*alibi|nope'"
    parser.add_argument("spec", metavar="SPEC", help=about)
    parser.add_argument("--heads", type=heads, default=4, help="attention heads (default: 4)")
    parser.add_argument("--width", type=width, default=128, help="model width (default: 128)")
    parser.add_argument("--length", type=distances, default=64, help="number of distances (default: 64)")
    add_rpe_module(parser)


def add_user_dir_options(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def run_list(args: argparse.Namespace) -> None:
    """Run ``list``."""
    from fairseq_rpe import algorithms, encodings, positions
    from fairseq_rpe.core.spec import format_value

    if args.specs and not args.backends:
        raise UserError("SPEC belongs to --backends: give --backends too, or leave it out")
    if args.backends and args.names:
        raise UserError("--names does not go with --backends: drop one of them")
    if args.backends:
        from fairseq_rpe.analysis.backend_support import support_matrix

        table, reasons = support_matrix([encodings.normalise(spec) for spec in args.specs] or encodings.names())
        print(table.to_markdown(), *reasons, sep="\n")
        return
    for entry in (positions if args.positions else algorithms if args.algorithms else encodings).describe():
        if args.names:
            print(entry.name)
            continue
        print(f"{entry.name}: {entry.summary}")
        print(f"  formula: {entry.formula}")
        for option in entry.options:
            choices = f" ({'|'.join(map(format_value, option.choices))})" if option.choices else ""
            print(f"  {option.key}={format_value(option.default)}{choices}: {option.help}")
        print(f"  paper: {entry.paper}\n" if entry.paper else "")


def run_bias(args: argparse.Namespace) -> None:
    """Run ``bias``; a pattern of layers has the rows of each of its encodings."""
    from fairseq_rpe.core.layer_pattern import is_pattern
    from fairseq_rpe.encodings.model import build_distinct

    built = build_distinct(args.spec, heads=args.heads, width=args.width)
    has_pattern = is_pattern(args.spec)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = ["distance", *(f"head{h + 1}" for h in range(args.heads))]
    writer.writerow(["encoding", *columns] if has_pattern else columns)
    for spec, encoding in built.items():
        rows = encoding.bias_profile(args.length).T.tolist()
        for distance, row in enumerate(rows):
            cells = [distance, *(repr(v + 0.0) for v in row)]  # + 0.0 writes -0.0 as 0.0
            writer.writerow([spec, *cells] if has_pattern else cells)


def run_user_dir(args: argparse.Namespace) -> None:
    """Run ``user-dir``."""
    print(PACKAGE_DIR)
