"""Builds prepared folders of questions, from benchmark sets or from files of the user.

Questions are streamed; each different text is encoded and stored once. A folder is complete or does not exist.
"""

import contextlib
import io
import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.atomic_folder import FolderContents, build_atomically
from fairseq_rpe.data.documents import SourceFile, digest_source_files
from fairseq_rpe.data.folder import QUESTIONS_MANIFEST, SPLITS, describe_files, write_index
from fairseq_rpe.data.tokenization import UNK, load_decoder, load_encoder
from fairseq_rpe.data.vocabulary import VOCABULARY_FILES, VocabularyFiles, find_vocabulary
from fairseq_rpe.questions import benchmarks, dataset, metrics
from fairseq_rpe.questions.benchmarks import Benchmark
from fairseq_rpe.questions.dataset import (
    ROWS_FILES,
    Question,
    QuestionDataset,
    SetInfo,
    SplitInfo,
    load_dataset,
    read_question_manifest,
)
from fairseq_rpe.questions.metrics import AnsweredQuestion
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import open_input, sha256_of_files
from fairseq_rpe.utils.output_checks import check_output_folder
from fairseq_rpe.utils.progress import Progress
from fairseq_rpe.utils.records import TextTuple
from fairseq_rpe.utils.table import Cell, Table, TableRow

ANSWER_TOKENS = 64  # default for files of the user
METRIC = "f1"  # default for files of the user
MADE_BY = "fairseq-rpe prepare-answers"  # in the manifest: the first name of the command
CONTENTS = FolderContents(QUESTIONS_MANIFEST, read_question_manifest, ROWS_FILES)
_READ_TEXTS = ("prompt", "document", "cue")  # texts of a question that a model reads, in order
# Version of the files: incremented when the same questions and options give other files than before.
_FORMAT = 1


@dataclass(frozen=True)
class PendingQuestion:
    """A question to be stored.

    Attributes:
        question: Question as it will be read by a model.
        source: Returns its file and line, for messages.
        guesses: Answers of simple strategies, by the name of the strategy.
    """

    question: Question
    source: Callable[[], str]
    guesses: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingSet:
    """A set of questions to be stored.

    Attributes:
        name: Name of the set, unique in the folder.
        suite: See :class:`~fairseq_rpe.questions.dataset.SetInfo`, also for the next three.
        metrics: Names of all its metrics.
        published: Name of the metric that papers report.
        answer_tokens: Most tokens of an answer, the end symbol included.
        splits: Yields the questions, by split; each is called once.
        title: Description of the set in one line, for tables.
        whole_answers: Refuse answers of more than ``answer_tokens`` tokens, instead of counting them.
    """

    name: str
    suite: str
    metrics: TextTuple
    published: str
    answer_tokens: int
    splits: Mapping[str, Callable[[], Iterator[PendingQuestion]]]
    title: str = ""
    whole_answers: bool = False


def write_dataset(
    out: Path,
    sets: Sequence[PendingSet],
    vocab_from: Path,
    made_by: str,
    source: Mapping[str, object],
    say: Callable[[str], None] = print,
    overwrite: bool = False,
) -> QuestionDataset:
    """Write a prepared folder of questions, unless it exists and is up to date.

    Args:
        out: Output folder, which becomes a prepared folder of questions.
        sets: Sets of the folder, with functions that read their questions.
        vocab_from: Prepared corpus whose tokenizer and dictionary are used.
        made_by: The command, for the manifest.
        source: JSON values that decide the questions; part of the manifest.
        say: Prints a line of progress.
        overwrite: Replace a folder that was made with other settings.

    Returns:
        The folder.

    Raises:
        UserError: An id occurs twice in a split of a set, the tokenizer cannot restore a text, an answer has an unknown
            word or too many tokens, a metric cannot score a question, or the questions cannot be read. Nothing is
            changed then.
    """
    vocabulary = find_vocabulary(vocab_from, None)
    assert vocabulary is not None  # None only if no folder is given
    key = {
        "format": _FORMAT,
        "made_by": made_by,
        "source": source,
        "given_vocabulary": {name: sha256_of_files(path) for name, path in vocabulary.paths.items()},
    }
    build_atomically(out, key, lambda folder: _build(sets, vocabulary, folder), say, CONTENTS, overwrite)
    return load_dataset(out)


