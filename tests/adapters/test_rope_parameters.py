"""Rotations of models of Hugging Face transformers: which options of ours they are, and scalings of their configs."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from refusal import refused

from fairseq_rpe import build
from fairseq_rpe.core import Positions

if importlib.util.find_spec("transformers") is None:
    pytest.skip("the package transformers is not installed", allow_module_level=True)

from fairseq_rpe.adapters.rope_parameters import scaling_options
from fairseq_rpe.adapters.transformers import evaluate, restore, use_encoding

# isort: split

import transformers
from small_models import LENGTH, SIZES, assert_close, llama, logits, neox, random_model, text, with_encoding
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# what of ours is which rope_type of theirs
SCALINGS = {
    "rope": {"rope_type": "default"},
    "rope:scaling=linear,factor=4": {"rope_type": "linear", "factor": 4.0},
    "rope:scaling=dynamic_ntk,factor=2": {"rope_type": "dynamic", "factor": 2.0},
    "rope:scaling=yarn,factor=4": {"rope_type": "yarn", "factor": 4.0},
    "rope:scaling=yarn,factor=4,temperature=1.5": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
    "rope:scaling=llama3,factor=8": {**LLAMA3, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("make", [lambda rope: neox(0.5, rope), llama], ids=["half of a head", "llama"])
@pytest.mark.parametrize("spec", SCALINGS)
def test_equals_the_models_own_rotation(make, spec):
    own = make(SCALINGS[spec])
    ours = with_encoding(own, spec)
    ids = text()
    a, b = logits(own, ids), logits(ours, ids)
    assert_close(a, b)
    assert (logits(with_encoding(own, "nope"), ids) - a).abs().max() > 0.1  # positions matter here
    # dynamic NTK of theirs never shrinks back, so the lengths go up
    found = [[row.ppl for row in evaluate(model, ids.flatten(), (32, LENGTH, 150))] for model in (own, ours)]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_training_length_is_the_configs():
    """Of a model that was stretched before, the one before that; ``length`` says another."""
    own = llama({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16})
    ours = with_encoding(own, "rope:scaling=yarn,factor=4")
    assert ours.base_model.fairseq_rpe.encodings[0].length == 16
    assert_close(logits(ours, text()), logits(own, text()))
    assert with_encoding(own, "nope", length=7).base_model.fairseq_rpe.encodings[0].length == 7


# encodings that rotate, with options under which they change nothing within 40 tokens
ROTATING = ("rope", "longrope:factors=2", "clex", "streaming_llm", "lm_infinite", "rerope:window=64", "dape:base=rope")


def without_the_network(model):
    """Dape's network switched off."""
    for encoding in model.base_model.fairseq_rpe.encodings:
        for parameter in encoding.out.parameters() if hasattr(encoding, "out") else ():
            torch.nn.init.zeros_(parameter)
    return model


XPOS = "xpos:scale_base=1000000"
ROTATED = {
    "base": (llama, "base=500", ("rope",)),
    "larger base": (lambda: llama({"rope_theta": 5e5}), "base=500000", ("rope", "dape:base=rope")),
    "base, half of a head": (
        lambda: neox(0.5, {"rope_theta": 500.0}),
        "base=500,rotary_fraction=0.5",
        (*ROTATING, XPOS),
    ),
    # of the rotation that was there before
    "adapted before": (lambda: with_encoding(llama(), "alibi"), "base=500", ("rope", XPOS)),
}


@pytest.mark.parametrize(("kind", "spec"), [(kind, spec) for kind, row in ROTATED.items() for spec in row[2]])
def test_what_a_spec_leaves_open_is_the_models_rotation(kind, spec):
    make, given, _ = ROTATED[kind]
    model, ids = make(), text(tokens=40)
    own = copy.deepcopy(model)
    own = restore(own) if hasattr(own.base_model, "fairseq_rpe") else own
    ours = without_the_network(with_encoding(model, spec))
    assert all(part in ours.base_model.fairseq_rpe.spec for part in given.split(","))
    # xpos decays, if slowly
    assert_close(logits(ours, ids), logits(own, ids), 1e-2 if "xpos" in spec else 1e-4)


