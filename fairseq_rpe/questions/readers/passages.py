"""Readers of sets of passages with several questions: MultiRC and ReCoRD of SuperGLUE."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.documents import SourceFile
from fairseq_rpe.questions.readers.tables import (
    REMEDY,
    Example,
    MissingLabel,
    RawRow,
    ReaderSpec,
    label_text,
    read_rows,
)
from fairseq_rpe.utils import records
from fairseq_rpe.utils.records import Natural


@dataclass(frozen=True)
class _Answer:
    text: str
    idx: Natural
    label: int | bool | None = None


@dataclass(frozen=True)
class _MultiRCQuestion:
    question: str
    idx: Natural
    answers: tuple[_Answer, ...]


@dataclass(frozen=True)
class _QuestionedPassage:
    text: str
    questions: tuple[_MultiRCQuestion, ...]


@dataclass(frozen=True)
class _MultiRC:
    idx: Natural
    passage: _QuestionedPassage


@dataclass(frozen=True)
class _AnswerNumber:
    paragraph: Natural
    question: Natural
    answer: Natural


@dataclass(frozen=True)
class _FlatMultiRC:
    paragraph: str
    question: str
    answer: str
    idx: _AnswerNumber
    label: int | None = None


def read_multirc(files: Sequence[SourceFile], spec: ReaderSpec) -> Iterator[Example]:
    """Read MultiRC: each answer is an example, to be classified as right or wrong.

    The answers of one question are a group. Questions are numbered within a paragraph, so the group names both.

    Args:
        files: Files of one split.
        spec: Fields, split and choices of the set.

    Yields:
        One example for each answer of each question.

    Raises:
        MissingLabel: An answer has no label.
        UserError: A file is damaged, a row has other fields, or a label is none of the choices.
    """
    for row in read_rows(files, spec):
        for candidate in _candidate_answers(row):
            number = candidate.idx
            texts = {"question": candidate.question, "answer": candidate.answer, "paragraph": candidate.paragraph}
            group = f"{number.paragraph}-{number.question}"
            answer = label_text(candidate.label, row.source, spec.choices)
            fields = {name: _without_markup(text) for name, text in texts.items()}
            yield Example(row.source, f"{group}-{number.answer}", fields, (answer,), group)


def _candidate_answers(row: RawRow) -> Iterator[_FlatMultiRC]:
    """Yield the answers in a row: one in files of the hub, those of a whole passage in the original files."""
    if "passage" not in row.values:
        yield records.read_record(_FlatMultiRC, row.values, row.source, "the row", strict=False, remedy=REMEDY)
        return
    nested = records.read_record(_MultiRC, row.values, row.source, "the row", strict=False, remedy=REMEDY)
    for question in nested.passage.questions:
        for answer in question.answers:
            number = _AnswerNumber(nested.idx, question.idx, answer.idx)
            yield _FlatMultiRC(nested.passage.text, question.question, answer.text, number, answer.label)


def _without_markup(text: str) -> str:
    return re.sub("</?b>", "", text.replace("<br>", " "))


@dataclass(frozen=True)
class _Entity:
    start: Natural
    end: Natural  # index of its last character


@dataclass(frozen=True)
class _EntityPassage:
    text: str
    entities: tuple[_Entity, ...]


@dataclass(frozen=True)
class _EntityAnswer:
    text: str


@dataclass(frozen=True)
class _EntityQuestion:
    query: str
    idx: Natural
    answers: tuple[_EntityAnswer, ...] = ()


@dataclass(frozen=True)
class _ReCoRD:
    idx: Natural
    passage: _EntityPassage
    qas: tuple[_EntityQuestion, ...]


@dataclass(frozen=True)
class _QueryNumber:
    passage: Natural
    query: Natural


@dataclass(frozen=True)
class _FlatReCoRD:
    passage: str
    query: str
    entities: tuple[str, ...]
    idx: _QueryNumber
    answers: tuple[str, ...] = ()


def read_record_set(files: Sequence[SourceFile], spec: ReaderSpec) -> Iterator[Example]:
    """Read ReCoRD: each query is an example, whose answers are the entities of the passage that fill its gap.

    The choices are the different entities, in the order of the file. Highlights of the passage become sentences.

    Args:
        files: Files of one split.
        spec: Fields, split and choices of the set.

    Yields:
        One example for each query.

    Raises:
        MissingLabel: A query has no answers.
        UserError: A file is damaged, a row has other fields, or a passage has no entities or one outside of its text.
    """
    for row in read_rows(files, spec):
        for query in _queries(row):
            if not query.answers:
                raise MissingLabel(row.source)
            entities, answers = tuple(dict.fromkeys(query.entities)), tuple(dict.fromkeys(query.answers))
            if not entities:
                raise UserError(f"{row.source} has a passage without entities: {REMEDY}")
            fields = {
                "query": query.query,
                "entities": ", ".join(entities),
                "passage": _without_highlights(query.passage),
            }
            example_id = f"{query.idx.passage}-{query.idx.query}"
            yield Example(row.source, example_id, fields, answers, choices=entities)


def _queries(row: RawRow) -> Iterator[_FlatReCoRD]:
    """Yield the queries in a row: one in files of the hub, those of a whole passage in the original files."""
    if "qas" not in row.values:
        yield records.read_record(_FlatReCoRD, row.values, row.source, "the row", strict=False, remedy=REMEDY)
        return
    nested = records.read_record(_ReCoRD, row.values, row.source, "the row", strict=False, remedy=REMEDY)
    text = nested.passage.text
    for entity in nested.passage.entities:
        if not entity.start <= entity.end < len(text):
            raise UserError(f"{row.source} has an entity outside of its passage: {REMEDY}")
    entities = tuple(text[entity.start : entity.end + 1] for entity in nested.passage.entities)
    for question in nested.qas:
        answers = tuple(answer.text for answer in question.answers)
        yield _FlatReCoRD(text, question.query, entities, _QueryNumber(nested.idx, question.idx), answers)


def _without_highlights(text: str) -> str:
    text = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", text)
    return text.replace("\n@highlight\n", ". ")
