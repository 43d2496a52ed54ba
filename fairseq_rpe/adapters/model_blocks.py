"""Blocks of transformers' language models, read from their configs, and the weight maps of these models."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fairseq_rpe.adapters.attention_interface import MODEL_TYPES
from fairseq_rpe.adapters.weight_maps import FFN, MODULES, QKV, WeightMap
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import FAIRSEQ_SPECIALS
from fairseq_rpe.decoder.config import DecoderConfig

PAD = FAIRSEQ_SPECIALS.index("<pad>")
_ATTENTION = (*QKV, "self_attn.out_proj")
_NORMS = ("self_attn_layer_norm", "final_layer_norm", "layer_norm")
# names of transformers -> activation of the decoder
GATES = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "gelu_fast": "geglu"}
_TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
ACTIVATIONS = {"relu": "relu", "relu2": "relu_squared", "gelu": "gelu", **dict.fromkeys(_TANH_GELUS, "gelu_tanh")}
ACTIVATIONS |= {"tanh": "tanh", "linear": "linear"}
_OLMO_EPS = 1e-5  # of olmo, whose config has no field for it
# type of model whose attention is known -> why its blocks are not those of the decoder
_OTHER_BLOCKS = {
    "gpt_oss": "its feed-forward layers have experts",
    "granite_swa": "its attention sinks and multipliers have no place in the decoder's blocks",
    "llama4_text": "its feed-forward layers have experts, and it normalises queries and keys after their rotation",
}


@dataclass
class _Blocks:
    """What an architecture's reader states about one model.

    Attributes:
        options: fields of the decoder's configuration.
        biased: modules of the decoder with a bias.
        factors: factors of the weights of modules.
        norm_offset: 1 if norms multiply by 1 + w.
        modules: entries that replace those of the table of names.
    """

    options: dict[str, Any] = field(default_factory=dict)
    biased: set[str] = field(default_factory=set)
    factors: dict[str, float] = field(default_factory=dict)
    norm_offset: float = 0.0
    modules: dict[str, str | None] | None = None


def weight_map(config: Any, token_ids: Sequence[int] | None = None) -> WeightMap:
    """Return the weight map of a model, with the decoder's configuration.

    Args:
        config: config of transformers.
        token_ids: id in transformers of each token of the decoder; None: the same ids.

    Raises:
        UserError: the decoder has no blocks that compute the same.
    """
    kind = config.model_type
    if kind not in _READERS:
        types = ", ".join(sorted(_READERS))
        why = f": {_OTHER_BLOCKS[kind]}" if kind in _OTHER_BLOCKS else ""
        raise UserError(f"a model of type '{kind}' cannot be imported{why}; known types: {types}")
    blocks = _READERS[kind](config)
    heads, width = config.num_attention_heads, config.hidden_size
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_width = getattr(config, "head_dim", None) or width // heads
    options = {
        "share_embeddings": bool(config.tie_word_embeddings),
        "scale_embedding": False,
        "init": "llama",
        **blocks.options,
        "bias": _bias(blocks.biased),
    }
    decoder_config = DecoderConfig(
        vocabulary=config.vocab_size,
        padding_idx=PAD,
        layers=config.num_hidden_layers,
        width=width,
        heads=heads,
        ffn_width=config.intermediate_size,
        kv_heads=None if kv_heads == heads or kind == "gpt_neox" else kv_heads,
        head_width=None if head_width * heads == width else head_width,
        **options,
    )
    return WeightMap(
        kind,
        decoder_config,
        frozenset(blocks.biased),
        MODULES[kind] if blocks.modules is None else blocks.modules,
        blocks.factors,
        blocks.norm_offset,
        token_ids,
    )


def _bias(biased: Iterable[str]) -> str:
    """Return the smallest choice of biases of the decoder that covers the biased modules."""
    biased = set(biased)
    return "no" if not biased else "qkv" if biased == set(QKV) else "yes"


def _gate(config: Any, name: str) -> str:
    """Return the gated activation of the decoder for the activation of the gate."""
    if name not in GATES:
        raise UserError(
            f"the feed-forward layers of this model have the gate '{name}', and the decoder has {', '.join(GATES)}"
        )
    return GATES[name]


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise UserError(f"this model has the activation '{name}', and the decoder has {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _refuse(config: Any, **values: str) -> None:
    """Refuse options of a config that are on and that the decoder lacks, with a reason for each."""
    for name, reason in values.items():
        if getattr(config, name, None):
            raise UserError(f"this model has {name}={getattr(config, name)}: {reason}")


def _read_llama(config: Any) -> _Blocks:
    """Return RMSNorm and a gated feed-forward layer, with the biases that Llama's config can name."""
    options = {"norm": "rmsnorm", "norm_eps": config.rms_norm_eps, "activation": _gate(config, config.hidden_act)}
    biased = set(_ATTENTION if getattr(config, "attention_bias", False) else ())
    biased |= set(FFN if getattr(config, "mlp_bias", False) else ())
    return _Blocks(options, biased)


def _read_qwen2(config: Any) -> _Blocks:
    blocks = _read_llama(config)
    return replace(blocks, biased=set(QKV))


def _read_qwen3(config: Any) -> _Blocks:
    blocks = _read_llama(config)
    blocks.options["qk_norm"] = "head"
    return blocks


