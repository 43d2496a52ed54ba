"""Checks the data of a sweep and digests it once, before its runs are planned."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.questions import dataset
from fairseq_rpe.sweeps.resolve import Sweep


@dataclass(frozen=True)
class Inputs:
    """Digests of the data of a sweep, computed once; an empty digest stands for a folder that does not exist yet.

    Attributes:
        data: digest of the text of the training, None for generated tasks.
        texts: digests of the further texts of the evaluation, by name.
        questions: digests of the folders of questions, by name.
    """

    data: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    questions: Mapping[str, str] = field(default_factory=dict)


def load_inputs(sweep: Sweep, dry: bool = False) -> Inputs:
    """Check and digest the texts and question folders of a sweep.

    Args:
        sweep: sweep whose folders are checked.
        dry: whether commands are only printed; then folders that the recipe prepares need not exist.

    Returns:
        The digests.

    Raises:
        UserError: a folder is missing or incomplete, or has another vocabulary than the recipe or the training.
    """
    if sweep.data is None:
        return Inputs()
    digest: str = ""
    symbols: Sequence[str] | None = None  # of a text that does not exist yet
    if not (dry and sweep.preparation and not sweep.data.is_dir()):
        digest, symbols = _check_training_text(sweep, sweep.data)
    texts = _check_evaluation_texts(sweep, symbols, dry, digest)
    return Inputs(digest, texts, _check_questions(sweep, symbols, dry))


def _check_training_text(sweep: Sweep, data: Path) -> tuple[str, Sequence[str]]:
    """Check the text of the training, and return its digest and its vocabulary."""
    if sweep.preparation and not data.is_dir():
        command = shlex.join(("fairseq-rpe", *sweep.preparation))
        raise UserError(f"data folder {data} does not exist: make it with {command}")
    if dataset.is_question_folder(data):
        raise UserError(
            f"{data} holds questions, and a sweep trains on a text first: name a text, and give the questions to "
            f"a recipe about answers, e.g. --recipe fire-scrolls --eval-data NAME={data}"
        )
    # with questions, the models are not scored on this text
    corpus.check_folder(data, "train", "valid", *([] if sweep.questions else [sweep.split]))
    if sweep.preset is not None:
        sweep.preset.check(data)
    return corpus.corpus_digest(data), corpus.read_dictionary(data / "dict.txt")


def _check_evaluation_texts(sweep: Sweep, symbols: Sequence[str] | None, dry: bool, digest: str) -> dict[str, str]:
    """Check further texts of the evaluation, which must differ and have the vocabulary of the training.

    ``symbols`` of the text of the training is None, and ``digest`` empty, if it does not exist yet.

    Returns the digests by name.
    """
    digests: dict[str, str] = {}
    names_by_digest = {digest: "the one that is trained on"} if digest else {}
    for name, path in sweep.evaluate.items():
        command = shlex.join(("fairseq-rpe", *sweep.preparation_of_text(name)))
        if not path.is_dir():
            if dry and name in sweep.prepared:
                digests[name] = ""
                continue
            raise UserError(f"data folder {path} does not exist: make it with {command}")
        corpus.check_text_folder(path, sweep.split)
        _check_vocabulary(sweep, path, symbols, command)
        digests[name] = corpus.corpus_digest(path)
        if same := names_by_digest.get(digests[name]):
            raise UserError(f"--eval-data {name}: {path} holds the same text as {same}: leave it out")
        names_by_digest[digests[name]] = name
    return digests


def _check_vocabulary(sweep: Sweep, path: Path, symbols: Sequence[str] | None, command: str) -> None:
    """Check that a folder has the vocabulary of the training; ``command`` prepares one that has."""
    if symbols is not None and corpus.read_dictionary(path / "dict.txt") != symbols:
        raise UserError(f"{path} has another vocabulary than {sweep.data}: prepare another folder, e.g. {command}")


def _check_questions(sweep: Sweep, symbols: Sequence[str] | None, dry: bool) -> dict[str, str]:
    """Check that question folders exist, have all splits, and have the vocabulary of the training.

    ``symbols`` is None if the text of the training does not exist yet.

    Returns the digests by name.
    """
    digests: dict[str, str] = {}
    for name, folder in sweep.questions.items():
        path, command = Path(folder.data), shlex.join(("fairseq-rpe", *sweep.preparation_of_questions(name)))
        if not path.is_dir():
            if dry and folder.prepare:
                digests[name] = ""
                continue
            raise UserError(f"data folder {path} does not exist: make it with {command}")
        if not dataset.is_question_folder(path):
            raise UserError(f"{path} holds no questions: make another folder, e.g. with {command}")
        corpus.check_folder(path, "train", "valid")
        _check_vocabulary(sweep, path, symbols, command)
        digests[name] = dataset.dataset_digest(path)
    return digests
