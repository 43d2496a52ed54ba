"""Attention function and mask that are registered with Hugging Face transformers.

In a forward pass transformers first asks for a mask, which here is a :class:`CausalMask`: the number of queries and
keys, and the padding. It passes this object to the attention of each layer. The first layer resolves positions, and
each layer builds, or shares, the attention plan of its encoding and runs it.
"""

from typing import Any

from fairseq_rpe.adapters import _require_transformers  # noqa: F401

# isort: split

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from fairseq_rpe.attention import AttentionPlan, Backend
from fairseq_rpe.attention.forward import build_plan, positions_from_padding, run_attention
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.positions.position_transforms import PositionTransforms

NAME = "fairseq_rpe"  # name of this attention in transformers
# model types whose own rotation and ``rope`` were compared layer by layer
MODEL_TYPES = ("gpt_neox", "llama", "gemma", "mistral", "olmo", "olmo2", "qwen2", "qwen3", "stablelm", "starcoder2")
_UNSUPPORTED = {
    "sliding_window": "a sliding window",
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "position_bias": "a bias of its own",
    "cache": "a paged cache",
    "cu_seq_lens_q": "packed texts",
    "cu_seq_lens_k": "packed texts",
    "seq_idx": "packed texts",
}


class EncodingAdapter(nn.Module):
    """Submodule of a model with its encodings and position transforms.

    Its parameters are in the model's ``parameters()`` and ``state_dict()`` and move with the model, but they stay in
    float32.

    Args:
        encodings: one encoding for all layers, or one per layer.
        spec: spec of the encodings.
        position_transforms: transforms in training and evaluation.
        positions: spec of the transform in evaluation; None if there is none.
        backend: attention backend.
    """

    undo: tuple[Any, ...]  # rotation, attention and hooks that ``use_encoding`` replaced
    ids: Tensor | None = None  # (B, n) token ids of the current forward pass, if it was called with ids

    def __init__(
        self,
        encodings: list[Encoding],
        spec: str,
        position_transforms: PositionTransforms,
        positions: str | None,
        backend: Backend,
    ) -> None:
        super().__init__()
        self.encodings = nn.ModuleList(encodings)
        self.spec, self.position_transforms, self.positions = spec, position_transforms, positions
        self.backend = backend
        self.length_dependent = any(e.length_dependent for e in encodings)

    def layer_encoding(self, layer: int) -> Encoding:
        """Return the encoding of a layer, counted from 0."""
        return self.encodings[layer if len(self.encodings) > 1 else 0]

    def extra_repr(self) -> str:
        """Return the spec for ``print(model)``."""
        return self.spec


