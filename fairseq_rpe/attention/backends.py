"""Backends by name, what each of them declares, and the choice among them by what is at hand."""

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.attention.calibration import Calibrator
from fairseq_rpe.attention.flex import NO_BACKWARD, flex
from fairseq_rpe.attention.plan import Plan
from fairseq_rpe.attention.reference import reference
from fairseq_rpe.attention.sdpa import sdpa
from fairseq_rpe.attention.triton import triton, unavailable
from fairseq_rpe.core.arguments import check_text
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import nearest
from fairseq_rpe.encodings import Encoding

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """A function of (q, k, v, plan, dropout) that computes attention, called as itself, and what it can do.

    Attributes:
        attend: the function.
        prunes: takes plans that ask for pruning.
        sees_scores: has all scores and weights of a query, for an encoding's ``transform_scores`` and ``reading``.
        sees_content: adds biases that depend on the tokens, of an encoding's ``scores``.
    """

    attend: Callable[..., Tensor]
    prunes: bool = False
    sees_scores: bool = False
    sees_content: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0) -> Tensor:
        """q: (B, H, n, D), k, v: (B, H, m, D) -> (B, H, n, D)."""
        return self.attend(q, k, v, plan, dropout)


BACKENDS = {
    "reference": Backend(reference, sees_scores=True, sees_content=True),
    "sdpa": Backend(sdpa, prunes=True, sees_scores=True, sees_content=True),
    "flex": Backend(flex, sees_content=True),
    "triton": Backend(triton, prunes=True),
}


def choose(name: str, encodings: Iterable[Encoding] = ()) -> Backend:
    """The backend called ``name``; ``auto`` decides at each call and says which at the first.

    Args:
        name: auto or one of ``BACKENDS``.
        encodings: of the model.

    Raises:
        UserError: no such backend, or one that cannot serve an encoding. What depends on tensors (device, dtype, head
            width, positions, dropout) a named backend refuses when it is called; none falls back to another.
    """
    check_text("an attention backend", name, "auto")
    known = {"auto": auto, **BACKENDS}
    if name not in known:
        raise UserError(f"unknown attention backend '{name}'{nearest(name, BACKENDS)}; known: {', '.join(known)}")
    for encoding in encodings:
        what = type(encoding).__name__
        if encoding.needs_all_scores and not known[name].sees_scores:
            raise UserError(f"{what} needs all scores of a query, which backend '{name}' never holds: {REMEDY}")
        if encoding.has_content_bias and not known[name].sees_content:
            raise UserError(f"{what} adds a bias that depends on the tokens, and backend '{name}' has none: {REMEDY}")
    return known[name]


def check_training(name: str, device: str) -> None:
    """Check that a backend can train on a device, before there are tensors there.

    Args:
        name: auto or one of ``BACKENDS``.
        device: "cpu" or "cuda".

    Raises:
        UserError: the backend does not run there, or has no backward pass there.
    """
    reason = NO_BACKWARD if name == "flex" and device == "cpu" else None
    if name == "triton":
        reason = unavailable(on_gpu=device == "cuda")
    if reason:
        raise UserError(f"--attention-backend {name}: {reason}")


REMEDY = "use 'sdpa' or 'auto'"
PLAIN = "sdpa"  # what is taken where nothing is measured: it takes any plan
# on a GPU; the order is that of deterministic mode, in which flex adds up gradients of a table in no fixed order
calibrator = Calibrator({name: BACKENDS[name] for name in ("triton", "sdpa", "flex")})


def _picked(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    name = calibrator.choice(q, k, v, plan, dropout)
    if name is None:
        _say(PLAIN)
    elif name != PLAIN:
        try:
            return BACKENDS[name](q, k, v, plan, dropout)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            calibrator.drop(name, error, q, k, v, plan, dropout)
    return BACKENDS[PLAIN](q, k, v, plan, dropout)


auto = Backend(_picked, prunes=True, sees_scores=True, sees_content=True)


@functools.lru_cache
def _say(name: str) -> None:
    logger.info("attention backend: %s", name)
