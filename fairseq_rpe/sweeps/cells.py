"""The runs of a sweep: what is trained once, and how it is evaluated for each method that shares it."""

import sys
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fairseq_rpe.algorithms import build
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation import results
from fairseq_rpe.evaluation.reach import longest_row, most_items
from fairseq_rpe.evaluation.results import AnswerKey, AnswerResult, TextKey, TextResult
from fairseq_rpe.runs import launch
from fairseq_rpe.runs.run_folder import RunFolder
from fairseq_rpe.runs.settings import Plan, Request, plan
from fairseq_rpe.sweeps.request import Sweep
from fairseq_rpe.sweeps.state import Method, SweepFolder

TRAINING, EVALUATING = "training", "evaluating"
PROGRAM = [sys.executable, "-m", "fairseq_rpe.cli.main"]


@dataclass(frozen=True)
class Stage:
    """One command of a run and the file that its output is added to."""

    name: str
    command: list[str]
    log: Path


@dataclass(frozen=True)
class Evaluation:
    """One command that adds results to a run, and what they are of; the checkpoint is not known before the training."""

    command: list[str]
    keys: tuple[TextKey | AnswerKey, ...]
    left_out: str = ""  # which lengths the method cannot be evaluated at, and why


@dataclass(eq=False)
class Cell:
    """One training run, with the evaluations that it is good for."""

    folder: RunFolder
    request: Request
    plan: Plan
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def train_command(self) -> list[str]:
        return [*PROGRAM, "train", *self.request.argv()]

    @property
    def rows(self) -> int:
        """Results of the finished cell."""
        return sum(len(evaluation.keys) for evaluation in self.evaluations)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({key.length for evaluation in self.evaluations for key in evaluation.keys}))

    def work_left(self) -> list[Stage]:
        """The stages that the run still needs: none, some evaluations, or all."""
        log = self.folder.eval_log
        digest = self.folder.checkpoints.finished(self.plan)
        if digest is None:
            training = Stage(TRAINING, self.train_command, self.folder.train_log)
            return [training, *(Stage(EVALUATING, e.command, log) for e in self.evaluations)]
        kind = AnswerResult if self.request.algorithm else TextResult
        known = {result.key for result in results.read(kind, self.folder.results)}
        return [
            Stage(EVALUATING, evaluation.command, log)
            for evaluation in self.evaluations
            if any(replace(key, checkpoint=digest) not in known for key in evaluation.keys)
        ]

    def torchrun(self, on_slurm: bool, gpus: int) -> str:
        """What the training starts on each node, as a line for a shell."""
        node = launch.in_slurm(self.request) if on_slurm else launch.Node()
        return launch.shown(launch.command(self.request, self.plan, node, gpus))


def make(sweep: Sweep, data_digest: str | None, unseen: Collection[str] = ()) -> list[Cell]:
    """One cell per (encoding, training positions, task, seed): methods that differ in evaluation alone share it.

    ``data_digest``: of the text, if it is one. The encodings in ``unseen`` are trained without --inspect-every.
    """
    cells: dict[str, Cell] = {}
    for algorithm in sweep.algorithms or (None,):
        for method in sweep.methods:
            for seed in sweep.seeds:
                name = method.run_name(seed, algorithm)
                if name not in cells:
                    cells[name] = _cell(sweep, method, seed, algorithm, data_digest, method.rpe not in unseen)
                cells[name].evaluations.append(_evaluation(sweep, cells[name], method, data_digest))
    return list(cells.values())


def _cell(
    sweep: Sweep, method: Method, seed: int, algorithm: str | None, data_digest: str | None, inspected: bool
) -> Cell:
    place = SweepFolder(sweep.out)
    folder = place.run_of(method, seed, algorithm)
    request = replace(
        sweep.base,
        rpe=method.rpe,
        save_dir=folder.checkpoints.path,
        data=sweep.data,
        algorithm=algorithm,
        positions_train=method.positions_train,
        seed=seed,
        tensorboard=place.tensorboard / folder.name,
        inspect_every=sweep.base.inspect_every if inspected else None,
    )
    return Cell(folder, request, plan(request, data_digest or ""))


def _evaluation(sweep: Sweep, cell: Cell, method: Method, data_digest: str | None) -> Evaluation:
    lengths = _lengths(sweep, cell)
    limit = _limit(cell, method, sweep.subset)
    beyond = [n for n in lengths if limit is not None and n > limit]
    left_out, unit = "", "items" if cell.request.algorithm else "tokens"
    if beyond:
        left_out = f"{method.name}: its positions end at {limit} {unit}, so it is not evaluated at"
        left_out += f" {beyond[0]}" if len(beyond) == 1 else f" {len(beyond)} lengths from {beyond[0]} to {beyond[-1]}"
        lengths = [n for n in lengths if n not in beyond]
    if not lengths:
        raise UserError(f"{left_out}: give smaller --lengths, or leave the method out")
    common = ["--out", str(cell.folder.results), "--log", str(cell.folder.eval_log)]
    common += ["--device", "cpu" if cell.request.device == "cpu" else "auto"]
    if sweep.lengths or beyond:
        common += ["--lengths", ",".join(map(str, lengths))]
    if cell.request.rpe_module:
        common += ["--rpe-module", str(cell.request.rpe_module)]
    if method.positions_eval:
        common += ["--positions", method.positions_eval]
    of: dict[str, Any] = {"positions": method.positions_eval, "draws": results.draws_of(method.positions_eval)}
    checkpoint, task = str(cell.folder.checkpoints.last), cell.request.algorithm
    if task:
        command = [*PROGRAM, "accuracy", checkpoint, "--split", sweep.subset, *common]
        answers = AnswerKey(checkpoint="", algorithm=task, split=sweep.subset, **of, length=1)
        return Evaluation(command, tuple(replace(answers, length=n) for n in lengths), left_out)
    command = [*PROGRAM, "eval", checkpoint, str(sweep.data), "--subset", sweep.subset, *common]
    command += ["--max-tokens", str(sweep.max_tokens)] if sweep.max_tokens else []
    text = TextKey(checkpoint="", data=data_digest or "", subset=sweep.subset, **of, length=1)
    return Evaluation(command, tuple(replace(text, length=n) for n in lengths), left_out)


def _limit(cell: Cell, method: Method, subset: str) -> int | None:
    """Tokens, or items of a task, of the longest row that the method's positions reach; None: they reach any."""
    if cell.request.algorithm:
        return most_items(method.positions_eval, build(cell.request.algorithm), subset)
    return longest_row(method.positions_eval, cell.plan.settings.tokens)


def _lengths(sweep: Sweep, cell: Cell) -> list[int]:
    """Those to evaluate: the training length is always among those of a text."""
    task = cell.request.algorithm
    if task is None:
        return sorted({cell.plan.settings.tokens, *sweep.lengths})
    there = build(task).lengths(sweep.subset)
    for length in sweep.lengths:
        if length not in there:
            raise UserError(
                f"'{task}' has no {sweep.subset} example of {length} items: leave {length} out of --lengths"
            )
    return sorted(sweep.lengths or there)
