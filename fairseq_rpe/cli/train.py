"""``train``: run fairseq-train once, with good defaults and resuming."""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

from fairseq_rpe.cli.options import add_no_cache
from fairseq_rpe.cli.training_options import add_settings, help_text, stated_settings
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs.training_config import SETTINGS, TrainingConfig, option_name


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``train``."""
    parser.description = "Train a language model with fairseq-train. To resume an interrupted run, repeat the command."
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA", help=help_text("data"))
    about = "start from the configuration in this run.json; options that are given replace its settings"
    parser.add_argument("--from-run", type=Path, metavar="FILE", help=about)
    add_settings(parser, [name for name in SETTINGS if name not in ("data", "extra")])
    add_no_cache(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the fairseq-train command and do not run it")
    parser.epilog = "Flags of fairseq-train may follow after a separate --"
    parser.set_defaults(extra=(), load_now=False)


def config_from_args(args: argparse.Namespace) -> TrainingConfig:
    """Return the configuration that a command line of ``train`` names.

    Args:
        args: parsed command line.

    Returns:
        The configuration; with ``--from-run`` that of the run, with the options of the command line in place of its
        settings.

    Raises:
        UserError: the encoding or the output folder is missing, or the record of the run has no valid configuration.
    """
    stated = stated_settings(args)
    if args.from_run is not None:
        from fairseq_rpe.runs.run_folder import read_run_config

        return replace(read_run_config(args.from_run), **stated)
    for name, value in (("rpe", "SPEC"), ("out", "DIR")):
        if name not in stated:
            raise UserError(f"{option_name(name)} is missing: give {option_name(name)} {value}, {SETTINGS[name].help}")
    return TrainingConfig(**stated)


def run(args: argparse.Namespace) -> None:
    """Run ``train``."""
    from fairseq_rpe.checkpoints import checkpoint_file
    from fairseq_rpe.data.folder import check_not_data
    from fairseq_rpe.runs import launch, training_data
    from fairseq_rpe.runs.run_folder import CheckpointFolder, check_no_sweep

    config = config_from_args(args)
    check_not_data("--out", config.out)
    check_no_sweep("--out", config.out)
    if config.log_encodings_every and not config.tensorboard:
        raise UserError("--log-encodings-every writes to TensorBoard: give --tensorboard DIR too")
    if config.finetune_from:
        from fairseq_rpe.runs import from_checkpoint

        if config.finetune_from.is_file():  # a missing file is refused below
            config = from_checkpoint.with_checkpoint_rotation(config)
        if training_data.is_question_data(config.data):
            config = from_checkpoint.with_checkpoint_settings(config)
    plan = training_data.make_checked_plan(config)
    if config.finetune_from:
        checkpoint_file.check_file(config.finetune_from)
    node = launch.current_node(config)
    if args.dry_run:
        from fairseq_rpe.runs.model_check import check_model

        check_model(config, plan)
        print(shlex.join(launch.training_command(config, plan, node, launch.count_gpus(config, dry=True))))
        return
    if CheckpointFolder(config.out).finished_digest(plan):
        print(f"{config.out} already holds the finished run of {plan.updates} updates")
        return
    from fairseq_rpe.runs import train

    train.check_training(config, plan)
    train.train(config, plan, node)
