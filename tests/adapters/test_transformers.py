"""Models of Hugging Face transformers with our encodings: the package's own numbers, and those of our decoder."""

from __future__ import annotations

import copy
import importlib.util
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import make_model
from refusal import refused
from specs import capabilities, representatives

from fairseq_rpe import build
from fairseq_rpe.data import folder
from fairseq_rpe.encodings.rope import Rope
from fairseq_rpe.evaluation import segment_losses
from fairseq_rpe.evaluation.loss_aggregation import SegmentSums, bucket_losses
from fairseq_rpe.evaluation.perplexity import losses_by_position, make_batches
from fairseq_rpe.evaluation.records import TextRequest, read_results

if importlib.util.find_spec("transformers") is None:
    pytest.skip("the package transformers is not installed", allow_module_level=True)

from fairseq_rpe.adapters.transformers import MODEL_TYPES, evaluate, restore, use_encoding

# isort: split

import transformers
from small_models import (
    PLAIN,
    SIZES,
    TYPES_OF_TEXT,
    adapter_of,
    assert_close,
    llama,
    logits,
    neox,
    random_model,
    text,
    with_encoding,
)
from transformers import AutoModelForCausalLM, GPTNeoXConfig

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_layers": [1]}  # of the types that have experts


@pytest.mark.parametrize(("kind", "head"), [*((kind, 8) for kind in MODEL_TYPES), ("gemma", 16)])
def test_types_that_are_known_keep_their_numbers(kind, head):
    """Grouped keys, normalised queries, heads that are not width / heads wide, and rotations of a part."""
    grouped = {} if kind == "gpt_neox" else {"num_key_value_heads": 1 if head == 16 else 2}
    own = random_model(transformers.AutoConfig.for_model(kind, **SIZES, **grouped, **FEW_EXPERTS, head_dim=head))
    ids = text(tokens=70)
    a = logits(own, ids)
    assert_close(logits(with_encoding(own, "rope"), ids), a, 2e-4)
    assert (logits(with_encoding(own, "alibi"), ids) - a).abs().max() > 0.05
    loss = torch.nn.functional.cross_entropy(a[0, :-1], ids[0, 1:]).item()
    row = evaluate(own, ids[0, 1:], [69], start=int(ids[0, 0]))[0]
    assert row.loss_base2 * np.log(2) == pytest.approx(loss, rel=1e-5)
    assert adapter_of(use_encoding(own, "sinusoidal")).encodings[0].width == 32


def test_another_scale_of_the_scores_is_the_models():
    own, ids = llama(), text()
    usual = logits(own, ids)
    for layer in own.model.layers:
        layer.self_attn.scaling = 0.1
    scaled = logits(own, ids)
    assert (scaled - usual).abs().max() > 0.1
    assert_close(logits(with_encoding(own, "rope"), ids), scaled)


def same_weights(ours, spec: str):
    """A GPT-NeoX with the weights of our decoder: layer norms first, no parallel residual, embeddings not scaled."""
    config = GPTNeoXConfig(**SIZES, use_parallel_residual=False, hidden_act="gelu", rope_parameters=PLAIN)
    theirs, decoder = AutoModelForCausalLM.from_config(config).eval(), ours.decoder
    base, pairs = theirs.gpt_neox, list(zip(theirs.gpt_neox.layers, decoder.layers, strict=True))
    copied = [(base.embed_in, decoder.embed_tokens), (base.final_layer_norm, decoder.layer_norm)]
    copied += [(there.input_layernorm, here.self_attn_layer_norm) for there, here in pairs]
    copied += [(there.post_attention_layernorm, here.final_layer_norm) for there, here in pairs]
    copied += [(there.attention.dense, here.self_attn.out_proj) for there, here in pairs]
    copied += [(there.mlp.dense_h_to_4h, here.fc1) for there, here in pairs]
    copied += [(there.mlp.dense_4h_to_h, here.fc2) for there, here in pairs]
    theirs.lm_head.weight.data.copy_(decoder.output_projection.weight)
    for there, here in pairs:
        projections = here.self_attn.q_proj, here.self_attn.k_proj, here.self_attn.v_proj
        for name in ("weight", "bias"):  # of each head q, then k, then v
            parts = torch.cat([getattr(one, name).unflatten(0, (4, 8)) for one in projections], dim=1)
            getattr(there.attention.query_key_value, name).data.copy_(parts.flatten(0, 1))
    if spec.startswith("xpos") and "interleaved" not in spec:  # pairs of GPT-NeoX are (s, s + d/2)
        spec += f"{',' if ':' in spec else ':'}interleaved=true"
    share = "model" if len(decoder.encodings) == 1 else "layer"
    adapted = use_encoding(theirs, spec, share=share)
    for there, here in (*copied, (adapted.base_model.fairseq_rpe.encodings, decoder.encodings)):
        there.load_state_dict(here.state_dict())
    return adapted


