"""The built-in recipes: they hold together, and settings and values are the papers', typed from them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from sweep_commands import dry_run, flag, parse

from fairseq_rpe import algorithms, encodings, positions
from fairseq_rpe.checkpoints.model_sizes import MODEL_SIZES, full_arch_name
from fairseq_rpe.cli.train import stated_settings
from fairseq_rpe.data.prepare_options import CORPORA
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.evaluation.position_limits import max_length
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.runs.training_config import TrainingConfig
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.recipes import Preset
from fairseq_rpe.sweeps.sweep_record import Method

BUILT_IN = recipes.names()
LOADED = {name: recipes.load(name) for name in BUILT_IN}
DRAWN = ["fire-lm-512", "fire-lm-large", "fire-lm-transfer"]  # their papers have figures, and no numbers
WARPED = ["warping-algorithmic", "warping-lm"]
EXTEND = [name for name in BUILT_IN if name.partition("-")[0] == "extend"]  # their papers stretch LLaMA
# at settings of this project
OWN = [
    "addition",
    "divergent-series",
    "hybrids",
    "hybrids-passkey",
    "passkey",
    "retrieval",
    "ruler",
    "survey-encodings",
]
UNPRINTED = ["warping-copy", *EXTEND, *OWN]  # a figure, of which no values are printed; or none of such models
# a large model on several corpora, or tables of corpora and lengths, which no small corpus can show
PAPER_ONLY = ["fire-lm-transfer", *(name for name in BUILT_IN if name.startswith("survey-") and name not in OWN)]
SCALES = [(name, scale) for name in BUILT_IN for scale in LOADED[name].presets]
# those for answers: test_answer_recipes.py
TRAINED = [name for name in BUILT_IN if LOADED[name].kind != "answers"]
RECIPES = [name for name in TRAINED if "paper" in LOADED[name].presets]

EXTRAPOLATION = {  # Exploring Transformer Extrapolation, Table 3; ReLU, untied and dropout: the authors' code
    "tokens": 512, "batch": 128, "updates": 50_000, "warmup": 4_000, "lr": 5e-4, "schedule": "inverse_sqrt",
    "betas": (0.9, 0.98), "weight_decay": 0.01, "clip_norm": 1.0, "dropout": 0.1, "attention_dropout": 0.0,
    "activation_fn": "relu", "share_embeddings": False, "vocabulary": 50_265,
    "lengths": (512, 768, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 9216),
}  # fmt: skip
FIRE = {  # FIRE, "within documents", and its Table 8; betas, decay, schedule, warm-up, clipping: Brown et al. 2020
    "prepare": "c4", "arch": "base", "tokens": 2048, "blocks": "document", "batch": 256, "updates": 600_000,
    "warmup": round(375e6 / (256 * 2048)), "lr": 6e-4, "schedule": "cosine", "min_lr": 6e-4 / 10, "betas": (0.9, 0.95),
    "weight_decay": 0.1, "clip_norm": 1.0, "dropout": 0.0, "attention_dropout": 0.0, "activation_fn": "gelu",
    "share_embeddings": True, "lengths": (512, 1024, 2048, 4096, 8192), "vocabulary": 50_265,
}  # fmt: skip
FIRE_LARGE = {**FIRE, "arch": "large", "lr": 3e-4, "min_lr": 3e-5}  # Table 8; Brown et al.: a tenth of it
WARPING = {  # Position Index Warping; dropout, the tanh form of GeLU, tied and unscaled embeddings, vocabulary: GPT-2's
    "prepare": "wikitext103", "arch": "base", "tokens": 512, "batch": 64, "lr": 5e-5, "betas": (0.9, 0.999),
    "weight_decay": 0.0, "clip_norm": 1.0, "dropout": 0.1, "attention_dropout": 0.1, "activation_fn": "gelu_accurate",
    "share_embeddings": True, "extra": ["--no-scale-embedding"], "lengths": (512, 1024, 2048, 3072, 4096),
    "vocabulary": 50_265,
}  # fmt: skip
GENERATED = {  # the same paper's tasks; AdamW's own betas
    "batch": 64, "updates": 40_000, "schedule": "linear", "betas": (0.9, 0.999), "weight_decay": 0.05, "clip_norm": 1.0,
}  # fmt: skip
STRETCHED = {  # Position interpolation and YaRN, as their papers fine-tune; length and cosine are ours
    "tokens": 8192, "batch": 64, "updates": 1_000, "warmup": 20, "lr": 2e-5, "schedule": "cosine", "min_lr": 2e-6,
    "betas": (0.9, 0.95), "weight_decay": 0.0, "dropout": 0.0, "arch": "base", "share_embeddings": True,
}  # fmt: skip
FURTHER = {
    "rope:scaling=linear,factor=4": STRETCHED,
    "rope:scaling=yarn,factor=4,original_length=2048": {**STRETCHED, "updates": 400},
}
# Length Extrapolation of Transformers: A Survey states data and lengths, the rest is as above
SURVEY = {**EXTRAPOLATION, "arch": "wiki103", "lengths": (512, 1024)}
LONGER = {"tokens": 1024, "batch": 64, "lengths": (1024, 2024)}
PAPERS = {
    "extrapolation-wikitext103": {**EXTRAPOLATION, "prepare": "wikitext103", "arch": "wiki103"},
    "extrapolation-books": {**EXTRAPOLATION, "prepare": "books", "arch": "base"},
    "extrapolation-github": {**EXTRAPOLATION, "prepare": "github", "arch": "base"},
    "training-axis": {**EXTRAPOLATION, "prepare": "github", "arch": "base"},
    "extrapolation-wikibook": {**EXTRAPOLATION, "prepare": "wikibook", "arch": "base"},
    "fire-lm": FIRE,
    "fire-lm-shared": {**FIRE, "rpe_share": "model"},
    "fire-lm-large": FIRE_LARGE,
    "fire-lm-512": {**FIRE, "tokens": 512, "warmup": round(375e6 / (256 * 512))},  # Figure 6
    "fire-lm-transfer": {**FIRE_LARGE, "evaluate": ["arxiv", "github"]},  # Figure 2
    "fire-lm-stretched": {**FIRE, "further": FURTHER},
    "survey-wikitext103-512": {**SURVEY, "prepare": "wikitext103", "lengths": (512, 1012)},
    "survey-wikitext103-1024": {**SURVEY, "prepare": "wikitext103", **LONGER},
    "survey-openwebtext2": {**SURVEY, "prepare": "openwebtext2"},
    "survey-arxiv": {**SURVEY, "prepare": "arxiv"},
    "warping-lm": WARPING,
    "warping-lm-alpha": WARPING,
    # its Figure 3: two layers; for as long as its Table A
    "warping-copy": {**GENERATED, "arch": "tiny", "algorithm": "copy:items=10,times=2,least=1"},
    "warping-algorithmic": {**GENERATED, "arch": "base", "warmup": 2_400, "lr": 3e-5, "activation_fn": "relu"},
}
# parameters of the built model beside the published number; GPT-2's 117 million were counted anew by its authors
COUNTS = {"fire-lm": 125e6, "fire-lm-shared": 125e6, "fire-lm-large": 350e6, "fire-lm-512": 125e6, "warping-lm": 124e6}


def training_lengths(scale: Preset) -> list[tuple[int, int]]:
    """Tokens in training and tokens of the longest test row, for every task of a scale."""
    if scale.tokens:
        return [(scale.tokens, max(scale.tokens, *scale.lengths))]
    tasks = [algorithms.build(spec) for spec in scale.algorithms]
    return [(t.num_tokens(t.max_length("train")), t.num_tokens(t.max_length("test"))) for t in tasks]


def test_every_recipe_loads():
    assert set(WARPED) <= set(BUILT_IN) and BUILT_IN == sorted(BUILT_IN)
    assert [LOADED[name].kind for name in WARPED] == ["algorithms", "text"]
    for name in BUILT_IN:
        recipe = LOADED[name]
        assert recipe.name == name and recipe.title and recipe.paper
        assert name in UNPRINTED or recipe.published.source
        for scale in recipe.presets.values() if name in RECIPES else ():
            assert (scale.corpus in CORPORA and scale.data) if recipe.kind == "text" else scale.corpus is None
        others = {
            "survey-encodings": "laptop",
            "divergent-series": "desktop",
            "hybrids": "desktop",
            "hybrids-passkey": "laptop",
        }
        larger = others.get(name, "large" if name in (*OWN, *EXTEND) else "paper")
        assert ("laptop" in recipe.presets) == (name not in PAPER_ONLY) and larger in recipe.presets


@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_every_method_builds_and_holds_the_longest_row(name, scale):
    """--methods may name any of them at any scale, which must not end in an error after the training.

    Those of a few training lengths are evaluated as far as their positions reach.
    """
    recipe = LOADED[name]
    settings = recipe.preset(scale)
    chosen = recipe.select_methods(settings.methods or ("all",))
    assert {m.name for m in chosen} <= {m.name for m in recipe.methods}
    assert len(chosen) >= (1 if settings.rpe_share else 3)
    for method in recipe.methods:
        for trained, longest in training_lengths(settings):
            settled = settings.resolve_method(method, trained)
            sizes = {"heads": 4, "width": 128, "layers": 4, "length": trained}
            build_for_model(settled.rpe_eval or settled.rpe, **sizes)
            encoding = build_for_model(settled.rpe, **sizes).layer(0)
            for spec in (settled.positions_train, settled.positions_eval):
                transform = positions.build(spec or "identity", trained)
                assert transform.evaluation and not (transform.fractional and encoding.position_type == "whole")
            held = min(longest, max_length(method.positions_eval, trained) or longest)
            assert held >= trained and (held == longest or method.name in ("randomized-2x", "randomized-3x"))
            for spec, length in ((settled.positions_train, trained), (method.positions_eval or "identity", held)):
                row, generator = torch.arange(length, dtype=torch.float32)[None], torch.Generator().manual_seed(0)
                moved = positions.build(spec, trained)(row, torch.tensor([length]), generator)
                assert moved.k.shape == (1, length) and moved.k.isfinite().all(), method.name


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in UNPRINTED])
def test_published_values_are_of_methods(name):
    recipe = LOADED[name]
    values = recipe.published.values
    assert bool(values) != (name in DRAWN) and set(values) <= {m.name for m in recipe.methods}
    assert name not in WARPED or {m.name for m in recipe.methods} - set(values) <= {"head-only", "tail-only"}
    for method, row in values.items():
        assert all(isinstance(v, float) and v > 0 for v in row.values())
        if recipe.kind == "answers":
            asked = {name for folder in recipe.preset("paper").questions.values() for name in folder.sets}
            assert set(row) <= {*asked, "mean"} or set(map(int, row)) == set(recipe.preset("paper").lengths)
        elif recipe.kind == "algorithms":
            assert set(row) <= set(recipe.preset("paper").algorithms) and max(row.values()) <= 100
        else:
            wanted = recipe.preset("paper").lengths[: 2 if method == "randomized-2x" else None]
            assert set(map(int, row)) == set(wanted)


def test_every_recipe_is_in_the_table():
    assert set(PAPERS) == set(RECIPES) and sum("desktop" in LOADED[name].presets for name in RECIPES) == 5


@pytest.mark.parametrize("name", RECIPES)
def test_the_paper_scale_is_the_papers(name, tmp_path, monkeypatch):
    """Without its data there: preparation, training and evaluation as they will be, in one process and in eight."""
    monkeypatch.chdir(tmp_path)
    # the numbers of items follow from the examples, ten thousand of each task
    monkeypatch.setattr(algorithms.base.Algorithm, "lengths", lambda *_: [2, 3])
    for processes in (1, 8):
        expected = dict(PAPERS[name])
        lines = dry_run("--recipe", name, "--preset", "paper", "--nproc", processes)
        if corpus := expected.pop("prepare", None):
            folder = f"data-bin/{corpus}-gpt2"
            assert lines.pop(0) == ["prepare-corpus", corpus, "--out", folder, "--tokenizer", "gpt2"]
            others = {text: f"data-bin/{text}-gpt2" for text in expected.pop("evaluate", [])}
            for text, place in others.items():
                assert lines.pop(0) == ["prepare-corpus", text, "--out", place, "--vocab-from", folder]
            on = [line[2] for line in lines if line[0] == "eval"]
            assert len({on.count(place) for place in (folder, *others.values())}) == 1
            assert all({folder, *others.values()} & set(line) for line in lines)
        trained = [parse(line) for line in lines if line[0] == "train"]
        scored = [parse(line) for line in lines if line[0] in ("eval", "eval-task")]
        assert trained and scored and len(trained) + len(scored) == len(lines)
        vocabulary, wanted = expected.pop("vocabulary", None), expected.pop("lengths", None)
        assert LOADED[name].preset("paper").vocabulary == vocabulary
        for one in scored if wanted else ():
            # L = 1024
            assert one.lengths == (wanted[:2] if one.positions_eval == "randomized:times=2,per=row" else wanted)
        further = expected.pop("further", {})
        assert [one.rpe for one in trained if one.finetune_from] == list(further)
        for one in trained:
            batch = one.batch_sentences * one.nproc * (one.update_freq or 1)
            stated = further[one.rpe] if one.finetune_from else expected
            found = {key: batch if key == "batch" else getattr(one, key) for key in stated}
            for key, value in stated.items():
                assert found[key] == (pytest.approx(value) if isinstance(value, float) else value), key
            config = TrainingConfig(**stated_settings(one))
            assert TrainingConfig(**stated_settings(parse(["train", *config.argv()]))) == config
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", COUNTS)
def test_the_model_has_as_many_parameters_as_published(name):
    """Built without its numbers, with fairseq's dictionary of GPT-2's types."""
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_CONFIG_REGISTRY
    from fairseq.tasks.language_modeling import LanguageModelingTask

    from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

    scale, dictionary = LOADED[name].preset("paper"), Dictionary()
    for n in range(scale.vocabulary - len(dictionary)):
        dictionary.add_symbol(str(n))
    task = LanguageModelingTask(Namespace(add_bos_token=False), dictionary)
    own = {"tokens_per_sample": scale.tokens, "share_decoder_input_output_embed": scale.share_embeddings}
    own |= {"rpe": "fire" if "fire" in name else "rope", "rpe_share": scale.rpe_share or "auto"}
    args = Namespace(activation_fn=scale.activation_fn, **own)
    ARCH_CONFIG_REGISTRY[full_arch_name(PAPERS[name]["arch"])](args)
    with torch.device("meta"):
        model = TransformerRPELanguageModel.build_model(args, task)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(COUNTS[name], rel=0.02)


@pytest.mark.parametrize(("name", "scale"), [one for one in SCALES if one[0] in TRAINED])
def test_scales_resolve(name, scale, tmp_path, monkeypatch):
    """Without the data: what is trained and evaluated, methods that differ in evaluation alone share a training."""
    monkeypatch.chdir(tmp_path)
    # the numbers of items follow from the examples, ten thousand of each task
    monkeypatch.setattr(algorithms.base.Algorithm, "lengths", lambda *_: [2, 3])
    recipe = LOADED[name]
    settings = recipe.preset(scale)
    # the further training of a method is as long as the recipe says
    methods = [one for one in recipe.select_methods(settings.methods or ("all",)) if one.continues is None]
    lines = dry_run("--recipe", name, "--preset", scale, "--methods", " ".join(one.name for one in methods))
    lines = [line for line in lines if line[0] != "prepare-corpus"]
    trainings = [line for line in lines if line[0] == "train"]
    evaluations = [line for line in lines if line[0] in ("eval", "eval-task")]
    assert len(trainings) + len(evaluations) == len(lines)
    data = [settings.data] if recipe.kind == "text" else settings.algorithms
    shared = {
        (m.rpe, m.positions_train) for m in (settings.resolve_method(one, settings.tokens or 0) for one in methods)
    }
    trained = list(map(parse, trainings))
    found = [
        (str(one.data) if recipe.kind == "text" else one.algorithm, one.rpe, one.positions_train) for one in trained
    ]
    assert sorted(found) == sorted((one, *pair) for one in data for pair in shared)
    for one in trained:
        assert str(one.out).startswith(f"runs/{name}-{scale}/runs/") and tuple(one.extra) == settings.extra
        for key in ("updates", "arch", "tokens", "lr", "dropout", "schedule", "warmup", "blocks"):
            assert getattr(settings, key) in (None, getattr(one, key)), key
    texts = len(data) + len(settings.evaluate)
    squeezed = [
        line for line in evaluations if "--positions-eval" in line and flag(line, "--positions-eval") == "interpolate"
    ]
    assert len(squeezed) == texts * sum(m.positions_eval == "interpolate" for m in methods)
    checkpoints = len({settings.updates, *(settings.evaluate_at or ())})
    assert len(evaluations) == texts * len(methods) * checkpoints and (
        name not in WARPED or len(trainings) < len(evaluations)
    )
    for command in evaluations if recipe.kind == "text" else ():
        reach = 2 * settings.tokens if "randomized:times=2,per=row" in command else max(settings.lengths)
        assert parse(command).lengths == tuple(n for n in sorted({settings.tokens, *settings.lengths}) if n <= reach)
        assert command[2] in {settings.data, *settings.evaluate.values()}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name for name in RECIPES if "desktop" in LOADED[name].presets])
def test_the_desktop_scale_trains_for_long_enough_to_show_the_effect(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = dry_run("--recipe", name, "--preset", "desktop")
    trained = [parse(line) for line in lines if line[0] == "train"]
    assert [one.rpe for one in trained] == ["sinusoidal", "alibi", "kerple_log", "type1", "inv_n"]
    for one in trained:
        assert 12e6 <= one.tokens * one.batch_sentences * one.updates <= 20e6
        assert (one.arch, one.compute_dtype, one.activation_fn, one.share_embeddings) == ("small", "bf16", "gelu", True)
        assert (one.betas, one.schedule, one.min_lr) == ((0.9, 0.95), "cosine", one.lr / 10)
    lengths = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 9216)
    assert {parse(line).lengths for line in lines if line[0] == "eval"} == {lengths}
    published = LOADED[name].published.values
    assert len(published) == 9
    named = dry_run("--recipe", name, "--preset", "desktop", "--methods", " ".join(published))
    assert len([line for line in named if line[0] == "train"]) == 9
    other = parse(dry_run("--recipe", name, "--preset", "desktop", "--compute-dtype", "fp32")[1])
    assert other.compute_dtype == "fp32"


def test_warping_is_the_papers():
    """15 % of rows head-warped, 15 % tail-warped, rotary, interpolation at evaluation; the others are its controls."""
    configs = {}
    for name, times in (("warping-algorithmic", (10, 5, 3)), ("warping-lm", (16, 8, 2))):
        methods = {m.name: m for m in LOADED[name].methods}
        assert methods["interpolation"] == Method("interpolation", "rope", positions_eval="interpolate")
        assert methods["rope"] == Method("rope", "rope") and methods["alibi"] == Method("alibi", "alibi")
        for method in methods.values():
            if method.name.startswith("warping"):
                config = positions.build(method.positions_train, 64).config
                assert (config.head, config.tail, config.length) == (0.15, 0.15, "row")
                configs[name, method.name] = (config.alpha, config.skew)
            elif method.name.endswith("-only"):
                # one warp alone is of as many rows as both
                config = positions.build(method.positions_train, 64).config
                assert (config.head, config.tail) == ((0.3, 0) if method.name == "head-only" else (0, 0.3))
            elif not method.name.startswith("randomized"):
                assert method.positions_train == "identity"
                continue
            assert method.rpe == "rope"
            randomized = method.name.startswith("randomized")
            assert method.positions_eval == (method.positions_train if randomized else "interpolate")
        for n in times:
            transform = positions.build(methods[f"randomized-{n}x"].positions_train, 100)
            assert (transform.max_length, transform.config.per) == (100 * n, "row")  # a draw for each example
    sixth = positions.build("warp:alpha=1/6").config.alpha
    drawn = positions.build("warp:alpha=choice(0.4;0.5;0.6;0.7;0.8)")
    assert drawn.alphas.tolist() == [0.4, 0.5, 0.6, 0.7, 0.8]
    assert configs == {
        ("warping-lm", "warping"): (sixth, "beta"),
        ("warping-algorithmic", "warping"): (drawn.config.alpha, "sqrt"),
        ("warping-algorithmic", "warping-beta"): (drawn.config.alpha, "beta"),
    }


def test_ratios_of_the_warp():
    methods = {m.name: m for name in ("warping-lm", "warping-lm-alpha") for m in LOADED[name].methods}
    for name, ratio in {"half": 2, "quarter": 4, "sixth": 6, "eighth": 8, "head-only": 6, "warping": 6}.items():
        assert (methods[name].rpe, methods[name].positions_eval) == ("rope", "interpolate")
        made = positions.build(methods[name].positions_train, 512)
        assert (made.config.head, made.config.tail) == ((0.15, 0.15) if name == "warping" else (0.3, 0))
        assert made.alphas.tolist() == pytest.approx([1 / ratio])
    assert positions.build(methods["tail-only"].positions_train, 512).config.skew == "beta"
    assert [m.name for m in LOADED["warping-lm-alpha"].methods] == ["half", "quarter", "sixth", "eighth"]


def test_table_b():
    values = LOADED["warping-lm-alpha"].published.values
    assert {name: list(row.values()) for name, row in values.items()} == {
        "half": [19.06, 21.65, 26.18, 26.22, 32.26],
        "quarter": [19.34, 18.36, 18.19, 19.34, 20.88],
        "sixth": [19.57, 18.59, 18.36, 18.79, 19.48],
        "eighth": [19.87, 18.93, 18.62, 18.83, 19.31],
    }
    assert LOADED["warping-lm"].published.values["randomized-2x"] == {"512": 19.83, "1024": 18.80}
    three = LOADED["warping-algorithmic"].published.values["randomized-3x"]
    assert three == {"copy": 26.8, "reverse": 39.3, "sort": 43.0}


def test_figure_3_copies_from_one_item_on_by_rope_and_alibi():
    for scale in ("laptop", "paper"):
        (spec,) = LOADED["warping-copy"].preset(scale).algorithms
        task = algorithms.build(f"{spec},train=300,test=400")
        assert (task.lengths("train"), task.lengths("test")) == (list(range(1, 11)), list(range(1, 21)))
        assert MODEL_SIZES[LOADED["warping-copy"].preset(scale).arch].layers == 2
    table = {m.name: m for m in LOADED["warping-copy"].methods}
    assert table["rope"] == Method("rope", "rope") and table["alibi"] == Method("alibi", "alibi")


def test_the_small_scales_of_fires_models_show_their_subject():
    """A shorter training length, and a larger model at a lower learning rate, than fire-lm's at the same scale."""
    usual, short, large = (LOADED[f"fire-lm{name}"].preset("laptop") for name in ("", "-512", "-large"))
    assert (short.tokens * 4, max(short.lengths)) == (usual.tokens, 16 * short.tokens)
    assert (
        MODEL_SIZES[large.arch].layers > MODEL_SIZES[usual.arch].layers
        and MODEL_SIZES[large.arch].width > MODEL_SIZES[usual.arch].width
    )
    assert large.tokens == usual.tokens and large.lr < defaults_for(usual.arch, False).lr


