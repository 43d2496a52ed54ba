"""``train``: one fairseq-train run with sound defaults that goes on where it was stopped."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rpe.cli import checkpoints, environment, launch
from fairseq_rpe.cli.defaults import defaults_for, full_name
from fairseq_rpe.cli.options import add_rpe_module, check_positions, check_spec, fraction, positive_float, positive_int
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import file_digest, lock, read_json, write_json
from fairseq_rpe.data import folder as corpus

STATE = "run.json"
_BY_ARCH = "default: by architecture"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train one language model",
        description="Runs fairseq-train. The same command goes on where an earlier one was stopped.",
        epilog="Further fairseq-train flags may follow after a lone --",
        allow_abbrev=False,
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA", help="binarised data folder")
    parser.add_argument("--algorithm", metavar="SPEC", help="in place of DATA: a generated task, e.g. copy:items=20")
    parser.add_argument("--rpe", required=True, metavar="SPEC", help="encoding, e.g. alibi or type1:form=paper")
    parser.add_argument("--save-dir", type=Path, required=True, metavar="DIR", help="folder for checkpoints")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="folder for TensorBoard's event files")
    parser.add_argument("--save-every", type=positive_int, metavar="N", help=f"updates ({_BY_ARCH})")
    parser.add_argument("--log-format", choices=("simple", "json"), default="simple", help="default: simple")
    parser.add_argument("--log-interval", type=positive_int, default=25, metavar="N", help="default: 25 updates")
    parser.add_argument("--dry-run", action="store_true", help="print the command and do nothing")
    launch.add_options(parser)
    add_model_options(parser)
    parser.add_argument("--seed", type=positive_int, default=1, help="default: 1")
    parser.set_defaults(run=run, extra=[])


def parse(argv: Sequence[str], extra: Sequence[str]) -> argparse.Namespace:
    """The arguments of one ``train`` command without running it."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["train", *argv])
    args.extra = list(extra)
    return args


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that ``train`` and ``sweep`` have in common."""
    parser.add_argument("--arch", default="tiny", help="tiny, wiki103, base, large or a full name (default: tiny)")
    parser.add_argument("--tokens", type=positive_int, metavar="N", help=f"training length ({_BY_ARCH})")
    parser.add_argument("--updates", type=positive_int, metavar="N", help=_BY_ARCH)
    parser.add_argument("--batch-sentences", type=positive_int, metavar="N", help=f"per process ({_BY_ARCH})")
    parser.add_argument("--update-freq", type=positive_int, default=1, metavar="N", help="batches an update (1)")
    parser.add_argument("--nproc", type=positive_int, default=1, metavar="N", help="processes or GPUs of a node (1)")
    parser.add_argument("--nodes", type=positive_int, default=1, metavar="M", help="machines that train a run (1)")
    parser.add_argument("--lr", type=positive_float, help=f"peak learning rate ({_BY_ARCH})")
    parser.add_argument("--warmup", type=positive_int, metavar="N", help=f"updates ({_BY_ARCH})")
    parser.add_argument("--schedule", choices=("inverse_sqrt", "linear"), help=f"linear ends at 0 ({_BY_ARCH})")
    parser.add_argument("--dropout", type=fraction, help=_BY_ARCH)
    parser.add_argument("--positions-train", default="identity", metavar="SPEC", help="default: identity")
    parser.add_argument("--positions-eval", metavar="SPEC", help="default: what --positions-train names, or identity")
    parser.add_argument("--rpe-share", choices=("auto", "model", "layer"), default="auto", help="default: auto")
    parser.add_argument("--attention-backend", default="auto", metavar="NAME", help="default: auto")
    parser.add_argument(
        "--compute-dtype", choices=("fp32", "bf16"), default="fp32", help="of matrix products (default: fp32)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument(
        "--inspect-every", type=positive_int, metavar="N", help="updates between pictures of the bias in TensorBoard"
    )
    add_rpe_module(parser)


@dataclass(frozen=True)
class Plan:
    """A resolved run: ``settings`` fix its numbers and may not change between two starts."""

    settings: dict[str, Any]
    updates: int
    save_every: int


def plan(args: argparse.Namespace, data_digest: str) -> Plan:
    """Fill in the defaults. ``data_digest`` fixes the data; a task's own spec does for a generated one."""
    defaults = defaults_for(args.arch, bool(args.algorithm))

    def chosen(name: str) -> Any:
        given = getattr(args, name)
        return getattr(defaults, name) if given is None else given

    names = ("tokens", "batch_sentences", "lr", "warmup", "dropout")
    settings = {
        "rpe": args.rpe.strip(),
        "arch": full_name(args.arch),
        "data": data_digest,
        **{name: chosen(name) for name in names},
        "update_freq": args.update_freq,
        "nproc": args.nproc * args.nodes,  # in all: that is what the numbers depend on
        "seed": args.seed,
        "rpe_share": args.rpe_share,
        "positions_train": args.positions_train,
        "positions_eval": args.positions_eval,
        "rpe_module": file_digest(args.rpe_module) if args.rpe_module else None,
        "extra": args.extra,
    }
    if args.algorithm:
        from fairseq_rpe.algorithms import build

        if args.tokens is not None:
            raise UserError("--tokens does not go with --algorithm: say how many items, e.g. copy:items=20")
        task = build(args.algorithm)
        settings |= {"data": task.spec, "tokens": task.tokens(task.longest("train"))}
    if args.compute_dtype != "fp32":
        settings["compute_dtype"] = args.compute_dtype
    if chosen("schedule") == "linear":
        # the learning rate depends on the last update, so a run cannot be prolonged
        settings |= {"schedule": "linear", "last_update": chosen("updates")}
    return Plan(settings, chosen("updates"), chosen("save_every"))


