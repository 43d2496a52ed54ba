"""Self-attention of fairseq's decoder layer with any encoding and any attention backend."""

from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor

from fairseq_rpe.attention import AttentionPlan
from fairseq_rpe.attention.forward import compute_token_features, rotate_keys, run_attention
from fairseq_rpe.attention.kv_cache import append_tokens

# names of cached keys, values and token features in the incremental state; the last only for encodings with features
CACHE_KEYS = ("prev_key", "prev_value", "prev_notes")


class MovableCache(dict[str, Any]):
    """An incremental state whose tokens may get other positions later, e.g. when the oldest tokens are dropped.

    Its keys are cached before the rotation. In any other incremental state keys are cached rotated if the encoding
    allows it (``fixed_rotation``), and then every token must keep its position.
    """


class RPEAttention(MultiheadAttention):
    """fairseq's multi-head self-attention with another attention product; parameters keep their names.

    The attention plan is passed as ``attn_mask``, which fairseq's layer passes on unread in training and in decoding.
    The KV cache holds rotated keys if the plan says so; otherwise keys are rotated on read, so that rotations that
    depend on the length stay correct. Cached tensors have the shapes that fairseq expects and are views of buffers with
    space for more tokens.
    """

    def forward(
        self, query: Tensor, key, value, *, incremental_state=None, need_weights=True, attn_mask=None, **others
    ) -> tuple[Tensor, None]:
        """Attend from each query to the keys up to it.

        Args:
            query: (n, B, C) inputs of the layer.
            key: not read; fairseq passes the same tensor.
            value: not read.
            incremental_state: KV cache of earlier tokens, or None.
            need_weights: must be False.
            attn_mask: the :class:`AttentionPlan` of the encoding.
            others: further arguments of fairseq, which must be None or False.

        Returns:
            (n, B, C) outputs, and None instead of attention weights.
        """
        if not isinstance(attn_mask, AttentionPlan):
            raise TypeError(
                "RPEAttention takes its positions, bias and padding from an AttentionPlan passed as attn_mask"
            )
        if any(option is not None and option is not False for option in (need_weights, *others.values())):
            raise NotImplementedError("RPEAttention returns no weights or scores and takes padding from its plan")
        plan, (n, batch, width) = attn_mask, query.shape
        q, k, v = (  # (B, H, n, D) each
            project(query).view(n, batch, self.num_heads, self.head_dim).permute(1, 2, 0, 3)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        features = compute_token_features(query.transpose(0, 1), plan)
        if incremental_state is not None:
            new_keys = rotate_keys(k, plan) if plan.keys_rotated else k
            k, v, features = self._append_to_cache(incremental_state, new_keys, v, features)
        dropout = self.dropout_module.p if self.training or self.dropout_module.apply_during_inference else 0.0
        out = run_attention(q, k, v, plan, dropout, features)  # (B, H, n, D)
        return self.out_proj(out.permute(2, 0, 1, 3).reshape(n, batch, width)), None

    def _append_to_cache(
        self, state: dict[str, Any], k: Tensor, v: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append keys, values and token features to the cache; return all that it holds now."""
        cache = self._get_input_buffer(state)
        tensors = {name: x for name, x in zip(CACHE_KEYS, (k, v, features), strict=True) if x is not None}
        if "prev_key" in cache:
            buffers = dict(self.get_incremental_state(state, "buffers") or {})
            for name, x in tensors.items():
                tensors[name], buffers[name] = append_tokens(buffers.get(name), cache[name], x)
            self.set_incremental_state(state, "buffers", buffers)
        self._set_input_buffer(state, tensors)
        return tensors["prev_key"], tensors["prev_value"], tensors.get("prev_notes")

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> dict[str, Any]:
        """Select cached rows for beam search, in buffers with space for more tokens.

        Args:
            incremental_state: KV cache of R rows.
            new_order: (R',) int64 rows to keep; a row may be left out or repeated.

        Returns:
            The incremental state.
        """
        cache = self._get_input_buffer(incremental_state)
        buffers = self.get_incremental_state(incremental_state, "buffers") or {}
        names = [name for name in CACHE_KEYS if name in cache]
        if not all(buffers.get(name) is not None and buffers[name].can_append(cache[name], 0) for name in names):
            # there are no buffers yet, as after the prefill, or the cached tensors are not views of them
            return super().reorder_incremental_state(incremental_state, new_order)
        identity = torch.arange(len(cache["prev_key"]))
        if new_order.device.type == "cpu" and torch.equal(new_order, identity):  # a GPU would have to wait
            return incremental_state
        selected, selected_buffers = {}, {}
        for name in names:
            selected[name], selected_buffers[name] = buffers[name].select_rows(new_order)
        self.set_incremental_state(incremental_state, "buffers", selected_buffers)
        return self._set_input_buffer(incremental_state, selected)


class RPEDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with :class:`RPEAttention`.

    Attributes:
        index: index of the layer in the full stack, from 0.
    """

    index: int

    def build_self_attention(self, embed_dim, cfg, **bias):
        """Return the attention module; fairseq calls this."""
        options = {"dropout": cfg.attention_dropout, "self_attention": True, **bias}
        noise = {"q_noise": self.quant_noise, "qn_block_size": self.quant_noise_block_size}
        return RPEAttention(embed_dim, cfg.decoder.attention_heads, **options, **noise)
