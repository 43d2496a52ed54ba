"""Questions with answers: JSON lines of a user, and prepared folders with tokens.

A prepared folder has fairseq's binary files, in which each different text is stored once as an *item* (token ids
without end symbol), ``SPLIT.rows.jsonl`` with the items of each question, and the manifest ``answers.json``.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, overload

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.documents import iter_lines
from fairseq_rpe.data.folder import (
    BINARIES,
    QUESTIONS_MANIFEST,
    SPLITS,
    FileRecord,
    check_folder,
    describe_files,
    map_split,
)
from fairseq_rpe.data.tokenization import load_decoder
from fairseq_rpe.data.vocabulary import VOCABULARY_FILES
from fairseq_rpe.questions.metrics import AnsweredQuestion
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import open_input, sha256_of_files
from fairseq_rpe.utils.json_files import parse_json_object, read_json
from fairseq_rpe.utils.records import Count, Natural, NonEmptyText, Rule, TextTuple

MADE_BY = ("fairseq-rpe prepare-answers", "fairseq-rpe prepare-gaps")  # in manifests: first names of the commands
ROWS_FILES = tuple(f"{split}.rows.jsonl" for split in SPLITS)
_REMEDY = "correct it"
_AGAIN = "prepare it again"


@dataclass(frozen=True)
class Question:
    """A question. A model reads ``prompt + document + cue`` and generates one of ``answers``.

    Attributes:
        id: Identifier, unique within a file.
        prompt: Text before the document.
        answers: All right answers; a prediction may equal any of them.
        document: Text that may be truncated; ``prompt`` and ``cue``, one of which contains the question, may not.
        cue: Text after the document.
        group: Questions of one group are scored together; an empty group is the question alone.
        choices: All possible answers of a classification.
        distance: Words between the evidence for the answer and the end of the document.
    """

    id: NonEmptyText
    prompt: str
    answers: tuple[str, ...]
    document: str = ""
    cue: str = ""
    group: str = ""
    choices: tuple[str, ...] = ()
    distance: Natural | None = None


def check_question(question: Question, source: str) -> None:
    """Check that a question can be trained on and scored.

    Args:
        question: Question as a file or a benchmark has it.
        source: Its file and line, for messages.

    Raises:
        UserError: It has no text or no answer, an answer or a choice is empty, or an answer is not among the choices.
    """
    if not (question.prompt + question.document + question.cue).strip():
        raise UserError(f"{source}: question '{question.id}' has an empty prompt: {_REMEDY}")
    if not question.answers:
        raise UserError(f"{source}: question '{question.id}' has no answer: it cannot be scored, leave it out")
    if not all(choice.strip() for choice in question.choices):
        raise UserError(f"{source}: question '{question.id}' has an empty choice: {_REMEDY}")
    for answer in question.answers:
        if not answer.strip():
            raise UserError(f"{source}: question '{question.id}' has an empty answer: {_REMEDY} or leave it out")
        if question.choices and answer not in question.choices:
            raise UserError(f"{source}: answer {answer!r} of '{question.id}' is none of its choices: {_REMEDY}")


def read_questions(path: Path) -> Iterator[Question]:
    """Read a file of questions: a JSON object per line with at least ``id``, ``prompt`` and ``answers``.

    Args:
        path: Path of the file; lines of white space are skipped.

    Yields:
        The questions, in the order of the file.

    Raises:
        UserError: A line is not such an object, an id occurs twice, or :func:`check_question` refuses a question.
    """
    seen: dict[str, int] = {}
    with open_input(path) as file:
        for number, line in iter_lines(file, path, _REMEDY):
            source = f"{path} line {number}"
            if not line.strip():
                continue
            row = parse_json_object(line, path, _REMEDY, number)
            question = records.read_record(Question, row, source, "the question")
            if question.id in seen:
                raise UserError(f"{source}: id '{question.id}' is that of line {seen[question.id]}: {_REMEDY}")
            seen[question.id] = number
            check_question(question, source)
            yield question


@dataclass(frozen=True)
class SplitInfo:
    """Statistics of a set of questions in a split.

    Attributes:
        questions: Number of questions.
        answers: Number of right answers, added up over questions.
        documents: Number of different documents.
        tokens: Tokens of prompt, document and cue, added up over questions.
        longest: Tokens of prompt, document and cue of the longest question.
        cut_answers: Answers that have more than ``answer_tokens`` tokens, the end symbol included.
        unknown: ``<unk>`` tokens in prompts, documents and cues (tokenizer ``words`` only).
        guesses: Percent of the questions that a simple strategy without a model answers right, by its name.
    """

    questions: Count
    answers: Count
    documents: Natural = 0
    tokens: Natural = 0
    longest: Natural = 0
    cut_answers: Natural = 0
    unknown: Natural = 0
    guesses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SetInfo:
    """A set of questions and how it is scored.

    Attributes:
        suite: ``scrolls``, ``glue`` or ``superglue``; ``own`` for files of the user, ``gaps`` for cloze questions.
        metrics: Names of all its metrics.
        published: Name of the metric that papers report.
        answer_tokens: Most tokens of an answer, the end symbol included.
        splits: Statistics of the questions, by split.
        title: Description of the set in one line, for tables.
    """

    suite: str
    metrics: TextTuple
    published: str
    answer_tokens: Count
    splits: Mapping[str, SplitInfo]
    title: str = ""


@dataclass(frozen=True)
class _Tokenizer:
    kind: str


@dataclass(frozen=True)
class _Manifest:
    """The fields of ``answers.json`` that are read."""

    made_by: str
    tokenizer: _Tokenizer
    sets: Mapping[str, SetInfo]
    files: Mapping[str, FileRecord]


_AnswerItems = Annotated[tuple[Natural, ...], Rule(lambda v: len(v) > 0, "a list of at least one text's number")]


@dataclass(frozen=True)
class QuestionRow:
    """A prepared question. Its texts are item numbers; :class:`QuestionRows` has their tokens and texts.

    If ``prompt + document + cue`` does not end with white space, answers and choices begin with a blank, as words
    within a line do: strip texts before comparing them.

    Attributes:
        id: Unique within set and split.
        set: Name of the set that the question belongs to.
        answers: Items of all right answers.
        group: Questions of one group are scored together; an empty group is the question alone.
        prompt: Item of the text before the document.
        document: Item of the text that may be truncated.
        cue: Item of the text after the document.
        choices: Items of all possible answers of a classification.
        distance: Words between the evidence for the answer and the end of the document.
        guesses: Items of the answers of simple strategies, by the name of the strategy.
    """

    id: NonEmptyText
    set: str
    answers: _AnswerItems
    group: str = ""
    prompt: Natural | None = None
    document: Natural | None = None
    cue: Natural | None = None
    choices: tuple[Natural, ...] = ()
    distance: Natural | None = None
    guesses: Mapping[str, Natural] = field(default_factory=dict)

    def items(self) -> Iterator[int]:
        """Yield the item numbers of all its texts."""
        yield from (item for item in (self.prompt, self.document, self.cue) if item is not None)
        yield from (*self.answers, *self.choices, *self.guesses.values())


_ROW_FIELDS = {f.name for f in fields(QuestionRow)}


class QuestionRows(Sequence[QuestionRow]):
    """The questions of a split, read from the disk one by one when they are accessed.

    Args:
        folder: Prepared folder of questions.
        split: Name of the split: ``train``, ``valid`` or ``test``.
        kind: Kind of the tokenizer, a key of ``VOCABULARY_FILES``.

    Attributes:
        sizes: (items,) tokens of each item.
    """

    def __init__(self, folder: Path, split: str, kind: str) -> None:
        self._path, self._folder, self._kind = folder / f"{split}.rows.jsonl", folder, kind
        self._ids, sizes = map_split(folder, split)
        self._item_ends = np.cumsum(sizes, dtype=np.int64)  # (items,) in tokens
        self.sizes = sizes
        if not self._path.stat().st_size:
            raise UserError(f"{self._path} is empty: prepare {folder} again")
        self._content = np.asarray(np.memmap(self._path, np.uint8, "r"))  # (bytes,)
        self._line_ends = np.flatnonzero(self._content == ord("\n"))  # (questions,) in bytes

    def __len__(self) -> int:
        return len(self._line_ends)

    @overload
    def __getitem__(self, index: int) -> QuestionRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[QuestionRow]: ...
    def __getitem__(self, index: int | slice) -> QuestionRow | list[QuestionRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]  # also from the end, if negative
        values = {key: value for key, value in self._read(number).items() if key in _ROW_FIELDS}
        tuples = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return QuestionRow(**values | tuples)

    def _read(self, number: int) -> dict[str, Any]:
        start = self._line_ends[number - 1] + 1 if number else 0
        line = self._content[start : self._line_ends[number]].tobytes()
        return parse_json_object(line, self._path, _AGAIN, number + 1)

    def check(self, sets: Mapping[str, "SetInfo"]) -> None:
        """Check types, items, set and id of every question, and the number of questions of each set.

        Single questions are then read without checks.

        Args:
            sets: The sets of the manifest by name.

        Raises:
            UserError: A line or a number is wrong; the message names file and line.
        """
        split = self._path.name.partition(".")[0]
        first_numbers = dict[tuple[str, str], int]()  # by set and id
        counts = Counter[str]()  # questions by set
        sets_of_split = [name for name, info in sets.items() if split in info.splits]
        for number in range(len(self)):
            line = f"{self._path} line {number + 1}"
            row = records.read_record(
                QuestionRow, self._read(number), line, "the question", strict=False, remedy=_AGAIN
            )
            source = f"{line}: question '{row.id}'"
            self._check_row(row, source, sets_of_split)
            if (first := first_numbers.setdefault((row.set, row.id), number)) != number:
                raise UserError(f"{source} has the id of line {first + 1}: {_AGAIN}")
            counts[row.set] += 1
        for name in sets_of_split:
            if counts[name] != (expected := sets[name].splits[split].questions):
                raise UserError(f"{self._path} has {counts[name]} questions of {name}, not {expected}: {_AGAIN}")

    def _check_row(self, row: QuestionRow, source: str, sets: Collection[str]) -> None:
        """Check the texts and the set of a question; ``sets`` are the sets that have the split."""
        if (last := max(row.items())) >= len(self.sizes):
            raise UserError(f"{source} names text {last}, but there are {len(self.sizes)}: {_AGAIN}")
        if row.set not in sets:
            raise UserError(
                f"{source} is of the set '{row.set}', which {QUESTIONS_MANIFEST} does not describe: {_AGAIN}"
            )
        if row.prompt is row.document is row.cue is None:
            raise UserError(f"{source} has neither a prompt nor a document nor a cue: {_AGAIN}")

    def __iter__(self) -> Iterator[QuestionRow]:
        return (self[i] for i in range(len(self)))

    def tokens(self, item: int | None) -> np.ndarray:
        """Return the (tokens,) ids of an item, a read-only memory map; empty for None."""
        if item is None:
            return self._ids[:0]
        end = self._item_ends[item]
        return self._ids[end - self.sizes[item] : end]

    def text(self, item: int | None) -> str:
        """Return the text of an item; white space between ``words`` becomes one blank or line end. Empty for None."""
        return "" if item is None else self.decode(self.tokens(item).tolist())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, e.g. of a generated answer; incomplete characters become U+FFFD."""
        text = self._decoder(ids).decode(errors="replace")
        if self._kind != "words":
            return text
        return text.replace("\ufffd", "\ufffd ").replace(" \n", "\n").removesuffix(" ")

    def lengths(self, row: QuestionRow) -> tuple[int, int]:
        """Return the tokens of prompt and cue together, and the tokens of the document, without reading any text."""
        prompt, document, cue = (0 if i is None else int(self.sizes[i]) for i in (row.prompt, row.document, row.cue))
        return prompt + cue, document

    def parts(self, row: QuestionRow) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the token ids of prompt, document and cue, each (tokens,)."""
        return self.tokens(row.prompt), self.tokens(row.document), self.tokens(row.cue)

    def with_prediction(self, row: QuestionRow, prediction: str) -> AnsweredQuestion:
        """Return a question with a predicted answer, as metrics take it."""
        answers, choices = (tuple(self.text(item).strip() for item in items) for items in (row.answers, row.choices))
        return AnsweredQuestion(prediction, answers, row.group, choices)

    @cached_property
    def _decoder(self) -> Any:
        return load_decoder(self._kind, self._folder)


# Files that this process has checked: folder, split, size and time of change.
_CHECKED: set[tuple[str, str, int, int]] = set()


@dataclass(frozen=True)
class QuestionDataset:
    """A prepared folder of questions.

    Attributes:
        folder: Path of the prepared folder.
        sets: Sets of questions by name, as the manifest describes them.
        kind: Kind of the tokenizer, a key of ``VOCABULARY_FILES``.
    """

    folder: Path
    sets: Mapping[str, SetInfo]
    kind: str

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that any of its sets has, in the order train, valid, test."""
        return tuple(split for split in SPLITS if any(split in info.splits for info in self.sets.values()))

    def split(self, name: str) -> QuestionRows:
        """Return the questions of a split, after checking its files.

        Raises:
            UserError: There is no such split, or its files are damaged or were changed.
        """
        if name not in self.splits:
            raise UserError(f"{self.folder} has no split '{name}': it has {', '.join(self.splits)}")
        check_folder(self.folder, name)
        rows_file = f"{name}.rows.jsonl"
        _check_files(self.folder, (f"{name}.bin", f"{name}.idx", rows_file))
        rows = QuestionRows(self.folder, name, self.kind)
        status = (self.folder / rows_file).stat()
        stamp = (str(self.folder), name, status.st_size, status.st_mtime_ns)
        if stamp not in _CHECKED:
            rows.check(self.sets)
            _CHECKED.add(stamp)
        return rows


