"""``extend``: fine-tune a checkpoint on longer texts and compare it before and after."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import (
    SHORT_WARMUP,
    add_figure_width,
    add_latex,
    add_optimizer_options,
    add_rpe_module,
    int_list,
    positive_int,
    rate,
    seed,
    spec,
)
from fairseq_rpe.utils.records import from_attributes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``extend``."""
    parser.description = (
        "Fine-tune a checkpoint on longer texts, perhaps with another rotary setting. Settings that are not given are "
        "the checkpoint's, and the new checkpoint keeps its training length. Rerunning the same command resumes."
    )
    parser.add_argument("finetune_from", type=Path, metavar="CHECKPOINT", help="model trained on shorter texts")
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder with its vocabulary")
    about = "text length of the fine-tuning in tokens"
    parser.add_argument("--tokens", type=positive_int, required=True, metavar="N", help=about)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for checkpoints and results")
    about = 'encoding (default: the checkpoint\'s), e.g. "rope:scaling=yarn,factor=auto"'
    parser.add_argument("--rpe", type=spec, metavar="SPEC", help=about)
    about = "position transform in training (default: the checkpoint's); pose:target=M trains for M tokens on N"
    parser.add_argument("--positions-train", type=spec, metavar="SPEC", help=about)
    about = "position transform in evaluation (default: the checkpoint's, or the one that --positions-train implies)"
    parser.add_argument("--positions-eval", type=spec, metavar="SPEC", help=about)
    about = "lengths to evaluate; the checkpoint's is always added (default: doubled from the old to the new length)"
    parser.add_argument("--lengths", type=int_list, metavar="N,N,...", help=about)
    parser.add_argument("--split", default="test", help="split to score (default: test)")
    parser.add_argument("--updates", type=positive_int, metavar="N", help="default: 100 for tiny, else 1000")
    about = "sequences per process (default: as many tokens as train has at the checkpoint's length)"
    parser.add_argument("--batch-sentences", type=positive_int, metavar="N", help=about)
    parser.add_argument("--lr", type=rate, help="peak learning rate (default: a quarter of train's)")
    about = f"updates of warm-up (default: 10 for tiny, else 20; {SHORT_WARMUP})"
    parser.add_argument("--warmup", type=positive_int, metavar="N", help=about)
    add_optimizer_options(parser)
    add_rpe_module(parser)
    parser.add_argument("--save-every", type=positive_int, metavar="N", help="updates between checkpoints")
    parser.add_argument("--seed", type=seed, default=1, help="default: 1")
    add_figure_width(parser)
    add_latex(parser)
    parser.set_defaults(log=None)


def run(args: argparse.Namespace) -> None:
    """Run ``extend``."""
    from fairseq_rpe.reports.external_results import write_report
    from fairseq_rpe.runs.settings import TrainingRequest
    from fairseq_rpe.sweeps import context_extension

    request = from_attributes(TrainingRequest, args, rpe=args.rpe or "", out=args.out)
    extension = context_extension.resolve_extension(request, args.lengths, args.split)
    results = context_extension.run_extension(extension)
    title = f"{args.finetune_from}, from {extension.original_length} to {args.tokens} tokens"
    layout = {"width": args.figure_width, "latex": args.latex}
    print(write_report(results, args.out, extension.original_length, title=title, **layout).text)