# published values, as they are printed

TABLE_3 = {  # each value at a length
    "extrapolation-wikitext103": "sinusoidal 9216 423.92, type1 512 24.25, inv_nlnn 9216 27.63",
    "extrapolation-books": "sinusoidal 512 7.49, sinusoidal 9216 34.70, alibi 1024 7.09, kerple_log 9216 7.01, "
    "kerple_power 6144 6.98, sandwich 2048 7.41, type1 3072 7.00, type2 768 7.22, inv_n 9216 26.34, inv_nlnn 512 7.35",
    "extrapolation-github": "sinusoidal 9216 143.17, alibi 512 2.25, kerple_log 6144 2.01, kerple_power 8192 2.03, "
    "sandwich 1536 2.12, type1 8192 2.02, type2 9216 2.03, inv_n 5120 15.79, inv_nlnn 9216 16.35",
    "extrapolation-wikibook": "sinusoidal 1280 65.13, alibi 9216 16.33, kerple_log 4096 16.14, kerple_power 512 17.62, "
    "sandwich 7168 16.71, type1 5120 16.21, type2 9216 16.33, inv_n 2048 23.31, inv_nlnn 8192 108.85",
}
LENGTHS = [512, 768, 1024, 1280, 1536, 1792, *range(2048, 9217, 1024)]