def is_question_folder(path: Path) -> bool:
    """Return whether a folder contains prepared questions."""
    return (path / QUESTIONS_MANIFEST).is_file()


def load_dataset(path: Path) -> QuestionDataset:
    """Load a prepared folder of questions.

    Raises:
        UserError: The folder does not contain questions, or is damaged.
    """
    if not is_question_folder(path):
        raise UserError(f"{path} has no {QUESTIONS_MANIFEST}: make such a folder with fairseq-rpe prepare-questions")
    manifest = _manifest(path)
    kind = manifest.tokenizer.kind
    if kind not in VOCABULARY_FILES:
        raise UserError(f"{path / QUESTIONS_MANIFEST} names the tokenizer '{kind}', which is unknown: {_AGAIN}")
    _check_files(path, ("dict.txt", *VOCABULARY_FILES[kind]))
    return QuestionDataset(path, manifest.sets, kind)


def read_question_manifest(folder: Path) -> dict[str, Any]:
    """Read ``answers.json``; empty if there is none, or if another program wrote it."""
    if not is_question_folder(folder):
        return {}
    manifest = read_json(folder / QUESTIONS_MANIFEST)
    return manifest if manifest.get("made_by") in MADE_BY else {}


def _manifest(folder: Path) -> _Manifest:
    path = folder / QUESTIONS_MANIFEST
    return records.read_record(_Manifest, read_json(path), str(path), "the folder", strict=False, remedy=_AGAIN)


def _check_files(folder: Path, names: Sequence[str]) -> None:
    """Check that files exist and have the digests of the manifest."""
    recorded = _manifest(folder).files
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: {_AGAIN}")
        described = describe_files(folder, [name])[name]
        if name not in recorded or records.to_dict(recorded[name]) != described:
            raise UserError(f"{folder}/{name} is not the one that {QUESTIONS_MANIFEST} describes: {_AGAIN}")


def dataset_digest(path: Path) -> str:
    """Return one sha256 of everything that decides results: equal digests mean equal questions, tokens and scores."""
    manifest = _manifest(path)
    names = ("dict.txt", *VOCABULARY_FILES.get(manifest.tokenizer.kind, ()), *BINARIES, *ROWS_FILES)
    sets = json.dumps({name: records.to_dict(info) for name, info in manifest.sets.items()}, sort_keys=True)
    files = sha256_of_files(*(path / name for name in names if (path / name).is_file()))
    return hashlib.sha256(f"{sets}\0{files}".encode()).hexdigest()
