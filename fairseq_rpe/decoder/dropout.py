"""Dropout whose probability attention can read."""

from torch import Tensor, nn
from torch.nn import functional as F


class Dropout(nn.Module):
    """Dropout that draws no random numbers if its probability is 0.

    Args:
        p: probability of dropping an element in training.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    @property
    def active_p(self) -> float:
        """The probability that is in effect now: 0 in evaluation."""
        return self.p if self.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return x with elements dropped and the others scaled."""
        return F.dropout(x, self.active_p) if self.active_p > 0 else x

    def extra_repr(self) -> str:
        """Return the probability for ``print(model)``."""
        return f"p={self.p}"
