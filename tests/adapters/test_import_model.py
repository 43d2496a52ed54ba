"""Models of Hugging Face transformers as checkpoints of this package, and back without code of ours."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import CORPUS, error_of, run_here
from refusal import refusal, refused

if importlib.util.find_spec("transformers") is None:
    pytest.skip("the package transformers is not installed", allow_module_level=True)

from small_models import random_model, with_encoding

# isort: split

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fairseq_rpe.adapters.export_as import export_as
from fairseq_rpe.adapters.import_model import import_model
from fairseq_rpe.adapters.model_blocks import IMPORTED_TYPES, weight_map
from fairseq_rpe.adapters.transformers import evaluate, pattern_from_config
from fairseq_rpe.data.folder import read_split
from fairseq_rpe.data.stream import decode_documents
from fairseq_rpe.data.transformers_tokenizer import load_model_vocabulary
from fairseq_rpe.decoder.config import BLOCK_PRESETS, DecoderConfig
from fairseq_rpe.decoder.decoder import Decoder
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.positions.position_transforms import PositionTransforms
from fairseq_rpe.utils.json_files import read_json_lines

VOCABULARY, LENGTHS = 300, (32, 96)
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 32}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
WINDOW = {"sliding_window": 8}
GEMMA = {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0}
# architecture and what differs from the defaults of its config: every kind of block and of conversion of weights
CONFIGS = {
    "cohere2": WINDOW,
    "gemma": {"head_dim": 16},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**GEMMA, "sliding_window_pattern": 2},
    "gpt_neox": {"use_parallel_residual": True},
    "llama": {"attention_bias": True},
    "mistral": WINDOW,
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "smollm3": {},
    "stablelm": {"use_parallel_residual": True},
    "starcoder2": WINDOW,
}


def make(kind: str, **changes):
    """A small model with random weights, norms and biases included."""
    model = random_model(AutoConfig.for_model(kind, **{**SIZES, **changes}))
    for weight in model.parameters():
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, mean=float(weight.detach().mean()), std=0.2)
    return model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer.json: byte-level BPE of 290 tokens, of which two are special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 290, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train([str(CORPUS)], trainers.BpeTrainer(special_tokens=["<|begin|>", "<|end|>"], **options))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def save(model, tokenizer: Path, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def llama(tokenizer, tmp_path_factory):
    """A Llama, its folder (in several files), the checkpoint made of it, and a corpus of its tokens."""
    folder = tmp_path_factory.mktemp("llama")
    model = make("llama")
    save(model, tokenizer, folder / "model", max_shard_size="30KB")
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    run_here("import", folder / "model", "--out", folder / "run")
    lines = CORPUS.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "text").mkdir()
    for i, text in enumerate(("".join(lines[:9]), "\t a\r\n\n<|end|> ▁é\U0001f600 </s>\n", "".join(lines[9:14]))):
        (folder / "text" / f"{i}.txt").write_text(text, encoding="utf-8", newline="")
    run_here("prepare", *sources(folder), "--out", folder / "data", "--tokenizer", folder / "model")
    return model, folder / "model", folder / "run" / "checkpoint_last.pt", folder / "data"


def sources(folder: Path) -> tuple[str | Path, ...]:
    """Sources of a corpus whose train split has all texts."""
    text = folder / "text"
    return ("--train", text, "--valid", text / "0.txt", "--test", text / "1.txt", "--workers", "1")


def theirs(model, folder: Path, data: Path, *spec: str) -> list[float]:
    """Perplexities by the adapter's evaluation of the same tokens."""
    vocabulary = load_model_vocabulary(folder)
    ids = torch.tensor(vocabulary.token_ids)[torch.from_numpy(read_split(data, "train")[0].astype("int64"))]
    model = with_encoding(model, *spec) if spec else model
    return [result.ppl for result in evaluate(model, ids, LENGTHS, start=vocabulary.start)]


def ours(checkpoint: Path, data: Path, out: Path, *options: str) -> list[float]:
    """Perplexities by ``eval``."""
    lengths = ("--lengths", ",".join(map(str, LENGTHS)))
    run_here("eval", checkpoint, data, *lengths, "--split", "train", "--device", "cpu", "--out", out, *options)
    return [row["ppl"] for row in read_json_lines(out)]


@pytest.mark.parametrize("spec", [(), ("self_extend",), ("rope:scaling=yarn,factor=4",)], ids=str)
def test_perplexities_are_those_of_the_model(llama, tmp_path, spec):
    model, folder, checkpoint, data = llama
    options = ("--rpe", *spec) if spec else ()
    assert ours(checkpoint, data, tmp_path / "eval.jsonl", *options) == pytest.approx(
        theirs(model, folder, data, *spec), rel=1e-6
    )


