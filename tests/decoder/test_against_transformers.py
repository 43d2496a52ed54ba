"""The decoder against language models of transformers with the same weights: logits, gradients and cached decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from test_blocks import PAD, VOCABULARY, make_decoder, some_tokens
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.decoder.cache import DecoderCache
from fairseq_rpe.decoder.decoder import Decoder

WINDOW = 8
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
}
LOCAL_GLOBAL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
GEMMA_BLOCK = {"preset": "gemma3", "head_width": 16, "share_embeddings": True}
LLAMA4 = {"use_qk_norm": False, "moe_layers": [], "no_rope_layers": [1, 0], "intermediate_size_mlp": 48}
# class in transformers -> further settings of its config, and options of the decoder
MODELS = {
    "Llama": ({"head_dim": 12}, {"preset": "llama", "head_width": 12}),
    "Qwen2": ({}, {"preset": "llama", "bias": "qkv"}),
    "Qwen3": ({"head_dim": 12}, {"preset": "qwen3", "head_width": 12}),
    "Olmo2": ({"rms_norm_eps": 1e-5}, {"preset": "olmo2"}),
    "Gemma": (
        {**GEMMA, "num_key_value_heads": 1},
        {**GEMMA_BLOCK, "kv_heads": 1, "norm_position": "pre", "qk_norm": "none"},
    ),
    "Gemma2": ({**GEMMA, **LOCAL_GLOBAL}, {**GEMMA_BLOCK, "qk_norm": "none", "logit_softcap": 30.0}),
    "Gemma3": ({**GEMMA, **LOCAL_GLOBAL}, GEMMA_BLOCK),
    "GPTNeoX": ({"rotary_pct": 0.25}, {"preset": "gpt-neox", "kv_heads": 4}),
    "GptOss": (
        {**LOCAL_GLOBAL, "head_dim": 8, "rms_norm_eps": 1e-5, "num_local_experts": 1, "num_experts_per_tok": 1},
        {"preset": "gpt-oss"},
    ),
    "SmolLM3": ({"no_rope_layers": [1, 0]}, {"preset": "llama", "share_embeddings": True}),
    "Cohere2": (
        {**LOCAL_GLOBAL, "logit_scale": 0.25},
        {"preset": "llama", "norm": "layernorm", "norm_eps": 1e-5, "norm_position": "parallel"},
    ),
    "Llama4": ({**LLAMA4, "head_dim": 8, "attention_chunk_size": WINDOW, "floor_scale": 4}, {"preset": "llama"}),
}


def build_pair(name: str) -> tuple[Decoder, torch.nn.Module]:
    """Return a decoder and a model of transformers with random weights, whose norms differ from their initial ones."""
    pytest.importorskip("transformers")
    from fairseq_rpe.adapters import _require_transformers  # noqa: F401

    # isort: split
    import transformers

    from fairseq_rpe.adapters.config_pattern import pattern_from_config

    settings, options = MODELS[name]
    config_name = f"{name}TextConfig" if name in ("Gemma3", "Llama4") else f"{name}Config"
    config = getattr(transformers, config_name)(**{**SIZES, **settings})
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    decoder = make_decoder(pattern_from_config(config), **{"kv_heads": 2, **options})
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            scale = 4.0 if "gate_up_proj" in key else 0.2  # the former exceed the bounds of gpt-oss's activation
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return decoder, theirs


def our_weights(decoder: Decoder, theirs: torch.nn.Module) -> dict[str, Tensor]:
    """Compute the weights of the decoder from those of a model, so that gradients flow through them."""
    from fairseq_rpe.adapters.model_blocks import weight_map
    from fairseq_rpe.adapters.weight_maps import FFN, MODULES, QKV, WeightMap

    kind, weights = theirs.config.model_type, dict(theirs.named_parameters())
    if kind == "gpt_neox":
        return dict(weight_map(theirs.config).to_ours(lambda key: weights[key.replace("embed_out", "lm_head")]))
    if kind not in ("gpt_oss", "llama4_text"):
        return dict(weight_map(theirs.config).to_ours(weights.__getitem__))
    # models with experts are not imported; with one expert, or with dense layers, their blocks are ours
    dense = (
        dict(join_expert(weights))
        if kind == "gpt_oss"
        else {key.replace("feed_forward.", "mlp."): value for key, value in weights.items()}
    )
    biased = frozenset((*QKV, "self_attn.out_proj", *FFN) if kind == "gpt_oss" else ())
    ours = dict(WeightMap("llama", decoder.config, biased, MODULES["llama"]).to_ours(dense.__getitem__))
    sinks = [value for key, value in weights.items() if key.endswith(".sinks")]
    return ours | {f"encodings.{layer}.null_logit": value for layer, value in enumerate(sinks)}


def join_expert(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of gpt-oss with one expert by the names of Llama; the expert's gate and values alternate."""
    for key, value in weights.items():
        prefix, is_expert, kind = key.partition("mlp.experts.")
        if not is_expert:
            yield key, value
            continue
        matrix = value[0].mT if value.dim() == 3 else value[0]  # (2F, C) or (C, F), or a bias (2F) or (C)
        suffix = ".bias" if kind.endswith("_bias") else ".weight"
        if kind.startswith("gate_up"):
            yield f"{prefix}mlp.gate_proj{suffix}", matrix[0::2]
            yield f"{prefix}mlp.up_proj{suffix}", matrix[1::2]
        else:
            yield f"{prefix}mlp.down_proj{suffix}", matrix


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_that_of_transformers(name):
    """Logits, gradients of every weight, and decoding with caches that lose the keys outside of the windows."""
    decoder, theirs = build_pair(name)
    tokens, weights = some_tokens(), dict(theirs.named_parameters())
    expected = theirs(tokens).logits
    mapped = our_weights(decoder, theirs)
    ours = torch.func.functional_call(decoder, mapped, (tokens,))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    losses = [F.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for x in (ours, expected)]
    gradients = [torch.autograd.grad(loss, list(weights.values()), materialize_grads=True) for loss in losses]
    for key, gradient, other in zip(weights, *gradients, strict=True):
        assert other.any() or ".router." in key, key  # a choice among one expert has no gradient
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)
    incompatible = decoder.load_state_dict(mapped, strict=False)
    assert not incompatible.unexpected_keys
    cache, past, steps = DecoderCache(), None, []
    with torch.no_grad():
        for n in (9, 10, 11, 16, 23):
            steps.append(decoder(tokens[:, :n], cache))
            step = theirs(tokens[:, n - steps[-1].shape[1] : n], past_key_values=past, use_cache=True)
            past = step.past_key_values
            torch.testing.assert_close(steps[-1], step.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(steps, 1), expected.detach(), rtol=1e-5, atol=1e-5)
