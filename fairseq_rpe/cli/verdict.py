"""``verdict``: does Σ exp(bias) converge, why, to what, and how far a head then sees."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.cli.options import add_rpe_module, load_rpe_module, positive_int
from fairseq_rpe.cli.trained import load_encodings
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import atomic_write

if TYPE_CHECKING:
    from fairseq_rpe.analysis.convergence import HeadVerdict
    from fairseq_rpe.encodings import Encoding

EPSILONS = (Fraction(1, 2), Fraction(1, 10), Fraction(1, 100), Fraction(1, 1000))
Place = tuple[int | None, int | None]  # layer from 0 and head from 1, where there are several
Rows = list[tuple[Place, "HeadVerdict"]]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verdict",
        help="decide whether Σ exp(bias) converges, per head, with its limit and receptive field",
        description="For each head: whether Σ exp(bias(n)) over distances n = 0, 1, … converges, by which test, its "
        "limit B and TRF(ε), the number of nearest keys that hold more than a part 1 - ε of B. Nothing is guessed: "
        "what cannot be proved is called undecided.",
        allow_abbrev=False,
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
    parser.set_defaults(run=run)


def add_source(parser: argparse.ArgumentParser) -> None:
    """The options that say what is judged."""
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="encoding, e.g. alibi or type1:form=paper")
    parser.add_argument("--formula", metavar="EXPR", help="log-bias as a formula in n, e.g. --formula='-2*log(n+1)'")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="judge what a trained model has learned")
    parser.add_argument("--heads", type=positive_int, default=8, metavar="H", help="heads of a SPEC (default 8)")
    parser.add_argument(
        "--head-width", type=positive_int, default=64, metavar="D", help="width of a head of a SPEC (default 64)"
    )
    add_rpe_module(parser)


def epsilon(text: str) -> Fraction:
    """An exact number, e.g. 0.1, 1e-3 or 1/8; :func:`run` checks its range."""
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


def run(args: argparse.Namespace) -> int:
    epsilons = check_epsilons(args.epsilon or EPSILONS)
    if args.csv and (args.csv.is_dir() or any(part.is_file() for part in args.csv.parents)):
        raise UserError(f"--csv {args.csv} cannot be a file: it is a folder, or below a file; name another one")
    sources = judged(args)
    print("\n\n".join(table(title, rows, epsilons) for title, rows in sources.items()))
    print(
        "\nf = ln b_n is the log-bias at distance n, B = Σ_{n>=0} b_n, TRF(ε) = inf{ j : Σ_{t<j} b_t > B(1-ε) }.\n"
        "Convergence is sufficient for length extrapolation, not necessary (arXiv 2307.10156, Theorems 0.3, 0.4)."
    )
    if args.csv:
        write_csv(args.csv, sources, epsilons)
        print(f"table: {args.csv}")
    return 0


def check_epsilons(values: list[Fraction] | tuple[Fraction, ...]) -> list[Fraction]:
    for value in values:
        if not 0 < value < 1:
            raise UserError(f"--epsilon {shown(value)} is out of range: choose numbers between 0 and 1")
    return list(dict.fromkeys(values))


def judged(args: argparse.Namespace) -> dict[str, Rows]:
    """What was asked for -> place and verdict of each head."""
    from fairseq_rpe.analysis import convergence

    if args.formula is not None:
        check_source(args)
        return {args.formula: [((None, None), convergence.verdict_of_formula(args.formula))]}
    return {title: _rows(layers, convergence.verdict) for title, layers in asked(args).items()}


def weights_of(args: argparse.Namespace, keys: int) -> dict[str, list[tuple[Place, list[float]]]]:
    """What was asked for -> place and b_0 … b_(keys-1) of each head, in double precision."""
    from fairseq_rpe.analysis import convergence

    if args.formula is not None:
        check_source(args)
        return {args.formula: [((None, None), convergence.weights_of_formula(args.formula, keys))]}
    return {
        title: _rows(layers, lambda encoding: encoding.profile(keys).exp().tolist())
        for title, layers in asked(args).items()
    }


def check_source(args: argparse.Namespace) -> None:
    """Refuse none or more than one of SPEC, --formula and --checkpoint."""
    if sum((bool(args.specs), args.formula is not None, args.checkpoint is not None)) != 1:
        raise UserError("give either SPEC…, or --formula, or --checkpoint")


def asked(args: argparse.Namespace) -> dict[str, list[Encoding]]:
    """The encodings that were asked for, by what they are called: one, or one per layer of a checkpoint."""
    check_source(args)
    load_rpe_module(args.rpe_module)
    from fairseq_rpe import encodings
    from fairseq_rpe.analysis.convergence import LENGTH

    if args.checkpoint is not None:
        return of_checkpoint(args.checkpoint)
    width = args.heads * args.head_width
    return {spec: [encodings.build(spec, args.heads, width, LENGTH)] for spec in unique(args.specs)}


def unique(specs: list[str]) -> list[str]:
    """The specs in their normal spelling; one that is given twice is refused."""
    from fairseq_rpe.encodings import normalise

    normal = [normalise(spec) for spec in specs]
    for spec in normal:
        if normal.count(spec) > 1:
            raise UserError(f"'{spec}' is given twice: leave one out")
    return normal


def of_checkpoint(path: Path) -> dict[str, list[Encoding]]:
    """The encodings that a checkpoint holds, one per layer where they are not shared."""
    found = load_encodings(path)
    if not found.encodings[0].adds_bias:
        raise UserError(
            f"{path} was trained with '{found.spec}', which adds no bias: see fairseq-rpe verdict {found.spec}"
        )
    return {f"{path} ({found.spec})": found.encodings}


def _rows(layers: list[Encoding], of: Callable[[Encoding], Sequence[Any]]) -> list[tuple[Place, Any]]:
    return [
        ((layer if len(layers) > 1 else None, head), value)
        for layer, encoding in enumerate(layers)
        for head, value in enumerate(of(encoding), start=1)
    ]


def table(title: str, rows: Rows, epsilons: list[Fraction]) -> str:
    """One line per head, heads that share everything in one line; the reason is the last column."""
    groups: list[list[Any]] = []
    for place, head in rows:
        cells = [head.decision, head.digits() or "-", *(_trf(head, e) for e in epsilons), head.reason]
        if groups and groups[-1][1] == cells:
            groups[-1][0].append(place)
        else:
            groups.append([[place], cells])
    lines = [["", "Σ b_n", "B", *(f"TRF({shown(e)})" for e in epsilons), "reason"]]
    lines += [[_span(places), *cells] for places, cells in groups]
    widths = [max(len(line[c]) for line in lines) for c in range(len(lines[0]) - 1)]
    text = [title]
    for place, verdict, *numbers, reason in lines:
        middle = (cell.rjust(w) for cell, w in zip(numbers, widths[2:], strict=True))
        text.append("  ".join([place.ljust(widths[0]), verdict.ljust(widths[1]), *middle, reason]).rstrip())
    return "\n".join(text)


def _span(places: list[Place]) -> str:
    """``head 1-8``, ``layer 0 head 3 - layer 1 head 2``."""

    def name(place: Place) -> str:
        return " ".join(f"{word} {n}" for word, n in zip(("layer", "head"), place, strict=True) if n is not None)

    first, last = places[0], places[-1]
    if first == last:
        return name(first)
    return f"{name(first)}-{last[1]}" if first[0] == last[0] else f"{name(first)} - {name(last)}"


def place_cells(place: Place) -> list[int | str]:
    """Layer and head in a table."""
    return ["" if n is None else n for n in place]


def _trf(head: HeadVerdict, value: Fraction) -> str:
    found = head.trf(value)
    return "-" if found is None else str(found)


def shown(value: Fraction) -> str:
    """An ε as a user writes it."""
    return f"{float(value):g}" if Fraction(f"{float(value):g}") == value else str(value)


def write_csv(path: Path, sources: dict[str, Rows], epsilons: list[Fraction]) -> None:
    out = io.StringIO()
    names = [
        "source",
        "layer",
        "head",
        "verdict",
        "limit",
        "limit_low",
        "limit_high",
        "epsilon",
        "trf",
        "trf_low",
        "trf_high",
    ]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "reason"])
    for title, rows in sources.items():
        for place, head in rows:
            limits = ["", ""] if head.limit is None else _outwards(head.limit)
            for value in epsilons:
                start = [title, *place_cells(place), head.decision, head.digits(), *limits]
                writer.writerow([*start, shown(value), *trf_cells(head, value), head.reason])
    atomic_write(path, out.getvalue())


def trf_cells(head: HeadVerdict, value: Fraction) -> list[Any]:
    """TRF in words, and whole numbers that it lies between where it has any."""
    found = head.trf(value)
    if found is None:
        return ["", "", ""]
    return [str(found), *("" if end is None else end for end in (found.low, found.high))]


def _outwards(limit: tuple[Any, Any]) -> list[str]:
    """The bracket with 24 digits, rounded outwards."""
    import mpmath

    with mpmath.workprec(200):
        return [
            mpmath.nstr(end * (1 + sign * mpmath.mpf(10) ** -23), 24) for end, sign in zip(limit, (-1, 1), strict=True)
        ]
