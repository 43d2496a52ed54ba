"""Makes a folder of cloze questions: equally many from each bin of distance, chosen by a seed.

Documents for validation and test are those that a pre-training on the given corpus has not read either.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Self

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.documents import Document, SourceFile
from fairseq_rpe.data.folder import MANIFEST, MANIFEST_KEYS, SPLITS, read_manifest
from fairseq_rpe.data.prepare_options import PrepareOptions, check_values
from fairseq_rpe.data.splits import SplitDocuments
from fairseq_rpe.data.tokenization import UNK, Encoder, load_encoder
from fairseq_rpe.data.vocabulary import find_vocabulary
from fairseq_rpe.questions.build_dataset import PendingQuestion, PendingSet, check_out, write_dataset
from fairseq_rpe.questions.cloze import (
    ANSWER_TOKENS,
    BINS,
    QUESTION_FORMATS,
    QUESTION_POSITIONS,
    SENTENCE_SOURCES,
    ClozeQuestion,
    bin_quotas,
    hash64,
)
from fairseq_rpe.questions.cloze_variants import NEEDLE_NAMES, NamePermutation, NeedleDocument, insert_needle
from fairseq_rpe.questions.dataset import Question, QuestionDataset
from fairseq_rpe.utils import records
from fairseq_rpe.utils.progress import Progress

SOURCES = (*SENTENCE_SOURCES, "planted")  # of the sentence that is asked about
ENTITY_NAMES = ("own", "exchanged")  # names of the text, or others drawn from the training texts for each question
MADE_BY = "fairseq-rpe prepare-gaps"  # in the manifest: the first name of the command
_TITLES = {"gap": "which name fills the gap", "completion": "which name comes next"}
_MIN_CONTEXT_TOKENS = 128
_FEW_DOCUMENTS = 1000  # a corpus of at most so many may have been split otherwise than by a hash of each document


@dataclass(frozen=True)
class SplitSettings:
    """The options of ``fairseq-rpe prepare`` that assign documents to splits.

    Attributes:
        seed: Seed of the hashes that put documents into splits.
        valid_fraction: Expected share of documents for validation.
        test_fraction: Expected share of documents for the test.
        split_by: What is hashed; see :class:`~fairseq_rpe.data.prepare_options.PrepareOptions`.
    """

    seed: int = 1
    valid_fraction: float = 0.05
    test_fraction: float = 0.05
    split_by: str = "text"

    @classmethod
    def from_manifest(cls, options: Mapping[str, Any], source: str) -> Self:
        """Read the options of a manifest; ``source`` is its path, for messages."""
        values = {name: options[key] for name in vars(cls()) if (key := MANIFEST_KEYS.get(name, name)) in options}
        return records.read_record(cls, values, source, "options", strict=False)

    def to_manifest(self) -> dict[str, Any]:
        """Return the settings under their keys in a manifest."""
        return {MANIFEST_KEYS.get(name, name): value for name, value in vars(self).items()}


@dataclass(frozen=True)
class _Rows:
    """The option of ``corpus.json`` on rows that are lines of one document."""

    rows_are_lines: bool = False


@dataclass(frozen=True)
class _Corpus:
    """The keys of ``corpus.json`` that are read.

    Attributes:
        digest: Digests of the source files: ``all``, or one for each split that has its own files.
        splits: Statistics of each split; ``documents`` is the number of its documents.
    """

    digest: Mapping[str, str] = field(default_factory=dict)
    splits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class HeldOutDocuments:
    """Splits documents as a prepared corpus was split, and warns if its training may have read those for validation.

    Args:
        corpus: Folder of the prepared corpus.

    Attributes:
        split_settings: How the documents of the corpus were split. None if its splits were given as files, or if the
            manifest does not record it.
    """

    def __init__(self, corpus: Path) -> None:
        manifest, source = read_manifest(corpus), str(corpus / MANIFEST)
        record = records.read_record(_Corpus, manifest, source, "the corpus", strict=False)
        options = manifest.get("options", {})
        self._digest, self._corpus = record.digest, corpus
        self.split_settings = SplitSettings.from_manifest(options, source) if "all" in record.digest else None
        documents = sum(counts.get("documents", 0) for counts in record.splits.values())
        self._rows_are_lines = records.read_record(_Rows, options, source, "options", strict=False).rows_are_lines
        # A hash of the text puts a document into the same split whatever the other documents are.
        by_text = self.split_settings is not None and self.split_settings.split_by == "text"
        self._by_hash = by_text and documents > _FEW_DOCUMENTS and not self._rows_are_lines

    def documents(self, texts: PrepareOptions) -> tuple[SplitDocuments, SplitSettings]:
        """Split the documents of a text as the corpus was split, if possible.

        Args:
            texts: Source files and options. Its own split settings are used if it has files for each split, or if the
                corpus records none.

        Returns:
            The documents, and the settings that split them.
        """
        if texts.valid or self.split_settings is None:
            return SplitDocuments(texts), records.from_attributes(SplitSettings, texts)
        settings = self.split_settings
        documents = SplitDocuments(replace(texts, **vars(settings)))
        if settings.split_by == "path" and documents.digest != self._digest:
            # Paths of other files say nothing about the corpus, and all rows of a file would share one split.
            settings = replace(settings, split_by="text")
            documents = SplitDocuments(replace(texts, **vars(settings)))
        return documents, settings

    def warning(self, digest: Mapping[str, str], too_few: bool = False) -> str | None:
        """Return a warning if the training of the corpus may have read documents of validation or test.

        Args:
            digest: Digests of the source files by split; ``all`` if they were split by :meth:`documents`.
            too_few: Whether there were too few documents for that, so that they were split in another way.

        Returns:
            One line, or None if there is no such risk or the manifest does not record enough.
        """
        if not self._digest:
            return None
        if "all" in digest:
            safe = (digest == self._digest and not self._rows_are_lines) or (self._by_hash and not too_few)
        else:
            safe = all(digest[split] == self._digest.get(split) for split in ("valid", "test"))
        if safe:
            return None
        return (
            f"warning: unless this is another text, models trained on {self._corpus} may have read documents of "
            "validation and test: give the files that it was made of, by --train, --valid and --test if it was"
        )


@dataclass(frozen=True)
class ClozeOptions:
    """Options of ``fairseq-rpe prepare-cloze``: which questions to make from which text.

    Attributes:
        out: Output folder, which becomes a prepared question folder.
        vocab_from: Prepared corpus whose tokenizer is used.
        train: Source files of the training split, or of the whole text if ``valid`` and ``test`` are empty.
        tokens: Tokens of a context, which passage, question and answer fill together.
        valid: Source files of the validation split.
        test: Source files of the test split.
        documents: Use the first so many training documents; None uses all.
        text_field: Field of a row that contains the text.
        questions: Number of training questions.
        valid_questions: Number of validation questions, and of test questions.
        valid_tokens: Context in validation and test, in tokens; None is the same as in training.
        min_tokens: Shortest passage of training, in tokens; None lets every passage fill its context.
        question_position: Where the question is, relative to the passage; one of
            :data:`~fairseq_rpe.questions.cloze.QUESTION_POSITIONS`.
        source: Sentence that is asked about: ``next`` after the passage, an ``earlier`` one of the passage, or
            ``planted``, a needle inserted into the passage.
        question_format: One of :data:`~fairseq_rpe.questions.cloze.QUESTION_FORMATS`.
        entity_names: ``own`` names of the text, or names ``exchanged`` for others in each question.
        seed: Chooses the questions, and splits the documents unless the corpus records how.
        overwrite: Replace a folder that was made with other options.
    """

    out: Path
    vocab_from: Path
    train: tuple[Path | SourceFile, ...]
    tokens: int
    valid: tuple[Path | SourceFile, ...] = ()
    test: tuple[Path | SourceFile, ...] = ()
    documents: int | None = None
    text_field: str = "text"
    questions: int = 4000
    valid_questions: int = 400
    valid_tokens: int | None = None
    min_tokens: int | None = None
    question_position: str = "last"
    source: str = "next"
    question_format: str = "gap"
    entity_names: str = "own"
    seed: int = 1
    overwrite: bool = False

    def check(self) -> None:
        """Check the options.

        Raises:
            UserError: An option is out of range or does not go with another one.
        """
        self._check_values()
        if self.question_format == "completion" and self.question_position != "last":
            raise UserError(
                "--question-format completion asks after the passage: "
                f"leave out --question-position {self.question_position}"
            )
        if self.source == "planted" and (self.question_format, self.entity_names) != ("completion", "own"):
            conflict = "--entity-names exchanged" if self.entity_names != "own" else "--question-format gap"
            raise UserError(
                f"--source planted needs a completion with a drawn name, so {conflict} does not go with it: use "
                "--question-format completion and leave out --entity-names"
            )

    def _check_values(self) -> None:
        ranges = {
            "tokens": (_MIN_CONTEXT_TOKENS, 1 << 24),
            "questions": (BINS, 1 << 32),
            "valid_questions": (BINS, 1 << 32),
            "valid_tokens": (_MIN_CONTEXT_TOKENS, 1 << 24),
            "min_tokens": (16, self.tokens // 2),
            "seed": (0, (1 << 63) - 1),
        }
        choices = {
            "question_position": QUESTION_POSITIONS,
            "source": SOURCES,
            "question_format": QUESTION_FORMATS,
            "entity_names": ENTITY_NAMES,
        }
        check_values(self, ranges, choices)

    def question_count(self, split: str) -> int:
        """Return the number of questions of a split."""
        return self.questions if split == "train" else self.valid_questions

    def context_tokens(self, split: str) -> int:
        """Return the tokens of a context of a split."""
        return self.tokens if split == "train" else self.valid_tokens or self.tokens

    def fill_tokens(self, split: str) -> int:
        """Return the tokens of a context that the original text may fill: exchanged names may be longer."""
        tokens = self.context_tokens(split)
        return tokens - tokens // 20 if self.entity_names == "exchanged" else tokens


def prepare_cloze(options: ClozeOptions, say: Callable[[str], None] = print) -> QuestionDataset:
    """Make the folder of cloze questions, unless it exists and was made with the same options.

    Args:
        options: Source files, output folder, and which questions to make.
        say: Prints a line of progress.

    Returns:
        The prepared folder.

    Raises:
        UserError: Options or sources are unusable, or the documents are too short, have no names or give too few
            questions.
    """
    options.check()
    texts = records.from_attributes(PrepareOptions, options, overwrite=False)
    texts.check()
    vocabulary = find_vocabulary(options.vocab_from, None)
    assert vocabulary is not None  # None only if no folder is given
    check_out(options.out)
    held_out = HeldOutDocuments(options.vocab_from)
    documents, split_settings = held_out.documents(texts)
    if warning := held_out.warning(documents.digest):
        say(warning)
    sampler = _QuestionSampler(options, documents, load_encoder(vocabulary.kind, options.vocab_from), say, held_out)
    contexts = dict.fromkeys(map(options.context_tokens, SPLITS))  # the different lengths, in order
    pending = PendingSet(
        name=options.out.name,
        suite="gaps",
        title=f"{_TITLES[options.question_format]}, in {' and '.join(map(str, contexts))} tokens",
        metrics=("f1", "em"),
        published="f1",
        answer_tokens=ANSWER_TOKENS,
        splits={split: partial(sampler.pending_questions, split) for split in SPLITS},
    )
    source = _manifest_source(options, documents, split_settings)
    return write_dataset(options.out, [pending], options.vocab_from, MADE_BY, source, say, options.overwrite)


def _manifest_source(
    options: ClozeOptions, documents: SplitDocuments, split_settings: SplitSettings
) -> dict[str, object]:
    """Return the source of the questions for the manifest: a folder with the same one is not made again."""
    # Paths are not recorded, because the digests of the texts identify their contents.
    not_recorded = ("out", "vocab_from", "train", "valid", "test", "overwrite")
    recorded = {MANIFEST_KEYS.get(k, k): value for k, value in vars(options).items() if k not in not_recorded}
    source: dict[str, object] = {"texts": documents.digest, "options": recorded}
    if split_settings != SplitSettings(options.seed):
        source["division"] = split_settings.to_manifest()
    return source


@dataclass
class _SplitStats:
    """Counts over the documents of a split that have been read so far.

    Attributes:
        documents: Number of documents, and so the index of the next one within the split.
        longest: Tokens of the longest document.
        names: Number of different names of each document, added up over documents.
    """

    documents: int = 0
    longest: int = 0
    names: int = 0


class _HeapEntry(NamedTuple):
    """A question among those with the smallest hashes of its split and bin; heapq finds the smallest entry."""

    negative_hash: int
    document_index: int  # within the split
    question: ClozeQuestion


class _QuestionSampler:
    """Chooses the questions of each split by a hash of seed, document and gap, with a quota for each distance bin."""

    def __init__(
        self,
        options: ClozeOptions,
        documents: SplitDocuments,
        encoder: Encoder,
        say: Callable[[str], None],
        held_out: HeldOutDocuments,
    ) -> None:
        self._held_out = held_out
        self._options, self._documents, self._encoder, self._say = options, documents, encoder, say
        # Questions by split and by the index of their document within the split.
        self._chosen: dict[str, dict[int, list[ClozeQuestion]]] = {}
        self._name_counts: Counter[str] = Counter()  # of the training documents

    def pending_questions(self, split: str) -> Iterator[PendingQuestion]:
        """Yield the chosen questions of a split, in the order of the documents."""
        if not self._chosen:
            self._choose()
        remaining = dict(self._chosen[split])
        documents_of_split = (document for name, document in self._documents if name == split)
        for document_index, document in enumerate(documents_of_split):
            questions = remaining.pop(document_index, [])
            text = _text(document) if questions else ""
            for question in sorted(questions, key=attrgetter("gap_start", "passage_end")):
                passage = text[question.passage_start : question.passage_end]
                question, passage = self._apply_variant(split, document, question, passage)
                yield PendingQuestion(
                    _as_question(document_index, passage, question),
                    partial(str, document.relative_path),
                    question.guesses,
                )
            if not remaining:
                break
        self._documents.check_unchanged()

    @cached_property
    def _permutation(self) -> NamePermutation:
        return NamePermutation(self._name_counts, self._encoder.encode, self._options.seed)

    @cached_property
    def _needle_names(self) -> list[str]:
        return [name for name, _ in self._name_counts.most_common(NEEDLE_NAMES)]

    def _apply_variant(
        self, split: str, document: Document, question: ClozeQuestion, passage: str
    ) -> tuple[ClozeQuestion, str]:
        """Insert the needle or exchange the names, if the options ask for it."""
        if self._options.source == "planted":
            return insert_needle(question, passage, self._needle_names, f"{self._options.seed}\0{document.digest}")
        if self._options.entity_names == "exchanged":
            max_tokens = self._options.context_tokens(split) - ANSWER_TOKENS
            return self._permutation(question, passage, max_tokens, document.digest)
        return question, passage

    def _choose(self) -> None:
        """Fill ``_chosen`` and ``_name_counts`` in one pass over the documents."""
        stats = {split: _SplitStats() for split in SPLITS}
        heaps: dict[tuple[str, int], list[_HeapEntry]] = defaultdict(list)  # by split and bin of distance
        with Progress("looking for questions", "documents", self._count_documents()) as progress:
            for split, document in self._documents:
                self._read_document(split, document, stats[split], heaps)
                progress.update()
        for split in SPLITS:
            heaps_of_split = [heaps[split, distance_bin] for distance_bin in range(BINS)]
            self._check_quotas(split, stats[split], [len(heap) for heap in heaps_of_split])
            chosen: dict[int, list[ClozeQuestion]] = defaultdict(list)
            for heap in heaps_of_split:
                for entry in heap:
                    chosen[entry.document_index].append(entry.question)
            self._chosen[split] = chosen

    def _read_document(
        self, split: str, document: Document, stats: _SplitStats, heaps: Mapping[tuple[str, int], list[_HeapEntry]]
    ) -> None:
        """Add the questions of a document to the heaps, and count the document and its names."""
        options = self._options
        min_tokens = options.min_tokens if split == "train" else None
        indexed = NeedleDocument(_text(document), self._encoder.encode, self._is_possible_answer, min_tokens)
        if options.source == "planted":
            questions = indexed.needle_questions(options.context_tokens(split))
        else:
            questions = indexed.questions(
                options.fill_tokens(split), options.question_position, options.source, options.question_format
            )
        quotas = bin_quotas(options.question_count(split))
        for question in questions:
            heap = heaps[split, question.distance_bin]
            entry = _HeapEntry(-self._question_hash(document, question), stats.documents, question)
            if len(heap) < quotas[question.distance_bin]:
                heapq.heappush(heap, entry)
            else:
                heapq.heappushpop(heap, entry)  # drops the smallest entry, which is the one with the largest hash
        stats.documents += 1
        stats.longest = max(stats.longest, indexed.token_count)
        stats.names += len(indexed.names)
        if split == "train":
            self._name_counts.update(indexed.name_counts())

    def _count_documents(self) -> int:
        """Count the documents; split them in another way if there are so few that a split would be empty."""
        counts, split_by_digest = Counter[str](), dict[str, str]()
        for split, document in self._documents:
            counts[split] += 1
            if (other := split_by_digest.setdefault(document.digest, split)) != split:
                problem = f"{document.relative_path} has a document that the {other} split has, too"
                raise UserError(f"the {split} split: {problem}: leave it out of one of them")
        empty_splits = [split for split in SPLITS if not counts[split]]
        if not empty_splits:
            return counts.total()
        if (description := self._documents.split_few()) is None:
            raise UserError(
                f"the {empty_splits[0]} split has no document: give more texts, or --train, --valid and --test"
            )
        self._say(description)
        digest = self._documents.digest
        # only a warning that the first split did not give already
        if (warning := self._held_out.warning(digest, too_few=True)) and not self._held_out.warning(digest):
            self._say(warning)
        return sum(1 for _ in self._documents)  # counted again: pieces of documents count, too

    def _is_possible_answer(self, name: str) -> bool:
        """Return whether the tokenizer can write a name in few enough tokens."""
        ids = self._encoder.encode(f" {name}")
        return len(ids) < ANSWER_TOKENS and UNK not in ids

    def _question_hash(self, document: Document, question: ClozeQuestion) -> int:
        """Return the hash by which questions are chosen, which depends on no other question or document."""
        return hash64(f"{self._options.seed}\0{document.digest}\0{question.gap_start}\0{question.passage_end}")

    def _check_quotas(self, split: str, stats: _SplitStats, bin_counts: list[int]) -> None:
        """Raise UserError if a bin of distance has fewer questions than its quota."""
        quotas = bin_quotas(self._options.question_count(split))
        short_bins = [i for i, (count, quota) in enumerate(zip(bin_counts, quotas, strict=True)) if count < quota]
        if short_bins:
            worst = min(short_bins, key=bin_counts.__getitem__)
            raise self._quota_error(split, stats, worst, bin_counts[worst], quotas[worst])

    def _quota_error(self, split: str, stats: _SplitStats, distance_bin: int, count: int, quota: int) -> UserError:
        """Return the error for a bin of distance that has ``count`` questions instead of ``quota``."""
        tokens = self._options.context_tokens(split)
        tokens_flag = "--tokens" if split == "train" or self._options.valid_tokens is None else "--valid-tokens"
        if stats.longest < tokens:
            longest = f"its longest document has {stats.longest} tokens"
            return UserError(f"the {split} split has no passage of {tokens} tokens, {longest}: use fewer {tokens_flag}")
        if not stats.names:
            definition = "of words that are capitalised within sentences and hardly ever in lower case"
            return UserError(f"the {split} split has no names, {definition}: give other texts, such as novels")
        percent = " to ".join(f"{100 * edge / BINS:g}" for edge in (distance_bin, distance_bin + 1))
        problem = f"has {count} questions with the answer {percent} % of the passage back, not {quota}"
        remedy = f"give it more text or use fewer {tokens_flag}"
        if not count and self._options.source != "next":
            remedy = f"give it more text, or use more {tokens_flag} if sentences are longer than 1/{BINS} of a passage"
        if count:
            questions_flag = "--questions" if split == "train" else "--valid-questions"
            remedy = f"use {questions_flag} {BINS * count} or give it more text"
        return UserError(f"the {split} split {problem}: {remedy}")


def _text(document: Document) -> str:
    return "".join(document.blocks())


def _as_question(document_index: int, passage: str, question: ClozeQuestion) -> Question:
    return Question(
        id=f"{document_index}-{question.gap_start}-{question.passage_end}",
        prompt=question.prompt,
        answers=(question.answer,),
        document=passage,
        cue=question.cue,
        choices=question.choices,
        distance=question.distance,
    )
