"""GRAPE-A: ALiBi with learned slopes that a gate of each key, of each query, or of both multiplies."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.bias import Bias, DenseBias, QueryKeyTableBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import option
from fairseq_rpe.encodings.alibi import slopes
from fairseq_rpe.encodings.base import Encoding, count_distances, is_sparse, register


@register("grape_a", colour="vermilion", marker=">")
class GrapeAdditive(Encoding):
    """Additive GRAPE (Zhang et al. 2025, arXiv 2512.07805): bias_ij = -ω_h·g_ij·(i - j) with gates g_ij > 0.

    g_ij is softplus(û_h·k_j/sqrt(D)) with ``gate=key``, softplus(v̂_h·q_i/sqrt(D)) with ``gate=query``, and the sum of
    both with ``gate=both``. ω_h = softplus(a_h)·m_h has ALiBi's slope m_h as its initial value. u and v (H, D) are
    learned for each query head and start as N(0, 1)/sqrt(D); û = u/‖u‖, or u with ``unit_vectors=false``. Gates start
    near softplus(0) = ln 2, so the encoding starts near ALiBi with slopes of 0.69·m_h.

    The docstring of the authors' code leaves out 1/sqrt(D) and m_h; their code has both, and so has this. Their models
    normalise queries and keys of each head (``--qk-norm head``), which bounds the gates; gates read normalised q and k.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``grape_a``."""

        gate: str = option("key", "what the slope is a function of", choices=("key", "query", "both"))
        unit_vectors: bool = option(True, "divide u and v by their norms")

    formula = "-ω_h·g·(i - j),  g = softplus(û_h·k_j/√D), softplus(v̂_h·q_i/√D) or their sum,  ω > 0, u, v learned"
    paper = "Zhang et al. 2025 (arXiv 2512.07805)"
    family = "bias that depends on the content"
    sharing_modes = ("layer", "model")
    reads_normalised = True
    dependence = (
        "Σ exp(bias) is at most 1/(1 - exp(-ω·g)) where no gate of a text is below g > 0: it converges for queries and "
        "keys of bounded norm, at no rate that holds for all"
    )

    def setup(self) -> None:
        """Create the parameters."""
        head = self.width // self.heads
        gate = self.config.gate
        self.raw_slope = nn.Parameter(torch.full((self.heads,), math.log(math.e - 1)))  # softplus of it is 1
        self.u = nn.Parameter(torch.randn(self.heads, head) * head**-0.5) if gate != "query" else None
        self.v = nn.Parameter(torch.randn(self.heads, head) * head**-0.5) if gate != "key" else None

    def slope(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ω (H,)."""
        return F.softplus(self.raw_slope.to(dtype)) * slopes(self.heads, dtype, self.raw_slope.device)

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, features: Tensor | None) -> Bias:
        """Return -ω·g·d of queries (B, H, n, D) and keys (B, H, m, D)."""
        slope = self.slope(q.dtype)[:, None, None]  # (H, 1, 1)
        # the gate of a pair is the product of these two vectors: g_k·1, 1·g_q, or g_k·1 + 1·g_q
        query, key = slope.expand(*q.shape[:3], 1), k.new_ones(1).expand(*k.shape[:3], 1)
        if self.v is not None:
            query_gate = slope * self._gate(q, self.v)  # (B, H, n, 1)
            query = query_gate if self.u is None else torch.cat([query, query_gate], dim=-1)  # (B, H, n, 1 or 2)
        if self.u is not None:
            key_gate = self._gate(k, self.u)  # (B, H, m, 1)
            key = key_gate if self.v is None else torch.cat([key_gate, key], dim=-1)  # (B, H, m, 1 or 2)
        if pos.step is None or is_sparse(pos, distances := count_distances(pos, pos.step)):
            d = (pos.q[:, None, :, None] - pos.k[:, None, None]).clamp_min(0).to(q.dtype)  # (B or 1, 1, n, m)
            return DenseBias(-d * torch.matmul(query, key.mT))
        d = torch.arange(distances, device=q.device, dtype=q.dtype) * pos.step
        return QueryKeyTableBias(query, key, -d[None, :, None], step=pos.step)

    def _gate(self, x: Tensor, vector: Tensor) -> Tensor:
        """Return the gates (B, H, n, 1) of queries or keys x (B, H, n, D) with u or v (H, D)."""
        vector = vector.to(x.dtype)
        if self.config.unit_vectors:
            vector = F.normalize(vector, dim=-1)
        return F.softplus(torch.matmul(x, vector[:, :, None]) * x.shape[-1] ** -0.5)

    def logged_scalars(self) -> dict[str, Tensor]:
        """Return the slopes ω (H,)."""
        return {"slope": self.slope()}
