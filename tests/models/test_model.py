"""The fairseq model: the same function as stock fairseq, any length, padding, decoding, sharing, checkpointing."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from conftest import make_model, model_args
from specs import ALL_SPECS
from torch import nn

from fairseq_rpe.core import UserError
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.base import registry

PAD, EOS, FIRST = 1, 2, 4


def tokens(rows: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(FIRST, 60, (rows, n), generator=torch.Generator().manual_seed(seed))


def logits(model, x, **kwargs):
    return model(x, **kwargs)[0]


def test_equals_stock_fairseq(task):
    """The same weights under fairseq's own transformer_lm give the same logits and gradients."""
    from fairseq.models.transformer_lm import TransformerLanguageModel

    ours = make_model(task, "sinusoidal")
    args = model_args("sinusoidal")
    stock = TransformerLanguageModel.build_model(args, task).eval()
    state = ours.state_dict()
    missing, unexpected = nn.Module.load_state_dict(stock, state, strict=False)
    assert not unexpected
    assert all("embed_positions" in key for key in missing)
    x = tokens(3, 21)
    x[1, -4:] = PAD
    real = x.ne(PAD)
    a, b = logits(ours, x), logits(stock, x)
    torch.testing.assert_close(a[real], b[real], rtol=1e-5, atol=1e-5)
    for out in (a, b):
        out[real].square().mean().backward()
    grads = dict(stock.named_parameters())
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, grads[name].grad, rtol=1e-4, atol=1e-6)


