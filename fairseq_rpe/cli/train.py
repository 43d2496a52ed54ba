"""``train``: one fairseq-train run with sound defaults that goes on where it was stopped."""

import argparse
import shlex
from pathlib import Path

from fairseq_rpe.cli.options import add_training, address, by_arch, count, positive_int, seed, spec
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.utils.records import filled


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = "Runs fairseq-train. Rerunning the same command resumes a run that was stopped."
    parser.add_argument(
        "data", type=Path, nargs="?", metavar="DATA", help="binarised text, or questions of prepare-answers"
    )
    parser.add_argument(
        "--algorithm", type=spec, metavar="SPEC", help="in place of DATA: a generated task, e.g. copy:items=20"
    )
    parser.add_argument(
        "--rpe", type=spec, required=True, metavar="SPEC", help="encoding, e.g. alibi or type1:form=paper"
    )
    parser.add_argument("--save-dir", type=Path, required=True, metavar="DIR", help="folder for checkpoints")
    about = "begin with the weights of this checkpoint; optimiser, schedule and updates are new (fine-tuning)"
    about += "; for questions its architecture, dropout, positions and training length are taken too"
    parser.add_argument("--finetune-from", "--init-from", type=Path, metavar="CHECKPOINT", help=about)
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="folder for TensorBoard's event files")
    parser.add_argument(
        "--save-every", type=positive_int, metavar="N", help=f"updates between checkpoints ({by_arch('save_every')})"
    )
    about = (
        "progress (default): a progress line here and fairseq-train's messages in DIR/train.log (with --debug here "
        "too); simple or json: its messages in that form, here only"
    )
    parser.add_argument("--log-format", choices=("progress", "simple", "json"), default="progress", help=about)
    parser.add_argument("--log-interval", type=positive_int, default=25, metavar="N", help="default: 25 updates")
    parser.add_argument("--dry-run", action="store_true", help="only print the command")
    parser.add_argument("--node-rank", type=count, metavar="R", help="which of --nodes this is (default: SLURM's)")
    parser.add_argument(
        "--master",
        type=address,
        metavar="HOST:PORT",
        help="address of the first machine, where all meet (default: SLURM's)",
    )
    add_training(parser)
    parser.add_argument("--seed", type=seed, default=1, help="default: 1")


def run(args: argparse.Namespace) -> None:
    from fairseq_rpe.checkpoints import checkpoint_file
    from fairseq_rpe.data.folder import check_not_data
    from fairseq_rpe.runs import launch, training_data
    from fairseq_rpe.runs.run_folder import CheckpointFolder, check_no_sweep
    from fairseq_rpe.runs.settings import Request

    request = filled(Request, args)
    check_not_data("--save-dir", request.save_dir)
    check_no_sweep("--save-dir", request.save_dir)
    if request.inspect_every and not request.tensorboard:
        raise UserError("--inspect-every writes for TensorBoard: give --tensorboard DIR too")
    if request.finetune_from:
        from fairseq_rpe.runs import fine_tuning

        if request.finetune_from.is_file():  # one that is not there is refused below
            request = fine_tuning.with_checkpoint_rotation(request)
        if training_data.asks(request.data):
            request = fine_tuning.filled(request)
    wanted = training_data.checked(request)
    if request.finetune_from:
        checkpoint_file.check(request.finetune_from)
    node = launch.here(request)
    if args.dry_run:
        from fairseq_rpe.runs.model_check import check_model

        check_model(request, wanted)
        print(shlex.join(launch.command(request, wanted, node, launch.gpus(request, dry=True))))
        return
    if CheckpointFolder(request.save_dir).finished(wanted):
        print(f"{request.save_dir} already holds the finished run of {wanted.updates} updates")
        return
    from fairseq_rpe.runs import train

    train.check(request, wanted)
    train.train(request, wanted, node)
