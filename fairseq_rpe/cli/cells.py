"""The runs of a sweep: what is trained once, and how it is evaluated for each method that shares it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fairseq_rpe.cli import accuracy, checkpoints, evaluate, launch, report, runner, train
from fairseq_rpe.cli.recipes import Method
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import read_json, read_json_lines, write_json
from fairseq_rpe.data import folder as corpus

_MODULE = "fairseq_rpe.cli.main"
_LOG_INTERVAL = "25"
_FILE = "cell.json"


@dataclass(frozen=True)
class Evaluation:
    """One command that adds ``keys`` to a run's results, and what makes up the keys beside the checkpoint."""

    command: list[str]
    same: dict[str, Any]


@dataclass(eq=False)
class Cell:
    """One training run, with the evaluations that it is good for."""

    folder: Path
    wanted: train.Plan
    train_command: list[str]
    lengths: list[int]
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def slug(self) -> str:
        return self.folder.name

    @property
    def results(self) -> Path:
        return self.folder / report.RESULTS

    @property
    def lock(self) -> Path:
        """Held by whoever carries out the run's stages."""
        return self.folder / ".lock"

    @property
    def rows(self) -> int:
        """Results of the finished cell."""
        return len(self.evaluations) * len(self.lengths)

    def work_left(self) -> list[runner.Stage]:
        """The stages that the run still needs: none, some evaluations, or all."""
        log = self.folder / "eval.log"
        digest = train.is_finished(self.folder / "checkpoints", self.wanted)
        if digest is None:
            training = runner.Stage("training", self.train_command, self.folder / "train.log")
            return [training, *(runner.Stage("evaluating", e.command, log) for e in self.evaluations)]
        rows = read_json_lines(self.results)
        stages = []
        for evaluation in self.evaluations:
            key = accuracy.key if "algorithm" in evaluation.same else evaluate.key
            known = {key(row) for row in rows}
            if any(key({**evaluation.same, "checkpoint": digest, "length": n}) not in known for n in self.lengths):
                stages.append(runner.Stage("evaluating", evaluation.command, log))
        return stages

    def torchrun(self, on_slurm: bool, gpus: int) -> str:
        """What the training starts on each node, as a line for a shell."""
        argv = self.train_command[len(_program("train")) :]
        cut = argv.index("--") if "--" in argv else len(argv)
        args = train.parse(argv[:cut], argv[cut + 1 :])
        node = launch.in_slurm(args) if on_slurm else launch.Node()
        return launch.shown(launch.command(args, self.wanted, node, gpus))

    def save(self) -> None:
        """Leave all that a job needs to know in the run's folder; see ``load``."""
        write_json(self.folder / _FILE, {**asdict(self), "folder": None})


def load(folder: Path) -> Cell:
    """The cell that was saved in ``folder``."""
    there = {**read_json(folder / _FILE), "folder": folder}
    there["wanted"] = train.Plan(**there["wanted"])
    there["evaluations"] = [Evaluation(**given) for given in there["evaluations"]]
    return Cell(**there)


def record(method: Method) -> dict[str, Any]:
    """A method as the sweep's state keeps it."""
    return {"rpe": method.rpe, "positions_train": method.positions_train, "positions_eval": method.positions_eval}


def make(args: argparse.Namespace, methods: list[Method], unseen: Collection[str] = ()) -> list[Cell]:
    """One cell per (encoding, training positions, task, seed): methods that differ in evaluation alone share it.

    The encodings in ``unseen`` are trained without --inspect-every.
    """
    cells: dict[str, Cell] = {}
    digest = None if args.algorithms else corpus.digest(args.data)
    for algorithm in args.algorithms or [None]:
        for method in methods:
            for seed in args.seeds:
                name = report.run_name(record(method), seed, algorithm)
                if name not in cells:
                    cells[name] = _cell(args, method, seed, algorithm, name, digest, method.rpe not in unseen)
                cells[name].evaluations.append(_evaluation(args, cells[name], method, algorithm, digest))
    return list(cells.values())


def _cell(
    args: argparse.Namespace,
    method: Method,
    seed: int,
    algorithm: str | None,
    name: str,
    digest: str | None,
    inspected: bool,
) -> Cell:
    folder = args.out / "runs" / name
    argv = ["--algorithm", algorithm] if algorithm else [str(args.data)]
    argv += ["--rpe", method.rpe, "--positions-train", method.positions_train]
    argv += ["--save-dir", str(folder / "checkpoints"), "--seed", str(seed)]
    argv += ["--tensorboard", str(args.out / "tensorboard" / name)]
    argv += ["--log-format", "json", "--log-interval", _LOG_INTERVAL]
    for flag in ("arch", "rpe_share", "attention_backend", "device", "nproc", "update_freq", "rpe_module"):
        argv += _flag(args, flag)
    for flag in ("tokens", "updates", "batch_sentences", "lr", "warmup", "schedule", "dropout", "compute_dtype"):
        argv += _flag(args, flag)
    argv += _flag(args, "inspect_every") if inspected else []
    argv += _flag(args, "nodes") if args.nodes > 1 else []
    wanted = train.plan(train.parse(argv, args.extra), digest or "")
    return Cell(
        folder=folder,
        wanted=wanted,
        train_command=[*_program("train"), *argv, *(["--", *args.extra] if args.extra else [])],
        lengths=_lengths(args, algorithm, wanted.settings["tokens"]),
    )


def _lengths(args: argparse.Namespace, algorithm: str | None, tokens: int) -> list[int]:
    if algorithm is None:
        return sorted({tokens, *args.lengths})
    from fairseq_rpe.algorithms import build

    there = accuracy.lengths_of(build(algorithm), args.subset)
    for length in args.lengths or ():
        if length not in there:
            raise UserError(
                f"'{algorithm}' has no {args.subset} example of {length} items: leave {length} out of --lengths"
            )
    return sorted(args.lengths or there)


def _evaluation(
    args: argparse.Namespace, cell: Cell, method: Method, algorithm: str | None, digest: str | None
) -> Evaluation:
    checkpoint = str(cell.folder / "checkpoints" / checkpoints.LAST)
    common = ["--out", str(cell.results)]
    if args.lengths:
        common += ["--lengths", ",".join(map(str, cell.lengths))]
    common += ["--log", str(cell.folder / "eval.log"), "--device", "cpu" if args.device == "cpu" else "auto"]
    common += _flag(args, "rpe_module")
    if method.positions_eval:
        common += ["--positions", method.positions_eval]
    same: dict[str, Any] = {"rpe": None, "positions": method.positions_eval}
    if algorithm:
        same |= {"algorithm": algorithm, "split": args.subset, "unit": "items"}
        return Evaluation([*_program("accuracy"), checkpoint, "--split", args.subset, *common], same)
    same |= {"data": digest, "subset": args.subset}
    command = [*_program("eval"), checkpoint, str(args.data), "--subset", args.subset, *common]
    return Evaluation([*command, *_flag(args, "max_tokens")], same)


def _program(name: str) -> list[str]:
    return [sys.executable, "-m", _MODULE, name]


def _flag(args: argparse.Namespace, name: str) -> list[str]:
    value = getattr(args, name)
    return [] if value is None else ["--" + name.replace("_", "-"), str(value)]
