"""The blocks of the plain decoder against those of transformers with the same weights, and their options."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import make_model, model_args
from refusal import refused
from torch import Tensor

from fairseq_rpe.decoder.cache import DecoderCache
from fairseq_rpe.decoder.config import BLOCK_PRESETS, DecoderConfig, gated_ffn_width
from fairseq_rpe.decoder.decoder import Decoder
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.positions.position_transforms import PositionTransforms

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
}
LLAMA = {"preset": "llama", "kv_heads": 2}
# model of transformers: its further settings, and the options of the decoder
MODELS = {
    "Llama": ({"head_dim": 12, "rms_norm_eps": 1e-6}, {**LLAMA, "head_width": 12}),
    "Qwen3": ({"head_dim": 8, "rms_norm_eps": 1e-6}, {**LLAMA, "qk_norm": "head", "head_width": 8}),
    "Olmo2": ({"rms_norm_eps": 1e-5}, {**LLAMA, "qk_norm": "whole", "norm_position": "output", "norm_eps": 1e-5}),
    "Gemma": (
        {"head_dim": 16, "rms_norm_eps": 1e-6, "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"},
        {
            **LLAMA,
            "kv_heads": 1,
            "head_width": 16,
            "activation": "geglu",
            "scale_embedding": True,
            "share_embeddings": True,
        },
    ),
}


def pair(name: str) -> tuple[Decoder, torch.nn.Module]:
    """Return a decoder and a model of transformers with the same random weights."""
    pytest.importorskip("transformers")
    from fairseq_rpe.adapters import _require_transformers  # noqa: F401

    # isort: split
    import transformers

    settings, options = MODELS[name]
    theirs = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**{**SIZES, **settings})
    )
    decoder = make_decoder(**options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in theirs.parameters():  # norms too must differ from their initial weights
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        for layer, other in zip(decoder.layers, theirs.model.layers, strict=True):
            for projection in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, projection).weight.copy_(getattr(other.self_attn, projection).weight)
            layer.self_attn.out_proj.weight.copy_(other.self_attn.o_proj.weight)
            for ours, there in (("fc1", "up_proj"), ("fc2", "down_proj"), ("fc_gate", "gate_proj")):
                getattr(layer, ours).weight.copy_(getattr(other.mlp, there).weight)
        offset = 1.0 if name == "Gemma" else 0.0  # Gemma's norms multiply by 1 + w
        for ours, there in norm_pairs(decoder, theirs):
            ours.weight.copy_(there.weight + offset)
        decoder.embed_tokens.weight.copy_(theirs.model.embed_tokens.weight)
        decoder.output_projection.weight.copy_(theirs.lm_head.weight)
    return decoder, theirs.eval()


def norm_pairs(decoder: Decoder, theirs) -> list:
    """Return the norms of a decoder with those of a model of transformers."""
    pairs = [(decoder.layer_norm, theirs.model.norm)]
    for layer, other in zip(decoder.layers, theirs.model.layers, strict=True):
        if decoder.config.norm_position == "output":
            names = ("post_attention_layernorm", "post_feedforward_layernorm")
        else:
            names = ("input_layernorm", "post_attention_layernorm")
        norms = (layer.self_attn_layer_norm, layer.final_layer_norm)
        pairs += [(norm, getattr(other, name)) for norm, name in zip(norms, names, strict=True)]
        if layer.self_attn.q_norm is not None:
            pairs += [(getattr(layer.self_attn, n), getattr(other.self_attn, n)) for n in ("q_norm", "k_norm")]
    return pairs


@pytest.mark.parametrize("name", MODELS)
def test_blocks_equal_those_of_transformers(name):
    decoder, theirs = pair(name)
    tokens = some_tokens()
    ours, expected = decoder(tokens), theirs(tokens).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    cache, steps, past = DecoderCache(), [], None
    with torch.no_grad():
        for n in (9, 10, 11, 16, 23):
            steps.append(decoder(tokens[:, :n], cache))
            step = theirs(tokens[:, n - steps[-1].shape[1] : n], past_key_values=past, use_cache=True)
            past = step.past_key_values
            torch.testing.assert_close(steps[-1], step.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(steps, 1), expected.detach(), rtol=1e-5, atol=1e-5)
    assert cache.layer(0).tensors[0].shape == (2, decoder.config.num_kv_heads, 23, decoder.config.head_dim)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_transformers(name):
    decoder, theirs = pair(name)
    tokens = some_tokens()
    for logits in (decoder(tokens), theirs(tokens).logits):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    pairs = [*norm_pairs(decoder, theirs), (decoder.embed_tokens, theirs.model.embed_tokens)]
    for layer, other in zip(decoder.layers, theirs.model.layers, strict=True):
        pairs += [(getattr(layer.self_attn, n), getattr(other.self_attn, n)) for n in ("q_proj", "k_proj", "v_proj")]
        pairs += [(layer.self_attn.out_proj, other.self_attn.o_proj), (layer.fc1, other.mlp.up_proj)]
        pairs += [(layer.fc2, other.mlp.down_proj), (layer.fc_gate, other.mlp.gate_proj)]
    for ours, there in pairs:
        torch.testing.assert_close(ours.weight.grad, there.weight.grad, rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("options", [{"qk_norm": "head"}, {"qk_norm": "whole"}, {"kv_heads": 2}, {"preset": "llama"}])
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
    assert (config.norm, config.norm_eps, config.activation, config.bias) == ("rmsnorm", 1e-6, "swiglu", False)
    assert (config.init, config.scale_embedding, config.num_kv_heads, config.head_dim) == ("llama", False, 2, 12)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert model.decoder.layers[0].self_attn.k_proj.weight.shape == (24, 32)
    mixed = make_model(task, "rope", block="llama", norm="layernorm", bias="yes", activation_fn="gelu")
    assert (mixed.decoder.config.norm, mixed.decoder.config.activation) == ("layernorm", "gelu")
    assert mixed.decoder.layers[0].fc1.bias is not None and mixed.decoder.layers[0].fc_gate is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_heads": 3}, "--kv-heads 3 does not divide the 4 attention heads"),
        ({"qk_norm": "all"}, "--qk-norm is one of none, head, whole, not 'all'"),
        ({"norm": "rms"}, "--norm is one of layernorm, rmsnorm, not 'rms'"),
        ({"block": "gemma"}, "--block is one of classic, llama, not 'gemma'"),
        ({"bias": "maybe"}, "--bias is yes or no, not 'maybe'"),
        ({"block_init": "xavier"}, "--block-init is one of fairseq, gpt2, llama, not 'xavier'"),
        ({"norm_position": "middle"}, "--norm-position is one of pre, post, output, not 'middle'"),
        ({"ffn_multiple": 32}, "--ffn-multiple sets the width of gated feed-forward layers, and --activation-fn relu"),
        ({"head_dim": 6, "scale_heads": True}, "--scale-heads divides the model width into heads"),
        ({"logit_softcap": -1.0}, "--logit-softcap is a positive number, or 0 for none, not -1"),
        ({"logit_softcap": 9.0, "adaptive_softmax_cutoff": "20"}, "--logit-softcap: an adaptive softmax has no logits"),
        ({"base_layers": 1}, "mixture-of-experts layers are not supported"),
    ],
)
def test_what_is_refused(task, flags, message):
    with refused(message):
        make_model(task, "rope", **flags)


@pytest.mark.parametrize("spec", ["shaw", "transformer_xl", "deberta", "music", "huang"])
def test_normalised_queries_and_biases_that_read_queries(task, spec):
    with refused("--qk-norm head: .* computes its bias from the queries and keys before they are normalised"):
        make_model(task, spec, qk_norm="head")


def test_a_head_width_that_one_encoding_cannot_have(task):
    with refused("'bipe.*' acts at the input and rotates heads, so a head must have 8 elements"):
        make_model(task, "bipe:inter=rope", head_dim=12)
    assert make_model(task, "sinusoidal", head_dim=12).decoder.encodings[0].width == 32
    assert make_model(task, "alibi", head_dim=12).decoder.encodings[0].width == 48