def decoder_with(task, spec: str, **changes):
    made = make_model(task, spec, activation_fn="gelu", no_scale_embedding=True, **changes)
    torch.manual_seed(3)
    for name, weight in made.named_parameters():
        if "encodings" in name:
            weight.data.add_(0.1 * torch.randn_like(weight))
        elif weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return made


# of 100 positions where an encoding knows no more than it was trained with
SPECS = [f"{s}:max_positions=100" if s in ("learned", "tupe") else s for s in representatives()]
SPECS = [s for s in SPECS if not (capabilities(s)["token_features"] or capabilities(s)["has_key_state"])]


@pytest.mark.parametrize("spec", SPECS)
def test_equals_our_decoder(task, spec):
    ours = decoder_with(task, spec)
    ids = text(tokens=100)
    with torch.no_grad():
        assert_close(logits(same_weights(ours, spec), ids), ours.decoder(ids)[0])


def data_folder(path: Path, tokens: int = 500) -> Path:
    path.mkdir()
    folder.write_dictionary(path / "dict.txt", [f"w{i}" for i in range(TYPES_OF_TEXT - 4)])
    sizes = np.array([tokens - 130, 130], "<i4")
    (path / "sizes").write_bytes(sizes.tobytes())
    with open(path / "sizes", "rb") as file:
        folder.write_index(path / "test.idx", file, "<u2")
    text(1, tokens)[0].numpy().astype("<u2").tofile(path / "test.bin")
    return path


def test_perplexities_equal_our_evaluation(task, tmp_path):
    """The same blocks and the same result, position by position, from our loader and decoder."""
    data, lengths = data_folder(tmp_path / "data"), (16, 64, 130, 500)
    ours = decoder_with(task, "fire")
    request = TextRequest(checkpoint=tmp_path, data=data, lengths=lengths)
    theirs = same_weights(ours, "fire")
    with mock.patch.object(segment_losses, "SEGMENT_TOKENS", 100):
        rows = evaluate(theirs, data, lengths, out=tmp_path / "eval.jsonl")
        sums = {length: SegmentSums(500, None, torch.device("cpu")) for length in lengths}
    for row in rows:
        batches, segments = make_batches(request, task, row.length, 2048), sums[row.length]
        nats, count = losses_by_position(ours, batches, row.length, 1, lambda _: None, segments)
        assert row.segments.counts().tolist() == [100] * 5
        np.testing.assert_allclose(row.segments.sums(), segments.pack(row.length, draws=1).sums(), rtol=1e-5)
        own = bucket_losses(nats, count)
        assert row.tokens == int(count.sum()) == 500 and row.positions_loss.tokens == own.tokens
        assert row.positions_loss.loss_base2 == pytest.approx(own.loss_base2, rel=1e-5)
        assert row.ppl == pytest.approx(float((nats.sum() / 500).exp()), rel=1e-4)
    assert read_results(type(rows[0]), tmp_path / "eval.jsonl") == rows
    assert evaluate(theirs, data, lengths, out=tmp_path / "eval.jsonl") == rows  # nothing is measured twice
    assert {(row.encoding, row.engine) for row in rows} == {("fire", "transformers")}
    with torch.no_grad():
        theirs.lm_head.weight.mul_(2)
    changed = evaluate(theirs, data, [16], out=tmp_path / "eval.jsonl")[0]
    assert changed.checkpoint != rows[0].checkpoint and changed.ppl != rows[0].ppl