class CausalMask:
    """Queries and keys of one forward pass, passed to layers instead of transformers' mask.

    The n queries are the last of m tokens. The first layer resolves positions; layers that share an encoding share its
    plan, unless they are recomputed for the backward pass.

    Args:
        n: number of queries.
        m: number of keys.
        rows: rows of the batch, B.
        padding: (B, m) bool, True at padding; None without padding.
        device: device of the positions.

    Attributes:
        positions: positions of this pass; None before the first layer.
        attention_padding: (B, m) padding that attention must mask, or None.
        shared: whether layers share plans. False if they are recomputed for the backward pass.
        plans: plans by id of the encoding and whether gradients are enabled.
    """

    def __init__(self, n: int, m: int, rows: int, padding: Tensor | None, device: torch.device) -> None:
        self.n, self.m, self.rows, self.padding, self.device = n, m, rows, padding, device
        self.positions: Positions | None = None
        self.attention_padding: Tensor | None = None
        self.shared = True
        self.plans: dict[tuple[int, bool], AttentionPlan] = {}

    def resolve_positions(
        self, adapter: EncodingAdapter, position_ids: Tensor | None, training: bool, dtype: torch.dtype
    ) -> Positions:
        """Return the positions of this forward pass, computed on the first call.

        Args:
            adapter: the encodings and position transforms of the model.
            position_ids: (B or 1, n) positions that transformers computed, which must count each row from its start;
                or None.
            training: whether the layer is in training mode.
            dtype: dtype of the hidden states; positions are float32 or wider.

        Raises:
            UserError: ``position_ids`` are others, or positions are random and the pass continues a KV cache.
        """
        if self.positions is not None:
            return self.positions
        dtype = torch.promote_types(dtype, torch.float32)
        plain = Positions.arange(self.n, self.m, device=self.device, dtype=dtype)
        if self.padding is None:
            positions, self.attention_padding = plain, None
        else:
            positions, self.attention_padding = positions_from_padding(
                self.padding, self.n, adapter.length_dependent, dtype
            )
        if position_ids is not None:
            self._check_position_ids(position_ids.to(self.device), plain.q)
        if adapter.position_transforms.active(training) is not None:
            lengths = torch.as_tensor(self.m if self.padding is None else (~self.padding).sum(1).cpu())
            rows = self._token_rows(adapter.ids)
            positions = adapter.position_transforms(
                positions, lengths.expand(self.rows), training, decoding=self.n < self.m, rows=rows
            )
        self.positions = positions
        return positions

    def _token_rows(self, ids: Tensor | None) -> list[Tensor]:
        """Return the token ids of each row without padding; an empty list if the ids are unknown."""
        if ids is None or ids.shape != (self.rows, self.m):
            return []
        if self.padding is None:
            return list(ids.cpu())
        return [row[is_real] for row, is_real in zip(ids.cpu(), ~self.padding.cpu(), strict=True)]

    def _check_position_ids(self, position_ids: Tensor, plain: Tensor) -> None:
        """Raise UserError unless positions count from 0, with or without padding; positions of padding are ignored."""
        if position_ids.dim() != 2 or position_ids.shape[1] != self.n:
            raise UserError(
                f"position_ids of shape {tuple(position_ids.shape)}, where {self.n} tokens came: leave them out"
            )
        if self.padding is None:
            is_valid = bool((position_ids == plain).all())
        else:
            is_padding = self.padding[:, self.m - self.n :]  # (B, n), of the queries
            without_padding = (torch.cumsum(~self.padding, 1) - 1)[:, self.m - self.n :]
            is_valid = any(
                bool(((position_ids == expected) | is_padding).all()) for expected in (plain, without_padding)
            )
        if is_valid:
            return
        raise UserError(
            "position_ids are not those of one text a row from its start, as in packed texts: leave them out, and give "
            "attention_mask where there is padding"
        )

    def plan(self, adapter: EncodingAdapter, encoding: Encoding) -> AttentionPlan:
        """Return the attention plan of an encoding, shared by the layers that have it."""
        key = (id(encoding), torch.is_grad_enabled())
        plan = self.plans.get(key)
        if plan is None:
            plan = build_plan(encoding, self.positions, self.attention_padding, adapter.backend)
            if self.shared:
                self.plans[key] = plan
        return plan


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> CausalMask:
    """Return the mask of a forward pass; transformers calls this.

    Args:
        batch_size: rows B of the batch.
        q_length: number of queries n.
        kv_length: number of keys m.
        q_offset: index of the first query, m - n.
        kv_offset: index of the first key, which must be 0.
        mask_function: must be transformers' causal mask.
        attention_mask: (B, m) bool, True at tokens that are not padding; or None.
        device: device of the mask.

    Raises:
        UserError: the model needs more than causal attention over a growing KV cache.
    """
    if mask_function is not causal_mask_function:
        raise UserError(
            "the model asks for more than a causal mask (a sliding window, packed texts without attention_mask, or "
            "attention both ways), which these encodings do not have: switch it off in its config, or give "
            "attention_mask"
        )
    if isinstance(q_offset, Tensor) or kv_offset or q_offset + q_length != kv_length:
        raise UserError("keys and values lie in a cache of fixed size or of a window: use transformers' DynamicCache")
    padding = None
    if attention_mask is not None:
        if attention_mask.shape != (batch_size, kv_length):
            raise UserError(
                f"attention_mask is of shape {tuple(attention_mask.shape)}, not {(batch_size, kv_length)}: give it for "
                "all tokens, those in the cache included"
            )
        padding = ~attention_mask.to(device=device, dtype=torch.bool)
        padding = padding if bool(padding.any()) else None
    return CausalMask(q_length, kv_length, batch_size, padding, torch.device(device))


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer; transformers calls this.

    Args:
        module: attention module of the model.
        query: (B, H, n, D).
        key: (B, G, m, D), where G divides H.
        value: (B, G, m, D).
        attention_mask: the :class:`CausalMask` of the forward pass.
        scaling: factor of the scores; None: 1/sqrt(D).
        dropout: dropout of attention weights.
        options: further arguments of transformers.

    Returns:
        (B, n, H, D) outputs, and None instead of attention weights.

    Raises:
        UserError: the layer has no encoding, or the model needs an unsupported feature.
    """
    if not isinstance(attention_mask, CausalMask):
        raise UserError(f"attention '{NAME}' got a mask that is not its own: give attention_mask as (batch, tokens)")
    adapter, layer = getattr(module, NAME, (None, 0))
    if adapter is None:
        raise UserError(f"this model was switched to attention '{NAME}' but has no encoding: call use_encoding(model)")
    _check_supported(module, options)
    mask, heads, width = attention_mask, query.shape[1], query.shape[3]
    if (query.shape[2], key.shape[2]) != (mask.n, mask.m):
        raise UserError(
            f"{query.shape[2]} queries and {key.shape[2]} keys, where the pass has {mask.n} and {mask.m}: keys "
            "that are not tokens (prefix tuning) have no positions"
        )
    mask.resolve_positions(adapter, options.get("position_ids"), module.training, value.dtype)
    if heads != key.shape[1]:  # grouped-query attention: (B, G, m, D) -> (B, H, m, D)
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    if scaling is not None and scaling != width**-0.5:  # run_attention multiplies by 1/sqrt(D)
        query = query * (scaling * width**0.5)
    # under autocast, transformers' rotation (now the identity) widens their dtype
    query, key = query.to(value.dtype), key.to(value.dtype)
    plan = mask.plan(adapter, adapter.layer_encoding(layer))
    out = run_attention(query, key, value, plan, dropout)  # (B, H, n, D)
    return out.transpose(1, 2).contiguous(), None


def _check_supported(module: nn.Module, options: dict[str, Any]) -> None:
    """Refuse a layer that asks for more than causal attention with an encoding."""
    for name, what in _UNSUPPORTED.items():
        if options.get(name) is not None:
            raise UserError(f"the model asks for {what} ({name}), which encodings here do not have: switch it off")
    if options.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UserError("the model asks for attention both ways, and encodings here are causal: set is_causal=True")


def check_model_type(model: Any) -> str:
    """Return the type of a model.

    Raises:
        UserError: it is not a model of transformers, or its type is not in :data:`MODEL_TYPES`.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"{type(model).__name__} is not a model of transformers: unwrap it first")
    kind = model.config.model_type
    if kind not in MODEL_TYPES:
        types = ", ".join(MODEL_TYPES)
        raise UserError(
            f"models of type '{kind}' have not been checked{did_you_mean(kind, MODEL_TYPES)}: use one of {types}"
        )
    return kind


