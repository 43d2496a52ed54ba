"""The shell for fairseq against fairseq's own decoder: the same initial weights, and the same outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from conftest import make_model, model_args
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase
from omegaconf import OmegaConf
from test_blocks import some_tokens

from fairseq_rpe.decoder.dropout import Dropout

NORMFORMER = {"scale_attn": True, "scale_heads": True, "scale_fc": True, "scale_resids": True}
FLAGS = [
    {},
    {"activation_fn": "gelu", "share_decoder_input_output_embed": True, "layernorm_embedding": True},
    {"activation_fn": "gelu_accurate", "no_scale_embedding": True, "no_decoder_final_norm": True},
    {"decoder_input_dim": 24, "decoder_output_dim": 40},
    {"quant_noise_pq": 0.1, "quant_noise_pq_block_size": 8},
    NORMFORMER,
]


def stock_decoder(task, **flags) -> TransformerDecoderBase:
    """Build fairseq's decoder without positions from the seed of ``make_model``."""
    from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

    args = model_args("nope", **flags)
    cfg = TransformerConfig.from_namespace(args)
    cfg.no_token_positional_embeddings = True
    torch.manual_seed(0)
    embedding = TransformerRPELanguageModel.build_embedding(args, task.source_dictionary, args.decoder_input_dim)
    return TransformerDecoderBase(cfg, task.target_dictionary, embedding, no_encoder_attn=True).eval()


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(flags) or "plain")
def test_blocks_equal_those_of_fairseq(task, flags):
    stock, ours = stock_decoder(task, **flags), make_model(task, "nope", **flags).decoder
    expected, state = stock.state_dict(), ours.state_dict()
    assert list(state) == list(expected) and all(torch.equal(state[name], expected[name]) for name in expected)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in stock.named_parameters()]
    tokens, gradients = some_tokens().clamp_max(59), []
    for decoder in (ours, stock):
        logits = decoder(tokens)[0]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        gradients.append([logits, *(p.grad for p in decoder.parameters() if p.grad is not None)])
    assert len(gradients[0]) > 30
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_dropout_can_stay_active_in_generation(task):
    """As with ``fairseq-generate --retain-dropout``, of all modules or of those that are named."""
    model, tokens = make_model(task, "alibi", dropout=0.3, attention_dropout=0.3), some_tokens().clamp_max(59)
    assert not any(isinstance(module, Dropout) for module in model.modules())
    first = model(tokens)[0]
    assert torch.equal(model(tokens)[0], first)
    layer = model.decoder.layers[0]
    model.make_generation_fast_(retain_dropout=True, retain_dropout_modules=["RPEAttention"])
    assert layer.self_attn.dropout_module.active_p == 0.3 and layer.dropout_module.active_p == 0.0
    assert not torch.equal(model(tokens)[0], first)


def test_normformer_from_the_settings_of_a_training(task):
    """fairseq-train passes a DictConfig, of which TransformerConfig takes no such setting."""
    from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

    settings = OmegaConf.create(vars(model_args("nope", **NORMFORMER)))
    model = TransformerRPELanguageModel.build_model(settings, task)
    assert model.state_dict().keys() == make_model(task, "nope", **NORMFORMER).state_dict().keys()
    assert model.state_dict().keys() > make_model(task, "nope").state_dict().keys()
