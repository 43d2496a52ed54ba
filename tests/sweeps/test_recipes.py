"""Recipes: the built-in ones hold together and say what was published; a malformed one is refused in one line."""

from __future__ import annotations

import copy
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import with_documents
from refusal import refused as raises
from sweep_commands import DRY, LAUNCHERS, dry_run, flag, recipe_error, refused

from fairseq_rpe import algorithms, encodings, positions
from fairseq_rpe.core.sizes import SIZES
from fairseq_rpe.evaluation.reach import longest_row
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.recipes import Scale
from fairseq_rpe.sweeps.state import Method

BUILT_IN = recipes.names()
DRAWN = ["fire-lm-512", "fire-lm-large", "fire-lm-transfer"]  # their papers have figures, and no numbers
WARPING = ["warping-algorithmic", "warping-lm"]
EXTEND = [name for name in BUILT_IN if name.partition("-")[0] == "extend"]  # their papers stretch LLaMA
OWN = ["passkey", "retrieval", "survey-encodings"]  # tests that are published, at settings of this project
UNPRINTED = ["warping-copy", *EXTEND, *OWN]  # a figure, of which no values are printed; or none of such models
# a large model on several corpora, or tables of corpora and lengths, which no small corpus can show
PAPER_ONLY = ["fire-lm-transfer", *(name for name in BUILT_IN if name.startswith("survey-") and name not in OWN)]
SCALES = [(name, scale) for name in BUILT_IN for scale in recipes.load(name).scales]
GOOD: dict[str, Any] = {
    "title": "A title",
    "paper": "A paper",
    "kind": "algorithms",
    "methods": {"first": {"rpe": "rope"}, "second": {"rpe": "alibi", "positions_eval": "offset:by=2"}},
    "scales": {"laptop": {"algorithms": ["copy:test=50"], "updates": 9, "lr": 0.01, "methods": ["first"]}},
    "published": {"source": "Table 9", "first": {"copy": 12.5}},
}


def written(folder: Path, recipe: dict[str, Any]) -> Path:
    """The recipe as a TOML file."""

    def value(v: Any) -> str:
        if isinstance(v, dict):
            return "{ " + ", ".join(f'"{k}" = {value(w)}' for k, w in v.items()) + " }"
        if isinstance(v, list):
            return "[" + ", ".join(map(value, v)) + "]"
        return str(v).lower() if isinstance(v, bool) else f'"{v}"' if isinstance(v, str) else str(v)

    text = "".join(f'"{k}" = {value(v)}\n' for k, v in recipe.items())
    assert tomllib.loads(text) == recipe
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def changed(*path: str, to: Any = None) -> dict[str, Any]:
    """The good recipe with one value replaced, added, or (None) taken away."""
    recipe = copy.deepcopy(GOOD)
    inner = recipe
    for key in path[:-1]:
        inner = inner[key]
    inner.pop(path[-1], None)
    if to is not None:
        inner[path[-1]] = to
    return recipe


# the built-in ones


def training_lengths(scale: Scale) -> list[tuple[int, int]]:
    """Tokens in training and tokens of the longest test row, for every task of a scale."""
    if scale.tokens:
        return [(scale.tokens, max(scale.tokens, *scale.lengths))]
    tasks = [algorithms.build(spec) for spec in scale.algorithms]
    return [(t.tokens(t.longest("train")), t.tokens(t.longest("test"))) for t in tasks]


def test_every_recipe_loads():
    assert set(WARPING) <= set(BUILT_IN) and BUILT_IN == sorted(BUILT_IN)
    assert [recipes.load(name).kind for name in WARPING] == ["algorithms", "text"]
    for name in BUILT_IN:
        recipe = recipes.load(name)
        assert recipe.name == name and recipe.title and recipe.paper
        assert name in UNPRINTED or recipe.published.source
        larger = {"survey-encodings": "laptop"}.get(name, "large" if name in (*OWN, *EXTEND) else "paper")
        assert ("laptop" in recipe.scales) == (name not in PAPER_ONLY) and larger in recipe.scales