@pytest.mark.parametrize("name", TABLE_3)
def test_published_perplexities(name):
    values = LOADED[name].published.values
    for method, length, value in map(str.split, TABLE_3[name].split(", ")):
        assert values[method][length] == float(value)
    kinds = {"sinusoidal", "alibi", "kerple_log", "kerple_power", "sandwich", "type1", "type2", "inv_n", "inv_nlnn"}
    assert set(values) == kinds and all([int(n) for n in row] == LENGTHS for row in values.values())


def test_the_other_corpora_are_changes_of_the_first():
    base = LOADED["extrapolation-wikitext103"]
    for name in ("books", "github", "wikibook"):
        recipe = LOADED[f"extrapolation-{name}"]
        assert recipe.methods == base.methods and recipe.title != base.title
        laptop = recipe.preset("laptop")
        assert laptop.data == f"data-bin/{name}" and laptop.arch == "tiny"
        assert laptop.tokens == min(LENGTHS) and set(laptop.lengths) <= set(LENGTHS)
        assert max(laptop.lengths) == max(LENGTHS) and set(laptop.methods) == set(recipe.published.values)
        for scale, own in (("paper", {"data": f"data-bin/{name}-gpt2", "arch": "base"}), ("desktop", {})):
            own = {"data": f"data-bin/{name}-4096", "corpus": name, **own}
            assert recipe.preset(scale) == replace(base.preset(scale), **own)
        assert recipe.published.settings.model.startswith("12 layers of width 768")
        assert name in recipe.published.source.lower()
        assert recipe.published.values["alibi"] != base.published.values["alibi"]


