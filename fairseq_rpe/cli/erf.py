"""``erf``: measure the empirical receptive field of checkpoints; writes a table, CSV files and figures."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_checkpoints_options, add_figure_width, add_latex, float_list, positive_int
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.records import from_attributes
from fairseq_rpe.utils.table import join_latex

_FIELDS, _CURVES, _QUANTISED, _LATEX = "erf.csv", "erf_curve.csv", "erf_quantised.csv", "erf.tex"
_PNG, _PDF = "erf.png", "erf.pdf"
_EPSILONS = [0.5, 0.1, 0.01]  # without --epsilon
_PAIR, _PAIR_PNG, _PAIR_PDF = (f"erf_trf.{end}" for end in ("csv", "png", "pdf"))  # the paper's Figures 5 and 6


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``erf``."""
    parser.description = (
        "Empirical receptive field: the least number of nearest keys that hold more than 1 - ε of the attention, for "
        "each layer and head, over the last rows of long blocks of real text."
    )
    add_checkpoints_options(parser)
    about = "tokens per block (default: 4 × the training length, or as many as fit)"
    parser.add_argument("--length", type=positive_int, metavar="N", help=about)
    parser.add_argument("--blocks", type=positive_int, default=64, metavar="N", help="blocks measured (default: 64)")
    about = "measure the last N queries of each block (default: the last quarter)"
    parser.add_argument("--rows", type=positive_int, metavar="N", help=about)
    parser.add_argument(
        "--epsilon",
        dest="epsilons",
        type=float_list,
        metavar="X,X,...",
        help="fraction ε of the attention outside the field (default: 0.5,0.1,0.01)",
    )
    about = "draw and write the paper's quantised curve instead: n / length at 50 values of ε"
    parser.add_argument("--quantised", action="store_true", help=about)
    about = "measure instead how much outputs change if a query attends only to its nearest j keys, and show the bound"
    parser.add_argument("--delta", action="store_true", help=about)
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help="blocks per batch (default: 2048 tokens)")
    out = Path("runs/erf")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="folder to write (default: %(default)s)")
    add_figure_width(parser)
    add_latex(parser)


def run(args: argparse.Namespace) -> None:
    """Run ``erf``."""
    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.evaluation import empirical_receptive_field, truncation_error
    from fairseq_rpe.evaluation.loading import label_checkpoints
    from fairseq_rpe.figures import receptive_fields
    from fairseq_rpe.figures.style import figures_at_width, save

    if args.delta and (args.quantised or args.epsilons):
        option = "--quantised" if args.quantised else "--epsilon"
        raise UserError(f"{option} does not go with --delta, which measures no receptive field: drop one of them")
    args.epsilons = args.epsilons or _EPSILONS
    subjects = label_checkpoints(args.checkpoints, args.rpe_module)
    request = from_attributes(empirical_receptive_field.ReceptiveFieldRequest, args)
    length, rows = request.resolve_block_size(max(subject.train_length for subject in subjects))
    if args.delta:
        with figures_at_width(args.figure_width):
            return print(
                truncation_error.write_truncation_report(request, subjects, length, rows, args.out, args.latex)
            )
    names = (_FIELDS, _CURVES, _QUANTISED, _LATEX, _PNG, _PDF, _PAIR, _PAIR_PNG, _PAIR_PDF)
    check_output(args.out, names)
    measure = empirical_receptive_field.measure_receptive_field
    results = [measure(request, subject, length, rows) for subject in subjects]
    table = empirical_receptive_field.table(results, args.epsilons)
    print(table.to_markdown())
    print(f"Blocks of {length} tokens, {args.blocks} of {args.data}/{args.split}, the last {rows} queries of each.")
    print("Cells: nearest keys, mean over queries; over heads the mean (least to most). Bias alone: as if q·k = 0.")
    atomic_write(args.out / _FIELDS, empirical_receptive_field.n_emp_csv(results, args.epsilons))
    atomic_write(args.out / _CURVES, empirical_receptive_field.curves_csv(results))
    if args.quantised:
        atomic_write(args.out / _QUANTISED, empirical_receptive_field.quantised_csv(results))
    atomic_write(args.out / _PAIR, empirical_receptive_field.erf_trf_csv(results))
    if args.latex:
        atomic_write(args.out / _LATEX, join_latex([table]))
    with figures_at_width(args.figure_width):
        figure = (
            receptive_fields.draw_empirical_quantised(results)
            if args.quantised
            else receptive_fields.draw_empirical(results, args.epsilons)
        )
        save(figure, args.out / _PNG, args.out / _PDF)
        save(receptive_fields.draw_empirical_and_theoretical(results), args.out / _PAIR_PNG, args.out / _PAIR_PDF)
    print(f"table:  {args.out / _FIELDS}")
    print(f"figure: {args.out / _PNG}")
    print(f"ERF and TRF of each checkpoint: {args.out / _PAIR_PNG}")
