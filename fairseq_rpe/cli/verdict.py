"""``verdict``: does Σ exp(bias) converge, why, to what, and how far a head then sees."""

import argparse
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from fairseq_rpe.cli.options import add_rpe_module, heads, width
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import atomic_write, check_replaced
from fairseq_rpe.utils.table import csv_text, latex_text


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "For each head: whether Σ exp(bias(n)) over distances n = 0, 1, … converges, by which test, its "
        "limit B and TRF(ε), the number of nearest keys that hold more than a part 1 - ε of B. Nothing is guessed: "
        "what cannot be proved is called undecided."
    )
    add_source(parser)
    parser.add_argument(
        "--epsilon",
        type=epsilon,
        action="append",
        metavar="X",
        help="ε of TRF, repeatable (default 0.5 0.1 0.01 0.001)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write one row per head, layer and ε as well")
    about = "write the tables as LaTeX (package booktabs) as well"
    parser.add_argument("--latex", type=Path, metavar="FILE", help=about)


def add_source(parser: argparse.ArgumentParser) -> None:
    """The options that say what is judged."""
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="encoding, e.g. alibi or type1:form=paper")
    about = "log-bias as a formula in n, e.g. --formula='-2*log(n+1)', repeatable"
    parser.add_argument("--formula", metavar="EXPR", action="append", help=about)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="judge what a trained model has learned")
    parser.add_argument("--heads", type=heads, metavar="H", help="heads of a SPEC (default 8)")
    parser.add_argument("--head-width", type=width, metavar="D", help="width of a head of a SPEC (default 64)")
    add_rpe_module(parser)


def epsilon(text: str) -> Fraction:
    """An exact number, e.g. 0.1, 1e-3 or 1/8; its range is checked later."""
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


def run(args: argparse.Namespace) -> None:
    from fairseq_rpe.analysis import verdict_tables
    from fairseq_rpe.analysis.empirical_receptive_field import check_epsilons

    epsilons = list(dict.fromkeys(args.epsilon or verdict_tables.EPSILONS))
    check_epsilons(epsilons, "--epsilon")
    for flag, path, suffix in (("--csv", args.csv, ".csv"), ("--latex", args.latex, ".tex")):
        if path:
            check_replaced(flag, path, suffix)
    sources = {title: verdict_tables.judge(source) for title, source in asked(args).items()}
    print("\n\n".join(verdict_tables.table(title, rows, epsilons) for title, rows in sources.items()))
    print(
        "\nf = ln b_n is the log-bias at distance n, B = Σ_{n>=0} b_n, TRF(ε) = inf{ j : Σ_{t<j} b_t > B(1-ε) }.\n"
        "Convergence is sufficient for length extrapolation, not necessary (arXiv 2307.10156, Theorems 0.3, 0.4)."
    )
    if args.csv:
        head, *rows = verdict_tables.verdict_cells(sources, epsilons)
        atomic_write(args.csv, csv_text(head, rows))
        print(f"table: {args.csv}")
    if args.latex:
        tables = [verdict_tables.as_table(title, rows, epsilons) for title, rows in sources.items()]
        atomic_write(args.latex, latex_text(tables))
        print(f"LaTeX: {args.latex}")


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """The sources of a judgement by their names: formulas, or encodings, one or one per layer of a checkpoint."""
    if sum((bool(args.specs), args.formula is not None, args.checkpoint is not None)) != 1:
        raise UserError("give either SPEC…, or --formula, or --checkpoint")
    if not args.specs and (args.heads or args.head_width):
        flag = "--heads" if args.heads else "--head-width"
        raise UserError(f"{flag} applies to a SPEC: a formula has one head, a checkpoint its own; leave it out")
    if args.formula is not None:
        refuse_repeats(args.formula)
        return {formula: formula for formula in args.formula}
    from fairseq_rpe import encodings
    from fairseq_rpe.analysis.convergence import LENGTH
    from fairseq_rpe.runs import checkpoints

    if args.checkpoint is not None:
        found = checkpoints.load(args.checkpoint)
        learned, spec = found.learned(), found.encoding
        if not (learned[0].adds_bias or learned[0].is_content_dependent or learned[0].dependence):
            raise UserError(
                f"{args.checkpoint} was trained with '{spec}', which adds no bias: see fairseq-rpe verdict {spec}"
            )
        return {f"{args.checkpoint} ({spec})": learned}
    specs = [encodings.normalise(spec) for spec in args.specs]
    refuse_repeats(specs)
    number = args.heads or 8
    return {spec: [encodings.build(spec, number, number * (args.head_width or 64), LENGTH)] for spec in specs}


def refuse_repeats(sources: Sequence[str]) -> None:
    """Raise UserError if a formula or encoding occurs more than once."""
    for source, count in Counter(sources).items():
        if count > 1:
            raise UserError(f"'{source}' is given twice: leave one out")
