"""``erf``: the empirical receptive field of trained checkpoints, as table, CSV and figure."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_checkpoints, add_latex, add_width, number_list, positive_int
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.records import filled
from fairseq_rpe.utils.table import latex_text

_FIELDS, _CURVES, _QUANTISED, _LATEX = "erf.csv", "erf_curve.csv", "erf_quantised.csv", "erf.tex"
_PNG, _PDF = "erf.png", "erf.pdf"
_PAIR, _PAIR_PNG, _PAIR_PDF = (f"erf_trf.{end}" for end in ("csv", "png", "pdf"))  # the paper's Figures 5 and 6


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Empirical receptive field: the least number of nearest keys that hold more than 1 - epsilon of the attention, "
        "for each layer and head, over the last rows of long blocks of real text."
    )
    add_checkpoints(parser)
    parser.add_argument(
        "--length", type=positive_int, metavar="N", help="tokens per block (default: 4 training lengths, or what fits)"
    )
    parser.add_argument("--blocks", type=positive_int, default=64, metavar="N", help="blocks measured (default: 64)")
    parser.add_argument(
        "--rows", type=positive_int, metavar="N", help="queries measured, the last of each block (default: a quarter)"
    )
    parser.add_argument(
        "--epsilon",
        dest="epsilons",
        type=number_list,
        default="0.5,0.1,0.01",
        metavar="X,X,...",
        help="attention left out (%(default)s)",
    )
    parser.add_argument(
        "--quantised", action="store_true", help="draw, and write, the paper's curve: 50 values of epsilon, n / length"
    )
    about = "instead: how far outputs move when a query sees its nearest j keys only, beside the bound of that"
    parser.add_argument("--delta", action="store_true", help=about)
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help="blocks at a time (default: 2048 tokens)")
    parser.add_argument("--out", type=Path, default=Path("runs/erf"), metavar="DIR", help="default: %(default)s")
    add_width(parser)
    add_latex(parser)


def run(args: argparse.Namespace) -> None:
    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.evaluation import empirical_receptive_field, truncation_error
    from fairseq_rpe.evaluation.loading import find_subjects
    from fairseq_rpe.figures import receptive_fields
    from fairseq_rpe.figures.style import drawn_at, save

    subjects = find_subjects(args.checkpoints, args.rpe_module)
    request = filled(empirical_receptive_field.FieldRequest, args)
    length, rows = request.sized(max(subject.train_length for subject in subjects))
    if args.delta:
        with drawn_at(args.figure_width):
            return print(truncation_error.report(request, subjects, length, rows, args.out, args.latex))
    names = (_FIELDS, _CURVES, _QUANTISED, _LATEX, _PNG, _PDF, _PAIR, _PAIR_PNG, _PAIR_PDF)
    check_output(args.out, names)
    found = [empirical_receptive_field.measure(request, subject, length, rows) for subject in subjects]
    table = empirical_receptive_field.table(found, args.epsilons)
    print(table.markdown())
    print(f"Blocks of {length} tokens, {args.blocks} of {args.data}/{args.subset}, the last {rows} queries of each.")
    print("Cells: nearest keys, mean over queries; over heads the mean (least to most). Bias alone: as if q·k = 0.")
    atomic_write(args.out / _FIELDS, empirical_receptive_field.fields_csv(found, args.epsilons))
    atomic_write(args.out / _CURVES, empirical_receptive_field.curves_csv(found))
    if args.quantised:
        atomic_write(args.out / _QUANTISED, empirical_receptive_field.quantised_csv(found))
    atomic_write(args.out / _PAIR, empirical_receptive_field.pair_csv(found))
    if args.latex:
        atomic_write(args.out / _LATEX, latex_text([table]))
    with drawn_at(args.figure_width):
        figure = (
            receptive_fields.empirical_quantised(found)
            if args.quantised
            else receptive_fields.empirical(found, args.epsilons)
        )
        save(figure, args.out / _PNG, args.out / _PDF)
        save(receptive_fields.paired(found), args.out / _PAIR_PNG, args.out / _PAIR_PDF)
    print(f"table:  {args.out / _FIELDS}")
    print(f"figure: {args.out / _PNG}")
    print(f"ERF beside TRF, a curve for each checkpoint: {args.out / _PAIR_PNG}")
