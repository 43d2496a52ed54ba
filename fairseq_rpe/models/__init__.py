"""Registers everything with fairseq: the compatibility patches, the models, the criterions and the tasks."""

from .. import compat, criterions, tasks
from . import transformer_rpe_lm

compat.apply()
__all__ = ["compat", "criterions", "tasks", "transformer_rpe_lm"]
