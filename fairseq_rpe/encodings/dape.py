"""Data-adaptive positional encoding (DAPE): an MLP over the scores and biases of all heads adjusts the bias."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.core.tensors import runs_eagerly
from fairseq_rpe.encodings.adjusted_encoding import (
    AdjustedEncoding,
    base_option,
    interleaved_option,
    rope_base_option,
    rotary_fraction_option,
)
from fairseq_rpe.encodings.base import register
from fairseq_rpe.encodings.pair_network import AddedNetwork

KEYS = 256  # numbers of keys are padded to multiples of this before a convolution


@register("dape", colour="orange", marker="o")
class Dape(AdjustedEncoding):
    """DAPE (Zheng et al. 2024, arXiv 2405.14722): score = s + b + f([s; b]) for each pair.

    s (H,) are the scores q·k/sqrt(D) of all heads and b (H,) the biases of the encoding ``base``. f is Linear(2H -> w),
    LeakyReLU(0.01), Linear(w -> H), one per layer; for ``rope`` and ``nope``, which have no b, it reads s only. Beyond
    the training length the encoding behaves as its base, but f grows with b and may cancel or amplify it. The survey's
    equation has no b outside f; the public code has it, and so has this. DAPE was first called CAPE.

    With ``kernel=k`` it is DAPE v2 (Zheng et al. 2024, arXiv 2410.04798), whose setting is k = 3: both linear layers
    are convolutions over k neighbouring keys, so f reads the scores of the keys j - k + 1 … j + k - 1 that the query
    sees; padding between keys is left out. All other inputs and hidden units are 0. The public code does not set the
    hidden units of the future to 0, so there the score of a key near the query differs between training and decoding;
    here it does not.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``dape``."""

        base: str = base_option("kerple_log")
        width: int = option(32, "w, hidden units", minimum=1, maximum=1 << 12)
        rope_base: float = rope_base_option()
        rotary_fraction: float = rotary_fraction_option()
        interleaved: bool = interleaved_option()
        kernel: int = option(
            1, "k, neighbouring keys that each layer of f reads, odd; 3: DAPE v2", minimum=1, maximum=63
        )

    formula = "s + b + f([s; b]),  s = q·k/√D,  b of its base"
    paper = "Zheng et al. 2024 (arXiv 2405.14722); kernel=3: Zheng et al. 2024 (arXiv 2410.04798)"
    sharing_modes = ("layer", "model")
    dependence = (
        "a network of all heads' scores adds to the bias of its base, with no bound: nothing follows for all texts"
    )

    def setup(self) -> None:
        """Check the options and create the parameters."""
        super().setup()
        self.biased = self.base.adds_bias
        inputs, units, kernel = self.heads * (1 + self.biased), self.config.width, self.config.kernel
        self.mix: nn.Linear | nn.Conv2d
        self.out: nn.Linear | nn.Conv2d
        if kernel % 2 == 0:
            raise UserError(
                f"'dape': kernel={kernel} is even, so its neighbourhood has no middle: use an odd number, such as 3"
            )
        if kernel == 1:
            self.mix, self.out = nn.Linear(inputs, units), nn.Linear(units, self.heads)
        else:
            self.mix = nn.Conv2d(inputs, units, (1, kernel))
            self.out = nn.Conv2d(units, self.heads, (1, kernel))

    def transform_scores(self, scores: Tensor, q: Tensor, pos: Positions) -> Tensor:
        """Add the bias of ``base`` and the MLP's output to scores (B, H, n, m)."""
        hidden = torch.isneginf(scores)
        scores = scores.masked_fill(hidden, 0.0)
        bias = self.base_bias(pos, scores)
        any_hidden = hidden.any(1, keepdim=True) if self.config.kernel > 1 else None
        # torch function modes, such as that of the self-test, see the operations of autograd alone
        is_eager = runs_eagerly() and not torch._C._len_torch_function_stack()
        if scores.device.type == "cpu" and is_eager and (self.config.kernel == 1 or pos.contiguous):
            layers = [x.to(scores.dtype) for x in (*self._parameters_of(self.mix), *self._parameters_of(self.out))]
            result: Tensor = AddedNetwork.apply(scores, bias, any_hidden, *layers)
            return result.masked_fill(hidden, float("-inf"))
        inputs = scores
        if bias is not None:
            scores, inputs = scores + bias, torch.cat([scores, bias], dim=1)  # (B, H, n, m), (B, 2H, n, m)
        if any_hidden is None:
            change = self._apply_mlp(inputs.flatten(2)).view_as(scores)  # of (B, H, n·m)
        else:
            change = self._apply_convolutions(inputs, any_hidden, pos.contiguous)
        return (scores + change).masked_fill(hidden, float("-inf"))

    @staticmethod
    def _parameters_of(layer: nn.Linear | nn.Conv2d) -> tuple[Tensor, Tensor]:
        """Return the weight (out, in, k) and the bias (out,) of a layer."""
        assert layer.bias is not None
        return layer.weight.reshape(*layer.weight.shape[:2], -1), layer.bias

    def _apply_convolutions(self, x: Tensor, hidden: Tensor, contiguous: bool) -> Tensor:
        """Return f (B, H, n, m) of neighbouring keys.

        Args:
            x: (B, H or 2H, n, m) scores and biases.
            hidden: (B, 1, n, m) bool, True where the query does not see the key.
            contiguous: whether there is no padding between keys that a query sees.
        """
        if not contiguous:  # the visible keys of each query first, so that they are neighbours
            order = hidden.byte().argsort(dim=-1, stable=True)  # (B, 1, n, m)
            x, hidden = x.gather(-1, order.expand_as(x)), hidden.gather(-1, order)
            order = order.expand(-1, self.heads, -1, -1)
            result = self._apply_convolutions(x, hidden, contiguous=True)
            return torch.empty_like(result).scatter(-1, order, result)
        # torch keeps memory for each shape of a convolution, and every block of queries or decoding step has another m
        m = x.shape[-1]
        missing = -m % KEYS if m > KEYS else 0
        x, hidden = F.pad(x, (0, missing)), F.pad(hidden, (0, missing), value=True)
        # 0 at hidden keys, as beyond the last key: a cached step has no keys after its query, and a row without padding
        # has none before its first token
        units = F.leaky_relu(_convolve(self.mix, x.masked_fill(hidden, 0.0)))  # (B, w, n, m)
        return _convolve(self.out, units.masked_fill(hidden, 0.0))[..., :m]

    def _apply_mlp(self, x: Tensor) -> Tensor:
        """Return f (B, H, pairs) of the scores and biases x (B, H or 2H, pairs)."""
        first, last = (_Layer.of(layer, x) for layer in (self.mix, self.out))
        units = F.leaky_relu(torch.matmul(first.weight, x) + first.bias)  # (B, w, pairs)
        return torch.matmul(last.weight, units) + last.bias


class _Layer(NamedTuple):
    """A linear layer: weight (out, in) and bias (out, 1); or a convolution: weight (out, in, 1, k)."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, layer: nn.Linear | nn.Conv2d, like: Tensor) -> "_Layer":
        """Return the parameters of a layer in the dtype of ``like``."""
        assert layer.bias is not None
        return cls(layer.weight.to(like.dtype), layer.bias.to(like.dtype)[:, None])


def _convolve(layer: nn.Linear | nn.Conv2d, x: Tensor) -> Tensor:
    """Apply a convolution of k neighbouring keys to x (B, channels, n, m), padded with zeros: the same n and m."""
    weight, bias = _Layer.of(layer, x)
    return F.conv2d(x, weight, bias[:, 0], padding=(0, weight.shape[-1] // 2))
