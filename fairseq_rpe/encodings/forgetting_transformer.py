"""Forgetting Transformer (FoX): a forget gate of each token decays the scores of all earlier tokens."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import Bias, TokenBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import exact_fraction
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register


@register("forgetting", colour="vermilion", marker="v")
class Forgetting(Encoding):
    """Forget gates (Lin et al. 2025, arXiv 2503.02130): bias_ij = Σ_(l=j+1…i) ln f_l, f_l = σ(w·x_l + b) per head.

    x_l (C,) is the layer's input. With c_i = Σ_(l<=i) ln f_l the bias is c_i - c_j <= 0, one number per token and head.
    ALiBi is the case of constant f with ln f = -slope. ``gate=bias`` leaves out w·x, and ``gate=fixed`` does not train
    b either; b is then initialised so that the time scales -1/ln f of the heads range from ``min_timescale`` to
    ``max_timescale`` tokens, evenly spaced in the logarithm. Sums are computed in float64.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``forgetting``."""

        gate: str = option(
            "full", "f depends on the input, on a learned b or on a fixed b", choices=("full", "bias", "fixed")
        )
        min_timescale: float = option(2.0, "gate=bias, fixed: time scale of the first head, in tokens", above=0)
        max_timescale: float = option(256.0, "gate=bias, fixed: time scale of the last head, in tokens", above=0)

    formula = "c_i - c_j,  c_i = Σ_(l<=i) ln σ(w·x_l + b)"
    paper = "Lin et al. 2025 (arXiv 2503.02130)"
    family = "bias that depends on the content"
    sharing_modes = ("layer", "model")
    position_type = "none"
    dependence = (
        "Σ exp(bias) is at most 1/(1 - f) where no f of a text is above f < 1, and grows with the text as f nears 1"
    )

    def setup(self) -> None:
        """Check the options and create the parameters."""
        cfg = self.config
        changed = [
            name for name in ("min_timescale", "max_timescale") if getattr(cfg, name) != getattr(type(cfg)(), name)
        ]
        if cfg.gate == "full" and changed:
            raise UserError(f"'forgetting:gate=full' does not read {changed[0]}: leave it out or choose another gate")
        if cfg.min_timescale > cfg.max_timescale:
            raise UserError(
                f"'forgetting': min_timescale={cfg.min_timescale:g} is more than max_timescale={cfg.max_timescale:g}"
            )
        self.project = nn.Linear(self.width, self.heads, bias=False) if cfg.gate == "full" else None
        if self.project is not None:
            nn.init.normal_(self.project.weight, std=0.02)
        self.bias = nn.Parameter(self._initial_bias(), requires_grad=cfg.gate != "fixed")

    def _initial_bias(self) -> Tensor:
        """Return b (H,): 0 with ``gate=full``, else such that ln σ(b) = -1/τ for the time scale τ of each head."""
        cfg = self.config
        if cfg.gate == "full":
            return torch.zeros(self.heads)
        log_range = math.log(cfg.min_timescale), math.log(cfg.max_timescale)
        timescales = torch.linspace(*log_range, self.heads, dtype=torch.float64).exp()
        return -(1 / timescales).expm1().log().float()

    def log_bias_formulas(self) -> list[str] | None:
        """Return -n·|ln f| of each head, or None if f depends on the input."""
        if self.config.gate == "full":
            return None
        rates = -F.logsigmoid(self.bias.detach().double())
        return [f"-{exact_fraction(rate)}*n" for rate in rates.tolist()]

    @torch.no_grad()
    def bias_profile(self, n: int) -> Tensor:
        """Return the log-bias (H, n) over distances 0 … n-1 if f does not depend on the input."""
        if self.config.gate == "full":
            return super().bias_profile(n)
        return F.logsigmoid(self.bias.double())[:, None] * torch.arange(n, device=self.bias.device)

    def token_features(self, x: Tensor) -> Tensor:
        """Return the logits (B, H, n, 1) of the gates from a layer's input x (B, n, C)."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        bias = self.bias.to(x.dtype).expand(*x.shape[:2], -1)
        logits = bias if self.project is None else F.linear(x, self.project.weight.to(x.dtype)) + bias
        return logits.transpose(1, 2)[..., None]  # (B, n, H) -> (B, H, n, 1)

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, features: Tensor | None) -> Bias:
        """Return c_i - c_j from the gates' logits ``features`` (B, H, m, 1)."""
        assert features is not None
        log_gate = F.logsigmoid(features[..., 0].double())  # (B, H, m)
        # positions do not increase at padding, which must not forget
        padding = pos.k.diff(dim=1, prepend=pos.k[:, :1] - 1) <= 0  # (B or 1, m)
        total = log_gate.masked_fill(padding[:, None], 0.0).cumsum(2)  # c_i, (B, H, m)
        return TokenBias(total[:, :, -q.shape[2] :], -total)

    def logged_scalars(self) -> dict[str, Tensor]:
        """Return the time scales (H,) if they do not depend on the input."""
        return {} if self.config.gate == "full" else {"time": -1 / F.logsigmoid(self.bias)}
