"""Losses of a text by segment, as short text for records, so that two runs can be compared document by document.

The error of a mean loss depends on how much the losses vary between documents, which the mean alone does not show. Two
models that score the same text are compared by the differences of their losses in each document
(:mod:`fairseq_rpe.evaluation.statistics`). A result therefore stores the mean loss of each segment of the text. A loss
for each token would need more than ten times as much space.
"""

import base64
import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fairseq_rpe.data.folder import enumerate_groups

# Most tokens of a segment: errors by segment are useful if a segment is much longer than the blocks of the evaluation.
SEGMENT_TOKENS = 1024
# Documents with fewer tokens share a segment. A segment needs about 8.2 characters in JSON: 0.5 for each token.
MIN_SEGMENT_TOKENS = 16
# Fewest documents for standard errors by document; the t quantile of 20 clusters is 2.09, that of many is 1.96.
MIN_DOCUMENTS = 20
Unit = Literal["documents", "segments of at most 1,024 tokens"]


@dataclass(frozen=True, kw_only=True)
class SegmentLosses:
    """Sums of the losses over consecutive segments of a split, with the boundaries of :func:`segment_ends`.

    All arrays have little-endian bytes in base64. Construct it with :meth:`pack`.

    Attributes:
        digest: hexadecimal digest of the boundaries: the tokens of all segments, and which begin a document. Results
            of the same data with equal digests are comparable segment by segment.
        tokens: (S,) uint16, number of tokens of each segment.
        mean_bits: (S,) float32, mean loss of each segment in bits per token.
        document_starts: (S,) bits of :func:`numpy.packbits`, whether a segment begins a new document or group of short
            documents; None if the split has no document boundaries.
    """

    digest: str
    tokens: str
    mean_bits: str
    document_starts: str | None = None

    @classmethod
    def pack(cls, ends: np.ndarray, starts: np.ndarray | None, sums: np.ndarray) -> "SegmentLosses":
        """Pack the sums of the losses of all segments.

        Args:
            ends: (S,) int64, ends of the segments in tokens, of :func:`segment_ends`.
            starts: (S,) bool, whether a segment begins a document, or None, of :func:`segment_ends`.
            sums: (S,) float64, sum of the losses of each segment in bits.
        """
        counts = np.diff(ends, prepend=0)
        tokens = _encode(counts.astype("<u2"))
        document_starts = None if starts is None else _encode(np.packbits(starts))
        return cls(
            digest=_digest(tokens, document_starts),
            tokens=tokens,
            mean_bits=_encode((sums / counts).astype("<f4")),
            document_starts=document_starts,
        )

    def counts(self) -> np.ndarray:
        """Return (S,) int64: the number of tokens of each segment."""
        return np.frombuffer(base64.b64decode(self.tokens, validate=True), "<u2").astype(np.int64)

    def sums(self) -> np.ndarray:
        """Return (S,) float64: the sum of the losses of each segment in bits, with a relative error of 6e-8."""
        return self._means() * self.counts()

    def units(self) -> tuple[Unit, np.ndarray]:
        """Return the unit by which standard errors are clustered, and the cluster of each segment.

        The losses of adjacent segments of a document are correlated, because the segments share topic and style.
        Standard errors by segment are therefore too small, and the unit is the document if the split has at least
        ``MIN_DOCUMENTS`` (20) documents. Fewer documents do not show how much documents differ, and one document does
        not allow any estimate. The unit is then the segment, and the errors hold for these documents only.

        Returns:
            The name of the unit, and (S,) int64, the number of the cluster of each segment, from 0 on. Short documents
            that share a segment are one cluster.
        """
        starts = self._starts()
        if starts is not None and starts.sum() >= MIN_DOCUMENTS:
            return "documents", np.cumsum(starts, dtype=np.int64) - 1
        return "segments of at most 1,024 tokens", np.arange(len(self.counts()), dtype=np.int64)

    def cluster_sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of tokens (G,) int64 and the sum of the losses in bits (G,) float64 of each cluster."""
        _, clusters = self.units()
        counts = np.bincount(clusters, self.counts()).astype(np.int64)
        return counts, np.bincount(clusters, self.sums())

    def fault(self) -> str | None:
        """Return the contradiction in these values as the end of a sentence, or None if there is none.

        :mod:`fairseq_rpe.utils.records` calls it when it reads a record.
        """
        try:
            counts, means, starts = self.counts(), self._means(), self._starts()
        except ValueError:
            return "has tokens, mean_bits or document_starts that cannot be decoded"
        if not len(counts) or not counts.all():
            return "has no segments or a segment without tokens"
        if len(means) != len(counts):
            return f"has {len(means)} mean_bits for {len(counts)} segments"
        if not np.isfinite(means).all():
            return "has mean_bits that are not finite"
        if starts is not None and not starts[0]:
            return "has a first segment that does not begin a document"
        if self.digest != _digest(self.tokens, self.document_starts):
            return "has a digest of other segments"
        return None

    def _means(self) -> np.ndarray:
        """Return (S,) float64: the mean loss of each segment in bits per token."""
        return np.frombuffer(base64.b64decode(self.mean_bits, validate=True), "<f4").astype(np.float64)

    def _starts(self) -> np.ndarray | None:
        """Return (S,) bool: whether each segment begins a document; None without document boundaries.

        Raises:
            ValueError: ``document_starts`` is not base64, or does not hold a bit for each segment.
        """
        if self.document_starts is None:
            return None
        packed = np.frombuffer(base64.b64decode(self.document_starts, validate=True), np.uint8)
        segments = len(self.counts())
        if len(packed) != -(-segments // 8):
            raise ValueError(f"{len(packed)} bytes do not hold {segments} bits")
        return np.unpackbits(packed, count=segments).astype(bool)


def segment_ends(tokens: int, document_ends: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Divide a split into segments for :class:`SegmentLosses`.

    A segment ends at the end of a document, or after ``SEGMENT_TOKENS`` (1,024) tokens within a document. A document
    with fewer than ``MIN_SEGMENT_TOKENS`` (16) tokens forms a group with the next documents until the group has 16
    tokens, and is treated as one document with them. The last group may be shorter; it belongs to the group before.

    Args:
        tokens: number T of tokens of the split, at least 1.
        document_ends: (documents,) int64, ends of the documents in tokens, of
            :func:`~fairseq_rpe.data.folder.document_ends`; None if the split has no document boundaries.

    Returns:
        (S,) int64, increasing up to T: ends of the segments in tokens. (S,) bool: whether a segment begins a document
        or group; None without ``document_ends``.
    """
    group_ends = [0]
    for end in [] if document_ends is None else document_ends.tolist():
        if end - group_ends[-1] >= MIN_SEGMENT_TOKENS:
            group_ends.append(end)
    if len(group_ends) == 1:
        group_ends.append(tokens)
    group_ends[-1] = tokens
    bounds = np.array(group_ends, dtype=np.int64)  # (groups + 1,)
    segments = -(-np.diff(bounds) // SEGMENT_TOKENS)  # (groups,), rounded up
    index = enumerate_groups(segments)  # (S,): index of each segment in its group
    ends = np.minimum(np.repeat(bounds[:-1], segments) + (index + 1) * SEGMENT_TOKENS, np.repeat(bounds[1:], segments))
    return ends, None if document_ends is None else index == 0


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _digest(tokens: str, document_starts: str | None) -> str:
    return hashlib.sha256(f"{tokens} {document_starts}".encode()).hexdigest()[:16]