def test_fire_and_its_ablations():
    """Tables 3 to 7: each ablation is another network, and FIRE-S has its parameters once."""
    recipe = LOADED["fire-lm"]
    assert recipe.published.measure == "log_ppl" and recipe.published.number_format == ".3f"
    values = recipe.published.values
    assert values["fire"]["8192"] == 3.056 and values["fire-no-log"]["8192"] == 3.334 and values["rope"]["512"] == 3.178
    scale = recipe.preset("paper")
    assert set(values) == set(scale.methods)  # the others have no published values
    specs = {m.name: scale.resolve_method(m, 2048).rpe for m in recipe.methods}
    methods = {name: encodings.build(spec, heads=12, width=768, length=2048) for name, spec in specs.items()}
    sizes = {name: sum(p.numel() for p in made.parameters()) for name, made in methods.items() if "fire" in name}
    counts = {"fire fire-gelu": 1518, "fire-no-threshold fire-fixed-threshold": 1517, "fire-no-log": 1516}
    counts |= {"fire-1-layer fire-output-relu": 462, "fire-linear": 26}
    assert sizes == {name: count for names, count in counts.items() for name in names.split()}
    shared = LOADED["fire-lm-shared"]
    assert shared.preset("paper") == replace(recipe.preset("paper"), rpe_share="model", methods=("fire",))
    assert shared.published.values["fire"]["2048"] == 3.10


