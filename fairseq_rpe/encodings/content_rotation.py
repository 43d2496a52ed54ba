"""Rotations of queries and keys by angles to which each token of the text adds an angle of its own."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.score_product import VectorProduct
from fairseq_rpe.core.spec import option
from fairseq_rpe.core.tensors import wide_linear
from fairseq_rpe.encodings.base import Encoding, register
from fairseq_rpe.encodings.forgetting_transformer import repeated_positions
from fairseq_rpe.encodings.text_convolution import convolve_texts, random_taps


class ContentRotation(Encoding):
    """Base class of rotations by angles that depend on the tokens. Implement ``angles``.

    Pairs (s, s + P) of a head's D = 2P elements are rotated, as in RoPE: a query by the angles of its own token, and a
    key by those of its own. Scores depend on differences of angles, which do not change if a text is moved.
    """

    family = "rotation of queries and keys (RoPE)"
    sharing_modes = ("layer", "model")
    position_type = "none"
    bounded_reason = "rotated queries and keys of bounded norm have bounded scores"
    has_vector_product = True

    def setup(self) -> None:
        """Set ``pairs``, the number of pairs P.

        Raises:
            UserError: heads have an odd number of elements.
        """
        head = self.width // self.heads
        if head % 2:
            raise UserError(
                f"a rotary encoding rotates pairs: heads must have an even number of elements, not {head} "
                f"(width {self.width}, {self.heads} heads): choose another width or number of heads"
            )
        self.pairs = head // 2

    def frequencies(self, device: torch.device) -> Tensor:
        """Return θ_s = base^(-2s/D), (P,) in float64."""
        s = torch.arange(self.pairs, device=device, dtype=torch.float64)
        return torch.as_tensor(self.config.base, device=device, dtype=torch.float64) ** (-s / self.pairs)

    def angles(self, features: Tensor, begins: Tensor, padding: Tensor | None) -> Tensor:
        """Return the angles (B, H or 1, m, P) of m tokens, in radians and in float64.

        Args:
            features: (B, H, m, E) of ``token_features``.
            begins: (B or 1, m) bool, True at the first token of each text, and at padding before it.
            padding: (B, m) bool, True at padding, which adds no angle, or None.
        """
        raise NotImplementedError

    def score_product(
        self,
        q: Tensor,
        k: Tensor,
        pos: Positions,
        features: Tensor | None,
        padding: Tensor | None,
        key_state: Tensor | None,
    ) -> VectorProduct:
        """Return the product of queries and keys rotated by ``angles``."""
        assert features is not None
        # in float64 within one turn: float32 would round the sum over a long text
        angles = self.angles(features, repeated_positions(pos), padding).remainder(2 * math.pi).to(k.dtype)
        cos, sin = angles.cos(), angles.sin()  # (B, H or 1, m, P)
        n = q.shape[2]
        return VectorProduct(_rotate(q, cos[:, :, -n:], sin[:, :, -n:]), _rotate(k, cos, sin))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (s, s + P) of x (B, H, n, 2P) by angles with these cosines and sines (B, H or 1, n, P)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@register("selective_rope", colour="pink", marker="o")
class SelectiveRope(ContentRotation):
    """Selective RoPE (Movahedi et al. 2025, arXiv 2511.17388): token t adds its own angles φ_t to those before it.

    Pair s of head h is rotated by θ_s·Σ_(u≤t) φ_uhs with θ_s = base^(-2s/D) and φ = conv(W_2 W_1 x̂). x̂ is the layer's
    input x (C,), divided into one part per head, each of which is divided by its norm. W_1 has ``rank`` rows, and the
    causal convolution, which has coefficients of each head and pair, covers the last ``conv`` tokens of the text.
    ``rank=0`` computes φ of a head from its own part of x̂, by a matrix with columns of norm 1 times a learned factor.

    ``offset=true`` adds exp(b_hs) to φ, with b = 0 at the start: with W_2 = 0 this is RoPE. ``gate=true`` then
    multiplies φ by σ(g·x̂ + g_0) of each head. The names of these options in the code of the paper are ``use_bias`` and
    ``use_gate``; its gates per pair and its other sequences of θ are left out.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``selective_rope``."""

        base: float = option(500000.0, "b in θ_s = b^(-2s/D)", above=1)
        rank: int = option(16, "rows of W_1; 0: a matrix for each head's part of the input", minimum=0, maximum=1 << 16)
        conv: int = option(4, "tokens of the convolution", minimum=1, maximum=64)
        offset: bool = option(False, "add a learned positive angle to that of each token")
        gate: bool = option(False, "multiply the angles of a token by a gate for each head")

    formula = "R(Φ_i)q · R(Φ_j)k/√D,  Φ_t = θ_s·Σ_(u≤t) φ_u,  φ = conv(W_2 W_1 x̂),  θ_s = b^(-2s/D)"
    paper = "Movahedi et al. 2025 (arXiv 2511.17388)"

    def setup(self) -> None:
        """Create the parameters."""
        super().setup()
        cfg = self.config
        self.down: nn.Linear | None = None  # W_1
        self.up: nn.Linear | None = None  # W_2
        if cfg.rank:
            self.down = nn.Linear(self.width, cfg.rank, bias=False)
            self.up = nn.Linear(cfg.rank, self.heads * self.pairs, bias=False)
        else:
            self.head_weight = nn.Parameter(torch.empty(self.heads, 2 * self.pairs, self.pairs))
            nn.init.normal_(self.head_weight)  # only the direction of each column counts
            self.head_factor = nn.Parameter(torch.ones(self.heads))
        self.conv = nn.Parameter(random_taps(self.heads * self.pairs, cfg.conv))
        self.offset = nn.Parameter(torch.zeros(self.heads, self.pairs)) if cfg.offset else None  # b
        self.gate = nn.Linear(self.width, self.heads) if cfg.gate else None

    def token_features(self, x: Tensor) -> Tensor:
        """Return W_2 W_1 x̂ of a layer's input x (B, n, C), and the logit of the gate.

        Returns:
            (B, H, n, P), or (B, H, n, P + 1) with a gate.
        """
        x = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(2, (self.heads, -1))
        x = F.normalize(x, dim=3)  # (B, n, H, D)
        if self.down is not None and self.up is not None:
            phi = wide_linear(self.up, wide_linear(self.down, x.flatten(2))).unflatten(2, (self.heads, -1))
        else:
            weight = self.head_factor[:, None, None] * F.normalize(self.head_weight, dim=1)
            phi = torch.einsum("bnhd,hdp->bnhp", x, weight.to(x.dtype))
        if self.gate is not None:
            phi = torch.cat([phi, wide_linear(self.gate, x.flatten(2))[..., None]], dim=-1)
        return phi.transpose(1, 2)

    def angles(self, features: Tensor, begins: Tensor, padding: Tensor | None) -> Tensor:
        """Return the angles (B, H, m, P) of m tokens, in radians and in float64."""
        taps = self.conv.unflatten(0, (self.heads, self.pairs))
        phi = convolve_texts(features[..., : self.pairs], taps, begins, padding)  # (B, H, m, P)
        if self.offset is not None:
            phi = phi + self.offset.to(phi.dtype).exp()[:, None]
        if self.gate is not None:
            phi = phi * features[..., self.pairs :].sigmoid()
        if padding is not None:
            phi = phi.masked_fill(padding[:, None, :, None], 0.0)
        return phi.cumsum(2, dtype=torch.float64) * self.frequencies(phi.device)


@register("grape_m", colour="pink", marker="s")
class GrapeMultiplicative(ContentRotation):
    """Multiplicative GRAPE with contextual angles (Zhang et al. 2025, arXiv 2512.07805): each token adds a phase ω_t.

    Pair s is rotated by θ_s·Σ_(u<t) ω_u, the phases of the tokens before t. ω_t = σ((w·x_t + b)/16) depends on the
    layer's input x_t, and θ_s = base^(-2s/D)·exp(α_s) is learned. w and α start at 0 and b at -6.9, so that ω starts at
    0.39 for each token, where RoPE has 1. ``per_head=true`` gives each head phases of its own.

    GRAPE-M without context is ``rope:frequencies=learned``. The authors' text has softplus, with ω of 0.001 at the
    start; the sigmoid and the division by 16 are those of their code.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``grape_m``."""

        base: float = option(10000.0, "b in θ_s = b^(-2s/D)", above=1)
        per_head: bool = option(False, "one phase of a token for each head, instead of one for all")

    formula = "R(Φ_i)q · R(Φ_j)k/√D,  Φ_t = θ_s·Σ_(u<t) σ((w·x_u + b)/16),  θ_s = b^(-2s/D)·exp(α_s)"
    paper = "Zhang et al. 2025 (arXiv 2512.07805)"
    _TEMPERATURE: ClassVar[float] = 16.0

    def setup(self) -> None:
        """Create the parameters."""
        super().setup()
        self.project = nn.Linear(self.width, self.heads if self.config.per_head else 1)
        nn.init.zeros_(self.project.weight)
        nn.init.constant_(self.project.bias, math.log(math.expm1(0.001)))
        self.log_frequency_factor = nn.Parameter(torch.zeros(self.pairs))  # α

    def frequencies(self, device: torch.device) -> Tensor:
        """Return θ (P,) in float64, with the gradient of α."""
        return super().frequencies(device) * self.log_frequency_factor.double().exp()

    def token_features(self, x: Tensor) -> Tensor:
        """Return the logits w·x + b, (B, H, n, 1), of a layer's input x (B, n, C)."""
        return wide_linear(self.project, x).transpose(1, 2)[..., None].expand(-1, self.heads, -1, -1)

    def angles(self, features: Tensor, begins: Tensor, padding: Tensor | None) -> Tensor:
        """Return the angles (B, H or 1, m, P) of m tokens, in radians and in float64."""
        features = features if self.config.per_head else features[:, :1]  # all heads have the same
        phase = (features.double() / self._TEMPERATURE).sigmoid()  # (B, H or 1, m, 1)
        if padding is not None:
            phase = phase.masked_fill(padding[:, None, :, None], 0.0)
        return (phase.cumsum(2) - phase) * self.frequencies(phase.device)

    def logged_scalars(self) -> dict[str, Tensor]:
        """Return ω of each head for an input of 0, and for each pair 2π/θ, the sum of phases of a full rotation."""
        bias = self.project.bias.detach()
        wavelengths = 2 * math.pi / self.frequencies(bias.device).detach()
        pairs = {f"wavelength_pair{s}": wavelengths[s] for s in range(self.pairs)}
        return {"phase": (bias / self._TEMPERATURE).sigmoid().expand(self.heads), **pairs}
