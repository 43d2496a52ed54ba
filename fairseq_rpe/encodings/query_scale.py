"""Factors of queries by their position, which keep attention sharp over many keys (option ``query_scale``)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fairseq_rpe.core.attention_options import QUERY_SCALES, AttentionOptions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions

_SSMAX_VALUE = 0.43  # initial factor of ln n where the training length is not known


class QueryScale(nn.Module):
    """The factor λ of each query, which changes its content logits to λ·q·k / sqrt(D).

    A factor of the query leaves additive biases alone. With n the number of keys that query i can see, a the option
    ``query_scale_value`` and F the option ``query_scale_interval``:

    - ``constant``: a.
    - ``head``: a_h, one learned factor per head, as HeadScale (Wang et al. 2024, arXiv 2404.12224), whose recipe trains
      these factors alone on longer texts.
    - ``ssmax``: a_h·ln n with one learned a_h per head (Nakanishi 2025, arXiv 2501.19399). It starts at 1/ln L, so that
      the factor is 1 at the training length L; without L at 0.43.
    - ``logn``: max(1, ln n / ln F).
    - ``llama4``: 1 + a·ln(1 + floor((i + 1) / F)), as Llama 4's layers without positions.
    - ``ministral``: 1 + a·ln(1 + floor(i / F)), as Ministral 3 and Mistral 4.
    - ``inkling``: 1 + a·ln(max(1, (i + 1) / F)), as Inkling 2.

    Args:
        options: attention options of the encoding.
        heads: number of attention heads H.
        length: training length in tokens, or None if unknown.

    Attributes:
        value: a, or (H,) parameter a_h.
        interval: F in tokens, or 0 if the method has none.

    Raises:
        UserError: the method needs the training length, which is not known, or a longer interval.
    """

    def __init__(self, options: AttentionOptions, heads: int, length: int | None) -> None:
        super().__init__()
        self.options, self.method = options, options.query_scale
        facts = QUERY_SCALES[self.method]
        value = options.query_scale_value or facts.value
        if value is None:  # ssmax
            value = 1 / math.log(length) if length is not None and length > 1 else _SSMAX_VALUE
        self.value: Tensor | float = nn.Parameter(torch.full((heads,), value)) if facts.is_learned else value
        self.interval = (options.query_scale_interval or length or 0) if facts.uses_interval else 0
        if facts.uses_interval and self.interval < (2 if self.method == "logn" else 1):
            raise UserError(
                f"query_scale={self.method} needs an interval, which is the training length unless it is given: "
                "give query_scale_interval"
            )

    def forward(self, pos: Positions) -> Tensor:
        """Return the factors of the queries.

        Args:
            pos: positions of the n queries and m keys.

        Returns:
            (B or 1, H or 1, n or 1, 1) in the dtype of the positions.
        """
        at = pos.q[:, None, :, None]  # (B or 1, 1, n, 1)
        value = self.value[:, None, None].to(at.dtype) if isinstance(self.value, Tensor) else self.value
        if self.method in ("constant", "head"):
            return at.new_ones(1, 1, 1, 1) * value
        if self.method == "ssmax":
            return value * self._visible_keys(at).log()
        if self.method == "logn":
            return logn_factor(self._visible_keys(at) - 1, self.interval)
        if self.method == "inkling":
            return 1 + value * ((at + 1) / self.interval).clamp_min(1.0).log()
        index = at + 1 if self.method == "llama4" else at
        return 1 + value * torch.log1p(torch.floor(index / self.interval))

    def _visible_keys(self, at: Tensor) -> Tensor:
        """Return the number of keys that queries at these positions see, of a text without gaps between positions."""
        if self.options.block:
            at = torch.remainder(at, self.options.block)
        keys = at + 1
        return keys.clamp_max(self.options.local) if self.options.local else keys

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the module."""
        return f"{self.method}, interval={self.interval}"


def logn_factor(at: Tensor, original_length: int, clipped: bool = True) -> Tensor:
    """Return ln(i + 1) / ln L of positions i, in their shape; with ``clipped`` at least 1."""
    factor = (at.clamp_min(0) + 1).log() / math.log(original_length)
    return factor.clamp_min(1) if clipped else factor
