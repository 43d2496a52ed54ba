"""``fire-fit``: FIRE parameters that reproduce another distance bias, as in FIRE's Theorem 3.1."""

import argparse
import json
from pathlib import Path

from fairseq_rpe.cli.options import add_figure_width, add_rpe_module, heads, positive_int, seed, width
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.output_checks import check_output_file, check_overwrite


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fire-fit``."""
    parser.description = (
        "Construct FIRE parameters that equal a distance bias at all distances below --length (Theorem 3.1 of "
        '"Functional Interpolation for Relative Positions") and measure the error.'
    )
    parser.add_argument("spec", metavar="SPEC", help="encoding, e.g. sandwich or t5_bias:buckets=64")
    parser.add_argument("--length", type=positive_int, default=2048, help="number of distances (default: 2048)")
    parser.add_argument("--heads", type=heads, default=8, help="attention heads (default: 8)")
    about = "width of the model (default: 64 times --heads)"
    parser.add_argument("--model-width", dest="width", type=width, metavar="N", help=about)
    parser.add_argument("--seed", type=seed, default=1, help="seed of the initial values (default: 1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all parameters as JSON")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw both biases and the error, as .png or .pdf")
    add_figure_width(parser, other="--model-width")
    add_rpe_module(parser)


def run(args: argparse.Namespace) -> None:
    """Run ``fire-fit``."""
    if args.out is not None:
        check_overwrite("--out", args.out, ".json")
    if args.figure is not None:
        check_output_file("--figure", args.figure)
    if args.figure is not None and args.figure.suffix not in (".png", ".pdf"):
        raise UserError(f"--figure {args.figure}: use the ending .png or .pdf")
    if args.figure is None and args.figure_width:
        raise UserError("--width applies to the figure: give --figure FILE too")
    import torch

    from fairseq_rpe.analysis.fire_theorem import fit_fire, paper_fits
    from fairseq_rpe.encodings import build

    model_width = args.width or 64 * args.heads
    torch.manual_seed(args.seed)
    encoding = build(args.spec, args.heads, model_width)
    fits, papers = fit_fire(encoding, args.spec, args.length), paper_fits(encoding, args.spec, args.length)
    print(f"{args.spec} as FIRE, b(i, j) = f(psi(i-j) / psi(max(L, i))), for all 0 <= j <= i < {args.length}")
    for fit in (*fits, "The paper's own, Appendix A.2:" if papers else "The paper has no construction of it.", *papers):
        print(f"\n{fit}")
    if args.out is not None:
        setting = {
            "spec": args.spec,
            "heads": args.heads,
            "width": model_width,
            "length": args.length,
            "seed": args.seed,
        }
        both = {"modules": [fit.as_dict() for fit in fits], "paper": [fit.as_dict() for fit in papers]}
        atomic_write(args.out, json.dumps({**setting, **both}) + "\n")
        print(f"\nparameters: {args.out}")
    if args.figure is not None:
        from fairseq_rpe.figures.biases import draw_constructions
        from fairseq_rpe.figures.style import figures_at_width, save

        with figures_at_width(args.figure_width):
            save(draw_constructions(args.spec, encoding.bias_profile(args.length), fits[0], papers), args.figure)
        print(f"\nfigure: {args.figure}")
