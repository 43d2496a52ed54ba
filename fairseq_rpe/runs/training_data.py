"""Checks of the training data before a training starts: a generated task, a text, or a folder of questions."""

from collections.abc import Sequence
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.questions import dataset, prompt
from fairseq_rpe.questions.mixture import mixture_weights
from fairseq_rpe.runs.reserved_flags import flag_values
from fairseq_rpe.runs.settings import TrainingPlan, make_plan
from fairseq_rpe.runs.training_config import TrainingConfig


def is_question_data(data: Path | None) -> bool:
    """Return whether a data folder holds questions."""
    return data is not None and dataset.is_question_folder(data)


def data_digest(data: Path) -> str:
    """Return the digest of everything in a data folder that affects results."""
    return dataset.dataset_digest(data) if dataset.is_question_folder(data) else corpus.corpus_digest(data)


def make_checked_plan(config: TrainingConfig) -> TrainingPlan:
    """Check the data of a configuration and resolve it.

    Args:
        config: configuration of the training.

    Returns:
        The plan of the training.

    Raises:
        UserError: neither or both of ``data`` and ``algorithm`` are given, or the data cannot be used.
    """
    if (config.data is None) == (config.algorithm is None):
        raise UserError("name what to train on: either a DATA folder or --algorithm SPEC")
    if config.data is None:
        return make_plan(config, "")
    corpus.check_folder(config.data, "train", "valid")
    plan = make_plan(config, data_digest(config.data))
    tokens = plan.settings.tokens
    if is_question_data(config.data):
        if config.blocks is not None or config.separate_documents:
            option = "--blocks" if config.blocks is not None else "--separate-documents"
            raise UserError(f"{option} is for text, and {config.data} holds questions, each a row: drop it")
        check_questions(config.data, tokens, config.extra)
    else:
        check_blocks(config.data, tokens, config.blocks, bool(config.separate_documents))
    return plan


def check_blocks(data: Path, tokens: int, blocks: str | None, separate: bool = False) -> None:
    """Check that the train and valid splits of a text can be divided into blocks.

    Args:
        data: binarised data folder.
        tokens: tokens of a block.
        blocks: "stream", "document", or ``None`` for a stream.
        separate: whether documents of a stream are separated.

    Raises:
        UserError: a split does not fill a block, or documents are needed but not marked or all too short.
    """
    for split in ("train", "valid"):
        corpus.check_block_length(data, split, tokens)
    if blocks == "document" or separate:
        corpus.check_documents(data, "train", "valid")
    if blocks == "document":
        corpus.check_document_block(data, "train", tokens)


def check_questions(data: Path, tokens: int, extra: Sequence[str] = ()) -> None:
    """Check that a training can use a folder of questions.

    Args:
        data: folder of questions.
        tokens: training length.
        extra: further flags for fairseq-train.

    Raises:
        UserError: a question does not fit into ``tokens``, or ``--mixture`` names an unknown set.
    """
    folder = dataset.load_dataset(data)
    for split in ("train", "valid"):
        prompt.check_lengths(folder, split, [tokens])
    if (mixture := flag_values(extra, ["--mixture"]).get("--mixture")) is not None:
        answers = {name: info.splits["train"].answers for name, info in folder.sets.items() if "train" in info.splits}
        mixture_weights(mixture, answers)  # raises UserError for an unknown set
