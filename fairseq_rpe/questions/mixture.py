"""How often the questions of each set are asked in an epoch of a training on several sets."""

import hashlib
from collections.abc import Mapping

import numpy as np

from fairseq_rpe.core.errors import UserError

FORMS = "proportional, equal, capped:N, temperature:T or NAME=weight,NAME=weight"


def shares(spec: str, rows: Mapping[str, int]) -> dict[str, float]:
    """The share of each set in an epoch; they add up to 1. ``rows``: of each set, how many it has.

    With n_s rows of set s the share is w_s / Σ w, where w_s is n_s (``proportional``), 1 (``equal``), min(n_s, N)
    (``capped:N``, examples-proportional mixing with a limit), n_s^(1/T) (``temperature:T``), or what is said by name,
    of every set, 0 for one that is left out. Capped and temperature mixing: Raffel et al. 2020, section 3.5.2.

    Raises UserError: it is none of these.

    >>> shares("capped:100", {"small": 50, "large": 900})
    {'small': 0.3333333333333333, 'large': 0.6666666666666666}
    """
    kind, _, number = spec.partition(":")
    if "=" in spec:
        weights = _named(spec, rows)
    elif spec == "proportional":
        weights = {name: float(n) for name, n in rows.items()}
    elif spec == "equal":
        weights = dict.fromkeys(rows, 1.0)
    elif kind == "capped" and number.isascii() and number.isdigit() and int(number):
        weights = {name: float(min(n, int(number))) for name, n in rows.items()}
    elif kind == "temperature" and (power := _positive(number)):
        weights = {name: n ** (1 / power) for name, n in rows.items()}
    else:
        raise UserError(f"--mixture {spec} is not one of {FORMS}: choose one, N and T above 0")
    total = sum(weights.values())
    return {name: weights[name] / total for name in rows}


def _positive(text: str) -> float:
    """A finite number above 0, else 0."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < float("inf") else 0.0


def _named(spec: str, rows: Mapping[str, int]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in spec.split(","):
        name, _, text = (word.strip() for word in part.partition("="))
        if name not in rows:
            raise UserError(f"--mixture names '{name}', which is no set of this folder: it has {', '.join(rows)}")
        if name in found:
            raise UserError(f"--mixture names '{name}' twice: give each set one weight")
        found[name] = _positive(text)
        if not found[name] and text.strip("0") not in ("", "."):
            raise UserError(f"--mixture gives '{name}' the weight '{text}': write a number from 0 on")
    if missing := [name for name in rows if name not in found]:
        raise UserError(f"--mixture leaves open '{missing[0]}': give every set a weight, 0 leaves one out")
    if not any(found.values()):
        raise UserError("--mixture gives every set the weight 0: nothing would be learned")
    return found


def per_epoch(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Rows of each set in an epoch of ``total`` rows: its share, rounded; at least one where there is a share."""
    return {name: max(1, round(share * total)) if share else 0 for name, share in shares.items()}


def drawn(name: str, rows: int, count: int, epoch: int, seed: int) -> np.ndarray:
    """(count,) int64: which of a set's ``rows`` are asked in an epoch, numbered from 1.

    A set's rows are gone through in an order drawn from the ``seed``, then in another one, and so on; each epoch takes
    the next ``count`` of these. So none comes a second time before all have come once, whatever the epochs' length.
    """
    start = (epoch - 1) * count
    own = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    found = []
    while count:
        turn, place = divmod(start, rows)
        order = np.random.default_rng([seed, own, turn]).permutation(rows)[place : place + count]
        found.append(order)
        start, count = start + len(order), count - len(order)
    return np.concatenate(found) if found else np.empty(0, np.int64)
