"""Largest sequence length that a position transform allows, read from its spec without loading torch.

A report on a finished sweep needs only this, so it starts fast. Of a user's transforms, only those of entry points are
known here.
"""

from fairseq_rpe.algorithms import Algorithm
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import parse
from fairseq_rpe.positions import registry


def is_random(spec: str | None) -> bool:
    """Return whether ``spec`` samples random positions; False for an unknown transform and None, the checkpoint's."""
    if spec is None:
        return False
    name, _ = parse(spec)
    try:
        return registry.get(name).random
    except UserError:
        return False


def max_length(spec: str | None, train_length: int) -> int | None:
    """Return the largest sequence length in tokens for which ``spec`` has positions, or None without a limit.

    A spec that is unknown or not valid has no limit here; building the transform refuses it.

    Args:
        spec: spec of a position transform; None: the checkpoint's own.
        train_length: training length in tokens.
    """
    if spec is None:
        return None
    try:
        cls, _, config = registry.resolve(spec)
    except UserError:
        return None
    return cls.position_limit(config, train_length)


def max_items(spec: str | None, algorithm: Algorithm, split: str) -> int | None:
    """Return the largest number of items for which ``spec`` has positions, or None if all lengths of the split have.

    Args:
        spec: spec of a position transform; None: the checkpoint's own.
        algorithm: the algorithmic task.
        split: name of the split.
    """
    limit = max_length(spec, algorithm.num_tokens(algorithm.max_length("train")))
    if limit is None or algorithm.num_tokens(algorithm.max_length(split)) <= limit:
        return None
    return max((n for n in range(1, algorithm.max_length(split)) if algorithm.num_tokens(n) <= limit), default=0)
