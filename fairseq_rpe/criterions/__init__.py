"""Losses registered with fairseq."""

from . import lm_cross_entropy

__all__ = ["lm_cross_entropy"]
