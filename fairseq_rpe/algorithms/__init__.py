"""Tasks that an algorithm solves exactly, to test models on more items than they were trained on.

``build("copy:items=20").examples("test")``; a new task is one file with one registration.
"""

from fairseq_rpe.algorithms import arithmetic, lists, needles  # noqa: F401  (registers)
from fairseq_rpe.algorithms.base import SPLITS, Algorithm, Example, Sizes, register, registry

__all__ = ["SPLITS", "Algorithm", "Example", "Sizes", "build", "describe", "names", "normalise", "register"]

names, describe, normalise = registry.names, registry.describe, registry.normalise


def build(spec: str) -> Algorithm:
    """The task of ``spec``, e.g. ``sort:items=10,seed=2``; unknown ones and values out of range are refused."""
    cls, name, config = registry.resolve(spec)
    return cls(name, config)
