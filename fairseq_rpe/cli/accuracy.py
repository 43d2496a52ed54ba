"""``accuracy``: exact answers to an algorithmic task by number of items, by greedy decoding with the cache."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import time
import traceback
from pathlib import Path
from typing import Any

from fairseq_rpe.cli import checkpoints
from fairseq_rpe.cli.defaults import defaults_for
from fairseq_rpe.cli.fairseq_setup import as_fairseq_command, log_to
from fairseq_rpe.cli.options import add_rpe_module, int_list, load_rpe_module, package_folder, positive_int
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import append_json_line, file_digest, read_json_lines
from fairseq_rpe.core.spec import configure, parse

_BATCH = 256
_KEY = ("checkpoint", "algorithm", "split", "length", "rpe", "positions", "unit")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "accuracy",
        help="exact answers of a checkpoint to its algorithmic task, by number of items",
        description="Prints one JSON line per number of items; one that is already in --out is not redone.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--split", default="test", choices=("train", "valid", "test"), help="default: test")
    parser.add_argument("--lengths", type=int_list, metavar="N,N,...", help="numbers of items (default: all there are)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON-lines file to add the results to")
    parser.add_argument("--rpe", metavar="SPEC", help="evaluate with this encoding in place of the checkpoint's")
    parser.add_argument("--positions", metavar="SPEC", help="position transform (default: the checkpoint's)")
    parser.add_argument(
        "--unit", choices=("items", "tokens"), default="items", help="of interpolation's ratio M/L (default: items)"
    )
    parser.add_argument("--batch-size", type=positive_int, default=_BATCH, metavar="N", help=f"default: {_BATCH}")
    parser.add_argument("--log", type=Path, metavar="FILE", help="file for fairseq's messages")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="default: auto")
    add_rpe_module(parser)
    parser.set_defaults(run=run)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two results the same measurement."""
    return tuple(row.get(k) for k in _KEY)


def run(args: argparse.Namespace) -> int:
    header = checkpoints.load_header(args.checkpoint)
    spec = (header["cfg"].get("task") or {}).get("algorithm")
    if not spec:
        raise UserError(f"{args.checkpoint} was not trained on an algorithmic task: fairseq-rpe eval is for text")
    from fairseq_rpe.algorithms import build

    task = build(spec)
    same = {"checkpoint": file_digest(args.checkpoint), "algorithm": task.spec, "split": args.split}
    same |= {"rpe": args.rpe, "positions": args.positions, "unit": args.unit}
    known = {key(row): row for row in (read_json_lines(args.out) if args.out else [])}
    lengths = args.lengths or lengths_of(task, args.split)
    missing = [n for n in lengths if key({**same, "length": n}) not in known]
    tested = None
    if missing:
        log_to(args.log)
        tested = _Tested(args, task, header["cfg"]["model"])
        tested.check(missing)
    for length in lengths:
        row = known.get(key({**same, "length": length}))
        if row is None:
            start = time.monotonic()
            right, examples = tested.score(length)
            row = {"encoding": checkpoints.encoding_of(header), **same, "length": length}
            row |= {"examples": examples, "right": right, "accuracy": right / examples}
            row |= {"transform": tested.positions(length), "seconds": round(time.monotonic() - start, 3)}
            if args.out:
                append_json_line(args.out, row)
        print(json.dumps(row), flush=True)
    return 0


def lengths_of(task: Any, split: str) -> list[int]:
    """The numbers of items that occur in a split."""
    return sorted({example.length for example in task.examples(split)})


def interpolated(spec: str, trained: int, length: int) -> str:
    """``spec`` with interpolation's automatic ratio made explicit: trained / length, 1 where the length was trained.

    >>> interpolated("interpolate", 20, 80)
    'interpolate:ratio=0.25'
    """
    from fairseq_rpe.positions import registry

    name, given = parse(spec)
    config = configure(registry.get(name).Config, name, given)
    if name != "interpolate" or config.ratio != "auto" or config.train is not None:
        return spec
    return f"interpolate:ratio={trained / length!r}" if length > trained else "identity"


class _Tested:
    """A loaded model with its examples."""

    def __init__(self, args: argparse.Namespace, task: Any, model: dict[str, Any]) -> None:
        self.args, self.algorithm = args, task
        load_rpe_module(args.rpe_module)
        try:
            self.model, self.task = _load(args, model.get("arch") or "")
        except UserError:
            raise
        except Exception as error:
            logging.getLogger(__name__).error(traceback.format_exc())
            where = f"; see {args.log}" if args.log else ""
            raise UserError(f"{args.checkpoint} cannot be used: {type(error).__name__}: {error}{where}") from error
        decoder = self.model.decoder
        if decoder.reads_length:
            raise UserError(
                "this encoding follows the length of the text, which grows while an answer is written: give a fixed "
                "factor with --rpe, or use --positions interpolate, which has one ratio for each number of items"
            )
        self.spec = args.positions or model.get("positions_eval") or decoder.moves.train.evaluation
        self.task.load_dataset(args.split)
        self.data = self.task.dataset(args.split)

    def check(self, lengths: list[int]) -> None:
        """Refuse numbers of items without examples, and positions that some length would not accept."""
        for length in lengths:
            if not (self.data.items == length).any():
                raise UserError(f"the {self.args.split} split has no example of {length} items: leave it out")
            self._place(length)

    def positions(self, length: int) -> str:
        """The position transform for examples of ``length`` items."""
        if self.args.unit == "items":
            return interpolated(self.spec, self.algorithm.longest("train"), length)
        return interpolated(self.spec, self.task.train_tokens, self.algorithm.tokens(length))

    def score(self, length: int) -> tuple[int, int]:
        """How many of how many examples of ``length`` items are answered exactly."""
        import torch

        from fairseq_rpe.modules.decoding import greedy

        self._place(length)
        rows = (self.data.items == length).nonzero()[0].tolist()
        device = next(self.model.parameters()).device
        right = 0
        for start in range(0, len(rows), self.args.batch_size):
            prompts, answers = self.data.prompts(rows[start : start + self.args.batch_size])
            written = greedy(self.model, prompts.to(device), answers.shape[1])
            right += int(torch.eq(written.cpu(), answers).all(1).sum())
        return right, len(rows)

    def _place(self, length: int) -> None:
        """Settle the positions of a whole row before its first token is read."""
        import torch

        from fairseq_rpe import positions

        seed = hashlib.blake2b(f"{self.spec}|{length}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
        transform = positions.build(self.positions(length), self.task.train_tokens)
        frozen = positions.freeze(transform, self.algorithm.tokens(length), generator)
        self.model.decoder.moves.evaluation = frozen


def _load(args: argparse.Namespace, arch: str) -> tuple[Any, Any]:
    flags = ["--user-dir", package_folder()]
    with as_fairseq_command(flags):
        import torch

        threads = defaults_for(arch, algorithm=True).threads
        if threads and "OMP_NUM_THREADS" not in os.environ:
            # single tokens of a small model: more threads only wait for each other
            torch.set_num_threads(threads)
        from fairseq import checkpoint_utils

        import fairseq_rpe.models  # noqa: F401  (registers: this package was imported before fairseq)

        overrides = {"rpe": args.rpe} if args.rpe else {}
        if args.positions:
            overrides["positions_eval"] = args.positions
        models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(args.checkpoint)], overrides)
    cuda = args.device != "cpu" and torch.cuda.is_available()
    return models[0].eval().to("cuda" if cuda else "cpu"), task
