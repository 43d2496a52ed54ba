"""``sensitivity``: the analysis figures of index warping, and its Table 2 computed again."""

from __future__ import annotations

import argparse
import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.cli.options import positive_float, positive_int
from fairseq_rpe.cli.report import align
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import atomic_write, check_folder, make_folder, replace_with

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from fairseq_rpe.analysis.sensitivity_figures import Line

# (training length, c) -> skew -> what the paper prints for tests of 2 and of 4 times that length
TABLE_2 = {
    (20, 10): {"none": (0.099, 0.069), "sqrt": (0.016, 0.063), "beta": (0.054, 0.012)},
    (500, 200): {"none": (0.061, 0.066), "sqrt": (0.028, 0.031), "beta": (0.031, 0.013)},
}
TIMES = (2, 4)
COLUMNS = (
    "train_length",
    "reach",
    "skew",
    "computed_2x",
    "published_2x",
    "computed_4x",
    "published_4x",
    "width",
    "base",
    "exponential",
)
LONGEST, WIDEST, BASES = 65_536, 4096, (1.01, 1e12)
_CHUNK = 1 << 22  # cosines at a time
_TAIL = 48  # tokens in the close-up of figure 2
_SHOWN = 256  # tokens in figure 4: more waves than these would be a blot
_POINTS = 4096


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "sensitivity",
        help="draw the analysis of index warping",
        description="Draws raw attention, attention sensitivity, warps and total differences of "
        '"Improving Length Generalization via Position Index Warping", and prints its Table 2 computed again.',
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/sensitivity"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--train-length",
        type=positive_int,
        default=512,
        metavar="N",
        help="tokens, in figures 2, 4 and A (512); the table and figure B have the paper's 20 and 500",
    )
    parser.add_argument(
        "--width", type=positive_int, metavar="N", help="width of RoPE's heads, an even number (default: a wide head)"
    )
    parser.add_argument("--base", type=positive_float, default=10_000.0, help="base of RoPE's angles (10000)")
    parser.add_argument(
        "--exponential",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take differences of exp(raw attention), as the paper's figures do, or of raw attention, as its equations",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _check(args)
    folder = args.out
    names = [f"{stem}.{ending}" for stem in FIGURES for ending in ("png", "pdf")]
    check_folder(folder, [*names, "sensitivity.csv"])
    rows = table(args)
    figures = {stem: draw(args) for stem, draw in FIGURES.items()}
    make_folder(folder)

    from fairseq_rpe.analysis.sensitivity_figures import save

    for stem, figure in figures.items():
        for ending in ("png", "pdf"):
            replace_with(folder / f"{stem}.{ending}", lambda target, figure=figure: save(figure, target))
    atomic_write(folder / "sensitivity.csv", _csv(rows))

    print(markdown(rows))
    print(f"Computed: {_setting(args)}.")
    print("The paper gives no head width, so the agreement to look for is a trend, not the digits:")
    for length, reach in TABLE_2:
        lower, best = trend([row for row in rows if row["train_length"] == length])
        print(
            f"  length {length} (c = {reach}): both skews lower the sum: {_yes(lower)}; beta best at 4x: {_yes(best)}"
        )
    print(f"\ntable:   {folder / 'sensitivity.csv'}")
    print(f"figures: {', '.join(str(folder / f'{stem}.png') for stem in FIGURES)}, each also as .pdf")
    return 0


def table(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Table 2: the total difference (Eq. 9) of each length and skew, computed beside published."""
    from fairseq_rpe.analysis import total_difference

    how = {"raw": _raw(args), "exponential": args.exponential}
    rows = []
    for (length, reach), published in TABLE_2.items():
        for skew, values in published.items():
            row = {"train_length": length, "reach": reach, "skew": skew}
            for times, value in zip(TIMES, values, strict=True):
                row[f"computed_{times}x"] = total_difference(skew, length, times * length, reach, **how)
                row[f"published_{times}x"] = value
            rows.append({**row, "width": args.width or "limit", "base": args.base, "exponential": args.exponential})
    return rows


def trend(rows: list[dict[str, Any]], column: str = "computed") -> tuple[bool, bool]:
    """Of one training length: do both skews lower the sum at both test lengths, and is beta the lowest at 4 times?"""
    at = {row["skew"]: [row[f"{column}_{times}x"] for times in TIMES] for row in rows}
    lower = all(at[skew][i] < at["none"][i] for skew in ("sqrt", "beta") for i in range(len(TIMES)))
    return lower, at["beta"][-1] == min(values[-1] for values in at.values())


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table with three digits, as the paper prints it."""
    head = ["training length", "skew", *(f"{t}x {what}" for t in TIMES for what in ("computed", "published"))]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [format(row[f"{what}_{t}x"], ".3f") for t in TIMES for what in ("computed", "published")]
        lines.append([str(row["train_length"]), row["skew"], *cells])
    return align(lines)


def draw_attention(args: argparse.Namespace) -> Figure:
    import torch

    from fairseq_rpe.analysis import alibi_raw, sensitivity_figures

    colours = _palette()
    n = torch.logspace(0, 5, 1500, dtype=torch.float64).round().unique()
    widths = {64: (colours[5], 0.8), 128: (colours[0], 0.8), None: (colours[6], 1.6)}
    widths.setdefault(args.width, ("0.75", 0.8))
    lines = []
    for width, (colour, thick) in sorted(widths.items(), key=lambda item: item[0] or float("inf")):
        name = "RoPE, wide head" if width is None else f"RoPE, head width {width}"
        lines.append(_line(n, _rope(n, width, args.base).exp(), name, colour, width=thick))
    for head, colour, style in ((1, 1, "--"), (3, 4, "-."), (5, 2, (0, (5, 1))), (8, 3, ":")):
        name = f"ALiBi, head {head} of 8"
        lines.append(_line(n, alibi_raw(n, head).exp(), name, colours[colour], style))
    return sensitivity_figures.attention(lines)


def draw_interpolation(args: argparse.Namespace) -> Figure:
    from fairseq_rpe.analysis import sensitivity_figures
    from fairseq_rpe.analysis.sensitivity import interpolated

    whole, thick, tail = [], [], []
    for times, label, colour in _tests(args, plain=True):
        p = interpolated(args.train_length, times * args.train_length)
        sen = _sensitivity(args, p)
        tail.append(_from_the_end(sen[-_TAIL:], label, colour))
        p, size = p[1:], sen.abs()
        window = _wave(times)
        if len(size) >= 2 * len(window):
            whole.append(_line(*_thinned(p, size), "", colour, width=0.5, alpha=0.35))
            p, size = (values.unfold(0, len(window), 1) @ window for values in (p, size))
        thick.append(_line(*_thinned(p, size), label, colour))
    return sensitivity_figures.interpolation([*whole, *thick], tail, args.train_length, _unit(args))


def draw_tails(args: argparse.Namespace) -> Figure:
    from fairseq_rpe.analysis import sensitivity_figures, total_difference
    from fairseq_rpe.analysis.sensitivity import interpolated, warped

    black = _palette()[6]
    length, reach = args.train_length, _reach(args.train_length)
    raw = _raw(args)
    panels = {}
    for skew, (name, _) in _skews().items():
        sums = [total_difference(skew, length, t * length, reach, raw, args.exponential) for t in TIMES]
        text = ", ".join(f"{value:.3g} at {t}×" for value, t in zip(sums, TIMES, strict=True))
        positions = {f"training, {length} tokens": (warped(skew, length), black, 1.6)}
        for t, label, colour in _tests(args):
            positions[label] = (interpolated(length, t * length), colour, 1.2)
        shown = min(reach, _SHOWN) + 2
        panels[f"{name}: total difference (c = {reach}) {text}"] = [
            _from_the_end(_sensitivity(args, p[-shown:]), label, colour, width)
            for label, (p, colour, width) in positions.items()
        ]
    return sensitivity_figures.tails(panels, _unit(args))


def draw_warps(args: argparse.Namespace) -> Figure:
    import torch

    from fairseq_rpe.analysis import sensitivity_figures
    from fairseq_rpe.analysis.sensitivity import warped

    length = args.train_length
    j = torch.arange(length + 1, dtype=torch.float64)
    colours = _palette()
    lines = [_line(j, warped(skew, length), name, colour) for skew, (name, colour) in _skews().items()]
    heads = ((2, 2, "--"), (4, 3, "-."), (6, 4, (0, (5, 1))), (8, 5, ":"))
    lines += [_line(j, j / part, f"head, α = 1/{part}", colours[c], style) for part, c, style in heads]
    return sensitivity_figures.warps(lines, length)


def draw_differences(args: argparse.Namespace) -> Figure:
    import torch

    from fairseq_rpe.analysis import sensitivity_figures
    from fairseq_rpe.analysis.sensitivity import total_differences

    panels: dict[str, list[tuple[Line, Line]]] = {}
    for (length, reach), published in TABLE_2.items():
        # fine enough for the waves of sqrt below twice the length, which come into step and fall out of it again
        tests = range(3 * length // 2, 8 * length + 1, max(1, length // 100))
        times = torch.tensor(tests) / length
        pairs = []
        for skew, (name, colour) in _skews().items():
            sums = total_differences(skew, length, tests, reach, _raw(args), args.exponential)
            points = _line(torch.tensor(TIMES), torch.tensor(published[skew]), f"{name}, published", colour)
            pairs.append((_line(times, sums, name, colour), points))
        panels[f"training length {length}, c = {reach}"] = pairs
    return sensitivity_figures.differences(panels, _unit(args))


FIGURES = {
    "fig1": draw_attention,
    "fig2": draw_interpolation,
    "fig4": draw_tails,
    "figA": draw_warps,
    "figB": draw_differences,
}


def _check(args: argparse.Namespace) -> None:
    if not 2 <= args.train_length <= LONGEST:
        raise UserError(f"--train-length {args.train_length}: choose 2 to {LONGEST} tokens")
    if args.width is not None and (args.width % 2 or args.width > WIDEST):
        raise UserError(f"--width {args.width}: choose an even number from 2 to {WIDEST}, or leave it out")
    if not BASES[0] <= args.base <= BASES[1]:
        raise UserError(f"--base {args.base:g}: choose a number from {BASES[0]:g} to {BASES[1]:g}")


def _rope(n: Tensor, width: int | None, base: float) -> Tensor:
    """``rope_raw`` in parts: it holds width / 2 numbers for each distance."""
    import torch

    from fairseq_rpe.analysis import rope_raw

    parts = n.flatten().split(_CHUNK // (width or 256))
    return torch.cat([rope_raw(part, width, base) for part in parts]).reshape(n.shape)


def _raw(args: argparse.Namespace) -> Any:
    return lambda n: _rope(n, args.width, args.base)


def _sensitivity(args: argparse.Namespace, positions: Tensor) -> Tensor:
    from fairseq_rpe.analysis import sensitivity

    return sensitivity(positions, _raw(args), args.exponential)


def _line(x: Tensor, y: Tensor, label: str, colour: str, style: Any = "-", width: float = 1.6, alpha: float = 1) -> Any:
    from fairseq_rpe.analysis.sensitivity_figures import Line

    return Line(x, y, label, colour, style, width, alpha)


def _from_the_end(y: Tensor, label: str, colour: str, width: float = 1.6) -> Line:
    import torch

    return _line(torch.arange(len(y) - 1, -1, -1), y, label, colour, width=width)


def _palette() -> tuple[str, ...]:
    from fairseq_rpe.analysis.style import PALETTE

    return PALETTE


def _skews() -> dict[str, tuple[str, str]]:
    colours = _palette()
    return {"none": ("identity", colours[6]), "sqrt": ("tail, sqrt", colours[0]), "beta": ("tail, beta", colours[1])}


def _tests(args: argparse.Namespace, plain: bool = False) -> Iterator[tuple[int, str, str]]:
    """(times, label, colour) of the interpolated tests, ``plain`` positions of training before them."""
    colours = _palette()
    if plain:
        yield 1, f"training, {args.train_length} tokens", colours[6]
    for times, colour in zip(TIMES, (colours[2], colours[3]), strict=True):
        yield times, f"interpolated, {times}× ({times * args.train_length} tokens)", colour


def _reach(length: int) -> int:
    """c of Eq. 9: the paper's at its lengths, otherwise two fifths of the text, as its 200 of 500."""
    return dict(TABLE_2.keys()).get(length, max(1, round(0.4 * length)))


def _wave(times: int) -> Tensor:
    """Weights of a mean over the 2π positions in which the fastest pair of a head turns once, 1/times apart.

    That is no whole number of tokens, so the two at the ends count in part.
    """
    import torch

    turn = 2 * math.pi * times
    whole = 2 * int((turn - 1) // 2) + 1
    weights = torch.ones(whole + 2, dtype=torch.float64)
    weights[[0, -1]] = (turn - whole) / 2
    return weights / turn


def _thinned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What a logarithmic axis can show of a long curve."""
    import torch

    if len(x) <= _POINTS:
        return x, y
    kept = torch.logspace(0, math.log10(len(x)), _POINTS, dtype=torch.float64).round().long().unique() - 1
    return x[kept], y[kept]


def _unit(args: argparse.Namespace) -> str:
    return "exp(raw attention)" if args.exponential else "raw attention"


def _setting(args: argparse.Namespace) -> str:
    head = f"heads {args.width} wide" if args.width else "the limit of a wide head"
    return f"RoPE, base {args.base:g}, {head}, differences of {_unit(args)}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _csv(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
