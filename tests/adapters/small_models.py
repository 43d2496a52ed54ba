"""Small models of Hugging Face transformers with random weights, and their logits."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

from fairseq_rpe.adapters.transformers import use_encoding

TYPES_OF_TEXT, LENGTH = 60, 64
SIZES = {"vocab_size": TYPES_OF_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": LENGTH}
SIZES |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}


def random_model(config):
    """With weights so large that positions and sinks show in every logit."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 or name.endswith("sinks"):
            torch.nn.init.normal_(weight, std=0.25 if weight.dim() > 1 else 1.0)
    return model


def neox(fraction: float = 1.0, rope: dict | None = None, **changes):
    rope = {**PLAIN, "partial_rotary_factor": fraction, **(rope or {})}
    return random_model(GPTNeoXConfig(**{**SIZES, "rope_parameters": rope, **changes}))


def llama(rope: dict | None = None, **changes):
    rope = {"rope_type": "default", "rope_theta": 500.0, **(rope or {})}
    return random_model(LlamaConfig(**{**SIZES, "num_key_value_heads": 2, "rope_parameters": rope, **changes}))


def adapter_of(model):
    """The submodule with the encodings, which Llama 4 has elsewhere."""
    return model.model.fairseq_rpe if model.base_model is model else model.base_model.fairseq_rpe


def text(rows: int = 2, tokens: int = 150) -> torch.Tensor:
    return torch.randint(4, TYPES_OF_TEXT, (rows, tokens), generator=torch.Generator().manual_seed(1))


def logits(model, ids: torch.Tensor, **more) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **more).logits


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def with_encoding(model, *spec, **more):
    """A copy of a model, with an encoding of ours."""
    return use_encoding(copy.deepcopy(model), *spec, **more)
