"""Writes a decoder as a model of transformers that needs no code of this package, where one computes the same."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fairseq_rpe.adapters.config_pattern import (  # first, because it checks that transformers is installed
    pattern_from_config,
)

# isort: split

from torch import Tensor
from transformers import AutoConfig

from fairseq_rpe.adapters.model_blocks import weight_map
from fairseq_rpe.adapters.weight_maps import EMBEDDING, OUTPUT
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import is_pattern
from fairseq_rpe.core.spec import canonical, parse
from fairseq_rpe.data.folder import EOS_ID
from fairseq_rpe.decoder.config import DecoderConfig
from fairseq_rpe.encodings import normalise
from fairseq_rpe.encodings.base import registry
from fairseq_rpe.encodings.rope import Rope

ARCHITECTURES = ("gpt_neox", "llama")
_CLASSES = {"gpt_neox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM"}
_NO_POSITIONS = "nope"
_RAMPS = {"llama3": 4.0, "yarn": 32.0}  # scaling that depends on the original length -> its default of beta_fast
_NOT_EXPORTED = ("encodings.", "version")  # beginnings of names; the exported encodings have no parameters
# activation of the decoder -> its name in transformers, for layers without a gate
_ACTIVATIONS = {
    "relu": "relu",
    "relu_squared": "relu2",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "tanh": "tanh",
    "linear": "linear",
}
# field of the decoder's configuration -> the only value that both architectures have, and what another one is
_REQUIRED: dict[str, tuple[Any, str]] = {
    "final_norm": (True, "has no norm after the last layer"),
    "embedding_norm": (False, "has a norm after the embedding"),
    "qk_norm": ("none", "normalises queries and keys"),
    "logit_softcap": (0.0, "has a softcap of the logits"),
    "scale_attention": (False, "has a norm after attention"),
    "scale_heads": (False, "scales its heads"),
    "scale_ffn": (False, "has a norm within the feed-forward layers"),
    "scale_residual": (False, "scales the residual"),
}


def export_as(
    architecture: str,
    config: DecoderConfig,
    rpe: str,
    length: int,
    weights: Mapping[str, Tensor],
    token_ids: Sequence[int] | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of a transformers model that computes the same as a decoder.

    ``nope`` is GPT-NeoX with a ``partial_rotary_factor`` of 0, because its rotation then rotates nothing.

    Args:
        architecture: "gpt_neox" or "llama".
        config: sizes and blocks of the decoder.
        rpe: spec of its encoding; a position transform in evaluation must be refused before.
        length: training length in tokens, the model's ``max_position_embeddings``.
        weights: state dict of the decoder.
        token_ids: id in the exported model of each id of the decoder; None: the same ids.

    Returns:
        Values of config.json, and tensors by name.

    Raises:
        UserError: the architecture does not compute the same.
    """
    _check_blocks(architecture, config)
    if is_pattern(rpe):
        raise _refusal(architecture, f"its layers have one encoding, and this model has '{rpe}'")
    rpe = _reduce(rpe, length)
    values = _read_config(architecture, config, length)
    values["rope_parameters"] = _rope_parameters(rpe)
    padding, start = config.padding_idx, EOS_ID
    if token_ids is not None:
        padding, start = token_ids[padding], token_ids[start]
    values |= {"pad_token_id": padding, "bos_token_id": start, "eos_token_id": start}
    tensors = _complete_weights(config, weights)
    tied = config.share_embeddings and not config.scale_embedding
    values["tie_word_embeddings"] = tied
    exported = AutoConfig.for_model(**values)
    _check_encoding(architecture, rpe, length, exported)
    mapped = weight_map(exported, token_ids)
    values |= {"architectures": [_CLASSES[architecture]], "dtype": "float32"}
    return values, mapped.to_theirs(tensors)


def _check_blocks(architecture: str, config: DecoderConfig) -> None:
    """Refuse blocks that the architecture lacks."""
    for field, (value, problem) in _REQUIRED.items():
        if getattr(config, field) != value:
            raise _refusal(architecture, f"this model {problem}")
    if (config.input_width or config.width, config.output_width or config.width) != (config.width, config.width):
        raise _refusal(architecture, "the embedding of this model has another width than its layers")
    norm, position = config.norm, config.norm_position
    if architecture == "llama":
        fits = norm == "rmsnorm" and position == "pre" and config.activation == "swiglu"
        needs = "RMSNorm before each sublayer and SwiGLU"
    else:
        fits = norm == "layernorm" and position in ("pre", "parallel") and config.activation in _ACTIVATIONS
        needs = "layer norms before each sublayer and an activation without a gate"
    if not fits:
        raise _refusal(architecture, f"it has {needs}, and this model has {norm}, {position}, {config.activation}")
    has_plain_heads = config.num_kv_heads == config.heads and config.heads * config.head_dim == config.width
    if architecture == "gpt_neox" and not has_plain_heads:
        raise _refusal(architecture, "its heads divide the model width, and each has keys and values")


