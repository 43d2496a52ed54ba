"""Models of Hugging Face transformers whose layers differ: their own patterns of encodings, and patterns of ours."""

from __future__ import annotations

import copy
import functools
import importlib.util
import math

import pytest
import torch
from refusal import refused

if importlib.util.find_spec("transformers") is None:
    pytest.skip("the package transformers is not installed", allow_module_level=True)

from fairseq_rpe.adapters import attention_interface
from fairseq_rpe.adapters.transformers import MODEL_TYPES, evaluate, pattern_from_config, restore, use_encoding

# isort: split

import transformers
from small_models import TYPES_OF_TEXT, adapter_of, assert_close, logits, random_model, with_encoding
from small_models import text as random_text
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from fairseq_rpe.adapters.saved_encoding import load_with_encoding
from fairseq_rpe.encodings import build

WINDOW = 16
SIZES = {"vocab_size": TYPES_OF_TEXT, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128}
SIZES |= {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 100.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
GLOBAL_ROPE = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}
OURS_YARN = "rope:base=500,scaling=yarn,factor=8,original_length=16,truncate=false"
# type -> what differs from the defaults of its config, its pattern, and the keys that a cache of 29 tokens holds
CONFIGS = {
    "cohere2": ({"sliding_window": WINDOW}, "3*rope:interleaved=true,local=16|nope", [15, 15, 15, 29]),
    "gemma2": (
        {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
        "rope:local=16,softcap=5|rope:softcap=5",
        [15, 29, 15, 29],
    ),
    "gemma3_text": (
        {
            **{"sliding_window": WINDOW, "head_dim": 8, "sliding_window_pattern": 3},
            "rope_parameters": {"sliding_attention": LOCAL_ROPE, "full_attention": GLOBAL_ROPE},
        },
        "2*rope:base=100,local=16|rope:base=5000,scaling=linear,factor=8",
        [15, 15, 29, 15],
    ),
    "gpt_oss": (
        {
            **{"sliding_window": WINDOW, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
            "rope_parameters": {**YARN, "truncate": False},
        },
        f"{OURS_YARN},local=16,null_logit=learned|{OURS_YARN},null_logit=learned",
        [15, 29, 15, 29],
    ),
    "granite_swa": (
        {
            **{"sliding_window": WINDOW, "layer_rope_theta": [500, 0, 500, 0]},
            **{"attention_multiplier": 0.3, "logits_scaling": 2.0},
        },
        "rope:base=500,null_logit=learned|nope:local=16,null_logit=learned"
        "|rope:base=500,local=16,null_logit=learned|nope:local=16,null_logit=learned",
        [29, 15, 15, 15],
    ),
    "llama4_text": (
        {
            **{"attention_chunk_size": WINDOW, "head_dim": 8, "floor_scale": 8, "moe_layers": []},
            "intermediate_size_mlp": 64,
        },
        "3*rope:base=500000,interleaved=true,block=16"
        "|nope:query_scale=llama4,query_scale_value=0.1,query_scale_interval=8",
        [15, 15, 15, 29],
    ),
    "mistral": ({"sliding_window": WINDOW}, "rope:local=16", [15, 15, 15, 15]),
    "olmo3": (
        {
            "sliding_window": WINDOW,
            "rope_parameters": {"sliding_attention": LOCAL_ROPE, "full_attention": {**YARN, "truncate": False}},
        },
        f"3*rope:base=100,local=16|{OURS_YARN}",
        [15, 15, 15, 29],
    ),
    "qwen3": (
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "head_dim": 8},
        "2*rope|2*rope:local=16",
        [29, 29, 15, 15],
    ),
    "smollm3": ({}, "3*rope:base=2e+06|nope", [29, 29, 29, 29]),
    "starcoder2": ({"sliding_window": WINDOW}, "rope:local=16", [15, 15, 15, 15]),
}
PLAIN = ("gemma", "gpt_neox", "llama", "olmo", "olmo2", "qwen2", "stablelm")


def make_config(kind: str, **changes):
    return AutoConfig.for_model(kind, **{**SIZES, **(CONFIGS[kind][0] if kind in CONFIGS else {}), **changes})


text = functools.partial(random_text, tokens=60)


def make(kind: str, **changes):
    return random_model(make_config(kind, **changes))


def generate(model, ids: torch.Tensor, tokens: int = 20, **options):
    return model.generate(
        ids, max_new_tokens=tokens, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )


def decode(model, ids: torch.Tensor, *parts: int, cache=None) -> torch.Tensor:
    outputs = []
    with torch.no_grad():
        for part in ids.split(parts, dim=1):
            output = model(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            outputs.append(output.logits)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_models_own_pattern_gives_its_numbers(kind):
    """In one pass, in passes with a cache, in generation beyond the window, and in evaluation."""
    own, ids = make(kind), text()
    expected, pattern = logits(own, ids), CONFIGS[kind][1]
    assert pattern_from_config(own.config) == pattern
    ours = with_encoding(own)
    assert adapter_of(ours).spec == pattern
    assert_close(logits(ours, ids), expected)
    assert_close(decode(ours, ids, 9, 1, 20, 5, 25), expected)
    theirs, generated = generate(own, ids[:, :10]), generate(ours, ids[:, :10])
    assert torch.equal(theirs.sequences, generated.sequences)
    assert_close(torch.stack(generated.logits), torch.stack(theirs.logits))
    assert [layer.keys.shape[2] for layer in generated.past_key_values.layers] == CONFIGS[kind][2]
    loss = torch.nn.functional.cross_entropy(expected[0, :-1], ids[0, 1:]).item()
    for model in (own, ours):
        result = evaluate(model, ids[0, 1:], [59], start=int(ids[0, 0]))[0]
        assert result.loss_base2 * math.log(2) == pytest.approx(loss, rel=1e-5)
    assert torch.equal(logits(restore(ours), ids), expected)


@pytest.mark.parametrize("kind", PLAIN)
def test_a_model_of_equal_layers_has_one_encoding(kind):
    own, ids = make(kind), text()
    ours = with_encoding(own)
    assert adapter_of(ours).spec == pattern_from_config(own.config) and "|" not in adapter_of(ours).spec
    assert_close(logits(ours, ids), logits(own, ids))


def test_every_type_is_compared():
    assert {*CONFIGS, *PLAIN} == {*MODEL_TYPES}


def same_weights(model, kind: str, **changes):
    """A model of another type with the weights of ``model``, whose parameters have the same names."""
    other = AutoModelForCausalLM.from_config(make_config(kind, **changes)).eval()
    other.load_state_dict(model.state_dict())
    return other


def test_a_pattern_gives_each_layer_its_encoding():
    """Llama with the patterns of other types is a model of those types."""
    llama, ids = make("llama", rope_parameters=LOCAL_ROPE, tie_word_embeddings=False), text()
    options = {"rope_parameters": LOCAL_ROPE, "tie_word_embeddings": False}
    smollm = same_weights(llama, "smollm3", **options)
    ours = with_encoding(llama, "3*rope|nope")
    assert adapter_of(ours).spec == "3*rope:base=100|nope"
    assert_close(logits(ours, ids), logits(smollm, ids))
    windows = same_weights(llama, "smollm3", use_sliding_window=True, sliding_window=WINDOW, **options)
    assert_close(logits(with_encoding(llama, "3*rope|nope:local=16"), ids), logits(windows, ids))
    mistral = same_weights(llama, "mistral", **options)
    assert_close(logits(with_encoding(llama, "rope:local=16"), ids), logits(mistral, ids))
    # and the other way round, which the model's own window does not limit
    assert_close(logits(with_encoding(mistral, "1*rope"), ids), logits(llama, ids))
    assert_close(decode(with_encoding(mistral, "1*rope"), ids, 20, 1, 39), logits(llama, ids))
    mixed = with_encoding(llama, "kerple_log|end=kerple_power:local=8", share="layer")
    assert adapter_of(mixed).encodings.layer_specs == (*["kerple_log"] * 3, "kerple_power:local=8")
    assert sum(p.numel() for p in adapter_of(mixed).parameters()) == 4 * 4 * 2


def test_a_spec_that_rotates_replaces_the_rotations_alone():
    """As in a model whose config has the other scaling; a spec that does not rotate replaces everything."""
    own, ids = make("gemma3_text"), text()
    scaled = {"rope_type": "linear", "factor": 2.0}
    parameters = {"sliding_attention": {**LOCAL_ROPE, **scaled}, "full_attention": {**GLOBAL_ROPE, **scaled}}
    expected = logits(same_weights(own, "gemma3_text", rope_parameters=parameters), ids)
    ours = with_encoding(own, "rope:scaling=linear,factor=2")
    assert_close(logits(ours, ids), expected)
    assert_close(logits(use_encoding(ours), ids), logits(own, ids))  # of the model, not of the encoding before
    cohere = make("cohere2")
    spec = adapter_of(with_encoding(cohere, "rope:scaling=yarn,factor=4,local=8")).spec
    assert spec == "3*rope:scaling=yarn,factor=4,interleaved=true,local=8|nope"
    assert adapter_of(with_encoding(cohere, "rope:block=8")).spec == "3*rope:interleaved=true,block=8|nope"
    assert adapter_of(with_encoding(cohere, "alibi")).spec == "alibi"
    gemma2 = with_encoding(make("gemma2"), "xpos:scale_base=1000000")
    assert adapter_of(gemma2).spec.split("|")[1].endswith(",softcap=5")


def test_the_training_length_is_the_configs():
    assert adapter_of(use_encoding(make("olmo3"), "rope:scaling=yarn,factor=4")).encodings[0].length == 16


@pytest.mark.parametrize(
    ("kind", "spec", "keys"),
    [
        ("mistral", "alibi", [60] * 4),
        ("mistral", "rope:local=8|alibi", [15, 60] * 2),
        ("mistral", "rope:local=17", [60] * 4),
        ("cohere2", "nope:local=8|rope:block=4", [15, 15, 15, 60]),
        ("llama4_text", "rope:local=40|nope:block=16|2*fire", [60, 15, 60, 60]),
    ],
)
def test_a_cache_holds_the_keys_that_encodings_read(kind, spec, keys):
    """And no more where the model's own cache drops some."""
    model, ids = use_encoding(make(kind), spec), text()
    expected = logits(model, ids)
    cache = DynamicCache(config=model.config)
    assert_close(decode(model, ids, 9, 1, 20, 5, 25, cache=cache), expected)
    assert [layer.keys.shape[2] for layer in cache.layers] == keys
    assert_close(decode(model, ids, 30, 30, cache=DynamicCache()), expected)
    moved = use_encoding(make(kind), spec, positions="interpolate:ratio=0.5")
    assert_close(decode(moved, ids, 30, 1, 29), logits(moved, ids))


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "llama4_text"])
def test_padding_on_the_left(kind):
    """A padded row gives what it gives alone, in a pass and in generation beyond the window."""
    model, ids = use_encoding(make(kind)), text(tokens=30)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    padded = logits(model, ids, attention_mask=mask)
    assert_close(padded[1, 7:], logits(model, ids[1:, 7:])[0])
    assert_close(padded[0], logits(model, ids)[0])
    both = generate(model, ids, 20, attention_mask=mask, pad_token_id=0)
    alone = generate(model, ids[1:, 7:], 20, pad_token_id=0)
    assert torch.equal(both.sequences[1, 30:], alone.sequences[0, 23:])


