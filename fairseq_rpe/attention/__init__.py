"""Computes softmax(q·kᵀ/sqrt(D) + bias) v for every bias type. Backends know types, never an encoding's name."""

from fairseq_rpe.attention.backends import BACKENDS, Backend, auto, check_training, choose_backend
from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.attention.prune import check_eps
from fairseq_rpe.attention.reference import reference
from fairseq_rpe.attention.sdpa import sdpa

__all__ = [
    "BACKENDS",
    "AttentionPlan",
    "Backend",
    "auto",
    "check_eps",
    "check_training",
    "choose_backend",
    "reference",
    "sdpa",
]
