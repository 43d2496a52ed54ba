"""Largest sequence length that a position transform allows, read from its spec without loading torch.

A report on a finished sweep needs only this, so it starts fast. Transforms that a user registers are not known here.
"""

from fairseq_rpe.algorithms import Algorithm
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import parse

_RANDOM = ("cape", "pose", "random_padding", "randomized", "shape", "stretch", "warp")
# transform -> option that limits its positions, and its default
_LIMITS = {"randomized": ("max_position", 2048), "random_padding": ("max_position", 2048), "pose": ("target", 4096)}


def is_random(spec: str | None) -> bool:
    """Return whether ``spec`` samples random positions; False for None, the checkpoint's own transform."""
    return spec is not None and parse(spec)[0] in _RANDOM


def max_length(spec: str | None, train_length: int) -> int | None:
    """Return the largest sequence length in tokens for which ``spec`` has positions, or None without a limit.

    A spec that cannot be parsed has no limit here; building the transform refuses it.

    Args:
        spec: spec of a position transform; None: the checkpoint's own.
        train_length: training length in tokens.
    """
    if spec is None:
        return None
    try:
        name, options = parse(spec)
        if name == "randomized" and options.get("times", "none").lower() != "none":
            return int(options["times"]) * train_length
        if name == "warp" and options.get("length") == "train":
            return train_length
        if name not in _LIMITS:
            return None
        key, default = _LIMITS[name]
        return default if options.get(key, "none").lower() == "none" else int(options[key])
    except (UserError, ValueError):
        return None


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
