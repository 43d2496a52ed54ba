"""The blocks of the plain decoder and their options; test_against_transformers.py compares them with other models."""

from __future__ import annotations

import math
from typing import get_args, get_type_hints

import pytest
import torch
from conftest import make_model, model_args
from refusal import refused
from torch import Tensor

from fairseq_rpe.decoder.blocks import GATES
from fairseq_rpe.decoder.cache import DecoderCache
from fairseq_rpe.decoder.config import (
    BIASES,
    BLOCK_PRESETS,
    GATED_ACTIVATIONS,
    NORM_POSITIONS,
    NORMS,
    QK_NORMS,
    DecoderConfig,
    gated_ffn_width,
)
from fairseq_rpe.decoder.decoder import Decoder
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.positions.position_transforms import PositionTransforms
from fairseq_rpe.runs.training_config import TrainingConfig

VOCABULARY, PAD = 61, 1


def make_decoder(spec: str = "rope", seed: int = 0, preset: str = "classic", **options) -> Decoder:
    """Build a small decoder in evaluation mode."""
    sizes = {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48}
    options = {
        "vocabulary": VOCABULARY,
        "padding_idx": PAD,
        "backend": "sdpa",
        **sizes,
        **BLOCK_PRESETS[preset],
        **options,
    }
    config = DecoderConfig(**options)
    torch.manual_seed(seed)
    encodings = build_for_model(spec, config.heads, config.width, config.layers, 64, head_width=config.head_width)
    return Decoder(config, encodings, PositionTransforms("identity", "", 64, 1, 0)).eval()


