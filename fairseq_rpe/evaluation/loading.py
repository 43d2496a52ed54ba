"""Checkpoints as models that can be measured, and the text that they are measured on."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fairseq_rpe.models  # noqa: F401  (before fairseq: registers, and lets it start quicker)

# isort: split
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.checkpoints.checkpoint import check_size
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.encodings import load_module
from fairseq_rpe.evaluation.records import Blocks, Overrides
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.checkpoints import Checkpoint
from fairseq_rpe.runs.settings import IDENTITY
from fairseq_rpe.utils import devices

logger = logging.getLogger(__name__)
_SETTINGS = ("rpe", "positions_eval", "compute_dtype", "attention_backend")  # of a checkpoint, that may be replaced


@dataclass(frozen=True)
class Subject:
    """A checkpoint to measure; no other has its ``label``."""

    path: Path
    label: str
    train_length: int
    blocks: Blocks = "stream"  # of its training; document: no token saw another one


def load(path: Path, use: Overrides, data: Path | None = None, log: Path | None = None) -> tuple[Any, Any]:
    """A checkpoint's ``transformer_rpe_lm`` in evaluation mode, on its device, and its fairseq task.

    ``data`` has the dictionary of a task on text. Raises UserError, which names ``log``, if the checkpoint cannot be
    used or is older than a setting that is to be replaced.
    """
    if use.rpe_module is not None:
        load_module(use.rpe_module)
    wanted = {key: value for key in _SETTINGS if (value := getattr(use, key.removesuffix("_eval")))}
    changed = wanted if data is None else {"data": str(data), **wanted}
    with one_line(f"{path} cannot be used with {data}" if data else f"{path} cannot be used", log):
        models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], changed)
    for key, value in wanted.items():
        # an encoding has been completed with the checkpoint's rotation
        if getattr(cfg.model, key, None) != value and (key != "rpe" or getattr(cfg.model, key, None) is None):
            flag = "--" + key.removesuffix("_eval").replace("_", "-")
            raise UserError(f"{path} is older than {flag}: leave the flag out or train it again")
    return models[0].eval().to(devices.chosen(use.device)), task


@contextlib.contextmanager
def one_line(what: str, log: Path | None) -> Iterator[None]:
    """Failures inside become a message that says ``what`` failed and names ``log``, where the traceback is."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        logger.exception(what)
        more = f"; see {log}" if log else ""
        raise UserError(f"{what}: {type(error).__name__}: {error}{more}") from error


def find_subjects(paths: Sequence[Path], rpe_module: Path | None = None) -> list[Subject]:
    """Look at checkpoints, without loading more than their encodings, and label each by that.

    ``rpe_module``: Python file with encodings of the user's own. Raises UserError if one
    is missing, damaged, named twice, not of this plugin or no plain language model.
    """
    if rpe_module is not None:
        load_module(rpe_module)
    found = []
    for path in paths:
        checkpoint = checkpoints.load(path)
        check_plain(checkpoint)
        checkpoint.learned()
        moved = checkpoint.model.get("positions_train") or IDENTITY
        label = checkpoint.encoding if moved == IDENTITY else f"{checkpoint.encoding} + {moved}"
        within = separates_documents(checkpoint)
        blocks = "document" if within else blocks_of(checkpoint)
        found.append(Subject(path, label, checkpoint.train_length() or 0, blocks))
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("a checkpoint is named twice: leave one out")
    labels = [subject.label for subject in found]
    return [
        replace(s, label=f"{s.label} [{n}]") if labels.count(s.label) > 1 else s for n, s in enumerate(found, start=1)
    ]


def check_plain(checkpoint: Checkpoint, otherwise: str = "") -> None:
    """Refuse one that is not this plugin's, or not a plain language model; ``otherwise``: the caller's own remedy."""
    path, task = checkpoint.path, checkpoint.task
    if task.get("algorithm"):
        raise UserError(f"{path} was trained on an algorithmic task: this command is for text")
    checkpoint.require_ours(otherwise)
    check_size(checkpoint)
    odd = [k for k in ("self_target", "past_target", "future_target", "add_bos_token") if task.get(k)]
    size = task.get("output_dictionary_size")
    odd += ["output_dictionary_size"] if isinstance(size, int) and size >= 0 else []
    if odd:
        flag = "--" + odd[0].replace("_", "-")
        raise UserError(f"{path} was trained with {flag}, which this command does not do: train without it{otherwise}")


def blocks_of(checkpoint: Checkpoint) -> Blocks:
    """Whether a checkpoint was trained on blocks that run across documents, or lie within one.

    Args:
        checkpoint: of any task; only training on text has a choice.

    Returns:
        stream or document.

    Raises:
        UserError: its settings name neither.
    """
    match checkpoint.task.get("blocks", "stream"):
        case "stream":
            return "stream"
        case "document":
            return "document"
        case other:
            raise UserError(f"checkpoint {checkpoint.path} is refused: its setting blocks is {other!r}; train again")


def separates_documents(checkpoint: Checkpoint) -> bool:
    """Whether documents in one row were separate in a checkpoint's training.

    Args:
        checkpoint: of any task; only training on text has a choice.

    Returns:
        True where each token saw its own document alone, in blocks of a stream.

    Raises:
        UserError: its settings say neither.
    """
    found = checkpoint.task.get("separate_documents", False)
    if not isinstance(found, bool):
        raise UserError(
            f"checkpoint {checkpoint.path} is refused: its setting separate_documents is {found!r}; train again"
        )
    return found


def read_stream(data: Path, subset: str, dictionary: Dictionary, tokens: int) -> Tensor:
    """(tokens + 1,) int64: fairseq's first input, the end-of-sentence symbol, then the split's first tokens."""
    ids, _ = corpus.read_split(data, subset)
    stream = F.pad(torch.from_numpy(ids[:tokens].astype("i8")), (1, 0), value=dictionary.eos())
    if stream.eq(dictionary.pad()).any() or int(stream.max()) >= len(dictionary):
        raise UserError(f"{data}/{subset} holds padding or numbers beyond its dictionary: binarise it again")
    return stream
