"""The documents of a corpus, divided into its splits by a hash."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.documents import Document, Reader
from fairseq_rpe.data.folder import SPLITS
from fairseq_rpe.data.preparation import PrepareOptions
from fairseq_rpe.data.sourcefiles import Entry, digest_entries, find_entries


def unit_hash(purpose: str, seed: int, name: str) -> float:
    """A number in [0, 1) that depends on nothing but the arguments."""
    digest = hashlib.sha256(f"{purpose}\0{seed}\0".encode() + os.fsencode(name)).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


class DividedDocuments:
    """The documents of all splits, the same in every pass.

    ``digest`` is that of the source files, by split; under ``all`` where they are divided here.
    """

    def __init__(self, options: PrepareOptions) -> None:
        self._options = options
        self._by_path = options.divide_by == "path"
        given = {"train": options.train, "valid": options.valid, "test": options.test}
        paths = given if options.valid else {"": options.train}
        found = {split: find_entries(p, options.include) for split, p in paths.items()}
        self._binary = sum(binary for _, binary in found.values())
        self._readers = {split: self._reader(entries) for split, (entries, _) in found.items()}
        self._stamp = self._stamps()
        readers = self._readers.items()
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
        valid, train = self._options.valid_fraction, self._options.valid_fraction + self._options.test_fraction
        for given, reader in self._readers.items():
            for document in reader:
                number = unit_hash("split", self._options.seed, document.place if self._by_path else document.digest)
                yield given or ("valid" if number < valid else "test" if number < train else "train"), document

    def _stamps(self) -> list[tuple[int, int]]:
        entries = (entry for reader in self._readers.values() for entry in reader.entries)
        return [((stat := entry.path.stat()).st_size, stat.st_mtime_ns) for entry in entries]

    def check_unchanged(self) -> None:
        """Refuse sources that changed since the first look: the passes may have read different text."""
        if self._stamps() != self._stamp:
            raise UserError("the source files changed while they were read: run this again when they are at rest")

    def check_splits(self, documents: dict[str, int]) -> None:
        """Refuse splits that have none of the ``documents``, which are counted by split."""
        more = "a larger --max-bytes" if self._options.max_bytes else "--valid and --test"
        for split in SPLITS:
            if not documents.get(split):
                raise UserError(
                    f"the {split} split of {sum(documents.values())} documents would be empty: "
                    f"give more documents, other fractions, another --seed or {more}"
                )

    def skipped(self) -> dict[str, int]:
        """What the last pass left out, by reason."""
        left_out = Counter(binary=self._binary)
        for reader in self._readers.values():
            left_out.update(reader.skipped)
        return {reason: count for reason, count in left_out.items() if count}