SURVEYED = {  # Table 3: of these encodings, at the training length and beyond it
    "survey-wikitext103-512": ((20.05, 43.54), (19.65, 18.79), (19.73, 18.73), (20.07, 21.37)),
    "survey-wikitext103-1024": ((19.34, 51.09), (18.8, 18.34), (18.66, 18.05), (19.33, 31.17)),
    "survey-openwebtext2": ((26, 14168), (22.6, 22.2), (22.8, 23.3), (23, 61)),
    "survey-arxiv": ((5.8, 1070), (5.16, 4.91), (5.25, 5.41), (5.25, 16.02)),
}


@pytest.mark.parametrize("name", SURVEYED)
def test_the_surveys_table(name):
    recipe, methods = LOADED[name], ("sinusoidal", "t5_bias", "alibi", "rope")
    found = {method: tuple(row.values()) for method, row in recipe.published.values.items()}
    assert found == dict(zip(methods, SURVEYED[name], strict=True))
    assert tuple(m.name for m in recipe.methods) == methods and recipe.preset("paper").methods is None


LINEAR, YARN = "rope:scaling=linear,factor=4", "rope:scaling=yarn,factor=4,original_length=64"
ABF, LONGROPE = "rope:base=500000", "longrope:factors=yarn,factor=4,original_length=64"
EXTENDED = {  # method: encoding, encoding in evaluation, positions in training, and whether it is trained further
    "rope": ("rope", None, "identity", False),
    "rope-longer": ("rope", None, "identity", True),
    "pi-untuned": ("rope", LINEAR, "identity", False),
    "ntk-untuned": ("rope", "rope:scaling=ntk,factor=4", "identity", False),
    "yarn-untuned": ("rope", YARN, "identity", False),
    "abf-untuned": ("rope", ABF, "identity", False),
    "longrope-untuned": ("rope", LONGROPE, "identity", False),
    "pi": (LINEAR, None, "identity", True),
    "yarn": (YARN, None, "identity", True),
    "longrope": (LONGROPE, None, "identity", True),
    "abf": (ABF, None, "identity", True),
    "pose": (LINEAR, None, "pose:target=256", True),
}


