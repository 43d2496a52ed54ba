"""The paper scales beside what the papers state, typed from them; and what a recipe says of its corpus and batch."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from conftest import with_vocabulary
from refusal import refusal
from sweep_commands import DRY, dry_run, parse

from fairseq_rpe import algorithms
from fairseq_rpe.core.records import filled
from fairseq_rpe.core.sizes import full_name
from fairseq_rpe.data.preparation import KNOWN
from fairseq_rpe.runs.settings import Request
from fairseq_rpe.sweeps import recipes

# those for answers: test_answer_recipes.py
RECIPES = [
    name for name in recipes.names() if "paper" in recipes.load(name).scales and recipes.load(name).kind != "answers"
]
EXTRAPOLATION = {  # Exploring Transformer Extrapolation, Table 3; ReLU, untied and dropout: the authors' code
    "tokens": 512, "batch": 128, "updates": 50_000, "warmup": 4_000, "lr": 5e-4, "schedule": "inverse_sqrt",
    "betas": (0.9, 0.98), "weight_decay": 0.01, "clip_norm": 1.0, "dropout": 0.1, "attention_dropout": 0.0,
    "activation_fn": "relu", "share_embeddings": False,
    "lengths": (512, 768, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 9216),
    "vocabulary": 50_265,
}  # fmt: skip
FIRE = {  # FIRE, "within documents", and its Table 8; betas, decay, schedule, warm-up, clipping: Brown et al. 2020
    "prepare": "c4", "arch": "base", "tokens": 2048, "blocks": "document", "batch": 256, "updates": 600_000,
    "warmup": round(375e6 / (256 * 2048)), "lr": 6e-4, "schedule": "cosine", "min_lr": 6e-4 / 10, "betas": (0.9, 0.95),
    "weight_decay": 0.1, "clip_norm": 1.0, "dropout": 0.0, "attention_dropout": 0.0, "activation_fn": "gelu",
    "share_embeddings": True, "lengths": (512, 1024, 2048, 4096, 8192), "vocabulary": 50_265,
}  # fmt: skip
WARPING = {  # Position Index Warping; dropout, the tanh form of GeLU, tied and unscaled embeddings, vocabulary: GPT-2's
    "prepare": "wikitext103", "arch": "base", "tokens": 512, "batch": 64, "lr": 5e-5, "betas": (0.9, 0.999),
    "weight_decay": 0.0, "clip_norm": 1.0, "dropout": 0.1, "attention_dropout": 0.1, "activation_fn": "gelu_accurate",
    "share_embeddings": True, "extra": ["--no-scale-embedding"], "lengths": (512, 1024, 2048, 3072, 4096),
    "vocabulary": 50_265,
}  # fmt: skip
STRETCHED = {  # Position interpolation and YaRN, as their papers fine-tune; length and cosine are ours
    "tokens": 8192,
    "batch": 64,
    "updates": 1_000,
    "warmup": 20,
    "lr": 2e-5,
    "schedule": "cosine",
    "min_lr": 2e-6,
    "betas": (0.9, 0.95),
    "weight_decay": 0.0,
    "dropout": 0.0,
    "arch": "base",
    "share_embeddings": True,
}
SURVEY = {  # Length Extrapolation of Transformers: A Survey states data and lengths, the rest is as above
    **EXTRAPOLATION,
    "arch": "wiki103",
    "lengths": (512, 1024),
}
PAPERS = {
    "extrapolation-wikitext103": {**EXTRAPOLATION, "prepare": "wikitext103", "arch": "wiki103"},
    "extrapolation-books": {**EXTRAPOLATION, "prepare": "books", "arch": "base"},
    "extrapolation-github": {**EXTRAPOLATION, "prepare": "github", "arch": "base"},
    "extrapolation-wikibook": {**EXTRAPOLATION, "prepare": "wikibook", "arch": "base"},
    "fire-lm": FIRE,
    "fire-lm-shared": {**FIRE, "rpe_share": "model"},
    "fire-lm-large": {**FIRE, "arch": "large", "lr": 3e-4, "min_lr": 3e-5},  # Table 8; Brown et al.: a tenth of it
    "fire-lm-512": {**FIRE, "tokens": 512, "warmup": round(375e6 / (256 * 512))},  # Figure 6
    # Figure 2
    "fire-lm-transfer": {**FIRE, "arch": "large", "lr": 3e-4, "min_lr": 3e-5, "evaluate": ["arxiv", "github"]},
    "fire-lm-stretched": {
        **FIRE,
        "further": {
            "rope:scaling=linear,factor=4": STRETCHED,
            "rope:scaling=yarn,factor=4,original_length=2048": {**STRETCHED, "updates": 400},
        },
    },
    "survey-wikitext103-512": {**SURVEY, "prepare": "wikitext103", "lengths": (512, 1012)},
    "survey-wikitext103-1024": {
        **SURVEY,
        "prepare": "wikitext103",
        "tokens": 1024,
        "batch": 64,
        "lengths": (1024, 2024),
    },
    "survey-openwebtext2": {**SURVEY, "prepare": "openwebtext2"},
    "survey-arxiv": {**SURVEY, "prepare": "arxiv"},
    "warping-lm": WARPING,
    "warping-lm-alpha": WARPING,
    "warping-copy": {  # its Figure 3: two layers; for as long as its Table A
        "arch": "tiny",
        "algorithm": "copy:items=10,times=2,least=1",
        "batch": 64,
        "updates": 40_000,
        "schedule": "linear",
        "betas": (0.9, 0.999),
        "weight_decay": 0.05,
        "clip_norm": 1.0,
    },
    "warping-algorithmic": {  # the same; AdamW's own betas
        "arch": "base",
        "batch": 64,
        "updates": 40_000,
        "warmup": round(0.06 * 40_000),
        "lr": 3e-5,
        "schedule": "linear",
        "betas": (0.9, 0.999),
        "weight_decay": 0.05,
        "clip_norm": 1.0,
        "activation_fn": "relu",
    },
}
# parameters of the built model beside the published number; GPT-2's 117 million were counted anew by its authors
COUNTS = {
    ("fire-lm", "base"): 125e6,
    ("fire-lm-shared", "base"): 125e6,
    ("fire-lm-large", "large"): 350e6,
    ("fire-lm-512", "base"): 125e6,
    ("warping-lm", "base"): 124e6,
}


def refused(*argv: object) -> str:
    return refusal("sweep", *argv)


def test_every_recipe_is_in_the_table():
    assert set(PAPERS) == set(RECIPES) and sum("desktop" in recipes.load(name).scales for name in RECIPES) == 4


@pytest.mark.parametrize("name", RECIPES)
def test_the_paper_scale_is_the_papers(name, tmp_path, monkeypatch):
    """Without its data there: preparation, training and evaluation as they will be, in one process and in eight."""
    monkeypatch.chdir(tmp_path)
    # the numbers of items follow from the examples, ten thousand of each task
    monkeypatch.setattr(algorithms.base.Algorithm, "lengths", lambda *_: [2, 3])
    for processes in (1, 8):
        expected = dict(PAPERS[name])
        lines = dry_run("--recipe", name, "--scale", "paper", "--nproc", processes)
        if corpus := expected.pop("prepare", None):
            folder = f"data-bin/{corpus}-gpt2"
            assert lines.pop(0) == ["prepare-known", corpus, "--dest", folder, "--tokenizer", "gpt2"]
            others = {text: f"data-bin/{text}-gpt2" for text in expected.pop("evaluate", [])}
            for text, place in others.items():
                assert lines.pop(0) == ["prepare-known", text, "--dest", place, "--vocab-from", folder]
            on = [line[2] for line in lines if line[0] == "eval"]
            assert len({on.count(place) for place in (folder, *others.values())}) == 1
            assert all({folder, *others.values()} & set(line) for line in lines)
        trained = [parse(line) for line in lines if line[0] == "train"]
        scored = [parse(line) for line in lines if line[0] in ("eval", "accuracy")]
        assert trained and scored and len(trained) + len(scored) == len(lines)
        vocabulary, wanted = expected.pop("vocabulary", None), expected.pop("lengths", None)
        assert recipes.load(name).scale("paper").vocabulary == vocabulary
        for one in scored if wanted else ():
            # L = 1024
            assert one.lengths == (wanted[:2] if one.positions == "randomized:times=2,per=row" else wanted)
        further = expected.pop("further", {})
        assert [one.rpe for one in trained if one.finetune_from] == list(further)
        for one in trained:
            batch = one.batch_sentences * one.nproc * (one.update_freq or 1)
            stated = further[one.rpe] if one.finetune_from else expected
            found = {key: batch if key == "batch" else getattr(one, key) for key in stated}
            for key, value in stated.items():
                assert found[key] == (pytest.approx(value) if isinstance(value, float) else value), key
            request = filled(Request, one)
            assert filled(Request, parse(["train", *request.argv()])) == request
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "arch"), COUNTS)
def test_the_model_has_as_many_parameters_as_published(name, arch):
    """Built without its numbers, with fairseq's dictionary of GPT-2's types."""
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_CONFIG_REGISTRY
    from fairseq.tasks.language_modeling import LanguageModelingTask

    from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

    scale, dictionary = recipes.load(name).scale("paper"), Dictionary()
    for n in range(scale.vocabulary - len(dictionary)):
        dictionary.add_symbol(str(n))
    task = LanguageModelingTask(Namespace(add_bos_token=False), dictionary)
    args = Namespace(
        rpe="fire" if "fire" in name else "rope",
        rpe_share=scale.rpe_share or "auto",
        tokens_per_sample=scale.tokens,
        activation_fn=scale.activation_fn,
        share_decoder_input_output_embed=scale.share_embeddings,
    )
    ARCH_CONFIG_REGISTRY[full_name(arch)](args)
    with torch.device("meta"):
        model = TransformerRPELanguageModel.build_model(args, task)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(COUNTS[name, arch], rel=0.02)


# what a recipe says of its corpus


@pytest.mark.parametrize("name", RECIPES)
def test_a_text_recipe_names_corpora_that_there_are(name):
    recipe = recipes.load(name)
    for scale in recipe.scales.values():
        assert (scale.corpus in KNOWN and scale.data) if recipe.kind == "text" else scale.corpus is None


def test_another_vocabulary_is_refused(corpus, tmp_path):
    paper = ["--recipe", "extrapolation-wikitext103", "--scale", "paper"]
    for launcher in ([], DRY):
        said = refused(corpus, *paper, *launcher, "--out", tmp_path / "x")
        assert f"{corpus} has a vocabulary of " in said and "trains on 50,265 of gpt2: prepare another folder" in said
        assert "fairseq-rpe prepare-known wikitext103 --dest data-bin/wikitext103-gpt2 --tokenizer gpt2" in said
    right = with_vocabulary(corpus, tmp_path, 50_265)
    lines = dry_run(right, *paper, "--tokens", "512", "--lengths", "600", "--out", tmp_path / "x")
    assert lines[0][:2] == ["train", str(right)]
    said = refused(right, *paper[:2], "--scale", "desktop")
    assert "has a vocabulary of 50,265 types, this recipe trains on 4,096 of bpe" in said
    assert "--dest data-bin/wikitext103-4096 --tokenizer bpe --vocab-size 4096" in said


def test_a_recipe_of_your_own_names_its_vocabulary(corpus, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "fire-lm"\n[scales.laptop]\nvocabulary = 999\n')
    said = refused(corpus, "--recipe", path)
    assert "this recipe trains on 999: prepare another folder" in said and "prepare-known stdlib --dest" in said
    scales = '[scales.laptop]\ntokens = 32\nlengths = [32]\nvocabulary = 999\ntokenizer = "bpe"\n'
    path.write_text(f'title = "t"\npaper = "p"\nkind = "text"\n[methods.a]\nrpe = "alibi"\n{scales}')
    said = refused(corpus, "--recipe", path)
    assert f"fairseq-rpe prepare SOURCE --dest {corpus}-bpe --tokenizer bpe --vocab-size 999" in said


def test_a_laptop_scale_takes_any_vocabulary(corpus, tmp_path):
    laptops = [scales["laptop"] for name in RECIPES if "laptop" in (scales := recipes.load(name).scales)]
    assert laptops and all(scale.vocabulary is None for scale in laptops)
    assert dry_run(corpus, "--recipe", "fire-lm", "--out", tmp_path / "x")[0][0] == "train"


def test_a_folder_that_is_not_there_is_told_with_its_preparation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    how = "make it with fairseq-rpe prepare-known books --dest {} --tokenizer gpt2"
    paper = ["--recipe", "extrapolation-books", "--scale", "paper"]
    assert how.format("data-bin/books-gpt2") in refused(*paper)
    assert how.format("mine") in refused("mine", *paper)
    assert dry_run("mine", *paper)[0] == ["prepare-known", "books", "--dest", "mine", "--tokenizer", "gpt2"]
    [first, *_] = dry_run("--recipe", "fire-lm")
    assert first == ["prepare-known", "stdlib", "--dest", "data-bin/stdlib"]
    assert "does not exist" in refused("mine", "--encodings", "rope", "--lengths", "64", "--out", "x")


# its batch is that of all processes together


def test_a_batch_is_divided(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def batch(*given: str, scale: str = "paper") -> tuple[int | None, int | None]:
        one = parse(dry_run("--recipe", "extrapolation-books", "--scale", scale, *given)[1])
        return one.batch_sentences, one.update_freq

    assert batch() == (128, None) and batch("--nproc", "8") == (16, None)
    assert batch("--nproc", "8", "--nodes", "2", "--update-freq", "4") == (2, 4)
    assert batch("--update-freq", "16") == (8, 16) and batch("--nproc", "4", scale="laptop") == (2, None)
    # an option is taken as it is
    assert batch("--nproc", "8", "--batch-sentences", "128") == (128, None)
    said = refused("--recipe", "extrapolation-books", "--scale", "paper", "--nproc", "3")
    assert "the recipe's 128 sequences per update cannot be divided among 3 processes" in said


def test_a_batch_that_is_not_said_is_divided_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = parse(dry_run("--recipe", "warping-lm", "--nproc", 2)[1])
    task = parse(dry_run("--recipe", "warping-algorithmic", "--nproc", 2, "--algorithms", "copy:items=3,test=60")[0])
    assert (text.batch_sentences, task.batch_sentences) == (8, 32)


def test_another_schedule_leaves_out_where_the_cosine_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["--recipe", "fire-lm", "--scale", "paper", "--schedule", "linear"]
    assert parse(dry_run(*given)[1]).min_lr is None


# the desktop scale


@pytest.mark.parametrize("name", [name for name in RECIPES if "desktop" in recipes.load(name).scales])
def test_the_desktop_scale_trains_for_long_enough_to_show_the_effect(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = dry_run("--recipe", name, "--scale", "desktop")
    trained = [parse(line) for line in lines if line[0] == "train"]
    assert [one.rpe for one in trained] == ["sinusoidal", "alibi", "kerple_log", "type1", "inv_n"]
    for one in trained:
        assert 12e6 <= one.tokens * one.batch_sentences * one.updates <= 20e6
        assert (one.arch, one.compute_dtype, one.activation_fn, one.share_embeddings) == ("small", "bf16", "gelu", True)
        assert (one.betas, one.schedule, one.min_lr) == ((0.9, 0.95), "cosine", one.lr / 10)
    assert {parse(line).lengths for line in lines if line[0] == "eval"} == {
        (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 9216)
    }
    published = recipes.load(name).published.values
    assert len(published) == 9
    named = dry_run("--recipe", name, "--scale", "desktop", "--methods", " ".join(published))
    assert len([line for line in named if line[0] == "train"]) == 9
    other = parse(dry_run("--recipe", name, "--scale", "desktop", "--compute-dtype", "fp32")[1])
    assert other.compute_dtype == "fp32"