def test_equals_stock_fairseq_with_a_dense_alibi_mask(task):
    """Stock attention with −k_h·(i−j) added to its mask: what forks do, and what ours must equal."""
    from fairseq.models.transformer_lm import TransformerLanguageModel

    from fairseq_rpe.encodings.alibi import alibi_slopes

    ours = make_model(task, "alibi")
    args = model_args("alibi")
    args.no_token_positional_embeddings = True
    stock = TransformerLanguageModel.build_model(args, task).eval()
    nn.Module.load_state_dict(stock, ours.state_dict(), strict=False)
    n, rows = 33, 2
    distance = torch.arange(n)[:, None] - torch.arange(n)[None]
    mask = -torch.tensor(alibi_slopes(4))[:, None, None] * distance
    mask = mask.masked_fill(distance < 0, float("-inf")).repeat(rows, 1, 1)
    stock.decoder.buffered_future_mask = lambda x: mask
    x = tokens(rows, n)
    torch.testing.assert_close(logits(ours, x), logits(stock, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_decoding_token_by_token_equals_the_full_forward(task, spec):
    model = make_model(task, spec)
    x = tokens(3, 24)
    with torch.no_grad():
        full = logits(model, x)
        state: dict = {}
        for n in range(1, 25):
            step = logits(model, x[:, :n], incremental_state=state)
            assert step.shape[1] == 1
            torch.testing.assert_close(step[:, 0], full[:, n - 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_padding_changes_nothing(task, spec):
    """Left, right and no padding give a row the same logits; left-padded decoding too."""
    model = make_model(task, spec)
    row = tokens(1, 15)
    pads = torch.full((1, 4), PAD)
    left, right = torch.cat([pads, row], 1), torch.cat([row, pads], 1)
    other = tokens(1, 19, seed=1)
    with torch.no_grad():
        alone = logits(model, row)[0]
        torch.testing.assert_close(logits(model, torch.cat([left, other]))[0, 4:], alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits(model, torch.cat([right, other]))[0, :15], alone, rtol=1e-5, atol=1e-5)
        state: dict = {}
        for n in range(1, 20):
            step = logits(model, torch.cat([left, other])[:, :n], incremental_state=state)
        torch.testing.assert_close(step[0, 0], alone[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["alibi", "fire", "sinusoidal", "t5_bias"])
def test_padding_in_the_middle_is_not_counted(task, spec):
    model = make_model(task, spec)
    row = tokens(1, 12)
    holed = torch.cat([row[:, :5], torch.full((1, 3), PAD), row[:, 5:]], 1)
    with torch.no_grad():
        got = logits(model, holed)[0]
        torch.testing.assert_close(torch.cat([got[:5], got[8:]]), logits(model, row)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "spec", [s for s in ALL_SPECS if not s.startswith(("learned", "tupe")) and not build(s, 4, 32, 64).reads_length]
)
def test_longer_than_trained(task, spec):
    model = make_model(task, spec)
    x = tokens(1, 300)
    with torch.no_grad():
        full = logits(model, x)
        assert torch.isfinite(full).all()
        torch.testing.assert_close(full[:, :70], logits(model, x[:, :70]), rtol=1e-4, atol=1e-4)


def test_learned_refuses_longer(task):
    with pytest.raises(UserError, match="position 64 is beyond the 64 positions"):
        logits(make_model(task, "learned"), tokens(1, 65))


@pytest.mark.parametrize("spec", ALL_SPECS)
@pytest.mark.parametrize("share", ["model", "layer"])
def test_checkpoint_activations_changes_nothing(task, spec, share):
    if share not in registry.get(spec.partition(":")[0]).shares:
        pytest.skip("this encoding is one for all layers")
    grads = []
    for on in (False, True):
        model = make_model(task, spec, checkpoint_activations=on, rpe_share=share, attention_dropout=0.1).train()
        torch.manual_seed(3)
        logits(model, tokens(2, 19)).square().mean().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert all(g is not None for g in grads[0].values())
    for name, g in grads[0].items():
        torch.testing.assert_close(grads[1][name], g, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("spec", ["kerple_log", "fire", "alibi"])
def test_backends_agree_in_training(task, spec):
    results = []
    for backend in ("reference", "sdpa"):
        model = make_model(task, spec, attention_backend=backend, attention_dropout=0.2).train()
        torch.manual_seed(3)
        out = logits(model, tokens(2, 140))
        out.square().mean().backward()
        results.append((out.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=2e-5)
    for name, g in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], g, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("spec", ["alibi", "kerple_log", "fire", "rope", "xpos"])
def test_autocast(task, spec):
    model = make_model(task, spec).train()
    x = tokens(2, 65)
    exact = logits(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = logits(model, x)
        rough.float().square().mean().backward()
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).abs().max() < 0.05 * exact.abs().max()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_sharing(task):
    assert len(make_model(task, "fire").decoder.encodings) == 2
    assert len(make_model(task, "fire", rpe_share="model").decoder.encodings) == 1
    assert len(make_model(task, "kerple_log").decoder.encodings) == 1
    layered = make_model(task, "kerple_log", rpe_share="layer")
    a, b = (e.raw_p for e in layered.decoder.encodings)
    assert not torch.equal(a, b)
    layered.train()
    logits(layered, tokens(1, 9)).sum().backward()
    assert a.grad is not None and b.grad is not None


def test_layerdrop_keeps_each_layers_own_encoding(task):
    model = make_model(task, "kerple_log", rpe_share="layer", decoder_layerdrop=0.5).train()
    torch.manual_seed(0)
    seen = set()
    for _ in range(12):
        model.zero_grad()
        logits(model, tokens(1, 9)).sum().backward()
        seen.add(tuple(e.raw_p.grad is not None for e in model.decoder.encodings))
        for layer, encoding in zip(model.decoder.layers.children(), model.decoder.encodings, strict=True):
            assert (layer.fc1.weight.grad is None) == (encoding.raw_p.grad is None)
    assert len(seen) > 1


def test_adaptive_input_and_softmax(task):
    model = make_model(
        task,
        "alibi",
        adaptive_input=True,
        adaptive_input_cutoff="20,40",
        adaptive_softmax_cutoff="20,40",
        tie_adaptive_weights=True,
        decoder_input_dim=32,
        decoder_output_dim=32,
    )
    out = model(tokens(2, 9))
    probabilities = model.get_normalized_probs(out, log_probs=False, sample={"target": tokens(2, 9)})
    assert probabilities.shape == (2, 9, 60)


def test_tied_embeddings(task):
    model = make_model(task, "type1", share_decoder_input_output_embed=True)
    assert model.decoder.output_projection.weight is model.decoder.embed_tokens.weight


def test_positions_are_no_limit(task):
    assert make_model(task, "alibi").max_positions() > 10**6


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
        ({"decoder_attention_heads": 5}, "5 heads do not divide a model width of 32"),
        ({"rpe_module": "/nowhere/x.py"}, "no such file"),
        ({"tie_adaptive_weights": True}, "needs --adaptive-input"),
    ],
)
def test_refusals(task, changes, words):
    changes = {"rpe": "alibi", **changes}
    heads = changes.pop("decoder_attention_heads", 4)
    args = model_args(**changes)
    args.decoder_attention_heads = heads
    from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

    with pytest.raises(UserError, match=words) as caught:
        TransformerRPELanguageModel.build_model(args, task)
    assert "\n" not in str(caught.value)


def test_sizes():
    from fairseq.models import ARCH_CONFIG_REGISTRY

    args = Namespace()
    ARCH_CONFIG_REGISTRY["transformer_rpe_lm_base"](args)
    assert (args.decoder_layers, args.decoder_embed_dim, args.decoder_attention_heads) == (12, 768, 12)
    assert args.decoder_ffn_embed_dim == 3072


def test_refuses_what_a_causal_model_cannot_do(task):
    model = make_model(task, "alibi")
    with pytest.raises(UserError, match="causal language model"):
        model.decoder(tokens(1, 4), full_context_alignment=True)
