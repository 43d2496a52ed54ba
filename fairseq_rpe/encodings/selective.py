"""Selective attention: a token lowers the scores of earlier tokens for all queries after it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.core.positions import Positions
from fairseq_rpe.encodings.adjusted_encoding import (
    AdjustedEncoding,
    base_option,
    interleaved_option,
    rope_base_option,
    rotary_fraction_option,
)
from fairseq_rpe.encodings.base import register


@register("selective", colour="green", marker="o")
class Selective(AdjustedEncoding):
    """Selective attention (Leviathan et al. 2024, arXiv 2410.02703, section 3.3): score = s_ij - F_ij, no parameters.

    F_ij = Σ_(l=j+1…i-1) max(0, s⁰_lj), where s⁰ are the scores of head 0 of the same layer: token l lowers the score of
    key j for all later queries i and for all heads. A token does not lower its own score, and the first token of a text
    keeps its score. s includes bias and rotation of the encoding ``base``; the default ``nope`` is the formula alone.

    F needs one number of each key, which every query changes: the state of the keys. A KV cache stores it.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``selective``."""

        base: str = base_option("nope")
        rope_base: float = rope_base_option()
        rotary_fraction: float = rotary_fraction_option()
        interleaved: bool = interleaved_option()

    formula = "s_ij - Σ_(l=j+1…i-1) max(0, s⁰_lj),  s = q·k/√D + b of its base,  s⁰ of head 0"
    paper = "Leviathan et al. 2024 (arXiv 2410.02703)"
    sharing_modes = ("layer", "model")
    key_state_width = 1
    dependence = (
        "what later tokens subtract from the score of a key has no bound, and may also be 0: it depends on the text"
    )

    def transform_scores_with_state(
        self, scores: Tensor, q: Tensor, pos: Positions, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Subtract F from scores (B, H, n, m); the state (B, 1, m, 1) is F of a query after the last one."""
        hidden = torch.isneginf(scores)
        bias = self.base_bias(pos, scores)
        if bias is not None:
            scores = (scores + bias).masked_fill(hidden, float("-inf"))
        n, m = scores.shape[2:]
        is_self = torch.ones(n, m, dtype=torch.bool, device=scores.device).tril(m - n).triu(m - n)  # (n, m)
        is_padding = hidden[:, :1].diagonal(m - n, -2, -1)[..., None]  # (B, 1, n, 1)
        # what each query subtracts from the score of each key for the queries after it
        amounts = scores[:, :1].relu().masked_fill(is_self | is_padding, 0.0)  # (B, 1, n, m)
        sums = amounts.cumsum(2)
        first_key = (~hidden[:, :1]).byte().argmax(-1, keepdim=True)  # (B, 1, n, 1), the first that the query sees
        masks = state.mT + F.pad(sums[:, :, :-1], (0, 0, 1, 0))  # (B, 1, 1, m) + (B, 1, n, m)
        return scores - masks.scatter(-1, first_key, 0.0), state + sums[:, :, -1:].mT
