"""Self-attention of a decoder layer with any encoding and any attention backend."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fairseq_rpe.attention import AttentionPlan
from fairseq_rpe.attention.forward import compute_token_features, rotate_keys, run_attention
from fairseq_rpe.decoder.cache import LayerCache
from fairseq_rpe.decoder.config import DecoderConfig
from fairseq_rpe.decoder.dropout import Dropout


class SelfAttention(nn.Module):
    """Causal self-attention of H query heads and G key/value heads of width D.

    Query head h reads key/value head h // (H/G). Queries and keys may be normalised (QK-norm) before their rotation:
    each head with one weight (D) for all heads as in Qwen 3, or all heads of a token together as in OLMo 2.

    A KV cache holds rotated keys if the attention plan says so; otherwise keys are rotated on read, so that rotations
    that depend on the length stay correct. It may hold only the last keys, see :class:`.cache.LayerCache`.

    Args:
        config: sizes and blocks of the decoder.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.heads, config.num_kv_heads, config.head_dim
        self.dropout_module = Dropout(config.attention_dropout)
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        # checkpoints and optimizer states depend on the order of these parameters: keys, values, queries, output
        self.k_proj = nn.Linear(config.width, kv_width, bias=config.has_qkv_bias)
        self.v_proj = nn.Linear(config.width, kv_width, bias=config.has_qkv_bias)
        self.q_proj = nn.Linear(config.width, q_width, bias=config.has_qkv_bias)
        self.out_proj = nn.Linear(q_width, config.width, bias=config.has_bias)
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if config.has_bias:
            nn.init.zeros_(self.out_proj.bias)
        self.norms_whole = config.qk_norm == "whole"
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.qk_norm != "none":
            widths = (q_width, kv_width) if self.norms_whole else (self.head_dim, self.head_dim)
            self.q_norm, self.k_norm = (nn.RMSNorm(width, eps=config.norm_eps) for width in widths)

    def forward(self, x: Tensor, plan: AttentionPlan, cache: LayerCache | None = None) -> Tensor:
        """Attend from each token to the tokens up to it.

        Args:
            x: (n, B, C) inputs of the layer.
            plan: attention plan of the layer's encoding.
            cache: KV cache of earlier tokens, to which these are appended, or None.

        Returns:
            (n, B, C).
        """
        n, batch, _ = x.shape
        q = self._project(x, self.q_proj, self.q_norm, self.num_heads)  # (B, H, n, D)
        k = self._project(x, self.k_proj, self.k_norm, self.num_kv_heads)  # (B, G, n, D)
        v = self._project(x, self.v_proj, None, self.num_kv_heads)  # (B, G, n, D)
        features = None if plan.token_features is None else compute_token_features(x.transpose(0, 1), plan)
        if cache is not None:
            k = rotate_keys(k, plan) if plan.keys_rotated else k
            k, v, features = cache.append(k, v, features, plan.cache_window)
            if plan.has_key_state:
                plan = replace(plan, key_state=cache.key_state, store_key_state=cache.set_key_state)
        out = run_attention(q, k, v, plan, self.dropout_module.active_p, features)  # (B, H, n, D)
        return self.out_proj(out.permute(2, 0, 1, 3).reshape(n, batch, -1))

    def _project(self, x: Tensor, projection: nn.Module, norm: nn.Module | None, heads: int) -> Tensor:
        """Return the projected, normalised heads (B, heads, n, D) of x (n, B, C)."""
        n, batch, _ = x.shape
        y: Tensor = projection(x)  # (n, B, heads·D)
        if norm is not None and self.norms_whole:
            y = _norm(norm, y)
        y = y.view(n, batch, heads, self.head_dim)
        if norm is not None and not self.norms_whole:
            y = _norm(norm, y)
        return y.permute(1, 2, 0, 3)


def _norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Return the norm of x in x's dtype, which autocast may have made narrower than that of the norm's weight."""
    wide = torch.promote_types(x.dtype, torch.float32) if torch.is_autocast_enabled(x.device.type) else x.dtype
    y: Tensor = norm(x.to(wide))
    return y.to(x.dtype)
