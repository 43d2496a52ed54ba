"""Registers everything with fairseq: the compatibility patches, the models and the criterions."""

from .. import compat, criterions
from . import transformer_rpe_lm

compat.apply()
__all__ = ["compat", "criterions", "transformer_rpe_lm"]