@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_every_method_builds_and_holds_the_longest_row(name, scale):
    """--methods may name any of them at any scale, which must not end in an error after the training.

    Those of a few training lengths are evaluated as far as their positions reach.
    """
    recipe = recipes.load(name)
    settings = recipe.scale(scale)
    chosen = recipe.choose(settings.methods or ("all",))
    assert {m.name for m in chosen} <= {m.name for m in recipe.methods}
    assert len(chosen) >= (1 if settings.rpe_share else 3)
    for method in recipe.methods:
        for trained, longest in training_lengths(settings):
            settled = settings.settled(method, trained)
            encodings.build(settled.rpe_eval or settled.rpe, heads=4, width=128, length=trained)
            encoding = encodings.build(settled.rpe, heads=4, width=128, length=trained)
            for spec in (settled.positions_train, settled.positions_eval):
                transform = positions.build(spec or "identity", trained)
                assert transform.evaluation and not (transform.fractional and encoding.positions == "whole")
            held = min(longest, longest_row(method.positions_eval, trained) or longest)
            assert held >= trained and (held == longest or method.name in ("randomized-2x", "randomized-3x"))
            for spec, length in ((settled.positions_train, trained), (method.positions_eval or "identity", held)):
                row, generator = torch.arange(length, dtype=torch.float32)[None], torch.Generator().manual_seed(0)
                moved = positions.build(spec, trained)(row, torch.tensor([length]), generator)
                assert moved.k.shape == (1, length) and moved.k.isfinite().all(), method.name


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in UNPRINTED])
def test_published_values_are_of_methods(name):
    recipe = recipes.load(name)
    values = recipe.published.values
    assert bool(values) != (name in DRAWN) and set(values) <= {m.name for m in recipe.methods}
    assert name not in WARPING or {m.name for m in recipe.methods} - set(values) <= {"head-only", "tail-only"}
    for method, row in values.items():
        assert all(isinstance(v, float) and v > 0 for v in row.values())
        if recipe.kind == "answers":
            asked = {name for folder in recipe.scale("paper").questions.values() for name in folder.sets}
            assert set(row) <= {*asked, "mean"} or set(map(int, row)) == set(recipe.scale("paper").lengths)
        elif recipe.kind == "algorithms":
            assert set(row) <= set(recipe.scale("paper").algorithms) and max(row.values()) <= 100
        else:
            wanted = recipe.scale("paper").lengths[: 2 if method == "randomized-2x" else None]
            assert set(map(int, row)) == set(wanted)


def test_warping_is_the_papers():
    """Both experiments: 15 % of rows head-warped, 15 % tail-warped, rotary, interpolation at evaluation."""
    methods = {name: {m.name: m for m in recipes.load(name).methods} for name in WARPING}
    configs = {}
    for name in WARPING:
        for method in methods[name].values():
            if method.name.startswith("warping"):
                assert (method.rpe, method.positions_eval) == ("rope", "interpolate")
                config = positions.build(method.positions_train, 64).config
                assert (config.head, config.tail, config.length) == (0.15, 0.15, "row")
                configs[name, method.name] = (config.alpha, config.skew)
            elif not method.name.startswith("randomized") and not method.name.endswith("-only"):
                assert method.positions_train == "identity"
    sixth = positions.build("warp:alpha=1/6").config.alpha
    drawn = positions.build("warp:alpha=choice(0.4;0.5;0.6;0.7;0.8)").config.alpha
    assert configs == {
        ("warping-lm", "warping"): (sixth, "beta"),
        ("warping-algorithmic", "warping"): (drawn, "sqrt"),
        ("warping-algorithmic", "warping-beta"): (drawn, "beta"),
    }
    alphas = positions.build(methods["warping-algorithmic"]["warping"].positions_train).alphas
    assert alphas.tolist() == [0.4, 0.5, 0.6, 0.7, 0.8]
    assert positions.build(methods["warping-lm"]["warping"].positions_train).alphas.tolist() == pytest.approx([1 / 6])


def test_one_warp_alone_is_of_as_many_rows_as_both():
    methods = {m.name: m for name in ("warping-lm", "warping-lm-alpha") for m in recipes.load(name).methods}
    ratios = {"half": 2, "quarter": 4, "sixth": 6, "eighth": 8, "head-only": 6, "tail-only": None}
    for name, ratio in ratios.items():
        assert (methods[name].rpe, methods[name].positions_eval) == ("rope", "interpolate")
        made = positions.build(methods[name].positions_train, 512)
        assert (made.config.head, made.config.tail) == ((0.3, 0) if ratio else (0, 0.3))
        assert made.alphas.tolist() == pytest.approx([1 / ratio]) if ratio else made.config.skew == "beta"
    assert [m.name for m in recipes.load("warping-lm-alpha").methods] == ["half", "quarter", "sixth", "eighth"]


