"""``sweep --launcher slurm``: the runs with work left as one multirun of hydra's submitit launcher, a job each."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from fairseq_rpe.runs import processes, runner
from fairseq_rpe.cli.cells import Cell
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import lock

FOLDER = "slurm"
_LAUNCHER = "submitit_slurm"
_PLAIN = re.compile(r"[\w.:/%@+-]+")
# decided by other flags, or what the jobs rely on
_OURS = {
    "nodes": "--nodes",
    "array_parallelism": "--jobs",
    "tasks_per_node": "it is always 1: --nproc says how many processes there are",
    "submitit_folder": "it is always a folder of --out",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slurm",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for --launcher slurm (may be repeated): partition, account, timeout_min, cpus_per_task, mem_gb, "
        "constraint, additional_parameters.X … of hydra.launcher",
    )


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not value or not re.fullmatch(r"[A-Za-z_][\w.-]*", key):
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE")
    if key in _OURS:
        raise argparse.ArgumentTypeError(f"'{key}' is not set here: {_OURS[key]}")
    return key, value


def wanted(args: argparse.Namespace) -> bool:
    """Whether a command is about SLURM, a dry run included.

    Raises:
        UserError: it asks for what only SLURM could give.
    """
    if args.launcher == "local" and args.nodes > 1:
        raise UserError("--nodes: a sweep on several machines needs --launcher slurm; a single run: train --nodes")
    if args.launcher == "local" and args.slurm:
        raise UserError("--slurm is for --launcher slurm (or dry-run): give that, or drop it")
    return args.launcher == "slurm" or bool(args.slurm) or args.nodes > 1


def command(args: argparse.Namespace, runs: Sequence[str]) -> list[str]:
    """The multirun that submits a job for each of ``runs`` and waits for all of them."""
    folder = args.out / FOLDER
    settings = {
        "name": args.out.name,
        "nodes": str(args.nodes),
        "tasks_per_node": "1",
        # a run goes on from its last checkpoint, so that it may need its time several times over
        "max_num_timeout": "100",
        "submitit_folder": f"{folder}/%j",
    }
    if args.device != "cpu":
        settings["gpus_per_node"] = str(args.nproc)
    if args.jobs:
        settings["array_parallelism"] = str(args.jobs)
    settings |= dict(args.slurm)
    line = [sys.executable, "-m", "fairseq_rpe.cli.job", "--multirun", f"hydra/launcher={_LAUNCHER}"]
    line += [f"hydra.sweep.dir={_quoted(str(folder))}", "hydra.sweep.subdir=.", "hydra.output_subdir=null"]
    line += ["hydra/job_logging=none"]
    for key, value in settings.items():
        # hydra refuses keys that the launcher does not have, but those of sbatch's own are added
        line.append(f"{'+' if '.' in key else ''}hydra.launcher.{key}={_quoted(value)}")
    return [*line, f"+out={_quoted(str(args.out))}", "+run=" + ",".join(_quoted(name) for name in runs)]


def _quoted(value: str) -> str:
    """A value as hydra reads it: lists and tables as they are, text that means something to hydra in quotes."""
    if value[:1] in "[{" or _PLAIN.fullmatch(value):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def check() -> None:
    """Refuse what would fail after the sweep was prepared."""
    try:
        metadata.version("hydra-submitit-launcher")
    except metadata.PackageNotFoundError:
        install = "pip install -c requirements/constraints.txt -e '.[slurm]'"
        raise UserError(f"--launcher slurm needs hydra's submitit launcher: {install}") from None
    for program in ("sbatch", "srun"):
        if shutil.which(program) is None:
            raise UserError(f"--launcher slurm: there is no {program} here: start it on a login node of the cluster")


def execute(args: argparse.Namespace, pending: Mapping[Cell, list[runner.Stage]]) -> list[str]:
    """Submit, wait and say which runs are not finished then; a run that an earlier job is busy with is left to it."""
    busy = [cell for cell in pending if _is_busy(cell)]
    for cell in busy:
        print(f"{cell.slug} is being carried out by a job of an earlier call: left to it", file=sys.stderr)
    mine = {cell: _size(cell, stages) for cell, stages in pending.items() if cell not in busy}
    told = ""
    if mine:
        for cell in mine:
            cell.save()
        told = _submit(args, [cell.slug for cell in mine])
    failures = [f"{cell.slug} is not finished: another job is busy with it, see squeue" for cell in busy]
    for cell, before in mine.items():
        if left := cell.work_left():
            why = runner.last_error(left[0].log, before.get(left[0].log, 0)) or told or "its job left no message"
            where = left[0].log if left[0].log.exists() else args.out / FOLDER
            failures.append(f"{cell.slug} is not finished, {left[0].name} is left: {why} (log: {where})")
    return failures


def _submit(args: argparse.Namespace, runs: list[str]) -> str:
    """Start the multirun and wait for it; returns what it complained about."""
    log = args.out / FOLDER / "multirun.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    line = command(args, runs)
    print(f"{len(runs)} jobs for SLURM (log: {log}): {shlex.join(line)}", file=sys.stderr)
    print("This waits for them. If it is stopped they go on; the same command then takes stock.", file=sys.stderr)
    with open(log, "ab") as file:
        before = file.tell()
        code = processes.wait_all([processes.spawn(line, {}, log=file)])
    return (runner.last_error(log, before) or f"hydra ended with code {code}") if code else ""


def _is_busy(cell: Cell) -> bool:
    try:
        with lock(cell.lock, "busy"):
            return False
    except UserError:
        return True


def _size(cell: Cell, stages: list[runner.Stage]) -> dict[Path, int]:
    return {stage.log: stage.log.stat().st_size for stage in stages if stage.log.exists()}
