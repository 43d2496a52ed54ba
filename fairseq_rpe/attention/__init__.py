"""softmax(q·kᵀ/sqrt(D) + bias) v for every bias form. Backends know forms, never an encoding's name."""

from .plan import Plan
from .prune import check_eps
from .reference import reference
from .sdpa import sdpa
from .select import BACKENDS, Backend, auto, check_training, choose

__all__ = ["BACKENDS", "Backend", "Plan", "auto", "check_eps", "check_training", "choose", "reference", "sdpa"]