def test_table_b():
    values = recipes.load("warping-lm-alpha").published.values
    assert {name: list(row.values()) for name, row in values.items()} == {
        "half": [19.06, 21.65, 26.18, 26.22, 32.26],
        "quarter": [19.34, 18.36, 18.19, 19.34, 20.88],
        "sixth": [19.57, 18.59, 18.36, 18.79, 19.48],
        "eighth": [19.87, 18.93, 18.62, 18.83, 19.31],
    }
    assert recipes.load("warping-lm").published.values["randomized-2x"] == {"512": 19.83, "1024": 18.80}
    three = recipes.load("warping-algorithmic").published.values["randomized-3x"]
    assert three == {"copy": 26.8, "reverse": 39.3, "sort": 43.0}


def test_figure_3_copies_from_one_item_on_by_rope_and_alibi():
    for scale in ("laptop", "paper"):
        (spec,) = recipes.load("warping-copy").scale(scale).algorithms
        task = algorithms.build(f"{spec},train=300,test=400")
        assert (task.lengths("train"), task.lengths("test")) == (list(range(1, 11)), list(range(1, 21)))
        assert SIZES[recipes.load("warping-copy").scale(scale).arch].layers == 2
    table = {m.name: m for m in recipes.load("warping-copy").methods}
    assert table["rope"] == Method("rope", "rope") and table["alibi"] == Method("alibi", "alibi")


def test_the_small_scales_of_fires_models_show_their_subject():
    """A shorter training length, and a larger model at a lower learning rate, than fire-lm's at the same scale."""
    usual, short, large = (recipes.load(f"fire-lm{name}").scale("laptop") for name in ("", "-512", "-large"))
    assert (short.tokens * 4, max(short.lengths)) == (usual.tokens, 16 * short.tokens)
    assert SIZES[large.arch].layers > SIZES[usual.arch].layers and SIZES[large.arch].width > SIZES[usual.arch].width
    assert large.tokens == usual.tokens and large.lr < defaults_for(usual.arch, False).lr


def test_the_other_methods_are_the_papers():
    for name, times in (("warping-algorithmic", (10, 5, 3)), ("warping-lm", (16, 8, 2))):
        table = {m.name: m for m in recipes.load(name).methods}
        for method, warps in (("head-only", ("head=0.3", "tail=0,")), ("tail-only", ("head=0,", "tail=0.3"))):
            assert all(warp in f"{table[method].positions_train}," for warp in warps)
            assert (table[method].rpe, table[method].positions_eval) == ("rope", "interpolate")
        assert table["interpolation"] == Method("interpolation", "rope", positions_eval="interpolate")
        assert table["rope"] == Method("rope", "rope")
        assert table["alibi"] == Method("alibi", "alibi")
        for n in times:
            method = table[f"randomized-{n}x"]
            assert method.rpe == "rope" and method.positions_train == method.positions_eval
            transform = positions.build(method.positions_train, 100)
            assert (transform.max, transform.config.per) == (100 * n, "row")  # a draw for each example


