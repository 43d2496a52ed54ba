"""Base class of encodings that adjust the scores of another encoding, which their option ``base`` names."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.core.bias import Bias, ToeplitzBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, Rotary, registry

# option of the adjusting encoding -> option of its base, if that rotates
ROTATION = {"rope_base": "base", "rotary_fraction": "rotary_fraction", "interleaved": "interleaved"}


def base_names() -> list[str]:
    """Return the names of the encodings whose scores can be adjusted."""
    return [name for name in registry.names() if registry.get(name).dape_base]


def base_option(default: str) -> Any:
    """Return the field of the option ``base``."""
    return option(default, "the encoding that is adjusted", choices=base_names)


def rope_base_option() -> Any:
    """Return the field of the option ``rope_base``."""
    return option(10000.0, "base=rope: b in θ_s = b^(-2s/d)", above=1)


def rotary_fraction_option() -> Any:
    """Return the field of the option ``rotary_fraction``."""
    return option(1.0, "base=rope: fraction of a head that is rotated, from its first element", above=0, maximum=1)


def interleaved_option() -> Any:
    """Return the field of the option ``interleaved``."""
    return option(False, "base=rope: rotate pairs (2s, 2s+1) instead of (s, s + d/2)")


def _is_rotary(base: str) -> bool:
    return issubclass(registry.get(base), Rotary)


class AdjustedEncoding(Encoding):
    """Base class of encodings with the options ``base``, ``rope_base``, ``rotary_fraction`` and ``interleaved``.

    The base rotates queries and keys as it does alone. A subclass adds :meth:`base_bias` to the scores itself.

    Attributes:
        base: the encoding that is adjusted.
    """

    family = "bias that depends on the content"

    @classmethod
    def rotation_options(cls, config: Any) -> Mapping[str, str]:
        """Return the quantity of the rotation that each option sets, by the name of the option."""
        return ROTATION if _is_rotary(config.base) else {}

    def setup(self) -> None:
        """Check the options and build the base."""
        cfg = self.config
        cls = registry.get(cfg.base)
        rotates = _is_rotary(cfg.base)
        for f in fields(self.Config):
            if f.name in ROTATION and not rotates and getattr(cfg, f.name) != f.default:
                name = next(name for name in registry.names() if registry.get(name) is type(self))
                raise UserError(f"'{name}:base={cfg.base}' does not read {f.name}: leave it out, or give base=rope")
        rotation = {key: getattr(cfg, name) for name, key in ROTATION.items()} if rotates else {}
        self.base = cls(cls.Config(**rotation), self.heads, self.width, self.length)
        self.fixed_rotation, self.length_dependent = self.base.fixed_rotation, self.base.length_dependent

    @property
    def rotates(self) -> bool:
        """Whether ``base`` rotates queries and keys."""
        return self.base.rotates

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Rotate queries, or keys with ``key``, x (B, H, n, D); same shape."""
        return self.base.rotate(x, at, pos, key)

    def base_bias(self, pos: Positions, scores: Tensor) -> Tensor | None:
        """Return the bias (B, H, n, m) of ``base`` in the dtype of scores (B, H, n, m), or None if it has none."""
        bias: Bias | None = self.base.position_bias(pos)
        if isinstance(bias, ToeplitzBias) and pos.contiguous and pos.step == bias.step:
            return _shift_columns(bias.columns(scores.shape[3]), scores.shape[2]).to(scores.dtype).expand_as(scores)
        return None if bias is None else bias.materialize(pos).to(scores.dtype).expand_as(scores)


def _shift_columns(columns: Tensor, n: int) -> Tensor:
    """Return the bias (H, n, m) of n queries from its columns (H, m) for the distances 0 … m-1, without a gather.

    Rows of m + 1 numbers, of which the first is padding, become rows of m numbers in the same memory: row i shifts by
    n - i. Entries in the future are arbitrary.
    """
    heads, m = columns.shape
    row = F.pad(columns.flip(1), (1, 0))  # (H, 1 + m), from far to near
    return row[:, None].expand(heads, n, m + 1).flatten(1)[:, n:].view(heads, n, m)
