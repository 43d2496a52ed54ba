"""Losses by segment in records: the boundaries, the size, and the clusters for standard errors."""

from __future__ import annotations

import base64
import itertools
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation.records import TextResult, read_results
from fairseq_rpe.evaluation.segment_losses import MIN_DOCUMENTS, MIN_SEGMENT_TOKENS, SegmentLosses, segment_ends
from fairseq_rpe.utils.json_files import append_json_line

RESULT = TextResult(checkpoint="c", split="test", length=8, tokens=9, loss_base2=1.0, ppl=2.0)
DOCUMENTS = st.lists(st.integers(1, 40) | st.integers(1, 5000), min_size=1, max_size=60)


def packed(lengths: list[int] | None, tokens: int | None = None) -> SegmentLosses:
    """The losses of a text of documents with these lengths, different in each segment."""
    document_ends = None if lengths is None else np.cumsum(lengths)
    ends, starts = segment_ends(tokens or sum(lengths), document_ends)
    return SegmentLosses.pack(ends, starts, losses_of(ends))


def losses_of(ends: np.ndarray) -> np.ndarray:
    return np.diff(ends, prepend=0) * (1 + np.sin(np.arange(len(ends))) / 3)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(DOCUMENTS)
@example([16] * 100)
@example([15, 1, 1, 15, 5000])
@example([1024, 1025, 2048, 3])
def test_segments_lie_within_documents_or_groups_of_short_ones(lengths):
    document_ends = np.cumsum(lengths)
    ends, starts = segment_ends(sum(lengths), document_ends)
    sizes = np.diff(ends, prepend=0)
    assert ends[-1] == sum(lengths) and (1 <= sizes).all() and (sizes <= 1024).all()
    bounds = [*(ends - sizes)[starts].tolist(), sum(lengths)]  # of documents or groups
    assert bounds[0] == 0 and set(bounds[1:]) <= set(document_ends.tolist())
    for begin, end in itertools.pairwise(bounds):
        in_group = sizes[(ends > begin) & (ends <= end)]
        assert (in_group[:-1] == 1024).all()
        # no document boundary within a group divides it into two groups
        inner = [x for x in document_ends.tolist() if begin + MIN_SEGMENT_TOKENS <= x < end]
        assert end - begin >= MIN_SEGMENT_TOKENS or len(bounds) == 2
        assert not inner or (end == sum(lengths) and end - inner[0] < MIN_SEGMENT_TOKENS)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(DOCUMENTS.filter(lambda lengths: sum(lengths) >= 100))
@example([16] * 7)
@example([16] * 5000)
def test_the_field_needs_at_most_two_bytes_for_each_token(lengths):
    text = json.dumps({"segments": asdict(packed(lengths))})
    assert len(text) <= 2 * sum(lengths)
    assert len(text) <= 150 + 0.52 * sum(lengths)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(DOCUMENTS)
def test_losses_are_read_as_they_were_packed(lengths):
    ends, starts = segment_ends(sum(lengths), np.cumsum(lengths))
    losses = SegmentLosses.pack(ends, starts, losses_of(ends))
    assert losses.fault() is None
    assert losses.counts().tolist() == np.diff(ends, prepend=0).tolist()
    np.testing.assert_allclose(losses.sums(), losses_of(ends), rtol=6e-8)
    counts, sums = losses.cluster_sums()
    assert counts.sum() == sum(lengths) and sums.sum() == pytest.approx(losses.sums().sum(), rel=1e-12)


def test_clusters_are_documents_if_there_are_enough():
    lengths = [3000, 5, 20] + [100] * (MIN_DOCUMENTS - 2)  # the second and third document share a segment
    losses = packed(lengths)
    unit, clusters = losses.units()
    assert unit == "documents" and clusters.tolist()[:5] == [0, 0, 0, 1, 2]
    counts, sums = losses.cluster_sums()
    assert counts.tolist() == [3000, 25] + [100] * (MIN_DOCUMENTS - 2)
    assert sums[0] == pytest.approx(losses.sums()[:3].sum(), rel=1e-12)
    for fewer in (packed(lengths[:-1]), packed(None, tokens=3000)):
        unit, clusters = fewer.units()
        assert unit == "segments of at most 1,024 tokens" and clusters.tolist() == list(range(len(fewer.counts())))
        assert fewer.cluster_sums()[1].tolist() == fewer.sums().tolist()


def test_the_digest_identifies_the_boundaries():
    ends, starts = segment_ends(3000, np.array([1000, 3000]))
    losses = SegmentLosses.pack(ends, starts, losses_of(ends))
    assert SegmentLosses.pack(ends, starts, 2 * losses_of(ends)).digest == losses.digest
    # other ends; the same ends of segments with other documents; no documents
    same_ends = [packed([1024, 1976]), packed([3000]), packed(None, tokens=3000)]
    assert len({tuple(x.counts()) for x in same_ends}) == 1
    assert len({x.digest for x in (losses, *same_ends)}) == 4


def test_a_record_keeps_the_segments_and_an_old_one_has_none(tmp_path):
    result = replace(RESULT, segments=packed([30, 40]))
    append_json_line(tmp_path / "eval.jsonl", result.to_json())
    append_json_line(tmp_path / "eval.jsonl", RESULT.to_json())
    assert "segments" not in RESULT.to_json()
    assert read_results(TextResult, tmp_path / "eval.jsonl") == [result, RESULT]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": "ü"}, "cannot be decoded"),
        ({"tokens": "AA=="}, "cannot be decoded"),
        ({"tokens": "", "document_starts": None}, "no segments"),
        ({"tokens": base64.b64encode(bytes([30, 0, 0, 0])).decode()}, "a segment without tokens"),
        ({"mean_bits": packed([30]).mean_bits}, "1 mean_bits for 2 segments"),
        ({"mean_bits": base64.b64encode(np.array([1, np.nan], "<f4").tobytes()).decode()}, "not finite"),
        ({"document_starts": "AAAA"}, "cannot be decoded"),
        ({"document_starts": "AA=="}, "first segment that does not begin a document"),
        ({"digest": packed([30]).digest}, "digest of other segments"),
    ],
)
def test_a_record_whose_segments_are_damaged_is_refused(tmp_path, change, reason):
    result = replace(RESULT, segments=packed([30, 40])).to_json()
    append_json_line(tmp_path / "eval.jsonl", {**result, "segments": {**result["segments"], **change}})
    with pytest.raises(UserError, match=f"line 1: segments of the result .*{reason}"):
        read_results(TextResult, tmp_path / "eval.jsonl")