def check_out(out: Path) -> None:
    """Check, before any work, that an output folder can be made.

    Raises:
        UserError: It cannot be written, or fairseq would split its path.
    """
    if os.pathsep in str(out):
        raise UserError(f"--out {out} has a '{os.pathsep}', where fairseq splits paths: rename it")
    if not out.is_dir():
        check_output_folder(out, flag="--out")


def _build(sets: Sequence[PendingSet], vocabulary: VocabularyFiles, folder: Path) -> dict[str, Any]:
    """Fill a folder and return its manifest, apart from the key."""
    for name, path in vocabulary.paths.items():
        shutil.copyfile(path, folder / name)
    infos, names = {}, ["dict.txt", *VOCABULARY_FILES[vocabulary.kind]]
    with contextlib.ExitStack() as stack:
        writers = {}
        for split in SPLITS:
            if any(split in pending_set.splits for pending_set in sets):
                writers[split] = stack.enter_context(_SplitWriter(folder, split, vocabulary.kind))
                names += [f"{split}.bin", f"{split}.idx", f"{split}.rows.jsonl"]
        for pending_set in sets:
            splits = {split: writers[split].write(pending_set, read()) for split, read in pending_set.splits.items()}
            infos[pending_set.name] = records.from_attributes(SetInfo, pending_set, splits=splits)
    return {
        "tokenizer": {"kind": vocabulary.kind},
        "sets": {name: records.to_dict(info) for name, info in infos.items()},
        "files": describe_files(folder, names),
    }


def _text_key(text: str | bytes) -> bytes:
    """Return a 128-bit hash, which stands for a text in memory."""
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    return blake2b(content, digest_size=16).digest()


class _QuestionChecker:
    """Refuses questions of a set that cannot be scored together, or whose id occurs twice in a split."""

    def __init__(self, pending_set: PendingSet, split: str) -> None:
        self._set, self._split = pending_set, split
        self._first: AnsweredQuestion | None = None
        self._id_keys: set[bytes] = set()

    def check(self, pending: PendingQuestion) -> None:
        """Check a question together with the questions before it."""
        self._check_metrics(pending)
        id_key = _text_key(pending.question.id)
        if id_key in self._id_keys:
            where = f"in the {self._split} split of {self._set.name}"
            problem = f"id '{pending.question.id}' is there a second time {where}"
            raise UserError(f"{pending.source()}: {problem}: give every question another id")
        self._id_keys.add(id_key)

    def _check_metrics(self, pending: PendingQuestion) -> None:
        choices = tuple(dict.fromkeys(map(metrics.normalize_whitespace, pending.question.choices)))
        item = AnsweredQuestion("", pending.question.answers, choices=choices)
        self._first = self._first or item  # classes must be those of the first question
        for metric in dict.fromkeys((*self._set.metrics, self._set.published)):
            try:
                metrics.check_answers(metric, self._first, item)
            except UserError as error:
                raise UserError(f"{pending.source()}: question '{pending.question.id}': {error}") from None


@dataclass
class _SplitCounts:
    """Counts of a set in a split; see :class:`~fairseq_rpe.questions.dataset.SplitInfo`.

    Attributes:
        documents: Items of the different documents.
        right_guesses: Number of questions that a strategy answers right, by its name.
    """

    questions: int = 0
    answers: int = 0
    tokens: int = 0
    longest: int = 0
    cut_answers: int = 0
    unknown: int = 0
    documents: set[int] = field(default_factory=set)
    right_guesses: Counter[str] = field(default_factory=Counter)

    def to_info(self) -> SplitInfo:
        """Return the counts as a manifest has them."""
        values = vars(self) | {"documents": len(self.documents)}
        del values["right_guesses"]
        percents = {guess: 100 * count / self.questions for guess, count in sorted(self.right_guesses.items())}
        return SplitInfo(**values, guesses=percents)