def test_sinks_are_the_models_parameters():
    """They get the gradients of the model's own attention; the encoding has none."""
    own, ids = make("gpt_oss"), text(tokens=40)
    ours = with_encoding(own)
    assert not list(adapter_of(ours).parameters())
    for model in (own, ours):
        model(ids, labels=ids, use_cache=False).loss.backward()
    for there, here in zip(own.model.layers, ours.model.layers, strict=True):
        assert there.self_attn.sinks.grad.abs().max() > 1e-4
        assert_close(here.self_attn.sinks.grad, there.self_attn.sinks.grad, 1e-5)
    llama = use_encoding(make("llama"), "rope:null_logit=learned")
    assert len(adapter_of(llama).encodings) == 4  # a model without sinks learns null logits per layer
    assert [p.shape for p in adapter_of(llama).parameters()] == [(4,)] * 4


def test_layers_with_different_masks_have_the_same_random_positions(monkeypatch):
    model = use_encoding(make("gemma3_text"), positions_train="randomized:max_position=500").train()
    positions, build_plan = [], attention_interface.build_plan
    monkeypatch.setattr(
        attention_interface, "build_plan", lambda e, pos, *a: positions.append(pos.k) or build_plan(e, pos, *a)
    )
    for passes in (1, 2):
        logits(model, text())
        assert len(positions) == 2 * passes and positions[-1] is positions[-2]
    assert not torch.equal(positions[0], positions[2])
    assert adapter_of(model).forward_pass is None