def test_a_result_belongs_to_the_training_length_and_the_seed(tmp_path):
    ids, out = torch.arange(3, 43), tmp_path / "eval.jsonl"
    for spec, settings in (
        ("rope:scaling=yarn,factor=4", ({"length": 16}, {"length": 32})),
        ("rope", ({"positions": "randomized:max_position=500", "seed": seed} for seed in (1, 2))),
    ):
        results = [evaluate(use_encoding(llama(), spec, **options), ids, [32], out=out)[0] for options in settings]
        assert results[0].ppl != results[1].ppl and results[0].checkpoint != results[1].checkpoint


DECODED = ["alibi", "fire", "rope:scaling=yarn,factor=4", "xpos", "learned", "self_extend:group=2,window=6"]


@pytest.mark.parametrize("spec", DECODED)
def test_decoding_equals_a_whole_pass(spec):
    model = use_encoding(llama(), spec)
    ids = text(tokens=20)
    whole, parts, cache = logits(model, ids), [], None
    with torch.no_grad():
        for part in ids.split((9, 1, 4, 6), dim=1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    assert_close(torch.cat(parts, dim=1), whole)
    made = model.generate(ids, max_new_tokens=6, do_sample=False)
    greedy = ids
    while greedy.shape[1] < 26 and not (greedy[:, 20:] == 2).any():
        greedy = torch.cat([greedy, logits(model, greedy)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(made[:, : greedy.shape[1]], greedy)


@pytest.mark.parametrize(
    ("side", "spec"),
    [
        *(("left", spec) for spec in ("alibi", "fire", "rope", "rope:scaling=dynamic_ntk", "learned", "sinusoidal")),
        *(("right", spec) for spec in ("fire", "rope:scaling=dynamic_ntk", "learned")),
    ],
)
def test_padding(side, spec):
    """A padded row gives what it gives alone, also where positions are not distances, and in generation."""
    model = use_encoding(neox(), spec, length=32)
    ids = text(tokens=30)
    mask = torch.ones_like(ids)
    padded = slice(0, 7) if side == "left" else slice(23, 30)
    mask[1, padded] = 0
    real = mask[1].bool()
    got = logits(model, ids, attention_mask=mask)
    assert_close(got[1, real], logits(model, ids[1:, real])[0])
    assert_close(got[0], logits(model, ids)[0])
    if side == "left" and spec != "learned":
        short = ids[:, :16]
        made = model.generate(short, attention_mask=mask[:, :16], max_new_tokens=4, do_sample=False, pad_token_id=0)
        own = model.generate(short[1:, 7:], max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(made[1, 16 : 16 + own.shape[1] - 9], own[0, 9:])


def test_position_ids_may_say_what_is_so():
    model = use_encoding(neox(), "fire")
    ids = text(tokens=10)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    plain = logits(model, ids, attention_mask=mask)
    for position_ids in (torch.arange(10)[None], (mask.cumsum(1) - 1).clamp_min(0), (mask.cumsum(1) - 1).abs()):
        assert torch.equal(logits(model, ids, attention_mask=mask, position_ids=position_ids), plain)


@pytest.mark.parametrize("share", ["layer", "model"])
def test_training_reaches_the_encoding_and_checkpointing_changes_nothing(share):
    ids, found = text(tokens=24), []
    for checkpointing in (None, {"use_reentrant": True}, {"use_reentrant": False}):
        torch.manual_seed(5)
        spec = "kerple_log" if share == "layer" else build("fire", 4, 32)
        model = use_encoding(llama(attention_dropout=0.1), spec, share=share).train()
        learned = model.base_model.fairseq_rpe.encodings
        assert len(learned) == (2 if share == "layer" else 1)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        torch.manual_seed(6)
        model(ids, labels=ids, use_cache=False).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
        assert {id(p) for p in learned.parameters()} <= {id(p) for p in model.parameters()}
    for name, grad in found[0].items():
        assert grad.abs().sum() > 0, name
        for other in found[1:]:
            torch.testing.assert_close(other[name], grad, rtol=1e-4, atol=1e-6)


def test_dropout_is_of_training_alone():
    model = use_encoding(neox(attention_dropout=0.5), "alibi")
    assert torch.equal(logits(model, text()), logits(model, text()))
    assert not torch.equal(logits(model.train(), text()), logits(model, text()))


def test_half_precision():
    exact = use_encoding(llama(), "fire")
    half = copy.deepcopy(exact).bfloat16()
    assert {p.dtype for p in half.base_model.fairseq_rpe.parameters()} == {torch.float32}
    a, b = logits(exact, text()), logits(half, text())
    assert b.dtype == torch.bfloat16 and (a - b).abs().mean() < 0.05 * a.std()
    with torch.autocast("cpu", torch.bfloat16):
        b = logits(exact, text())
    assert (a - b).abs().mean() < 0.05 * a.std()


def test_a_model_in_float64_has_positions_in_float64(monkeypatch):
    model, seen, angles = use_encoding(llama(), "rope").double(), [], Rope.angles
    monkeypatch.setattr(Rope, "angles", lambda self, at, pos: seen.append(at.dtype) or angles(self, at, pos))
    assert logits(model, text()).dtype == torch.float64 and set(seen) == {torch.float64}


def test_positions_that_are_moved():
    """Half of every position is interpolation by 2, in a pass and while decoding; a random draw stays in training."""
    model, ids = llama(), text(tokens=40)
    a = logits(with_encoding(model, "rope", positions="interpolate:ratio=0.5"), ids)
    assert_close(a, logits(with_encoding(model, "rope:scaling=linear,factor=2"), ids))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    moved = with_encoding(model, "fire", positions="interpolate:ratio=auto,train=16")
    got = logits(moved, ids, attention_mask=mask)[1, 9:]
    assert_close(got, logits(moved, ids[1:, 9:])[0])
    assert evaluate(moved, ids[0], [40])[0].positions.startswith("interpolate")
    random = with_encoding(model, "rope", positions_train="randomized:max_position=200")
    assert torch.equal(logits(random, ids), logits(random, ids))
    assert not torch.equal(logits(random.train(), ids), logits(random, ids))


def test_random_positions_of_evaluation_are_drawn_for_each_row():
    ids, mask = text(tokens=40), torch.ones_like(text(tokens=40))
    mask[1, :9] = 0
    model = with_encoding(llama(), "rope", positions="randomized:max_position=200")
    both = logits(model, ids, attention_mask=mask)
    assert_close(both[0], logits(model, ids[:1])[0])
    assert_close(both[1, 9:], logits(model, ids[1:, 9:])[0])
    assert_close(logits(model, ids.flip(0))[1], logits(model, ids)[0])
    assert evaluate(model, ids[0], [40])[0].draws == 1


def test_one_model_is_changed_and_nothing_else():
    config = GPTNeoXConfig(**SIZES)
    torch.manual_seed(0)
    first, second = (transformers.GPTNeoXForCausalLM(config).eval() for _ in range(2))
    before, there = logits(second, text()), logits(first, text())
    assert use_encoding(first, "alibi") is first
    assert torch.equal(logits(second, text()), before)
    changed = logits(first, text())
    assert torch.equal(logits(copy.deepcopy(first), text()), changed)
    assert not torch.equal(logits(use_encoding(first, "type1"), text()), changed)
    assert torch.equal(logits(use_encoding(first, "alibi"), text()), changed)
    assert torch.equal(logits(restore(copy.deepcopy(first)), text()), there)
    assert torch.equal(logits(restore(first), text()), there)
    assert not any("fairseq_rpe" in name for name in (*first.state_dict(), *dict(first.named_modules())))
    with refused("nothing to restore"):
        restore(first)


def test_what_is_learned_is_saved_and_comes_back(tmp_path):
    model = use_encoding(neox(), "t5_bias:init_std=1")
    model.save_pretrained(tmp_path)
    torch.save(model.base_model.fairseq_rpe.state_dict(), tmp_path / "positions.pt")
    again = transformers.GPTNeoXForCausalLM.from_pretrained(tmp_path)
    learned = use_encoding(again, "t5_bias:init_std=1").base_model.fairseq_rpe
    learned.load_state_dict(torch.load(tmp_path / "positions.pt"))
    assert torch.equal(logits(again.eval(), text()), logits(model, text()))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: use_encoding(torch.nn.Linear(2, 2), "alibi"), "not a model of transformers"),
        (lambda: use_encoding(random_model(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1)), "alibi"), "'gpt2'"),
        (lambda: use_encoding(llama(), None), "encoding is a spec such as 'rope'"),
        (lambda: use_encoding(neox(), "albi"), "did you mean 'alibi'"),
        (lambda: use_encoding(neox(), "rope:scalin=yarn"), "no option 'scalin'"),
        (lambda: use_encoding(neox(), "alibi", share="all"), "share is one of"),
        (lambda: use_encoding(neox(), "rope", share="layer"), "can only be shared by: model"),
        (lambda: use_encoding(neox(), build("alibi", 8, 32)), "is for 8 heads"),
        (lambda: use_encoding(neox(), build("alibi", 4, 32), share="layer"), "give its spec"),
        (lambda: use_encoding(neox(), "forgetting"), "reads a layer's input"),
        (lambda: use_encoding(neox(), "selective"), "keeps a state of the keys, which caches of transformers do not"),
        (lambda: use_encoding(neox(), "nope", positions="interpolate:ratio=0.5"), "reads no positions"),
        (lambda: use_encoding(neox(), "learned", positions="interpolate:ratio=0.5"), "whole positions only"),
        (lambda: use_encoding(neox(), "alibi", backend="fast"), "fast"),
        (lambda: use_encoding(neox(rope={"rope_type": "dynamic", "factor": 2.0}), "rope"), r"is scaled \(dynamic\)"),
        (lambda: use_encoding(transformers.GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)).to("meta"), "alibi"), "on meta"),
        # forward passes
        (lambda: passed(output_attentions=True), "attention weights are never built"),
        (lambda: passed(position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])), "packed texts"),
        (lambda: passed(position_ids=torch.arange(3, 13)[None], attention_mask=torch.ones(2, 10)), "packed texts"),
        (lambda: passed(attention_mask=torch.ones(2, 7)), r"of shape \(2, 7\), not \(2, 10\)"),
        (lambda: passed(attention_mask=torch.zeros(2, 1, 10, 10)), r"as \(batch, tokens\)"),
        (lambda: generated(cache_implementation="static"), "DynamicCache"),
        (lambda: generated("randomized:max_position=100"), "random positions would change"),
        # texts
        (lambda: evaluate(neox(), [5, 6, 7], [4]), "not between 1 and the 3 tokens"),
        (lambda: evaluate(neox(), [5, 60], [1]), "the id 60 and the model has 60 types"),
        (lambda: evaluate(neox(), [[5, 6]], [1]), "in one row"),
        (lambda: evaluate(neox(), [0.5, 1.5], [1]), "not torch.float32"),
        (lambda: evaluate(neox(), [5, 6, 7], [3], max_tokens=2), "less than length 3"),
        (lambda: evaluate(neox(), "nowhere", [3]), "does not exist"),
        (lambda: evaluate(with_output_bias(), [5, 6, 7], [3]), "output layer has a bias"),
    ],
)
def test_what_cannot_be(call, words):
    with refused(words):
        call()


def with_output_bias():
    model = neox()
    model.set_output_embeddings(torch.nn.Linear(SIZES["hidden_size"], TYPES_OF_TEXT))
    return model


def passed(**more):
    return logits(use_encoding(neox(), "alibi"), text(tokens=10), **more)


def generated(positions: str = "", **more):
    return use_encoding(neox(), "alibi", positions=positions).generate(text(tokens=5), max_new_tokens=3, **more)


def test_attention_that_cannot_be():
    model, bare = use_encoding(neox(), "alibi"), neox()
    model.set_attn_implementation("sdpa")
    bare.set_attn_implementation("fairseq_rpe")
    for wrong, words in ((model, "as use_encoding set it"), (bare, "has no encoding")):
        with refused(words):
            logits(wrong, text())


def test_the_page_is_true(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    listed = re.search(r"^The adapter supports these model types: (.*?)\.", page, re.DOTALL | re.MULTILINE)
    assert tuple(re.findall(r"`(\w+)`", listed[1])) == MODEL_TYPES
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
