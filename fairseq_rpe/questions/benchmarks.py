"""Benchmark sets of SCROLLS, GLUE and SuperGLUE, read from their authors' files or from the Hugging Face hub.

``fairseq_rpe/questions/sets/*.toml`` describes them.
"""

import hashlib
import json
import string
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.data.documents import SourceFile, find_source_files
from fairseq_rpe.data.download import download_file, resolve_source
from fairseq_rpe.questions.dataset import Question, check_question
from fairseq_rpe.questions.readers.passages import read_multirc, read_record_set
from fairseq_rpe.questions.readers.scrolls import read_scrolls
from fairseq_rpe.questions.readers.sentences import read_copa, read_labelled, read_mrpc, read_stsb, read_wsc
from fairseq_rpe.questions.readers.tables import Example, MissingLabel, ReaderSpec, TsvFormat
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import PACKAGE_DIR
from fairseq_rpe.utils.records import Count, TextTuple

FOLDER = PACKAGE_DIR / "questions/sets"
SPLITS = ("train", "valid")  # the splits whose answers are public
# Readers by the format of the rows: the ``reader`` of a description.
_READERS: dict[str, Callable[[Sequence[SourceFile], ReaderSpec], Iterator[Example]]] = {
    "cause_or_effect": read_copa,
    "labelled": read_labelled,
    "marked": read_wsc,
    "multirc": read_multirc,
    "paraphrases": read_mrpc,
    "record": read_record_set,
    "scored": read_stsb,
    "scrolls": read_scrolls,
}


@dataclass(frozen=True)
class Template:
    """Format strings of what a model reads, with ``{field}`` for the text of a field.

    Attributes:
        prompt: Text before the document.
        document: Text that may be truncated.
        cue: Text after the document.
    """

    prompt: str = ""
    document: str = ""
    cue: str = ""

    @property
    def fields(self) -> TextTuple:
        """The names of the fields, each once."""
        segments = string.Formatter().parse(self.prompt + self.document + self.cue)
        return tuple(dict.fromkeys(name for _, name, _, _ in segments if name))