class IdentityRotation(nn.Module):
    """Replaces a model's rotation: cosine 1 and sine 0 leave queries and keys unchanged."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return cosine 1 and sine 0, each (1, 1, 1)."""
        return x.new_ones(1, 1, 1), x.new_zeros(1, 1, 1)


def model_pre_hook(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse ``output_attentions``, and remember the token ids, which seed random positions."""
    ids = args[0] if args else kwargs.get("input_ids")
    getattr(base, NAME).ids = ids.detach() if isinstance(ids, Tensor) else None
    wants_weights = kwargs.get("output_attentions")
    if wants_weights or (wants_weights is None and base.config.output_attentions):
        raise UserError("attention weights are never built, so output_attentions has nothing to give: leave it out")


def first_layer_pre_hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Resolve positions, and apply an absolute encoding to the embedded tokens (B, n, C)."""
    adapter = getattr(layer, NAME)[0]
    mask = next((x for x in (*args, *kwargs.values()) if isinstance(x, CausalMask)), None)
    if mask is None:
        raise UserError(
            f"attention '{NAME}' got a mask that is not its own: give attention_mask as (batch, tokens), and leave the "
            "model's attention as use_encoding set it"
        )
    mask.shared = not (layer.training and getattr(layer, "gradient_checkpointing", False))
    states = args[0] if args else kwargs["hidden_states"]
    positions = mask.resolve_positions(adapter, kwargs.get("position_ids"), layer.training, states.dtype)
    encoding = adapter.encodings[0]
    if not encoding.embeds:
        return None
    if args:
        return (encoding.embed(args[0], positions), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": encoding.embed(kwargs["hidden_states"], positions)}


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, make_mask)