@pytest.mark.parametrize(("name", "scale"), [one for one in SCALES if recipes.load(one[0]).kind != "answers"])
def test_scales_resolve(name, scale, tmp_path, monkeypatch):
    """Without the data: what is trained and evaluated, methods that differ in evaluation alone share a training."""
    monkeypatch.chdir(tmp_path)
    # the numbers of items follow from the examples, ten thousand of each task
    monkeypatch.setattr(algorithms.base.Algorithm, "lengths", lambda *_: [2, 3])
    recipe = recipes.load(name)
    settings = recipe.scale(scale)
    # the further training of a method is as long as the recipe says
    methods = [one for one in recipe.choose(settings.methods or ("all",)) if one.continues is None]
    lines = dry_run("--recipe", name, "--scale", scale, "--methods", " ".join(one.name for one in methods))
    lines = [line for line in lines if line[0] != "prepare-known"]
    trainings = [line for line in lines if line[0] == "train"]
    evaluations = [line for line in lines if line[0] in ("eval", "accuracy")]
    assert len(trainings) + len(evaluations) == len(lines)
    on_text = recipe.kind == "text"
    shared = {(m.rpe, m.positions_train) for m in (settings.settled(one, settings.tokens or 0) for one in methods)}
    data = [settings.data] if on_text else settings.algorithms
    wanted = sorted((one, *pair) for one in data for pair in shared)
    place = (lambda line: line[1]) if on_text else (lambda line: flag(line, "--algorithm"))
    assert wanted == sorted((place(line), flag(line, "--rpe"), flag(line, "--positions-train")) for line in trainings)
    assert len(evaluations) == len(methods) * (len(data) + len(settings.evaluate))
    assert name not in WARPING or len(trainings) < len(evaluations)
    for command in trainings:
        assert flag(command, "--save-dir").startswith(f"runs/{name}-{scale}/runs/")
        assert tuple(command[command.index("--") + 1 :]) == settings.extra if settings.extra else "--" not in command
        for key in ("updates", "arch", "tokens", "lr", "dropout", "schedule", "warmup", "blocks"):
            if (value := getattr(settings, key)) is not None:
                assert flag(command, f"--{key}") == str(value), key
    squeezed = [line for line in evaluations if "--positions" in line and flag(line, "--positions") == "interpolate"]
    wanted_squeezed = sum(m.positions_eval == "interpolate" for m in methods)
    assert len(squeezed) == wanted_squeezed * (len(data) + len(settings.evaluate))
    for command in evaluations if on_text else ():
        reach = 2 * settings.tokens if "randomized:times=2,per=row" in command else max(settings.lengths)
        expected = ",".join(str(n) for n in sorted({settings.tokens, *settings.lengths}) if n <= reach)
        assert flag(command, "--lengths") == expected
        assert command[2] in {settings.data, *settings.evaluate.values()}
    assert not list(tmp_path.iterdir())


def test_documents_that_are_not_marked_are_refused_before_training(corpus, tmp_path):
    data = with_documents(corpus, tmp_path)
    argv = [
        "--encodings",
        "alibi",
        "--out",
        tmp_path / "x",
        "--tokens",
        "32",
        "--blocks",
        "document",
        *DRY,
        "--lengths",
    ]
    assert len(dry_run(data, *argv, "64")) == 2
    assert "no document boundaries" in refused(corpus, *argv, "64")
    assert "longest document" in refused(data, *argv, "1500")
    plain = refused(data, *argv, "64", "--eval-data", f"plain={corpus}")
    assert f"{corpus}/test has no document boundaries" in plain


def test_the_command_line_wins_over_the_recipe(tmp_path):
    path = written(tmp_path, GOOD)
    given = ["--recipe", path, "--out", tmp_path / "x"]
    (train, measure) = dry_run(*given)
    assert (flag(train, "--updates"), flag(train, "--lr"), flag(train, "--seed")) == ("9", "0.01", "1")
    assert flag(train, "--algorithm") == "copy:test=50" and flag(train, "--rpe") == "rope"
    own = ["--methods", "all", "--algorithms", "reverse:test=400", "--updates", 7, "--lr", 0.5, "--lengths", "2,3"]
    lines = dry_run(*given, *own, "--seeds", 4)
    assert [line[0] for line in lines] == ["train", "accuracy"] * 2
    for line in lines[::2]:
        assert (flag(line, "--updates"), flag(line, "--lr"), flag(line, "--seed")) == ("7", "0.5", "4")
        assert flag(line, "--algorithm") == "reverse:test=400"
    assert [flag(line, "--rpe") for line in lines[::2]] == ["rope", "alibi"]
    assert all(flag(line, "--lengths") == "2,3" for line in lines[1::2])
    assert "--positions" not in measure and flag(lines[3], "--positions") == "offset:by=2"


# published values, as they are printed

