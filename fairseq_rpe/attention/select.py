"""Choosing a backend by name, or by what is at hand."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from torch import Tensor

from ..core import UserError
from ..core.spec import nearest
from . import flex as flex_backend
from . import triton as triton_backend
from .plan import Plan
from .reference import reference
from .sdpa import sdpa

logger = logging.getLogger(__name__)
Backend = Callable[..., Tensor]
BACKENDS: dict[str, Backend] = {
    "reference": reference,
    "sdpa": sdpa,
    "flex": flex_backend.flex,
    "triton": triton_backend.triton,
}


def choose(name: str, *, remaps: bool = False) -> Backend:
    """The attention function called ``name``; ``auto`` decides at each call and says which at the first.

    Args:
        name: auto, reference, sdpa, flex or triton.
        remaps: the encoding changes the scores.

    Raises:
        UserError: no such backend, or one that cannot serve this encoding. What depends on tensors (device, dtype, head
            width, positions, dropout) a named backend refuses when it is called; none falls back to another.
    """
    if name == "auto":
        return auto
    if name not in BACKENDS:
        raise UserError(
            f"unknown attention backend '{name}'{nearest(name, BACKENDS)}; known: auto, {', '.join(BACKENDS)}"
        )
    if remaps and name != "reference":
        raise UserError(f"backend '{name}' never has the scores that this encoding changes: use 'reference' or 'auto'")
    return BACKENDS[name]


def auto(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> Tensor:
    """Attention by the backend that :func:`pick` names."""
    name = pick(q, k, v, plan, dropout)
    _say(name, q.is_cuda and name == "sdpa")
    return BACKENDS[name](q, k, v, plan, dropout)


def pick(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> str:
    """The backend for these tensors: sdpa, or reference where the scores are needed.

    flex and triton have to be named until they have been run, and measured, on a GPU.
    """
    return "sdpa" if plan.remap is None else "reference"


@functools.lru_cache
def _say(name: str, on_gpu: bool) -> None:
    hint = " (triton and flex, to be named, have kernels for GPUs that have not been run on one yet)" if on_gpu else ""
    logger.info("attention backend: %s%s", name, hint)
