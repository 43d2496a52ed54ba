"""``fire-fit``: parameters with which FIRE is another bias of the distance, its Theorem 3.1 carried out."""

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.cli.options import add_rpe_module, positive_int
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import atomic_write

if TYPE_CHECKING:
    from torch import Tensor

    from fairseq_rpe.analysis.fire_fit import FireFit


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Builds FIREs that equal a bias of the distance at all distances below --length, as Theorem 3.1 of "
        '"Functional Interpolation for Relative Positions" says there are, and measures the error.'
    )
    parser.add_argument("spec", metavar="SPEC", help="encoding, e.g. sandwich or t5_bias:buckets=64")
    parser.add_argument("--length", type=positive_int, default=2048, help="number of distances (default 2048)")
    parser.add_argument("--heads", type=positive_int, default=8, help="attention heads (default 8)")
    parser.add_argument("--width", type=positive_int, help="model width (default: 64 times --heads)")
    parser.add_argument(
        "--seed", type=positive_int, default=1, help="of the initial values of encodings that learn theirs (default 1)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all parameters as JSON")
    add_rpe_module(parser)


def run(args: argparse.Namespace) -> None:
    if args.out is not None and args.out.is_dir():
        raise UserError(f"--out {args.out} is a folder: name a file")
    import torch

    from fairseq_rpe.analysis.fire_fit import fit_fire
    from fairseq_rpe.encodings import build

    width = args.width or 64 * args.heads
    torch.manual_seed(args.seed)
    fits = fit_fire(build(args.spec, args.heads, width), args.spec, args.length)
    print(f"{args.spec} as FIRE, b(i, j) = f(psi(i-j) / psi(max(L, i))), for all 0 <= j <= i < {args.length}")
    for fit in fits:
        print(f"\n{describe(fit)}")
    if args.out is not None:
        setting = {"spec": args.spec, "heads": args.heads, "width": width, "length": args.length, "seed": args.seed}
        _write(args.out, {**setting, "modules": [fit.as_dict() for fit in fits]})
        print(f"\nparameters: {args.out}")


def describe(fit: "FireFit") -> str:
    """One module as a few lines: its shape, what its arrays hold, its error."""
    layers = f"one hidden layer of {fit.hidden} ReLUs" if fit.hidden else "no hidden layer: f is a line"
    psi = "x" if fit.c is None else f"ln(c*x + 1), c = {fit.c:.6g}"
    lines = [f"{_heads(fit.heads)}: {layers}", f"  psi(x) = {psi}; L = {fit.threshold:g}"]
    for name, layer in zip(("output",) if not fit.hidden else ("hidden", "output"), fit.fire.mlp, strict=True):
        lines += [f"  {name} {part:6} {_summary(getattr(layer, part))}" for part in ("weight", "bias")]
    lines.append(f"  largest error: {fit.error:.1e} nats in float64, {fit.error_float32:.1e} in float32")
    return "\n".join(lines)


def _summary(values: "Tensor") -> str:
    shape, low, high = " x ".join(map(str, values.shape)), values.min().item() + 0.0, values.max().item() + 0.0
    return f"({shape}) " + (f"all {low:.6g}" if low == high else f"{low:.6g} to {high:.6g}")


def _heads(heads: tuple[int, ...]) -> str:
    runs = [[h for _, h in run] for _, run in groupby(enumerate(heads), lambda pair: pair[1] - pair[0])]
    ranges = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"head{'s' if len(heads) > 1 else ''} {ranges}"


def _write(path: Path, value: dict[str, Any]) -> None:
    try:
        atomic_write(path, json.dumps(value) + "\n")
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UserError(f"--out {path} cannot be written ({error.strerror}): name another file") from None
