"""``figures``: every figure on encodings that there is, from specs or from the checkpoints of a sweep."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_rpe_module, add_width, count_list, heads, positive_int, seed
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.progress import Progress

_LONGEST = 16_384


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draws each figure as PNG and PDF. For specs: exp(bias) as heat maps, the bias over distance, the theoretical "
        "receptive field. For a sweep: the same with the parameters that it learned, as well as perplexity, learned "
        "biases of single queries, biases over training and, with --data, the empirical receptive field. For a "
        "checkpoint: its bias at single queries, by key position, a line for each head."
    )
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="encodings (default: all that have a bias)")
    parser.add_argument("--sweep", type=Path, metavar="DIR", help="in place of specs: the --out folder of a sweep")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="in place of specs: one checkpoint")
    about = "positions, from 0, with --checkpoint (half, all and twice its training length)"
    parser.add_argument("--query", type=count_list, metavar="N,N,...", help=about)
    about = "layers, from 0, with --checkpoint (all, of many four)"
    parser.add_argument("--layers", type=count_list, metavar="N,N,...", help=about)
    parser.add_argument("--data", type=Path, metavar="DATA", help="binarised text for the empirical receptive field")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/figures, or figures in the sweep")
    parser.add_argument("--length", type=positive_int, metavar="N", help="tokens or distances shown (512)")
    parser.add_argument("--heads", type=heads, metavar="H", help="number of heads, with specs (8)")
    parser.add_argument(
        "--head", type=positive_int, metavar="K", help="the head where one is shown (default: a middle one)"
    )
    parser.add_argument(
        "--seed", type=seed, metavar="S", help="of the initial values, with specs; or which run of the sweep (1)"
    )
    add_width(parser)
    add_rpe_module(parser)
    parser.set_defaults(log=None)


def run(args: argparse.Namespace) -> None:
    length = 512 if args.length is None else args.length
    if length < 2 or length > _LONGEST:
        raise UserError(f"--length {length} is out of range: choose 2 to {_LONGEST}")
    if args.sweep is not None and args.specs:
        raise UserError("name either specs or --sweep DIR, not both")
    others = (args.sweep, args.data, args.length, args.heads, args.head, args.seed)
    if args.checkpoint is not None and (args.specs or any(one is not None for one in others)):
        raise UserError(
            "--checkpoint is drawn by itself: of the others, only --query, --layers, --width, --rpe-module and "
            "--out go with it"
        )
    if args.checkpoint is None and (args.query or args.layers):
        raise UserError("--query and --layers are for one checkpoint: give --checkpoint FILE too")
    if args.sweep is not None and args.heads is not None:
        raise UserError("--heads does not go with --sweep: its checkpoints have theirs")
    if args.data is not None and args.sweep is None:
        raise UserError("--data is for the empirical receptive field of checkpoints: give --sweep DIR too")

    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.figures.style import drawn_at
    from fairseq_rpe.reports import figure_gallery
    from fairseq_rpe.sweeps.sweep_record import SweepFolder

    out = args.out or (Path("runs/figures") if args.sweep is None else args.sweep / "figures")
    if args.checkpoint is not None:
        with drawn_at(args.figure_width):
            return print(figure_gallery.draw_checkpoint(args.checkpoint, args.query or (), args.layers or (), out))
    check_output(out)
    shown = {"length": length, "seed": args.seed or 1, "head": args.head}
    if args.sweep is None:
        gallery = figure_gallery.of_specs(args.specs, args.heads or 8, **shown)
    else:
        gallery = figure_gallery.of_sweep(SweepFolder(args.sweep), args.data, args.rpe_module, **shown)
    with Progress("figures", "kinds", len(figure_gallery.FIGURES)) as bar, drawn_at(args.figure_width):
        for line in figure_gallery.draw(gallery, out, bar.update):
            bar.say(line)
