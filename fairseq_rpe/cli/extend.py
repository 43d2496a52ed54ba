"""``extend``: train a checkpoint further, on longer texts and with another rotary setting; compare before and after."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import (
    LESS_WARMUP,
    add_latex,
    add_optimiser,
    add_rpe_module,
    add_width,
    int_list,
    positive_int,
    rate,
    seed,
    spec,
)
from fairseq_rpe.utils.records import filled


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Architecture, dropout and whatever is not said here are the checkpoint's, and its training length stays the "
        "new checkpoint's own. Rerunning the same command resumes a run that was stopped."
    )
    parser.add_argument("finetune_from", type=Path, metavar="CHECKPOINT", help="of a model trained on shorter texts")
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder with its vocabulary")
    parser.add_argument(
        "--tokens", type=positive_int, required=True, metavar="N", help="length of the further training"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for checkpoints and results")
    about = 'default: the checkpoint\'s; e.g. "rope:scaling=yarn,factor=auto"'
    parser.add_argument("--rpe", type=spec, metavar="SPEC", help=about)
    about = "default: the checkpoint's; pose:target=M trains for M tokens on texts of --tokens N"
    parser.add_argument("--positions-train", type=spec, metavar="SPEC", help=about)
    about = "default: the checkpoint's, or what --positions-train names"
    parser.add_argument("--positions-eval", type=spec, metavar="SPEC", help=about)
    about = "to evaluate at, the checkpoint's is always added (default: it is doubled up to the new one)"
    parser.add_argument("--lengths", type=int_list, metavar="N,N,...", help=about)
    parser.add_argument("--subset", default="test", help="split to score (default: test)")
    parser.add_argument("--updates", type=positive_int, metavar="N", help="default: 100 for tiny, else 1000")
    about = "per process (default: as many tokens as by train's default at the checkpoint's length)"
    parser.add_argument("--batch-sentences", type=positive_int, metavar="N", help=about)
    parser.add_argument("--lr", type=rate, help="peak learning rate (default: a quarter of train's)")
    about = f"default: 10 for tiny, else 20; {LESS_WARMUP}"
    parser.add_argument("--warmup", type=positive_int, metavar="N", help=about)
    add_optimiser(parser)
    add_rpe_module(parser)
    parser.add_argument("--save-every", type=positive_int, metavar="N", help="updates between checkpoints")
    parser.add_argument("--seed", type=seed, default=1, help="default: 1")
    add_width(parser)
    add_latex(parser)
    parser.set_defaults(log=None)


def run(args: argparse.Namespace) -> None:
    from fairseq_rpe.reports.external_results import write_report
    from fairseq_rpe.runs.settings import Request
    from fairseq_rpe.sweeps import context_extension

    asked = filled(Request, args, rpe=args.rpe or "", save_dir=args.out)
    wanted = context_extension.resolve(asked, args.lengths, args.subset)
    found = context_extension.carry_out(wanted)
    title = f"{args.finetune_from}, from {wanted.original} to {args.tokens} tokens"
    drawn = {"width": args.figure_width, "latex": args.latex}
    print(write_report(found, args.out, wanted.original, title=title, **drawn).text)
