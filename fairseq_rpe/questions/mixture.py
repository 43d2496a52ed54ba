"""Mixture weights for training on several sets of questions."""

import hashlib
from collections.abc import Mapping

import numpy as np

from fairseq_rpe.core.errors import UserError

MIXTURES = "proportional, equal, capped:N, temperature:T or NAME=weight,NAME=weight"


def mixture_weights(spec: str, rows: Mapping[str, int]) -> dict[str, float]:
    """Return the share of each set in an epoch; the shares add up to 1.

    The share of a set s with n_s rows is w_s / Σ w, where w_s is n_s (``proportional``), 1 (``equal``), min(n_s, N)
    (``capped:N``, examples-proportional mixing with a limit), n_s^(1/T) (``temperature:T``), or a weight by name for
    every set, 0 for a set that is left out. Capped and temperature mixing: Raffel et al. 2020, section 3.5.2.

    Args:
        spec: The mixture; one of :data:`MIXTURES`.
        rows: Number of rows of each set.

    Raises:
        UserError: ``spec`` is not a mixture of these sets.

    >>> mixture_weights("capped:100", {"small": 50, "large": 900})
    {'small': 0.3333333333333333, 'large': 0.6666666666666666}
    """
    kind, _, number = spec.partition(":")
    if "=" in spec:
        weights = _parse_weights(spec, rows)
    elif spec == "proportional":
        weights = {name: float(n) for name, n in rows.items()}
    elif spec == "equal":
        weights = dict.fromkeys(rows, 1.0)
    elif kind == "capped" and number.isascii() and number.isdigit() and int(number):
        weights = {name: float(min(n, int(number))) for name, n in rows.items()}
    elif kind == "temperature" and (power := _parse_positive(number)):
        largest = max(rows.values())
        weights = {name: (n / largest) ** (1 / power) for name, n in rows.items()}
    else:
        raise UserError(f"--mixture {spec} is not one of {MIXTURES}: choose one, N and T above 0")
    largest_weight = max(weights.values())  # divides first, as a sum of large weights may be infinite
    total = sum(weight / largest_weight for weight in weights.values())
    return {name: weights[name] / largest_weight / total for name in rows}


def _parse_positive(text: str) -> float:
    """Return a finite number above 0, or 0 if the text is not one."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < float("inf") else 0.0


def _parse_weights(spec: str, rows: Mapping[str, int]) -> dict[str, float]:
    """Parse ``NAME=weight,NAME=weight``, with a weight for every set."""
    weights: dict[str, float] = {}
    for assignment in spec.split(","):
        name, _, text = (word.strip() for word in assignment.partition("="))
        if name not in rows:
            raise UserError(f"--mixture names '{name}', which is not a set of this folder: it has {', '.join(rows)}")
        if name in weights:
            raise UserError(f"--mixture names '{name}' twice: give each set one weight")
        weights[name] = _parse_positive(text)
        if not weights[name] and text.strip("0") not in ("", "."):
            raise UserError(f"--mixture gives '{name}' the weight '{text}': write a number from 0 on")
    if missing := [name for name in rows if name not in weights]:
        raise UserError(f"--mixture has no weight for '{missing[0]}': give every set a weight, 0 leaves one out")
    if not any(weights.values()):
        raise UserError("--mixture gives every set the weight 0: nothing would be learned")
    return weights


def rows_per_epoch(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Return the rows of each set in an epoch of ``total`` rows: its share, rounded; at least 1 if it is not 0."""
    return {name: max(1, round(share * total)) if share else 0 for name, share in shares.items()}


def epoch_rows(name: str, rows: int, count: int, epoch: int, seed: int) -> np.ndarray:
    """Return which rows of a set an epoch uses.

    The rows are visited in one random order after another, and each epoch takes the next ``count`` of them. So no row
    is repeated before all have been used, whatever the length of an epoch.

    Args:
        name: Name of the set, part of the seed.
        rows: Number of rows of the set.
        count: Rows of the set in an epoch.
        epoch: Number of the epoch, from 1.
        seed: Seed of the random orders, together with the name.

    Returns:
        (count,) int64 row numbers.
    """
    start = (epoch - 1) * count
    name_hash = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    slices = []
    while count:
        pass_index, offset = divmod(start, rows)
        order = np.random.default_rng([seed, name_hash, pass_index]).permutation(rows)  # (rows,)
        slices.append(order[offset : offset + count])
        start, count = start + len(slices[-1]), count - len(slices[-1])
    return np.concatenate(slices) if slices else np.empty(0, np.int64)
