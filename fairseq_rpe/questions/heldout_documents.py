"""Documents for validation and test that a pre-training has not read: divided as those of its corpus were."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fairseq_rpe.data.folder import MANIFEST, read_manifest
from fairseq_rpe.data.prepare_options import PrepareOptions
from fairseq_rpe.data.splits import DividedDocuments
from fairseq_rpe.utils import records

_FEW = 1000  # documents of a corpus that may have been divided otherwise than by a hash of each


@dataclass(frozen=True)
class Division:
    """What decides which documents of a text are for validation and test: options of ``fairseq-rpe prepare``."""

    seed: int = 1
    valid_fraction: float = 0.05
    test_fraction: float = 0.05
    divide_by: str = "text"


@dataclass(frozen=True)
class _Reading:
    rows_are_lines: bool = False


@dataclass(frozen=True)
class _Corpus:
    """What is read of ``corpus.json``."""

    digest: Mapping[str, str] = field(default_factory=dict)
    splits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class HeldOut:
    """What is known of how a prepared corpus was divided, and of whether other documents may be in its training."""

    def __init__(self, corpus: Path) -> None:
        manifest, place = read_manifest(corpus), str(corpus / MANIFEST)
        known = records.read(_Corpus, manifest, place, "the corpus", strict=False)
        options = manifest.get("options", {})
        self._digest, self._name = known.digest, corpus
        # of the corpus where its text was divided by document, None where its splits were given or are not on record
        self.division = (
            records.read(Division, options, place, "options", strict=False) if "all" in known.digest else None
        )
        documents = sum(counts.get("documents", 0) for counts in known.splits.values())
        self._rows_are_lines = records.read(_Reading, options, place, "options", strict=False).rows_are_lines
        # documents that are here and there fall into the same splits, whatever else there is
        by_text = self.division is not None and self.division.divide_by == "text"
        self._by_hash = by_text and documents > _FEW and not self._rows_are_lines

    def documents(self, texts: PrepareOptions) -> tuple[DividedDocuments, Division]:
        """The documents of a text, and what divides them: the corpus' division, unless there is none or no need."""
        if texts.valid or self.division is None:
            return DividedDocuments(texts), records.filled(Division, texts)
        division = self.division
        found = DividedDocuments(replace(texts, **vars(division)))
        if division.divide_by == "path" and found.digest != self._digest:
            # other files have other places, and all rows of one the same
            division = replace(division, divide_by="text")
            found = DividedDocuments(replace(texts, **vars(division)))
        return found, division

    def warning(self, digest: Mapping[str, str], few: bool = False) -> str | None:
        """A line if documents of validation and test may have been trained on; None: no, or nothing is known.

        ``digest``: of the source files, by split, ``all`` where they are divided as in the corpus; ``few``: they are
        not, because there are too few documents.
        """
        if not self._digest:
            return None
        if "all" in digest:
            safe = (digest == self._digest and not self._rows_are_lines) or (self._by_hash and not few)
        else:
            safe = all(digest[split] == self._digest.get(split) for split in ("valid", "test"))
        if safe:
            return None
        return (
            f"warning: unless this is another text, models trained on {self._name} may have read documents of "
            "validation and test: give the files that it was made of, by --train, --valid and --test if it was"
        )