EXTRAPOLATION = {  # each value at a length
    "extrapolation-wikitext103": "sinusoidal 9216 423.92, type1 512 24.25, inv_nlnn 9216 27.63",
    "extrapolation-books": "sinusoidal 512 7.49, sinusoidal 9216 34.70, alibi 1024 7.09, kerple_log 9216 7.01, "
    "kerple_power 6144 6.98, sandwich 2048 7.41, type1 3072 7.00, type2 768 7.22, inv_n 9216 26.34, inv_nlnn 512 7.35",
    "extrapolation-github": "sinusoidal 9216 143.17, alibi 512 2.25, kerple_log 6144 2.01, kerple_power 8192 2.03, "
    "sandwich 1536 2.12, type1 8192 2.02, type2 9216 2.03, inv_n 5120 15.79, inv_nlnn 9216 16.35",
    "extrapolation-wikibook": "sinusoidal 1280 65.13, alibi 9216 16.33, kerple_log 4096 16.14, kerple_power 512 17.62, "
    "sandwich 7168 16.71, type1 5120 16.21, type2 9216 16.33, inv_n 2048 23.31, inv_nlnn 8192 108.85",
}
LENGTHS = [512, 768, 1024, 1280, 1536, 1792, *range(2048, 9217, 1024)]


@pytest.mark.parametrize("name", EXTRAPOLATION)
def test_published_perplexities(name):
    values = recipes.load(name).published.values
    for method, length, value in map(str.split, EXTRAPOLATION[name].split(", ")):
        assert values[method][length] == float(value)
    kinds = {"sinusoidal", "alibi", "kerple_log", "kerple_power", "sandwich", "type1", "type2", "inv_n", "inv_nlnn"}
    assert set(values) == kinds and all([int(n) for n in row] == LENGTHS for row in values.values())


def test_the_other_corpora_are_changes_of_the_first():
    base = recipes.load("extrapolation-wikitext103")
    for name in ("books", "github", "wikibook"):
        recipe = recipes.load(f"extrapolation-{name}")
        assert recipe.methods == base.methods and recipe.title != base.title
        laptop = recipe.scale("laptop")
        assert laptop.data == f"data-bin/{name}" and laptop.arch == "tiny"
        assert laptop.tokens == min(LENGTHS) and set(laptop.lengths) <= set(LENGTHS)
        assert max(laptop.lengths) == max(LENGTHS) and set(laptop.methods) == set(recipe.published.values)
        for scale, own in (("paper", {"data": f"data-bin/{name}-gpt2", "arch": "base"}), ("desktop", {})):
            own = {"data": f"data-bin/{name}-4096", "corpus": name, **own}
            assert recipe.scale(scale) == replace(base.scale(scale), **own)
        assert recipe.published.settings.model.startswith("12 layers of width 768")
        assert name in recipe.published.source.lower()
        assert recipe.published.values["alibi"] != base.published.values["alibi"]


def test_fire_and_its_ablations():
    """Tables 3 to 7: each ablation is another network, and FIRE-S has its parameters once."""
    recipe = recipes.load("fire-lm")
    assert recipe.published.measure == "log_ppl" and recipe.published.form == ".3f"
    values = recipe.published.values
    assert values["fire"]["8192"] == 3.056 and values["fire-no-log"]["8192"] == 3.334 and values["rope"]["512"] == 3.178
    scale = recipe.scale("paper")
    assert set(values) == set(scale.methods)  # the others have no published values
    specs = {m.name: scale.settled(m, 2048).rpe for m in recipe.methods}
    methods = {name: encodings.build(spec, heads=12, width=768, length=2048) for name, spec in specs.items()}
    sizes = {name: sum(p.numel() for p in made.parameters()) for name, made in methods.items() if "fire" in name}
    counts = {"fire fire-gelu": 1518, "fire-no-threshold fire-fixed-threshold": 1517, "fire-no-log": 1516}
    counts |= {"fire-1-layer fire-output-relu": 462, "fire-linear": 26}
    assert sizes == {name: count for names, count in counts.items() for name in names.split()}
    shared = recipes.load("fire-lm-shared")
    assert shared.scale("paper") == replace(recipe.scale("paper"), rpe_share="model", methods=("fire",))
    assert shared.published.values["fire"]["2048"] == 3.10


SURVEY = {  # Table 3: of these encodings, at the training length and beyond it
    "survey-wikitext103-512": ((20.05, 43.54), (19.65, 18.79), (19.73, 18.73), (20.07, 21.37)),
    "survey-wikitext103-1024": ((19.34, 51.09), (18.8, 18.34), (18.66, 18.05), (19.33, 31.17)),
    "survey-openwebtext2": ((26, 14168), (22.6, 22.2), (22.8, 23.3), (23, 61)),
    "survey-arxiv": ((5.8, 1070), (5.16, 4.91), (5.25, 5.41), (5.25, 16.02)),
}


