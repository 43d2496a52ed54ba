"""Sliding-window attention as a bias."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import DistanceBias, register


@register("window", colour="vermilion", marker="^")
class Window(DistanceBias):
    """Sliding window (Qin et al. 2024, arXiv 2307.10156, Eq. 8): the nearest ``window`` keys are visible.

    Σ exp(bias) is finite. Eq. 8, 0 where i-j <= w and -inf elsewhere, has w+1 visible keys, while Eq. 7 has j keys;
    ``window`` is the number of visible keys, so w = window - 1.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``window``."""

        window: int = option(512, "number of keys that a query sees, itself included", minimum=1)

    formula = "0 where d < window, else -inf"
    limits_visibility = True
    figure_options = "window=64"  # the default is longer than most figures
    paper = "Qin, Zhong, Deng 2024 (arXiv 2307.10156), Eq. 8"

    def head_bias(self, d: Tensor) -> Tensor:
        """Return 0 for d < ``window``, else -inf."""
        return torch.zeros_like(d).masked_fill(d >= self.config.window, float("-inf"))

    def log_bias_formulas(self) -> list[LogBias]:
        """Return a constant log-bias over ``window`` keys for each head."""
        return [LogBias("0", keys=self.config.window)] * self.heads
