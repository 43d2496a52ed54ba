"""``verdict``: decide whether Σ exp(bias) converges, with the test, the limit and the receptive field."""

import argparse
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from fairseq_rpe.cli.options import add_rpe_module, heads, layers, width
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.output_checks import check_overwrite
from fairseq_rpe.utils.table import csv_text, join_latex


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``verdict``."""
    parser.description = (
        "Decide for each head whether Σ exp(bias(n)) over distances n = 0, 1, … converges. The command prints the "
        "verdict, the test that decides, the limit B and TRF(ε), the number of nearest keys that hold more than a "
        "fraction 1 - ε of B. Every verdict is proved; without a proof the verdict is 'undecided'."
    )
    add_source_options(parser)
    parser.add_argument(
        "--epsilon",
        type=epsilon,
        action="append",
        metavar="X",
        help="ε of TRF (may be repeated; default: 0.5 0.1 0.01 0.001)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write one row per head, layer and ε")
    about = "also write the tables as LaTeX (package booktabs)"
    parser.add_argument("--latex", type=Path, metavar="FILE", help=about)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name encodings, formulas or a checkpoint."""
    about = "encoding, e.g. alibi or type1:variant=paper, or a pattern of layers, e.g. '2*alibi|nope'"
    parser.add_argument("specs", nargs="*", metavar="SPEC", help=about)
    about = "log-bias as a formula in n, e.g. --formula='-2*log(n+1)' (may be repeated)"
    parser.add_argument("--formula", metavar="EXPR", action="append", help=about)
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="analyse the bias that a trained model has learned"
    )
    parser.add_argument("--heads", type=heads, metavar="H", help="heads of a SPEC (default: 8)")
    parser.add_argument("--head-width", type=width, metavar="D", help="width of a head of a SPEC (default: 64)")
    about = "layers of the model with a SPEC (default: 1, or those of a pattern up to its first repetition)"
    parser.add_argument("--layers", type=layers, metavar="N", help=about)
    add_rpe_module(parser)


def epsilon(text: str) -> Fraction:
    """Parse an exact number, e.g. 0.1, 1e-3 or 1/8; its range is checked later."""
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


def run(args: argparse.Namespace) -> None:
    """Run ``verdict``."""
    from fairseq_rpe.analysis import verdict_tables
    from fairseq_rpe.analysis.empirical_receptive_field import check_epsilons

    epsilons = list(dict.fromkeys(args.epsilon or verdict_tables.EPSILONS))
    check_epsilons(epsilons, "--epsilon")
    for flag, path, suffix in (("--csv", args.csv, ".csv"), ("--latex", args.latex, ".tex")):
        if path:
            check_overwrite(flag, path, suffix)
    selected = select_sources(args)
    sources = {title: verdict_tables.head_verdicts(source) for title, source in selected.items()}
    texts = []
    for title, rows in sources.items():
        table = verdict_tables.format_table(title, rows, epsilons)
        texts.append("\n".join([table, *verdict_tables.stack_lines(selected[title], rows)]))
    print("\n\n".join(texts))
    print(
        "\nf = ln b_n is the log-bias at distance n, B = Σ_{n>=0} b_n, TRF(ε) = inf{ j : Σ_{t<j} b_t > B(1-ε) }.\n"
        "Convergence is sufficient for length extrapolation, not necessary (arXiv 2307.10156, Theorems 0.3, 0.4)."
    )
    if args.csv:
        head, *rows = verdict_tables.verdict_cells(sources, epsilons)
        atomic_write(args.csv, csv_text(head, rows))
        print(f"table: {args.csv}")
    if args.latex:
        tables = [verdict_tables.verdict_table(title, rows, epsilons) for title, rows in sources.items()]
        atomic_write(args.latex, join_latex(tables))
        print(f"LaTeX: {args.latex}")


def select_sources(args: argparse.Namespace) -> dict[str, Any]:
    """Return formulas, or the encodings of a model's layers, by the title of their table."""
    if sum((bool(args.specs), args.formula is not None, args.checkpoint is not None)) != 1:
        raise UserError("give either SPEC…, or --formula, or --checkpoint")
    if not args.specs and (args.heads or args.head_width or args.layers):
        flag = "--heads" if args.heads else "--head-width" if args.head_width else "--layers"
        raise UserError(f"{flag} applies to a SPEC: a formula has one head, a checkpoint its own; leave it out")
    if args.formula is not None:
        refuse_duplicates(args.formula)
        return {formula: formula for formula in args.formula}
    from fairseq_rpe import encodings
    from fairseq_rpe.analysis.convergence import LENGTH
    from fairseq_rpe.core.layer_pattern import parse_pattern
    from fairseq_rpe.encodings.model import build_stack
    from fairseq_rpe.runs import checkpoints

    if args.checkpoint is not None:
        checkpoint = checkpoints.load(args.checkpoint)
        learned, spec = checkpoint.load_encodings(), checkpoint.encoding
        if not any(_has_verdict(encoding) for encoding in learned):
            raise UserError(
                f"{args.checkpoint} was trained with '{spec}', which adds no bias: see fairseq-rpe verdict {spec}"
            )
        return {f"{args.checkpoint} ({spec})": learned}
    specs = [encodings.normalise(spec) for spec in args.specs]
    refuse_duplicates(specs)
    head_count = args.heads or 8
    sizes = {"heads": head_count, "width": head_count * (args.head_width or 64), "length": LENGTH}
    return {spec: build_stack(spec, args.layers or parse_pattern(spec).shortest_model, **sizes) for spec in specs}


def _has_verdict(encoding: Any) -> bool:
    """Return whether an encoding has a bias, hides keys or depends on the content."""
    hides_keys = encoding.attention_options.hides_keys
    return encoding.adds_bias or hides_keys or encoding.is_content_dependent or bool(encoding.dependence)


def refuse_duplicates(sources: Sequence[str]) -> None:
    """Raise UserError if a formula or encoding occurs more than once."""
    for source, count in Counter(sources).items():
        if count > 1:
            raise UserError(f"'{source}' is given twice: leave one out")