@pytest.mark.parametrize("name", SURVEY)
def test_the_surveys_table(name):
    recipe, methods = recipes.load(name), ("sinusoidal", "t5_bias", "alibi", "rope")
    found = {method: tuple(row.values()) for method, row in recipe.published.values.items()}
    assert found == dict(zip(methods, SURVEY[name], strict=True))
    assert tuple(m.name for m in recipe.methods) == methods and recipe.scale("paper").methods is None


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
    recipe = recipes.load("extend")
    for size, tokens in (("laptop", 64), ("desktop", 512), ("large", 2048)):
        scale = recipe.scale(size)
        assert (scale.tokens, scale.lengths) == (tokens, tuple(tokens * n for n in (1, 2, 4, 8, 16)))
        methods = {method.name: scale.settled(method, tokens) for method in recipe.methods}
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
    base, recipe = recipes.load("extend"), recipes.load(name)
    assert recipe.methods == base.methods and recipe.title != base.title
    for size, scale in recipe.scales.items():
        assert {"rope", "rope-longer", name.partition("-")[2]} < set(scale.methods)
        assert replace(scale, methods=None) == base.scale(size)


def test_an_encoding_for_evaluation_alone_shares_the_training(corpus, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "extend"\n[scales.laptop]\nlengths = [64, 128]\nmethods = ["rope", "yarn-untuned"]\n')
    lines = dry_run(corpus, "--recipe", path, "--out", tmp_path / "x")
    assert [line[0] for line in lines] == ["train", "eval", "eval"] and "--rpe" not in lines[1]
    assert flag(lines[2], "--rpe") == "rope:scaling=yarn,factor=4,original_length=64"


def test_a_recipe_may_share_parameters_and_the_command_line_wins(corpus, tmp_path):
    for given, share in (([], "model"), (["--rpe-share", "layer"], "layer")):
        train = dry_run(corpus, "--recipe", "fire-lm-shared", "--out", tmp_path / "x", *given)[0]
        assert flag(train, "--rpe-share") == share


# bases


def test_a_recipe_takes_over_what_it_does_not_say(tmp_path):
    written(tmp_path, GOOD).rename(tmp_path / "base.toml")
    scales = {"laptop": {"updates": 7}, "large": {"updates": 8, "algorithms": ["sort"]}}
    methods = {"second": {"positions_eval": "offset:by=3"}, "third": {"rpe": "nope"}}
    path = written(tmp_path, {"base": "base.toml", "title": "Mine", "scales": scales, "methods": methods})
    recipe = recipes.load(str(path))
    assert (recipe.name, recipe.title, recipe.paper, recipe.kind) == ("mine", "Mine", "A paper", "algorithms")
    assert recipe.scale("laptop") == Scale(algorithms=("copy:test=50",), updates=7, lr=0.01, methods=("first",))
    assert recipe.scale("large") == Scale(algorithms=("sort",), updates=8)
    assert [m.name for m in recipe.methods] == ["first", "second", "third"]
    assert recipe.methods[1] == Method("second", "alibi", "identity", "offset:by=3")
    assert recipe.published.record() == GOOD["published"]
    own = {"base": "base.toml", "published": {"source": "Table 1", "second": {"copy": 1.0}}}
    assert recipes.load(str(written(tmp_path, own))).published.record() == own["published"]


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("mine.toml", "is its own base"),
        ("none.toml", "none.toml does not exist"),
        ("warping-ml", "unknown recipe 'warping-ml' (did you mean 'warping-lm'?)"),
        (3, "base must be the name of a recipe, not 3"),
    ],
)
def test_a_base_that_cannot_be_used_is_refused(base, words, tmp_path):
    with raises(re.escape(words)):
        recipes.load(str(written(tmp_path, {"base": base})))


# malformed ones


def test_a_long_chain_of_bases_is_read(tmp_path):
    written(tmp_path, GOOD).rename(tmp_path / "r0.toml")
    for number in range(1, 1500):
        (tmp_path / f"r{number}.toml").write_text(f'base = "r{number - 1}.toml"\ntitle = "number {number}"\n')
    recipe = recipes.load(str(tmp_path / "r1499.toml"))
    assert recipe.title == "number 1499" and recipe.paper == GOOD["paper"]


