"""A prepared folder of questions: fairseq's binaries with each different text once, and a line for each question.

``answers.json`` says what it holds and how it was made; ``SPLIT.bin`` and ``SPLIT.idx`` hold texts as tokens, without
end symbol, numbered from 0: the items; ``SPLIT.rows.jsonl`` names the items of each question.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, overload

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.encoders import load_decoder
from fairseq_rpe.data.folder import ANSWERS, BINARIES, SPLITS, FileRecord, check_folder, describe_files, map_split
from fairseq_rpe.data.vocabulary import VOCABULARY_FILES
from fairseq_rpe.questions.metrics import Scored
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import file_digest, json_object, read_json
from fairseq_rpe.utils.records import Count, Name, Natural, Rule, Words

MADE_BY = ("fairseq-rpe prepare-answers", "fairseq-rpe prepare-gaps")
ROWS = tuple(f"{split}.rows.jsonl" for split in SPLITS)
_AGAIN = "prepare it again"


@dataclass(frozen=True)
class SplitInfo:
    """What a set has in a split."""

    questions: Count
    answers: Count
    documents: Natural = 0  # different ones
    tokens: Natural = 0  # of prompt, document and cue of all questions
    longest: Natural = 0  # question, in tokens of prompt, document and cue
    cut_answers: Natural = 0  # which with their end symbol have more than answer_tokens tokens
    unknown: Natural = 0  # tokens <unk> in prompts, documents and cues, of whole words only
    # Simple ways to answer without any model, by their names: percent of the questions that they answer right.
    guesses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SetInfo:
    """A set of questions: where it is from and how it is scored."""

    suite: str  # "scrolls", "glue", "superglue"; "own" and "gaps" for others
    metrics: Words  # all that it is scored with
    published: str  # the one of them that counts
    answer_tokens: Count  # most tokens of an answer, its end symbol included
    splits: Mapping[str, SplitInfo]
    title: str = ""


@dataclass(frozen=True)
class _Tokenizer:
    kind: str


@dataclass(frozen=True)
class _Manifest:
    """What is read of ``answers.json``."""

    made_by: str
    tokenizer: _Tokenizer
    sets: Mapping[str, SetInfo]
    files: Mapping[str, FileRecord]


_Answers = Annotated[tuple[Natural, ...], Rule(lambda v: len(v) > 0, "a list of at least one text's number")]


@dataclass(frozen=True)
class Row:
    """A question; texts are items, whose tokens and text :class:`Rows` has.

    A model reads ``prompt + document + cue``, as they are, and writes one of ``answers``. Where that text does not end
    with white space, answers and choices begin with a blank, as words do within a line: strip what is compared.
    """

    id: Name
    set: str
    answers: _Answers
    group: str = ""  # what is scored together, by itself where it is empty
    prompt: Natural | None = None
    document: Natural | None = None
    cue: Natural | None = None
    choices: tuple[Natural, ...] = ()
    distance: Natural | None = None  # words between the place that answers it and the document's end
    guesses: Mapping[str, Natural] = field(default_factory=dict)  # answers without any model, by the way to guess

    def items(self) -> Iterator[int]:
        """The numbers of all its texts."""
        yield from (item for item in (self.prompt, self.document, self.cue) if item is not None)
        yield from (*self.answers, *self.choices, *self.guesses.values())


_ROW = {one.name for one in fields(Row)}


class Rows(Sequence[Row]):
    """The questions of a split. Neither they nor their texts are in memory before they are asked for."""

    def __init__(self, folder: Path, split: str, kind: str) -> None:
        self._path, self._folder, self._kind = folder / f"{split}.rows.jsonl", folder, kind
        self._ids, sizes = map_split(folder, split)
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self.sizes = sizes  # tokens of each item, (items,)
        if not self._path.stat().st_size:
            raise UserError(f"{self._path} is empty: prepare {folder} again")
        self._lines = np.asarray(np.memmap(self._path, np.uint8, "r"))
        self._breaks = np.flatnonzero(self._lines == ord("\n"))

    def __len__(self) -> int:
        return len(self._breaks)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]  # counted from the end where it is negative
        given: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in self._read(number).items()}
        return Row(**{key: value for key, value in given.items() if key in _ROW})

    def _read(self, number: int) -> dict[str, Any]:
        start = self._breaks[number - 1] + 1 if number else 0
        return json_object(self._lines[start : self._breaks[number]].tobytes(), self._path, _AGAIN, number + 1)

    def check(self, sets: Mapping[str, "SetInfo"]) -> None:
        """Check every line: its types, that its texts exist, its set, its id, and the number of questions of each set.

        After that, reading a question checks nothing. Raises UserError: it names the file and the line.
        """
        split, lines, counts = self._path.name.partition(".")[0], dict[tuple[str, str], int](), Counter[str]()
        for number in range(len(self)):
            source = f"{self._path} line {number + 1}"
            row = records.read(Row, self._read(number), source, "the question", strict=False, remedy=_AGAIN)
            source += f": question '{row.id}'"
            if (last := max(row.items())) >= len(self.sizes):
                raise UserError(f"{source} names text {last}, but there are {len(self.sizes)}: {_AGAIN}")
            if row.set not in sets or split not in sets[row.set].splits:
                raise UserError(f"{source} is of the set '{row.set}', which {ANSWERS} does not describe: {_AGAIN}")
            if (first := lines.setdefault((row.set, row.id), number)) != number:
                raise UserError(f"{source} has the id of line {first + 1}: {_AGAIN}")
            if row.prompt is row.document is row.cue is None:
                raise UserError(f"{source} has neither a prompt nor a document nor a cue: {_AGAIN}")
            counts[row.set] += 1
        for name, info in sets.items():
            if split in info.splits and counts[name] != (wanted := info.splits[split].questions):
                raise UserError(f"{self._path} has {counts[name]} questions of {name}, not {wanted}: {_AGAIN}")

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def tokens(self, item: int | None) -> np.ndarray:
        """(tokens,) ids of an item, none of ``None``; they lie on the disk and cannot be written to."""
        if item is None:
            return self._ids[:0]
        end = self._ends[item]
        return self._ids[end - self.sizes[item] : end]

    def text(self, item: int | None) -> str:
        """An item as it was before it became tokens; of whole words their white space is one blank or line end."""
        return "" if item is None else self.decode(self.tokens(item).tolist())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, e.g. of an answer that a model wrote; half a character becomes U+FFFD."""
        text = self._decoder(ids).decode(errors="replace")
        if self._kind != "words":
            return text
        return text.replace("\ufffd", "\ufffd ").replace(" \n", "\n").removesuffix(" ")

    def lengths(self, row: Row) -> tuple[int, int]:
        """Tokens of what stays whole of a question, prompt and cue, and of its document; no text is read for it."""
        prompt, document, cue = (0 if i is None else int(self.sizes[i]) for i in (row.prompt, row.document, row.cue))
        return prompt + cue, document

    def parts(self, row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens of prompt, document and cue, each (tokens,)."""
        return self.tokens(row.prompt), self.tokens(row.document), self.tokens(row.cue)

    def judged(self, row: Row, prediction: str) -> Scored:
        """A question's answer as metrics take it."""
        answers, choices = (tuple(self.text(item).strip() for item in items) for items in (row.answers, row.choices))
        return Scored(prediction, answers, row.group, choices)

    @cached_property
    def _decoder(self) -> Any:
        return load_decoder(self._kind, self._folder)


# files of questions that this process has checked: folder, split, size and time of change
_CHECKED: set[tuple[str, str, int, int]] = set()


@dataclass(frozen=True)
class Prepared:
    """A prepared folder of questions."""

    folder: Path
    sets: Mapping[str, SetInfo]
    kind: str  # of its tokenizer

    @property
    def splits(self) -> tuple[str, ...]:
        """Those that it has, of train, valid and test."""
        return tuple(split for split in SPLITS if any(split in info.splits for info in self.sets.values()))

    def split(self, name: str) -> Rows:
        """The questions of a split. Raises UserError: there is none, or its files are damaged or changed."""
        if name not in self.splits:
            raise UserError(f"{self.folder} has no split '{name}': it has {', '.join(self.splits)}")
        check_folder(self.folder, name)
        rows = f"{name}.rows.jsonl"
        _check_files(self.folder, (f"{name}.bin", f"{name}.idx", rows))
        found = Rows(self.folder, name, self.kind)
        status = (self.folder / rows).stat()
        stamp = (str(self.folder), name, status.st_size, status.st_mtime_ns)
        if stamp not in _CHECKED:
            found.check(self.sets)
            _CHECKED.add(stamp)
        return found


def is_prepared(path: Path) -> bool:
    """Whether a folder is one of questions."""
    return (path / ANSWERS).is_file()


def load(path: Path) -> Prepared:
    """Raises UserError: it is none, or damaged."""
    if not is_prepared(path):
        raise UserError(f"{path} has no {ANSWERS}: make such a folder with fairseq-rpe prepare-answers")
    manifest = _manifest(path)
    kind = manifest.tokenizer.kind
    if kind not in VOCABULARY_FILES:
        raise UserError(f"{path / ANSWERS} names the tokenizer '{kind}', which is unknown: {_AGAIN}")
    _check_files(path, ("dict.txt", *VOCABULARY_FILES[kind]))
    return Prepared(path, manifest.sets, kind)


def read_answers(folder: Path) -> dict[str, Any]:
    """What ``answers.json`` says, nothing unless it is there and was written by one of these commands."""
    if not is_prepared(folder):
        return {}
    manifest = read_json(folder / ANSWERS)
    return manifest if manifest.get("made_by") in MADE_BY else {}


def _manifest(folder: Path) -> _Manifest:
    path = folder / ANSWERS
    return records.read(_Manifest, read_json(path), str(path), "the folder", strict=False, remedy=_AGAIN)


def _check_files(folder: Path, names: Sequence[str]) -> None:
    """Refuse files that are not there, or others than ``answers.json`` describes."""
    made = _manifest(folder).files
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: {_AGAIN}")
        described = describe_files(folder, [name])[name]
        if name not in made or records.write(made[name]) != described:
            raise UserError(f"{folder}/{name} is not the one that {ANSWERS} describes: {_AGAIN}")


def digest(path: Path) -> str:
    """One digest of all that decides numbers: equal digests mean equal questions, tokens and scores."""
    manifest = _manifest(path)
    names = ("dict.txt", *VOCABULARY_FILES.get(manifest.tokenizer.kind, ()), *BINARIES, *ROWS)
    sets = json.dumps({name: records.write(info) for name, info in manifest.sets.items()}, sort_keys=True)
    files = file_digest(*(path / name for name in names if (path / name).is_file()))
    return hashlib.sha256(f"{sets}\0{files}".encode()).hexdigest()
