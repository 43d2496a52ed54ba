"""A question about a text with its right answers, and files of them: JSON lines."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.sourcefiles import lines_of
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import json_object, open_input
from fairseq_rpe.utils.records import Natural

_REMEDY = "correct it"


@dataclass(frozen=True)
class Question:
    """One example. A model reads ``prompt + document + cue``, joined as they are, and must write one of ``answers``.

    ``document`` is what may be shortened where all does not fit; ``prompt`` and ``cue`` stay whole, so the question
    stands in one of them. ``group``: what is scored together, by itself where it is empty. ``choices``: all answers
    that there are, of a classification. ``distance``: words between the place that answers it and the document's end.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    document: str = ""
    cue: str = ""
    group: str = ""
    choices: tuple[str, ...] = ()
    distance: Natural | None = None


def check(question: Question, source: str) -> None:
    """Refuse what can be neither learned nor judged; ``source``: its file and line.

    Raises UserError: no prompt, no answer, an empty one, or one that is not among the choices.
    """
    if not (question.prompt + question.document + question.cue).strip():
        raise UserError(f"{source}: question '{question.id}' has an empty prompt: {_REMEDY}")
    if not question.answers:
        raise UserError(f"{source}: question '{question.id}' has no answer: it cannot be scored, leave it out")
    for answer in question.answers:
        if not answer.strip():
            raise UserError(f"{source}: question '{question.id}' has an empty answer: {_REMEDY} or leave it out")
        if question.choices and answer not in question.choices:
            raise UserError(f"{source}: answer {answer!r} of '{question.id}' is none of its choices: {_REMEDY}")


def read(path: Path) -> Iterator[Question]:
    """The questions of a file: a JSON object a line with ``id``, ``prompt`` and ``answers``; the rest may be absent.

    Raises UserError: a line is no such object, an id is there twice, or a question is refused by :func:`check`.
    """
    seen: dict[str, int] = {}
    with open_input(path) as file:
        for number, line in lines_of(file, path, _REMEDY):
            source = f"{path} line {number}"
            if not line.strip():
                continue
            row = json_object(line, path, _REMEDY, number)
            question = records.read(Question, row, source, "the question")
            if question.id in seen:
                raise UserError(f"{source}: id '{question.id}' is that of line {seen[question.id]}: {_REMEDY}")
            seen[question.id] = number
            check(question, source)
            yield question
