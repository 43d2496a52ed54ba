r"""Readers of sets of passages with several questions: MultiRC and ReCoRD of SuperGLUE.

The original files have one row for each passage. Files of the hub have one row for each answer (MultiRC) or each query
(ReCoRD). The records ``_Flat…`` are the rows of the hub, and :meth:`flatten` turns a row of the original files into
them. A passage of MultiRC::

    {"idx": 0, "passage": {"text": "…", "questions": [
        {"idx": 3, "question": "Who sings?", "answers": [{"idx": 7, "text": "Ann", "label": 1}]}]}}

and the same in a file of the hub::

    {"paragraph": "…", "question": "Who sings?", "answer": "Ann", "label": 1,
     "idx": {"paragraph": 0, "question": 3, "answer": 7}}
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.documents import SourceFile
from fairseq_rpe.questions.readers.tables import REMEDY, Example, MissingLabel, ReaderSpec, label_text, read_rows
from fairseq_rpe.utils.records import Natural


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

    def flatten(self) -> Iterator[_FlatMultiRC]:
        """Yield a row for each answer."""
        for question in self.passage.questions:
            for answer in question.answers:
                number = _AnswerNumber(self.idx, question.idx, answer.idx)
                yield _FlatMultiRC(self.passage.text, question.question, answer.text, number, answer.label)


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
        candidates = row.read(_MultiRC).flatten() if "passage" in row.values else [row.read(_FlatMultiRC)]
        for candidate in candidates:
            number = candidate.idx
            texts = {"question": candidate.question, "answer": candidate.answer, "paragraph": candidate.paragraph}
            group = f"{number.paragraph}-{number.question}"
            answer = label_text(candidate.label, row.source, spec.choices)
            fields = {name: _without_markup(text) for name, text in texts.items()}
            yield Example(row.source, f"{group}-{number.answer}", fields, (answer,), group)


def _without_markup(text: str) -> str:
    return re.sub("</?b>", "", text.replace("<br>", " "))


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

    def flatten(self, source: str) -> Iterator[_FlatReCoRD]:
        """Yield a row for each query; ``source`` is the file and line, for messages."""
        text = self.passage.text
        if any(not entity.start <= entity.end < len(text) for entity in self.passage.entities):
            raise UserError(f"{source} has an entity outside of its passage: {REMEDY}")
        entities = tuple(text[entity.start : entity.end + 1] for entity in self.passage.entities)
        for question in self.qas:
            answers = tuple(answer.text for answer in question.answers)
            yield _FlatReCoRD(text, question.query, entities, _QueryNumber(self.idx, question.idx), answers)


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
        queries = row.read(_ReCoRD).flatten(row.source) if "qas" in row.values else [row.read(_FlatReCoRD)]
        for query in queries:
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


def _without_highlights(text: str) -> str:
    text = re.sub(r"([.?!\"'])\n@highlight\n", r"\1 ", text)
    return text.replace("\n@highlight\n", ". ")
