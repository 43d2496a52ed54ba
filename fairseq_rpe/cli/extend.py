"""``extend``: fine-tune a checkpoint on longer texts and compare it before and after."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_figure_width, add_latex, add_no_cache, int_list, positive_int
from fairseq_rpe.cli.train import SHORT_WARMUP, add_settings, stated_settings
from fairseq_rpe.runs.training_config import SETTINGS, TrainingConfig

# where the default or the meaning differs from that of ``train``
_HELP = {
    "tokens": "length N of the fine-tuning texts in tokens",
    "rpe": 'encoding (default: the checkpoint\'s), e.g. "rope:scaling=yarn,factor=auto"',
    "positions_train": "position transform in training (default: the checkpoint's); pose:target=M uses positions up "
    "to M",
    "positions_eval": "position transform in evaluation (default: the checkpoint's, or the one that --positions-train "
    "implies)",
    "updates": "updates (default: 100 for tiny, else 1000)",
    "batch_sentences": "sequences per process (default: as many tokens per update as train has at the checkpoint's "
    "length)",
    "lr": "peak learning rate (default: a quarter of train's default)",
    "warmup": f"updates of warm-up (default: 10 for tiny, else 20; {SHORT_WARMUP})",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``extend``."""
    parser.description = (
        "Fine-tune a checkpoint on longer texts, with the same or another rotary setting, and evaluate it before and "
        "after. Options that you omit have the values of the checkpoint. The new checkpoint keeps the training length "
        "of the old one. To resume, repeat the command."
    )
    parser.add_argument("finetune_from", type=Path, metavar="CHECKPOINT", help="model trained on shorter texts")
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder with its vocabulary")
    parser.add_argument("--tokens", type=positive_int, required=True, metavar="N", help=_HELP["tokens"])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for checkpoints and results")
    about = "lengths to evaluate and the training length (default: doubled from the old to the new length)"
    parser.add_argument("--lengths", type=int_list, metavar="N,N,...", help=about)
    parser.add_argument("--split", default="test", help="split to score (default: test)")
    add_settings(parser, [name for name, s in SETTINGS.items() if s.is_extension_option], _HELP)
    add_no_cache(parser)
    add_figure_width(parser)
    add_latex(parser)
    parser.set_defaults(log=None, load_now=True)


def run(args: argparse.Namespace) -> None:
    """Run ``extend``."""
    from fairseq_rpe.reports.external_results import write_extension_report
    from fairseq_rpe.sweeps import context_extension

    config = TrainingConfig(**{"rpe": "", **stated_settings(args)})
    extension = context_extension.resolve_extension(config, args.lengths, args.split)
    results = context_extension.run_extension(extension)
    title = f"{args.finetune_from}, from {extension.original_length} to {args.tokens} tokens"
    layout = {"width": args.figure_width, "latex": args.latex}
    folder, length = extension.folder, extension.original_length
    print(write_extension_report(results, folder, length, title=title, **layout).text)
