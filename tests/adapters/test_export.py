"""Checkpoints as models of transformers: the same logits, tokens and tokenizer; and what is refused."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import random
import shutil
import sys

import pytest
import torch
from conftest import CORPUS, PACKAGE, make_model, run_here
from conftest import run as run_process
from refusal import refusal, refused
from specs import every_spec, representatives

pytest.importorskip("transformers")

from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from fairseq_rpe.adapters import registration
from fairseq_rpe.adapters.export import build_pretrained
from fairseq_rpe.adapters.export_tokenizer import export_tokenizer
from fairseq_rpe.adapters.pretrained import FairseqRpeCache, FairseqRpeForCausalLM, _separate_buffers
from fairseq_rpe.adapters.pretrained_config import FairseqRpeConfig
from fairseq_rpe.data.folder import write_dictionary
from fairseq_rpe.data.tokenization import Tokenizer, dictionary_symbols, load_encoder, train_tokenizer
from fairseq_rpe.decoder.config import BLOCK_PRESETS, DecoderConfig
from fairseq_rpe.decoder.decoder import Decoder
from fairseq_rpe.decoder.generation import greedy_steps
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.positions.position_transforms import PositionTransforms

logging.disable_progress_bar()
SYMBOLS, PAD, LENGTH = 60, 1, 16
WORDS = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(SYMBOLS - 4))]
READERS = ["bipe:segment_delimiters=</s>+w1", "complex", "2*rope:local=8|nope"]
SPECS = [*(spec for spec in every_spec() if spec not in ("bipe", "abacus", "coupled")), *READERS]
GREEDY = {"do_sample": False, "eos_token_id": None}


def decoder(spec: str, block: str, layers: int = 1, positions: str = "", vocabulary: int = SYMBOLS) -> Decoder:
    """A small decoder in plain torch whose encoding has random parameters."""
    torch.manual_seed(0)
    sizes = {"vocabulary": vocabulary, "padding_idx": PAD, "width": 32, "heads": 4, "ffn_width": 48}
    config = DecoderConfig(**sizes, layers=3 if "|" in spec else layers, **BLOCK_PRESETS[block])
    encodings = build_for_model(spec, 4, 32, config.layers, LENGTH, WORDS)
    for parameter in encodings.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    return Decoder(config, encodings, PositionTransforms("identity", positions, LENGTH, 1, 0)).eval()


def pretrained(model: Decoder, spec: str, **settings) -> FairseqRpeForCausalLM:
    return build_pretrained(model, {"rpe": spec, "train_length": LENGTH, **settings})


def tokens(n: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(4, SYMBOLS, (rows, n), generator=torch.Generator().manual_seed(1))


def difference(loaded: FairseqRpeForCausalLM, model: Decoder, spec: str) -> float:
    """Largest difference of logits; one row begins with padding."""
    x = tokens(16 if spec.startswith(("learned", "tupe")) else 24)
    x[0, :3] = PAD
    with torch.no_grad():
        return float((loaded(x).logits - model(x))[x.ne(PAD)].abs().max())


@pytest.mark.parametrize("blocks", ["classic llama", pytest.param("llama classic", marks=pytest.mark.release)])
def test_every_encoding_is_built_on_the_meta_device(blocks):
    """As ``from_pretrained`` does; whatever is not in the state dict would then be missing."""
    for spec, block in zip(SPECS, itertools.cycle(blocks.split()), strict=False):
        model = decoder(spec, block)
        state = {f"decoder.{name}": value for name, value in model.state_dict().items()}
        config = pretrained(model, spec).config
        with torch.device("meta"):
            loaded = FairseqRpeForCausalLM(config).eval()
        loaded.load_state_dict(state, assign=True)
        loaded.tie_weights()
        assert difference(loaded, model, spec) <= 1e-5, spec


@pytest.mark.parametrize("block", ["classic", "llama"])
def test_saved_and_loaded(block, tmp_path):
    """All in one test, because a test each would take longer than the work."""
    for spec in [*representatives("learns", "position_type", "content_bias", "embeds"), *READERS, "deberta"]:
        model = decoder(spec, block)
        pretrained(model, spec).save_pretrained(tmp_path, max_shard_size="20KB" if spec == "fire" else "1GB")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        saved, state = model.state_dict(), loaded.state_dict()
        assert len(saved) == len(state), spec
        assert all(torch.equal(state[f"decoder.{name}"], value) for name, value in saved.items()), spec
        assert difference(loaded, model, spec) <= 1e-5, spec
        shutil.rmtree(tmp_path)


def test_layers_that_share_constants_get_copies_of_them():
    """transformers can tie parameters only, so a saved model has the constants of each layer."""
    layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
    shared = torch.arange(3)
    for layer in layers:
        layer.register_buffer("signs", shared)
    _separate_buffers(layers)
    assert layers[0].signs is shared and layers[1].signs is not shared and torch.equal(layers[1].signs, shared)


def test_in_bfloat16_encodings_stay_in_float32(tmp_path):
    model = decoder("fire", "llama")
    pretrained(model, "fire").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.decoder.encodings.parameters()} == {torch.float32}
    assert loaded.decoder.layers[0].fc1.weight.dtype == torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens(24)).logits.float(), model(tokens(24)), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    "flags", [{"activation_fn": "gelu"}, {"activation_fn": "gelu_accurate", "share_decoder_input_output_embed": True}]
)
def test_activations_of_fairseq(task, flags, tmp_path):
    """They round differently; shared embeddings are stored once."""
    model = make_model(task, "alibi", **flags)
    exported = pretrained(model.decoder, "alibi")
    exported.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens(24)).logits, model(tokens(24))[0], rtol=0, atol=1e-5)
    if loaded.config.tie_word_embeddings:
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        loaded.resize_token_embeddings(SYMBOLS + 4)
        assert loaded(torch.full((1, 2), SYMBOLS)).logits.shape == (1, 2, SYMBOLS + 4)


@pytest.mark.parametrize("spec", ["alibi", "rope", "forgetting", "t5_bias", "rope:local=7"])
def test_greedy_text_is_that_of_the_decoder(task, spec):
    """200 tokens beyond the training length; and without a cache, the first ones of them."""
    model = make_model(task, spec, tokens_per_sample=LENGTH)
    exported, x = pretrained(model.decoder, spec), tokens(9)
    steps = 216 if spec == "alibi" else 60
    text = exported.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=steps, **GREEDY)[:, 9:]
    assert torch.equal(text, greedy_steps(model, x, steps))
    few = exported.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=5, use_cache=False, **GREEDY)[:, 9:]
    assert torch.equal(few, text[:, :5])


def test_generation_with_padding_beams_draws_and_a_cache_that_is_continued():
    model = pretrained(decoder("kerple_log", "llama"), "kerple_log")
    x = tokens(9)
    mask = torch.ones(2, 13, dtype=torch.int64)
    mask[0, :4] = 0
    padded = torch.cat([torch.cat([x[:1, :4], x[:1]], 1), tokens(13)[1:]])  # any tokens where the mask is 0
    alone = model.generate(x[:1], attention_mask=mask[1:, :9], max_new_tokens=20, **GREEDY)[:, 9:]
    together = model.generate(padded, attention_mask=mask, max_new_tokens=20, **GREEDY)[:, 13:]
    assert torch.equal(together[:1], alone)
    for options in ({"num_beams": 3, "early_stopping": True}, {"do_sample": True}):
        texts = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            texts.append(
                model.generate(x, use_cache=use_cache, max_new_tokens=8, attention_mask=mask[1:, :9], **options)
            )
        assert torch.equal(*texts)
    first = model.generate(x[:1], attention_mask=mask[1:, :9], max_new_tokens=8, return_dict_in_generate=True, **GREEDY)
    first.past_key_values.crop(-3)
    assert first.past_key_values.get_seq_length() == 9 + 8 - 1 - 3
    rest = first.sequences[:, :15]
    mask = torch.ones_like(rest)
    again = model.generate(
        rest, past_key_values=first.past_key_values, attention_mask=mask, max_new_tokens=14, **GREEDY
    )
    assert torch.equal(again[:, 9:], alone)


def test_loss_hidden_states_last_logits_documents_and_checkpointed_gradients():
    model, x = pretrained(decoder("alibi", "classic", layers=2), "alibi"), tokens(12)
    output = model(x, labels=x, output_hidden_states=True, logits_to_keep=0)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    assert [tuple(state.shape) for state in output.hidden_states] == [(2, 12, 32)] * 3
    torch.testing.assert_close(model.decoder.output_layer(output.hidden_states[-1]), output.logits)
    torch.testing.assert_close(model(x, logits_to_keep=2).logits, output.logits[:, -2:])
    torch.testing.assert_close(model(x[:, :-1], shift_labels=x[:, 1:].contiguous()).loss, expected)
    assert all(grad.any() for grad in torch.autograd.grad(output.loss, output.hidden_states))
    documents = torch.tensor([[0] * 4 + [1] * 8]).expand(2, -1)
    torch.testing.assert_close(model(x, documents=documents).logits[:, 4:], model(x[:, 4:]).logits)
    gradients = []
    for _ in range(2):
        model.train().zero_grad()
        model(x, labels=x).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.activation_checkpointing_enable()
    assert all(layer.gradient_checkpointing for layer in model.decoder.layers)
    torch.testing.assert_close(*gradients)
    with refused("reentrant checkpoint"):
        model.activation_checkpointing_enable({"use_reentrant": True})


@pytest.mark.parametrize(
    ("spec", "positions"), [("rope:scaling=dynamic_ntk,original_length=8", ""), ("rope", "interpolate")]
)
def test_what_follows_the_length_is_generated_without_a_cache(spec, positions):
    model = decoder(spec, "classic", positions=positions)
    exported = pretrained(model, spec, positions_eval=positions)
    x = tokens(9, rows=1)
    text = exported.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=12, **GREEDY)
    scores = model(text)[0].detach()
    scores[:, PAD] = -torch.inf
    assert not exported.config.use_cache and text[0, -1] == model(text[:, :-1])[0, -1].argmax()
    with refused("changes earlier tokens when the text grows, .*use_cache=False"):
        exported.generate(x, use_cache=True, max_new_tokens=2)


def test_refusals():
    model, x = pretrained(decoder("alibi", "classic"), "alibi"), tokens(5)
    for options, message in {
        ("cache_implementation", "static"): "cache_implementation='static' is not supported",
        ("cache_implementation", "quantized"): "cache_implementation='quantized' is not supported",
        ("past_key_values", DynamicCache()): "a DynamicCache cannot hold what this model caches",
    }.items():
        with refused(message):
            model.generate(x, max_new_tokens=2, **dict([options]))
    for name, value, message in [
        ("output_attentions", True, "attention weights are never built"),
        ("position_ids", x, "position_ids is not supported: leave them out"),
        ("inputs_embeds", x, "inputs_embeds is not supported"),
        ("attention_mask", x[:, :3], "attention_mask has the shape"),
    ]:
        with refused(message):
            model(x, **{name: value})
    for spec in ("complex", "bipe:segment_delimiters=</s>+w1"):
        with refused("reads the token ids of its dictionary"):
            pretrained(decoder(spec, "classic"), spec).resize_token_embeddings(80)


def test_a_refused_call_leaves_the_cache_as_it_was():
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = FairseqRpeForCausalLM(FairseqRpeConfig(**sizes, intermediate_size=64, rpe="learned", train_length=8)).eval()
    x, cache = torch.randint(4, 50, (1, 11), generator=torch.Generator().manual_seed(0)), FairseqRpeCache()
    with torch.no_grad():
        model(x[:, :6], past_key_values=cache)
        with refused("position 10 is beyond the 8 positions"):
            model(x[:, 6:], past_key_values=cache)
        expected, actual = model(x[:, :7], use_cache=False).logits, model(x[:, 6:7], past_key_values=cache).logits
    torch.testing.assert_close(actual[:, -1], expected[:, -1])


def test_auto_model_returns_features(tmp_path):
    """It loads what the language model saves, and the other way round."""
    model, x = pretrained(decoder("fire", "llama"), "fire"), tokens(24)
    model.save_pretrained(tmp_path / "model")
    base = AutoModel.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        logits = model(x).logits
        start = base(x[:, :20], use_cache=True)
        end = base(x[:, 20:], past_key_values=start.past_key_values)
    features = torch.cat([start.last_hidden_state, end.last_hidden_state], dim=1)
    torch.testing.assert_close(model.decoder.output_layer(features), logits)
    base.save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, logits)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("decoder.layers.0.fc1.bias", None, "weights are missing"),
        ("decoder.layers.0.fc1.bias", torch.zeros(2), "weights have other shapes"),
        ("decoder.more", torch.zeros(2), "weights are not in the model"),
    ],
)
def test_weights_that_do_not_fit(name, value, message, tmp_path):
    from safetensors.torch import load_file, save_file

    pretrained(decoder("alibi", "classic"), "alibi").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {key: tensor for key, tensor in weights.items() if key != name} | ({} if value is None else {name: value})
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with refused(f"{message} \\({name}\\): export the model again"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


ODD = ["", "\n", "a\tb  ", " ▁y▁ ", "\n\n\nz\n", "é漢字 🙂", "\x00\x01", "a\r\nb", "\u00a0\u3000x", "don't I'LL 12 345"]


@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_tokenizers_give_the_same_ids_and_every_byte(kind, tmp_path):
    text = CORPUS.read_text(encoding="utf-8")
    if kind == "bpe":
        model = train_tokenizer(text.split("\n"), 900)
        (tmp_path / "spm.model").write_bytes(model)
        symbols = Tokenizer(model).symbols
    else:
        tokenizers = pytest.importorskip("tokenizers")
        bpe = tokenizers.ByteLevelBPETokenizer()
        bpe.train_from_iterator(text.split("\n"), vocab_size=700, show_progress=False)
        bpe.save_model(str(tmp_path))
        symbols = dictionary_symbols(tmp_path)
    write_dictionary(tmp_path / "dict.txt", symbols)
    out = tmp_path / "out"
    out.mkdir()
    export_tokenizer(kind, tmp_path, out)
    tokenizer, encoder = AutoTokenizer.from_pretrained(out), load_encoder(kind, tmp_path)
    draw = random.Random(0)
    characters = [*range(1, 0x250), 0x2581, 0x4E00, 0x1F600, *[32] * 60, *[10] * 20]
    texts = ["".join(chr(draw.choice(characters)) for _ in range(draw.randrange(60))) for _ in range(300)]
    for odd in [*ODD, text[:3000], *texts]:
        ids = tokenizer(odd)["input_ids"]
        assert ids == encoder.encode(odd).tolist(), odd
        assert tokenizer.decode(ids, skip_special_tokens=True) == odd
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token_id) == (None, None, PAD)


def test_the_command(trained, corpus, tmp_path):
    out = tmp_path / "model"
    done = run_here("export", trained, out, "--data", corpus, "--remote-code")
    assert "no tokenizer: the data folder of the training was made by another program" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_fairseq_rpe.py"]
    )
    config, card = json.loads((out / "config.json").read_text()), (out / "README.md").read_text()
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_fairseq_rpe.FairseqRpeForCausalLM"
    assert config["auto_map"]["AutoModel"] == "modeling_fairseq_rpe.FairseqRpeModel"
    assert (config["model_type"], config["rpe"], config["train_length"]) == ("fairseq_rpe", "alibi", 32)
    assert "| encoding | `alibi` |" in card and "trust_remote_code=True" in card
    loaded = AutoModelForCausalLM.from_pretrained(out)
    weights = torch.load(trained, weights_only=False)["model"]
    assert torch.equal(loaded.decoder.layers[0].fc1.weight, weights["decoder.layers.0.fc1.weight"])
    assert "is not empty: give another folder" in refusal("export", trained, out, "--data", corpus)
    error = refusal("export", trained, tmp_path / "x", "--data", corpus, "--as", "llama")
    assert "--as llama would compute something else" in error
    assert "the data folder gone does not exist" in refusal("export", trained, tmp_path / "x", "--data", "gone")
    assert "has no effect" in refusal("export", trained, tmp_path / "x", "--as", "gpt_neox", "--remote-code")
    assert os.listdir(tmp_path) == ["model"]


def test_features_of_fairseq_are_refused_by_name(trained, tmp_path):
    for setting, value, message in [
        ("adaptive_softmax_cutoff", "10,20", "--adaptive-softmax-cutoff"),
        ("decoder_layerdrop", 0.1, "--decoder-layerdrop"),
        ("quant_noise_pq", 0.1, "--quant-noise-pq"),
        ("rpe", None, "is not of this plugin"),
    ]:
        state = torch.load(trained, weights_only=False)
        state["cfg"]["model"][setting] = value
        if value is None:
            del state["cfg"]["model"][setting]
        torch.save(state, tmp_path / "checkpoint.pt")
        assert message in refusal("export", tmp_path / "checkpoint.pt", tmp_path / "out")


def test_modules_of_transformers_register_when_they_are_imported(monkeypatch):
    """With modules of the standard library in the place of those with the Auto classes."""
    monkeypatch.setattr(registration, "_REGISTERING", {"colorsys": "this"})
    for name in ("colorsys", "this"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert any(isinstance(finder, registration._AutoClassFinder) for finder in sys.meta_path)
    colorsys = importlib.import_module("colorsys")
    assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0) and "this" in sys.modules and inspect.getsource(colorsys)
    monkeypatch.setattr(registration, "_REGISTERING", {"colorsys": "no_such_module"})
    monkeypatch.delitem(sys.modules, "colorsys")
    with pytest.warns(UserWarning, match="cannot register its models with transformers: No module named"):
        importlib.import_module("colorsys")


AUTO = """
import sys, fairseq_rpe
assert "torch" not in sys.modules and "transformers" not in sys.modules
from transformers import AutoConfig
assert type(AutoConfig.for_model("fairseq_rpe")).__name__ == "FairseqRpeConfig"
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("fairseq_rpe", num_hidden_layers=1, hidden_size=32))
assert type(model).__name__ == "FairseqRpeForCausalLM" and "fairseq" not in sys.modules
"""


@pytest.mark.release
def test_importing_the_package_registers_the_type():
    run_process(sys.executable, "-c", AUTO, cwd=PACKAGE.parent)


def test_a_model_of_a_generated_task_has_no_tokenizer(tmp_path):
    run_here(
        "train", "--algorithm", "copy:items=4", "--rpe", "alibi", "--out", tmp_path / "run", "--updates", "2",
        "--device", "cpu", "--batch-sentences", "2",
    )  # fmt: skip
    done = run_here("export", tmp_path / "run" / "checkpoint_last.pt", tmp_path / "out")
    assert "the vocabulary of the generated task 'copy:items=4' is no text" in done.stdout + done.stderr
    assert not (tmp_path / "out" / "tokenizer.json").exists()