def test_text_keeps_its_bytes_and_special_tokens_in_it_are_text(llama):
    _, folder, _, data = llama
    texts = sorted(path.read_bytes() for path in (folder.parent / "text").iterdir())
    assert sorted(decode_documents(data, "train")) == texts
    vocabulary = load_model_vocabulary(folder)
    assert sorted(vocabulary.token_ids) == list(range(VOCABULARY)) and vocabulary.start == 0
    assert not set(vocabulary.encode("<|begin|><|end|>")) & {0, 1, 2, 3}


def test_a_corpus_may_use_the_vocabulary_of_the_run(llama, tmp_path):
    _, folder, checkpoint, data = llama
    vocabulary = checkpoint.parent / "vocabulary"
    run_here("prepare", *sources(folder.parent), "--out", tmp_path / "data", "--vocab-from", vocabulary)
    assert (tmp_path / "data" / "train.bin").read_bytes() == (data / "train.bin").read_bytes()


def test_an_encoding_that_reads_tokens_gets_the_dictionary(llama, tmp_path, capsys):
    _, folder, _, _ = llama
    run_here("import", folder, "--out", tmp_path / "run", "--rpe", "complex")
    run_here("export", tmp_path / "run" / "checkpoint_last.pt", tmp_path / "out")
    assert error_of(capsys, "import", folder, "--out", tmp_path / "a:b").endswith(
        "where fairseq splits paths: rename it\n"
    )
    with refused("no symbol of the dictionary is a digit"):
        import_model(folder, tmp_path / "x", rpe="abacus")
    assert not (tmp_path / "x").exists()


