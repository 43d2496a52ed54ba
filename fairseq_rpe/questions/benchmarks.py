"""Sets of questions that have a name: those of SCROLLS, GLUE and SuperGLUE. ``fairseq_rpe/questions/sets/*.toml``.

They are read from the files of their authors, or from the hub.
"""

import string
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import nearest
from fairseq_rpe.data import hub
from fairseq_rpe.data.sourcefiles import Entry, find_entries
from fairseq_rpe.questions import question
from fairseq_rpe.questions.question import Question
from fairseq_rpe.questions.readers.passages import multirc, record
from fairseq_rpe.questions.readers.scrolls import scrolls
from fairseq_rpe.questions.readers.sentences import cause_or_effect, labelled, marked, paraphrases, scored
from fairseq_rpe.questions.readers.tables import Example, NoLabel, Tsv, Wanted
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import PACKAGE
from fairseq_rpe.utils.records import Count, Words

FOLDER = PACKAGE / "questions/sets"
SPLITS = ("train", "valid")  # those whose answers are public
_READERS: dict[str, Callable[[Sequence[Entry], Wanted], Iterator[Example]]] = {
    "cause_or_effect": cause_or_effect,
    "labelled": labelled,
    "marked": marked,
    "multirc": multirc,
    "paraphrases": paraphrases,
    "record": record,
    "scored": scored,
    "scrolls": scrolls,
}


@dataclass(frozen=True)
class Template:
    """What a model reads, with ``{field}`` where the text of a field stands; the document alone may be shortened."""

    prompt: str = ""
    document: str = ""
    cue: str = ""

    @property
    def fields(self) -> Words:
        """The names of the fields, each once."""
        parts = string.Formatter().parse(self.prompt + self.document + self.cue)
        return tuple(dict.fromkeys(name for _, name, _, _ in parts if name))


@dataclass(frozen=True)
class Places:
    """Where a set's files are. Names may be patterns such as ``train-*.parquet``; the first that is there is taken."""

    hub: str  # hub:OWNER/NAME/FOLDER with parquet files, or the zip archive there
    home: str  # address of what the authors ship
    folders: Words  # names of the folder, or of the zip archive, that has the files
    train: Words
    valid: Words
    beside: Mapping[str, str] = field(default_factory=dict)  # file: one that it cannot do without


