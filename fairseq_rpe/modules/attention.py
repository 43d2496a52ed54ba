"""Self-attention of the fairseq decoder layer, with any encoding and any backend."""

from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor

from fairseq_rpe.attention import Plan
from fairseq_rpe.attention.forward import carry_out, noted, turned
from fairseq_rpe.attention.kv_buffer import followed

NAMES = ("prev_key", "prev_value", "prev_notes")  # the last of encodings that take notes


class MovableCache(dict[str, Any]):
    """An incremental state whose tokens may get other positions later, as when the oldest of them are dropped.

    Its keys are never kept turned. In any other dict that fairseq's decoders take as incremental state they are where
    the encoding allows it (``fixed_rotation``), and then every token has to stay at its position.
    """


class RPEAttention(MultiheadAttention):
    """fairseq's multi-head self-attention with the product replaced; parameters keep their names.

    The plan arrives as ``attn_mask``: fairseq's layer passes it through unread, in training and in decoding. The cache
    holds keys that are turned where the plan says so; others are turned on read, so that rotations that depend on the
    length stay right. What fairseq finds in it are tensors as it expects them, views of memory with room for more.
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
        notes = noted(query.transpose(0, 1), plan)
        if incremental_state is not None:
            k, v, notes = self._followed(incremental_state, turned(k, plan) if plan.turned else k, v, notes)
        dropout = self.dropout_module.p if self.training or self.dropout_module.apply_during_inference else 0.0
        out = carry_out(q, k, v, plan, dropout, notes)
        return self.out_proj(out.permute(2, 0, 1, 3).reshape(n, batch, width)), None

    def _followed(
        self, state: dict[str, Any], k: Tensor, v: Tensor, notes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The keys, values and notes so far, these included, which are in the cache from now on."""
        cache = self._get_input_buffer(state)
        new = {name: x for name, x in zip(NAMES, (k, v, notes), strict=True) if x is not None}
        if "prev_key" in cache:
            rooms = self.get_incremental_state(state, "rooms") or {}
            found = {name: followed(rooms.get(name), cache[name], x) for name, x in new.items()}
            new = {name: held for name, (held, _) in found.items()}
            self.set_incremental_state(state, "rooms", {name: room for name, (_, room) in found.items()})
        self._set_input_buffer(state, new)
        return new["prev_key"], new["prev_value"], new.get("prev_notes")

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> dict[str, Any]:
        """The cached rows that beam search goes on with, with room for the tokens to come."""
        cache = self._get_input_buffer(incremental_state)
        rooms = self.get_incremental_state(incremental_state, "rooms") or {}
        held = [name for name in NAMES if name in cache]
        if not all(rooms.get(x) is not None and rooms[x].fits(cache[x], 0) for x in held):
            return super().reorder_incremental_state(incremental_state, new_order)
        same = torch.arange(len(cache["prev_key"]))
        if new_order.device.type == "cpu" and torch.equal(new_order, same):
            return incremental_state
        found = {x: rooms[x].reordered(new_order) for x in held}
        self.set_incremental_state(incremental_state, "rooms", {x: room for x, (_, room) in found.items()})
        return self._set_input_buffer(incremental_state, {x: rows for x, (rows, _) in found.items()})


class RPEDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with :class:`RPEAttention`; ``index`` is its place in the full stack."""

    index: int

    def build_self_attention(self, embed_dim, cfg, **bias):
        options = {"dropout": cfg.attention_dropout, "self_attention": True, **bias}
        noise = {"q_noise": self.quant_noise, "qn_block_size": self.quant_noise_block_size}
        return RPEAttention(embed_dim, cfg.decoder.attention_heads, **options, **noise)
