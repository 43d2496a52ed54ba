"""Registers everything with fairseq: the compatibility patches, the models, the criterions and the tasks."""

from .. import compat
from ..criterions import answer_cross_entropy, lm_cross_entropy
from ..tasks import algorithmic, answering, language_modeling
from . import transformer_rpe_lm

compat.apply()
__all__ = [
    "algorithmic",
    "answer_cross_entropy",
    "answering",
    "compat",
    "language_modeling",
    "lm_cross_entropy",
    "transformer_rpe_lm",
]
