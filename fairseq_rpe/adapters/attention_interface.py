"""Attention function and mask that are registered with Hugging Face transformers.

In a forward pass transformers first asks for masks, one for each type of layer. Here they are :class:`CausalMask`: the
number of queries and keys, and the padding. It passes one of them to the attention of each layer. The first layer
resolves positions, and each layer builds, or shares, the attention plan of its encoding and runs it.

Windows belong to the encodings, not to the masks. A cache of transformers drops the keys behind the window of the
model's config, so :func:`keep_needed_keys` makes it keep all keys where an encoding reads more.
"""

from dataclasses import dataclass, field, replace
from inspect import getclosurevars
from typing import Any

from fairseq_rpe.adapters import _require_transformers  # noqa: F401

# isort: split

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import and_masks, causal_mask_function, chunked_overlay, sliding_window_overlay

from fairseq_rpe.attention import AttentionPlan, Backend
from fairseq_rpe.attention.forward import build_plan, positions_from_padding, run_attention
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings.model import LayerEncodings
from fairseq_rpe.positions.position_transforms import PositionTransforms

NAME = "fairseq_rpe"  # name of this attention in transformers
# model types whose own attention and its pattern of encodings were compared
MODEL_TYPES = (
    *("gpt_neox", "llama", "gemma", "mistral", "olmo", "olmo2", "qwen2", "qwen3", "stablelm", "starcoder2"),
    *("cohere2", "gemma2", "gemma3_text", "gpt_oss", "granite_swa", "llama4_text", "olmo3", "smollm3"),
)
_UNSUPPORTED = {
    "position_bias": "a bias of its own",
    "cache": "a paged cache",
    "cu_seq_lens_q": "packed texts",
    "cu_seq_lens_k": "packed texts",
    "seq_idx": "packed texts",
}


class EncodingAdapter(nn.Module):
    """Submodule of a model with its encodings and position transforms.

    Its parameters are in the model's ``parameters()`` and ``state_dict()`` and move with the model, but they stay in
    float32. A null logit that a model has itself (attention sinks) is the model's parameter, not the encoding's.

    Args:
        encodings: encodings of the layers.
        spec: spec or pattern of the encodings.
        position_transforms: transforms in training and evaluation.
        positions: spec of the transform in evaluation; None if there is none.
        backend: attention backend.
    """

    undo: tuple[Any, ...]  # rotations, attention and hooks that ``use_encoding`` replaced
    ids: Tensor | None = None  # (B, n) token ids of the current forward pass, if it was called with ids
    forward_pass: "ForwardPass | None" = None  # the current one, from its first layer on

    def __init__(
        self,
        encodings: LayerEncodings,
        spec: str,
        position_transforms: PositionTransforms,
        positions: str | None,
        backend: Backend,
    ) -> None:
        super().__init__()
        self.encodings = encodings
        self.spec, self.position_transforms, self.positions = spec, position_transforms, positions
        self.backend = backend
        self.length_dependent = any(e.length_dependent for e in encodings)
        self.register_state_dict_post_hook(_copy_shared_tensors)

    def layer_encoding(self, layer: int) -> Encoding:
        """Return the encoding of a layer, counted from 0."""
        return self.encodings.layer(layer)

    def reads_only(self, layer: int, keys: int) -> bool:
        """Return whether the queries of a layer read no key that is ``keys`` or more tokens before them."""
        options = self.layer_encoding(layer).attention_options
        has_transform = any(self.position_transforms.active(training) for training in (True, False))
        return options.hides_keys and (options.local or options.block) <= keys and not has_transform

    def extra_repr(self) -> str:
        """Return the spec for ``print(model)``."""
        return self.spec


