"""``list``, ``bias`` and ``user-dir``: list encodings, print a bias, print the folder for fairseq."""

import argparse
import csv
import sys

from fairseq_rpe.cli.options import add_rpe_module, distances, heads, width
from fairseq_rpe.utils.files import PACKAGE_DIR


def add_list_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``list``."""
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--positions", action="store_true", help="list the position transforms instead")
    kinds.add_argument("--algorithms", action="store_true", help="list the algorithmic tasks instead")
    kinds.add_argument("--backends", action="store_true", help="list the attention backends that support each encoding")
    parser.add_argument("--names", action="store_true", help="print only the names, one per line")
    add_rpe_module(parser)


def add_bias_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bias``."""
    parser.add_argument("spec", metavar="SPEC", help="encoding, e.g. alibi or type1:variant=paper")
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

    if args.backends:
        from fairseq_rpe.analysis.backend_support import support_matrix

        table, reasons = support_matrix(encodings.names())
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
    """Run ``bias``."""
    from fairseq_rpe import encodings

    rows = encodings.build(args.spec, heads=args.heads, width=args.width).bias_profile(args.length).T.tolist()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["distance", *(f"head{h + 1}" for h in range(args.heads))])
    # + 0.0 writes -0.0 as 0.0
    writer.writerows([distance, *(repr(v + 0.0) for v in row)] for distance, row in enumerate(rows))


def run_user_dir(args: argparse.Namespace) -> None:
    """Run ``user-dir``."""
    print(PACKAGE_DIR)
