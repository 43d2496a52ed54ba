"""``erf``: the empirical receptive field of trained checkpoints, as table, CSV and figure."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.cli import corpus
from fairseq_rpe.cli.options import load_rpe_module, positive_int
from fairseq_rpe.cli.report import align
from fairseq_rpe.cli.subjects import Subject, add_subjects, find_subjects, load, read_stream
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import atomic_write, check_folder, make_folder, replace_with

if TYPE_CHECKING:
    from torch import Tensor

    from fairseq_rpe.analysis.erf import Field, LayerField

EPSILONS = "0.5,0.1,0.01"
FILES = ("erf.csv", "erf_curve.csv", "erf.png", "erf.pdf")
QUANTISED = "erf_quantised.csv"
_LONGER, _PART = 4, 4  # the default block is 4 training lengths, its last quarter is measured
_BATCH_TOKENS = 2048
_EVERY, _POINTS = 64, 256  # the curve's file has each distance up to _EVERY, then a logarithmic choice


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "erf",
        help="measure how many of the nearest keys hold the attention of checkpoints",
        description="Empirical receptive field: the least number of nearest keys that hold more than 1 - epsilon of "
        "the attention, for each layer and head, over the last rows of long blocks of real text.",
        allow_abbrev=False,
    )
    _add_arguments(parser)
    parser.set_defaults(run=run)


def defaults(paths: list[Path], data: Path) -> argparse.Namespace:
    """The command's arguments for these checkpoints where nothing else is said."""
    parser = argparse.ArgumentParser()
    _add_arguments(parser)
    return parser.parse_args([*map(str, paths), str(data)])


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subjects(parser)
    parser.add_argument(
        "--length", type=positive_int, metavar="N", help="tokens per block (default: 4 training lengths, or what fits)"
    )
    parser.add_argument("--blocks", type=positive_int, default=64, metavar="N", help="blocks measured (default: 64)")
    parser.add_argument(
        "--rows", type=positive_int, metavar="N", help="queries measured, the last of each block (default: a quarter)"
    )
    parser.add_argument(
        "--epsilon", type=number_list, default=EPSILONS, metavar="X,X,...", help="attention left out (%(default)s)"
    )
    parser.add_argument(
        "--quantised", action="store_true", help="draw, and write, the paper's curve: 50 values of epsilon, n / length"
    )
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help="blocks at a time (default: 2048 tokens)")
    parser.add_argument("--out", type=Path, default=Path("runs/erf"), metavar="DIR", help="default: %(default)s")


def number_list(text: str) -> list[float]:
    """Comma or blank separated numbers, each once."""
    try:
        values = [float(item) for item in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers") from None
    if not values or len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"'{text}' is empty or names a number twice")
    return values


@dataclass(frozen=True)
class Measured:
    """The field of one checkpoint, and what its bias alone would give."""

    subject: Subject
    field: Field
    blocks: int
    bias: list[LayerField] | None

    @property
    def mass(self) -> Tensor:
        """(layers, heads, length) mean attention by distance."""
        return masses(self.field.layers)

    def each(self) -> Iterator[tuple[dict[str, Any], int, int]]:
        """For each layer (from 0) and head (from 1, as in TensorBoard): the columns that name it, and its indices."""
        for layer, heads in enumerate(self.mass):
            for head in range(len(heads)):
                names = {"encoding": self.subject.label, "checkpoint": self.subject.path}
                yield {**names, "layer": layer, "head": head + 1}, layer, head


def masses(layers: list[LayerField]) -> Tensor:
    """(layers, heads, length) float64 on the CPU."""
    import torch

    return torch.stack([layer.mass for layer in layers]).cpu()


def run(args: argparse.Namespace) -> int:
    for epsilon in args.epsilon:
        if not 0 < epsilon < 1:
            raise UserError(f"--epsilon {epsilon:g} is not between 0 and 1: it is the part of the attention left out")
    subjects = find_subjects(args.checkpoints)
    corpus.check_folder(args.data, args.subset)
    length, rows = sizes(args, max(subject.train_length for subject in subjects))
    check_folder(args.out, (*FILES, QUANTISED))
    make_folder(args.out)
    load_rpe_module(args.rpe_module)
    found = [measure(args, subject, length, rows) for subject in subjects]
    atomic_write(args.out / "erf.csv", _csv(_receptive(found, args.epsilon)))
    atomic_write(args.out / "erf_curve.csv", _csv(_curve(found)))
    if args.quantised:
        atomic_write(args.out / QUANTISED, _csv(_steps(found)))
    from fairseq_rpe.cli import erf_figure

    figure = erf_figure.quantised_curves(found) if args.quantised else erf_figure.curves(found, args.epsilon)
    for name in ("erf.png", "erf.pdf"):
        replace_with(args.out / name, lambda target: figure.savefig(target, dpi=160))
    print(markdown(found, args.epsilon))
    print(f"Blocks of {length} tokens, {args.blocks} of {args.data}/{args.subset}, the last {rows} queries of each.")
    print("Cells: nearest keys, mean over queries; over heads the mean (least to most). Bias alone: as if q·k = 0.")
    print(f"table:  {args.out / 'erf.csv'}")
    print(f"figure: {args.out / 'erf.png'}")
    return 0


