"""Registers everything with fairseq: the compatibility patches, the models, the criterions and the tasks."""

from fairseq_rpe import compat
from fairseq_rpe.criterions import answer_cross_entropy, lm_cross_entropy
from fairseq_rpe.models import transformer_rpe_lm
from fairseq_rpe.tasks import algorithmic, answering, language_modeling

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
