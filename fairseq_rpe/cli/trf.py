"""``trf``: theoretical receptive fields against ε, exact from the series, as figure and table."""

from __future__ import annotations

import argparse
import csv
import io
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.cli.options import positive_int
from fairseq_rpe.cli.verdict import Rows, add_source, judged, place_cells, shown, trf_cells, weights_of
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import atomic_write, check_folder, make_folder, replace_with

if TYPE_CHECKING:
    from fairseq_rpe.analysis.sensitivity_figures import Line

# six a decade, as decimals of two digits, so that each is an exact number
EPSILONS = tuple(Fraction(f"{10 ** (-k / 6):.2g}") for k in range(1, 19))
_DRAWN = 15  # common logarithm of the longest field in the figure
LONGEST = 1 << 20  # distances of a quantised curve
NAMES = ("trf.png", "trf.pdf", "trf.csv")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "trf",
        help="draw receptive fields of encodings against ε",
        description="Draws TRF(ε), the number of nearest keys that hold more than a part 1 - ε of Σ exp(bias), for "
        "every head whose sum converges, and writes the numbers as CSV.",
        allow_abbrev=False,
    )
    add_source(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/trf"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--quantised",
        type=positive_int,
        metavar="M",
        help="the curve of the paper's appendix instead: 50 values of ε, the sum cut off after M distances",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_folder(args.out, list(NAMES))
    head, rows, lines = quantised(args) if args.quantised else exact(judged(args))
    if not lines:
        raise UserError("nothing to draw: no sum of these converges, so none has a receptive field (try --quantised M)")

    from fairseq_rpe.analysis import sensitivity_figures, trf_figures

    figure = trf_figures.fields(lines, args.quantised)
    make_folder(args.out)
    for name in NAMES[:2]:
        replace_with(args.out / name, lambda target: sensitivity_figures.save(figure, target))
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([head, *rows])
    atomic_write(args.out / "trf.csv", out.getvalue())
    print(f"table:  {args.out / 'trf.csv'}\nfigure: {args.out / 'trf.png'}, also as .pdf")
    return 0


def exact(sources: dict[str, Rows]) -> tuple[list[str], list[list[Any]], list[Line]]:
    """Head and rows of the table, and the curves, of TRF as Eq. 22 defines it; says what has none."""
    rows, lines = [], []
    for title, heads in sources.items():
        fields = {}
        for place, head in heads:
            found = [head.trf(e) for e in EPSILONS]
            if found[0] is None:
                continue
            rows += [[title, *place_cells(place), shown(e), *trf_cells(head, e)] for e in EPSILONS]
            # a bracket is drawn at its lower end
            fields[tuple(f.logarithms[0] for f in found)] = None
        missing = sum(head.total is None for _, head in heads)
        if missing:
            print(f"{title}: no TRF for {missing} of {len(heads)} heads: no finite sum is known (fairseq-rpe verdict)")
        if any(logarithms[-1] > _DRAWN for logarithms in fields):
            print(f"{title}: fields beyond 10^{_DRAWN} keys are in the table only")
        curves = [[(float(e), 10**y) for e, y in zip(EPSILONS, ys, strict=True) if y <= _DRAWN] for ys in fields]
        lines += _lines(title, [curve for curve in curves if curve], list(sources))
    return ["source", "layer", "head", "epsilon", "trf", "trf_low", "trf_high"], rows, lines


def quantised(args: argparse.Namespace) -> tuple[list[str], list[list[Any]], list[Line]]:
    """The same of the appendix's curve, which exists for every sum because it is cut off."""
    if args.quantised > LONGEST:
        raise UserError(f"--quantised {args.quantised}: choose at most {LONGEST} distances")
    import torch

    from fairseq_rpe.analysis.receptive_field import quantised as steps

    rows, lines = [], []
    sources = weights_of(args, args.quantised)
    for title, heads in sources.items():
        fields = {}
        for place, weights in heads:
            epsilons, part = steps(torch.tensor(weights, dtype=torch.float64))
            curve = tuple(zip(epsilons.tolist(), part.tolist(), strict=True))
            rows += [[title, *place_cells(place), f"{e:.6g}", round(y * args.quantised), y] for e, y in curve]
            fields[curve] = None
        lines += _lines(title, [list(curve) for curve in fields], list(sources))
    return ["source", "layer", "head", "epsilon", "index", "trf"], rows, lines


def _lines(title: str, curves: list[list[tuple[float, float]]], titles: list[str]) -> list[Line]:
    """The heads of one source in its look: the first one thick, the others thin."""
    import torch

    from fairseq_rpe.analysis.sensitivity_figures import Line
    from fairseq_rpe.analysis.style import looks

    look = looks(titles)[title]
    label = title if len(curves) == 1 else f"{title}, {len(curves)} heads (thick: the first)"
    lines = []
    for i, curve in enumerate(curves):
        x, y = torch.tensor(curve, dtype=torch.float64).T
        name, width, alpha = ("", 0.9, 0.6) if i else (label, 1.9, 1.0)
        lines.append(Line(x, y, name, look.colour, look.dashes, width, alpha))
    return lines
