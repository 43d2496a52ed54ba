"""The Forgetting Transformer: each token says how much of the past is kept."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import Bias, Positions, TokenBias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import exact
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.base import Encoding, register


@register("forgetting")
class Forgetting(Encoding):
    """bias_ij = Σ_(l=j+1…i) ln f_l, f_l = σ(w·x_l + b) of each head, x_l the layer's input; 0 at j = i, never above.

    With c_i = Σ_(l<=i) ln f_l it is c_i - c_j: a number per token. ALiBi is the case of constant f, ln f = -slope.
    ``gate=bias`` leaves w·x out, ``gate=fixed`` also learns no b; b then starts so that heads forget at times
    -1/ln f from ``shortest`` to ``longest`` tokens, evenly in the logarithm. Sums are float64.
    """

    @dataclass(frozen=True)
    class Config:
        gate: str = option(
            "full", "what decides f: the input, a learned b or a fixed b", choices=("full", "bias", "fixed")
        )
        shortest: float = option(2.0, "gate=bias, fixed: time of the first head, tokens", above=0)
        longest: float = option(256.0, "gate=bias, fixed: time of the last head, tokens", above=0)

    formula = "c_i - c_j,  c_i = Σ_(l<=i) ln σ(w·x_l + b)"
    paper = "Lin et al. 2025 (arXiv 2503.02130)"
    sharing_modes = ("layer", "model")
    position_type = "none"
    dependence = (
        "Σ exp(bias) is at most 1/(1 - f) where no f of a text is above f < 1, and grows with the text as f nears 1"
    )

    def setup(self) -> None:
        cfg = self.config
        given = [name for name in ("shortest", "longest") if getattr(cfg, name) != getattr(type(cfg)(), name)]
        if cfg.gate == "full" and given:
            raise UserError(f"'forgetting:gate=full' does not read {given[0]}: leave it out or choose another gate")
        if cfg.shortest > cfg.longest:
            raise UserError(f"'forgetting': shortest={cfg.shortest:g} is more than longest={cfg.longest:g}")
        self.project = nn.Linear(self.width, self.heads, bias=False) if cfg.gate == "full" else None
        if self.project is not None:
            nn.init.normal_(self.project.weight, std=0.02)
        ends = math.log(cfg.shortest), math.log(cfg.longest)
        times = torch.linspace(ends[0], ends[1], self.heads, dtype=torch.float64).exp()
        start = torch.zeros(self.heads) if cfg.gate == "full" else -(1 / times).expm1().log().float()
        self.bias = nn.Parameter(start, requires_grad=cfg.gate != "fixed")

    def log_bias_formulas(self) -> list[str] | None:
        """-n·|ln f| of each head where f is no matter of the input."""
        if self.config.gate == "full":
            return None
        rates = -F.logsigmoid(self.bias.detach().double())
        return [f"-{exact(rate)}*n" for rate in rates.tolist()]

    @torch.no_grad()
    def bias_profile(self, n: int) -> Tensor:
        if self.config.gate == "full":
            return super().bias_profile(n)
        return F.logsigmoid(self.bias.double())[:, None] * torch.arange(n, device=self.bias.device)

    def token_features(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        bias = self.bias.to(x.dtype).expand(*x.shape[:2], -1)
        logits = bias if self.project is None else F.linear(x, self.project.weight.to(x.dtype)) + bias
        return logits.transpose(1, 2)[..., None]

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, notes: Tensor | None) -> Bias:
        assert notes is not None
        kept = F.logsigmoid(notes[..., 0].double())
        padding = pos.k.diff(dim=1, prepend=pos.k[:, :1] - 1) <= 0  # does not count, and so does not forget
        total = kept.masked_fill(padding[:, None], 0.0).cumsum(2)
        return TokenBias(total[:, :, -q.shape[2] :], -total)

    def logged_scalars(self) -> dict[str, Tensor]:
        return {} if self.config.gate == "full" else {"time": -1 / F.logsigmoid(self.bias)}