def _refusal(architecture: str, reason: str) -> UserError:
    return UserError(f"--as {architecture} would compute something else: {reason}; leave --as out")


def _reduce(rpe: str, length: int) -> str:
    """Return a spec without defaults that depend on the training length, and without options that change nothing."""
    config = registry.resolve(rpe)[2]
    if not isinstance(config, Rope.Config):
        return normalise(rpe)
    is_ramp = config.scaling in _RAMPS
    changes: dict[str, Any] = {"original_length": (config.original_length or length) if is_ramp else 0}
    if is_ramp and config.beta_fast == "auto":
        changes["beta_fast"] = _RAMPS[config.scaling]
    if config.rotary_fraction == 1:
        changes["temperature_on"] = "head"
    return normalise(canonical(parse(rpe)[0], replace(config, **changes)))


def _read_config(architecture: str, config: DecoderConfig, length: int) -> dict[str, Any]:
    """Return the values of transformers' config that follow from the blocks."""
    values = {
        "model_type": architecture,
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.ffn_width,
        "max_position_embeddings": length,
    }
    if architecture == "llama":
        return {
            **values,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "rms_norm_eps": config.norm_eps,
            "hidden_act": "silu",
            "attention_bias": config.bias != "no",
            "mlp_bias": config.bias == "yes",
        }
    return {
        **values,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": _ACTIVATIONS[config.activation],
        "attention_bias": config.bias != "no",
        "use_parallel_residual": config.norm_position == "parallel",
    }


def _rope_parameters(rpe: str) -> dict[str, Any]:
    """Return ``rope_parameters`` for a reduced spec; :func:`_check_encoding` checks whether they describe all of it."""
    config = registry.resolve(rpe)[2]
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if not isinstance(config, Rope.Config):
        return {**parameters, "partial_rotary_factor": 0.0}
    parameters |= {"rope_theta": config.base, "partial_rotary_factor": config.rotary_fraction}
    if config.scaling in ("linear", *_RAMPS):
        parameters |= {"rope_type": config.scaling, "factor": config.factor}
    if config.scaling in _RAMPS:
        parameters["original_max_position_embeddings"] = config.original_length
    if config.scaling == "llama3":
        parameters |= {"high_freq_factor": config.beta_fast, "low_freq_factor": config.beta_slow}
    if config.scaling == "yarn":
        parameters |= {"beta_fast": config.beta_fast, "beta_slow": config.beta_slow, "truncate": config.truncate}
        if config.temperature != "auto":
            parameters["attention_factor"] = config.temperature
    return parameters


def _check_encoding(architecture: str, rpe: str, length: int, exported: Any) -> None:
    """Check that a config of transformers describes an encoding, by reading the pattern of its layers."""
    if rpe == _NO_POSITIONS and architecture == "gpt_neox":
        return
    try:
        described = _reduce(pattern_from_config(exported), length)
    except (UserError, ValueError, TypeError, StopIteration):  # values that transformers does not have
        described = ""
    if described != rpe:
        has = "rope with scaling none, linear, llama3 or yarn" + (", and nope" if architecture == "gpt_neox" else "")
        raise _refusal(architecture, f"its encodings are {has}, and this model has '{rpe}'")


def _complete_weights(config: DecoderConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with scaled embeddings, and with biases of 0 where the decoder has none."""
    tensors = {name: value for name, value in weights.items() if not name.startswith(_NOT_EXPORTED)}
    tensors.setdefault(OUTPUT, tensors[EMBEDDING])
    if config.scale_embedding:
        tensors[EMBEDDING] = tensors[EMBEDDING] * math.sqrt(config.width)
    for name, value in list(tensors.items()):
        bias = name.removesuffix("weight") + "bias"
        if name.endswith(".weight") and bias not in tensors:
            tensors[bias] = value.new_zeros(value.shape[0])
    return tensors
