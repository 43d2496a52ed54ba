"""``figures``: draw every figure about encodings, from specs, from a sweep or from a checkpoint."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_figure_width, add_rpe_module, heads, nonnegative_int_list, positive_int, seed
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.progress import Progress

_LONGEST = 16_384


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``figures``."""
    parser.description = (
        "Draw figures as PNG and PDF. For specs, the figures show heat maps of exp(bias), the bias by distance and the "
        "theoretical receptive field. For a sweep, the figures show the same with the learned parameters, and "
        "perplexity, learned biases of single queries, biases during training and, with --data, the empirical "
        "receptive field. For a checkpoint, the figures show its bias at single queries by key position, one line per "
        "head."
    )
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="encodings (default: all that have a bias)")
    parser.add_argument("--sweep", type=Path, metavar="DIR", help="instead of specs: the --out folder of a sweep")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="instead of specs: one checkpoint")
    about = "with --checkpoint: query positions, counted from 0 (default: 0.5, 1 and 2 × the training length)"
    parser.add_argument("--query", type=nonnegative_int_list, metavar="N,N,...", help=about)
    about = "with --checkpoint: layers, counted from 0 (default: all, or four if there are many)"
    parser.add_argument("--layers", type=nonnegative_int_list, metavar="N,N,...", help=about)
    parser.add_argument("--data", type=Path, metavar="DATA", help="binarised text, for the empirical receptive field")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write (default: runs/figures, or figures in the sweep)"
    )
    parser.add_argument("--length", type=positive_int, metavar="N", help="tokens or distances shown (default: 512)")
    parser.add_argument("--heads", type=heads, metavar="H", help="with specs: number of heads (default: 8)")
    parser.add_argument(
        "--head", type=positive_int, metavar="K", help="head of figures that show one head (default: the middle head)"
    )
    parser.add_argument(
        "--seed", type=seed, metavar="S", help="seed of the initial values, or of the sweep's run (default: 1)"
    )
    add_figure_width(parser)
    add_rpe_module(parser)
    parser.set_defaults(log=None)


def run(args: argparse.Namespace) -> None:
    """Run ``figures``."""
    length = 512 if args.length is None else args.length
    if length < 2 or length > _LONGEST:
        raise UserError(f"--length {length} is out of range: choose 2 to {_LONGEST}")
    if args.sweep is not None and args.specs:
        raise UserError("name either specs or --sweep DIR, not both")
    others = (args.sweep, args.data, args.length, args.heads, args.head, args.seed)
    if args.checkpoint is not None and (args.specs or any(option is not None for option in others)):
        raise UserError(
            "--checkpoint is drawn by itself: only --query, --layers, --width, --rpe-module and --out go with it"
        )
    if args.checkpoint is None and (args.query or args.layers):
        raise UserError("--query and --layers are for one checkpoint: give --checkpoint FILE too")
    if args.sweep is not None and args.heads is not None:
        raise UserError("--heads does not go with --sweep, whose checkpoints determine the heads: leave it out")
    if args.data is not None and args.sweep is None:
        raise UserError("--data is for the empirical receptive field of checkpoints: give --sweep DIR too")

    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.figures.style import figures_at_width
    from fairseq_rpe.reports import figure_gallery
    from fairseq_rpe.sweeps.sweep_record import SweepFolder

    out = args.out or (Path("runs/figures") if args.sweep is None else args.sweep / "figures")
    if args.checkpoint is not None:
        with figures_at_width(args.figure_width):
            return print(figure_gallery.save_query_biases(args.checkpoint, args.query or (), args.layers or (), out))
    check_output(out)
    shown = {"length": length, "seed": args.seed or 1, "head": args.head}
    if args.sweep is None:
        gallery = figure_gallery.gallery_from_specs(args.specs, args.heads or 8, **shown)
    else:
        gallery = figure_gallery.gallery_from_sweep(SweepFolder(args.sweep), args.data, args.rpe_module, **shown)
    with Progress("figures", "kinds", len(figure_gallery.FIGURES)) as bar, figures_at_width(args.figure_width):
        for line in figure_gallery.draw_gallery(gallery, out, bar.update):
            bar.write(line)
