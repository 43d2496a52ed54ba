"""Loads checkpoints for evaluation, labels them, and reads the text to evaluate them on."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

# Registers the models, tasks and criterions of this plugin with fairseq. It must come before the imports of fairseq:
# it imports ``compat.quick_start``, which imports fairseq with lazy modules in place of slow ones.
import fairseq_rpe.models  # noqa: F401

# isort: split
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe import compat
from fairseq_rpe.checkpoints.checkpoint import check_model_size
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.encodings import load_module
from fairseq_rpe.evaluation.records import Blocks, EvalOverrides
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.runs.settings import IDENTITY
from fairseq_rpe.utils import devices

logger = logging.getLogger(__name__)
# fields of EvalOverrides that replace the setting of the same name in a checkpoint
_REPLACEABLE = ("rpe", "positions_eval", "compute_dtype", "attention_backend")


@dataclass(frozen=True)
class LabelledCheckpoint:
    """A checkpoint to evaluate.

    Attributes:
        path: checkpoint file.
        label: the encoding and its position transform; unique, see :func:`label_checkpoints`.
        train_length: training length in tokens; 0 if the checkpoint does not record it.
        blocks: text that a token saw in training: ``document`` if no token saw another document, else ``stream``. So
            a model that was trained on a stream with separate documents has ``document`` here, and ``stream`` in
            :func:`training_blocks`.
    """

    path: Path
    label: str
    train_length: int
    blocks: Blocks = "stream"


def load_model(
    path: Path, overrides: EvalOverrides, data: Path | None = None, log: Path | None = None
) -> tuple[Any, Any]:
    """Load a checkpoint's model and task.

    fairseq's loader is patched: it also applies ``compat.overrides``, a dictionary of the whole process. This function
    empties the dictionary, so that ``overrides`` alone decides.

    Args:
        path: checkpoint file.
        overrides: settings in place of the checkpoint's.
        data: folder with the dictionary, for a task on text.
        log: log file, named in error messages.

    Returns:
        The ``transformer_rpe_lm`` in evaluation mode, on its device, and its fairseq task.

    Raises:
        UserError: the checkpoint cannot be used; or it was written by a version of this package that did not have
            one of the settings which ``overrides`` replaces.
    """
    if overrides.rpe_module is not None:
        load_module(overrides.rpe_module)
    # An earlier fairseq command in this process, such as fairseq-eval-lm, may have filled it from its flags: parsing
    # --rpe-eval, --positions-eval or --compute-dtype does so (``compat/flags.py``).
    compat.overrides.clear()
    replaced = {key: value for key in _REPLACEABLE if (value := getattr(overrides, key))}
    model_overrides = replaced if data is None else {"data": str(data), **replaced}
    with one_line_errors(f"{path} cannot be used with {data}" if data else f"{path} cannot be used", log):
        models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], model_overrides)
    for key, value in replaced.items():
        if not compat.is_replaced(cfg.model, key, value):
            flag = "--" + key.replace("_", "-")
            raise UserError(f"{path} is older than {flag}: leave the flag out or train it again")
    return models[0].eval().to(devices.resolve_device(overrides.device)), task


@contextlib.contextmanager
def one_line_errors(what: str, log: Path | None) -> Iterator[None]:
    """Turn exceptions into a one-line UserError that says what failed and names ``log``, which has the traceback."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        logger.exception(what)
        more = f"; see {log}" if log else ""
        raise UserError(f"{what}: {type(error).__name__}: {error}{more}") from error


def label_checkpoints(paths: Sequence[Path], rpe_module: Path | None = None) -> list[LabelledCheckpoint]:
    """Label checkpoints by their encodings, without loading whole models.

    Args:
        paths: checkpoint files.
        rpe_module: Python file that registers further encodings.

    Returns:
        The checkpoints in order. If several checkpoints have the same label, the number of the checkpoint in
        ``paths``, counted from 1, is appended to each, as in ``alibi [2]``.

    Raises:
        UserError: a checkpoint is missing, damaged, named twice, not of this plugin or not a plain language model.
    """
    if rpe_module is not None:
        load_module(rpe_module)
    labelled = []
    for path in paths:
        checkpoint = checkpoints.load(path)
        check_language_model(checkpoint)
        checkpoint.load_encodings()
        transform = checkpoint.model.get("positions_train") or IDENTITY
        label = checkpoint.encoding if transform == IDENTITY else f"{checkpoint.encoding} + {transform}"
        blocks = "document" if separates_documents(checkpoint) else training_blocks(checkpoint)
        labelled.append(LabelledCheckpoint(path, label, checkpoint.train_length() or 0, blocks))
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("a checkpoint is named twice: leave one out")
    labels = [checkpoint.label for checkpoint in labelled]
    return [
        replace(c, label=f"{c.label} [{n}]") if labels.count(c.label) > 1 else c
        for n, c in enumerate(labelled, start=1)
    ]