class _SplitWriter:
    """Writes items and rows of a split. Hashes of the texts stay in memory, the texts do not."""

    def __init__(self, folder: Path, split: str, kind: str) -> None:
        self._folder, self._split, self._is_exact = folder, split, kind != "words"
        self._encoder, self._decode = load_encoder(kind, folder), load_decoder(kind, folder)
        self._items: dict[bytes, int] = {}  # item number by text key
        self._sizes, self._unknown = array("i"), array("i")  # tokens and <unk> tokens of each item
        self._bin = open(folder / f"{split}.bin", "wb")
        self._rows = open(folder / f"{split}.rows.jsonl", "wb")

    def __enter__(self) -> "_SplitWriter":
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        self._bin.close()
        self._rows.close()
        if error_type is None:
            write_index(self._folder / f"{self._split}.idx", io.BytesIO(self._sizes.tobytes()), self._encoder.dtype)

    def write(self, pending_set: PendingSet, questions: Iterator[PendingQuestion]) -> SplitInfo:
        """Append the questions of a set and return its statistics."""
        checker, counts = _QuestionChecker(pending_set, self._split), _SplitCounts()
        with Progress(f"{pending_set.name}, {self._split}", "questions") as progress:
            for pending in questions:
                checker.check(pending)
                row = self._row(pending, pending_set)
                self._count(row, pending_set.answer_tokens, counts)
                self._rows.write(json.dumps(row).encode() + b"\n")
                progress.update()
        if not counts.questions:
            raise UserError(f"the {self._split} split of {pending_set.name} has no question: give other files")
        return counts.to_info()

    def _row(self, pending: PendingQuestion, pending_set: PendingSet) -> dict[str, Any]:
        """Store the texts of a question, and return the question as its JSON line has it."""
        question = pending.question
        row: dict[str, Any] = {"id": question.id, "set": pending_set.name}
        for key in _READ_TEXTS:
            if text := getattr(question, key):
                row[key] = self._item(text, f"the {key}", pending)
        row["answers"] = [self._answer_item(text, "the answer", pending, pending_set) for text in question.answers]
        if question.group:
            row["group"] = question.group
        if question.choices:
            choices = [self._answer_item(text, "the choice", pending, pending_set) for text in question.choices]
            row["choices"] = list(dict.fromkeys(choices))
        if question.distance is not None:
            row["distance"] = question.distance
        if pending.guesses:
            row["guesses"] = {
                guess: self._answer_item(text, "the guess", pending, pending_set)
                for guess, text in pending.guesses.items()
            }
        return row

    def _answer_item(self, text: str, role: str, pending: PendingQuestion, pending_set: PendingSet) -> int:
        """Return the item number of an answer; refuse an answer with unknown words or too many tokens."""
        question = pending.question
        # Tokenizers have the blank before a word with the word.
        blank = "" if (question.prompt + question.document + question.cue)[-1].isspace() else " "
        item = self._item(blank + " ".join(text.split()), role, pending)
        if self._unknown[item]:
            problem = f"{role} {text!r} has words that the dictionary lacks"
            raise UserError(f"{pending.source()}: {problem}: leave it out or take another vocabulary")
        size, limit = self._sizes[item] + 1, pending_set.answer_tokens
        if pending_set.whole_answers and size > limit:
            problem = f"{role} of '{question.id}' has {size} tokens with its end, more than {limit}"
            remedy = f"leave it out or allow it with --answer-tokens {size}"
            raise UserError(f"{pending.source()}: {problem}: {remedy}")
        return item

    def _count(self, row: Mapping[str, Any], answer_tokens: int, counts: _SplitCounts) -> None:
        """Add a question, as its JSON line has it, to the counts."""
        read_items = [row[key] for key in _READ_TEXTS if key in row]
        tokens = sum(self._sizes[item] for item in read_items)
        counts.questions += 1
        counts.answers += len(row["answers"])
        counts.tokens += tokens
        counts.longest = max(counts.longest, tokens)
        counts.cut_answers += sum(self._sizes[item] >= answer_tokens for item in row["answers"])
        counts.unknown += sum(self._unknown[item] for item in read_items)
        if "document" in row:
            counts.documents.add(row["document"])
        for guess, item in row.get("guesses", {}).items():
            counts.right_guesses[guess] += item in row["answers"]  # adds 0 for a strategy that is never right

    def _item(self, text: str, role: str, pending: PendingQuestion) -> int:
        """Return the item number of a text in the split; store the text if it is new."""
        subject = f"{role} of '{pending.question.id}'"
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            problem = f"{subject} has half a surrogate pair at character {error.start}, which is not text"
            raise UserError(f"{pending.source()}: {problem}: repair or remove it") from None
        key = _text_key(content)
        if key not in self._items:
            try:
                ids = self._encoder.encode(text)
            except UserError as error:
                raise UserError(f"{pending.source()}: {subject}: {error}") from None
            if self._is_exact and self._decode(ids.tolist()) != content:
                raise UserError(
                    f"{pending.source()}: the tokenizer of --vocab-from cannot give back {subject}: leave it out or "
                    "take another vocabulary"
                )
            self._bin.write(ids.tobytes())
            self._items[key] = len(self._sizes)
            self._sizes.append(len(ids))
            self._unknown.append(int((ids == UNK).sum()))
        return self._items[key]


