"""``sweep``: train several methods and evaluate each of them."""

import argparse
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fairseq_rpe.cli.options import add_no_cache, int_list, positive_int, processes, seed_list, spec_list
from fairseq_rpe.cli.train import add_fairseq_flags, add_settings, stated_settings
from fairseq_rpe.core.errors import UserError, require_fairseq
from fairseq_rpe.data.folder import check_not_data
from fairseq_rpe.reports import report_files
from fairseq_rpe.runs.run_folder import check_no_run
from fairseq_rpe.runs.training_config import SETTINGS, TrainingConfig
from fairseq_rpe.sweeps import recipes, run_sweep, slurm
from fairseq_rpe.sweeps.grid import SweepRun
from fairseq_rpe.sweeps.resolve import Sweep, build_sweep, load_inputs
from fairseq_rpe.sweeps.sweep_kind import sweep_kind
from fairseq_rpe.sweeps.sweep_record import SweepFolder
from fairseq_rpe.utils.files import exclusive_lock
from fairseq_rpe.utils.json_files import read_json_lines
from fairseq_rpe.utils.output_checks import check_output_folder


def add_grid_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the data and the methods of a sweep."""
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA", help="binarised data folder")
    parser.add_argument(
        "--algorithms", type=spec_list, metavar='"SPEC ..."', help='instead of DATA: generated tasks, e.g. "copy sort"'
    )
    parser.add_argument(
        "--encodings", type=spec_list, metavar='"SPEC SPEC ..."', help="encodings, separated by blanks or commas"
    )
    parser.add_argument(
        "--recipe", metavar="NAME", help=f"instead of --encodings: {', '.join(recipes.names())} or a recipe file"
    )
    parser.add_argument("--preset", metavar="NAME", help="size preset of the recipe (default: laptop)")
    parser.add_argument("--methods", type=spec_list, metavar='"NAME ..."', help="methods of the recipe, or all")


def add_evaluate_at(parser: argparse.ArgumentParser) -> None:
    """Add the option for evaluations along the training."""
    about = "also evaluate the models after these numbers of updates, which one training keeps"
    parser.add_argument("--evaluate-at", type=int_list, metavar="N,N,...", help=about)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``sweep``."""
    parser.description = (
        "Train several encodings and evaluate each of them at several lengths. To resume an interrupted sweep, repeat "
        "the command; finished work is not repeated."
    )
    add_grid_options(parser)
    parser.add_argument(
        "--lengths",
        type=int_list,
        metavar="N,N,...",
        help="lengths in tokens (the training length is always added) or numbers of items",
    )
    add_evaluate_at(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the sweep (default: runs/RECIPE-PRESET)")
    about = (
        "also evaluate on this text, which has DATA's vocabulary; in a recipe with questions: fine-tune and evaluate "
        "on this question data set instead of the preset's (may be repeated)"
    )
    parser.add_argument("--eval-data", type=named_folder, action="append", default=[], metavar="NAME=DIR", help=about)
    parser.add_argument("--split", help="split to score (default: test; for questions valid)")
    parser.add_argument("--max-tokens", type=positive_int, metavar="N", help="tokens per evaluation batch")
    parser.add_argument("--seeds", type=seed_list, metavar="N,N,...", help="seeds of the runs (default: 1)")
    parser.add_argument("--jobs", type=processes, metavar="J", help="runs in parallel (default: all GPUs, or cores)")
    parser.add_argument(
        "--launcher",
        choices=("local", "slurm", "dry-run"),
        default="local",
        help="local (default): this machine; slurm: a SLURM cluster; dry-run: print the commands and run none",
    )
    parser.add_argument(
        "--slurm",
        type=_slurm_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting of submitit for --launcher slurm (may be repeated): partition, account, timeout_min, "
        "cpus_per_task, mem_gb, constraint, additional_parameters.X …",
    )
    add_settings(parser, [name for name, s in SETTINGS.items() if s.in_sweep])
    add_no_cache(parser)
    add_fairseq_flags(parser)


def _slurm_setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not value or not re.fullmatch(r"[A-Za-z_][\w.-]*", key):
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE")
    if key in slurm.RESERVED_SETTINGS:
        raise argparse.ArgumentTypeError(f"'{key}' cannot be set here: {slurm.RESERVED_SETTINGS[key]}")
    return key, value


def named_folder(text: str) -> tuple[str, Path]:
    """Parse the name and the folder of a further text, NAME=DIR."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=DIR, e.g. arxiv=data-bin/arxiv")
    return name, Path(folder)


def _slurm_settings(args: argparse.Namespace, nodes: int) -> list[tuple[str, str]] | None:
    """Return the SLURM settings, also of a dry run; None for runs on this machine."""
    if args.launcher == "local" and nodes > 1:
        raise UserError("--nodes: a sweep on several machines needs --launcher slurm; a single run: train --nodes")
    if args.launcher == "local" and args.slurm:
        raise UserError("--slurm needs --launcher slurm (or dry-run): give it, or drop --slurm")
    return args.slurm if args.launcher == "slurm" or args.slurm or nodes > 1 else None


def resolve_sweep(args: argparse.Namespace) -> Sweep:
    """Return the sweep of a parsed command line."""
    names = [name for name in inspect.signature(build_sweep).parameters if name != "base"]
    base = TrainingConfig(**{**stated_settings(args), "rpe": "", "out": args.out, "data": None})
    sweep = build_sweep(base, **{name: getattr(args, name) for name in names})
    if any(method.continues or method.rpe_eval for method in sweep.trained):
        from fairseq_rpe.sweeps.preflight import with_checkpoint_rotations

        return with_checkpoint_rotations(sweep)
    return sweep


def _cost_comments(sweep: Sweep, runs: Sequence[SweepRun]) -> Iterator[str]:
    """Yield a comment with the estimated costs of each run; seeds of a method have the same costs."""
    from fairseq_rpe.sweeps.cost_model import estimate_runs, vocabulary_is_known
    from fairseq_rpe.sweeps.device_kinds import Hardware

    if not vocabulary_is_known(sweep):
        yield f"# no estimate of costs before {sweep.data} exists: fairseq-rpe plan --vocabulary N estimates them"
        return
    for e in estimate_runs(sweep, runs, Hardware("device")):
        seeds = f" ({e.seeds} seeds)" if e.seeds > 1 else ""
        yield (
            f"# estimate: {e.name}{seeds}: {e.parameters.total:,} parameters, "
            f"{e.training_flops:.2e} FLOPs of training, {e.memory.peak / 2**30:.2f} GiB per device"
        )


def run(args: argparse.Namespace) -> int:
    """Run ``sweep``."""
    sweep = resolve_sweep(args)
    on_slurm = _slurm_settings(args, sweep.base_config.nodes)
    check_not_data("--out", sweep.out)
    check_no_run("--out", sweep.out)
    inputs = load_inputs(sweep, dry=args.launcher == "dry-run")
    without_bias: set[str] = set()
    if sweep.base_config.log_encodings_every:
        from fairseq_rpe.sweeps import preflight

        without_bias = preflight.encodings_without_bias(sweep)
    kind = sweep_kind(sweep.kind)
    runs = kind.build_runs(sweep, inputs, without_bias)
    kind.check_lengths(sweep, runs)
    if args.launcher == "dry-run":
        from fairseq_rpe.sweeps import preflight

        preflight.preflight(sweep, runs, trains_here=False)
        print("\n".join([*run_sweep.dry_run_lines(sweep, runs, on_slurm), *_cost_comments(sweep, runs)]))
        return 0
    if on_slurm is not None:
        slurm.check_slurm()
    check_output_folder(sweep.out)
    folder = SweepFolder(sweep.out)
    with exclusive_lock(
        folder.lock, f"another sweep is running in {sweep.out}: wait for it, stop it or choose another --out"
    ):
        record = run_sweep.merged_record(sweep, inputs, runs)
        for sweep_run in runs:
            sweep_run.check_intermediate()
        remaining = {run: stages for run in runs if (stages := run.remaining_stages())}
        for line in run_sweep.skipped_evaluations(runs):
            print(line, file=sys.stderr)
        if remaining:
            from fairseq_rpe.sweeps import preflight

            require_fairseq()
            preflight.preflight(sweep, runs, trains_here=on_slurm is None or sweep.base_config.device == "cpu")
        folder.write_record(run_sweep.with_commands(record, remaining))
        failures = run_sweep.run_sweep(sweep, remaining, runs, on_slurm)
        if any(read_json_lines(run.folder.results) for run in runs):
            text = None if remaining else report_files.current_summary(folder)
            if text is None:
                from fairseq_rpe.reports.write import write_report

                text = write_report(folder).text
            print(text)
    for line in failures:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failures else 0
