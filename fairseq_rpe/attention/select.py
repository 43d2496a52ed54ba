"""Choosing a backend by name, or by what is at hand."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from torch import Tensor

from ..core import UserError
from ..core.spec import nearest
from .reference import reference
from .sdpa import sdpa

logger = logging.getLogger(__name__)
Backend = Callable[..., Tensor]
BACKENDS: dict[str, Backend] = {"reference": reference, "sdpa": sdpa}


def choose(name: str, *, remaps: bool = False) -> Backend:
    """The attention function called ``name``; ``auto`` takes the fastest that can do it and says which once.

    Args:
        name: auto, reference or sdpa.
        remaps: the encoding changes the scores.

    Raises:
        UserError: no such backend, or one that cannot serve this encoding.
    """
    if name == "auto":
        name = "reference" if remaps else "sdpa"
        _say(name)
    if name not in BACKENDS:
        raise UserError(
            f"unknown attention backend '{name}'{nearest(name, BACKENDS)}; known: auto, {', '.join(BACKENDS)}"
        )
    if remaps and name != "reference":
        raise UserError(f"backend '{name}' never has the scores that this encoding changes: use 'reference' or 'auto'")
    return BACKENDS[name]


@functools.lru_cache
def _say(name: str) -> None:
    logger.info("attention backend: %s", name)
