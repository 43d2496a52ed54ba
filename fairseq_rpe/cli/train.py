"""``train``: run fairseq-train once, with good defaults and resuming."""

import argparse
import shlex
from pathlib import Path

from fairseq_rpe.cli.options import (
    add_training_options,
    address,
    default_by_arch,
    nonnegative_int,
    positive_int,
    seed,
    spec,
)
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.records import from_attributes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``train``."""
    parser.description = "Run fairseq-train. Rerunning the same command resumes an interrupted run."
    parser.add_argument(
        "data", type=Path, nargs="?", metavar="DATA", help="binarised text, or folder of prepare-questions"
    )
    parser.add_argument(
        "--algorithm", type=spec, metavar="SPEC", help="instead of DATA: a generated task, e.g. copy:items=20"
    )
    parser.add_argument(
        "--rpe", type=spec, required=True, metavar="SPEC", help="encoding, e.g. alibi or type1:variant=paper"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for checkpoints")
    about = (
        "fine-tune this checkpoint: take its weights, with a new optimiser, schedule and update count; for questions "
    )
    about += "also its architecture, dropout, positions and training length"
    parser.add_argument("--finetune-from", "--init-from", type=Path, metavar="CHECKPOINT", help=about)
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="folder for TensorBoard event files")
    parser.add_argument(
        "--save-every",
        type=positive_int,
        metavar="N",
        help=f"updates between checkpoints ({default_by_arch('save_every')})",
    )
    about = (
        "progress (default): a progress line, with fairseq-train's messages in DIR/train.log (with --debug on the "
        "terminal too); simple or json: fairseq's messages in that format on the terminal only"
    )
    parser.add_argument("--log-format", choices=("progress", "simple", "json"), default="progress", help=about)
    parser.add_argument(
        "--log-interval", type=positive_int, default=25, metavar="N", help="updates between log lines (default: 25)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print the command")
    parser.add_argument(
        "--node-rank", type=nonnegative_int, metavar="R", help="rank of this machine among --nodes (default: SLURM's)"
    )
    parser.add_argument(
        "--master", type=address, metavar="HOST:PORT", help="address of the first machine (default: SLURM's)"
    )
    add_training_options(parser)
    parser.add_argument("--seed", type=seed, default=1, help="default: 1")


def run(args: argparse.Namespace) -> None:
    """Run ``train``."""
    from fairseq_rpe.checkpoints import checkpoint_file
    from fairseq_rpe.data.folder import check_not_data
    from fairseq_rpe.runs import launch, training_data
    from fairseq_rpe.runs.run_folder import CheckpointFolder, check_no_sweep
    from fairseq_rpe.runs.settings import TrainingRequest

    request = from_attributes(TrainingRequest, args)
    check_not_data("--out", request.out)
    check_no_sweep("--out", request.out)
    if request.log_encodings_every and not request.tensorboard:
        raise UserError("--log-encodings-every writes to TensorBoard: give --tensorboard DIR too")
    if request.finetune_from:
        from fairseq_rpe.runs import from_checkpoint

        if request.finetune_from.is_file():  # a missing file is refused below
            request = from_checkpoint.with_checkpoint_rotation(request)
        if training_data.is_question_data(request.data):
            request = from_checkpoint.with_checkpoint_settings(request)
    plan = training_data.make_checked_plan(request)
    if request.finetune_from:
        checkpoint_file.check_file(request.finetune_from)
    node = launch.current_node(request)
    if args.dry_run:
        from fairseq_rpe.runs.model_check import check_model

        check_model(request, plan)
        print(shlex.join(launch.training_command(request, plan, node, launch.count_gpus(request, dry=True))))
        return
    if CheckpointFolder(request.out).finished_digest(plan):
        print(f"{request.out} already holds the finished run of {plan.updates} updates")
        return
    from fairseq_rpe.runs import train

    train.check_training(request, plan)
    train.train(request, plan, node)
