"""Wall attention: each element of q·k decays by its own gates of the tokens between key and query."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.score_product import ScoreProduct
from fairseq_rpe.core.spec import option
from fairseq_rpe.core.tensors import wide_linear
from fairseq_rpe.encodings.base import register
from fairseq_rpe.encodings.forgetting_transformer import repeated_positions
from fairseq_rpe.encodings.gated_product import GatedProduct, init_linear

PAIRS = 8  # tokens of a block whose products are summed element by element


@register("wall", colour="orange", marker="s")
class Wall(GatedProduct):
    """Wall attention (Tilde Research 2026): score = Σ_e q_ie k_je exp(P_ie - P_je) / sqrt(D).

    P_i = Σ_(l≤i) ln σ(W x_l + b) has D elements per head, from the layer's inputs x_l (C,). Element e of a key is
    multiplied by the gates σ of the tokens after it, up to the query's token. W is initialised with standard deviation
    0.02 and b with ``init``: gates of σ(8) = 0.99966, which decay by 1/e over about 3,000 tokens. With gates of 1 the
    score is q·k. Gates multiply scores, so the score of a key that is forgotten is 0, and the key keeps weight; the
    gates of ``forgetting`` are added to scores, without a lower bound.

    With ``gate=forget`` the bias of the Forgetting Transformer is added, Σ_(l=j+1…i) ln σ(g·x_l) per head.
    """

    @dataclass(frozen=True)
    class Config:
        """Options of ``wall``."""

        init: float = option(8.0, "initial b, the logit of a gate", minimum=-50, maximum=50)
        gate: str = option("none", "forget: add the bias of forget gates", choices=("none", "forget"))

    formula = "Σ_e q_ie k_je exp(P_ie - P_je)/√D,  P_i = Σ_(l≤i) ln σ(W x_l + b)"
    paper = "Tilde Research 2026 (Wall attention)"
    bounded_reason = "gates are at most 1, so |score| ≤ Σ |q_e k_e|/√D, bounded for bounded q and k"

    def setup(self) -> None:
        """Create the parameters."""
        self.project = nn.Linear(self.width, self.width)
        nn.init.normal_(self.project.weight, std=0.02)
        nn.init.constant_(self.project.bias, self.config.init)
        self.create_gate()
        if self.gate is not None:
            init_linear(self.gate)

    def token_features(self, x: Tensor) -> Tensor:
        """Return the logits of the gates, (B, H, n, D or D + 1), of a layer's input x (B, n, C)."""
        logits = wide_linear(self.project, x).unflatten(2, (self.heads, -1))  # (B, n, H, D)
        if self.gate is not None:
            logits = torch.cat([logits, wide_linear(self.gate, x)[..., None]], dim=-1)
        return logits.transpose(1, 2)

    def score_product(
        self,
        q: Tensor,
        k: Tensor,
        pos: Positions,
        features: Tensor | None,
        padding: Tensor | None,
        key_state: Tensor | None,
    ) -> ScoreProduct:
        """Return the product whose elements decay by the gates of ``features``."""
        assert features is not None
        log_gate = F.logsigmoid(features[..., : q.shape[3]].double())  # (B, H, m, D)
        # only differences count, which float32 would round in a long text
        total = log_gate.masked_fill(repeated_positions(pos)[:, None, :, None], 0.0).cumsum(2)
        return WallProduct(q, k, total)


@dataclass(frozen=True)
class WallProduct(ScoreProduct):
    """Products Σ_e q_ie k_je exp(P_ie - P_je), pair by pair.

    Attributes:
        query: (B, H, n, D), the last n tokens.
        key: (B, H, m, D).
        log_decay: (B, H, m, D) float64, P, which no token raises.
    """

    _tensor_kinds: ClassVar = {"query": "rows", "key": "keys", "log_decay": "keys"}
    query: Tensor
    key: Tensor
    log_decay: Tensor

    def products(self) -> Tensor:
        """Return the products (B, H, n, m), from a tensor of n·m·D numbers."""
        decay = self.log_decay[:, :, -self.query.shape[2] :]
        return _pair_products(self.query, self.key, decay, self.log_decay)

    def prepare_blocks(self) -> "WallBlocks":
        """Return the product with matrix products of decayed queries and keys."""
        return WallBlocks(self.query, self.key, self.log_decay)


class WallBlocks(WallProduct):
    """The products of :class:`WallProduct` in a block of queries.

    For keys before the token a, and queries from it on, P_i - P_j = (P_i - P_a) + (P_a - P_j). Both differences are at
    most 0, so no exponential overflows, and one that underflows belongs to a product that does.
    """

    def products(self) -> Tensor:
        """Return the products (B, H, n, m): with the keys before the first query, and among the last n tokens."""
        n, m = self.query.shape[2], self.key.shape[2]
        before = m - n
        decay = self.log_decay[:, :, before:]
        far = _far_products(self.query, self.key[:, :, :before], decay, self.log_decay[:, :, :before])
        return torch.cat([far, _near_products(self.query, self.key[:, :, before:], decay)], dim=3)


def _pair_products(q: Tensor, k: Tensor, q_decay: Tensor, k_decay: Tensor) -> Tensor:
    """Return Σ_e q_ie k_je exp(min(P_ie - P_je, 0)), (…, n, m), of q (…, n, D) and k (…, m, D) with their P."""
    exponent = (q_decay[..., :, None, :] - k_decay[..., None, :, :]).clamp(max=0.0).to(q.dtype)  # (…, n, m, D)
    return torch.einsum("...id,...jd,...ijd->...ij", q, k, exponent.exp())


def _far_products(q: Tensor, k: Tensor, q_decay: Tensor, k_decay: Tensor) -> Tensor:
    """Return the products (…, n, m) of queries q (…, n, D) with keys k (…, m, D) that are all before them."""
    anchor = q_decay[..., :1, :]  # P of the first query
    q = q * (q_decay - anchor).to(q.dtype).exp()
    k = k * (anchor - k_decay).to(k.dtype).exp()
    return q @ k.mT


def _near_products(q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """Return the products (B, H, n, n) of n queries and the keys of the same tokens, 0 or arbitrary for later keys.

    Blocks of a few tokens are summed element by element. Two neighbouring blocks are then joined to one of twice their
    size, with the products of the second one's queries and the first one's keys, until one block is left.
    """
    n = q.shape[2]
    size = min(PAIRS, n)
    blocks = 1 << (-(-n // size) - 1).bit_length()
    missing = blocks * size - n
    q, k = (F.pad(x, (0, 0, 0, missing)) for x in (q, k))
    if missing:
        decay = torch.cat([decay, decay[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)
    q, k, decay = (x.unflatten(2, (blocks, size)) for x in (q, k, decay))  # (B, H, blocks, size, D)
    products = _pair_products(q, k, decay, decay)  # (B, H, blocks, size, size)
    while blocks > 1:
        q, k, decay = (x.unflatten(2, (blocks // 2, 2)) for x in (q, k, decay))  # (B, H, blocks / 2, 2, size, D)
        below = _far_products(q[:, :, :, 1], k[:, :, :, 0], decay[:, :, :, 1], decay[:, :, :, 0])
        first, second = products.unflatten(2, (blocks // 2, 2)).unbind(3)  # (B, H, blocks / 2, size, size) each
        upper = F.pad(first, (0, size))
        products = torch.cat([upper, torch.cat([below, second], dim=4)], dim=3)
        q, k, decay = (x.flatten(3, 4) for x in (q, k, decay))  # (B, H, blocks / 2, 2·size, D)
        blocks, size = blocks // 2, 2 * size
    return products[:, :, 0, :n, :n]