def test_a_scaled_rotation_is_dropped_by_nobody():
    model = neox(rope={"rope_type": "linear", "factor": 2.0})
    for spec in (*ROTATING[1:], "xpos"):
        with refused(rf"is scaled \(linear\), and '{spec.partition(':')[0]}.*' would drop that: use rope"):
            use_encoding(model, spec)
    factors = [1.0, 1.5, 2.0, 4.0]
    model = llama({"rope_type": "longrope", "long_factor": factors, "short_factor": [1.0] * 4, "factor": 4.0})
    for spec in ("rope", "longrope", "xpos"):
        with refused(rf"is scaled \(longrope\), and '{spec}' .* use longrope:factors="):
            use_encoding(model, spec)
    with_encoding(model, "longrope:factors=1+1.5+2+4,factor=4")


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_config_that_the_models_class_ignores(kind):
    """Llama and Qwen2 rotate whole heads, whatever partial_rotary_factor their config has."""
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    own = random_model(transformers.AutoConfig.for_model(kind, **SIZES, num_key_value_heads=2, rope_parameters=rope))
    ours = with_encoding(own, "rope")
    assert_close(logits(ours, text()), logits(own, text()))
    assert "rotary_fraction" not in ours.base_model.fairseq_rpe.spec


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
# rope_parameters of a config, and what a spec of rope without scaling takes from them
OWN_SCALINGS = {
    "linear": ({"rope_type": "linear", "factor": 3.0}, "scaling=linear,factor=3"),
    "llama3": (
        {**LLAMA3, "original_max_position_embeddings": 16},
        "scaling=llama3,factor=8,original_length=16,beta_fast=4",
    ),
    "llama3, other bounds": (
        {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 6.0, "original_max_position_embeddings": 32},
        "scaling=llama3,factor=8,original_length=32,beta_fast=6,beta_slow=0.5",
    ),
    "proportional": ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, "scaling=proportional,keep=0.5"),
    "proportional, divided": (
        {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
        "scaling=proportional,factor=2,keep=0.3",
    ),
    "yarn": (YARN, "scaling=yarn,factor=8,original_length=16"),
    "yarn, ends not rounded": (
        {**YARN, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.5},
        "scaling=yarn,factor=8,original_length=16,beta_fast=4,beta_slow=0.5,truncate=false",
    ),
    "yarn, DeepSeek's": (
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        "scaling=yarn,factor=8,original_length=16,mscale=1,mscale_all_dim=0.5",
    ),
    "yarn, mscale alone": ({**YARN, "mscale": 0.7}, "scaling=yarn,factor=8,original_length=16"),
    "yarn, a factor": ({**YARN, "attention_factor": 1.3}, "scaling=yarn,factor=8,original_length=16,temperature=1.3"),
}


@pytest.mark.parametrize(
    "make", [lambda rope: neox(0.5, rope, num_attention_heads=2), lambda rope: llama(rope, num_attention_heads=2)]
)
@pytest.mark.parametrize("name", OWN_SCALINGS)
def test_rope_takes_the_models_scaling(make, name):
    """The frequencies and the factor of ROPE_INIT_FUNCTIONS, and the model's own logits."""
    parameters, options = OWN_SCALINGS[name]
    own, ids = make({"rope_theta": 500.0, **parameters}), text(tokens=70)  # theirs has angles in float32
    ours = with_encoding(own, "rope")
    encoding, spec = ours.base_model.fairseq_rpe.encodings[0], ours.base_model.fairseq_rpe.spec
    assert set(options.split(",")) <= set(spec.partition(":")[2].split(","))
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](own.config, torch.device("cpu"))
    got = encoding.inv_freq(torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(got.float(), expected, rtol=1e-6, atol=0)
    at = torch.zeros(1, 1, dtype=torch.float64)
    amplitude = encoding.amplitude(at, Positions(at, at), key=True)
    assert (1 if amplitude is None else amplitude.item()) == pytest.approx(factor, rel=1e-12)
    assert_close(logits(ours, ids), logits(own, ids))


def test_a_stated_scaling_is_not_the_models():
    own = llama({**YARN, "rope_theta": 500.0})
    assert with_encoding(own, "rope:scaling=none").base_model.fairseq_rpe.spec == "rope:base=500"
    assert "factor=4," in with_encoding(own, "rope:factor=4").base_model.fairseq_rpe.spec + ","  # of this scaling
    part = llama({"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0})
    stretched = with_encoding(part, "rope:scaling=linear,factor=2").base_model.fairseq_rpe.spec
    assert stretched == "rope:base=500,scaling=linear,factor=2,keep=0.5"  # other pairs were never rotated


def test_a_scaling_that_cannot_be_read():
    own = llama(YARN)
    own.config.rope_parameters["factor"] = "eight"
    with refused(r"rope_parameters of this model's config \(yarn\) cannot be read \(ValueError.*scaling=none"):
        use_encoding(own, "rope")
    use_encoding(own, "alibi")
    assert scaling_options({"rope_type": "dynamic", "factor": 2.0}, 64) is None
    assert scaling_options({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}, 64) == {
        **{"scaling": "yarn", "factor": "4", "original_length": "16"}
    }


def test_llama3_is_transformers_own():
    """Frequencies of ROPE_INIT_FUNCTIONS."""
    own = llama({**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192}, head_dim=64)
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](own.config, torch.device("cpu"))
    length = torch.ones(1, dtype=torch.float64)
    for scaling in ("llama3", "ntk_by_parts,ramp=paper,beta_fast=4"):
        spec = f"rope:scaling={scaling},factor=8,base=500000,original_length=8192"
        got = build(spec, 4, 256).inv_freq(length)
        torch.testing.assert_close(got.float(), expected, rtol=1e-5, atol=0)
    assert factor == 1 and (build("rope:base=500000", 4, 256).inv_freq(length) / got)[-1] == pytest.approx(8)


def test_a_model_whose_rotation_shows_no_frequencies_is_refused():
    model = llama()
    del model.model.rotary_emb.inv_freq
    with refused("LlamaRotaryEmbedding has no inv_freq, which transformers .* use that version"):
        use_encoding(model, "rope")
