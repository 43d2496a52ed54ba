"""Sliding-window bias."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import DistanceBias, register


@register("window")
class Window(DistanceBias):
    """Only the nearest keys are visible; the sum is finite.

    Eq. 8 of the paper, 0 where i-j <= w and -inf elsewhere, keeps w+1 keys while its Eq. 7 speaks of j keys;
    ``window`` is the number of keys kept, so w = window - 1.
    """

    @dataclass(frozen=True)
    class Config:
        window: int = option(512, "number of keys that a query sees, itself included", minimum=1)

    formula = "0 where d < window, else -inf"
    paper = "Qin, Zhong, Deng 2024 (arXiv 2307.10156), Eq. 8"

    def head_bias(self, d: Tensor) -> Tensor:
        return torch.zeros_like(d).masked_fill(d >= self.config.window, float("-inf"))

    def log_bias_formulas(self) -> list[LogBias]:
        return [LogBias("0", keys=self.config.window)] * self.heads