@pytest.mark.parametrize("kind", ["gemma3_text", "llama4_text"])
def test_checkpointing_changes_no_gradient(kind):
    gradients, ids = [], text(tokens=30)
    for checkpointing in (None, {"use_reentrant": True}, {"use_reentrant": False}):
        model = use_encoding(make(kind), positions_train="randomized:max_position=500").train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-5)


def test_the_config_stays_and_is_saved(tmp_path):
    own = make("cohere2")
    use_encoding(own, "alibi").save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert pattern_from_config(again.config) == CONFIGS["cohere2"][1]
    assert torch.equal(logits(use_encoding(again.eval(), "alibi"), text()), logits(own, text()))


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
STATED_DEFAULTS = [
    ("llama", {"rope_parameters": LLAMA3}, "rope:base=10000,scaling=none", "rope"),
    ("llama", {"rope_parameters": LLAMA3}, "2*rope:base=10000,scaling=none|2*nope", "2*rope|2*nope"),
    ("mistral", {}, "rope:local=0", "rope"),
    ("mistral", {}, "4*rope", "rope"),
    ("cohere2", {}, "rope:interleaved=false", "3*rope:local=16|nope"),
    ("llama", {}, build("rope:scaling=yarn,factor=4", 4, 32, length=16), "rope:scaling=yarn,factor=4"),
]


