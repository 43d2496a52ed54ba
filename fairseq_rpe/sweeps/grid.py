"""The runs of a sweep: what is trained once, and how it is evaluated for each method that shares it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fairseq_rpe.algorithms import build
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation import records
from fairseq_rpe.evaluation.position_limits import longest_row, most_items
from fairseq_rpe.evaluation.question_records import QuestionKey, QuestionResult
from fairseq_rpe.evaluation.records import AnswerKey, AnswerResult, Result, TextKey, TextResult
from fairseq_rpe.runs import launch
from fairseq_rpe.runs.run_folder import RunFolder, Which
from fairseq_rpe.runs.settings import Plan, Request, plan
from fairseq_rpe.sweeps.recipes import divided
from fairseq_rpe.sweeps.resolve import Sweep
from fairseq_rpe.sweeps.sweep_record import Kind, Method, SweepFolder
from fairseq_rpe.utils.child_processes import module_command

TRAINING, EVALUATING = "training", "evaluating"
RESULTS: dict[Kind, type[Result]] = {"text": TextResult, "algorithms": AnswerResult, "answers": QuestionResult}


def command_line(*words: str) -> list[str]:
    """The command that carries out a command of ``fairseq-rpe`` in a process of its own."""
    return module_command("fairseq_rpe.cli.main", *words)


@dataclass(frozen=True)
class Stage:
    """One command of a run and the file that its output is added to."""

    name: str
    command: list[str]
    log: Path


@dataclass(frozen=True)
class Evaluation:
    """One command that adds results to a run, and what they are of; the checkpoint is not known before the training.

    ``data``: the text, if it is one; ``corpus``: its name, if it is not the one that is trained on.
    """

    command: list[str]
    keys: tuple[TextKey | AnswerKey | QuestionKey, ...]
    data: Path | None = None
    corpus: str | None = None
    left_out: str = ""  # which lengths the method cannot be evaluated at, and why


@dataclass(eq=False)
class Cell:
    """One training run, with the evaluations that it is good for; ``parent``: the run that it continues.

    ``kind``: of its evaluations.
    """

    folder: RunFolder
    request: Request
    plan: Plan
    parent: Cell | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    kind: Kind = "text"
    asked: Which = "last"  # of its checkpoints, by evaluations

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def train_command(self) -> list[str]:
        return command_line("train", *self.request.argv())

    @property
    def rows(self) -> int:
        """Results of the finished cell."""
        return sum(len(evaluation.keys) for evaluation in self.evaluations)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({key.length for evaluation in self.evaluations for key in evaluation.keys}))

    def finished(self) -> str | None:
        """The digest of the finished run's checkpoint, or nothing if there is training left.

        Raises UserError: its folder holds another run.
        """
        if self.parent is None:
            return self.folder.checkpoints.finished(self.plan)
        before = self.parent.finished()
        if before is None:
            return None
        settings = replace(self.plan.settings, finetune_from=before)
        return self.folder.checkpoints.finished(replace(self.plan, settings=settings))

    def work_left(self) -> list[Stage]:
        """The stages that the run still needs: none, some evaluations, or all."""
        log = self.folder.eval_log
        digest = self.finished()
        if digest is None:
            training = Stage(TRAINING, self.train_command, self.folder.train_log)
            return [training, *(Stage(EVALUATING, e.command, log) for e in self.evaluations)]
        if self.asked != "last":
            digest = self.folder.checkpoints.chosen(self.asked)
        known = {result.key for result in records.read(RESULTS[self.kind], self.folder.results)}
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

    A cell comes after the one that it continues. ``data_digest``: of the text, if it is one. The encodings in
    ``unseen`` are trained without --inspect-every.
    """
    cells: dict[str, Cell] = {}
    by_name = {method.name: method for method in sweep.trained}
    texts = _texts(sweep, data_digest)
    for algorithm in sweep.algorithms or (None,):
        for method in sweep.trained:
            for seed in sweep.seeds:
                name = method.run_name(seed, algorithm)
                if name not in cells:
                    first = cells[by_name[method.continues].run_name(seed, algorithm)] if method.continues else None
                    request = request_of(sweep, method, seed, algorithm, first, method.rpe not in unseen)
                    folder = SweepFolder(sweep.out).run_of(method, seed, algorithm)
                    kind: Kind = "algorithms" if algorithm else "text"
                    digest = data_digest or ""
                    fixed = further_plan(method, request, digest) if first else plan(request, digest)
                    cells[name] = Cell(folder, request, fixed, first, kind=kind)
                if method in sweep.methods:
                    cells[name].evaluations += _evaluations(sweep, cells[name], method, texts)
    return list(cells.values())


def _texts(sweep: Sweep, data_digest: str | None) -> dict[str | None, tuple[Path, str]]:
    """By name, none for the one that is trained on, the folder and digest of each text to evaluate on."""
    if sweep.data is None:
        return {}
    found: dict[str | None, tuple[Path, str]] = {None: (sweep.data, data_digest or "")}
    for name, data in sweep.evaluate.items():
        found[name] = data, corpus.digest(data) if data.is_dir() else ""
    return found


