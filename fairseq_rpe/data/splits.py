"""The documents of a corpus divided into its splits: by a hash of each, or, where they are few, by cutting them."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter

from tqdm import tqdm

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.documents import Document, Reader, look_through
from fairseq_rpe.data.folder import SPLITS
from fairseq_rpe.data.prepare_options import PrepareOptions
from fairseq_rpe.data.sourcefiles import Entry, digest_entries, find_entries

_MOST_FEW = 1000  # documents among which a split that a hash left empty is filled otherwise
_MOST_SHARE = 0.15  # of all text, that a document chosen for valid or test may be
_OVERLAP = 16  # characters of a border at most, for one that lies in two blocks
# Where a document is cut: at an empty line, else at the end of a line, else between two words.
_BORDERS = [re.compile(pattern) for pattern in (r"\n[ \t\r]*\n", r"\n", r"\s")]


class EmptySplit(UserError):
    """A split that got no document."""


def unit_hash(purpose: str, seed: int, name: str) -> float:
    """A number in [0, 1) that depends on nothing but the arguments."""
    digest = hashlib.sha256(f"{purpose}\0{seed}\0".encode() + os.fsencode(name)).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _slice(whole: Document, begin: int, end: int) -> Iterator[str]:
    at = 0
    for block in whole.blocks():
        part = block[max(begin - at, 0) : max(end - at, 0)]
        at += len(block)
        if part:
            yield part
        if at >= end:
            return


def _cut(whole: Document, valid: float, test: float) -> list[tuple[str, Document]]:
    """The beginning of a document for training, what follows for validation, its end for the test; else all of it."""
    targets = [int(whole.characters * (1 - valid - test)), int(whole.characters * (1 - test))]
    for ends in _border_ends(whole, targets):
        bounds = [0, *ends, whole.characters]
        if sorted(set(bounds)) != bounds:
            continue
        ranges = zip(SPLITS, bounds, bounds[1:], strict=False)
        parts = [(s, look_through(whole.place, whole.place, partial(_slice, whole, a, b))) for s, a, b in ranges]
        if not any(part.blank for _, part in parts):
            return parts
    return [("train", whole)]


def _border_ends(whole: Document, targets: Sequence[int]) -> list[list[int]]:
    """For each kind of border, where the first one at or after each of the targets ends: characters of the document."""
    found: list[dict[int, int]] = [{} for _ in _BORDERS]
    at, before = 0, ""
    for block in whole.blocks():
        text = before + block
        for target in targets:
            for border, ends in zip(_BORDERS, found, strict=True):
                if target not in ends and (match := border.search(text, max(target - at, 0))):
                    ends[target] = at + match.end()
        before = text[-_OVERLAP:]
        at += len(text) - len(before)
    return [[ends[target] for target in targets] for ends in found if len(ends) == len(targets)]


class DividedDocuments:
    """The documents of all splits, the same in every pass.

    ``digest`` is that of the source files, by split; under ``all`` where they are divided here.
    """

    def __init__(self, options: PrepareOptions) -> None:
        self._options = options
        self._by_path = options.divide_by == "path"
        given = {"train": options.train, "valid": options.valid, "test": options.test}
        paths = {split: p for split, p in given.items() if p} if options.valid else {"": options.train}
        found = {split: find_entries(p, options.include) for split, p in paths.items()}
        self._binary = sum(binary for _, binary in found.values())
        self._readers = {split: self._reader(entries) for split, (entries, _) in found.items()}
        # How many documents of training there are, if they are fewer than wanted.
        self.short: int | None = None
        if options.documents is not None:
            self._keep_first(options.documents)
        self._stamp = self._stamps()
        readers = self._readers.items()
        self._few: list[tuple[str, Document]] | None = None
        self.digest = {split or "all": digest_entries(reader.entries, self._by_path) for split, reader in readers}

    def _reader(self, entries: Sequence[Entry]) -> Reader:
        options = self._options
        if self._by_path:
            entries = sorted(entries, key=attrgetter("place"))
        reader = Reader(
            entries, options.text_field, options.rows_are_lines, options.skip_invalid, not options.boundaries
        )
        if options.max_bytes is not None:
            sizes: Counter[str] = Counter()
            for document in reader:
                sizes[document.place] += document.size
            room = options.max_bytes
            # Not the hash of the split, in whose order all validation files come first.
            for place in sorted(sizes, key=lambda place: (unit_hash("order", options.seed, place), place)):
                if sizes[place] <= room:
                    room -= sizes.pop(place)
            reader.entries = [entry for entry in entries if entry.place not in sizes]
        return reader

    def __iter__(self) -> Iterator[tuple[str, Document]]:
        if self._few is not None:
            yield from self._few
            return
        for given in self._readers:
            yield from self._divided(given)

    def _divided(self, given: str) -> Iterator[tuple[str, Document]]:
        """The documents of a reader, and no more when training has as many as are wanted."""
        valid, train = self._options.valid_fraction, self._options.valid_fraction + self._options.test_fraction
        reader, left = self._readers[given], self._options.documents
        if given == "valid" and self._options.test_from_valid:
            given, valid, train = "", 0.5, 1.0
        for document in reader:
            if self._options.divide_by == "part" and not self._options.valid:
                yield from _cut(document, self._options.valid_fraction, self._options.test_fraction)
                left = None if left is None else left - 1
                if left == 0:
                    return
                continue
            number = unit_hash("split", self._options.seed, document.place if self._by_path else document.digest)
            split = given or ("valid" if number < valid else "test" if number < train else "train")
            yield split, document
            if left is not None and split == "train":
                left -= 1
                if not left:
                    return

    def _keep_first(self, documents: int) -> None:
        """Keep the files that the first ``documents`` of training are in: no other is read, nor downloaded."""
        name = next(iter(self._readers))  # that of training
        found = 0
        with tqdm(desc="choosing", total=documents, unit="document", unit_scale=True, disable=None) as bar:
            for split, _ in self._divided(name):
                found += split == "train"
                bar.update(split == "train")
        reader = self._readers[name]
        if found < documents:
            self.short = found
        else:
            reader.entries = reader.entries[: reader.begun]

    def _stamps(self) -> list[tuple[int, int]]:
        entries = (entry for reader in self._readers.values() for entry in reader.entries)
        return [((stat := entry.file.stat()).st_size, stat.st_mtime_ns) for entry in entries]

    def check_unchanged(self) -> None:
        """Refuse sources that changed since the first look: the passes may have read different text."""
        if self._stamps() != self._stamp:
            raise UserError("the source files changed while they were read: run this again once they no longer change")

    def check_splits(self, documents: dict[str, int]) -> None:
        """Refuse splits that have none of the ``documents``, which are counted by split: raises EmptySplit."""
        limits = {"a larger --max-bytes": self._options.max_bytes, "more --documents": self._options.documents}
        more = next((remedy for remedy, limit in limits.items() if limit), "--valid and --test")
        for split in SPLITS:
            if not documents.get(split):
                raise EmptySplit(
                    f"the {split} split of {sum(documents.values())} documents would be empty: "
                    f"give more documents, other fractions, another --seed or {more}"
                )

    def divide_few(self) -> str | None:
        """Divide documents that are too few for a hash; says how in one line, or None: there is no way."""
        limited = self._options.documents is not None and self.short is None
        if self._few is not None or self._options.valid or limited:
            return None
        [reader] = self._readers.values()
        found = [document for document in islice(reader, _MOST_FEW + 1) if not document.blank]
        if len(found) > _MOST_FEW:
            return None
        shares = self._options.valid_fraction, self._options.test_fraction
        order = sorted(found, key=lambda document: unit_hash("few", self._options.seed, document.digest))
        total = sum(document.characters for document in found)
        fit = [d for d in order if min(shares) / 5 <= d.characters / total <= max(_MOST_SHARE, *shares)]
        parts = [_cut(document, *shares) for document in found] if len(fit) < 2 else []
        if any(len(cut) > 1 for cut in parts):
            self._few = [part for cut in parts for part in cut]
            which = "each is" if all(len(cut) > 1 for cut in parts) else "the long ones are"
            ends = ", ".join(f"{100 * share:.3g} %" for share in (1 - sum(shares), *shares))
            return f"too few documents to choose from ({len(found)}): {which} cut into {ends} for {', '.join(SPLITS)}"
        if len(fit) < 2:
            fit = order
        if len(found) < 3:
            return None
        named = {id(fit[0]): "valid", id(fit[1]): "test"}
        self._few = [(named.get(id(document), "train"), document) for document in found]
        return f"few documents ({len(found)}): {fit[0].place} is the valid split, {fit[1].place} the test split"

    def skipped(self) -> dict[str, int]:
        """What the last pass left out, by reason."""
        by_reader = (reader.skipped for reader in self._readers.values())
        return dict(sum(by_reader, Counter(binary=self._binary)))