def sizes(args: argparse.Namespace, train_length: int) -> tuple[int, int]:
    """Tokens of a block and queries measured in it; refuses what the text does not fill."""
    total = corpus.count_tokens(args.data, args.subset)
    where = f"{args.data}/{args.subset} has {total} tokens"
    length = args.length or min(_LONGER * train_length, total // args.blocks)
    if length < 1 or total < args.blocks * length:
        short = f"{where}, less than {args.blocks} blocks of {max(length, 1)}"
        raise UserError(f"{short}: use more text, a smaller --length or fewer --blocks")
    rows = args.rows or max(1, length // _PART)
    if rows > length:
        raise UserError(f"--rows {rows} is more than a block of {length} tokens: lower it")
    return length, rows


def measure(args: argparse.Namespace, subject: Subject, length: int, rows: int) -> Measured:
    """The field of one checkpoint over blocks from all over the text."""
    import torch
    from tqdm import tqdm

    from fairseq_rpe.analysis import erf

    model, task = load(args, subject.path)
    total = corpus.count_tokens(args.data, args.subset)
    stream = read_stream(args, task.source_dictionary, total)
    # Blocks from all over the text, where there are more than are measured.
    starts = torch.arange(args.blocks) * (total // length) // args.blocks * length
    inputs = torch.stack([stream[start : start + length] for start in starts.tolist()])
    size = args.batch_size or max(1, _BATCH_TOKENS // length)
    device = next(model.parameters()).device
    bar = tqdm(total=args.blocks, desc=subject.label, unit=" blocks", disable=None, leave=False)
    with torch.no_grad(), bar, erf.measured(model.decoder, length, rows, args.epsilon) as field:
        for part in inputs.split(size):
            model.decoder(part.to(device), features_only=True)
            bar.update(len(part))
    for layer in field.layers:
        if layer.rows != args.blocks * rows:
            raise UserError(f"{subject.path}: {layer.rows} of {args.blocks * rows} rows were measured: report this")
    return Measured(subject, field, args.blocks, erf.bias_alone(model.decoder, length, rows, args.epsilon))


def _receptive(found: list[Measured], epsilons: list[float]) -> Iterator[dict[str, Any]]:
    """n_emp of every layer, head and ε: mean and median over rows; of the rows' mean curve; of the bias alone."""
    from fairseq_rpe.analysis.erf import n_emp

    for one in found:
        of_mean = n_emp(one.mass, epsilons)
        for names, layer, head in one.each():
            field = one.field.layers[layer]
            for e, epsilon in enumerate(epsilons):
                yield {
                    **names,
                    "epsilon": epsilon,
                    "n_emp_mean": float(field.mean[e, head]),
                    "n_emp_median": float(field.median[e, head]),
                    "n_emp_of_mean": int(of_mean[e, layer, head]),
                    "n_bias_mean": None if one.bias is None else float(one.bias[layer].mean[e, head]),
                    "length": field.length,
                    "rows": one.field.rows,
                    "blocks": one.blocks,
                }


def _curve(found: list[Measured]) -> Iterator[dict[str, Any]]:
    """Attention by distance, and within it (the query and that many keys before it), thinned at long distances."""
    for one in found:
        mass = one.mass
        within = mass.cumsum(-1)
        for names, layer, head in one.each():
            for d in thinned(mass.shape[-1]):
                here = {"mass": float(mass[layer, head, d]), "within": float(within[layer, head, d])}
                yield {**names, "distance": d, **here}


def thinned(length: int) -> list[int]:
    """Distances 0 … length-1, beyond the first ones a logarithmic choice that ends with the last."""
    if length <= _POINTS:
        return list(range(length))
    left = _POINTS - _EVERY
    far = {round(_EVERY * ((length - 1) / _EVERY) ** (i / left)) for i in range(left + 1)}
    return [*range(_EVERY), *sorted(far)]


def _steps(found: list[Measured]) -> Iterator[dict[str, Any]]:
    """The paper's quantised curve of every layer and head."""
    from fairseq_rpe.analysis.erf import quantised

    for one in found:
        epsilons, part = quantised(one.mass)
        for names, layer, head in one.each():
            for epsilon, value in zip(epsilons.tolist(), part[layer, head].tolist(), strict=True):
                yield {**names, "epsilon": epsilon, "n_over_length": value}


def markdown(found: list[Measured], epsilons: list[float]) -> str:
    """Encoding and layer × ε: mean of n_emp over rows, then over heads, with the least and the most of a head."""
    import torch

    head = ["encoding", "layer", *(f"ε = {e:g}" for e in epsilons)]
    lines = [head, ["---"] * len(head)]
    for one in found:
        fields = [(str(number), layer.mean) for number, layer in enumerate(one.field.layers)]
        if one.bias is not None:
            fields.append(("bias alone", torch.cat([layer.mean for layer in one.bias], dim=1)))
        for name, heads in fields:
            cells = [f"{n.mean():.1f} ({n.min():.1f} to {n.max():.1f})" for n in heads]
            lines.append([one.subject.label, name, *cells])
    return align(lines)


def _csv(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