@pytest.mark.parametrize(("kind", "changes", "encoding", "pattern"), STATED_DEFAULTS)
def test_options_that_equal_their_defaults_replace_those_of_the_model_and_stay_in_a_saved_one(
    kind, changes, encoding, pattern, tmp_path
):
    model = use_encoding(make(kind, **changes), encoding)
    assert adapter_of(model).spec == pattern
    model.save_pretrained(tmp_path)
    loaded = load_with_encoding(tmp_path)
    assert adapter_of(loaded).spec == pattern
    assert torch.equal(logits(loaded, text()), logits(model, text()))


def test_a_saved_model_without_a_head_is_not_given_a_random_one(tmp_path):
    use_encoding(make("llama"), "kerple_log").model.save_pretrained(tmp_path)
    with refused("lacks the weights 'lm_head.weight'"):
        load_with_encoding(tmp_path)


def test_yarn_of_a_model_that_normalises_rotated_queries_and_keys():
    own = make("llama4_text", rope_parameters=YARN)
    assert_close(logits(with_encoding(own), text()), logits(own, text()))


def test_half_precision():
    exact = use_encoding(make("gpt_oss"))
    expected, actual = logits(exact, text()), logits(copy.deepcopy(exact).bfloat16(), text())
    assert actual.dtype == torch.bfloat16 and (expected - actual).abs().mean() < 0.1 * expected.std()


def with_dropped_keys():
    """A cache that the model filled with its own encodings."""
    model, cache = make("mistral"), DynamicCache(config=make_config("mistral"))
    logits(model, text(), past_key_values=cache, use_cache=True)
    return logits(use_encoding(model, "alibi"), text(tokens=5), past_key_values=cache, use_cache=True)


def with_padding_between_tokens():
    model, mask = use_encoding(make("mistral")), torch.ones(2, 61)
    mask[0, 50:55] = 0
    cache = DynamicCache(config=model.config)
    logits(model, text(), attention_mask=mask[:, :60], past_key_values=cache, use_cache=True)
    return logits(model, text(tokens=1), attention_mask=mask, past_key_values=cache, use_cache=True)


def with_packed_texts():
    position_ids = torch.tensor([[*range(4), *range(6)]])
    return logits(use_encoding(make("mistral")), text(tokens=10), position_ids=position_ids, use_cache=False)


def with_layer_type(kind: str):
    config = make_config("qwen3")
    config.layer_types = [*config.layer_types[:3], kind]
    return config


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pattern_from_config(transformers.GPT2Config()), "type 'gpt2' have not been checked"),
        (lambda: pattern_from_config({}), "dict is not a config of transformers"),
        (lambda: pattern_from_config(with_layer_type("linear_attention")), "of type 'linear_attention'.*set layer_"),
        (lambda: pattern_from_config(with_layer_type("chunked_attention")), "of type 'chunked_attention'"),
        (lambda: pattern_from_config(make_config("smollm3", rope_parameters=DYNAMIC)), r"is scaled \(dynamic\)"),
        (lambda: use_encoding(make("llama"), "5*rope|nope"), "has more layers than the 4 of the model"),
        (lambda: use_encoding(make("llama"), "3*rope|sinusoidal"), "acts at the input of the model"),
        (lambda: use_encoding(make("llama"), "rope|forgetting"), "'forgetting' reads a layer's input"),
        (lambda: use_encoding(make("llama"), "rope|nope", share="layer"), "can only be shared by: model"),
        (lambda: use_encoding(make("smollm3", no_rope_layers=[0] * 4), "rope"), "no layer of this model does: write 4"),
        (lambda: use_encoding(make("mistral"), "rerope"), r"by region: leave .* layers have local: write 4\*rerope"),
        (lambda: use_encoding(make("gemma3_text", use_bidirectional_attention=True)), "sees the future"),
        (lambda: generate(use_encoding(make("gemma2")), text(), cache_implementation="static"), "DynamicCache"),
        (with_packed_texts, "more than a causal mask .packed texts"),
        (with_dropped_keys, "layer 0 reads keys that its cache, of a window of the model, dropped"),
        (with_padding_between_tokens, "pad on the left"),
    ],
)
def test_what_cannot_be(call, words):
    with refused(words):
        call()
