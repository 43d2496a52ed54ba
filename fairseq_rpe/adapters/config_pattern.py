"""Reads the encodings of a model's layers from its config: rotations, layers without positions, windows, sinks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairseq_rpe.adapters.attention_interface import (  # first, because it checks that transformers is installed
    check_config_type,
)

# isort: split

from torch import nn

from fairseq_rpe.adapters.rope_parameters import complete_scaling
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import LayerPattern, is_pattern, parse_pattern
from fairseq_rpe.core.spec import format_value, parse
from fairseq_rpe.encodings import normalise
from fairseq_rpe.encodings.base import registry
from fairseq_rpe.encodings.model_rotation import ModelRotation, complete_spec, inherit_attention_options, is_rotary
from fairseq_rpe.encodings.rope import Rope, effective_options

OWN_PATTERN = "config"  # names the pattern of a model's config in place of a spec

# what the attention of a model type does, where its config has no field for it, or the field is not enough
_WINDOW_IN_ALL_LAYERS = ("mistral", "starcoder2")
_HAS_LAYER_TYPES = (
    *("cohere2", "gemma2", "gemma3_text", "gpt_oss", "granite_swa", "llama4_text"),
    *("olmo3", "qwen2", "qwen3", "smollm3"),
)
_ROTATES_PART_OF_HEAD = ("gpt_neox", "stablelm")
_ROTATES_NEIGHBOURS = ("cohere2", "llama4_text")  # pairs (2s, 2s + 1)
_ROTATES_LOCAL_LAYERS_ONLY = ("cohere2",)
_CAPS_SCORES = ("gemma2",)
HAS_SINKS = ("gpt_oss", "granite_swa")


@dataclass(frozen=True)
class LayerConfig:
    """The encoding of one layer, as the config of its model describes it.

    Attributes:
        rotation: the layer's rotation, or None if it has no positions.
        rope_parameters: ``rope_parameters`` of the layer.
        max_positions: ``max_position_embeddings`` of the config, in tokens.
        attention: spec of ``nope`` with the attention options of the layer, such as ``nope:local=4096``.
    """

    rotation: ModelRotation | None
    rope_parameters: Mapping[str, Any]
    max_positions: int
    attention: str

    def complete(self, spec: str) -> str:
        """Complete the options that a spec leaves open from the layer's rotation, and its scaling.

        Options that the spec states stay in the text, even with their defaults, and replace those of the model.

        Raises:
            UserError: the spec is not valid, or drops a scaling that it does not name.
        """
        if self.rotation is None or not is_rotary(spec):
            return spec
        spec = complete_scaling(spec, self.rope_parameters, self.max_positions)
        full = complete_spec(spec, self.rotation, strict=False)
        stated, config = parse(full)[1], registry.resolve(full)[2]
        has_temperature = isinstance(config, Rope.Config) and "temperature_on" in effective_options(config)
        is_open = has_temperature and "temperature_on" not in stated
        if is_open and self.rotation.values["rotary_fraction"] != 1:
            full += ",temperature_on=rotated"  # as transformers scales partial rotations
        return full

    def replace_rotation(self, spec: str) -> str:
        """Return the spec of the layer with ``spec`` in place of its rotation; a layer without one stays as it is.

        Raises:
            UserError: as :meth:`complete`.
        """
        if self.rotation is None:
            return normalise(self.attention)
        return normalise(inherit_attention_options(self.complete(spec), self.attention))


def pattern_from_config(config: Any) -> str:
    """Return the pattern of layers that a config of transformers describes.

    Args:
        config: config of a language model of a type in ``MODEL_TYPES``.

    Returns:
        A pattern such as ``3*rope:interleaved=true,local=4096|nope``, or one spec if all layers are alike.

    Raises:
        UserError: the type is not supported, or a layer has an attention or a scaling that no encoding describes.
    """
    check_config_type(config)
    return resolve_pattern(OWN_PATTERN, read_layers(config, config.num_hidden_layers))


def resolve_pattern(spec: str, layers: Sequence[LayerConfig]) -> str:
    """Return the canonical pattern, with the encoding of every layer, that ``spec`` means for a model.

    A pattern, and an encoding that does not rotate, replace the encodings of the model. An encoding that rotates
    replaces the rotations: layers without one stay, and the attention options of the others stay unless ``spec`` states
    them, as with ``--rpe-eval``.

    Args:
        spec: spec, pattern of layers, or ``OWN_PATTERN``.
        layers: the layers of the model.

    Raises:
        UserError: a spec is not valid, drops a scaling that it does not name, or rotates where no layer of the model
            does.
    """
    if is_pattern(spec):
        specs = parse_pattern(spec).expand(len(layers))
        resolved = [normalise(layer.complete(layer_spec)) for layer, layer_spec in zip(layers, specs, strict=True)]
    elif spec == OWN_PATTERN:
        resolved = [layer.replace_rotation("rope") for layer in layers]
    elif is_rotary(spec):
        if all(layer.rotation is None for layer in layers):
            raise UserError(
                f"'{spec}' rotates, and no layer of this model does: write {len(layers)}*{spec} to rotate all layers"
            )
        resolved = [layer.replace_rotation(spec) for layer in layers]
    else:
        resolved = [normalise(spec)] * len(layers)
    period = next(n for n in range(1, len(resolved) + 1) if resolved[n:] == resolved[:-n])  # may be cut off at the end
    return str(LayerPattern.reduced(resolved[:period]))


def read_layers(config: Any, count: int, rotation: nn.Module | None = None, head_width: int = 0) -> list[LayerConfig]:
    """Read the encodings of the layers.

    Args:
        config: config of a type in ``MODEL_TYPES``.
        count: number of layers.
        rotation: rotation module of the model, whose frequencies tell the rotated width; None: the config tells it.
        head_width: width D of a head; 0: of the config.

    Raises:
        UserError: a layer has a type that is not supported.
    """
    head_width = head_width or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = []
    for index, layer_type in enumerate(_layer_types(config, count)):
        parameters = _rope_parameters(config, index, layer_type)
        rotates = _rotates(config, index, layer_type)
        model_rotation = None
        if rotates:
            rotated = _rotated_width(config, parameters, head_width)
            if rotation is not None:
                rotated = 2 * _count_frequencies(rotation, layer_type)
            is_interleaved = config.model_type in _ROTATES_NEIGHBOURS
            model_rotation = _model_rotation(parameters, rotated, head_width, is_interleaved)
        if getattr(config, "use_qk_norm", False) and parameters.get("rope_type") == "yarn":
            # Llama 4 normalises rotated queries and keys, which removes the factor that YaRN multiplies them by
            parameters = {**parameters, "attention_factor": 1.0}
        options = _attention_options(config, layer_type, rotates)
        attention = "nope" + (":" if options else "") + ",".join(f"{k}={format_value(v)}" for k, v in options.items())
        layers.append(LayerConfig(model_rotation, parameters, config.max_position_embeddings, attention))
    return layers


def training_length(config: Any, layers: Sequence[LayerConfig]) -> int:
    """Return the training length of a model in tokens, before its context was extended."""
    name = "original_max_position_embeddings"
    return next((x.rope_parameters[name] for x in layers if name in x.rope_parameters), config.max_position_embeddings)


def _layer_types(config: Any, count: int) -> list[str]:
    """Return the type of attention of each layer: full_attention, sliding_attention or chunked_attention."""
    kind, window = config.model_type, getattr(config, "sliding_window", None)
    if kind in _WINDOW_IN_ALL_LAYERS:
        return ["sliding_attention" if window else "full_attention"] * count
    if kind not in _HAS_LAYER_TYPES:
        return ["full_attention"] * count
    sizes = {"full_attention": 0, "sliding_attention": window, "chunked_attention": _chunk_size(config)}
    types = list(config.layer_types or ["full_attention"] * count)
    if len(types) < count:
        raise UserError(f"the config has {len(types)} layer_types and the model has {count} layers: name one per layer")
    for layer_type in types[:count]:
        if layer_type not in sizes or sizes[layer_type] is None:
            raise UserError(
                f"a layer of this model is of type '{layer_type}', whose attention no encoding has: set layer_types of "
                "its config to full_attention, or to sliding_attention with a sliding_window"
            )
    return types[:count]


def _chunk_size(config: Any) -> int | None:
    return getattr(config, "attention_chunk_size", None)


def _rope_parameters(config: Any, index: int, layer_type: str) -> Mapping[str, Any]:
    """Return the rope_parameters of a layer, which may differ by the type or the index of the layer."""
    parameters = config.rope_parameters or {}
    if isinstance(parameters.get(layer_type), Mapping):
        parameters = parameters[layer_type]
    bases = getattr(config, "layer_rope_theta", None)
    return parameters if bases is None else {**parameters, "rope_theta": float(bases[index])}


def _rotates(config: Any, index: int, layer_type: str) -> bool:
    """Return whether a layer rotates queries and keys."""
    if config.model_type in _ROTATES_LOCAL_LAYERS_ONLY:
        return layer_type == "sliding_attention"
    for name in ("no_rope_layers", "layer_rope_theta"):  # 0 or a base of 0: no rotation
        values = getattr(config, name, None)
        if values is not None and not values[index]:
            return False
    return True


def _rotated_width(config: Any, parameters: Mapping[str, Any], head_width: int) -> int:
    """Return the number of elements of a head that the layers of this config rotate."""
    is_partial = config.model_type in _ROTATES_PART_OF_HEAD and parameters.get("rope_type") != "proportional"
    return int(head_width * parameters.get("partial_rotary_factor", 1.0)) if is_partial else head_width


def _count_frequencies(rotation: nn.Module, layer_type: str) -> int:
    """Return the number of frequencies of a rotation module, some of which have frequencies for each type of layer."""
    frequencies = getattr(rotation, f"{layer_type}_inv_freq", getattr(rotation, "inv_freq", None))
    if frequencies is None:
        raise UserError(f"{type(rotation).__name__} has no inv_freq, which transformers 5.23 has: use that version")
    return len(frequencies)


def _model_rotation(parameters: Mapping[str, Any], rotated: int, head_width: int, interleaved: bool) -> ModelRotation:
    """Return the rotation of a layer that rotates ``rotated`` of the ``head_width`` elements of a head."""
    # int(head_width · fraction) must be the rotated width; the quotient itself may round down to less
    quotient = rotated / head_width
    candidates = (parameters.get("partial_rotary_factor"), quotient, math.nextafter(quotient, 1.0))
    fraction = next(x for x in candidates if x and int(head_width * x) == rotated)
    values = {"base": parameters.get("rope_theta"), "rotary_fraction": fraction, "interleaved": interleaved}
    kind = parameters.get("rope_type", "default")
    if kind == "proportional":
        values["keep"] = parameters.get("partial_rotary_factor")
    return ModelRotation(values, "" if kind == "default" else kind)


def _attention_options(config: Any, layer_type: str, rotates: bool) -> dict[str, Any]:
    """Return the attention options of a layer."""
    kind, options = config.model_type, {}
    if layer_type == "sliding_attention":
        options["local"] = config.sliding_window
    if layer_type == "chunked_attention":
        options["block"] = _chunk_size(config)
    if getattr(config, "attn_temperature_tuning", False) and not rotates and config.attn_scale:
        options["query_scale"] = "llama4"
        options |= {"query_scale_value": float(config.attn_scale), "query_scale_interval": int(config.floor_scale)}
    if kind in _CAPS_SCORES and config.attn_logit_softcapping:
        options["softcap"] = float(config.attn_logit_softcapping)
    if kind in HAS_SINKS:
        options["null_logit"] = "learned"
    return options
