"""Backends by name, what each of them declares, and the choice among them by what is at hand."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..core import UserError
from ..core.spec import nearest
from .flex import flex
from .plan import Plan
from .reference import reference
from .sdpa import sdpa
from .triton import triton

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """A function of (q, k, v, plan, dropout) that computes attention, called as itself, and what it can do.

    Attributes:
        attend: the function.
        prunes: takes plans that ask for pruning.
        sees_scores: has the scores that an encoding's ``remap`` changes.
    """

    attend: Callable[..., Tensor]
    prunes: bool = False
    sees_scores: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> Tensor:
        """q: (B, H, n, D), k, v: (B, H, m, D) -> (B, H, n, D)."""
        return self.attend(q, k, v, plan, dropout)


BACKENDS = {
    "reference": Backend(reference, sees_scores=True),
    "sdpa": Backend(sdpa, prunes=True),
    "flex": Backend(flex),
    "triton": Backend(triton, prunes=True),
}


def choose(name: str, *, remaps: bool = False) -> Backend:
    """The backend called ``name``; ``auto`` decides at each call and says which at the first.

    Args:
        name: auto or one of ``BACKENDS``.
        remaps: the encoding changes the scores.

    Raises:
        UserError: no such backend, or one that cannot serve this encoding. What depends on tensors (device, dtype, head
            width, positions, dropout) a named backend refuses when it is called; none falls back to another.
    """
    known = {"auto": auto, **BACKENDS}
    if name not in known:
        raise UserError(f"unknown attention backend '{name}'{nearest(name, BACKENDS)}; known: {', '.join(known)}")
    if remaps and not known[name].sees_scores:
        raise UserError(
            f"backend '{name}' never holds the scores that this encoding changes: use 'reference' or 'auto'"
        )
    return known[name]


def pick(plan: Plan) -> str:
    """sdpa, or reference where the scores are needed; flex and triton have to be named until measured on a GPU."""
    return "sdpa" if plan.remap is None else "reference"


def _picked(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    name = pick(plan)
    _say(name, q.is_cuda and name == "sdpa")
    return BACKENDS[name](q, k, v, plan, dropout)


auto = Backend(_picked, prunes=True, sees_scores=True)


@functools.lru_cache
def _say(name: str, on_gpu: bool) -> None:
    hint = " (triton and flex, to be named, have kernels for GPUs that have not been run on one yet)" if on_gpu else ""
    logger.info("attention backend: %s%s", name, hint)
