"""Largest sequence length that an encoding and its position transform allow, read from their specs without torch.

A report on a finished sweep needs only this, so it starts fast. Of a user's transforms, only those of entry points are
known here, and a user's encodings have no limit here.
"""

from typing import Any

from fairseq_rpe.algorithms import Algorithm
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import parse_pattern
from fairseq_rpe.core.spec import parse
from fairseq_rpe.positions import registry
from fairseq_rpe.positions.base import Transform

# encodings with a table of max_positions rows, by default as many as the training length has tokens
LIMITED_ENCODINGS = ("learned", "tupe")


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
    transform = _resolve(spec)
    return None if transform is None else transform[0].position_limit(transform[1], train_length)


def _resolve(spec: str | None) -> tuple[type[Transform], Any] | None:
    """Return the class and the options of a position transform; None for None, and if it is unknown or not valid."""
    try:
        cls, _, config = registry.resolve(spec or "")
    except UserError:
        return None
    return cls, config


def length_within(positions: str | None, train_length: int, rows: int) -> int:
    """Return the length in tokens of the longest sequence whose positions are all in a table of positions.

    Args:
        positions: spec of a position transform; None: the checkpoint's own, which is not known here.
        train_length: training length in tokens.
        rows: number of rows of the table.
    """
    transform = _resolve(positions)
    return rows if transform is None else transform[0].length_within(transform[1], train_length, rows)


def method_limit(rpe: str, positions: str | None, train_length: int) -> int | None:
    """Return the largest sequence length in tokens for which a method has positions, or None without a limit.

    Args:
        rpe: spec of the encoding, or a pattern of layers.
        positions: spec of a position transform; None: the checkpoint's own.
        train_length: training length in tokens.
    """
    limits = [max_length(positions, train_length)]
    for name, options in map(parse, parse_pattern(rpe).specs):
        if name in LIMITED_ENCODINGS:
            stated = options.get("max_positions", "")
            rows = int(stated) if stated.isdecimal() else 0  # building the encoding refuses any other text
            limits.append(length_within(positions, train_length, rows or train_length))
    return min((limit for limit in limits if limit is not None), default=None)


def max_items(rpe: str, positions: str | None, algorithm: Algorithm, split: str) -> int | None:
    """Return the largest number of items for which a method has positions, or None if all lengths of the split have.

    Args:
        rpe: spec of the encoding, or a pattern of layers.
        positions: spec of a position transform; None: the checkpoint's own.
        algorithm: the algorithmic task.
        split: name of the split.
    """
    limit = method_limit(rpe, positions, algorithm.num_tokens(algorithm.max_length("train")))
    if limit is None or algorithm.num_tokens(algorithm.max_length(split)) <= limit:
        return None
    return max((n for n in range(1, algorithm.max_length(split)) if algorithm.num_tokens(n) <= limit), default=0)