def _copy_shared_tensors(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    """Replace tensors of a state dict that encodings share by copies, because ``save_pretrained`` refuses them."""
    seen = set()
    for name, value in state.items():
        if name.startswith(prefix) and not value.is_meta and value.numel():
            if value.data_ptr() in seen:
                state[name] = value.clone()
            seen.add(value.data_ptr())


@dataclass
class ForwardPass:
    """What the layers of one forward pass share.

    Attributes:
        shares_plans: whether layers share plans. False if they are recomputed for the backward pass.
        positions: positions of this pass; None before the first layer.
        attention_padding: (B, m) padding that attention must mask, or None.
        plans: plans by id of the encoding, number of keys, factor of queries, and whether gradients are enabled.
    """

    shares_plans: bool = True
    positions: Positions | None = None
    attention_padding: Tensor | None = None
    plans: dict[tuple[int, int, float, bool], AttentionPlan] = field(default_factory=dict)


class CausalMask:
    """Queries and keys of one forward pass, passed to layers instead of transformers' mask.

    The n queries are the last of m tokens. Layers with a window may hold only the last keys of them. The first layer
    resolves positions; layers that share an encoding share its plan, unless they are recomputed for the backward pass.

    Args:
        n: number of queries.
        m: number of tokens.
        held_keys: number of keys in a layer of the type of this mask, the last of the m.
        rows: rows of the batch, B.
        padding: (B, m) bool, True at padding; None without padding.
        device: device of the positions.

    Attributes:
        forward_pass: what the layers share; None before the first layer with this mask.
    """

    def __init__(self, n: int, m: int, held_keys: int, rows: int, padding: Tensor | None, device: torch.device) -> None:
        self.n, self.m, self.held_keys, self.rows, self.padding, self.device = n, m, held_keys, rows, padding, device
        self.forward_pass: ForwardPass | None = None

    def begin(self, adapter: EncodingAdapter, shares_plans: bool) -> None:
        """Begin a forward pass at its first layer, which may be run again for the backward pass."""
        if self.forward_pass is None:
            self.forward_pass = adapter.forward_pass = ForwardPass(shares_plans)

    def join(self, adapter: EncodingAdapter) -> ForwardPass:
        """Return the forward pass that the first layer began, which a pass may reach with several masks."""
        if self.forward_pass is None:
            assert adapter.forward_pass is not None
            self.forward_pass = adapter.forward_pass
        return self.forward_pass

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
        shared = self.join(adapter)
        if shared.positions is not None:
            return shared.positions
        dtype = torch.promote_types(dtype, torch.float32)
        plain = Positions.arange(self.n, self.m, device=self.device, dtype=dtype)
        positions = plain
        if self.padding is not None:
            positions, shared.attention_padding = positions_from_padding(
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
        shared.positions = positions
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

    def plan(self, adapter: EncodingAdapter, layer: int, keys: int, query_factor: float) -> AttentionPlan:
        """Return the attention plan of a layer; layers with the same encoding and the same other arguments share it.

        Args:
            adapter: the encodings of the model.
            layer: index of the layer.
            keys: number of keys that the layer has, the last of the m.
            query_factor: factor of rotated queries, besides that of the encoding.

        Raises:
            UserError: a query reads keys that the cache dropped.
        """
        encoding, shared = adapter.layer_encoding(layer), self.join(adapter)
        key = (id(encoding), keys, query_factor, torch.is_grad_enabled())
        plan = shared.plans.get(key)
        if plan is None:
            assert shared.positions is not None
            plan = build_plan(encoding, shared.positions, shared.attention_padding, adapter.backend)
            if keys < self.m:
                # the first query reads the keys - n tokens before it, which is all that a smaller window needs
                if not (adapter.reads_only(layer, keys - self.n + 1) and shared.positions.contiguous):
                    raise UserError(
                        f"layer {layer} reads keys that its cache, of a window of the model, dropped: begin each text "
                        "with an empty cache, and pad on the left"
                    )
                plan = plan.select(slice(None), slice(self.m - keys, self.m))
            if query_factor != 1:
                scale = plan.positions.q.new_full((1, 1, 1, 1), query_factor)
                plan = replace(plan, query_scale=scale if plan.query_scale is None else scale * plan.query_scale)
            if shared.shares_plans:
                shared.plans[key] = plan
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
        kv_offset: index of the first key; not 0 for layers whose cache dropped keys behind their window.
        mask_function: must be transformers' causal mask, with or without a window or blocks, which are ignored.
        attention_mask: (B, m) bool, True at tokens that are not padding; or None.
        device: device of the mask.

    Raises:
        UserError: the model needs more than causal attention over a growing KV cache.
    """
    if not _is_causal(mask_function):
        raise UserError(
            "the model asks for more than a causal mask (packed texts without attention_mask, or attention both ways), "
            "which these encodings do not have: switch it off in its config, or give attention_mask"
        )
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise UserError("keys and values lie in a cache of fixed size: use transformers' DynamicCache")
    tokens = q_offset + q_length
    padding = None
    if attention_mask is not None:
        if attention_mask.shape != (batch_size, tokens):
            raise UserError(
                f"attention_mask is of shape {tuple(attention_mask.shape)}, not {(batch_size, tokens)}: give it for "
                "all tokens, those in the cache included"
            )
        padding = ~attention_mask.to(device=device, dtype=torch.bool)
        padding = padding if bool(padding.any()) else None
    return CausalMask(q_length, tokens, kv_length, batch_size, padding, torch.device(device))


# the code of the functions that transformers combines into masks, by which closures are known
_AND, _LOCAL = and_masks().__code__, (sliding_window_overlay(1).__code__, chunked_overlay(1, torch.zeros(1)).__code__)


def _is_causal(mask_function: Any) -> bool:
    """Return whether a mask of transformers shows each query the past alone, at most within a window or a block."""
    if mask_function is causal_mask_function:
        return True
    if getattr(mask_function, "__code__", None) is not _AND:
        return False
    functions = getclosurevars(mask_function).nonlocals["mask_functions"]
    return causal_mask_function in functions and all(
        function is causal_mask_function or getattr(function, "__code__", None) in _LOCAL for function in functions
    )


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
        key: (B, G, m, D), where G divides H; of a layer with a window perhaps the last of the m tokens only.
        value: (B, G, m, D), of the same tokens.
        attention_mask: a :class:`CausalMask` of the forward pass.
        scaling: factor of the scores; None: 1/sqrt(D).
        dropout: dropout of attention weights.
        options: further arguments of transformers. Windows and softcaps among them are ignored, because encodings have
            their own.

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
    mask, keys, width = attention_mask, key.shape[2], query.shape[3]
    if query.shape[2] != mask.n or keys not in (mask.m, mask.held_keys):
        raise UserError(
            f"{query.shape[2]} queries and {keys} keys, where the pass has {mask.n} and {mask.m}: keys "
            "that are not tokens (prefix tuning) have no positions"
        )
    mask.resolve_positions(adapter, options.get("position_ids"), module.training, value.dtype)
    # run_attention multiplies by 1/sqrt(D)
    query_factor = 1.0 if scaling is None or scaling == width**-0.5 else scaling * width**0.5
    # under autocast, transformers' rotation (now the identity) widens their dtype
    query, key = query.to(value.dtype), key.to(value.dtype)
    plan = mask.plan(adapter, layer, keys, query_factor)
    plan = _with_model_sinks(plan, adapter.layer_encoding(layer), options.get("s_aux"))
    out = run_attention(query, key, value, plan, dropout)  # (B, H, n, D)
    return out.transpose(1, 2).contiguous(), None


def _with_model_sinks(plan: AttentionPlan, encoding: Encoding, sinks: Tensor | None) -> AttentionPlan:
    """Return the plan with the model's attention sinks (H,) as null logits, if the encoding has none of its own."""
    if encoding.attention_options.null_logit != "learned" or encoding.null_logit is not None:
        return plan
    assert sinks is not None
    return replace(plan, null_logit=sinks.to(plan.positions.k.dtype))


def keep_needed_keys(cache: Any, adapter: EncodingAdapter) -> None:
    """Make the layers of an empty cache keep all keys, except where the encoding reads only the keys that they keep.

    A cache of transformers keeps the keys within the window of the model's config.
    """
    if not isinstance(cache, Cache) or not hasattr(cache, "layers") or cache.get_seq_length() > 0:
        return
    for index, layer in enumerate(cache.layers[: len(adapter.encodings.index)]):
        if isinstance(layer, DynamicSlidingWindowLayer) and not adapter.reads_only(index, layer.sliding_window):
            cache.layers[index] = DynamicLayer()


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
    return check_config_type(model.config)


def check_config_type(config: Any) -> str:
    """Return the type of model that a config describes.

    Raises:
        UserError: it is not a config of transformers, or its type is not in :data:`MODEL_TYPES`.
    """
    kind = getattr(config, "model_type", None)
    if not isinstance(kind, str):
        raise UserError(f"{type(config).__name__} is not a config of transformers: give model.config")
    if kind not in MODEL_TYPES:
        types = ", ".join(MODEL_TYPES)
        raise UserError(
            f"models of type '{kind}' have not been checked{did_you_mean(kind, MODEL_TYPES)}: use one of {types}"
        )
    return kind


def base_model(model: PreTrainedModel) -> Any:
    """Return the model without its head; the name that transformers has for it is wrong for Llama 4."""
    base = model.base_model
    return getattr(model, "model", base) if base is model else base


class IdentityRotation(nn.Module):
    """Replaces a model's rotation: cosine 1 and sine 0, or the complex number 1, leave queries and keys unchanged.

    Args:
        config: config of the replaced module, which some models read.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return cosine 1 and sine 0, each (1, 1, 1); for Llama 4 the complex number 1."""
        if self.config.model_type == "llama4_text":
            return torch.ones(1, 1, 1, dtype=torch.complex64, device=x.device)
        return x.new_ones(1, 1, 1), x.new_zeros(1, 1, 1)


def model_pre_hook(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse ``output_attentions``, and remember the token ids, which seed random positions."""
    ids = args[0] if args else kwargs.get("input_ids")
    adapter = getattr(base, NAME)
    adapter.ids, adapter.forward_pass = ids.detach() if isinstance(ids, Tensor) else None, None
    wants_weights = kwargs.get("output_attentions")
    if wants_weights or (wants_weights is None and base.config.output_attentions):
        raise UserError("attention weights are never built, so output_attentions has nothing to give: leave it out")


def model_hook(base: nn.Module, *_: Any) -> None:
    """Forget the forward pass at its end, so that its plans are freed."""
    adapter = getattr(base, NAME)
    adapter.ids = adapter.forward_pass = None


def first_layer_pre_hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin a forward pass: prepare its cache, resolve positions, and apply an absolute encoding to (B, n, C)."""
    adapter = getattr(layer, NAME)[0]
    mask = next((x for x in (*args, *kwargs.values()) if isinstance(x, CausalMask)), None)
    if mask is None:
        raise UserError(
            f"attention '{NAME}' got a mask that is not its own: give attention_mask as (batch, tokens), and leave the "
            "model's attention as use_encoding set it"
        )
    mask.begin(adapter, not (layer.training and getattr(layer, "gradient_checkpointing", False)))
    keep_needed_keys(kwargs.get("past_key_values"), adapter)
    states = args[0] if args else kwargs["hidden_states"]
    positions = mask.resolve_positions(adapter, kwargs.get("position_ids"), layer.training, states.dtype)
    encoding = adapter.layer_encoding(0)
    if not encoding.embeds:
        return None
    if args:
        return (encoding.embed(args[0], positions), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": encoding.embed(kwargs["hidden_states"], positions)}


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, make_mask)
