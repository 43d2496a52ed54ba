"""Assigns the documents of a corpus to its splits: by a hash of each, or by cutting documents if there are few."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from operator import attrgetter

from tqdm import tqdm

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.documents import (
    Document,
    DocumentReader,
    SourceFile,
    digest_source_files,
    find_source_files,
    scan_document,
)
from fairseq_rpe.data.folder import SPLITS
from fairseq_rpe.data.prepare_options import PrepareOptions

_MAX_FEW_DOCUMENTS = 1000  # up to so many, a split that the hash left empty is filled in another way
_MAX_SHARE = 0.15  # of all text, for a document that is chosen as the valid or test split
_OVERLAP = 16  # characters; most of a border that lies in two blocks
# Where a document may be cut: at an empty line, else at the end of a line, else between two words.
_BORDERS = [re.compile(pattern) for pattern in (r"\n[ \t\r]*\n", r"\n", r"\s")]


_UNSPLIT = ""  # in place of a split: source files whose documents are split here


class EmptySplit(UserError):
    """A split has no document."""


def unit_hash(purpose: str, seed: int, name: str) -> float:
    """Return a number in [0, 1) that depends on the arguments only."""
    digest = hashlib.sha256(f"{purpose}\0{seed}\0".encode() + os.fsencode(name)).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _slice(document: Document, begin: int, end: int) -> Iterator[str]:
    """Yield the characters ``begin`` to ``end`` of a document, in blocks."""
    position = 0
    for block in document.blocks():
        piece = block[max(begin - position, 0) : max(end - position, 0)]
        position += len(block)
        if piece:
            yield piece
        if position >= end:
            return


def _cut(document: Document, valid: float, test: float) -> list[tuple[str, Document]]:
    """Cut a document into pieces for training, validation and test, in this order.

    All of a document is training if it has no borders where three pieces with text could begin and end.

    Args:
        document: Document with text for all three splits.
        valid: Share of the characters for validation.
        test: Share of the characters for the test.
    """
    targets = [int(document.characters * (1 - valid - test)), int(document.characters * (1 - test))]
    path = document.relative_path
    for ends in _border_ends(document, targets):  # the best kind of border first
        bounds = [0, *ends, document.characters]
        if any(begin >= end for begin, end in pairwise(bounds)):
            continue  # a piece would be empty
        blocks = [partial(_slice, document, begin, end) for begin, end in pairwise(bounds)]
        pieces = [scan_document(path, path, piece_blocks) for piece_blocks in blocks]
        if not any(piece.blank for piece in pieces):
            return list(zip(SPLITS, pieces, strict=True))
    return [("train", document)]


def _border_ends(document: Document, targets: Sequence[int]) -> list[list[int]]:
    """Find for each kind of border the ends of the first ones at or after the targets, in characters.

    Kinds that do not occur after each target are left out.
    """
    ends_by_kind: list[dict[int, int]] = [{} for _ in _BORDERS]
    position, overlap = 0, ""  # position: of the first character of overlap + block
    for block in document.blocks():
        text = overlap + block
        for target in targets:
            for border, ends in zip(_BORDERS, ends_by_kind, strict=True):
                if target not in ends and (match := border.search(text, max(target - position, 0))):
                    ends[target] = position + match.end()
        overlap = text[-_OVERLAP:]
        position += len(text) - len(overlap)
    return [[ends[target] for target in targets] for ends in ends_by_kind if len(ends) == len(targets)]


class SplitDocuments:
    """Iterates over (split, document) pairs of a corpus, the same in every pass.

    Args:
        options: The source files and how they are split.

    Attributes:
        digest: Digest of the source files by split; under ``all`` if the documents are split here.
        available_documents: Number of training documents if it is below ``options.documents``, else None.
    """

    def __init__(self, options: PrepareOptions) -> None:
        self._options = options
        self._by_path = options.split_by == "path"
        paths = {"train": options.train, "valid": options.valid, "test": options.test}
        paths = {split: p for split, p in paths.items() if p} if options.valid else {_UNSPLIT: options.train}
        sources = {split: find_source_files(p, options.include) for split, p in paths.items()}
        self._binary_count = sum(binary_count for _, binary_count in sources.values())
        # By split, or _UNSPLIT alone.
        self._readers = {split: self._make_reader(files) for split, (files, _) in sources.items()}
        self.available_documents: int | None = None
        if options.documents is not None:
            self._keep_first(options.documents)
        self._first_stamps = self._file_stamps()
        self._few: list[tuple[str, Document]] | None = None  # all documents, once split_few has split them
        self.digest = {
            split or "all": digest_source_files(reader.files, self._by_path) for split, reader in self._readers.items()
        }

    def _make_reader(self, files: Sequence[SourceFile]) -> DocumentReader:
        """Return a reader of files, of at most ``options.max_bytes`` bytes of text."""
        options = self._options
        if self._by_path:
            files = sorted(files, key=attrgetter("relative_path"))
        reader = DocumentReader(
            files, options.text_field, options.rows_are_lines, options.skip_invalid, not options.boundaries
        )
        if options.max_bytes is not None:
            reader.files = self._limit_bytes(reader, options.max_bytes)
        return reader

    def _limit_bytes(self, reader: DocumentReader, max_bytes: int) -> list[SourceFile]:
        """Return files of a reader, chosen by a hash of their paths, with at most ``max_bytes`` bytes of text."""
        sizes: Counter[str] = Counter()
        for document in reader:
            sizes[document.relative_path] += document.size
        left_out = set()
        # Not the hash that splits them: in its order all validation files would come first.
        for path in sorted(sizes, key=lambda path: (unit_hash("order", self._options.seed, path), path)):
            if sizes[path] <= max_bytes:
                max_bytes -= sizes[path]
            else:
                left_out.add(path)
        return [file for file in reader.files if file.relative_path not in left_out]

    def __iter__(self) -> Iterator[tuple[str, Document]]:
        if self._few is not None:
            yield from self._few
            return
        for reader_split in self._readers:
            yield from self._split_reader(reader_split)

    def _split_reader(self, reader_split: str) -> Iterator[tuple[str, Document]]:
        """Split the documents of a reader; stop when training has as many as ``options.documents``."""
        options, remaining = self._options, self._options.documents
        for document in self._readers[reader_split]:
            if options.split_by == "part" and not options.valid:
                yield from _cut(document, options.valid_fraction, options.test_fraction)
                is_training = True  # one of its parts
            else:
                split = self._assign_split(document, reader_split)
                yield split, document
                is_training = split == "train"
            if remaining is not None and is_training:
                remaining -= 1
                if remaining == 0:
                    return

    def _assign_split(self, document: Document, reader_split: str) -> str:
        """Return the split of a document: that of its files, or one that a hash of its text or path chooses."""
        options = self._options
        valid_share, test_share = options.valid_fraction, options.test_fraction
        if reader_split == "valid" and options.test_from_valid:
            valid_share = test_share = 0.5
        elif reader_split != _UNSPLIT:
            return reader_split
        number = unit_hash("split", options.seed, document.relative_path if self._by_path else document.digest)
        if number < valid_share:
            return "valid"
        return "test" if number < valid_share + test_share else "train"

    def _keep_first(self, documents: int) -> None:
        """Keep the files with the first training documents, so that no other file is read or downloaded."""
        split = next(iter(self._readers))  # the training reader
        count = 0
        with tqdm(desc="choosing", total=documents, unit="document", unit_scale=True, disable=None) as bar:
            for document_split, _ in self._split_reader(split):
                count += document_split == "train"
                bar.update(document_split == "train")
        reader = self._readers[split]
        if count < documents:
            self.available_documents = count
        else:
            # The reader stops in the file with the last training document.
            reader.files = reader.files[: reader.files_started]

    def _file_stamps(self) -> list[tuple[int, int]]:
        """Return size and modification time of each file."""
        files = (file for reader in self._readers.values() for file in reader.files)
        return [((stat := file.local_path.stat()).st_size, stat.st_mtime_ns) for file in files]

    def check_unchanged(self) -> None:
        """Check that no source file changed since the first pass.

        Raises:
            UserError: A file changed, so the passes may have read different texts.
        """
        if self._file_stamps() != self._first_stamps:
            raise UserError("the source files changed while they were read: run this again once they no longer change")

    def check_splits(self, documents: dict[str, int]) -> None:
        """Check that no split is empty.

        Args:
            documents: Number of documents by split.

        Raises:
            EmptySplit: A split has no document.
        """
        limits = {"a larger --max-bytes": self._options.max_bytes, "more --documents": self._options.documents}
        more = next((remedy for remedy, limit in limits.items() if limit), "--valid and --test")
        for split in SPLITS:
            if not documents.get(split):
                raise EmptySplit(
                    f"the {split} split of {sum(documents.values())} documents would be empty: "
                    f"give more documents, other fractions, another --seed or {more}"
                )

    def split_few(self) -> str | None:
        """Split documents that are too few for a hash: cut each one, or choose whole documents of a fitting size.

        Returns:
            A line that describes the splits, or None if there is no way.
        """
        limited = self._options.documents is not None and self.available_documents is None
        if self._few is not None or self._options.valid or limited:
            return None
        [reader] = self._readers.values()
        documents = [document for document in islice(reader, _MAX_FEW_DOCUMENTS + 1) if not document.blank]
        if len(documents) > _MAX_FEW_DOCUMENTS:
            return None
        in_hash_order = sorted(documents, key=lambda document: unit_hash("few", self._options.seed, document.digest))
        fitting = self._fitting_documents(in_hash_order)
        if len({document.digest for document in fitting}) >= 2:
            return self._hold_out(documents, fitting)
        description = self._cut_few(documents)
        return self._hold_out(documents, in_hash_order) if description is None else description

    def _fitting_documents(self, documents: Sequence[Document]) -> list[Document]:
        """Return the documents that are neither too short nor too long to be the valid or test split."""
        fractions = self._options.valid_fraction, self._options.test_fraction
        smallest, largest = min(fractions) / 5, max(_MAX_SHARE, *fractions)
        total = sum(document.characters for document in documents)
        return [document for document in documents if smallest <= document.characters / total <= largest]

    def _cut_few(self, documents: Sequence[Document]) -> str | None:
        """Cut each document that can be cut; return a line that describes the splits, or None if there is none."""
        fractions = self._options.valid_fraction, self._options.test_fraction
        cuts = [_cut(document, *fractions) for document in documents]
        is_cut = [len(pieces) > 1 for pieces in cuts]
        if not any(is_cut):
            return None
        self._few = [piece for pieces in cuts for piece in pieces]
        which = "each is" if all(is_cut) else "the long ones are"
        percents = ", ".join(f"{100 * share:.3g} %" for share in (1 - sum(fractions), *fractions))
        return (
            f"too few documents to choose from ({len(documents)}): {which} cut into {percents} for {', '.join(SPLITS)}"
        )

    def _hold_out(self, documents: Sequence[Document], candidates: Sequence[Document]) -> str | None:
        """Make the first two candidates with different texts the valid and test split, each with all of its copies.

        Returns:
            A line that describes the splits, or None if no document would be left for training.
        """
        different: dict[str, Document] = {}
        for document in candidates:
            different.setdefault(document.digest, document)
        if len({document.digest for document in documents}) < 3 or len(different) < 2:
            return None
        valid, test = list(different.values())[:2]
        held_out = {valid.digest: "valid", test.digest: "test"}
        self._few = [(held_out.get(document.digest, "train"), document) for document in documents]
        return (
            f"few documents ({len(documents)}): {valid.relative_path} is the valid split, "
            f"{test.relative_path} the test split"
        )

    def skipped(self) -> dict[str, int]:
        """Return how many documents the last pass left out, by reason."""
        by_reader = (reader.skipped for reader in self._readers.values())
        return dict(sum(by_reader, Counter(binary=self._binary_count)))
