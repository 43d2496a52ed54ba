"""What a run costs, roughly, in tokens that a model reads with little context: what a sweep's bar goes by."""

from pathlib import Path

from fairseq_rpe.algorithms import build
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.question_records import QuestionKey
from fairseq_rpe.evaluation.records import AnswerKey
from fairseq_rpe.questions import dataset
from fairseq_rpe.sweeps.grid import Cell

_BACKWARD = 3  # a forward and a backward pass, over a forward one
_ATTENTION = 2000  # tokens of context at which attention costs as much as the rest of a small model


def training(cell: Cell) -> float:
    """Of one update: its tokens, forward and backward."""
    s = cell.plan.settings
    return _BACKWARD * _reading(s.batch_sentences * s.update_freq * s.nproc * s.tokens, s.tokens)


def evaluations(cell: Cell) -> list[float]:
    """Of each result, in the order in which they are measured."""
    found = []
    for one in cell.evaluations:
        tokens: dict[str, int] = {}
        for key in one.keys:
            if isinstance(key, AnswerKey):
                found.append(_answers(key))
            elif isinstance(key, QuestionKey):
                found.append(_questions(key, one.data))
            elif one.data is not None:
                if key.subset not in tokens:
                    tokens[key.subset] = corpus.count_tokens(one.data, key.subset)
                found.append(_reading(tokens[key.subset], key.length))
    return found


def _answers(key: AnswerKey) -> float:
    task = build(key.algorithm)
    size = task.tokens(key.length)
    return _reading(task.share(key.split) * size, size)


def _questions(key: QuestionKey, data: Path | None) -> float:
    info = dataset.load(data).sets[key.set].splits[key.subset] if data and data.is_dir() else None
    return _reading((info.questions if info else 1) * key.length, key.length)


def _reading(tokens: float, context: int) -> float:
    return tokens * (1 + context / _ATTENTION)
