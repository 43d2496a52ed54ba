"""``position-profile``: measure loss and attention by position; writes a table, CSV files and a figure."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_checkpoints_options, add_figure_width, positive_int
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.records import from_attributes

_LOSSES, _ATTENTION = "position_losses.csv", "position_attention.csv"
_PNG, _PDF = "position_profile.png", "position_profile.pdf"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``position-profile``."""
    parser.description = (
        "By position in long blocks of real text: the loss, the norm of the outputs of attention, and the part of the "
        "attention to keys that are as far back as the training length or farther."
    )
    add_checkpoints_options(parser)
    about = "tokens per block (default: 4 × the training length, or as many as fit)"
    parser.add_argument("--length", type=positive_int, metavar="N", help=about)
    parser.add_argument("--blocks", type=positive_int, default=16, metavar="N", help="blocks measured (default: 16)")
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help="blocks per batch (default: 2048 tokens)")
    out = Path("runs/position-profile")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="folder to write (default: %(default)s)")
    add_figure_width(parser)


def run(args: argparse.Namespace) -> None:
    """Run ``position-profile``."""
    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.evaluation import position_profile
    from fairseq_rpe.evaluation.empirical_receptive_field import ReceptiveFieldRequest
    from fairseq_rpe.evaluation.loading import label_checkpoints
    from fairseq_rpe.figures.position_profile import draw_position_profile
    from fairseq_rpe.figures.style import figures_at_width, save

    subjects = label_checkpoints(args.checkpoints, args.rpe_module)
    position_profile.check_training_lengths(subjects)
    request = from_attributes(ReceptiveFieldRequest, args)
    length, _ = request.resolve_block_size(max(subject.train_length for subject in subjects))
    check_output(args.out, (_LOSSES, _ATTENTION, _PNG, _PDF))
    profiles = [position_profile.measure_position_profile(request, subject, length) for subject in subjects]
    print(position_profile.profile_table(profiles).to_markdown())
    print(f"Blocks of {length} tokens, {args.blocks} of {args.data}/{args.split}. Position: number of tokens seen.")
    print("Norms are relative to those at the training length. Distant: the training length back, or farther.")
    print("Norms and attention are means over layers and heads.")
    atomic_write(args.out / _LOSSES, position_profile.losses_csv(profiles))
    atomic_write(args.out / _ATTENTION, position_profile.attention_csv(profiles))
    with figures_at_width(args.figure_width):
        save(draw_position_profile({p.label: p.curves() for p in profiles}), args.out / _PNG, args.out / _PDF)
    print(f"losses:    {args.out / _LOSSES}")
    print(f"attention: {args.out / _ATTENTION}")
    print(f"figure:    {args.out / _PNG}")
