"""Backends by name, what each of them declares, and the choice among them by what is at hand."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import UserError
from ..core.spec import nearest
from .calibration import Calibrator
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
    """What is taken where nothing is measured: sdpa, or reference where the scores are needed."""
    return "sdpa" if plan.remap is None else "reference"


# on a GPU; the order is that of deterministic mode, in which flex adds up gradients of a table in no fixed order
calibrator = Calibrator({name: BACKENDS[name] for name in ("triton", "sdpa", "flex")})


def _picked(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    name, plain = calibrator.choice(q, k, v, plan, dropout), pick(plan)
    if name is None:
        _say(plain)
    elif name != plain:
        try:
            return BACKENDS[name](q, k, v, plan, dropout)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            calibrator.drop(name, error, q, k, v, plan, dropout)
    return BACKENDS[plain](q, k, v, plan, dropout)


auto = Backend(_picked, prunes=True, sees_scores=True)


@functools.lru_cache
def _say(name: str) -> None:
    logger.info("attention backend: %s", name)
