"""The attention that Hugging Face transformers calls: registered once, and told by the model where its tokens are.

A forward pass goes like this. transformers asks for a mask, which here is :class:`Tokens`: how many queries and keys
there are, and which are padding. It hands that to each layer's attention as it would a mask. The first layer settles
positions, and every layer makes, or shares, the plan of its encoding and carries it out.
"""

from typing import Any

from fairseq_rpe.adapters import _require_transformers  # noqa: F401

# isort: split

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from fairseq_rpe.attention import Backend, Plan
from fairseq_rpe.attention.forward import carry_out, counted, plan_of
from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import nearest
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.positions.position_transforms import Moves

NAME = "fairseq_rpe"  # of this attention, among those that transformers knows
# model_type of configs whose models have been compared with their own rotation, layer by layer the same
TYPES = ("gpt_neox", "llama", "gemma", "mistral", "olmo", "olmo2", "qwen2", "qwen3", "stablelm", "starcoder2")
_OTHER = {
    "sliding_window": "a sliding window",
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "position_bias": "a bias of its own",
    "cache": "a paged cache",
    "cu_seq_lens_q": "packed texts",
    "cu_seq_lens_k": "packed texts",
    "seq_idx": "packed texts",
}


class Adapter(nn.Module):
    """What a model is given: its encodings, learned parameters included, and where its positions are moved.

    ``encodings``: one for all layers, or one per layer; ``positions``: the transform in evaluation, None: there is
    none. It is a part of the model: its parameters are in ``parameters()`` and ``state_dict()`` and move with the
    model, but stay in float32.
    """

    undo: tuple[Any, ...]  # what the model had before; see ``use_encoding``
    ids: Tensor | None = None  # (B, n) of the pass at hand, where it was given ids

    def __init__(
        self, encodings: list[Encoding], spec: str, moves: Moves, positions: str | None, backend: Backend
    ) -> None:
        super().__init__()
        self.encodings = nn.ModuleList(encodings)
        self.spec, self.moves, self.positions, self.backend = spec, moves, positions, backend
        self.length_dependent = any(e.length_dependent for e in encodings)

    def encoding_of(self, layer: int) -> Encoding:
        return self.encodings[layer if len(self.encodings) > 1 else 0]

    def extra_repr(self) -> str:
        return self.spec


class Tokens:
    """The n queries, last of m tokens, of one forward pass, in the place of transformers' mask.

    ``padding``: (B, m) bool, True at tokens that are none, or None. Positions are settled by the first layer, once;
    layers that share an encoding share its plan, unless they are computed anew for the backward pass.
    """

    def __init__(self, n: int, m: int, rows: int, padding: Tensor | None, device: torch.device) -> None:
        self.n, self.m, self.rows, self.padding, self.device = n, m, rows, padding, device
        self.positions: Positions | None = None
        self.hidden: Tensor | None = None
        self.shared = True
        self.plans: dict[tuple[int, bool], Plan] = {}

    def settle(self, adapter: Adapter, given: Tensor | None, training: bool, dtype: torch.dtype) -> Positions:
        """The positions of this pass; ``given``: transformers' own, (B or 1, n), which must be the same.

        ``dtype``: of the model's states; positions are float32 or better.

        Raises UserError: they are others, or random ones are asked for where a cache goes on.
        """
        if self.positions is not None:
            return self.positions
        wide = torch.promote_types(dtype, torch.float32)
        plain, self.hidden = Positions.arange(self.n, self.m, device=self.device, dtype=wide), None
        count = plain
        if self.padding is not None:
            count, self.hidden = counted(self.padding, self.n, adapter.length_dependent, wide)
        if given is not None:
            self._check(given.to(self.device), plain.q)
        if adapter.moves.active(training) is None:
            self.positions = count
        else:
            real = self.m if self.padding is None else (~self.padding).sum(1).cpu()
            lengths = torch.as_tensor(real).expand(self.rows)
            self.positions = adapter.moves(count, lengths, training, self.n < self.m, self._rows(adapter.ids))
        return self.positions

    def _rows(self, ids: Tensor | None) -> list[Tensor]:
        """The ids of each row's real tokens; none where they are not known."""
        if ids is None or ids.shape != (self.rows, self.m):
            return []
        if self.padding is None:
            return list(ids.cpu())
        return [own[real] for own, real in zip(ids.cpu(), ~self.padding.cpu(), strict=True)]

    def _check(self, given: Tensor, plain: Tensor) -> None:
        """Positions from 0, counted with padding or without; those of padding itself have no meaning."""
        real = None if self.padding is None else ~self.padding[:, self.m - self.n :]
        if given.dim() != 2 or given.shape[1] != self.n:
            raise UserError(f"position_ids of shape {tuple(given.shape)}, where {self.n} tokens came: leave them out")
        without = plain if self.padding is None else (torch.cumsum(~self.padding, 1) - 1)[:, self.m - self.n :]
        for known in (plain, without):
            same = given == known
            if bool((same if real is None else same | ~real).all()):
                return
        raise UserError(
            "position_ids are not those of one text a row from its start, as in packed texts: leave them out, and give "
            "attention_mask where there is padding"
        )

    def plan(self, adapter: Adapter, encoding: Encoding) -> Plan:
        key = (id(encoding), torch.is_grad_enabled())
        found = self.plans.get(key)
        if found is None:
            found = plan_of(encoding, self.positions, self.hidden, adapter.backend)
            if self.shared:
                self.plans[key] = found
        return found


