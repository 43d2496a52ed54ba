"""Generated tasks that an algorithm solves exactly, to test models on more items than they were trained on.

Use ``build("copy:items=20").examples("test")``. A new task is a class in a file, registered with ``register``.
"""

from fairseq_rpe.algorithms import (  # noqa: F401  (registers)
    addition,
    arithmetic,
    counting,
    induction,
    lists,
    mqar,
    needle_lines,
    needles,
    parity,
    tracking,
)
from fairseq_rpe.algorithms.base import SPLITS, Algorithm, Example, TaskOptions, register, registry

__all__ = ["SPLITS", "Algorithm", "Example", "TaskOptions", "build", "describe", "names", "normalise", "register"]

names, describe, normalise = registry.names, registry.describe, registry.normalise


def build(spec: str) -> Algorithm:
    """Build a task.

    Args:
        spec: Name and options, such as ``sort:items=10,seed=2``.

    Returns:
        The task.

    Raises:
        UserError: The name or an option is unknown, or a value is out of range.
    """
    cls, name, config = registry.resolve(spec)
    return cls(name, config)
