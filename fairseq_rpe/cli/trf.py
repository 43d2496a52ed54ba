"""``trf``: draw and tabulate theoretical receptive fields against ε, exact from the series."""

import argparse
from pathlib import Path
from typing import Any

from fairseq_rpe.cli.options import add_figure_width, positive_int
from fairseq_rpe.cli.verdict import add_source_options, select_sources
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import atomic_write

LONGEST = 1 << 20  # distances of a quantised curve
NAMES = ("trf.png", "trf.pdf", "trf.csv")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trf``."""
    parser.description = (
        "Draw TRF(ε), the number of nearest keys that hold more than a fraction 1 - ε of Σ exp(bias), for every head "
        "whose sum converges, and write the numbers as CSV."
    )
    add_source_options(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/trf"), metavar="DIR", help="folder to write (default: %(default)s)"
    )
    add_figure_width(parser)
    parser.add_argument(
        "--quantised",
        type=positive_int,
        metavar="M",
        help="draw instead the curve of the paper's appendix, at 50 values of ε, with sums truncated at M distances",
    )


def run(args: argparse.Namespace) -> None:
    """Run ``trf``."""
    from fairseq_rpe.data.folder import check_output

    check_output(args.out, NAMES)
    if args.quantised and args.quantised > LONGEST:
        raise UserError(f"--quantised {args.quantised}: choose at most {LONGEST} distances")
    from fairseq_rpe.analysis import verdict_tables

    rows, curves = (
        verdict_tables.quantised_field(select_sources(args), args.quantised) if args.quantised else exact_fields(args)
    )
    if not any(curves.values()):
        raise UserError(
            "nothing to draw: none of these sums converges, so there is no receptive field; try --quantised M"
        )

    from fairseq_rpe.figures.receptive_fields import draw_theoretical
    from fairseq_rpe.figures.style import figures_at_width, save
    from fairseq_rpe.utils.table import csv_text

    with figures_at_width(args.figure_width):
        save(draw_theoretical(curves, args.quantised), *(args.out / name for name in NAMES[:2]))
    atomic_write(args.out / "trf.csv", csv_text(rows[0], rows[1:]))
    print(f"table:  {args.out / 'trf.csv'}\nfigure: {args.out / 'trf.png'}, also as .pdf")


def exact_fields(args: argparse.Namespace) -> tuple[list[list[Any]], dict[str, Any]]:
    """Return table and curves of TRF as Eq. 22 defines it; print which heads have none."""
    from fairseq_rpe.analysis import verdict_tables

    selected = select_sources(args)
    sources = {title: verdict_tables.head_verdicts(source) for title, source in selected.items()}
    fields = {title: verdict_tables.field_curves(rows) for title, rows in sources.items()}
    for title, field in fields.items():
        if field.without:
            heads = f"{field.without} of {len(sources[title])} heads"
            print(f"{title}: no TRF for {heads}: no finite sum is known (fairseq-rpe verdict)")
        for line in verdict_tables.stack_lines(selected[title], sources[title]):
            print(f"{title}: {line}")
        if field.cut:
            print(f"{title}: fields beyond 10^{verdict_tables.MAX_LOG10_DRAWN} keys are in the table only")
    return verdict_tables.field_cells(sources), {title: field.curves for title, field in fields.items()}
