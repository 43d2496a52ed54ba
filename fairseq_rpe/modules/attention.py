"""Self-attention of the fairseq decoder layer, with any encoding and any backend."""

import torch
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor

from ..attention import Plan
from ..attention.layer import carry_out


class RPEAttention(MultiheadAttention):
    """fairseq's multi-head self-attention with the product replaced; parameters keep their names.

    The plan arrives as ``attn_mask``: fairseq's layer passes it through unread, in training and in decoding. The cache
    holds raw keys; they are rotated on read, so that length-dependent rotations stay right.
    """

    def forward(
        self, query: Tensor, key, value, *, incremental_state=None, need_weights=True, attn_mask=None, **others
    ) -> tuple[Tensor, None]:
        """query (n, B, C) -> (n, B, C). Attention weights are never returned."""
        if not isinstance(attn_mask, Plan):
            raise TypeError("RPEAttention takes its positions, bias and padding from a Plan passed as attn_mask")
        if any(asked is not None and asked is not False for asked in (need_weights, *others.values())):
            raise NotImplementedError("RPEAttention returns no weights or scores and takes padding from its plan")
        plan, (n, batch, width) = attn_mask, query.shape
        q, k, v = (
            project(query).view(n, batch, self.num_heads, self.head_dim).permute(1, 2, 0, 3)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if incremental_state is not None:
            cache = self._get_input_buffer(incremental_state)
            if "prev_key" in cache:
                k = torch.cat([cache["prev_key"], k], dim=2)
                v = torch.cat([cache["prev_value"], v], dim=2)
            self._set_input_buffer(incremental_state, {"prev_key": k, "prev_value": v})
        dropout = self.dropout_module.p if self.training or self.dropout_module.apply_during_inference else 0.0
        out = carry_out(q, k, v, plan, dropout)
        return self.out_proj(out.permute(2, 0, 1, 3).reshape(n, batch, width)), None


class RPEDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with :class:`RPEAttention`; ``index`` is its place in the full stack."""

    index: int

    def build_self_attention(self, embed_dim, cfg, **bias):
        options = {"dropout": cfg.attention_dropout, "self_attention": True, **bias}
        noise = {"q_noise": self.quant_noise, "qn_block_size": self.quant_noise_block_size}
        return RPEAttention(embed_dim, cfg.decoder.attention_heads, **options, **noise)