def _read_olmo(config: Any) -> _Blocks:
    """Return layer norms without weights and biases."""
    _refuse(config, clip_qkv="the decoder does not clip queries, keys and values")
    biased = set(_ATTENTION if config.attention_bias else ())
    gate = _gate(config, config.hidden_act)
    return _Blocks({"norm": "layernorm", "norm_eps": _OLMO_EPS, "activation": gate}, biased)


def _read_olmo2(config: Any) -> _Blocks:
    blocks = _read_llama(config)
    blocks.options |= {"norm_position": "output", "qk_norm": "whole"}
    return blocks


def _read_gemma(config: Any) -> _Blocks:
    _refuse(config, use_bidirectional_attention="the decoder is causal")
    blocks = _read_llama(config)
    blocks.options["scale_embedding"] = True
    return replace(blocks, norm_offset=1.0)


def _read_gemma2(config: Any, scaled: str = "self_attn.q_proj") -> _Blocks:
    """Return sandwich norms; the scale of the scores, which is not 1/√D, becomes a factor of the queries."""
    _refuse(config, use_bidirectional_attention="the decoder is causal")
    options = {
        "norm": "rmsnorm",
        "norm_eps": config.rms_norm_eps,
        "norm_position": "sandwich",
        "activation": _gate(config, config.hidden_activation),
        "scale_embedding": True,
        "logit_softcap": float(config.final_logit_softcapping or 0.0),
    }
    factors = {scaled: (config.head_dim / config.query_pre_attn_scalar) ** 0.5}
    return _Blocks(options, set(_ATTENTION if config.attention_bias else ()), factors, norm_offset=1.0)


def _read_gemma3(config: Any) -> _Blocks:
    _refuse(config, attn_logit_softcapping="the pattern of its config has no softcap")
    blocks = _read_gemma2(config, "self_attn.q_norm")  # queries are normalised after the projection
    blocks.options["qk_norm"] = "head"
    return blocks


def _read_starcoder2(config: Any) -> _Blocks:
    options = {"norm": "layernorm", "norm_eps": config.norm_epsilon, "activation": _activation(config.hidden_act)}
    return _Blocks(options, {*_NORMS, *((*_ATTENTION, *FFN) if config.use_bias else ())})


def _read_stablelm(config: Any) -> _Blocks:
    _refuse(config, qk_layernorm="the decoder normalises queries and keys with RMSNorm only")
    options = {"norm": "layernorm", "norm_eps": config.layer_norm_eps, "activation": _gate(config, config.hidden_act)}
    blocks = _Blocks(options, {*_NORMS, *(QKV if config.use_qkv_bias else ())})
    if config.use_parallel_residual:
        _share_norm(blocks, "stablelm")
    return blocks


def _read_cohere2(config: Any) -> _Blocks:
    """Return a parallel residual with one norm for both sublayers; the scale of the logits is one of the output."""
    _refuse(config, use_qk_norm="the decoder normalises queries and keys with RMSNorm only")
    options = {"norm": "layernorm", "norm_eps": config.layer_norm_eps, "activation": _gate(config, config.hidden_act)}
    blocks = _Blocks(options, set(_ATTENTION if config.attention_bias else ()))
    _share_norm(blocks, "cohere2")
    blocks.factors["output_projection"] = float(config.logit_scale)
    if config.tie_word_embeddings:  # the decoder's tables differ by the scale
        assert blocks.modules is not None
        names = {key: name for key, name in blocks.modules.items() if key not in ("embed_tokens", "output_projection")}
        blocks.modules = {"embed_tokens output_projection": "model.embed_tokens", **names}
        options["share_embeddings"] = False
    return blocks


def _share_norm(blocks: _Blocks, kind: str) -> None:
    """Make both norms of a layer copies of its input_layernorm, in a parallel residual."""
    blocks.options["norm_position"] = "parallel"
    norms = ("self_attn_layer_norm", "final_layer_norm")
    names = {key: name for key, name in MODULES[kind].items() if key not in (*norms, " ".join(norms))}
    blocks.modules = {**names, " ".join(norms): "input_layernorm"}


def _read_gpt_neox(config: Any) -> _Blocks:
    options = {
        "norm": "layernorm",
        "norm_eps": config.layer_norm_eps,
        "norm_position": "parallel" if config.use_parallel_residual else "pre",
        "activation": _activation(config.hidden_act),
    }
    return _Blocks(options, {*_NORMS, *FFN, *(_ATTENTION if config.attention_bias else ())})


_READERS: dict[str, Callable[[Any], _Blocks]] = {
    **dict.fromkeys(("llama", "mistral", "smollm3"), _read_llama),
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "olmo": _read_olmo,
    "olmo2": _read_olmo2,
    "olmo3": _read_olmo2,
    "gemma": _read_gemma,
    "gemma2": _read_gemma2,
    "gemma3_text": _read_gemma3,
    "starcoder2": _read_starcoder2,
    "stablelm": _read_stablelm,
    "cohere2": _read_cohere2,
    "gpt_neox": _read_gpt_neox,
}
IMPORTED_TYPES = tuple(kind for kind in MODEL_TYPES if kind in _READERS)
