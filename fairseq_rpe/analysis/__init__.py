"""Analysis of encodings and positions alone: no model, no corpus, no figure."""

from fairseq_rpe.analysis.index_warping import alibi_raw, rope_raw, sensitivity, total_difference

__all__ = ["alibi_raw", "rope_raw", "sensitivity", "total_difference"]
