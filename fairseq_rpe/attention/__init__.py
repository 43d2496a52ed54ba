"""softmax(q·kᵀ/sqrt(D) + bias) v for every bias form. Backends know forms, never an encoding's name."""

from fairseq_rpe.attention.backends import BACKENDS, Backend, auto, check_training, choose
from fairseq_rpe.attention.plan import Plan
from fairseq_rpe.attention.prune import check_eps
from fairseq_rpe.attention.reference import reference
from fairseq_rpe.attention.sdpa import sdpa

__all__ = ["BACKENDS", "Backend", "Plan", "auto", "check_eps", "check_training", "choose", "reference", "sdpa"]