def some_tokens(rows: int = 2, n: int = 23) -> Tensor:
    return torch.randint(4, VOCABULARY, (rows, n), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("spec", ["alibi", "rope", "fire", "forgetting", "xpos", "t5_bias", "sinusoidal"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_key_heads_are_repeated_ones(spec, kv_heads):
    """A model with G key/value heads is one with H heads, of which H/G neighbours have equal weights."""
    few, many = (make_decoder(spec, preset="llama", kv_heads=heads) for heads in (kv_heads, 4))
    state = few.state_dict()
    for name in list(state):
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            state[name] = state[name].unflatten(0, (kv_heads, 8)).repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
    many.load_state_dict(state)
    tokens, caches = some_tokens(), (DecoderCache(), DecoderCache())
    torch.testing.assert_close(few(tokens), many(tokens), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        for n in (7, 8, 9, 23):
            steps = [model(tokens[:, :n], cache) for model, cache in zip((few, many), caches, strict=True)]
            torch.testing.assert_close(*steps, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"qk_norm": "head"}, {"qk_norm": "whole"}, {"kv_heads": 2}, *({"preset": name} for name in BLOCK_PRESETS)],
    ids=str,
)
def test_bfloat16_products(options):
    tokens = some_tokens()
    narrow, wide = (make_decoder(compute_dtype=dtype, **options) for dtype in ("bf16", "fp32"))
    expected = wide.features(tokens)
    torch.testing.assert_close(
        narrow.features(tokens), expected, rtol=0, atol=3e-2 * float(expected.detach().abs().max())
    )


def test_the_logits_are_capped():
    plain, capped = make_decoder(), make_decoder(logit_softcap=0.5)
    tokens = some_tokens()
    torch.testing.assert_close(capped(tokens), 0.5 * torch.tanh(plain(tokens) / 0.5))
    assert capped(tokens).abs().max() < 0.5 < plain(tokens).abs().max()


@pytest.mark.parametrize(
    ("width", "widths"),
    # F = 8C/3 rounded up to multiples of 1, 8, 32, 64 and 256
    [(128, (341, 344, 352, 384, 512)), (512, (1365, 1368, 1376, 1408, 1536)), (1024, (2730, 2736, 2752, 2752, 2816))],
)
def test_width_of_gated_layers(width, widths):
    assert tuple(gated_ffn_width(width, multiple) for multiple in (1, 8, 32, 64, 256)) == widths
    assert gated_ffn_width(192) == 512 and gated_ffn_width(768) == 2048


def count(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_gated_layers_have_the_parameters_of_plain_ones(task):
    """A gated feed-forward layer of width 8C/3 has as many weights as a plain one of width 4C."""
    args = model_args("rope", decoder_embed_dim=96, block="llama")
    del args.decoder_ffn_embed_dim, args.activation_fn  # as if no flag were given
    sizes = {"decoder_embed_dim": 96, "bias": "no", "decoder_ffn_embed_dim": 4 * 96, "norm": "rmsnorm"}
    gated = make_model(task, "rope", decoder_embed_dim=96, block="llama", decoder_ffn_embed_dim=gated_ffn_width(96))
    assert gated_ffn_width(96) == 256 and count(gated) == count(make_model(task, "rope", **sizes))


def test_initial_weights():
    models = {init: make_decoder(init=init, width=96, layers=3) for init in ("gpt2", "llama")}
    for init, model in models.items():
        scale = math.sqrt(6) if init == "gpt2" else 1.0
        for layer in model.layers:
            for linear in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.fc1):
                assert float(linear.weight.std()) == pytest.approx(0.02, rel=0.05)
            for linear in (layer.self_attn.out_proj, layer.fc2):
                assert float(linear.weight.std()) == pytest.approx(0.02 / scale, rel=0.05)
            assert not any(linear.bias.any() for linear in (layer.self_attn.k_proj, layer.fc1, layer.fc2))
        for table in (model.embed_tokens.weight, model.output_projection.weight):
            assert float(table[PAD + 1 :].std()) == pytest.approx(0.02, rel=0.05)
        assert not model.embed_tokens.weight[PAD].any()
    tied = make_decoder(init="gpt2", share_embeddings=True)
    assert tied.output_projection.weight is tied.embed_tokens.weight and not tied.embed_tokens.weight[PAD].any()


def test_encodings_keep_their_initial_weights():
    """An initialisation of the blocks does not reach the encodings."""
    for init in ("gpt2", "llama"):
        ours, other = make_decoder("fire", init=init), make_decoder("fire")
        assert all(
            torch.equal(a, b) for a, b in zip(ours.encodings.parameters(), other.encodings.parameters(), strict=True)
        )


def test_flags_of_a_model(task):
    model = make_model(task, "rope", block="llama", kv_heads=2, qk_norm="head", head_dim=12, logit_softcap=30.0)
    config = model.decoder.config
    assert (config.norm, config.norm_eps, config.activation, config.bias) == ("rmsnorm", 1e-6, "swiglu", "no")
    assert (config.init, config.scale_embedding, config.num_kv_heads, config.head_dim) == ("llama", False, 2, 12)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert model.decoder.layers[0].self_attn.k_proj.weight.shape == (24, 32)
    mixed = make_model(task, "rope", block="llama", norm="layernorm", bias="yes", activation_fn="gelu")
    assert (mixed.decoder.config.norm, mixed.decoder.config.activation) == ("layernorm", "gelu")
    assert mixed.decoder.layers[0].fc1.bias is not None and mixed.decoder.layers[0].fc_gate is None


@pytest.mark.parametrize("preset", BLOCK_PRESETS)
def test_flags_of_a_preset(task, preset):
    """``--block`` alone sets each option of its row, and the others have the defaults of the configuration."""
    config = make_model(task, "rope", block=preset).decoder.config
    for name, value in {"norm_position": "pre", "qk_norm": "none", **BLOCK_PRESETS[preset]}.items():
        assert getattr(config, name) == value, name


def test_biases_of_queries_keys_and_values_alone(task):
    model = make_model(task, "rope", block="llama", bias="qkv")
    biased = {name.split(".")[-2] for name, _ in model.named_parameters() if name.endswith("bias")}
    assert biased == {"q_proj", "k_proj", "v_proj"}


def test_every_choice_is_an_option_of_train():
    """``fairseq-rpe train`` has the values that the decoder has; ``post`` is not offered there."""
    hints = get_type_hints(TrainingConfig)
    choices = {
        name: get_args(get_args(hints[name])[0]) for name in ("block", "norm", "norm_position", "bias", "qk_norm")
    }
    expected = (tuple(BLOCK_PRESETS), NORMS, tuple(p for p in NORM_POSITIONS if p != "post"), BIASES, QK_NORMS)
    assert tuple(choices.values()) == expected
    assert {*GATED_ACTIVATIONS} == {*GATES} <= {*get_args(get_args(hints["activation_fn"])[0])}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_heads": 3}, "--kv-heads 3 does not divide the 4 attention heads"),
        ({"qk_norm": "all"}, "--qk-norm is one of none, head, whole, not 'all'"),
        ({"norm": "rms"}, "--norm is one of layernorm, rmsnorm, not 'rms'"),
        ({"block": "gemma"}, "--block is one of classic, llama, qwen3, olmo2, gemma3, gpt-oss, gpt-neox, not 'gemma'"),
        ({"bias": "maybe"}, "--bias is one of yes, qkv, no, not 'maybe'"),
        ({"block_init": "xavier"}, "--block-init is one of fairseq, gpt2, llama, not 'xavier'"),
        ({"norm_position": "middle"}, "--norm-position is one of pre, post, output, sandwich, parallel, not 'middle'"),
        ({"ffn_multiple": 32}, "--ffn-multiple sets the width of gated feed-forward layers, and --activation-fn relu"),
        ({"norm_position": "parallel", "scale_resids": True}, "--scale-resids scales the residual of the feed-forward"),
        ({"head_dim": 6, "scale_heads": True}, "--scale-heads divides the model width into heads"),
        ({"logit_softcap": -1.0}, "--logit-softcap is a positive number, or 0 for none, not -1"),
        ({"logit_softcap": 9.0, "adaptive_softmax_cutoff": "20"}, "--logit-softcap: an adaptive softmax has no logits"),
        ({"decoder_layers": 0}, "--decoder-layers is a positive number, not 0"),
        ({"dropout": 1.5}, "--dropout is from 0 to below 1, not 1.5"),
        ({"norm_eps": float("nan")}, "--norm-eps is a positive number, not nan"),
        ({"decoder_input_dim": 24, "share_decoder_input_output_embed": True}, "have the widths 24 and 32"),
        ({"base_layers": 1}, "mixture-of-experts layers are not supported"),
    ],
)
def test_what_is_refused(task, flags, message):
    with refused(message):
        make_model(task, "rope", **flags)


