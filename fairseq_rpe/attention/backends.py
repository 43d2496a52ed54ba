"""Attention backends by name, their capabilities, and the automatic choice among them."""

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairseq_rpe.attention.autotune import Autotuner
from fairseq_rpe.attention.flex import NO_BACKWARD, flex
from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.attention.reference import reference
from fairseq_rpe.attention.sdpa import sdpa
from fairseq_rpe.attention.triton import triton, unavailable_reason
from fairseq_rpe.core.arguments import check_text
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.encodings import Encoding

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """A function of (q, k, v, plan, dropout) that computes attention, with its capabilities.

    Attributes:
        attend: function that computes attention, with the arguments of ``__call__``.
        supports_pruning: whether it accepts plans with pruning.
        supports_all_scores: whether it has all scores and weights of a query, which an encoding's transforms of scores
            and ``relative_values`` need.
        supports_score_product: whether it replaces q·k by an encoding's ``score_product``.
    """

    attend: Callable[..., Tensor]
    supports_pruning: bool = False
    supports_all_scores: bool = False
    supports_score_product: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> Tensor:
        """Compute attention.

        Args:
            q: (B, H, n, D), rotated unless ``plan.rotation_regions`` is set. The queries are the last n of the m
                tokens.
            k: (B, G, m, D), rotated as q is. G divides H, and query head h reads key head h // (H / G).
            v: (B, G, m, D); it may be narrower than q and k, and so is then the output.
            plan: positions, bias, padding, pruning and hooks for the n queries and m keys.
            dropout: probability of dropping an attention weight.

        Returns:
            (B, H, n, D) in q's dtype.
        """
        return self.attend(q, k, v, plan, dropout)


BACKENDS = {
    "reference": Backend(reference, supports_all_scores=True, supports_score_product=True),
    "sdpa": Backend(sdpa, supports_pruning=True, supports_all_scores=True, supports_score_product=True),
    "flex": Backend(flex),
    "triton": Backend(triton, supports_pruning=True),
}


def choose_backend(name: str, encodings: Iterable[Encoding] = ()) -> Backend:
    """Return the backend called ``name``; ``auto`` decides at each call and logs its first decision.

    Args:
        name: auto or one of ``BACKENDS``.
        encodings: encodings of the model, one for all layers or one per layer; each must be supported.

    Raises:
        UserError: there is no such backend, or it does not support an encoding. Unsupported tensors (device, dtype,
            head width, positions, dropout) are refused when a named backend is called; none falls back to another.
    """
    check_text("an attention backend", name, "auto")
    backends = {"auto": auto, **BACKENDS}
    if name not in backends:
        raise UserError(
            f"unknown attention backend '{name}'{did_you_mean(name, BACKENDS)}; known: {', '.join(backends)}"
        )
    for encoding in encodings:
        encoding_name = type(encoding).__name__
        if encoding.needs_all_scores and not backends[name].supports_all_scores:
            raise UserError(
                f"{encoding_name} needs all scores of a query, which backend '{name}' never holds: {REMEDY}"
            )
        if encoding.has_score_product and not encoding.has_vector_product and not backends[name].supports_score_product:
            raise UserError(f"{encoding_name} replaces the product of q and k, which backend '{name}' uses: {REMEDY}")
    return backends[name]


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
        reason = unavailable_reason(on_gpu=device == "cuda")
    if reason:
        raise UserError(f"--attention-backend {name}: {reason}")


REMEDY = "use 'sdpa' or 'auto'"
FALLBACK = "sdpa"  # used where nothing is measured: it supports any plan
# in the order of preference of deterministic mode; flex is last, as it adds up gradients of a table in no fixed order
autotuner = Autotuner({name: BACKENDS[name] for name in ("triton", "sdpa", "flex")})


def _attend_with_best(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    name = autotuner.choose(q, k, v, plan, dropout)
    if name is None:
        _log_backend(FALLBACK)
    elif name != FALLBACK:
        try:
            return BACKENDS[name](q, k, v, plan, dropout)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            autotuner.drop_candidate(name, error, q, k, v, plan, dropout)
    return BACKENDS[FALLBACK](q, k, v, plan, dropout)


auto = replace(BACKENDS["sdpa"], attend=_attend_with_best)  # it may choose sdpa, and so serves what sdpa serves


@functools.lru_cache
def _log_backend(name: str) -> None:
    logger.info("attention backend: %s", name)
