"""Checkpoints that one command measures on one text: their arguments, labels and models, the text's stream."""

from __future__ import annotations

import argparse
import logging
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.cli import checkpoints
from fairseq_rpe.cli.fairseq_setup import as_fairseq_command, log_to
from fairseq_rpe.cli.options import add_rpe_module, package_folder
from fairseq_rpe.cli.trained import not_ours
from fairseq_rpe.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def add_subjects(parser: argparse.ArgumentParser) -> None:
    """The arguments of commands that measure several checkpoints on one text."""
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder")
    parser.add_argument("--subset", default="test", help="split to read (default: test)")
    parser.add_argument("--positions", metavar="SPEC", help="position transform (default: the checkpoint's)")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="default: auto")
    add_rpe_module(parser)


@dataclass(frozen=True)
class Subject:
    """A checkpoint to measure; no other has its ``label``."""

    path: Path
    label: str
    train_length: int


def find_subjects(paths: list[Path]) -> list[Subject]:
    """Look at checkpoints, without loading them, and label each by its encoding.

    Raises:
        UserError: one is missing, damaged, named twice, not of this plugin, or not trained as a plain language model.
    """
    found = []
    for path in paths:
        header = checkpoints.load_header(path)
        check_plain(path, header["cfg"])
        model, task = _parts(header["cfg"])
        label, moved = str(model["rpe"]), model.get("positions_train") or "identity"
        if moved != "identity":
            label += f" + {moved}"
        length = int(model.get("rpe_train_length") or task.get("tokens_per_sample") or 0)
        found.append(Subject(path, label, length))
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("a checkpoint is named twice: leave one out")
    labels = [subject.label for subject in found]
    return [
        Subject(s.path, f"{s.label} [{n}]", s.train_length) if labels.count(s.label) > 1 else s
        for n, s in enumerate(found, start=1)
    ]


def check_plain(path: Path, cfg: dict[str, Any], otherwise: str = "") -> None:
    """Refuse a checkpoint that is not of this plugin or was not trained as a plain language model.

    Args:
        path: named in the refusal. cfg: the checkpoint's configuration.
        otherwise: a remedy of the calling command, added to those that are named for text.
    """
    model, task = _parts(cfg)
    if task.get("algorithm"):
        raise UserError(f"{path} was trained on an algorithmic task: this command is for text")
    if "rpe" not in model:
        raise UserError(f"{not_ours(path, model)}{otherwise}")
    odd = [k for k in ("self_target", "past_target", "future_target", "add_bos_token") if task.get(k)]
    odd += ["output_dictionary_size"] if task.get("output_dictionary_size", -1) >= 0 else []
    if odd:
        flag = "--" + odd[0].replace("_", "-")
        raise UserError(f"{path} was trained with {flag}, which this command does not do: train without it{otherwise}")


def _parts(cfg: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's and the task's settings."""
    return cfg.get("model") or {}, cfg.get("task") or {}


# settings of a checkpoint that a command's option replaces
_OVERRIDES = {
    "rpe": "rpe",
    "positions_eval": "positions",
    "compute_dtype": "compute_dtype",
    "attention_backend": "attention_backend",
}


def load(args: argparse.Namespace, path: Path) -> tuple[Any, Any]:
    """The model of a checkpoint in evaluation mode, on its device, and its task over the data folder."""
    log_to(None)
    try:
        with as_fairseq_command(["--user-dir", package_folder()]):
            from fairseq import checkpoint_utils

            import fairseq_rpe.models  # noqa: F401  (registers: this package was imported before fairseq)

            wanted = {key: value for key, name in _OVERRIDES.items() if (value := getattr(args, name, None))}
            overrides = {"data": str(args.data), **wanted}
            models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], overrides)
    except UserError:
        raise
    except Exception as error:
        logging.getLogger(__name__).error(traceback.format_exc())
        raise UserError(f"{path} cannot be used with {args.data}: {type(error).__name__}: {error}") from error
    for key, value in wanted.items():
        if getattr(cfg.model, key, None) != value:
            flag = "--" + _OVERRIDES[key].replace("_", "-")
            raise UserError(f"{path} is older than {flag}: leave the flag out or train it again")
    return models[0].eval().to(device_of(args)), task


def device_of(args: argparse.Namespace) -> str:
    """What ``--device`` comes to on this machine."""
    import torch

    return "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"


def read_stream(args: argparse.Namespace, dictionary: Any, tokens: int) -> Tensor:
    """(tokens + 1,) int64: fairseq's first input, the end-of-sentence symbol, then the split's first tokens."""
    import torch
    from fairseq.data import data_utils

    lines = data_utils.load_indexed_dataset(str(args.data / args.subset), None, "mmap")
    parts, found = [torch.tensor([dictionary.eos()])], 0
    for number in range(len(lines)):
        if found >= tokens:
            break
        parts.append(lines[number].long())
        found += len(parts[-1])
    stream = torch.cat(parts)[: tokens + 1]
    if len(stream) != tokens + 1:
        raise UserError(f"{args.data}/{args.subset} holds {found} tokens where its index says more: binarise it again")
    if stream.eq(dictionary.pad()).any() or int(stream.max()) >= len(dictionary):
        raise UserError(f"{args.data}/{args.subset} holds padding or numbers beyond its dictionary: binarise it again")
    return stream
