"""``sweep``: train several methods and evaluate each, nothing twice."""

import argparse
import inspect
import re
import sys
from pathlib import Path

from fairseq_rpe.cli.options import add_training, int_list, positive_int, processes, seed_list, words
from fairseq_rpe.core.errors import UserError, need_fairseq
from fairseq_rpe.data.folder import check_not_data
from fairseq_rpe.reports import report_files
from fairseq_rpe.runs.run_folder import check_no_run
from fairseq_rpe.runs.settings import Request
from fairseq_rpe.sweeps import fine_tuning_grid, grid, recipes, run_sweep, slurm
from fairseq_rpe.sweeps.resolve import Sweep, resolve
from fairseq_rpe.sweeps.sweep_record import SweepFolder
from fairseq_rpe.utils.files import check_folder, lock, read_json_lines
from fairseq_rpe.utils.records import filled


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = "May be stopped at any time: rerunning it resumes and redoes nothing."
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA", help="binarised data folder")
    parser.add_argument(
        "--algorithms", type=words, metavar='"SPEC ..."', help='in place of DATA: generated tasks, e.g. "copy sort"'
    )
    parser.add_argument("--encodings", type=words, metavar='"SPEC SPEC ..."', help="separated by blanks or commas")
    parser.add_argument(
        "--recipe", metavar="NAME", help=f"in place of --encodings: {', '.join(recipes.names())} or FILE"
    )
    parser.add_argument("--scale", metavar="NAME", help="size of the recipe (default: laptop)")
    parser.add_argument("--methods", type=words, metavar='"NAME ..."', help="some of the recipe's methods, or all")
    parser.add_argument(
        "--lengths", type=int_list, metavar="N,N,...", help="tokens, the training length is always added; or items"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the sweep (default: runs/RECIPE-SCALE)")
    about = "also evaluate on this text, or ask these questions, with DATA's vocabulary (may be repeated)"
    parser.add_argument("--eval-data", type=_text, action="append", default=[], metavar="NAME=DIR", help=about)
    parser.add_argument("--subset", help="split to score (default: test; valid of questions)")
    parser.add_argument("--max-tokens", type=positive_int, metavar="N", help="evaluation batch in tokens")
    parser.add_argument("--seeds", type=seed_list, metavar="N,N,...", help="default: 1")
    parser.add_argument("--jobs", type=processes, metavar="J", help="runs at a time (default: GPUs, or cores)")
    parser.add_argument(
        "--launcher",
        choices=("local", "slurm", "dry-run"),
        default="local",
        help="this machine (default), a SLURM cluster, or only print the commands of either",
    )
    parser.add_argument(
        "--slurm",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for --launcher slurm (may be repeated): partition, account, timeout_min, cpus_per_task, mem_gb, "
        "constraint, additional_parameters.X … of submitit",
    )
    add_training(parser)


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not value or not re.fullmatch(r"[A-Za-z_][\w.-]*", key):
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE")
    if key in slurm.OURS:
        raise argparse.ArgumentTypeError(f"'{key}' is not set here: {slurm.OURS[key]}")
    return key, value


def _text(given: str) -> tuple[str, Path]:
    name, equals, place = given.partition("=")
    if not (name and equals and place):
        raise argparse.ArgumentTypeError(f"'{given}' is not NAME=DIR, e.g. arxiv=data-bin/arxiv")
    return name, Path(place)


def _on_slurm(args: argparse.Namespace) -> list[tuple[str, str]] | None:
    """The settings of a command about SLURM, a dry run included; ``None`` if it is about this machine."""
    if args.launcher == "local" and args.nodes > 1:
        raise UserError("--nodes: a sweep on several machines needs --launcher slurm; a single run: train --nodes")
    if args.launcher == "local" and args.slurm:
        raise UserError("--slurm is for --launcher slurm (or dry-run): give that, or drop it")
    return args.slurm if args.launcher == "slurm" or args.slurm or args.nodes > 1 else None


def resolved(args: argparse.Namespace) -> Sweep:
    """The sweep that the command line asks for."""
    own = [name for name in inspect.signature(resolve).parameters if name != "base"]
    base = filled(Request, args, rpe="", save_dir=args.out, data=None, seed=1)
    sweep = resolve(base, **{name: getattr(args, name) for name in own})
    if any(method.continues or method.rpe_eval for method in sweep.trained):
        from fairseq_rpe.sweeps.preflight import with_checkpoint_rotations

        return with_checkpoint_rotations(sweep)
    return sweep


def run(args: argparse.Namespace) -> int:
    sweep = resolved(args)
    on_slurm = _on_slurm(args)
    check_not_data("--out", sweep.out)
    check_no_run("--out", sweep.out)
    digest = run_sweep.check_data(sweep, dry=args.launcher == "dry-run")
    unseen: set[str] = set()
    if sweep.base.inspect_every:
        from fairseq_rpe.sweeps import preflight

        unseen = preflight.without_bias(sweep)
    made = (fine_tuning_grid if sweep.questions else grid).make(sweep, digest, unseen)
    run_sweep.check_lengths(sweep, made)
    if args.launcher == "dry-run":
        from fairseq_rpe.sweeps import preflight

        preflight.check(sweep, made, here=False)
        print("\n".join(run_sweep.commands(sweep, made, on_slurm)))
        return 0
    if on_slurm is not None:
        slurm.check()
    check_folder(sweep.out)
    folder = SweepFolder(sweep.out)
    with lock(folder.lock, f"another sweep is running in {sweep.out}: wait for it, stop it or choose another --out"):
        state = run_sweep.state(sweep, made)
        left = {cell: work for cell in made if (work := cell.work_left())}
        for line in run_sweep.left_out(made):
            print(line, file=sys.stderr)
        if left:
            from fairseq_rpe.sweeps import preflight

            need_fairseq()
            preflight.check(sweep, made, here=on_slurm is None or sweep.base.device == "cpu")
        folder.write(run_sweep.noted(state, left))
        failures = run_sweep.carry_out(sweep, left, made, on_slurm)
        if any(read_json_lines(cell.folder.results) for cell in made):
            text = None if left else report_files.text(folder)
            if text is None:
                from fairseq_rpe.reports.write import write

                text = write(folder).text
            print(text)
    for line in failures:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failures else 0
