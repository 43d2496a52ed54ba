"""What a training reads is looked at before it starts: a generated task, a text, or a folder of questions."""

from collections.abc import Sequence
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.questions import dataset, length_check
from fairseq_rpe.questions.mixture import shares
from fairseq_rpe.runs.reserved_flags import flag_values
from fairseq_rpe.runs.settings import Plan, Request, plan


def asks(data: Path | None) -> bool:
    """Whether what is trained on is a folder of questions."""
    return data is not None and dataset.is_prepared(data)


def digest(data: Path) -> str:
    """Of all in a folder that decides numbers."""
    return dataset.digest(data) if dataset.is_prepared(data) else corpus.digest(data)


def checked(request: Request) -> Plan:
    """The plan of a run. Raises UserError: neither or both of data and task are named, or the data cannot be used."""
    if (request.data is None) == (request.algorithm is None):
        raise UserError("name what to train on: either a DATA folder or --algorithm SPEC")
    if request.data is None:
        return plan(request, "")
    corpus.check_folder(request.data, "train", "valid")
    wanted = plan(request, digest(request.data))
    tokens = wanted.settings.tokens
    if asks(request.data):
        if request.blocks is not None or request.separate_documents:
            named = "--blocks" if request.blocks is not None else "--separate-documents"
            raise UserError(f"{named} is for text, and {request.data} holds questions, each a row: drop it")
        check_questions(request.data, tokens, request.extra)
    else:
        check_blocks(request.data, tokens, request.blocks, bool(request.separate_documents))
    return wanted


def check_blocks(data: Path, tokens: int, blocks: str | None, separate: bool = False) -> None:
    """Refuse a text whose train and valid splits cannot be cut into blocks for a training.

    Args:
        data: binarised data folder.
        tokens: of a block.
        blocks: stream, document, or ``None``, which is a stream.
        separate: whether documents of a stream are separate.

    Raises:
        UserError: a split does not fill a block, or documents are asked for and not marked, or all too short.
    """
    for split in ("train", "valid"):
        corpus.check_block(data, split, tokens)
    if blocks == "document" or separate:
        corpus.check_documents(data, "train", "valid")
    if blocks == "document":
        corpus.check_document_block(data, "train", tokens)


def check_questions(data: Path, tokens: int, extra: Sequence[str] = ()) -> None:
    """Refuse a folder of questions that a training at so many ``tokens`` has no use for; ``extra``: its further flags.

    Raises UserError: a question that fits nowhere, or a ``--mixture`` that is none of these sets.
    """
    folder = dataset.load(data)
    for split in ("train", "valid"):
        length_check.check(folder, split, [tokens])
    rows = {name: info.splits["train"].answers for name, info in folder.sets.items() if "train" in info.splits}
    if (mixture := flag_values(extra, ["--mixture"]).get("--mixture")) is not None:
        shares(mixture, rows)
