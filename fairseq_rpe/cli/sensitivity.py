"""``sensitivity``: the analysis figures of index warping, and its Table 2 computed again."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_latex, add_width, positive_float, positive_int
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.records import filled
from fairseq_rpe.utils.table import Cell, Row, Table, csv_text, latex_text, number

LONGEST, WIDEST, BASES = 65_536, 4096, (1.01, 1e12)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        'Draws Figures 1, 2, 4, A and B of "Improving Length Generalization via Position Index Warping", further '
        "views of its sensitivity, warps and total differences, and prints its Table 2 computed again."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/sensitivity"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--train-length",
        type=positive_int,
        default=512,
        metavar="N",
        help="tokens, in sensitivity-*, warped-positions (512); all else has the paper's lengths",
    )
    parser.add_argument(
        "--head-width",
        dest="width",
        type=positive_int,
        metavar="N",
        help="width of RoPE's heads, an even number (default: a wide head)",
    )
    parser.add_argument("--base", type=positive_float, default=10_000.0, help="base of RoPE's angles (10000)")
    parser.add_argument(
        "--exponential",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take differences of exp(raw attention), as the paper's figures do, or of raw attention, as its equations",
    )
    add_width(parser, other="--head-width")
    add_latex(parser)


def run(args: argparse.Namespace) -> None:
    if not 2 <= args.train_length <= LONGEST:
        raise UserError(f"--train-length {args.train_length}: choose 2 to {LONGEST} tokens")
    if args.width is not None and (args.width % 2 or args.width > WIDEST):
        raise UserError(f"--head-width {args.width}: choose an even number from 2 to {WIDEST}, or leave it out")
    if not BASES[0] <= args.base <= BASES[1]:
        raise UserError(f"--base {args.base:g}: choose a number from {BASES[0]:g} to {BASES[1]:g}")

    from fairseq_rpe.analysis import index_warping
    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.figures import warping
    from fairseq_rpe.figures.style import drawn_at, save

    asked = filled(index_warping.Setting, args)
    folder, table, latex = args.out, args.out / "sensitivity.csv", args.out / "sensitivity.tex"
    files = {stem: [folder / f"{stem}.{ending}" for ending in ("png", "pdf")] for stem in warping.FIGURES}
    check_output(folder, [path.name for paths in (*files.values(), [table, latex]) for path in paths])
    found = index_warping.table(asked)
    with drawn_at(args.figure_width):
        figures = {stem: draw(asked, compute(asked)) for stem, (compute, draw) in warping.FIGURES.items()}

    columns = [f"{times}x {what}" for times in index_warping.TIMES for what in ("computed", "published")]
    lines = [
        Row(str(one.train_length), [Cell(skew), *(number(value, ".3f") for value in values)])
        for one in found
        for skew, values in one.beside().items()
    ]
    caption = f"Total difference of sensitivity (Eq. 9), computed and published. {asked}."
    totals = Table(caption, ["training length", "skew", *columns], lines)
    print(totals.markdown())
    print(f"Computed: {asked}.")
    print("The paper gives no head width, so the agreement to look for is a trend, not the digits:")
    for one in found:
        trend = index_warping.trend({skew: sums.tolist() for skew, sums in one.sums.items()})
        lower, best = ("yes" if value else "no" for value in trend)
        said = f"both skews lower the sum: {lower}; beta best at 4x: {best}"
        print(f"  length {one.train_length} (c = {one.reach}): {said}")
    with drawn_at(args.figure_width):
        for stem, figure in figures.items():
            save(figure, *files[stem])
    if args.latex:
        atomic_write(latex, latex_text([totals]))
    head, *cells = index_warping.cells(found, asked)
    atomic_write(table, csv_text(head, cells))
    print(f"\ntable:   {table}")
    print(f"figures: {', '.join(str(paths[0]) for paths in files.values())}, each also as .pdf")