@dataclass(frozen=True)
class QuestionOptions:
    """Options of ``fairseq-rpe prepare-questions``: benchmark sets by name, or files of the user.

    Attributes:
        out: Output folder, which becomes a prepared folder of questions.
        vocab_from: Prepared corpus whose tokenizer is used.
        names: Names of benchmark sets.
        local: Folder or archive of the sets, as their authors ship them; None is the hub.
        counts: Refuse a set that has another number of examples than published.
        files: Files of the user, by split.
        name: Name of the set in these files; the default is the name of the folder.
        metrics: Metrics for these files, the main one first.
        answer_tokens: Most tokens of an answer, the end symbol included; None is the default of each set.
        overwrite: Replace a folder that was made from other questions.
    """

    out: Path
    vocab_from: Path
    names: TextTuple = ()
    local: str | None = None
    counts: bool = True
    files: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    name: str = ""
    metrics: TextTuple = ()
    answer_tokens: int | None = None
    overwrite: bool = False

    def check(self) -> None:
        """Check the options.

        Raises:
            UserError: An option is out of range or does not go with another one.
        """
        if self.names:
            self._check_benchmarks()
        else:
            self._check_files()
        if unknown := [metric for metric in self.metrics if metric not in metrics.metric_names()]:
            raise UserError(f"--metric {unknown[0]} is unknown: use {', '.join(metrics.metric_names())}")
        if self.answer_tokens is not None and self.answer_tokens < 2:
            raise UserError(f"--answer-tokens {self.answer_tokens} is out of range: use 2 or more")

    def _check_benchmarks(self) -> None:
        if splits := [split for split in SPLITS if self.files.get(split)]:
            raise UserError(f"NAME and --{splits[0]} are both given: name known sets, or give files of your own")
        if self.name or self.metrics:
            flag = "--name" if self.name else "--metric"
            raise UserError(f"{flag} is for questions of your own files, a known set has its own: leave it out")
        if len(set(self.names)) < len(self.names):
            raise UserError(f"{', '.join(self.names)}: a set is named twice: name it once")

    def _check_files(self) -> None:
        if not (self.files.get("train") and self.files.get("valid")):
            raise UserError("no questions are given: name known sets, or give --train and --valid with JSON lines")
        for flag, is_used in (("--from", self.local is not None), ("--no-counts", not self.counts)):
            if is_used:
                raise UserError(f"{flag} is for known sets and none is named: leave it out")
        name = self.name or self.out.name
        if any("\ud800" <= letter <= "\udfff" for letter in name):  # bytes that are not UTF-8
            raise UserError(f"--name {name!r} is not UTF-8, so the folder could not be read: give another")


def prepare_questions(options: QuestionOptions, say: Callable[[str], None] = print) -> QuestionDataset:
    """Make the folder of questions, unless it exists and is up to date, and print its summary.

    Args:
        options: Benchmark sets or files, and output folder.
        say: Prints a line of progress, and the summary.

    Returns:
        The folder.

    Raises:
        UserError: Options or questions are unusable. Nothing is changed then.
    """
    options.check()
    check_out(options.out)
    pending, source = _benchmark_sets(options, say) if options.names else _user_set(options)
    prepared = write_dataset(options.out, pending, options.vocab_from, MADE_BY, source, say, options.overwrite)
    say(summary_table(prepared))
    return prepared


