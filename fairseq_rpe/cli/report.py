"""``report``: what sweeps found, as CSV, Markdown table, figure and HTML page."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_latex, add_rpe_module, add_width, positive_float
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import check_file, check_folder


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes CSV, Markdown table, figure and a self-contained HTML page into each sweep's folder."
    parser.add_argument("sweeps", type=Path, nargs="+", metavar="DIR", help="the --out folder of a sweep")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also one HTML page on all of them, one after another")
    parser.add_argument("--delta", type=positive_float, metavar="X", help="δ of Definition 0.1, relative (0.05)")
    add_width(parser)
    add_latex(parser)
    add_rpe_module(parser)


def run(args: argparse.Namespace) -> None:
    from fairseq_rpe.reports import page, perplexity_vs_retrieval, report_files
    from fairseq_rpe.reports.write import check, write
    from fairseq_rpe.sweeps.sweep_record import SweepFolder

    if args.out is not None:
        check_file("--out", args.out)
        page.check_target("--out", args.out)
    if len(set(args.sweeps)) < len(args.sweeps):
        raise UserError("a sweep is named twice: leave one out")
    folders = [SweepFolder(path) for path in args.sweeps]
    for folder in folders:
        files = report_files.Places(folder, check(folder, args.delta)).files
        check_folder(folder.path, flag="sweep")
        if args.out is not None and args.out.resolve() in [path.resolve() for path in files]:
            raise UserError(f"--out {args.out} is a file of the report on {folder.path}: name another one")
    sections = []
    for folder in folders:
        sections.append(write(folder, args.delta, args.figure_width, args.latex))
        print(sections[-1].text)
    for joint in perplexity_vs_retrieval.sections(folders):
        sections.append(joint)
        print(joint.text)
    if args.out is not None:
        page.write(sections, args.out)
        print(f"page on all: {args.out}")
