"""softmax(q·kᵀ/sqrt(D) + bias) v for every bias form. Backends know forms, never an encoding's name."""

from fairseq_rpe.attention.plan import Plan
from fairseq_rpe.attention.prune import check_eps
from fairseq_rpe.attention.reference import reference
from fairseq_rpe.attention.sdpa import sdpa
from fairseq_rpe.attention.select import BACKENDS, Backend, auto, check_training, choose

__all__ = ["BACKENDS", "Backend", "Plan", "auto", "check_eps", "check_training", "choose", "reference", "sdpa"]
