"""Forgetting Transformer (FoX): a forget gate of each token, or of each pair, decays the scores of earlier tokens."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import Bias, PairGateBias, TokenBias
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

    ``init`` is the initial b of ``gate=full``. ``init=5``, gates of 0.9933, is data-dependent ALiBi as in the library
    x-transformers. CABLE (Veisi et al. 2025, arXiv 2503.08067) with the bias -softplus(w·x + b) of a token is the same
    encoding with the signs of w and b exchanged.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``forgetting``."""

        gate: str = option(
            "full", "f depends on the input, on a learned b or on a fixed b", choices=("full", "bias", "fixed")
        )
        init: float = option(0.0, "gate=full: initial b; 5: data-dependent ALiBi of x-transformers")
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
        ineffective = ("min_timescale", "max_timescale") if cfg.gate == "full" else ("init",)
        changed = [name for name in ineffective if getattr(cfg, name) != getattr(type(cfg)(), name)]
        if changed:
            raise UserError(
                f"'forgetting:gate={cfg.gate}' does not read {changed[0]}: leave it out or choose another gate"
            )
        if cfg.min_timescale > cfg.max_timescale:
            raise UserError(
                f"'forgetting': min_timescale={cfg.min_timescale:g} is more than max_timescale={cfg.max_timescale:g}"
            )
        self.project = nn.Linear(self.width, self.heads, bias=False) if cfg.gate == "full" else None
        if self.project is not None:
            nn.init.normal_(self.project.weight, std=0.02)
        self.bias = nn.Parameter(self._initial_bias(), requires_grad=cfg.gate != "fixed")

    def _initial_bias(self) -> Tensor:
        """Return b (H,): ``init`` with ``gate=full``, else such that ln σ(b) = -1/τ for the time scale τ of a head."""
        cfg = self.config
        if cfg.gate == "full":
            return torch.full((self.heads,), cfg.init)
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
        return forget_gate_bias(features[..., 0], pos, q.shape[2])

    def logged_scalars(self) -> dict[str, Tensor]:
        """Return the time scales (H,) if they do not depend on the input."""
        return {} if self.config.gate == "full" else {"time": -1 / F.logsigmoid(self.bias)}


@register("pairwise_forgetting", colour="vermilion", marker="<")
class PairwiseForgetting(Encoding):
    """Forget gates of pairs of tokens: bias_ij = Σ_(l=j…i-1) ln σ(q'_i·k'_l/sqrt(E)), q' = W_q x, k' = W_k x per head.

    It is ``PerRowDataDependentAlibi`` of the library x-transformers. x (C,) is the layer's input, and q' and k' have
    E = ``gate_width`` elements. Query i reads the gate of every token l from key j on, without its own; ``forgetting``
    has one gate of a token for all queries, and its sum is over l = j+1 … i. Gates start near one half.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``pairwise_forgetting``."""

        gate_width: int = option(8, "E, elements of the vectors of a gate", minimum=1, maximum=1 << 12)

    formula = "Σ_(l=j…i-1) ln σ(q'_i·k'_l/√E),  q' = W_q x, k' = W_k x learned"
    paper = "x-transformers (PerRowDataDependentAlibi); after Lin et al. 2025 (arXiv 2503.02130)"
    family = "bias that depends on the content"
    sharing_modes = ("layer", "model")
    position_type = "none"
    dependence = (
        "Σ exp(bias) is at most 1/(1 - f) where no gate of a text is above f < 1, and grows with the text as f nears 1"
    )

    def setup(self) -> None:
        """Create the parameters."""
        self.project = nn.Linear(self.width, 2 * self.heads * self.config.gate_width, bias=False)

    def token_features(self, x: Tensor) -> Tensor:
        """Return q' and k' (B, H, n, 2E) of a layer's input x (B, n, C)."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        vectors = F.linear(x, self.project.weight.to(x.dtype))  # (B, n, 2·H·E)
        return vectors.unflatten(2, (2, self.heads, -1)).permute(0, 3, 1, 2, 4).flatten(3)

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, features: Tensor | None) -> Bias:
        """Return the sums of ln σ(q'·k'/sqrt(E)) from q' and k' of all tokens, ``features`` (B, H, m, 2E)."""
        assert features is not None
        queries, keys = features.chunk(2, dim=-1)  # (B, H, m, E) each
        repeated = repeated_positions(pos)[:, None].expand(keys.shape[:3])  # (B, H, m)
        return PairGateBias(queries[:, :, -q.shape[2] :] * self.config.gate_width**-0.5, keys, repeated)


def forget_gate_bias(logits: Tensor, pos: Positions, n: int) -> TokenBias:
    """Return the bias Σ_(l=j+1…i) ln σ(logit_l) of the last n of m tokens as queries.

    Args:
        logits: (B, H, m) logits of the gates of all tokens.
        pos: positions of the tokens.
        n: number of queries.
    """
    log_gate = F.logsigmoid(logits.double())  # (B, H, m)
    total = log_gate.masked_fill(repeated_positions(pos)[:, None], 0.0).cumsum(2)  # c_i, (B, H, m)
    return TokenBias(total[:, :, -n:], -total)


def repeated_positions(pos: Positions) -> Tensor:
    """Return (B or 1, m) bool, True where the position is not above that of the token before.

    Such a token is padding, whose gate must not count for keys before it, or the first of a row or document, which has
    no such keys.
    """
    return pos.k.diff(dim=1, prepend=pos.k[:, :1] - 1) <= 0
