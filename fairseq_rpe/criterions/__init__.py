"""Losses registered with fairseq."""

from . import answer_cross_entropy, lm_cross_entropy

__all__ = ["answer_cross_entropy", "lm_cross_entropy"]
