"""``sweep``: encodings × seeds are trained, each is evaluated at every length, nothing twice."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rpe.cli import checkpoints, corpus, evaluate, processes, report, runner, train
from fairseq_rpe.cli.files import lock, read_json, read_json_lines, write_json
from fairseq_rpe.cli.options import check_spec, int_list, positive_int
from fairseq_rpe.core.errors import UserError

_MODULE = "fairseq_rpe.cli.main"
_LOG_INTERVAL = "25"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "sweep",
        help="train several encodings and evaluate each at several lengths",
        description="May be stopped at any time; the same command goes on and redoes nothing.",
        epilog="Further fairseq-train flags may follow after a lone --",
        allow_abbrev=False,
    )
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder")
    parser.add_argument("--encodings", required=True, metavar='"SPEC SPEC ..."', help="separated by blanks")
    parser.add_argument(
        "--lengths", type=int_list, required=True, metavar="N,N,...", help="the training length is always added"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the sweep")
    parser.add_argument("--subset", default="test", help="split to score (default: test)")
    parser.add_argument("--max-tokens", type=positive_int, metavar="N", help="evaluation batch in tokens")
    parser.add_argument("--seeds", type=int_list, default=[1], metavar="N,N,...", help="default: 1")
    parser.add_argument("--jobs", type=positive_int, metavar="J", help="runs at a time (default: GPUs, or cores)")
    parser.add_argument("--launcher", choices=("local", "dry-run"), default="local", help="dry-run prints the commands")
    train.add_model_options(parser)
    parser.set_defaults(run=run, extra=[])


@dataclass(frozen=True, eq=False)
class Cell:
    """One run: an encoding and a seed, with what is to be done for it."""

    spec: str
    seed: int
    folder: Path
    tensorboard: Path
    wanted: train.Plan
    train_command: list[str]
    eval_command: list[str]
    rows: int

    @property
    def slug(self) -> str:
        return self.folder.name


def run(args: argparse.Namespace) -> int:
    specs = args.encodings.split()
    if not specs:
        raise UserError('--encodings is empty: name at least one, e.g. --encodings "alibi type1"')
    if len(set(specs)) < len(specs):
        raise UserError("--encodings names one twice: leave one out")
    corpus.check_folder(args.data, "train", "valid", args.subset)
    if args.rpe_module and not args.rpe_module.is_file():
        raise UserError(f"--rpe-module {args.rpe_module} does not exist")
    data_digest = corpus.digest(args.data)
    cells = [_cell(args, spec, seed, data_digest) for spec in specs for seed in args.seeds]
    tokens = cells[0].wanted.settings["tokens"]
    lengths = _lengths(args, tokens)
    for split in ("train", "valid"):
        corpus.check_block(args.data, split, tokens)
    corpus.check_block(args.data, args.subset, lengths[-1])
    if args.launcher == "dry-run":
        for cell in cells:
            print(shlex.join(cell.train_command))
            print(shlex.join(cell.eval_command))
        return 0
    busy = f"another sweep is running in {args.out}: wait for it, stop it or choose another --out"
    with lock(args.out / ".lock", busy):
        state = _state(args, cells[0], specs, lengths)
        pending = {cell: work for cell in cells if (work := _work_left(args, cell, data_digest, lengths))}
        failures: list[str] = []
        if pending:
            _check_specs(args, specs, tokens)
        write_json(args.out / report.STATE, state)
        if pending:
            failures = runner.execute(pending, cells, *_resources(args))
        if any(read_json_lines(cell.folder / "eval.jsonl") for cell in cells):
            report.write(args.out, redraw=bool(pending))
    for line in failures:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failures else 0


def _lengths(args: argparse.Namespace, tokens: int) -> list[int]:
    return sorted({tokens, *args.lengths})


def _cell(args: argparse.Namespace, spec: str, seed: int, data_digest: str) -> Cell:
    name = report.slug(spec, seed)
    folder = args.out / "runs" / name
    tensorboard = args.out / "tensorboard" / name
    argv = [str(args.data), "--rpe", spec, "--save-dir", str(folder / "checkpoints"), "--seed", str(seed)]
    argv += ["--tensorboard", str(tensorboard), "--log-format", "json", "--log-interval", _LOG_INTERVAL]
    for flag in ("positions_train", "positions_eval"):
        argv += _flag(args, flag)
    for flag in ("arch", "rpe_share", "attention_backend", "device", "nproc", "update_freq", "rpe_module"):
        argv += _flag(args, flag)
    for flag in ("tokens", "updates", "batch_sentences", "lr", "warmup", "dropout"):
        argv += _flag(args, flag)
    wanted = train.plan(train.parse(argv, args.extra), data_digest)
    lengths = _lengths(args, wanted.settings["tokens"])
    evaluation = [str(folder / "checkpoints" / checkpoints.LAST), str(args.data), "--subset", args.subset]
    evaluation += ["--lengths", ",".join(map(str, lengths)), "--out", str(folder / "eval.jsonl")]
    evaluation += ["--log", str(folder / "eval.log"), "--device", "cpu" if args.device == "cpu" else "auto"]
    evaluation += _flag(args, "rpe_module") + _flag(args, "max_tokens")
    program = [sys.executable, "-m", _MODULE]
    return Cell(
        spec=spec,
        seed=seed,
        folder=folder,
        tensorboard=tensorboard,
        wanted=wanted,
        train_command=[*program, "train", *argv, *(["--", *args.extra] if args.extra else [])],
        eval_command=[*program, "eval", *evaluation],
        rows=len(lengths),
    )


def _flag(args: argparse.Namespace, name: str) -> list[str]:
    value = getattr(args, name)
    return [] if value is None else ["--" + name.replace("_", "-"), str(value)]


def _state(args: argparse.Namespace, cell: Cell, specs: list[str], lengths: list[int]) -> dict[str, Any]:
    """What the sweep is about, for the report; encodings, lengths and seeds may be added later."""
    settings = {k: v for k, v in cell.wanted.settings.items() if k not in ("rpe", "seed")}
    settings |= {"updates": cell.wanted.updates, "subset": args.subset}
    path = args.out / report.STATE
    before = read_json(path) if path.exists() else {"settings": settings}
    for key, value in settings.items():
        there = before["settings"].get(key)
        if there != value:
            raise UserError(
                f"{args.out} holds another sweep ({key} is {there!r} there, {value!r} here): choose another --out"
            )
    return {
        "settings": settings,
        "encodings": list(dict.fromkeys([*before.get("encodings", []), *specs])),
        "seeds": sorted({*before.get("seeds", []), *args.seeds}),
        "lengths": sorted({*before.get("lengths", []), *lengths}),
    }


def _work_left(args: argparse.Namespace, cell: Cell, data_digest: str, lengths: list[int]) -> list[runner.Stage]:
    """The stages that a run still needs: none, evaluation, or both."""
    evaluation = runner.Stage("evaluating", cell.eval_command, cell.folder / "eval.log")
    digest = train.is_finished(cell.folder / "checkpoints", cell.wanted)
    if digest is None:
        return [runner.Stage("training", cell.train_command, cell.folder / "train.log"), evaluation]
    known = {evaluate.key(row) for row in read_json_lines(cell.folder / "eval.jsonl")}
    same = {"checkpoint": digest, "data": data_digest, "subset": args.subset}
    missing = [n for n in lengths if evaluate.key({**same, "length": n}) not in known]
    return [evaluation] if missing else []


def _check_specs(args: argparse.Namespace, specs: list[str], tokens: int) -> None:
    seen: dict[str, str] = {}
    for spec in specs:
        normal = check_spec(spec, args.rpe_module, tokens)
        if normal in seen:
            raise UserError(f"'{seen[normal]}' and '{spec}' are the same encoding: leave one out")
        seen[normal] = spec


def _resources(args: argparse.Namespace) -> tuple[int, list[dict[str, str]]]:
    """How many runs at a time, and each place's environment: its share of the cores, its GPUs."""
    gpus: list[str] = []
    if args.device != "cpu":
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        gpus = [g for g in visible.split(",") if g][:count] or [str(g) for g in range(count)]
    cores = processes.cores()
    jobs = args.jobs or max(1, (len(gpus) or cores) // args.nproc)
    places = []
    for place in range(jobs):
        environment = {"OMP_NUM_THREADS": str(max(1, cores // (jobs * args.nproc)))}
        if gpus:
            own = {gpus[(place * args.nproc + r) % len(gpus)] for r in range(args.nproc)}
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(sorted(own))
        places.append(environment)
    return jobs, places