def is_finished(folder: Path, wanted: Plan) -> str | None:
    """The digest of the finished run's checkpoint, or nothing if there is work left."""
    checkpoint = folder / checkpoints.LAST
    if not (folder / STATE).exists() or not checkpoint.exists():
        return None
    state = read_json(folder / STATE)
    _check_same_run(folder, state, wanted)
    done = state.get("finished") or {}
    if done.get("updates") != wanted.updates:
        return None
    found = file_digest(checkpoint)
    return found if found == done.get("checkpoint") else None


def run(args: argparse.Namespace) -> int:
    if (args.data is None) == (args.algorithm is None):
        raise UserError("name what to train on: either a DATA folder or --algorithm SPEC")
    if args.rpe_module and not args.rpe_module.is_file():
        raise UserError(f"--rpe-module {args.rpe_module} does not exist")
    if args.inspect_every and not args.tensorboard:
        raise UserError("--inspect-every writes for TensorBoard: give --tensorboard DIR too")
    if args.algorithm:
        wanted = plan(args, args.algorithm)
    else:
        corpus.check_folder(args.data, "train", "valid")
        wanted = plan(args, corpus.digest(args.data))
        for split in ("train", "valid"):
            corpus.check_block(args.data, split, wanted.settings["tokens"])
    folder, node = args.save_dir, launch.here(args)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--save-dir {folder} is a file: name a folder")
    if args.dry_run:
        print(shlex.join(launch.command(args, wanted, node, launch.gpus(args, dry=True))))
        return 0
    if is_finished(folder, wanted):
        print(f"{folder} already holds the finished run of {wanted.updates} updates")
        return 0
    check_spec(args.rpe, args.rpe_module, wanted.settings["tokens"])
    check_positions(args.positions_train, args.positions_eval, wanted.settings["tokens"])
    if args.inspect_every and not has_bias(args.rpe):
        raise UserError(
            f"--inspect-every: '{args.rpe}' has no bias to show: drop the flag, or name an encoding with a bias"
        )
    if not node.first:
        return _join(args, wanted, node)
    with lock(folder / ".lock", f"another process is training in {folder}: wait for it or stop it") as held:
        done = _done_so_far(folder, wanted)
        if done < wanted.updates:
            write_json(folder / STATE, {"settings": wanted.settings, "updates": wanted.updates})
            environment.record(folder, done, launch.threads(args), gpus=args.device != "cpu")
            _train(args, wanted, node, [held])
        _record_finished(folder, wanted)
    return 0


def _join(args: argparse.Namespace, wanted: Plan, node: launch.Node) -> int:
    """Train along on another node than the first, which alone locks and writes the folder; all of them must see it."""
    if checkpoints.newest(args.save_dir)[0] < wanted.updates:
        _train(args, wanted, node, [])
    return 0


def _train(args: argparse.Namespace, wanted: Plan, node: launch.Node, held: list[int]) -> None:
    code = launch.start(args, wanted, node, held)
    if code:
        raise UserError(f"fairseq-train ended with code {code}: its messages are above")


def has_bias(spec: str) -> bool:
    """Whether an encoding, known to be spelt well, has a bias that --inspect-every can show."""
    from fairseq_rpe import encodings

    return encodings.build(spec, heads=4, width=128, length=64).adds_bias


def _check_same_run(folder: Path, state: dict[str, Any], wanted: Plan) -> None:
    before = state.get("settings", {})
    differing = [k for k in {**wanted.settings, **before} if before.get(k) != wanted.settings.get(k)]
    if differing:
        key = differing[0]
        there, here = before.get(key), wanted.settings.get(key)
        raise UserError(
            f"{folder} holds another run ({key} is {there!r} there, {here!r} here): choose another folder or delete it"
        )


def _done_so_far(folder: Path, wanted: Plan) -> int:
    """Updates behind the checkpoint to go on from, after repairing and checking the folder."""
    if not (folder / STATE).exists():
        if any(folder.glob("checkpoint*.pt")):
            raise UserError(f"{folder} holds checkpoints but no {STATE}: choose another --save-dir")
        return 0
    done = checkpoints.recover_last(folder)
    if done > wanted.updates:
        raise UserError(f"{folder} holds {done} updates, more than --updates {wanted.updates}: choose another folder")
    return done


def _record_finished(folder: Path, wanted: Plan) -> None:
    done = checkpoints.num_updates(checkpoints.load_header(folder / checkpoints.LAST))
    if done != wanted.updates:
        raise UserError(f"fairseq-train stopped at update {done} of {wanted.updates}: its messages above say why")
    finished = {"updates": done, "checkpoint": file_digest(folder / checkpoints.LAST)}
    write_json(folder / STATE, {"settings": wanted.settings, "updates": wanted.updates, "finished": finished})