def choose_blocks(blocks: Blocks | None, subjects: Sequence[LabelledCheckpoint]) -> Blocks:
    """Return ``blocks``, or those of the checkpoints' training if ``blocks`` is None.

    Args:
        blocks: stream or document, or None.
        subjects: the checkpoints, at least one.

    Raises:
        UserError: ``blocks`` is None and the checkpoints were not all trained on one kind of blocks.
    """
    kinds = {subject.blocks for subject in subjects}
    if blocks is None and len(kinds) > 1:
        raise UserError("some of these models were trained on a stream, others on documents: choose with --blocks")
    return blocks or kinds.pop()


def check_language_model(checkpoint: RpeCheckpoint, remedy: str = "") -> None:
    """Check that a checkpoint is a plain language model of this plugin.

    Args:
        checkpoint: a loaded checkpoint.
        remedy: the caller's own remedy, appended to the error message.

    Raises:
        UserError: it was trained on an algorithmic task, by another model or with flags that are not supported.
    """
    path, task = checkpoint.path, checkpoint.task
    if task.get("algorithm"):
        raise UserError(f"{path} was trained on an algorithmic task: this command is for text")
    checkpoint.require_rpe_model(remedy)
    check_model_size(checkpoint)
    unsupported = [k for k in ("self_target", "past_target", "future_target", "add_bos_token") if task.get(k)]
    size = task.get("output_dictionary_size")
    unsupported += ["output_dictionary_size"] if isinstance(size, int) and size >= 0 else []
    if unsupported:
        flag = "--" + unsupported[0].replace("_", "-")
        raise UserError(
            f"{path} was trained with {flag}, which this command does not support: train without it{remedy}"
        )


def training_blocks(checkpoint: RpeCheckpoint) -> Blocks:
    """Return how the training text was split into blocks.

    Args:
        checkpoint: checkpoint of any task.

    Returns:
        ``stream`` if blocks run across documents, ``document`` if each block is within one. A task without the setting
        ``blocks``, such as fairseq's own ``language_modeling``, counts as ``stream``.

    Raises:
        UserError: the setting has another value.
    """
    blocks = checkpoint.task.get("blocks", "stream")
    if blocks not in corpus.BLOCKS:
        raise UserError(f"checkpoint {checkpoint.path} is refused: its setting blocks is {blocks!r}; train again")
    return cast(Blocks, blocks)


def separates_documents(checkpoint: RpeCheckpoint) -> bool:
    """Return whether tokens of a stream saw only their own document in training (``--separate-documents``).

    Args:
        checkpoint: checkpoint of any task.

    Returns:
        True if blocks ran across documents and each token saw only its own document. A task without the setting
        ``separate_documents``, such as fairseq's own ``language_modeling``, counts as False.

    Raises:
        UserError: the setting is not a boolean.
    """
    separate = checkpoint.task.get("separate_documents", False)
    if not isinstance(separate, bool):
        raise UserError(
            f"checkpoint {checkpoint.path} is refused: its setting separate_documents is {separate!r}; train again"
        )
    return separate


def read_stream(data: Path, split: str, dictionary: Dictionary, tokens: int) -> Tensor:
    """Read the first tokens of a split, with the end-of-sentence symbol before them.

    fairseq trains its language models with this symbol as the first input.

    Args:
        data: binarised data folder.
        split: name of the split.
        dictionary: dictionary of the model.
        tokens: number of tokens to read; a shorter split is read completely.

    Returns:
        (1 + tokens,) int64; shorter if the split is.

    Raises:
        UserError: the text has padding or symbols that the dictionary lacks.
    """
    ids, _ = corpus.read_split(data, split)
    stream = F.pad(torch.from_numpy(ids[:tokens].astype("i8")), (1, 0), value=dictionary.eos())
    if stream.eq(dictionary.pad()).any() or int(stream.max()) >= len(dictionary):
        raise UserError(f"{data}/{split} has padding or symbols outside of its dictionary: binarise it again")
    return stream