@dataclass(frozen=True)
class SetFiles:
    """Where the files of a set are.

    Attributes:
        hub: ``hub:OWNER/NAME/FOLDER`` with parquet files, or a zip archive there.
        home: URL of the authors' files.
        folders: Possible names of the folder or zip archive with the files.
        train: Names or patterns (``train-*.parquet``) of training files; the first one that exists is used.
        valid: Names or patterns of validation files.
        companions: Name of a second file that a file needs, by the name of that file.
    """

    hub: str
    home: str
    folders: TextTuple
    train: TextTuple
    valid: TextTuple
    companions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark set with training and validation split; the answers of test splits are not public.

    Attributes:
        name: Name of the set on the command line.
        title: Description of the set in one line, for tables.
        paper: Authors, year and arXiv number of its paper.
        suite: Collection of sets that it belongs to.
        reader: Format of its rows; a key of ``_READERS``.
        template: Text that a model reads, with the fields of an example filled in.
        places: Files of the set, on the hub and as the authors ship them.
        counts: Number of examples of each split, as shipped.
        metrics: Names of its official metrics.
        published: The metric that the FIRE paper (arXiv 2310.04418) reports.
        answer_tokens: Most tokens of an answer, the end symbol included.
        choices: All answers of a classification, in the order of the hub's labels.
        tsv: Layout of its tab-separated files.
    """

    name: str
    title: str
    paper: str
    suite: Literal["scrolls", "glue", "superglue"]
    reader: str
    template: Template
    places: SetFiles
    counts: Mapping[str, Count]
    metrics: TextTuple
    published: str
    answer_tokens: Count
    choices: TextTuple = ()
    tsv: TsvFormat = field(default_factory=TsvFormat)

    def fingerprint(self) -> str:
        """Return a sha256 of the description, which is part of the manifest of folders that are made of the set."""
        description = records.to_dict(self)
        # The first name of the field: manifests have its digest.
        description["places"]["beside"] = description["places"].pop("companions")
        return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()

    def find(self, source: str | Path | None, split: str) -> list[SourceFile]:
        """Find the files of a split.

        Args:
            source: None or ``hub:OWNER/NAME/FOLDER`` for the hub, whose files are downloaded when they are read.
                Otherwise a folder, zip archive or file as the authors ship it, or a folder with the folders or archives
                of several sets.
            split: ``train`` or ``valid``.

        Returns:
            The files in the order in which :meth:`questions` takes them.

        Raises:
            UserError: There is no such split, no such file, or more than one; or the download fails.
        """
        self._check_split(split)
        if source is None or str(source).startswith("hub:"):
            return self._find_on_hub(str(source or self.places.hub), split)
        path = Path(source)
        if not path.exists():
            raise UserError(f"{path} does not exist: name the folder or zip archive of {self.name}")
        for candidate in self._candidate_paths(path):
            if files := self._find_in(candidate, split):
                return files
        raise UserError(
            f"{path} has no {split} file of {self.name} ({' or '.join(getattr(self.places, split))}): "
            f"get it from {self.places.home}"
        )

    def questions(
        self, split: str, files: Sequence[SourceFile], check_counts: bool = True, skipped: Counter[str] | None = None
    ) -> Iterator[tuple[Question, str]]:
        """Yield the questions of a split in the order of the files, each with its file and line.

        Args:
            split: ``train`` or ``valid``.
            files: Result of :meth:`find`.
            check_counts: Compare the number of examples with the published one, after the last example.
            skipped: Counts the broken lines that were left out, by reason.

        Raises:
            UserError: A row does not have the format of the set, has no label, or has the id of an earlier row; or the
                number of examples is not the published one.
        """
        self._check_split(split)
        spec = ReaderSpec(
            self.template.fields, split, self.choices, self.tsv, Counter() if skipped is None else skipped
        )
        seen: set[str] = set()  # ids
        count = 0  # rows of the files
        try:
            for example in _READERS[self.reader](files, spec):
                question = self._question(example)
                check_question(question, example.source)
                if question.id in seen:
                    raise UserError(f"{example.source}: id '{question.id}' was there before: correct it")
                seen.add(question.id)
                count += example.rows
                yield question, example.source
        except MissingLabel as error:
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

    def _find_on_hub(self, source: str, split: str) -> list[SourceFile]:
        if source.endswith(".zip"):
            return self._find_in(download_file(source), split, source)
        hub_files = [
            file for file in resolve_source(source, lazy=True, allow_converted=True) if isinstance(file, SourceFile)
        ]
        for pattern in getattr(self.places, split):
            if files := [file for file in hub_files if PurePosixPath(file.relative_path).match(pattern)]:
                return files
        raise UserError(f"{source} has no {split} file of {self.name}: give what {self.places.home} has instead")

    def _candidate_paths(self, path: Path) -> Iterator[Path]:
        """Yield the folders and archives that may contain the files, the most likely one first."""
        if path.is_dir():
            for folder in self.places.folders:
                yield from (candidate for candidate in (path / folder, path / f"{folder}.zip") if candidate.exists())
        yield path

    def _find_in(self, path: Path, split: str, source: str = "") -> list[SourceFile]:
        """Return the files of a split in a folder or zip archive, or the file itself; ``source`` is for messages."""
        for pattern in getattr(self.places, split):
            files = _matching_files(path, pattern, self.places.folders)
            if files and pattern in self.places.companions:
                return self._with_companion(files[0], self.places.companions[pattern])
            if len(files) > 1 and "*" not in pattern:
                several = " and ".join(map(str, files))
                raise UserError(f"{several} are each a {split} file of {self.name}: name the folder of one")
            if files:
                return files
        if source:
            raise UserError(f"{source} has no {split} file of {self.name}: give what {self.places.home} has instead")
        return []

    def _with_companion(self, file: SourceFile, companion: str) -> list[SourceFile]:
        """Return a file and the second file that it needs, which is in the same folder or archive."""
        container = file.path if file.member else file.path.parent
        if companions := _matching_files(container, companion, self.places.folders):
            return [file, companions[0]]
        raise UserError(f"{file} lacks {companion} beside it, which says what the valid split is: put it there")


def _matching_files(path: Path, pattern: str, folders: TextTuple) -> list[SourceFile]:
    """Return the files of a folder, or members of a zip archive, that match a pattern; or the file itself.

    In an archive of several sets, only members below one of the ``folders`` count.
    """
    if path.is_dir():
        return [SourceFile(file, root=path) for file in sorted(path.glob(pattern)) if file.is_file()]
    if path.suffix != ".zip":
        return [SourceFile(path)] if PurePosixPath(path.name).match(pattern) else []
    members = find_source_files([path], keep_binary=True)[0]
    members = [file for file in members if PurePosixPath(file.relative_path).match(pattern)]
    in_folders = [file for file in members if set(PurePosixPath(file.relative_path).parts[:-1]) & set(folders)]
    return in_folders or members


def benchmark_names() -> list[str]:
    """Return the names of all benchmark sets."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@cache
def load_benchmark(name: str) -> Benchmark:
    """Load a benchmark set by its name.

    Raises:
        UserError: The package has no set of that name.
    """
    if name not in benchmark_names():
        raise UserError(
            f"unknown set '{name}'{did_you_mean(name, benchmark_names())}; known: {', '.join(benchmark_names())}"
        )
    path = FOLDER / f"{name}.toml"
    text = tomllib.loads(path.read_text(encoding="utf-8"))
    return records.read_record(Benchmark, {**text, "name": name}, str(path), "the set")
