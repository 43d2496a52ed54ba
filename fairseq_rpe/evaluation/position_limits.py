"""What the spec of a position transform says of an evaluation, read without loading torch.

A sweep that is finished asks this, and says so in a second. Of a transform of the user's own it knows nothing.
"""

from fairseq_rpe.algorithms import Algorithm
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import parse

_RANDOM = ("cape", "pose", "random_padding", "randomized", "shape", "stretch", "warp")
_LIMITS = {"randomized": ("max", 2048), "random_padding": ("max", 2048), "pose": ("target", 4096)}


def is_random(spec: str | None) -> bool:
    """Whether the positions of ``spec`` are drawn; ``None``: the checkpoint's own, which are not known here."""
    return spec is not None and parse(spec)[0] in _RANDOM


def longest_row(spec: str | None, train_length: int) -> int | None:
    """Tokens of the longest row that ``spec`` has positions for; None: no limit. ``train_length`` in tokens.

    A spec that cannot be read has none here: it is refused where the transform is made.
    """
    if spec is None:
        return None
    try:
        name, given = parse(spec)
        if name == "randomized" and given.get("times", "none").lower() != "none":
            return int(given["times"]) * train_length
        if name == "warp" and given.get("length") == "train":
            return train_length
        if name not in _LIMITS:
            return None
        key, usual = _LIMITS[name]
        return usual if given.get(key, "none").lower() == "none" else int(given[key])
    except (UserError, ValueError):
        return None


def most_items(spec: str | None, algorithm: Algorithm, split: str) -> int | None:
    """The most items of an example of ``split`` for which ``spec`` has positions; None: it has them for all."""
    limit = longest_row(spec, algorithm.tokens(algorithm.longest("train")))
    if limit is None or algorithm.tokens(algorithm.longest(split)) <= limit:
        return None
    return max((n for n in range(1, algorithm.longest(split)) if algorithm.tokens(n) <= limit), default=0)
