"""The fairseq model: the same function as stock fairseq, any length, padding, decoding, sharing, checkpointing."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from conftest import make_model, model_args
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModel
from refusal import refused
from specs import representatives
from torch import nn

from fairseq_rpe.encodings.base import registry
from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

PAD, FIRST = 1, 4
READERS = [
    "bipe:segment_delimiters=</s>+w1+w2",
    "bipe:inter=alibi,segment_delimiters=w1+w2,intra=sinusoidal",
    "complex",
]


def shares(spec: str) -> tuple[str, ...]:
    return registry.get(spec.partition(":")[0]).sharing_modes


def tokens(rows: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(FIRST, 60, (rows, n), generator=torch.Generator().manual_seed(seed))


def logits(model, x, **kwargs):
    return model(x, **kwargs)[0]


def test_equals_stock_fairseq(task):
    """The same weights under fairseq's own transformer_lm give the same logits and gradients."""
    ours, x = make_model(task, "sinusoidal"), tokens(3, 21)
    stock = TransformerLanguageModel.build_model(model_args("sinusoidal"), task).eval()
    missing, unexpected = nn.Module.load_state_dict(stock, ours.state_dict(), strict=False)
    assert not unexpected and all("embed_positions" in key for key in missing)
    x[1, -4:] = PAD
    a, b = (logits(model, x)[x.ne(PAD)] for model in (ours, stock))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    (a.square().mean() + b.square().mean()).backward()
    grads = dict(stock.named_parameters())
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, grads[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "spec", [*representatives("adds_bias", "rotates", "embeds", "content_bias", "transform_scores"), *READERS]
)
def test_padding_in_the_middle_is_not_counted(task, spec):
    model, row = make_model(task, spec), tokens(1, 12)
    holed = torch.cat([row[:, :5], torch.full((1, 3), PAD), row[:, 5:]], 1)
    with torch.no_grad():
        got = logits(model, holed)[0]
        torch.testing.assert_close(torch.cat([got[:5], got[8:]]), logits(model, row)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "spec", [s for s in representatives("content_bias", "transform_scores", "learns") if len(shares(s)) > 1]
)
def test_activation_checkpoints_of_encodings_that_layers_share_otherwise(task, spec):
    grads = []
    for on in (False, True):
        model = make_model(task, spec, checkpoint_activations=on, rpe_share=shares(spec)[1]).train()
        logits(model, tokens(2, 13)).square().mean().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("spec", ["kerple_log", "fire", "rope", "xpos"])
def test_autocast(task, spec):
    model, x = make_model(task, spec).train(), tokens(2, 65)
    exact = logits(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = logits(model, x)
        rough.float().square().mean().backward()
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).abs().max() < 0.05 * exact.abs().max()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("spec", "share", "number"), [("fire", "auto", 2), ("fire", "model", 1), ("kerple_log", "auto", 1)]
)
def test_sharing(task, spec, share, number):
    assert len(make_model(task, spec, rpe_share=share).decoder.encodings) == number


def test_layerdrop_keeps_each_layers_own_encoding(task):
    model, seen = make_model(task, "kerple_log", rpe_share="layer", decoder_layerdrop=0.5).train(), set()
    assert not torch.equal(*(e.raw_p for e in model.decoder.encodings))
    torch.manual_seed(0)
    for _ in range(12):
        model.zero_grad()
        logits(model, tokens(1, 9)).sum().backward()
        seen.add(tuple(e.raw_p.grad is not None for e in model.decoder.encodings))
        for layer, encoding in zip(model.decoder.layers.children(), model.decoder.encodings, strict=True):
            assert (layer.fc1.weight.grad is None) == (encoding.raw_p.grad is None)
    assert len(seen) > 1


@pytest.mark.parametrize("spec", READERS)
def test_words_before_are_seen_and_a_state_goes_into_a_model_of_the_same_dictionary(task, spec):
    """A token's logits follow from which words came before it, and not from those behind it."""
    (model, other), x = (make_model(task, spec, seed) for seed in (0, 1)), tokens(2, 12)
    noise = torch.Generator().manual_seed(5)
    for p in model.decoder.encodings.parameters():  # far from where they start
        p.data += torch.randn(p.shape, generator=noise)
    changed = x.clone()
    changed[:, -1] = torch.where(x[:, -1] == 5, 6, 5)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        a, b = logits(model, x), logits(model, changed)
        torch.testing.assert_close(a[:, :-1], b[:, :-1])
        assert not torch.allclose(a[:, -1], b[:, -1])
        assert torch.equal(a, logits(other, x))


def test_moved_positions_keep_their_tokens(task):
    model, x = make_model(task, "complex", positions_eval="offset:tokens=3"), tokens(2, 9)
    with torch.no_grad():
        assert not torch.allclose(logits(model, x), logits(make_model(task, "complex"), x))


def test_sizes_and_limits(task):
    ARCH_CONFIG_REGISTRY["transformer_rpe_lm_base"](args := Namespace())
    assert (args.decoder_layers, args.decoder_embed_dim, args.decoder_attention_heads) == (12, 768, 12)
    assert args.decoder_ffn_embed_dim == 3072
    model = make_model(task, "type1", share_decoder_input_output_embed=True)
    assert model.max_positions() > 10**6
    assert model.decoder.output_projection.weight is model.decoder.embed_tokens.weight
    with refused("causal language model"):
        model.decoder(tokens(1, 4), full_context_alignment=True)


def test_adaptive_input_and_softmax(task):
    adaptive = {"adaptive_input": True, "adaptive_input_cutoff": "20,40", "adaptive_softmax_cutoff": "20,40"}
    sizes = {"tie_adaptive_weights": True, "decoder_input_dim": 32, "decoder_output_dim": 32}
    model = make_model(task, "alibi", **adaptive, **sizes)
    sample = {"target": tokens(2, 9)}
    probabilities = model.get_normalized_probs(model(tokens(2, 9)), log_probs=False, sample=sample)
    assert probabilities.shape == (2, 9, 60)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"character_embeddings": True}, "character embeddings"),
        ({"no_token_positional_embeddings": True}, "use --rpe nope"),
        ({"decoder_learned_pos": True}, "use --rpe learned"),
        ({"offload_activations": True}, "--checkpoint-activations"),
        ({"rpe_share": "layers"}, "one of auto, model, layer"),
        ({"rpe": "sinusoidal", "rpe_share": "layer"}, "can only be shared by: model"),
        ({"rpe": "nope:x=1"}, "has no option 'x'"),
        ({"attention_backend": "flash"}, "unknown attention backend"),
        ({"decoder_attention_heads": 5}, "5 attention heads do not divide a width of 32"),
        ({"rpe_module": "/nowhere/x.py"}, "no such file"),
        ({"tie_adaptive_weights": True}, "needs --adaptive-input"),
        ({"compute_dtype": "bfloat"}, "one of fp32, bf16, not 'bfloat'"),
        ({"rpe": READERS[0], "positions_eval": "offset:tokens=3"}, "reads no positions, so a transform has no effect"),
        ({"rpe": "bipe"}, r"'bipe:segment_delimiters=</s>\+.': no symbol of the dictionary is or ends in '.'"),
    ],
)
def test_refusals(task, changes, words):
    args = model_args(**{"rpe": "alibi", **changes})
    with refused(words):
        TransformerRPELanguageModel.build_model(args, task)
