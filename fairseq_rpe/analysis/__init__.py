"""Analysis of encodings and positions, free of fairseq; what draws imports matplotlib when it is called."""

from .sensitivity import alibi_raw, rope_raw, sensitivity, total_difference

__all__ = ["alibi_raw", "rope_raw", "sensitivity", "total_difference"]
