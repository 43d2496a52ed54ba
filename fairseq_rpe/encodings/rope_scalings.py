"""Changes of RoPE's frequencies for longer inputs, by the names of the option ``scaling`` of ``rope``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class ScaledRotation(Protocol):
    """What a scaling reads of the encoding ``rope``.

    Attributes:
        config: its options.
        rotated: rotated width d of a head.
        original_length: L in tokens, or 0 if unknown.
        beta_fast: number of rotations within L from which a pair keeps its θ.
    """

    config: Any
    rotated: int
    original_length: int
    beta_fast: float

    def ramp_bounds(self) -> tuple[float, float]:
        """Return the indices of the pairs between which the weight of the unscaled θ falls from 1 to 0."""
        ...


@dataclass(frozen=True)
class Scaling:
    """A change of the frequencies θ for longer inputs.

    Attributes:
        scale: function of θ (..., P), κ (..., 1) and the encoding, which returns the changed frequencies (..., P).
        options: options that have an effect, besides those of every scaling; any other one is refused.
        dynamic: whether κ follows from the current length; the option ``factor`` is then α, and may be left out.
        needs_factor: whether the option ``factor`` must be given.
        beta_fast: value of ``beta_fast=auto``.
        has_temperature: whether queries and keys are multiplied by YaRN's temperature.
    """

    scale: Callable[[Tensor, Tensor, ScaledRotation], Tensor]
    options: tuple[str, ...] = ()
    dynamic: bool = False
    needs_factor: bool = True
    beta_fast: float = 32.0
    has_temperature: bool = False


def _keep(theta: Tensor, kappa: Tensor, rope: ScaledRotation) -> Tensor:
    return theta


def _scale_linearly(theta: Tensor, kappa: Tensor, rope: ScaledRotation) -> Tensor:
    return theta / kappa


def _scale_base(theta: Tensor, kappa: Tensor, rope: ScaledRotation) -> Tensor:
    """Return the frequencies of the base base·κ^(d/(d-2))."""
    return theta * kappa ** (-2 * _pair_indices(theta) / max(rope.rotated - 2, 1))


def _scale_by_parts(theta: Tensor, kappa: Tensor, rope: ScaledRotation) -> Tensor:
    """Return θ/κ for low frequencies, θ for high ones, and a blend between them by the option ``ramp``."""
    share = _share_of_rotations(theta, rope) if rope.config.ramp == "paper" else _share_of_index(theta, rope)
    return torch.lerp(theta / kappa, theta, share)


def _scale_as_llama3(theta: Tensor, kappa: Tensor, rope: ScaledRotation) -> Tensor:
    """Return the frequencies of ``ntk_by_parts`` with the ramp of the paper."""
    return torch.lerp(theta / kappa, theta, _share_of_rotations(theta, rope))


def _truncate(theta: Tensor, kappa: Tensor, rope: ScaledRotation) -> Tensor:
    """Return θ from b on, ρ from a to b, and 0 below a."""
    cfg = rope.config
    high, low, value = cfg.truncate_high, cfg.truncate_low, cfg.truncate_value
    b = 2 * math.pi / (kappa * rope.original_length) if high is None else torch.full_like(kappa, high)
    a = b / 8 if low is None else torch.full_like(b, low)
    rho = b / 16 if value is None else torch.full_like(b, value)
    return torch.where(theta >= b, theta, torch.where(theta < a, 0.0, rho))


def _share_of_rotations(theta: Tensor, rope: ScaledRotation) -> Tensor:
    """Return γ (..., P), the weight of the unscaled θ, linear in the number of rotations within L."""
    fast, slow = rope.beta_fast, rope.config.beta_slow
    return ((rope.original_length * theta / (2 * math.pi) - slow) / (fast - slow)).clamp(0, 1)


def _share_of_index(theta: Tensor, rope: ScaledRotation) -> Tensor:
    """Return γ (P,), the weight of the unscaled θ, linear in the pair's index."""
    low, high = rope.ramp_bounds()
    return 1 - ((_pair_indices(theta) - low) / (high - low)).clamp(0, 1)


def _pair_indices(theta: Tensor) -> Tensor:
    """Return the index s = 0 … P - 1 of each pair, (P,)."""
    return torch.arange(theta.shape[-1], device=theta.device, dtype=theta.dtype)


def count_rotating_pairs(keep: float | str, rotated: int, base: float, original_length: int) -> int:
    """Return the number of pairs, the fastest first, that the option ``keep`` of ``rope`` lets rotate.

    Args:
        keep: fraction of the pairs, rounded down to whole pairs as ``rope_type="proportional"`` of transformers does
            (arXiv 2410.06205); or "auto" for pairs that rotate at least once within L, θ_s >= 2π/L (arXiv 2410.21216).
        rotated: rotated width d of a head.
        base: base of the frequencies θ_s = base^(-2s/d).
        original_length: L in tokens; only "auto" reads it.
    """
    if keep == "auto":
        slowest = 2 * math.pi / original_length  # radians per token
        return sum(base ** (-2 * s / rotated) >= slowest for s in range(rotated // 2))
    return int(float(keep) * rotated // 2)


def yarn_attention_factor(factor: Tensor, mscale: float = 1.0) -> Tensor:
    """Return m(κ, x) = 0.1·x·ln κ + 1, or 1 for κ <= 1, in the shape of ``factor``.

    YaRN multiplies queries and keys by m(κ, 1), DeepSeek-V2 and its successors by m(κ, mscale)/m(κ, mscale_all_dim).

    Args:
        factor: κ.
        mscale: x.
    """
    return 0.1 * mscale * factor.clamp_min(1).log() + 1


_LENGTHS = ("factor", "original_length")
_BETAS = ("beta_fast", "beta_slow")
_INDEX_RAMP = ("ramp", "truncate")
_TEMPERATURE = ("temperature", "temperature_on", "mscale", "mscale_all_dim")
SCALINGS = {
    "none": Scaling(_keep, needs_factor=False),
    "linear": Scaling(_scale_linearly, ("factor", "keep")),
    "proportional": Scaling(_scale_linearly, ("factor", "keep"), needs_factor=False),
    "ntk": Scaling(_scale_base, ("factor", "keep")),
    "dynamic_ntk": Scaling(_scale_base, (*_LENGTHS, "keep"), dynamic=True, needs_factor=False),
    "ntk_by_parts": Scaling(_scale_by_parts, (*_LENGTHS, *_BETAS, *_INDEX_RAMP, "keep")),
    "llama3": Scaling(_scale_as_llama3, (*_LENGTHS, *_BETAS, "keep"), beta_fast=4.0),
    "yarn": Scaling(_scale_by_parts, (*_LENGTHS, *_BETAS, *_INDEX_RAMP, *_TEMPERATURE, "keep"), has_temperature=True),
    "truncated": Scaling(_truncate, (*_LENGTHS, "truncate_high", "truncate_low", "truncate_value")),
}
