"""Registers models, criterions and tasks with fairseq and applies the patches of ``compat``."""

from fairseq_rpe import compat
from fairseq_rpe.criterions import answer_cross_entropy, lm_cross_entropy
from fairseq_rpe.models import transformer_rpe_lm
from fairseq_rpe.tasks import algorithmic, language_modeling, question_answering

compat.apply()
__all__ = [
    "algorithmic",
    "answer_cross_entropy",
    "compat",
    "language_modeling",
    "lm_cross_entropy",
    "question_answering",
    "transformer_rpe_lm",
]