def tokens_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tokens:
    """What transformers' models ask for a mask; ``attention_mask``: (B, m) bool, True at real tokens.

    Raises UserError: anything but plain causal attention over a growing cache is asked for.
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
    return Tokens(q_length, kv_length, batch_size, padding, torch.device(device))


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query (B, H, n, D), key and value (B, G, m, D), G dividing H -> (B, n, H, D), no weights.

    Raises UserError: the layer has no encoding, or attention is to do what this one does not.
    """
    if not isinstance(attention_mask, Tokens):
        raise UserError(f"attention '{NAME}' got a mask that is not its own: give attention_mask as (batch, tokens)")
    adapter, layer = getattr(module, NAME, (None, 0))
    if adapter is None:
        raise UserError(f"this model was switched to attention '{NAME}' but has no encoding: call use_encoding(model)")
    for name, what in _OTHER.items():
        if more.get(name) is not None:
            raise UserError(f"the model asks for {what} ({name}), which encodings here do not have: switch it off")
    if more.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UserError("the model asks for attention both ways, and encodings here are causal: set is_causal=True")
    tokens, heads, width = attention_mask, query.shape[1], query.shape[3]
    if (query.shape[2], key.shape[2]) != (tokens.n, tokens.m):
        raise UserError(
            f"{query.shape[2]} queries and {key.shape[2]} keys, where the pass has {tokens.n} and {tokens.m}: keys "
            "that are not tokens (prefix tuning) have no positions"
        )
    tokens.settle(adapter, more.get("position_ids"), module.training, value.dtype)
    if heads != key.shape[1]:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    if scaling is not None and scaling != width**-0.5:
        query = query * (scaling * width**0.5)
    # under autocast transformers' rotation, now the identity, leaves them wider than they were
    query, key = query.to(value.dtype), key.to(value.dtype)
    out = carry_out(query, key, value, tokens.plan(adapter, adapter.encoding_of(layer)), dropout)
    return out.transpose(1, 2).contiguous(), None


def check_type(model: Any) -> str:
    """The type of a model. Raises UserError: it is none of transformers, or of a type that nobody has checked."""
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"{type(model).__name__} is not a model of transformers: unwrap it first")
    kind = model.config.model_type
    if kind not in TYPES:
        known = ", ".join(TYPES)
        raise UserError(f"models of type '{kind}' have not been checked{nearest(kind, TYPES)}: use one of {known}")
    return kind


class NoRotation(nn.Module):
    """In the place of a model's rotation: cosine 1 and sine 0, so that queries and keys reach attention as they are."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return x.new_ones(1, 1, 1), x.new_zeros(1, 1, 1)


def before_model(base: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Refuse what a caller asks of a forward pass and this attention does not give; keep its ids, for random draws."""
    ids = args[0] if args else given.get("input_ids")
    getattr(base, NAME).ids = ids.detach() if isinstance(ids, Tensor) else None
    asked = given.get("output_attentions")
    if asked or (asked is None and base.config.output_attentions):
        raise UserError("attention weights are never built, so output_attentions has nothing to give: leave it out")


def before_first_layer(layer: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """Settle positions, and add an absolute encoding to the embedded tokens (B, n, C)."""
    adapter = getattr(layer, NAME)[0]
    tokens = next((x for x in (*args, *given.values()) if isinstance(x, Tokens)), None)
    if tokens is None:
        raise UserError(
            f"attention '{NAME}' got a mask that is not its own: give attention_mask as (batch, tokens), and leave the "
            "model's attention as use_encoding set it"
        )
    tokens.shared = not (layer.training and getattr(layer, "gradient_checkpointing", False))
    states = args[0] if args else given["hidden_states"]
    positions = tokens.settle(adapter, given.get("position_ids"), layer.training, states.dtype)
    encoding = adapter.encodings[0]
    if not encoding.embeds:
        return None
    if args:
        return (encoding.embed(args[0], positions), *args[1:]), given
    return args, {**given, "hidden_states": encoding.embed(given["hidden_states"], positions)}


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, tokens_of)
