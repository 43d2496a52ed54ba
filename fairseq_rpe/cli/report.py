"""``report``: write the results of sweeps as CSV, Markdown table, figures and HTML page."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_figure_width, add_latex, add_rpe_module, positive_float
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.output_checks import check_output_file, check_output_folder


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``report``."""
    parser.description = "Write CSV, Markdown table, figures and a self-contained HTML page into each sweep's folder."
    parser.add_argument("sweeps", type=Path, nargs="+", metavar="DIR", help="the --out folder of a sweep")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write one HTML page with all sweeps")
    parser.add_argument(
        "--delta", type=positive_float, metavar="X", help="relative δ of Definition 0.1 (default: 0.05)"
    )
    add_figure_width(parser)
    add_latex(parser)
    add_rpe_module(parser)


def run(args: argparse.Namespace) -> None:
    """Run ``report``."""
    from fairseq_rpe.reports import page, perplexity_vs_retrieval, report_files
    from fairseq_rpe.reports.write import check_delta, write_report
    from fairseq_rpe.sweeps.sweep_record import SweepFolder

    if args.out is not None:
        check_output_file("--out", args.out)
        page.check_page_target("--out", args.out)
    if len(set(args.sweeps)) < len(args.sweeps):
        raise UserError("the same sweep is named twice: leave one out")
    folders = [SweepFolder(path) for path in args.sweeps]
    for folder in folders:
        report = report_files.ReportFiles.from_sweep(folder, check_delta(folder, args.delta))
        files = [*report.files, *([report.latex] if args.latex else [])]
        check_output_folder(folder.path, flag="sweep")
        if args.out is not None and args.out.resolve() in [path.resolve() for path in files]:
            raise UserError(f"--out {args.out} is a file of the report on {folder.path}: name another one")
    sections = []
    for folder in folders:
        sections.append(write_report(folder, args.delta, args.figure_width, args.latex))
        print(sections[-1].text)
    for joint in perplexity_vs_retrieval.comparison_sections(folders):
        sections.append(joint)
        print(joint.text)
    if args.out is not None:
        page.write_page(sections, args.out)
        print(f"page on all: {args.out}")
