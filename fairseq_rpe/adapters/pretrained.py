"""The transformers model type ``fairseq_rpe``: the decoder in plain torch, with any encoding and any blocks.

Importing this module registers the type with ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM``.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from fairseq_rpe.adapters.pretrained_config import (  # first, because it checks that transformers is installed
    FairseqRpeConfig,
)

# isort: split

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.decoder.blocks import DecoderLayer
from fairseq_rpe.decoder.cache import DecoderCache
from fairseq_rpe.decoder.config import DecoderConfig
from fairseq_rpe.decoder.decoder import Decoder
from fairseq_rpe.encodings.model import LayerEncodings, build_for_model
from fairseq_rpe.positions.position_transforms import PositionTransforms, check_transforms

ENCODINGS = "encodings"  # module of the decoder whose parameters stay in float32
_USE_OUR_CACHE = "leave past_key_values out, or pass fairseq_rpe.adapters.pretrained.FairseqRpeCache()"
# argument of forward that is refused -> remedy
_REFUSED = {
    "position_ids": "leave them out and give attention_mask where there is padding; documents separates texts in a row",
    "inputs_embeds": "encodings may read tokens: pass input_ids",
    "cache_position": "leave it out: the cache counts its tokens",
}


class FairseqRpeCache(Cache):
    """KV cache of the decoder for transformers' ``generate``.

    Attributes:
        decoder_cache: keys, values and token features of each layer.
        ids: (B, m) token ids that were read, with the id of padding where the attention mask is 0; None if empty.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_seq_length()} tokens)"

    def reset(self) -> None:
        """Remove all tokens."""
        self.decoder_cache = DecoderCache()
        self.ids: Tensor | None = None

    def join_ids(self, ids: Tensor) -> Tensor:
        """Return the ids of the cached tokens followed by ids (B, n): (B, m)."""
        if self.ids is not None and len(self.ids) != len(ids):
            raise UserError(f"the cache has {len(self.ids)} rows, the input {len(ids)}: begin with an empty cache")
        return ids if self.ids is None else torch.cat([self.ids, ids], dim=1)

    def advance(self, ids: Tensor, decoder_cache: DecoderCache) -> None:
        """Store the ids of all tokens (B, m) and the cache of the decoder after them."""
        self.ids, self.decoder_cache = ids, decoder_cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number m of cached tokens."""
        return 0 if self.ids is None else self.ids.shape[1]

    def get_max_length(self, layer_idx: int = 0) -> int:
        """Return -1: the cache grows without a limit."""
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys, and the index of the first one."""
        return self.get_seq_length() + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows ``beam_idx`` (B',) int64 of the batch."""
        if self.ids is not None:
            rows = beam_idx.to(self.ids.device)
            self.ids = self.ids.index_select(0, rows)
            self.decoder_cache.select_rows(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` (B',) int64, or those where ``indices`` (B,) bool is True."""
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        if self.ids is not None:
            self.reorder_cache(torch.arange(len(self.ids)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -``tokens_to_remove`` tokens, as transformers' caches do.

        Raises:
            UserError: the number is positive, or a layer with a window has dropped keys that would be seen again.
        """
        if tokens_to_remove > 0:
            raise UserError(f"crop({tokens_to_remove}): give the number of tokens to remove with a minus sign")
        if self.ids is not None and tokens_to_remove:
            remaining = max(0, self.ids.shape[1] + tokens_to_remove)
            self.decoder_cache.truncate(remaining)
            self.ids = self.ids[:, :remaining]

    def update(self, *_: Any, **__: Any) -> Any:
        """Refuse another model's keys and values."""
        raise UserError("this cache belongs to models of type fairseq_rpe: use DynamicCache for other models")


class FairseqRpeLayer(GradientCheckpointingLayer, DecoderLayer):
    """A layer of the decoder with transformers' switch of gradient checkpointing."""


class FairseqRpeDecoder(Decoder):
    """The decoder of the model.

    Its parameters may be in half precision except those of encodings. Then matrix products have this precision whatever
    ``compute_dtype`` says.
    """

    layer_type = FairseqRpeLayer

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which matrix products have the compute dtype, if the parameters are in float32."""
        return super().autocast(device) if self.embed_tokens.weight.dtype == torch.float32 else nullcontext()


class FairseqRpePreTrainedModel(PreTrainedModel):
    """What the models of this type have in common: the decoder with its output layer, and how it is saved.

    Args:
        config: sizes, blocks and encodings.

    Raises:
        UserError: the encoding is not known, or the configuration is not valid.
    """

    config_class = FairseqRpeConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _keep_in_fp32_modules_strict = (ENCODINGS,)
    _no_split_modules = ("FairseqRpeDecoder",)
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = False

    def __init__(self, config: FairseqRpeConfig) -> None:
        super().__init__(config)
        self.decoder = _build_decoder(config)
        _separate_buffers(self.decoder)
        self._tied_weights_keys = _shared_parameters(self.decoder, "decoder.")
        self.post_init()
        if not self._can_use_cache():
            self.config.use_cache = False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a saved model; the arguments are those of ``PreTrainedModel.from_pretrained``.

        Raises:
            UserError: weights are missing, unexpected or of other shapes.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("ignore_mismatched_sizes", True)  # refused below, in one line
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        for kind, remedy in (
            ("mismatched", "have other shapes"),
            ("missing", "are missing"),
            ("unexpected", "are not in the model"),
        ):
            keys = info.get(f"{kind}_keys") or ()  # with the shapes, if they are mismatched
            if names := sorted(key if isinstance(key, str) else key[0] for key in keys):
                raise UserError(
                    f"{pretrained_model_name_or_path}: weights {remedy} ({names[0]}): export the model again"
                )
        return (model, info) if wants_info else model

    def _decode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        use_cache: bool | None,
        documents: Tensor | None,
        output_attentions: bool | None,
        output_hidden_states: bool | None,
        unsupported: Mapping[str, Any],
    ) -> tuple[Tensor, FairseqRpeCache | None, tuple[Tensor, ...] | None]:
        """Return features (B, n, C), cache and hidden states, for arguments of ``forward``."""
        self._check_arguments(input_ids, output_attentions, unsupported)
        assert input_ids is not None
        cache = self._cache(past_key_values, False if use_cache is None and documents is not None else use_cache)
        ids = self._mask_padding(input_ids, attention_mask, 0 if cache is None else cache.get_seq_length())
        states: list[Tensor] = []
        all_ids = ids if cache is None else cache.join_ids(ids)  # (B, m)
        # a copy, so that the cache stays as it is if the decoder refuses the tokens
        decoder_cache = None if cache is None else cache.decoder_cache.copy()
        features: Tensor = self.decoder.features(all_ids, decoder_cache, documents, states)
        if cache is not None and decoder_cache is not None:
            cache.advance(all_ids, decoder_cache)
        if self.config.output_hidden_states if output_hidden_states is None else output_hidden_states:
            return features, cache, (*states[:-1], features)
        return features, cache, None

    def _returns_dict(self, return_dict: bool | None) -> bool:
        return bool(self.config.return_dict if return_dict is None else return_dict)

    def _check_arguments(
        self, input_ids: Tensor | None, output_attentions: bool | None, others: Mapping[str, Any]
    ) -> None:
        if output_attentions or self.config.output_attentions:
            raise UserError("attention weights are never built: leave output_attentions out")
        for name, value in others.items():
            if value is not None and value is not False:
                raise UserError(f"{name} is not supported: {_REFUSED.get(name, 'leave it out')}")
        if input_ids is None or input_ids.dim() != 2:
            raise UserError("input_ids are the tokens (batch, tokens): pass them")

    def _cache(self, past: Cache | None, use_cache: bool | None) -> FairseqRpeCache | None:
        """Return the cache to continue, a new one, or None."""
        if past is not None and not isinstance(past, FairseqRpeCache):
            raise UserError(f"a {type(past).__name__} cannot hold what this model caches: {_USE_OUR_CACHE}")
        if use_cache is None:
            use_cache = past is not None or (self.config.use_cache and not self.training)
        if not use_cache and past is None:
            return None
        if not self._can_use_cache():
            raise UserError(
                f"'{self.config.rpe}' changes earlier tokens when the text grows, which a KV cache cannot follow: pass "
                "use_cache=False"
            )
        if self.training and self.is_activation_checkpointing:
            raise UserError("layers that are computed again would extend the cache twice: pass use_cache=False")
        return FairseqRpeCache() if past is None else past

    def _can_use_cache(self) -> bool:
        """Return whether cached tokens stay as they are when the text grows."""
        transforms = self.decoder.position_transforms
        return not self.decoder.length_dependent and transforms.length_invariant(False)

    def _mask_padding(self, ids: Tensor, mask: Tensor | None, cached: int) -> Tensor:
        """Return ids (B, n) with the id of padding where the mask is 0."""
        if mask is None:
            return ids
        n = ids.shape[1]
        if mask.shape != (len(ids), cached + n):
            raise UserError(
                f"attention_mask has the shape {tuple(mask.shape)}, and {len(ids)} rows of {cached + n} tokens were "
                "read: give (batch, tokens), 0 at padding"
            )
        return ids.masked_fill(mask[:, cached:].to(ids.device) == 0, self.decoder.padding_idx)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.decoder.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output projection."""
        return self.decoder.output_projection

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output projection."""
        self.decoder.output_projection = new_embeddings

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Change the number of tokens, as ``PreTrainedModel.resize_token_embeddings``.

        Raises:
            UserError: an encoding reads token ids of the dictionary.
        """
        if new_num_tokens is not None and self.config.encoding_shapes and self.decoder.needs_token_ids:
            raise UserError(f"'{self.config.rpe}' reads the token ids of its dictionary: keep the number of tokens")
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the names of shared tensors, each with the name under which it is saved."""
        return dict(self._tied_weights_keys)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        options = getattr(gradient_checkpointing_func, "keywords", {})
        if options.get("use_reentrant"):
            raise UserError("layers share biases, whose graph a reentrant checkpoint frees: pass use_reentrant=False")
        checkpoint = partial(torch.utils.checkpoint.checkpoint, **{**options, "use_reentrant": False})
        super()._set_gradient_checkpointing(enable, checkpoint, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        """Leave the initial weights as they are: the constructors of the modules set them."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Do nothing: saved folders need the package, not a copy of this file."""


class FairseqRpeModel(FairseqRpePreTrainedModel):
    """The decoder whose output are features, without logits; ``AutoModel`` builds it.

    It has the output layer of :class:`FairseqRpeForCausalLM`, too, so that either class loads what the other saves.

    Args:
        config: sizes, blocks and encodings.

    Raises:
        UserError: the encoding is not known, or the configuration is not valid.
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        documents: Tensor | None = None,
        **unsupported: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Compute the features before the output layer; the arguments are those of :class:`FairseqRpeForCausalLM`.

        Returns:
            Features (B, n, C), cache and hidden states (B, n, C).

        Raises:
            UserError: an argument is not supported, or the encoding cannot use a cache.
        """
        features, cache, hidden_states = self._decode(
            input_ids,
            attention_mask,
            past_key_values,
            use_cache,
            documents,
            output_attentions,
            output_hidden_states,
            unsupported,
        )
        output = BaseModelOutputWithPast(features, past_key_values=cache, hidden_states=hidden_states)
        return output if self._returns_dict(return_dict) else output.to_tuple()


class FairseqRpeForCausalLM(FairseqRpePreTrainedModel, GenerationMixin):
    """Language model with any encoding, for texts of any length.

    Padding is the id ``config.pad_token_id``, wherever the attention mask is 0 or the input has this id. A text begins
    with the id ``config.bos_token_id``, as in training.

    Args:
        config: sizes, blocks and encodings.

    Raises:
        UserError: the encoding is not known, or the configuration is not valid.
    """

    def __init__(self, config: FairseqRpeConfig) -> None:
        super().__init__(config)
        if not self._can_use_cache():
            self.generation_config.use_cache = False
        # the decoder reads this id as padding wherever it is, so a generated one would vanish from the text
        self.generation_config.suppress_tokens = [self.decoder.padding_idx]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        documents: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **unsupported: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Compute the logits of the next tokens, and the loss if there are labels.

        Args:
            input_ids: (B, n) tokens that are not in the cache.
            attention_mask: (B, m) 0 at padding, of the cached tokens too; None: only the id of padding is padding.
            past_key_values: a :class:`FairseqRpeCache` of m - n tokens, which is extended; None for none.
            labels: (B, n) targets in transformers' convention: the input ids, with -100 where there is no loss.
            use_cache: whether to return a cache; None: as in the configuration, but not in training.
            output_attentions: must be None or False.
            output_hidden_states: whether to return the inputs of all layers and the features before the output layer.
            return_dict: whether to return an output object; None: as in the configuration.
            logits_to_keep: compute the logits of the last k tokens, or at these indices; 0: of all tokens.
            documents: (B, n) document numbers; neighbours with the same number form a document, which is read as if it
                were alone in its row. None: a row is one text.
            num_items_in_batch: number of targets of all batches of an update, which the Trainer passes.
            shift_labels: (B, n) targets of the same positions, in the place of ``labels``.
            unsupported: other arguments, which must be None or False.

        Returns:
            Loss, logits (B, n or k, V), cache and hidden states (B, n, C).

        Raises:
            UserError: an argument is not supported, or the encoding cannot use a cache.
        """
        features, cache, hidden_states = self._decode(
            input_ids,
            attention_mask,
            past_key_values,
            use_cache,
            documents,
            output_attentions,
            output_hidden_states,
            unsupported,
        )
        indices = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.decoder.output_layer(features[:, indices].to(self.dtype))  # slice(0, None) has all tokens
        loss = None
        if labels is not None or shift_labels is not None:
            counts = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            targets = {"labels": labels, "shift_labels": shift_labels}
            loss = self.loss_function(logits=logits, **targets, vocab_size=self.config.vocab_size, **counts)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=hidden_states)
        return output if self._returns_dict(return_dict) else output.to_tuple()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        name = generation_config.cache_implementation
        if name not in (None, "dynamic"):
            raise UserError(f"cache_implementation='{name}' is not supported: leave it out")
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = FairseqRpeCache()


def _build_decoder(config: FairseqRpeConfig) -> FairseqRpeDecoder:
    """Build the decoder of a configuration; under transformers' contexts its tensors may be on the meta device."""
    decoder_config = config.to_decoder()
    with _float32():
        encodings = _build_encodings(config, decoder_config)
    with torch.device("cpu"):  # no modules, so nothing would load their tensors
        transforms = PositionTransforms(
            config.positions_train, config.positions_eval or "", config.train_length, config.positions_seed, _rank()
        )
    check_transforms(transforms, encodings)
    return FairseqRpeDecoder(decoder_config, encodings, transforms)


def _build_encodings(config: FairseqRpeConfig, decoder: DecoderConfig) -> LayerEncodings:
    width = None if decoder.head_dim * decoder.heads == decoder.width else decoder.head_dim
    encodings = build_for_model(
        config.rpe, decoder.heads, decoder.width, decoder.layers, config.train_length, None, config.rpe_share, width
    )
    for name, shape in (config.encoding_shapes or {}).items():
        path, _, attribute = name.rpartition(".")
        module = encodings.get_submodule(path)
        value = getattr(module, attribute)
        new: Tensor = value.new_zeros(shape)
        if isinstance(value, nn.Parameter):
            new = nn.Parameter(new, value.requires_grad)
        setattr(module, attribute, new)
    return encodings


def _rank() -> int:
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_distributed else 0


@contextmanager
def _float32() -> Iterator[None]:
    """Build tensors in float32, whatever dtype transformers loads a model in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _separate_buffers(module: nn.Module) -> None:
    """Give each module its own copy of a shared buffer, because transformers can tie parameters only."""
    seen: set[int] = set()
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and id(buffer) in seen:
                submodule._buffers[name] = buffer.clone()
            seen.add(id(buffer))


def _shared_parameters(module: nn.Module, prefix: str) -> dict[str, str]:
    """Return the names of parameters that are the same tensor as an earlier one, with its name."""
    first: dict[int, str] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    names = [(prefix + name, first.setdefault(id(tensor), prefix + name)) for name, tensor in parameters]
    return {name: source for name, source in names if name != source}


def register() -> None:
    """Register the models with ``AutoModel`` and ``AutoModelForCausalLM``; a second call has no effect."""
    AutoModel.register(FairseqRpeConfig, FairseqRpeModel, exist_ok=True)
    AutoModelForCausalLM.register(FairseqRpeConfig, FairseqRpeForCausalLM, exist_ok=True)


register()