def request_of(
    sweep: Sweep, method: Method, seed: int, algorithm: str | None, first: Cell | None, inspected: bool
) -> Request:
    """What the training of a cell is asked to be; ``first``: the one that it continues."""
    place = SweepFolder(sweep.out)
    folder = place.run_of(method, seed, algorithm)
    own: dict[str, Any] = {**method.further.given()}
    if method.further.batch_sentences is not None:
        own["batch_sentences"] = divided(method.further.batch_sentences, sweep.base)
    if method.further.schedule not in (None, "cosine"):
        own["min_lr"] = None
    given: dict[str, Any] = {
        "rpe": method.rpe,
        "save_dir": folder.checkpoints.path,
        "data": sweep.data,
        "algorithm": algorithm,
        "positions_train": method.positions_train,
        "seed": seed,
        "tensorboard": place.tensorboard / folder.name,
        "inspect_every": sweep.base.inspect_every if inspected else None,
        "finetune_from": first.folder.checkpoints.last if first else None,
    }
    return replace(sweep.base, **given, **own)


def further_plan(method: Method, request: Request, data_digest: str) -> Plan:
    """Resolve the plan of a training that continues another one.

    Raises:
        UserError: as :func:`~fairseq_rpe.runs.settings.plan` raises it, with the method's name, because the settings
            are those of a recipe.
    """
    try:
        return plan(request, data_digest)
    except UserError as error:
        raise UserError(f"further training of method '{method.name}': {error}") from None


def _evaluations(
    sweep: Sweep, cell: Cell, method: Method, texts: Mapping[str | None, tuple[Path, str]]
) -> list[Evaluation]:
    wanted, unit = _lengths(sweep, cell), build(cell.request.algorithm).unit if cell.request.algorithm else "tokens"
    lengths, left_out = within(_limit(cell, method, sweep.subset), wanted, method, unit)
    common = common_words(cell, method, lengths if sweep.lengths or left_out else ())
    of: dict[str, Any] = {"rpe": method.rpe_eval, "positions": method.positions_eval}
    of["draws"] = records.draws_of(method.positions_eval)
    checkpoint, task = str(cell.folder.checkpoints.last), cell.request.algorithm
    if task:
        command = command_line("accuracy", checkpoint, "--split", sweep.subset, *common)
        answers = AnswerKey(checkpoint="", algorithm=task, split=sweep.subset, **of, length=1)
        depths = build(task).depths(sweep.subset) or (None,)
        keys = tuple(replace(answers, length=n, depth=depth) for n in lengths for depth in depths)
        return [Evaluation(command, keys, left_out=left_out)]
    common += ["--max-tokens", str(sweep.max_tokens)] if sweep.max_tokens else []
    text = TextKey(checkpoint="", subset=sweep.subset, **of, length=1)
    return [
        Evaluation(
            command_line("eval", checkpoint, str(data), "--subset", sweep.subset, *common),
            tuple(replace(text, data=digest, length=n) for n in lengths),
            data,
            name,
            left_out,
        )
        for name, (data, digest) in texts.items()
    ]


def within(limit: int | None, lengths: Sequence[int], method: Method, unit: str) -> tuple[list[int], str]:
    """The lengths up to a limit, and in words which are left out.

    Raises UserError: all of them are.
    """
    beyond = [n for n in lengths if limit is not None and n > limit]
    if not beyond:
        return list(lengths), ""
    left_out = f"{method.name}: its positions end at {limit} {unit}, so it is not evaluated at"
    left_out += f" {beyond[0]}" if len(beyond) == 1 else f" {len(beyond)} lengths from {beyond[0]} to {beyond[-1]}"
    if len(beyond) == len(lengths):
        raise UserError(f"{left_out}: give smaller --lengths, or leave the method out")
    return [n for n in lengths if n not in beyond], left_out


def common_words(cell: Cell, method: Method, lengths: Sequence[int]) -> list[str]:
    """What every command that evaluates a method is told, at ``lengths`` if they are said."""
    words = ["--out", str(cell.folder.results), "--log", str(cell.folder.eval_log)]
    words += ["--device", "cpu" if cell.request.device == "cpu" else "auto"]
    words += ["--lengths", ",".join(map(str, lengths))] if lengths else []
    words += ["--rpe-module", str(cell.request.rpe_module)] if cell.request.rpe_module else []
    words += ["--positions", method.positions_eval] if method.positions_eval else []
    return words + (["--rpe", method.rpe_eval] if method.rpe_eval else [])


def _limit(cell: Cell, method: Method, subset: str) -> int | None:
    """Tokens, or items of a task, of the longest row that the method's positions reach; None: they reach any."""
    if cell.request.algorithm:
        return most_items(method.positions_eval, build(cell.request.algorithm), subset)
    return longest_row(method.positions_eval, cell.plan.settings.tokens)


def _lengths(sweep: Sweep, cell: Cell) -> list[int]:
    """Those to evaluate: the training lengths are always among those of a text, of what is trained further too."""
    task = cell.request.algorithm
    if task is None:
        further = (method.further.tokens for method in sweep.methods)
        return sorted({(cell.parent or cell).plan.settings.tokens, *filter(None, further), *sweep.lengths})
    built = build(task)
    if gone := built.lacks(sweep.subset, sweep.lengths):
        raise UserError(f"'{task}' has {gone}")
    return sorted(sweep.lengths or built.lengths(sweep.subset))