def test_a_tokenizer_that_loses_bytes_is_reported(llama, tmp_path):
    _, folder, _, _ = llama
    words = Tokenizer(models.WordLevel({"a": 0, "the": 1, "and": 2, "?": 3, "<|end|>": 4, "of": 5}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")
    done = run_here("prepare", *sources(folder.parent), "--out", tmp_path / "data", "--tokenizer", tmp_path)
    assert "warning: the tokenizer does not restore 3 of the 3 documents of train byte by byte" in done.stdout


def test_own_export_has_the_tokenizer_with_the_ids_of_the_dictionary(llama, tmp_path):
    """The exported model has the dictionary's order of tokens, so that the folder's tokenizer.json has other ids."""
    _, folder, checkpoint, _ = llama
    run_here("export", checkpoint, tmp_path / "out")
    tokenizer, vocabulary = AutoTokenizer.from_pretrained(tmp_path / "out"), load_model_vocabulary(folder)
    for text in (CORPUS.read_text(encoding="utf-8")[:2000], "\t a\r\n\n \u00e9\U0001f600 x"):
        ids = tokenizer(text)["input_ids"]
        assert ids == vocabulary.encode(text).tolist()
        assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids("<|begin|>") == vocabulary.token_ids.index(0)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "The tokenizer is that of the imported model." in card and "newline" not in card


def test_export_as_llama_gives_the_weights_back(llama, tmp_path):
    _, folder, checkpoint, _ = llama
    run_here("export", checkpoint, tmp_path / "out", "--as", "llama")
    original = {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == original.keys()
    assert [name for name in original if not torch.equal(original[name], exported[name])] == []
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id) == (0, 1)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_the_decoder_has_the_logits_of_every_architecture_and_gives_the_weights_back(kind):
    model = make(kind, **CONFIGS[kind])
    mapped = weight_map(model.config)
    weights = {name.replace("lm_head", "embed_out") if kind == "gpt_neox" else name: x for name, x in state_of(model)}
    mapped.check({name: tuple(value.shape) for name, value in weights.items()}, "the model")
    config, spec = mapped.config, pattern_from_config(model.config)
    decoder = make_decoder(config, spec)
    state = dict(mapped.to_ours(weights.__getitem__))
    assert decoder.load_state_dict(state, strict=False).unexpected_keys == []
    assert state.keys() == mapped.own_shapes.keys()
    ids = torch.randint(4, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(decoder(ids), model(ids).logits, rtol=0, atol=1e-4)
    back = mapped.to_theirs(state)
    assert back.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(back[name], value, rtol=0, atol=1e-6)


def state_of(model) -> list[tuple[str, torch.Tensor]]:
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return [(name, value) for name, value in model.state_dict().items() if name not in tied]


def make_decoder(config: DecoderConfig, spec: str) -> Decoder:
    torch.manual_seed(0)
    sizes = (config.heads, config.width, config.layers, 32)
    encodings = build_for_model(spec, *sizes, head_width=config.head_width)
    return Decoder(config, encodings, PositionTransforms("identity", "", 32, 1, 0)).eval()


def test_every_known_architecture_is_compared():
    assert set(CONFIGS) == set(IMPORTED_TYPES)


def decoder_for(preset: str, spec: str, **options) -> Decoder:
    sizes = {"vocabulary": 61, "padding_idx": 1, "layers": 2, "width": 32, "heads": 4, "ffn_width": 48}
    decoder = make_decoder(DecoderConfig(**{**sizes, **BLOCK_PRESETS[preset], **options}), spec)
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.2)
    return decoder


YARN = "rope:scaling=yarn,factor=4,rotary_fraction=0.5,temperature_on=rotated"
FOREIGN = [
    ("llama", "llama", "rope:base=500", {"kv_heads": 2, "head_width": 12, "bias": "qkv"}),
    ("llama", "llama", "rope:scaling=llama3,factor=8", {"scale_embedding": True, "share_embeddings": True}),
    ("gpt_neox", "classic", "nope", {"activation": "gelu_tanh", "bias": "no"}),
    ("gpt_neox", "gpt-neox", YARN, {"activation": "relu_squared"}),
]


@pytest.mark.parametrize(("architecture", "preset", "spec", "options"), FOREIGN)
def test_a_model_without_our_code_has_the_logits_of_the_decoder(architecture, preset, spec, options, tmp_path):
    decoder = decoder_for(preset, spec, **options)
    values, tensors = export_as(architecture, decoder.config, spec, 32, decoder.state_dict())
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(4, 61, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, decoder(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "preset", "spec", "options", "words"),
    [
        ("llama", "llama", "nope", {}, "this model has 'nope'"),
        ("llama", "llama", "rope:local=8", {}, "this model has 'rope:local=8'"),
        ("llama", "llama", "rope|nope", {}, "its layers have one encoding"),
        ("llama", "classic", "rope", {}, "it has RMSNorm before each sublayer and SwiGLU"),
        ("llama", "qwen3", "rope", {}, "this model normalises queries and keys"),
        ("gpt_neox", "classic", "rope:interleaved=true", {}, "interleaved=true"),
        ("gpt_neox", "classic", YARN.replace(",temperature_on=rotated", ""), {}, "scaling=yarn"),
        ("gpt_neox", "classic", "nope", {"kv_heads": 2}, "each has keys and values"),
    ],
)
def test_a_model_that_would_compute_something_else_is_refused(architecture, preset, spec, options, words):
    decoder = decoder_for(preset, spec, **options)
    with refused(f"--as {architecture} would compute something else: .*{words}"):
        export_as(architecture, decoder.config, spec, 32, decoder.state_dict())


def without(name: str):
    return lambda folder: (folder / name).unlink()


def changed(**values):
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


REFUSED = [
    (without("config.json"), "has no config.json, so it is no transformers model"),
    (without("tokenizer.json"), "has no tokenizer.json: make it with"),
    (without("model-00002-of-00006.safetensors"), "names the file"),
    (changed(model_type="bert"), "a model of type 'bert' cannot be imported; known types: cohere2"),
    (changed(model_type="gpt_oss"), "cannot be imported: its feed-forward layers have experts"),
    (changed(intermediate_size=64), r"up_proj.weight has the shape \(48, 32\), and its config means \(64, 32\)"),
    (changed(num_hidden_layers=4), "has no tensor model.layers.3"),
    (changed(num_hidden_layers=2), "has the tensor model.layers.2"),
    (changed(hidden_act="gelu"), "the gate 'gelu'"),
    (changed(vocab_size=100), "the token id 289 and the model has 100 tokens"),
    (changed(bos_token_id=None, eos_token_id=None), "neither bos_token_id nor eos_token_id"),
    (changed(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "scaled .dynamic."),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[words[:24] for _, words in REFUSED])
def test_what_cannot_be_imported_leaves_nothing_behind(llama, tmp_path, change, words):
    shutil.copytree(llama[1], tmp_path / "model")
    change(tmp_path / "model")
    with refused(words):
        import_model(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_run_folder_in_use_is_refused_and_a_scaling_may_be_replaced(llama, tmp_path):
    _, folder, checkpoint, _ = llama
    assert "is not empty" in refusal("import", folder, "--out", checkpoint.parent)
    shutil.copytree(folder, tmp_path / "model")
    changed(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})(tmp_path / "model")
    run_here("import", tmp_path / "model", "--out", tmp_path / "run", "--rpe", "rope:scaling=none")
    record = json.loads((tmp_path / "run" / "import.json").read_text())
    assert record["rpe"] == "rope:scaling=none" or record["rpe"] == "rope"