def test_a_good_recipe_is_read(tmp_path):
    recipe = recipes.load(str(written(tmp_path, GOOD)))
    assert (recipe.name, recipe.kind) == ("mine", "algorithms")
    assert [m.name for m in recipe.choose(("all",))] == ["first", "second"]
    assert [m.name for m in recipe.choose(("second", "first"))] == ["second", "first"]
    assert recipe.methods[1] == Method("second", "alibi", "identity", "offset:by=2")
    assert recipe.published.values["first"] == {"copy": 12.5}
    assert recipes.load(str(written(tmp_path, changed("published")))).published is None


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (changed("titel", to="x"), "unknown key 'titel' (did you mean 'title'?)"),
        (changed("methods", "first", "positions_trian", to="x"), "method 'first' has an unknown key 'positions_trian'"),
        (changed("scales", "laptop", "update", to=3), "unknown key 'update' (did you mean 'updates'?)"),
        (changed("methods", "first", "rpe"), "method 'first' lacks rpe"),
        (changed("title"), "lacks title"),
        (changed("paper"), "lacks paper"),
        (changed("kind"), "lacks kind"),
        (changed("methods"), "lacks methods"),
        (changed("scales"), "lacks scales"),
        (changed("title", to=3), "title of the recipe must be text, not 3"),
        (changed("methods", to=["rope"]), "methods of the recipe must be a table"),
        (changed("methods", "first", to="rope"), "method 'first' is not a table"),
        (changed("methods", "first", "rpe", to=5), "rpe of method 'first' must be text, not 5"),
        (changed("scales", "laptop", "updates", to="many"), "updates of scale 'laptop' must be a whole number above 0"),
        (changed("scales", "laptop", "updates", to=True), "updates of scale 'laptop' must be a whole number above 0"),
        (changed("scales", "laptop", "algorithms", to="copy"), "algorithms of scale 'laptop' must be a list"),
        (changed("scales", "laptop", to=3), "scale 'laptop' is not a table"),
        (changed("kind", to="algorithm"), "kind of the recipe must be text or algorithms or answers, not 'algorithm'"),
        (changed("methods", to={}), "at least one method and one scale"),
        (changed("scales", to={}), "at least one method and one scale"),
        (changed("methods", "two words", to={"rpe": "rope"}), "method 'two words' has a blank or comma"),
        (changed("published", to="Table 9"), "published of the recipe must be a table"),
        (changed("scales", "laptop", "corpus", to="arxvi"), "unknown corpus 'arxvi' (did you mean 'arxiv'?)"),
    ],
)
def test_malformed_recipes_are_refused(recipe, words, tmp_path):
    assert words in recipe_error(written(tmp_path, recipe))


@pytest.mark.parametrize(
    ("published", "culprit"),
    [
        ({"first": {"copy": 12.5}}, "source"),
        ({"source": "Table 9", "first": 12.5}, "first"),
        ({"source": "Table 9", "first": {"copy": "much"}}, "first"),
        ({"source": "Table 9", "frist": {"copy": 12.5}}, "frist"),
        ({"source": "Table 9", "url": "javascript:x"}, "javascript:x"),
        ({"source": "Table 9", "url": 3}, "url"),
        ({"source": "Table 9", "settings": {"token": 512}}, "did you mean 'tokens'"),
        ({"source": "Table 9", "settings": {"updates": 0}}, "updates"),
        ({"source": "Table 9", "settings": 3}, "settings"),
        ({"source": "Table 9", "measure": "bits"}, "ppl or log_ppl or score, not 'bits'"),
    ],
)
def test_malformed_published_values_are_refused(published, culprit, tmp_path):
    """Now, and not by a traceback of the report when everything has been trained."""
    assert culprit in recipe_error(written(tmp_path, changed("published", to=published)))


OUT_OF_RANGE = {"methods": [[1]], "algorithms": [[3]], "extra": [[1]], "lengths": [["a"], [0]], "seeds": [[0], [1, 1]]}
OUT_OF_RANGE |= {"schedule": ["steps"], "betas": [[0.9], [0.9, 1.0]], "weight_decay": [-0.1], "vocabulary": [0]}
OUT_OF_RANGE |= {"activation_fn": ["tanh"], "share_embeddings": ["yes"], "compute_dtype": ["fp16"]}
OUT_OF_RANGE |= {"rpe_share": ["head"], "updates": [0], "batch_sentences": [-1], "update_freq": [0]}


