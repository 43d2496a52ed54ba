"""``trf``: theoretical receptive fields against ε, exact from the series, as figure and table."""

import argparse
from pathlib import Path
from typing import Any

from fairseq_rpe.cli.options import add_width, positive_int
from fairseq_rpe.cli.verdict import add_source, asked
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import atomic_write

LONGEST = 1 << 20  # distances of a quantised curve
NAMES = ("trf.png", "trf.pdf", "trf.csv")


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draws TRF(ε), the number of nearest keys that hold more than a part 1 - ε of Σ exp(bias), for "
        "every head whose sum converges, and writes the numbers as CSV."
    )
    add_source(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/trf"), metavar="DIR", help="default: %(default)s")
    add_width(parser)
    parser.add_argument(
        "--quantised",
        type=positive_int,
        metavar="M",
        help="the curve of the paper's appendix instead: 50 values of ε, the sum cut off after M distances",
    )


def run(args: argparse.Namespace) -> None:
    from fairseq_rpe.data.folder import check_output

    check_output(args.out, NAMES)
    if args.quantised and args.quantised > LONGEST:
        raise UserError(f"--quantised {args.quantised}: choose at most {LONGEST} distances")
    from fairseq_rpe.analysis import verdict_tables

    rows, curves = verdict_tables.cut_off(asked(args), args.quantised) if args.quantised else exact(args)
    if not any(curves.values()):
        raise UserError(
            "nothing to draw: none of these sums converges, so there is no receptive field (try --quantised M)"
        )

    from fairseq_rpe.figures.receptive_fields import theoretical
    from fairseq_rpe.figures.style import drawn_at, save
    from fairseq_rpe.utils.table import csv_text

    with drawn_at(args.figure_width):
        save(theoretical(curves, args.quantised), *(args.out / name for name in NAMES[:2]))
    atomic_write(args.out / "trf.csv", csv_text(rows[0], rows[1:]))
    print(f"table:  {args.out / 'trf.csv'}\nfigure: {args.out / 'trf.png'}, also as .pdf")


def exact(args: argparse.Namespace) -> tuple[list[list[Any]], dict[str, Any]]:
    """Table and curves of TRF as Eq. 22 defines it; says what has none."""
    from fairseq_rpe.analysis import verdict_tables

    sources = {title: verdict_tables.judge(source) for title, source in asked(args).items()}
    found = {title: verdict_tables.fields(rows) for title, rows in sources.items()}
    for title, one in found.items():
        if one.without:
            heads = f"{one.without} of {len(sources[title])} heads"
            print(f"{title}: no TRF for {heads}: no finite sum is known (fairseq-rpe verdict)")
        if one.cut:
            print(f"{title}: fields beyond 10^{verdict_tables.DRAWN} keys are in the table only")
    return verdict_tables.field_cells(sources), {title: one.curves for title, one in found.items()}