@dataclass(frozen=True)
class KnownSet:
    """A known set. It has a training and a validation split: the answers of the test splits are not public."""

    name: str
    title: str
    paper: str
    suite: Literal["scrolls", "glue", "superglue"]
    reader: str  # one of _READERS: what its rows look like
    template: Template
    places: Places
    counts: Mapping[str, Count]  # examples of each split as they are shipped
    metrics: Words  # the official ones
    published: str  # the one that FIRE prints
    answer_tokens: Count  # most tokens of an answer, its end included
    choices: Words = ()  # of a classification: all answers, in the order of the hub's numbers
    tsv: Tsv = field(default_factory=Tsv)

    def find(self, source: str | Path | None, split: str) -> list[Entry]:
        """The files of a split.

        Args:
            source: ``None`` or ``hub:OWNER/NAME/FOLDER`` for the hub, whose files are downloaded; otherwise a folder,
                zip archive or file as the authors ship it, or a folder with the folders or archives of several sets.
            split: ``train`` or ``valid``.

        Raises UserError: no such split, no such file, or more than one; no network.
        """
        self._check_split(split)
        if source is None or str(source).startswith("hub:"):
            return self._of_hub(str(source or self.places.hub), split)
        path = Path(source)
        if not path.exists():
            raise UserError(f"{path} does not exist: name the folder or zip archive of {self.name}")
        for place in self._likely(path):
            if found := self._among(place, split):
                return found
        raise UserError(
            f"{path} has no {split} file of {self.name} ({' or '.join(getattr(self.places, split))}): "
            f"get it from {self.places.home}"
        )

    def questions(
        self, split: str, files: Sequence[Entry], check_counts: bool = True, skipped: Counter[str] | None = None
    ) -> Iterator[tuple[Question, str]]:
        """The questions of a split, one by one, in the order of the files; each with its file and line.

        Args:
            split: ``train`` or ``valid``.
            files: what :meth:`find` gave for it.
            check_counts: compare the number of examples with the published one, after the last.
            skipped: is told how many broken lines were left out, by reason.

        Raises UserError, with file and line: a row that is not as the set's are, has no label or an id that was there
        before; at the end, with both numbers: another number of examples than was published.
        """
        self._check_split(split)
        wanted = Wanted(self.template.fields, split, self.choices, self.tsv, Counter() if skipped is None else skipped)
        seen: set[str] = set()
        count = 0
        try:
            for example in _READERS[self.reader](files, wanted):
                made = self._question(example)
                question.check(made, example.source)
                if made.id in seen:
                    raise UserError(f"{example.source}: id '{made.id}' was there before: correct it")
                seen.add(made.id)
                count += example.rows
                yield made, example.source
        except NoLabel as error:
            raise UserError(
                f"{error}: {self.name} {split} has no label here, so it cannot be scored: give files with labels"
            ) from None
        if check_counts and count != self.counts[split]:
            raise UserError(
                f"{files[0]}: {self.name} {split} has {count} examples instead of the published {self.counts[split]}: "
                "get a whole copy, or turn the check of counts off (--no-counts)"
            )

    def _question(self, example: Example) -> Question:
        prompt, document, cue = (
            text.format_map(example.fields)
            for text in (self.template.prompt, self.template.document, self.template.cue)
        )
        choices = self.choices if example.choices is None else example.choices
        return Question(example.id, prompt, example.answers, document, cue, example.group, choices)

    def _check_split(self, split: str) -> None:
        remedy = f"use {' or '.join(SPLITS)}"
        if split == "test":
            raise UserError(f"{self.name} test has no labels that are public, so it cannot be scored: {remedy}")
        if split not in SPLITS:
            raise UserError(f"{self.name} has no split '{split}': {remedy}")

    def _of_hub(self, source: str, split: str) -> list[Entry]:
        if source.endswith(".zip"):
            return self._among(hub.one_file(source), split, source)
        found = [entry for entry in hub.sources(source, one_by_one=True, converted=True) if isinstance(entry, Entry)]
        for pattern in getattr(self.places, split):
            if files := [entry for entry in found if PurePosixPath(entry.place).match(pattern)]:
                return files
        raise UserError(f"{source} has no {split} file of {self.name}: give what {self.places.home} has instead")

    def _likely(self, path: Path) -> Iterator[Path]:
        """Where the files may be, the likeliest place first."""
        if path.is_dir():
            for folder in self.places.folders:
                yield from (place for place in (path / folder, path / f"{folder}.zip") if place.exists())
        yield path

    def _among(self, place: Path, split: str, source: str = "") -> list[Entry]:
        """The files of a split in a folder or zip archive, or the file itself."""
        for pattern in getattr(self.places, split):
            found = self._with_neighbours(pattern, _matching(place, pattern, self.places.folders))
            if len(found) > 1 and "*" not in pattern and pattern not in self.places.beside:
                several = " and ".join(map(str, found))
                raise UserError(f"{several} are each a {split} file of {self.name}: name the folder of one")
            if found:
                return found
        if source:
            raise UserError(f"{source} has no {split} file of {self.name}: give what {self.places.home} has instead")
        return []

    def _with_neighbours(self, pattern: str, found: list[Entry]) -> list[Entry]:
        other = self.places.beside.get(pattern)
        if not found or other is None:
            return found
        place = found[0].path if found[0].member else found[0].path.parent
        if neighbour := _matching(place, other, self.places.folders):
            return [found[0], neighbour[0]]
        raise UserError(f"{found[0]} lacks {other} beside it, which says what the valid split is: put it there")


def _matching(place: Path, pattern: str, folders: Words) -> list[Entry]:
    """The files of a folder, or members of a zip archive, that are called as a pattern says; the file itself.

    In an archive of several sets, those below one of the ``folders``.
    """
    if place.is_dir():
        return [Entry(path, root=place) for path in sorted(place.glob(pattern)) if path.is_file()]
    if place.suffix != ".zip":
        return [Entry(place)] if PurePosixPath(place.name).match(pattern) else []
    found = [entry for entry in find_entries([place], keep_binary=True)[0] if PurePosixPath(entry.place).match(pattern)]
    return [entry for entry in found if set(PurePosixPath(entry.place).parts[:-1]) & set(folders)] or found


def names() -> list[str]:
    """The names of the known sets."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@cache
def load(name: str) -> KnownSet:
    """A known set by its name. Raises UserError: there is none."""
    if name not in names():
        raise UserError(f"unknown set '{name}'{nearest(name, names())}; known: {', '.join(names())}")
    path = FOLDER / f"{name}.toml"
    text = tomllib.loads(path.read_text(encoding="utf-8"))
    return records.read(KnownSet, {**text, "name": name}, str(path), "the set")
