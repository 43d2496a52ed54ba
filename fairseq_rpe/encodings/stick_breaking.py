"""Stick-breaking attention: from the nearest key to the farthest, each key takes a share of the remaining weight."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register


@register("stick_breaking", colour="green", marker="s")
class StickBreaking(Encoding):
    """Stick-breaking attention (Tan et al. 2024, arXiv 2410.17980), which replaces the softmax and has no parameters.

    A_ij = σ(s_ij) Π_(l=j+1…i-1) (1 - σ(s_il)) is the weight of key j, with s = q·k/sqrt(D): the nearest key takes the
    share σ(s) of the weight 1, and each farther key takes its share of what is left. A query does not see itself by
    default; with ``attend_self=true`` it does, and the product includes l = i. The remainder r_i = Π_l (1 - σ(s_il))
    belongs to no key. The authors' reference adds r_i·v_i to the output (``remainder=value``), and their language model
    drops it, which is the default here. Query 0 without itself sees no key: its output is 0, or v_0.

    Logarithms of weights are summed in float32 or better; the authors' code rounds each term to the dtype of q first.
    Dropout of attention weights drops weights A without rescaling by their sum, as in a softmax.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``stick_breaking``."""

        attend_self: bool = option(False, "whether a query sees its own key")
        remainder: str = option(
            "drop",
            "the weight that no key takes is dropped, or is that of the query's own value",
            choices=("drop", "value"),
        )

    formula = "σ(s_ij)·Π_(l=j+1…i-1) (1 - σ(s_il)) in place of softmax,  s = q·k/√D"
    paper = "Tan et al. 2024 (arXiv 2410.17980)"
    family = "bias that depends on the content"
    position_type = "none"
    returns_log_weights = True
    dependence = (
        "weights have no softmax: where no score is below c, all keys beyond d tokens share at most (1 - σ(c))^d, so "
        "the receptive field is finite; for all texts nothing follows"
    )

    def transform_scores(self, scores: Tensor, q: Tensor, pos: Positions) -> Tensor:
        """Return the logarithms of the weights (B, H, n, m) of scores (B, H, n, m)."""
        n, m = scores.shape[2:]
        is_self = torch.ones(n, m, dtype=torch.bool, device=scores.device)
        is_self = is_self.tril(m - n).triu(m - n)  # (n, m), True for each query's own key
        if not self.config.attend_self:
            scores = scores.masked_fill(is_self, float("-inf"))
        # ln(1 - σ(s)) of each key, 0 for a hidden one; its sums from the right, over the keys from j on
        sums = F.logsigmoid(-scores).flip(-1).cumsum(-1).flip(-1)  # (B, H, n, m)
        nearer = F.pad(sums[..., 1:], (0, 1))  # over the keys after j
        weights = F.logsigmoid(scores) + nearer
        if self.config.remainder == "drop":
            return weights
        remainder = sums[..., :1]  # (B, H, n, 1), ln r_i
        if self.config.attend_self:
            # ln(w + r) = ln w + ln(1 + r/w). The second derivative of torch.logaddexp would be NaN if w = 0 or w << r.
            self_weight = weights.masked_fill(~is_self, 0.0)
            remainder = self_weight - F.logsigmoid(self_weight - remainder)
        return torch.where(is_self, remainder, weights)