def _benchmark_sets(options: QuestionOptions, say: Callable[[str], None]) -> tuple[list[PendingSet], dict[str, object]]:
    """Return the named benchmark sets, and what of the manifest decides their questions."""
    pending, digests = [], {}
    for benchmark in map(benchmarks.load_benchmark, options.names):
        files = {split: benchmark.find(options.local, split) for split in benchmark.counts}
        splits = {
            split: partial(_read_benchmark, benchmark, split, split_files, options.counts, say)
            for split, split_files in files.items()
        }
        pending.append(
            PendingSet(
                name=benchmark.name,
                suite=benchmark.suite,
                metrics=benchmark.metrics,
                published=benchmark.published,
                answer_tokens=options.answer_tokens or benchmark.answer_tokens,
                splits=splits,
                title=benchmark.title,
            )
        )
        file_digests = {split: digest_source_files(split_files, True) for split, split_files in files.items()}
        digests[benchmark.name] = {"set": benchmark.fingerprint(), **file_digests}
    return pending, {"files": digests, "options": {"counts": options.counts, "answer_tokens": options.answer_tokens}}


def _read_benchmark(
    benchmark: Benchmark, split: str, files: Sequence[SourceFile], counts: bool, say: Callable[[str], None]
) -> Iterator[PendingQuestion]:
    skipped = Counter[str]()
    for question, source in benchmark.questions(split, files, counts, skipped):
        yield PendingQuestion(question, partial(str, source))
    if skipped:
        left_out = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        say(f"{benchmark.name} {split}: left out {left_out}")


def _user_set(options: QuestionOptions) -> tuple[list[PendingSet], dict[str, object]]:
    """Return the set in the files of the user, and what of the manifest decides its questions."""
    files = {split: tuple(options.files[split]) for split in SPLITS if options.files.get(split)}
    metrics = options.metrics or (METRIC,)
    pending = PendingSet(
        name=options.name or options.out.name,
        suite="own",
        metrics=metrics,
        published=metrics[0],
        answer_tokens=options.answer_tokens or ANSWER_TOKENS,
        splits={split: partial(_read_files, paths) for split, paths in files.items()},
        whole_answers=True,
    )
    digests = {split: [sha256_of_files(path) for path in paths] for split, paths in files.items()}
    recorded = {"name": pending.name, "metrics": list(metrics), "answer_tokens": pending.answer_tokens}
    return [pending], {"files": digests, "options": recorded}


def _read_files(paths: Sequence[Path]) -> Iterator[PendingQuestion]:
    return chain.from_iterable(map(_read_file, paths))


def _read_file(path: Path) -> Iterator[PendingQuestion]:
    for index, question in enumerate(dataset.read_questions(path)):
        yield PendingQuestion(question, partial(_file_and_line, path, index))


def _file_and_line(path: Path, index: int) -> str:
    """Return file and line of the question with an index from 0; blank lines are not questions."""
    with open_input(path) as file:
        lines = [line for line, text in enumerate(file, start=1) if text.strip()]
    return f"{path} line {lines[index]}"


def summary_table(prepared: QuestionDataset) -> str:
    """Return a Markdown table with a row for each set and split: counts, and how often guesses are right."""
    infos = [(name, split, info.splits[split]) for name, info in prepared.sets.items() for split in info.splits]
    strategies = list(dict.fromkeys(guess for *_, info in infos for guess in info.guesses))
    has_unknown = any(info.unknown for *_, info in infos)
    head = ["set", "questions", "answers", "texts", "tokens", "longest", "answers to be cut"]
    head += ["unknown"] if has_unknown else []
    rows = []
    for name, split, info in infos:
        numbers = (info.questions, info.answers, info.documents, info.tokens, info.longest, info.cut_answers)
        cells = [f"{number:,}" for number in numbers]
        cells += [f"{100 * info.unknown / info.tokens:.2f} %"] if has_unknown else []
        cells += [f"{info.guesses[guess]:.1f} %" if guess in info.guesses else "" for guess in strategies]
        rows.append(TableRow(f"{name} {split}", [Cell(cell) for cell in cells]))
    return Table("what was made", [*head, *strategies], rows).to_markdown().rstrip()
