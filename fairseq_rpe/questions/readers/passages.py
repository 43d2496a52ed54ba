"""Examples of SuperGLUE's nested sets: passages with several questions, MultiRC and ReCoRD."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.sourcefiles import Entry
from fairseq_rpe.questions.readers.tables import REMEDY, Example, NoLabel, Row, Wanted, chosen, rows
from fairseq_rpe.utils import records
from fairseq_rpe.utils.records import Natural


@dataclass(frozen=True)
class _Answer:
    text: str
    idx: Natural
    label: int | bool | None = None


@dataclass(frozen=True)
class _AnsweredQuestion:
    question: str
    idx: Natural
    answers: tuple[_Answer, ...]


@dataclass(frozen=True)
class _QuestionedPassage:
    text: str
    questions: tuple[_AnsweredQuestion, ...]


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


def multirc(files: Sequence[Entry], wanted: Wanted) -> Iterator[Example]:
    """MultiRC: an example for each answer, to be called right or wrong; the answers of a question are one group.

    A group is a paragraph and a question of it, for questions are numbered anew in each paragraph.
    """
    for row in rows(files, wanted):
        for flat in _flat(row):
            number = flat.idx
            texts = {"question": flat.question, "answer": flat.answer, "paragraph": flat.paragraph}
            group = f"{number.paragraph}-{number.question}"
            answer = chosen(flat.label, row.source, wanted.choices)
            fields = {name: _without_markup(text) for name, text in texts.items()}
            yield Example(row.source, f"{group}-{number.answer}", fields, (answer,), group)


def _flat(row: Row) -> Iterator[_FlatMultiRC]:
    """A row as the hub has it; of the original files, a line holds many."""
    if "passage" not in row.values:
        yield records.read(_FlatMultiRC, row.values, row.source, "the row", strict=False, remedy=REMEDY)
        return
    found = records.read(_MultiRC, row.values, row.source, "the row", strict=False, remedy=REMEDY)
    for asked in found.passage.questions:
        for answer in asked.answers:
            number = _AnswerNumber(found.idx, asked.idx, answer.idx)
            yield _FlatMultiRC(found.passage.text, asked.question, answer.text, number, answer.label)


def _without_markup(text: str) -> str:
    return re.sub("</?b>", "", text.replace("<br>", " "))


@dataclass(frozen=True)
class _Entity:
    start: Natural
    end: Natural  # its last character


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


def record(files: Sequence[Entry], wanted: Wanted) -> Iterator[Example]:
    """ReCoRD: an example for each query; its answers are those of the passage's entities that fill the gap.

    The entities are its choices, each different text once, in the order of the file. Highlights of the passage become
    sentences.
    """
    for row in rows(files, wanted):
        for query in _queries(row):
            if not query.answers:
                raise NoLabel(row.source)
            entities, answers = tuple(dict.fromkeys(query.entities)), tuple(dict.fromkeys(query.answers))
            if not entities:
                raise UserError(f"{row.source} has a passage without entities: {REMEDY}")
            fields = {
                "query": query.query,
                "entities": ", ".join(entities),
                "passage": _without_highlights(query.passage),
            }
            name = f"{query.idx.passage}-{query.idx.query}"
            yield Example(row.source, name, fields, answers, choices=entities)


def _queries(row: Row) -> Iterator[_FlatReCoRD]:
    if "qas" not in row.values:
        yield records.read(_FlatReCoRD, row.values, row.source, "the row", strict=False, remedy=REMEDY)
        return
    found = records.read(_ReCoRD, row.values, row.source, "the row", strict=False, remedy=REMEDY)
    text = found.passage.text
    for entity in found.passage.entities:
        if not entity.start <= entity.end < len(text):
            raise UserError(f"{row.source} has an entity outside of its passage: {REMEDY}")
    entities = tuple(text[entity.start : entity.end + 1] for entity in found.passage.entities)
    for one in found.qas:
        answers = tuple(answer.text for answer in one.answers)
        yield _FlatReCoRD(text, one.query, entities, _QueryNumber(found.idx, one.idx), answers)


def _without_highlights(text: str) -> str:
    text = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", text)
    return text.replace("\n@highlight\n", ". ")