def test_extended_four_times_and_read_at_sixteen_with_controls():
    recipe = LOADED["extend"]
    for size, tokens in (("laptop", 64), ("desktop", 512), ("large", 2048)):
        scale = recipe.preset(size)
        assert (scale.tokens, scale.lengths) == (tokens, tuple(tokens * n for n in (1, 2, 4, 8, 16)))
        methods = {method.name: scale.resolve_method(method, tokens) for method in recipe.methods}
        for name, method in methods.items():
            at = {"pose": tokens}.get(name, 4 * tokens)
            assert not method.continues or (method.further.tokens or tokens) == at
            # as many tokens an update as before
            if size != "large" and method.further.tokens:
                per_update = method.further.tokens * method.further.batch_sentences
                assert per_update == tokens * (scale.batch_sentences or 16)
        found = {n: (m.rpe, m.rpe_eval, m.positions_train, m.continues == "rope") for n, m in methods.items()}
        assert size != "laptop" or found == EXTENDED
        assert methods["pose"].positions_train == f"pose:target={4 * tokens}"


@pytest.mark.parametrize("name", [name for name in EXTEND if name != "extend"])
def test_each_way_to_extend_has_its_controls(name):
    base, recipe = LOADED["extend"], LOADED[name]
    assert recipe.methods == base.methods and recipe.title != base.title
    for size, scale in recipe.presets.items():
        assert {"rope", "rope-longer", name.partition("-")[2]} < set(scale.methods)
        assert replace(scale, methods=None) == base.preset(size)
