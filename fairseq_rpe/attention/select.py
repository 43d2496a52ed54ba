"""Choosing a backend by name, or by what is at hand."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from torch import Tensor

from ..core import Toeplitz, UserError
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
    _say(name)
    return BACKENDS[name](q, k, v, plan, dropout)


def pick(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> str:
    """The backend for these tensors: on a GPU tables go to Triton, and what it refuses to FlexAttention or sdpa."""
    if plan.remap is not None:
        return "reference"
    if not q.is_cuda:
        return "sdpa"
    if plan.form is None and plan.padding is None and q.shape[2] == k.shape[2]:
        return "sdpa"  # torch's own causal kernel, the limit of what a bias can reach
    if triton_backend.refusal(q, k, v, plan, dropout) is None:
        return "triton"
    if isinstance(plan.form, Toeplitz) and flex_backend.refusal(q, k, v, plan, dropout) is None:
        return "flex"
    return "sdpa"


@functools.lru_cache
def _say(name: str) -> None:
    logger.info("attention backend: %s", name)