@pytest.mark.parametrize("spec", ["shaw", "transformer_xl", "deberta", "music", "huang"])
def test_normalised_queries_and_biases_that_read_queries(task, spec):
    with refused("--qk-norm head: .* is defined by a bias of queries and keys that are not normalised"):
        make_model(task, spec, qk_norm="head")


def test_gates_of_normalised_keys_are_bounded(task):
    """|û·k| of a key with a mean square of 1 is at most its norm sqrt(D)."""
    model = make_model(task, "grape_a", qk_norm="head").eval()
    keys = []
    encoding = model.decoder.encodings[0]
    plain = encoding.content_bias
    encoding.content_bias = lambda q, k, pos, features: keys.append(k) or plain(q, k, pos, features)
    with torch.no_grad():
        model(torch.randint(4, 20, (2, 9)))
    norms = torch.cat([k.norm(dim=-1).flatten() for k in keys])
    torch.testing.assert_close(norms, torch.full_like(norms, keys[0].shape[-1] ** 0.5), rtol=1e-2, atol=0)


def test_a_head_width_that_one_encoding_cannot_have(task):
    with refused("'bipe.*' acts at the input and rotates heads, so a head must have 8 elements"):
        make_model(task, "bipe:inter=rope", head_dim=12)
    assert make_model(task, "sinusoidal", head_dim=12).decoder.encodings[0].width == 32
    assert make_model(task, "alibi", head_dim=12).decoder.encodings[0].width == 48