@pytest.mark.parametrize("key", OUT_OF_RANGE)
def test_values_that_no_flag_would_take_are_refused(key, tmp_path):
    """A recipe's values are flags of ``sweep``: what its parser refuses is refused here, with the file's name."""
    for value in OUT_OF_RANGE[key]:
        path = written(tmp_path, changed("scales", "laptop", key, to=value))
        said = refused("--recipe", path, "--out", tmp_path / "x", *DRY)
        assert str(path) in said and key in said


def test_what_is_no_toml_file_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    for text in (b"title = ", b"[methods\n", b"a = 1\na = 2\n", b"\xff\xfe\x00", b"a = " + b"[" * 200_000):
        path.write_bytes(text)
        assert f"recipe {path} is not TOML" in recipe_error(path)
    (tmp_path / "a.toml").mkdir()
    (tmp_path / "b.toml").symlink_to("b.toml")
    for name, words in (("a", "is not a file"), ("b", "is not a file"), ("c", "does not exist")):
        assert f"{name}.toml {words}" in recipe_error(tmp_path / f"{name}.toml")


def test_names_and_flags_that_do_not_go_with_a_recipe(tmp_path):
    path, other = written(tmp_path, GOOD), tmp_path / "other"
    other.mkdir()
    scale = written(other, changed("scales", "laptop", "methods", to=["frist"]))
    own, plain = ["--recipe", path], ["--encodings", "rope", "--algorithms", "copy"]
    text = ["--recipe", "warping-lm"]
    for argv, words in (
        (["--recipe", "warping-ml"], "unknown recipe 'warping-ml' (did you mean 'warping-lm'?); known: "),
        ([*own, "--scale", "labtop"], "recipe 'mine' has no scale 'labtop' (did you mean 'laptop'?)"),
        ([*own, "--methods", "first secnd"], "recipe 'mine' has no method 'secnd' (did you mean 'second'?)"),
        ([*own, "--methods", "first secnd"], "or all"),
        ([*own, "--methods", "first first"], "names one twice"),
        (["--recipe", scale], "has no method 'frist' (did you mean 'first'?)"),
        ([*own, "--positions-train", "warp"], "do not go with --recipe"),
        ([*own, "--positions-eval", "warp"], "do not go with --recipe"),
        ([*plain, "--methods", "first"], "--methods belongs to --recipe"),
        ([*plain, "--scale", "laptop"], "--scale laptop is a size of a recipe"),
        ([*own, "--encodings", "rope"], "either --encodings"),
        (["--algorithms", "copy"], "either --encodings"),
        ([tmp_path, *own], "recipe 'mine' generates its data: drop"),
        ([*text, "--algorithms", "copy"], "recipe 'warping-lm' compares on text: drop --algorithms"),
        ([*own, "--algorithms", " "], "--algorithms is empty"),
    ):
        assert words in refused("--out", tmp_path / "x", *argv) and not (tmp_path / "x").exists()


def test_two_methods_that_are_the_same_are_refused(tmp_path):
    same = changed("methods", "second", to={"rpe": "rope:base=10000", "positions_train": "identity"})
    said = refused("--recipe", written(tmp_path, same), "--methods", "all", "--out", tmp_path / "x")
    assert "'first' and 'second' are the same encoding" in said
    assert not any((tmp_path / "x" / name).exists() for name in ("runs", "sweep.json"))


def test_misspelt_specs_of_a_recipe_are_refused_before_training(tmp_path):
    for key, value, words in (
        ("rpe", "roppe", "did you mean 'rope'"),
        ("rpe_eval", "roppe", "did you mean 'rope'"),
        ("positions_train", "wrap", "did you mean 'warp'"),
        ("positions_eval", "interpolate:ratio=3", "must be more than 0 and at most 1"),
    ):
        path = written(tmp_path, changed("methods", "first", key, to=value))
        for launcher in LAUNCHERS:
            said = refused("--recipe", path, "--out", tmp_path / "x", *launcher)
            assert words in said and "method 'first'" in said and not (tmp_path / "x" / "runs").exists()
