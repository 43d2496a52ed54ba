"""Which position each token gets, by name. ``build("warp:alpha=1/6")(index, lengths, generator).k``.

Two slots use these, one for training and one for evaluation; every encoding that reads positions can follow.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from ..core import Option, UserError, canonical, configure, option, options_of, parse
from . import cape, identity, interpolate, pose, randomized, shift, warp
from .base import ENTRY_POINTS, Moved, Transform, register, registry
from .warp import SKEWS

__all__ = [
    "ENTRY_POINTS",
    "SKEWS",
    "Description",
    "Moved",
    "Transform",
    "build",
    "describe",
    "names",
    "normalise",
    "option",
    "register",
]
_BUILT_IN = (cape, identity, interpolate, pose, randomized, shift, warp)


@dataclass(frozen=True)
class Description:
    """One row of a list of transforms."""

    name: str
    summary: str
    formula: str
    paper: str
    random: bool
    options: list[Option]


def names() -> list[str]:
    """Every registered name, sorted."""
    return registry.names()


def describe() -> list[Description]:
    """What is registered, for lists and docs."""
    rows = []
    for name in names():
        cls = registry.get(name)
        summary = (inspect.getdoc(cls) or "").strip().split("\n")[0]
        rows.append(Description(name, summary, cls.formula, cls.paper, cls.random, options_of(cls.Config)))
    return rows


def normalise(spec: str) -> str:
    """The spec with defaults left out and values in one spelling; raises UserError where it is wrong."""
    _, name, config = _resolve(spec)
    return canonical(name, config)


def build(spec: str, train_length: int | None = None) -> Transform:
    """Make the transform that ``spec`` names.

    Args:
        spec: ``name`` or ``name:key=value,key=value``.
        train_length: training length in tokens, which some transforms compare with.

    Raises:
        UserError: unknown name or option, value out of range, training length needed but unknown.
    """
    if train_length is not None and train_length < 1:
        raise UserError(f"a training length of {train_length} tokens makes no sense: give 1 or more, or none")
    cls, _, config = _resolve(spec)
    return cls(config, train_length)


def _resolve(spec: str) -> tuple[type[Transform], str, object]:
    name, given = parse(spec)
    cls = registry.get(name)
    return cls, name, configure(cls.Config, name, given)
