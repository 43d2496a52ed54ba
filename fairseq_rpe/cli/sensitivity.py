"""``sensitivity``: reproduce the analysis figures and Table 2 of the index-warping paper."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_figure_width, add_latex, positive_float, positive_int
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.records import from_attributes
from fairseq_rpe.utils.table import Cell, Table, TableRow, csv_text, join_latex, number_cell

LONGEST, WIDEST, BASES = 65_536, 4096, (1.01, 1e12)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``sensitivity``."""
    parser.description = (
        'Draw Figures 1, 2, 4, A and B of "Improving Length Generalization via Position Index Warping" and further '
        "figures of its sensitivity, warps and total differences, and print a recomputed Table 2."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/sensitivity"),
        metavar="DIR",
        help="folder to write (default: %(default)s)",
    )
    parser.add_argument(
        "--train-length",
        type=positive_int,
        default=512,
        metavar="N",
        help="training length of sensitivity-* and warped-positions (default: 512); the other figures have the paper's",
    )
    parser.add_argument(
        "--head-width",
        dest="width",
        type=positive_int,
        metavar="N",
        help="width of RoPE's heads, an even number (default: the limit of wide heads)",
    )
    parser.add_argument("--base", type=positive_float, default=10_000.0, help="base of RoPE's angles (default: 10000)")
    parser.add_argument(
        "--exponential",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="differences of exp(raw attention), as in the paper's figures, or of raw attention, as in its equations",
    )
    add_figure_width(parser, other="--head-width")
    add_latex(parser)


def run(args: argparse.Namespace) -> None:
    """Run ``sensitivity``."""
    if not 2 <= args.train_length <= LONGEST:
        raise UserError(f"--train-length {args.train_length}: choose 2 to {LONGEST} tokens")
    if args.width is not None and (args.width % 2 or args.width > WIDEST):
        raise UserError(f"--head-width {args.width}: choose an even number from 2 to {WIDEST}, or leave it out")
    if not BASES[0] <= args.base <= BASES[1]:
        raise UserError(f"--base {args.base:g}: choose a number from {BASES[0]:g} to {BASES[1]:g}")

    from fairseq_rpe.analysis import index_warping
    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.figures import warping
    from fairseq_rpe.figures.style import figures_at_width, save

    setting = from_attributes(index_warping.WarpSetting, args)
    folder, table, latex = args.out, args.out / "sensitivity.csv", args.out / "sensitivity.tex"
    files = {stem: [folder / f"{stem}.{ending}" for ending in ("png", "pdf")] for stem in warping.FIGURES}
    check_output(folder, [path.name for paths in (*files.values(), [table, latex]) for path in paths])
    results = index_warping.table_2(setting)
    with figures_at_width(args.figure_width):
        figures = {stem: draw(setting, compute(setting)) for stem, (compute, draw) in warping.FIGURES.items()}

    columns = [f"{times}x {what}" for times in index_warping.TIMES for what in ("computed", "published")]
    lines = [
        TableRow(str(result.train_length), [Cell(skew), *(number_cell(value, ".3f") for value in values)])
        for result in results
        for skew, values in result.interleave_published().items()
    ]
    caption = f"Total difference of sensitivity (Eq. 9), computed and published. {setting}."
    totals = Table(caption, ["training length", "skew", *columns], lines)
    print(totals.to_markdown())
    print(f"Computed: {setting}.")
    print("The paper gives no head width, so compare the trend, not the digits:")
    for result in results:
        trend = index_warping.published_trend({skew: sums.tolist() for skew, sums in result.sums.items()})
        lower, best = ("yes" if value else "no" for value in trend)
        summary = f"both skews lower the sum: {lower}; beta best at 4x: {best}"
        print(f"  length {result.train_length} (c = {result.tail_length}): {summary}")
    with figures_at_width(args.figure_width):
        for stem, figure in figures.items():
            save(figure, *files[stem])
    if args.latex:
        atomic_write(latex, join_latex([totals]))
    head, *cells = index_warping.table_cells(results, setting)
    atomic_write(table, csv_text(head, cells))
    print(f"\ntable:   {table}")
    print(f"figures: {', '.join(str(paths[0]) for paths in files.values())}, each also as .pdf")
